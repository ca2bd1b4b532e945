"""Small worlds for tests of the core: managers, sequences and schedulers made in one line."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal
from unittest.mock import patch

from core.symbolic import SymbolicExecutor
from octavo.config import SchedulerConfig
from octavo.core.decoding import Sampling
from octavo.core.invariants import check_scheduler
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import FullAttention, KVSpec
from octavo.core.plan_builder import PlanBuilder
from octavo.core.scheduler import Progress, Scheduler
from octavo.core.sequence import DecodingMethod, Request, Sequence
from octavo.core.step import SamplingSpec, StepPlan, StepResult

BLOCK_SIZE = 4


def sampling(n: int, max_length: int) -> Sampling:
    """Nothing ends these samples but their length."""
    return Sampling(n, max_length, frozenset(), frozenset())


def make_manager(num_blocks: int = 20, **options: Any) -> KVCacheManager:
    specs: Seq[KVSpec] = options.pop("specs", [FullAttention()])
    return KVCacheManager(specs, BLOCK_SIZE, num_blocks, **options)


def make_sequence(seq_id: int, token_ids: list[int], cache_salt: str = "") -> Sequence:
    method = sampling(1, 1000)
    request = Request(f"r{seq_id}", list(token_ids), method, SamplingSpec(), cache_salt=cache_salt)
    seq = Sequence(seq_id, request, list(token_ids))
    request.sequences.append(seq)
    return seq


def compute(kv: KVCacheManager, seq: Sequence) -> None:
    """Give a sequence its blocks and declare all of its tokens computed."""
    changes = kv.allocate(seq, kv.lookup(seq), seq.num_tokens)
    assert changes is not None
    kv.release_sources(changes.held)
    seq.num_computed_tokens = seq.num_tokens
    kv.register(seq, seq.num_tokens)


class World:
    """A scheduler with a symbolic executor; every step is checked."""

    def __init__(
        self, num_blocks: int = 20, num_swap_blocks: int = 0, depth: int = 1, **options: Any
    ) -> None:
        specs = options.pop("specs", [FullAttention()])
        caching = options.pop("enable_prefix_caching", True)
        self.now = 0.0
        sizes = options.pop("block_sizes", [BLOCK_SIZE] * len(specs))
        self.kv = KVCacheManager(specs, sizes, num_blocks, num_swap_blocks, caching)
        options.setdefault("watermark", 0.0)
        options.setdefault("max_num_seqs", 8)
        options.setdefault("max_num_batched_tokens", 64)
        self.scheduler = Scheduler(SchedulerConfig(**options), self.kv, lambda: self.now)
        self.executor = SymbolicExecutor(tuple(specs), tuple(sizes))
        self.depth = depth
        self.under_way: deque[tuple[StepPlan, StepResult]] = deque()

    def add(
        self,
        name: str,
        num_prompt_tokens: int = 4,
        num_output_tokens: int = 4,
        n: int = 1,
        method: DecodingMethod | None = None,
        prompt: list[int] | None = None,
        order: tuple[float, ...] | None = None,
        **fields: Any,
    ) -> Request:
        """order: of the request, if it is not the policy's."""
        if prompt is None:
            prompt = [sum(name.encode()) % 7, *([3] * (num_prompt_tokens - 1))]
        if method is None:
            method = sampling(n, len(prompt) + num_output_tokens)
        fields.setdefault("sampling", SamplingSpec())
        request = Request(name, prompt, method, arrival_time=self.now, **fields)
        policy = self.scheduler.policy
        with nullcontext() if order is None else patch.object(policy, "order", lambda _: order):
            self.scheduler.add(request)
        return request

    def step(self) -> tuple[StepPlan, Progress]:
        while len(self.under_way) < self.depth:
            plan = self.scheduler.schedule()
            check_scheduler(self.scheduler)
            if plan is None:
                break
            self.under_way.append((plan, self.executor.execute(plan)))
        plan, result = self.under_way.popleft()
        progress = self.scheduler.update(plan, result)
        check_scheduler(self.scheduler)
        self.now += 1.0
        return plan, progress

    def run(self, max_steps: int = 1000) -> list[Request]:
        """To the end; the requests in the order in which they finished."""
        finished: list[Request] = []
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished:
                return finished
            finished += self.step()[1].finished
        raise AssertionError("no end in sight")

    def names(self, queue: str) -> list[str]:
        return [request.request_id for request in getattr(self.scheduler, queue)]


def preempt(world: World, request: Request, mode: Literal["swap", "recompute"]) -> None:
    """Take a request off the device in a step of its own."""
    scheduler = world.scheduler
    config = scheduler.config
    scheduler.config = replace(config, preemption_mode=mode)
    builder = PlanBuilder(0)
    scheduler._preempt(request, builder)
    scheduler.config = config
    plan = builder.build(scheduler._next_step, scheduler._lifecycle.take_row_changes())
    scheduler._next_step += 1
    world.executor.execute(plan)
