"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from itertools import count

from octavo.config import EngineConfig
from octavo.core.decoding import PinPrefix
from octavo.core.kv.memory_policy import make_kv_cache_manager
from octavo.core.scheduler import Progress, Scheduler
from octavo.core.sequence import Request
from octavo.core.step import PendingStep, SamplingSpec, StepPlan, StepResult
from octavo.engine.delivery import Delivery
from octavo.engine.garbage import collecting_later
from octavo.engine.interrupts import InterruptsAfter
from octavo.engine.step_timing import Pacer
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import (
    Params,
    PreparedRequest,
    Prompt,
    RequestPreparer,
    check_cache_salt,
)
from octavo.errors import ConfigError, EngineClosed, EngineFailed, InvalidRequest, shown
from octavo.executor.base import Executor
from octavo.models.config import ModelConfig
from octavo.outputs import RequestOutput, StepOutput
from octavo.sampling_params import valid_text


class Engine:
    """Owns the scheduler and the tokenizer; drives an executor.

    A step is `schedule`, `submit`, `update`: the core decides, the executor computes, and the
    core takes in what was computed. With `overlap`, the core decides on the next step while the
    device still computes this one.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        executor: Executor,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError if the options contradict each other or what the memory allows."""
        capacity = executor.capacity
        self.config = config
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.clock = clock
        self.executor = executor
        self.kv = make_kv_cache_manager(
            config.cache,
            capacity.layout.specs,
            capacity.num_blocks,
            capacity.num_swap_blocks,
            config.max_model_len or model_config.max_model_len,
        )
        self.max_model_len = self._decide_max_model_len()
        self.scheduler = Scheduler(config.scheduler, self.kv, clock)
        self._preparer = RequestPreparer(model_config, tokenizer, config.max_logprobs, config.seed)
        self._delivery = Delivery(tokenizer, self.scheduler, clock)
        self._numbers = count()  # of requests that come without an id
        self._pinning: dict[str, str] = {}  # prefixes being computed -> ids of their requests
        self._failure: str | None = None
        self._is_closed = False
        overlap = executor.is_asynchronous if config.overlap is None else config.overlap
        self._depth = 2 if overlap else 1  # steps under way at once
        self._under_way: deque[tuple[StepPlan, PendingStep]] = deque()
        self._pacer = Pacer()
        # Called before a step is planned, as late as the device allows: whoever serves clients adds
        # and aborts requests here, and newcomers need not wait for one step more.
        self.intake: Callable[[], object] | None = None
        self.observers: list[Callable[[StepPlan, StepResult, Progress], None]] = []

    # ---------------------------------------------------------------- requests

    def make_request(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> Request:
        """Check a request and prepare it, without queueing it yet.

        Raises InvalidRequest (RequestTooLong if it can never fit), which names the field;
        EngineFailed or EngineClosed if there is no engine to run it.
        """
        self._check_alive()
        prepared = self._preparer.prepare(prompt, params, self.max_model_len, priority, cache_salt)
        request = self._new_request(prepared, request_id)
        text = prompt if isinstance(prompt, str) else None
        self._delivery.expect(request, text, params)
        return request

    def accept(self, prepared: PreparedRequest, request_id: str) -> Request:
        """Make a request that was checked elsewhere; its results come as token ids alone.

        Raises InvalidRequest if the id is in use or a token id is none of the model's,
        RequestTooLong if it can never fit.
        """
        prepared.check_vocabulary(self.model_config.vocab_size)
        request = self._new_request(prepared, request_id)
        self._delivery.expect(request, None, None)
        return request

    def add_request(self, request: Request) -> None:
        """Queue a request that `make_request` has prepared, once.

        Raises InvalidRequest if it was queued before, or discarded.
        """
        self._check_alive()
        if request.request_id in self.scheduler.requests:
            raise InvalidRequest("request", f"{request.request_id!r} is queued already")
        if not self._delivery.knows(request.request_id):
            raise InvalidRequest(
                "request", f"{request.request_id!r} has ended or was discarded; prepare a new one"
            )
        request.arrival_time = self.clock()
        self.scheduler.add(request)

    def resume_request(
        self, request: Request, outputs: Mapping[int, list[int]], arrival_time: float
    ) -> None:
        """Queue a request that another engine had accepted at `arrival_time`.

        `outputs`: sample index -> its output tokens so far, for the samples that go on; empty if
        none has begun. Only what comes after them is delivered.
        """
        self._check_alive()
        request.arrival_time = arrival_time
        self.scheduler.resume(request, outputs)
        self._delivery.resume(request)

    def finish_sample(self, request_id: str, index: int, stop: str) -> RequestOutput | None:
        """End a sample whose text was found to have come to a stop string; nothing happens if it
        has ended. Returns the whole output if it was the request's last."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            return None
        for seq in [seq for seq in request.sequences if seq.sample_index == index]:
            self.scheduler.finish_by_stop_string(seq, stop)
        return self._delivery.conclude(request) if request.is_finished else None

    def discard_request(self, request: Request) -> None:
        """Forget a request that was prepared and will not be queued."""
        self._delivery.forget(request)

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request at once; its blocks are free when this returns. None if it is unknown."""
        request = self.scheduler.abort(request_id)
        return None if request is None else self._delivery.conclude(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do: requests, or steps still under way."""
        return self.scheduler.has_unfinished or bool(self._under_way)

    # ---------------------------------------------------------------- the step

    def step(self) -> StepOutput:
        """Bring one step for all that run to its end. Ctrl-C takes effect when it is over.

        An error in it ends the engine: scheduler and worker may no longer agree on what runs.
        """
        self._check_alive()
        with InterruptsAfter():
            try:
                return self._step()
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                raise

    def _step(self) -> StepOutput:
        while len(self._under_way) < self._depth:
            self._take_in()
            if not self._start_step():
                break
        if not self._under_way:
            return StepOutput()
        plan, pending = self._under_way.popleft()
        # Whether the device waits once it has the result, which decides on the next step (beam
        # search, the first tokens of samples): clients are told while it computes again.
        is_waiting = self._depth > 1 and not self._under_way
        with collecting_later(is_waiting):
            self._pacer.waits()
            result = pending.result()
            self._pacer.finished(plan, result)
            if is_waiting:
                self._take_in()  # not later: whom this ends must not be reported on any more
            progress = self.scheduler.update(plan, result)
            for observe in self.observers:
                observe(plan, result, progress)
            if is_waiting:
                self._start_step()
        return self._delivery.report(progress)

    def _take_in(self) -> None:
        """Let requests come and go."""
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
        """Give the executor's memory back; nothing can be asked for any more. A second call does
        nothing."""
        self._is_closed = True
        self.executor.shutdown()

    def _check_alive(self) -> None:
        if self._is_closed:
            raise EngineClosed("the engine was closed; start a new one")
        if self._failure is not None:
            raise EngineFailed(f"the engine has failed ({self._failure}); start a new one")

    # ---------------------------------------------------------------- pinned prefixes

    def make_pin(self, name: str, prompt: Prompt, cache_salt: str = "") -> Request:
        """Prepare a request that computes a prefix and keeps its blocks for good (paper section
        4.4, shared prefix). When it is finished, later prompts find the prefix.

        Raises InvalidRequest if it is shorter than a block, would leave too little room, or has a
        name that is taken.
        """
        self._check_alive()
        valid_text("name", name)
        check_cache_salt(cache_salt)
        if not self.config.cache.enable_prefix_caching:
            raise InvalidRequest("prefix", "prefixes can be pinned only with prefix caching on")
        self._pinning = {n: r for n, r in self._pinning.items() if self._delivery.knows(r)}
        if name in self.kv.pins or name in self._pinning:
            raise InvalidRequest("name", f"a prefix {shown(name)} is pinned already")
        token_ids = self._preparer.whole_blocks(prompt, self.max_model_len, self.kv.block_size)
        method = PinPrefix(name, len(token_ids))
        request = Request(
            self._name(None),
            token_ids,
            method,
            SamplingSpec(temperature=0.0),
            cache_salt=cache_salt,
        )
        chunk = self.config.scheduler.max_num_batched_tokens
        longest = self.kv.num_blocks_for(self.max_model_len, chunk)
        self.scheduler.limits.check(request, leave=longest)
        self._delivery.expect(request, None, None)
        self._pinning[name] = request.request_id
        return request

    def unpin_prefix(self, name: str) -> None:
        """Let a pinned prefix be evicted again, like any other cached block.

        Raises InvalidRequest if there is none of that name.
        """
        self._check_alive()
        valid_text("name", name)
        if name not in self.kv.pins:
            known = ", ".join(sorted(self.kv.pins)) or "none"
            raise InvalidRequest("name", f"no prefix {shown(name)} is pinned; pinned: {known}")
        self.kv.unpin(name)

    # ---------------------------------------------------------------- inside

    def _decide_max_model_len(self) -> int:
        """What was asked for or the model's own limit, but no more than the pool can hold."""
        chunk = self.config.scheduler.max_num_batched_tokens
        limit = self.config.max_model_len or self.model_config.max_model_len
        longest = self.kv.longest_sequence(limit, chunk)
        if self.config.max_model_len is not None and longest < limit:
            raise ConfigError(
                "max_model_len",
                f"{limit} tokens do not fit into {self.kv.pool.num_blocks} KV blocks; "
                f"{longest} would",
            )
        if longest < 2:
            raise ConfigError(
                "num_blocks", f"{self.kv.pool.num_blocks} blocks hold no sequence of 2 tokens"
            )
        budget = self.config.scheduler.max_num_batched_tokens
        if not self.config.scheduler.enable_chunked_prefill and budget < longest:
            raise ConfigError(
                "max_num_batched_tokens",
                f"{budget} is less than max_model_len ({longest}), and chunked prefill is off",
            )
        return longest

    def _new_request(self, prepared: PreparedRequest, request_id: str | None) -> Request:
        request = Request(
            self._name(request_id),
            prepared.prompt_token_ids,
            prepared.method(),
            prepared.sampling,
            prepared.seed,
            priority=prepared.priority,
            cache_salt=prepared.cache_salt,
        )
        self.scheduler.limits.check(request)
        return request

    def _name(self, request_id: str | None) -> str:
        """A request's id: the one asked for, or a new one."""
        if request_id is None:
            names = (f"request-{number}" for number in self._numbers)
            return next(name for name in names if not self._delivery.knows(name))
        if self._delivery.knows(valid_text("request_id", request_id)):
            raise InvalidRequest("request_id", f"{shown(request_id)} is in use")
        return request_id
