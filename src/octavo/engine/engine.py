"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count

from octavo.config import EngineConfig
from octavo.core import prompt_reading
from octavo.core.decoding import PinPrefix
from octavo.core.kv.memory_policy import make_kv_cache_manager
from octavo.core.scheduler import Progress, Scheduler
from octavo.core.sequence import DecodingMethod, Request, Sequence
from octavo.core.step import PendingStep, SamplingSpec, StepPlan, StepResult, TokenLogprobs
from octavo.engine.garbage import collecting_later
from octavo.engine.results import (
    Beam,
    Embedding,
    Finished,
    NewTokens,
    PromptScores,
    StepResults,
    report_of,
)
from octavo.engine.step_timing import Pacer
from octavo.engine.validation import PreparedRequest, check_cache_salt
from octavo.errors import ConfigError, EngineClosed, EngineFailed, InvalidRequest, shown
from octavo.executor.base import Executor
from octavo.models.config import ModelConfig
from octavo.sampling_params import valid_text


class Engine:
    """Owns the scheduler; drives an executor. It deals in token ids alone: whatever is text is its
    clients' (`LocalClient` in this process, the server's `EngineClient` in another).

    A step is `schedule`, `submit`, `update`: the core decides, the executor computes, and the
    core takes in what was computed. With `overlap`, the core decides on the next step while the
    device still computes this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make an engine that is ready for requests.

        Args:
            config: the options.
            model_config: the model that the executor computes.
            executor: computes steps; says how much KV memory there is.
            clock: gives the times of requests, in seconds.

        Raises:
            ConfigError: the options contradict each other or what the memory allows.
        """
        capacity = executor.capacity
        self.config = config
        self.model_config = model_config
        self.clock = clock
        self.executor = executor
        self.kv = make_kv_cache_manager(
            config.cache,
            capacity.layout,
            capacity.num_blocks,
            capacity.num_swap_blocks,
            config.max_model_len or model_config.max_model_len,
        )
        self.max_model_len = self._decide_max_model_len()
        self.scheduler = Scheduler(config.scheduler, self.kv, clock)
        self._numbers = count()  # ids of requests that come without one
        self._pinning: set[str] = set()  # the names of prefixes that are being computed
        self._unread: set[str] = set()  # requests whose prompt reading was not reported yet
        self._failure: str | None = None
        self._is_closed = False
        overlap = executor.is_asynchronous if config.overlap is None else config.overlap
        self._depth = 2 if overlap else 1  # steps under way at once
        self._under_way: deque[tuple[StepPlan, PendingStep]] = deque()
        self._pacer = Pacer()
        # Called before a step is planned, as late as the device allows: a server adds and aborts
        # requests here, so that new ones need not wait for one step more.
        self.intake: Callable[[], object] | None = None
        self.observers: list[Callable[[StepPlan, StepResult, Progress], None]] = []

    # ---------------------------------------------------------------- requests

    def make_request(
        self,
        prepared: PreparedRequest,
        request_id: str | None = None,
        method: DecodingMethod | None = None,
    ) -> Request:
        """Make a request, without queueing it yet.

        Args:
            prepared: the request in token ids, as `RequestPreparer` has checked it.
            request_id: its name in all that is reported of it. None: a new one.
            method: how it is decoded. None: as `prepared` says, by sampling or beam search.

        Raises:
            InvalidRequest: the id is in use. RequestTooLong: the request can never fit.
            EngineFailed, EngineClosed: there is no engine any more.
        """
        self._check_alive()
        request = Request(
            self._name(request_id),
            prepared.prompt_token_ids,
            prepared.method() if method is None else method,
            prepared.sampling,
            prepared.seed,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
            tenant=prepared.tenant,
            encoder_token_ids=prepared.encoder_token_ids,
        )
        self.scheduler.limits.check(request)
        return request

    def add_request(
        self,
        request: Request,
        outputs: Mapping[int, list[int]] | None = None,
        arrival_time: float | None = None,
    ) -> None:
        """Queue a request, once.

        Args:
            request: from `make_request`.
            outputs: of a request that has begun in another engine: sample index -> its output
                tokens so far, for the samples that go on. Only what comes after them is reported.
            arrival_time: when it came, on the engine's clock. None: now.

        Raises:
            InvalidRequest: it was queued before, or has ended. RequestTooLong: it can no longer
                fit, beside prefixes that were pinned since.
            EngineFailed, EngineClosed: there is no engine any more.
        """
        self._check_alive()
        if request.request_id in self.scheduler.requests:
            raise InvalidRequest("request", f"{request.request_id!r} is queued already")
        if request.is_finished:
            raise InvalidRequest(
                "request", f"{request.request_id!r} has ended; make another request"
            )
        request.arrival_time = self.clock() if arrival_time is None else arrival_time
        self.scheduler.resume(request, outputs or {})
        if request.reading is not None:
            self._unread.add(request.request_id)

    def finish_sample(self, request_id: str, index: int, stop: str) -> bool:
        """End a sample whose text has come to the stop string `stop`; nothing happens if it has
        ended. True if that was the request's last: no `Finished` is reported of it then."""
        request = self.scheduler.requests.get(request_id)
        alive = [] if request is None else request.sequences
        seq = next((seq for seq in alive if seq.sample_index == index), None)
        ended = None if seq is None else self.scheduler.finish_by_stop_string(seq, stop)
        if ended is not None:
            self._forget(ended)
        return ended is not None

    def offer_tail(self, request_id: str, index: int) -> None:
        """Let prompts that go on where a running sample stands find its last block, too. Nothing
        happens if there is no such sample, or it has not drawn a token yet."""
        request = self.scheduler.requests.get(request_id)
        for seq in [] if request is None else request.sequences:
            if seq.sample_index == index:
                self.kv.offer_tail(seq)

    def abort_request(self, request_id: str) -> bool:
        """End a request at once; its blocks are free when this returns, and nothing more is
        reported of it. False if there is none of that name."""
        request = self.scheduler.abort(request_id)
        if request is None:
            return False
        self._forget(request)
        return True

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do: requests, or steps still under way."""
        return self.scheduler.has_unfinished or self.is_computing

    @property
    def is_computing(self) -> bool:
        """Whether a step is under way. It may compute requests that have ended since its plan."""
        return bool(self._under_way)

    # ---------------------------------------------------------------- the step

    def step(self) -> StepResults[TokenLogprobs]:
        """Complete one step of all running requests, and return its results.

        An error in it ends the engine: scheduler and worker may no longer agree on what runs. An
        interrupt is such an error, too (`LocalClient` keeps it out).
        """
        self._check_alive()
        try:
            while len(self._under_way) < self._depth:
                self._take_in()
                if not self._start_step():
                    break
            if not self._under_way:
                return StepResults.none()
            plan, pending = self._under_way.popleft()
            # Whether the device waits once it has the result, which decides on the next step (beam
            # search, the first tokens of samples): clients are told while it computes again.
            is_waiting = self._depth > 1 and not self._under_way
            with collecting_later(is_waiting):
                self._pacer.waits()
                result = pending.result()
                self._pacer.finished(plan, result)
                if is_waiting:
                    self._take_in()  # not later: what this ends must not be reported on any more
                progress = self.scheduler.update(plan, result)
                for observe in self.observers:
                    observe(plan, result, progress)
                if is_waiting:
                    self._start_step()
            return self._results(progress)
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise

    def _take_in(self) -> None:
        """Let the client add and abort requests."""
        if self.intake is not None:
            if self._under_way:
                self._pacer.linger()
            self.intake()

    def _start_step(self) -> bool:
        """Plan a step and start it. False if there is nothing to do."""
        began = self._pacer.began()
        plan = self.scheduler.schedule()
        if plan is None:
            return False
        self._under_way.append((plan, self.executor.submit(plan)))
        self._pacer.planned(plan, began, is_first=len(self._under_way) == 1)
        return True

    def close(self) -> None:
        """Free the executor's memory; the engine can do nothing from then on. A second call has no
        effect."""
        self._is_closed = True
        self.executor.shutdown()

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine was closed; start a new one")
        if self._failure is not None:
            raise EngineFailed(f"the engine has failed ({self._failure}); start a new one")

    # ---------------------------------------------------------------- what is reported

    def _results(self, progress: Progress) -> StepResults[TokenLogprobs]:
        """The progress of a step as the clients of its requests see it."""
        now = self.clock()
        sampled = []
        for seq in progress.advanced:  # by one token each
            request = seq.request
            if request.first_token_time is None:
                request.first_token_time = now
            if request.method.wants == "token":  # beams are known at the end of their search
                sampled.append(seq)
        tokens = NewTokens(
            [seq.request.request_id for seq in sampled],
            [seq.sample_index for seq in sampled],
            [seq.token_ids[-1:] for seq in sampled],
            [seq.finish_reason for seq in sampled],
            [seq.stop_reason for seq in sampled],
            [() if seq.last_logprobs is None else (seq.last_logprobs,) for seq in sampled],
        )
        embeddings: list[Embedding] = []
        results = StepResults([], tokens, [], embeddings)
        if self._unread:
            for seq in sampled:
                if seq.request.request_id in self._unread:
                    self._report_reading(seq.request, results, embeddings)
        for request in progress.finished:
            if request.first_token_time is None and any(
                seq.num_output_tokens for seq in request.finished
            ):
                request.first_token_time = now  # beams that ended with their first token
            if request.request_id in self._unread:  # it has no tokens
                self._report_reading(request, results, embeddings)
            beams = [_beam(seq) for seq in request.finished if request.method.wants == "candidates"]
            error = None if request.error is None else report_of(request.error)
            results.finished.append(Finished(request.request_id, beams, error))
            self._forget(request)
        return results

    def _report_reading(
        self,
        request: Request,
        results: StepResults[TokenLogprobs],
        embeddings: list[Embedding],
    ) -> None:
        """Report what was read of a request's prompt."""
        reading = request.reading
        if isinstance(reading, prompt_reading.PromptScores):
            scores = PromptScores(request.request_id, list(reading.entries))
            results.prompt_scores.append(scores)
        elif reading is not None and reading.total is not None:
            embeddings.append(Embedding(request.request_id, reading.total.tobytes()))
        self._unread.discard(request.request_id)

    def _forget(self, request: Request) -> None:
        """Forget a request that has ended, once everything about it was reported."""
        self._unread.discard(request.request_id)
        if isinstance(request.method, PinPrefix):
            self._pinning.discard(request.method.name)
        # A request and its sequences know each other. Parted, they go at once, not when the garbage
        # collector looks through everything, which would keep a step waiting.
        request.finished.clear()

    # ---------------------------------------------------------------- pinned prefixes

    def pin_prefix(self, name: str, token_ids: list[int], cache_salt: str = "") -> Request:
        """Queue a request that computes a prefix and pins its blocks (paper section 4.4, shared
        prefix). When it is finished, later prompts find the prefix.

        Args:
            name: for `unpin_prefix`.
            token_ids: whole blocks of them, as `RequestPreparer.whole_blocks` returns them.
            cache_salt: that of the prompts which are to find the prefix.

        Raises:
            InvalidRequest: the name is taken, or prefix caching is off. RequestTooLong: too few
                blocks would be left for other requests.
            EngineFailed, EngineClosed: there is no engine any more.
        """
        self._check_alive()
        valid_text("name", name)
        check_cache_salt(cache_salt)
        if not self.config.cache.enable_prefix_caching:
            raise InvalidRequest("prefix", "prefixes can be pinned only with prefix caching on")
        if name in self.kv.pins or name in self._pinning:
            raise InvalidRequest("name", f"a prefix {shown(name)} is pinned already")
        request = Request(
            self._name(None),
            token_ids,
            PinPrefix(name, len(token_ids)),
            SamplingSpec(temperature=0.0),
            cache_salt=cache_salt,
        )
        chunk = self.config.scheduler.max_num_batched_tokens
        longest = self.kv.num_blocks_for(self.max_model_len, chunk)
        self.scheduler.limits.check(request, leave=longest)
        self.add_request(request)
        self._pinning.add(name)
        return request

    def unpin_prefix(self, name: str) -> None:
        """Let a pinned prefix be evicted again, like any other cached block.

        Raises:
            InvalidRequest: there is none of that name.
            EngineFailed, EngineClosed: there is no engine any more.
        """
        self._check_alive()
        valid_text("name", name)
        if name not in self.kv.pins:
            number = len(self.kv.pins)
            raise InvalidRequest(
                "name", f"no prefix {shown(name)} is pinned; number of pinned prefixes: {number}"
            )
        self.kv.unpin(name)

    # ---------------------------------------------------------------- inside

    def _decide_max_model_len(self) -> int:
        """What was asked for or the model's own limit, but no more than the pool can hold beside
        the longest input of the model's encoder that a step can take."""
        budget = self.config.scheduler.max_num_batched_tokens
        limit = self.config.max_model_len or self.model_config.max_model_len
        num_encoder_tokens = self.model_config.longest_encoder_input(budget)
        beside = f" beside {num_encoder_tokens} of encoder input" * (num_encoder_tokens > 0)
        longest = self.kv.longest_sequence(limit, budget, num_encoder_tokens)
        if self.config.max_model_len is not None and longest < limit:
            raise ConfigError(
                "max_model_len",
                f"{limit} tokens{beside} do not fit into {self.kv.pool.num_blocks} KV blocks; "
                f"{longest} would",
            )
        if longest < 2:
            raise ConfigError(
                "num_blocks",
                f"{self.kv.pool.num_blocks} blocks hold no sequence of 2 tokens{beside}",
            )
        if not self.config.scheduler.enable_chunked_prefill and budget < longest:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{budget} is less than max_model_len ({longest}), and chunked prefill is off",
            )
        return longest

    def _name(self, request_id: str | None) -> str:
        """A request's id: the one asked for, or a new one."""
        known = self.scheduler.requests
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(name for name in names if name not in known)
        if valid_text("request_id", request_id) in known:
            raise InvalidRequest("request_id", f"{shown(request_id)} is in use")
        return request_id


def _beam(seq: Sequence) -> Beam:
    assert seq.finish_reason is not None, f"{seq} has not finished"
    return Beam(
        seq.sample_index,
        seq.output_token_ids,
        seq.finish_reason,
        seq.cumulative_logprob,
        seq.score,
    )
