"""What happened to blocks and requests in a step: counters for metrics, and events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Counters:
    """Totals since the engine process started."""

    num_steps: int = 0
    step_seconds: float = 0.0  # time in which the executor computed or moved blocks
    predicted_seconds: float = 0.0  # the same by a cost model; 0 where there is none
    num_computed_tokens: int = 0  # prompts, recomputed tokens and decodes
    num_output_tokens: int = 0
    num_lookup_tokens: int = 0  # looked up in the prefix cache
    num_hit_tokens: int = 0  # found there
    num_swap_preemptions: int = 0
    num_recompute_preemptions: int = 0
    num_copied_blocks: int = 0  # copy-on-write, and hits that end inside a block
    num_evicted_blocks: int = 0  # cached blocks that were overwritten
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_hit_experts: int = 0  # computed in some step, added up over layers and steps
    # The same, as expected if a router chose every expert with equal probability.
    num_expected_experts: float = 0.0


class Gauges(NamedTuple):
    """The engine's state after a step."""

    num_running: int = 0  # requests
    num_waiting: int = 0
    num_swapped: int = 0
    num_running_seqs: int = 0
    num_free_blocks: int = 0  # cached ones included
    num_free_cached_blocks: int = 0
    num_free_swap_blocks: int = 0
    num_pinned_prefixes: int = 0
    step_tokens: int = 0  # computed in this step; 0 in a report without one
    step_seqs: int = 0


@dataclass(frozen=True, slots=True)
class Admitted:
    """A request got its first blocks. Sent for every request, with or without subscribers.

    `lookup_end` says why the prefix cache gave no more than `num_hit_tokens`:
    "complete": all of the prompt but the token that must be computed; "unknown": the next block has
    never been computed; "evicted": it has been, and was overwritten; "differs": the next block is
    cached for other tokens, or fewer, and was copied as far as they are equal; "window": it is
    cached, but blocks that a sliding window needs are gone; "read": what follows has to be
    computed, because its hidden states are read; "avoided": nothing is looked up, since what was
    found before may have made the request fail; "off": there is no prefix cache.
    """

    time: float
    request_id: str
    num_tokens: int  # looked up: the prompt, and what was computed before a preemption or a crash
    num_hit_tokens: int
    num_cached_tokens: int  # of them, those of the prompt: with an encoder, of its input alone
    lookup_end: str
    num_free_blocks: int  # after it got its blocks
    num_preemptions: int  # 0: it runs for the first time


@dataclass(frozen=True, slots=True)
class Preempted:
    """A request was taken off the device, with all its sequences. Always sent."""

    time: float
    request_id: str
    mode: str  # "swap" or "recompute"
    num_blocks: int  # moved to the swap tier; 0 for recompute
    num_tokens: int  # to be computed again; 0 for swap
    cost_seconds: float  # measured cost of resuming the request; swap: both directions


@dataclass(frozen=True, slots=True)
class Copied:
    """Blocks copied before they were written (copy-on-write). Sent only to subscribers."""

    time: float
    blocks: list[tuple[int, int]]  # source, destination


@dataclass(frozen=True, slots=True)
class Evicted:
    """Cached blocks that no request held were evicted. Sent only to subscribers."""

    time: float
    block_ids: list[int]


@dataclass(frozen=True, slots=True)
class Swapped:
    """Blocks moved between the tiers, (source, destination). Sent only to subscribers."""

    time: float
    direction: str  # "out" of the device or back "in"
    blocks: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Forked:
    """Sequences forked from others, whose blocks they share. Sent only to subscribers."""

    time: float
    pairs: list[tuple[int, int]]  # ids of parent and child


class BlockEvents(NamedTuple):
    """What happened to single blocks in one step."""

    forked: list[Forked]
    swapped: list[Swapped]
    evicted: list[Evicted]
    copied: list[Copied]

    @classmethod
    def none(cls) -> BlockEvents:
        return cls([], [], [], [])

    def in_order(self) -> list[Forked | Swapped | Evicted | Copied]:
        """All of them as they happened."""
        return [*self.forked, *self.swapped, *self.evicted, *self.copied]


Event = Admitted | Preempted | Copied | Evicted | Swapped | Forked
