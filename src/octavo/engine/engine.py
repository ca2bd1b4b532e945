"""The engine: requests in, tokens and text out, one step at a time."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from octavo.config import EngineConfig
from octavo.core.decoding import BeamSearch, DecodingMethod, PinPrefix, Sampling
from octavo.core.kv_cache_manager import KVCacheManager
from octavo.core.scheduler import Progress, Scheduler
from octavo.core.sequence import Request
from octavo.core.step import PendingStep, SamplingSpec, StepPlan, StepResult
from octavo.engine.delivery import Delivery, Params
from octavo.engine.interrupts import InterruptsAfter
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, EngineFailed, InvalidRequest, RequestTooLong
from octavo.executor.base import Executor
from octavo.model_config import ModelConfig
from octavo.outputs import RequestOutput, StepOutput
from octavo.sampling_params import BeamSearchParams

Prompt = str | list[int]
Result = TypeVar("Result")


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
        self.kv = KVCacheManager(
            capacity.layout.specs,
            config.cache.block_size,
            capacity.num_blocks,
            capacity.num_swap_blocks,
            config.cache.enable_prefix_caching,
        )
        self.max_model_len = self._decide_max_model_len()
        self.scheduler = Scheduler(config.scheduler, self.kv, clock)
        self._eos_ids = frozenset(model_config.eos_token_ids)
        self._seeds = random.Random(config.seed)
        self._delivery = Delivery(tokenizer, self.scheduler, clock)
        self._next_id = 0
        self._failure: str | None = None
        overlap = executor.is_asynchronous if config.overlap is None else config.overlap
        self._depth = 2 if overlap else 1  # steps under way at once
        self._under_way: deque[tuple[StepPlan, PendingStep]] = deque()
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

        Raises InvalidRequest (RequestTooLong if it can never fit), which names the field.
        """
        token_ids = self._tokenize(prompt)
        params.check_against(self.model_config.vocab_size, self.config.max_logprobs)
        num_left = self.max_model_len - len(token_ids)
        if num_left < 1:
            raise RequestTooLong(
                "prompt",
                f"{len(token_ids)} tokens leave no room for output in a context of "
                f"{self.max_model_len} tokens",
            )
        max_tokens = num_left if params.max_tokens is None else min(params.max_tokens, num_left)
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        stop_ids = frozenset(params.stop_token_ids)
        method: DecodingMethod
        if isinstance(params, BeamSearchParams):
            method = BeamSearch(
                params.beam_width,
                len(token_ids) + max_tokens,
                eos_ids | stop_ids,
                params.length_penalty,
                params.early_stopping,
                params.num_return_sequences,
            )
            seed = 0
        else:
            method = Sampling(params.n, len(token_ids) + max_tokens, eos_ids, stop_ids)
            seed = self._seeds.getrandbits(62) if params.seed is None else params.seed
            if params.stop_strings and self.tokenizer is None:
                raise InvalidRequest("stop", "the model has no tokenizer to find strings with")
        request = self._new_request(
            token_ids,
            method,
            params.to_spec(sorted(self._eos_ids), self._bad_word_ids(params)),
            seed,
            request_id,
            priority,
            cache_salt,
        )
        text = prompt if isinstance(prompt, str) else None
        self._delivery.expect(request, text, params)
        return request

    def add_request(self, request: Request) -> None:
        """Queue a request that `make_request` has prepared."""
        self._check_alive()
        request.arrival_time = self.clock()
        self.scheduler.add(request)

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

        An error of the executor ends the engine: what the worker has done of the plan is unknown.
        """
        self._check_alive()
        with InterruptsAfter():
            while len(self._under_way) < self._depth:
                plan = self.scheduler.schedule()
                if plan is None:
                    break
                self._under_way.append((plan, self._guarded(plan, self.executor.submit, plan)))
            if not self._under_way:
                return StepOutput()
            plan, pending = self._under_way.popleft()
            result = self._guarded(plan, pending.result)
            progress = self.scheduler.update(plan, result)
            for observe in self.observers:
                observe(plan, result, progress)
            return self._delivery.report(progress)

    def _guarded(self, plan: StepPlan, action: Callable[..., Result], *args: StepPlan) -> Result:
        """Call the executor, and remember that the engine has failed if it fails."""
        try:
            return action(*args)
        except BaseException as error:
            self._failure = f"{type(error).__name__} in step {plan.step_id}: {error}"
            raise

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineFailed(f"the engine has failed ({self._failure}); start a new one")

    # ---------------------------------------------------------------- pinned prefixes

    def make_pin(self, name: str, prompt: Prompt, cache_salt: str = "") -> Request:
        """Prepare a request that computes a prefix and keeps its blocks for good (paper section
        4.4, shared prefix). When it is finished, later prompts find the prefix.

        Raises InvalidRequest if it is shorter than a block, or would leave too little room.
        """
        if not self.config.cache.enable_prefix_caching:
            raise InvalidRequest("prefix", "prefixes can be pinned only with prefix caching on")
        if name in self.kv.pins:
            raise InvalidRequest("name", f"a prefix {name!r} is pinned already")
        token_ids = self._tokenize(prompt)
        # Only whole blocks can be found by prefix.
        del token_ids[len(token_ids) // self.kv.block_size * self.kv.block_size :]
        if not token_ids:
            raise InvalidRequest(
                "prefix", f"it is shorter than one block of {self.kv.block_size} tokens"
            )
        self._check_pin_leaves_room(len(token_ids))
        request = self._new_request(
            token_ids, PinPrefix(name, len(token_ids)), SamplingSpec(), 0, None, 0, cache_salt
        )
        self._delivery.expect(request, None, None)
        return request

    def unpin_prefix(self, name: str) -> None:
        """Let a pinned prefix be evicted again, like any other cached block."""
        if name not in self.kv.pins:
            known = ", ".join(sorted(self.kv.pins)) or "none"
            raise InvalidRequest("name", f"no prefix {name!r} is pinned; pinned: {known}")
        self.kv.unpin(name)

    def _check_pin_leaves_room(self, num_tokens: int) -> None:
        chunk = self.config.scheduler.max_num_batched_tokens
        left = self.kv.pool.num_blocks - self.kv.num_pinned_blocks
        left -= self.kv.num_blocks_for(num_tokens, chunk)
        needed = max(
            [self.kv.num_blocks_for(self.max_model_len, chunk)]
            + [self.scheduler.worst_case_blocks(r) for r in self.scheduler.requests.values()]
        )
        if left < needed:
            raise RequestTooLong(
                "prefix",
                f"pinning {num_tokens} tokens would leave {left} KV blocks, but a request may "
                f"need {needed}; enlarge the KV cache or lower max_model_len",
            )

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

    def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt", "the model has no tokenizer; give token ids")
            token_ids = self.tokenizer.encode(prompt)
        else:
            token_ids = list(prompt)
        if not token_ids:
            raise InvalidRequest("prompt", "it is empty")
        for token_id in token_ids:
            if type(token_id) is not int:
                raise InvalidRequest("prompt", f"{token_id!r} is not a token id")
        vocab_size = self.model_config.vocab_size
        if min(token_ids) < 0 or max(token_ids) >= vocab_size:
            worst = min(token_ids) if min(token_ids) < 0 else max(token_ids)
            raise InvalidRequest(
                "prompt", f"token id {worst} is outside the vocabulary of {vocab_size}"
            )
        return token_ids

    def _bad_word_ids(self, params: Params) -> list[list[int]]:
        """Bad words as tokens: as a text may begin with them, and as they follow a space."""
        if isinstance(params, BeamSearchParams) or not params.bad_words:
            return []
        if self.tokenizer is None:
            raise InvalidRequest("bad_words", "the model has no tokenizer to encode them with")
        spellings = []
        for word in params.bad_words:
            for spelling in (word, " " + word.lstrip()):
                token_ids = self.tokenizer.encode(spelling, add_special_tokens=False)
                if token_ids and token_ids not in spellings:
                    spellings.append(token_ids)
        return spellings

    def _new_request(
        self,
        token_ids: list[int],
        method: DecodingMethod,
        sampling: SamplingSpec,
        seed: int,
        request_id: str | None,
        priority: int,
        cache_salt: str,
    ) -> Request:
        if request_id is None:
            request_id = f"request-{self._next_id}"
            self._next_id += 1
        if self._delivery.knows(request_id):
            raise InvalidRequest("request_id", f"{request_id!r} is in use")
        request = Request(
            request_id,
            token_ids,
            method,
            sampling,
            seed,
            priority=priority,
            cache_salt=cache_salt,
        )
        self.scheduler.check_fits(request)
        return request
