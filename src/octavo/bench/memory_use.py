"""Where the KV cache's slots go, step by step (paper figures 2 and 15).

Measured while a step computes: after its blocks were allocated, before those of finished requests
are freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

from octavo.core.step import PendingStep, StepPlan
from octavo.executor.base import Executor, KVCapacity

if TYPE_CHECKING:
    from octavo.core.scheduler import Scheduler
    from octavo.core.sequence import Sequence as LiveSequence
    from octavo.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class SlotUse:
    """What the pool's slots hold: the four parts of figure 2. A shared block counts once.

    With paged memory all reservation and internal fragmentation lies in the last block of each
    sequence, and any request can use a free block: it is "external" only because it is not used.
    """

    token_states: float  # KV of tokens
    reservation: float  # slots that their sequence will still fill
    internal: float  # slots in a held block that will never be filled
    # Free blocks, sources of copies that are still under way, and what memory policies other than
    # paged lose by rounding reservations up.
    external: float

    @property
    def total(self) -> float:
        return self.held + self.external

    @property
    def held(self) -> float:
        """Slots in blocks that belong to running requests."""
        return self.token_states + self.reservation + self.internal

    @property
    def waste_of_held(self) -> float:
        """Share of the running requests' slots that holds no token."""
        return 1 - self.token_states / self.held if self.held else 0.0

    @property
    def waste_of_pool(self) -> float:
        """Share of all slots that holds no token: the paper's measure."""
        return 1 - self.token_states / self.total if self.total else 0.0


class Tail(NamedTuple):
    """The last block of one sequence's table."""

    block_id: int
    unfilled: int  # slots without KV
    to_come: int  # tokens whose KV the sequence will still store, in this block or beyond
    rounding: int = 0  # of the unfilled: slots beyond what a memory policy wanted to reserve


@dataclass(frozen=True, slots=True)
class StepMemory:
    """One step."""

    slots: SlotUse
    is_saturated: bool  # requests wait, or are swapped out
    num_requests: int  # that run
    num_seqs: int  # computed in this step
    num_tokens: int
    num_logical_blocks: int  # entries in block tables
    num_physical_blocks: int  # the blocks behind them


def slot_use(tails: Iterable[Tail], num_held: int, num_blocks: int, block_size: int) -> SlotUse:
    """Divide a pool's slots, `num_held` of whose blocks belong to sequences.

    Slots without KV are in the last block, or, reserved ahead, in the last ones; a tail that
    several sequences share counts once.
    """
    distinct: dict[int, tuple[int, int, int]] = {}
    for tail in tails:
        reserved = max(0, min(tail.unfilled, tail.to_come))
        # If a block is shared, the sequence that will use most of it decides.
        distinct[tail.block_id] = max(
            distinct.get(tail.block_id, (0, 0, 0)), (reserved, tail.unfilled, tail.rounding)
        )
    unfilled = sum(each[1] for each in distinct.values())
    reserved = sum(each[0] for each in distinct.values())
    rounding = sum(each[2] for each in distinct.values())
    return SlotUse(
        token_states=num_held * block_size - unfilled,
        reservation=reserved,
        internal=unfilled - reserved - rounding,
        external=(num_blocks - num_held) * block_size + rounding,
    )


class MemoryUse:
    """Owns a record of each step of one engine. Stands between the engine and its executor."""

    def __init__(self, engine: Engine) -> None:
        self.steps: list[StepMemory] = []
        self.peak_blocks = 0
        self._engine = engine
        self._executor: Executor = engine.executor

    @classmethod
    def watch(cls, engine: Engine) -> MemoryUse:
        """Record every step of `engine` from now on."""
        watcher = cls(engine)
        engine.executor = watcher
        return watcher

    def unwatch(self) -> None:
        """Stop recording."""
        self._engine.executor = self._executor

    @property
    def capacity(self) -> KVCapacity:
        return self._executor.capacity

    @property
    def is_asynchronous(self) -> bool:
        return self._executor.is_asynchronous

    def submit(self, plan: StepPlan) -> PendingStep:
        self.steps.append(self._look(plan))
        return self._executor.submit(plan)

    def check(self) -> None:
        self._executor.check()

    def shutdown(self) -> None:
        self._executor.shutdown()

    def _look(self, plan: StepPlan) -> StepMemory:
        scheduler, kv = self._engine.scheduler, self._engine.kv
        self.peak_blocks = max(self.peak_blocks, kv.pool.num_held)
        num_held = kv.num_table_blocks
        tails: list[Tail] = []
        num_logical = 0
        for seq in [*_running(scheduler), *kv.pins.values()]:
            if seq.table is None:
                continue
            num_computed = seq.num_computed_tokens
            # The KV of a sequence's very last token is never computed.
            to_come = seq.request.method.max_length - 1 - num_computed
            rounding = kv.num_rounding_slots(seq.request)
            for ids, num_dropped, size in zip(
                seq.table.block_ids, seq.table.num_dropped, kv.block_sizes, strict=True
            ):
                num_logical += len(ids) - num_dropped
                if ids:
                    # A slot of a group with shorter blocks takes the room of several tokens here.
                    unfilled = (len(ids) * size - num_computed) * kv.block_size // size
                    tails.append(Tail(ids[-1], unfilled, to_come, rounding))
            num_encoder_tokens = len(seq.request.encoder_token_ids)
            for ids, size in zip(seq.table.encoder_ids, kv.encoder_block_sizes, strict=True):
                num_logical += len(ids)
                unfilled = (len(ids) * size - num_encoder_tokens) * kv.block_size // size
                tails.append(Tail(ids[-1], unfilled, to_come=0))
        slots = slot_use(tails, num_held, kv.pool.num_blocks, kv.block_size)
        is_saturated = bool(scheduler.waiting or scheduler.swapped)
        return StepMemory(
            slots,
            is_saturated,
            len(scheduler.running),
            len(plan.seq_ids),
            plan.num_tokens,
            num_logical,
            num_held,
        )


def mean_slots(steps: Sequence[StepMemory]) -> SlotUse | None:
    """The mean over steps, as in figure 2. None without steps."""
    if not steps:
        return None
    sums = (sum(parts) for parts in zip(*(astuple(step.slots) for step in steps), strict=True))
    return SlotUse(*(part / len(steps) for part in sums))


def sharing_saves(steps: Sequence[StepMemory]) -> float:
    """Share of blocks that sharing saves: 1 - 1 / mean(logical / physical), as in figure 15."""
    ratios = [
        step.num_logical_blocks / step.num_physical_blocks
        for step in steps
        if step.num_physical_blocks
    ]
    return 1 - len(ratios) / sum(ratios) if ratios else 0.0


def _running(scheduler: Scheduler) -> Iterator[LiveSequence]:
    for request in scheduler.running:
        yield from request.sequences
