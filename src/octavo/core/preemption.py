"""Preempting requests: by swapping or by recomputing, and how they are rebuilt.

The paper compares the two in section 7.3: recomputing costs time in proportion to the tokens,
swapping in proportion to the blocks, and which is cheaper depends on the machine.

Samples and beams of one request have long prefixes in common. Recomputed one by one they would
hold each prefix several times, and might not even fit where they fitted before. They are therefore
rebuilt the way they were forked: one sequence leads, and the others fork off it where their tokens
differ from its tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.kv.manager import KVCacheManager
from octavo.core.prefix_node import first_difference
from octavo.core.sequence import Request, Sequence
from octavo.core.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

SMOOTHING = 0.2  # weight of the newest measurement


@dataclass(slots=True)
class PreemptionCosts:
    """Owns the measured costs. The defaults serve until the first measurements are in."""

    seconds_per_token: float = 1e-3  # of prompt computed
    seconds_per_block: float = 1e-4  # moved one way between the device and the swap tier

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens * self.seconds_per_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Out and back in."""
        return 2 * num_blocks * self.seconds_per_block

    def choose(self, held: Seq[Sequence], kv: KVCacheManager) -> str:
        """ "swap" or "recompute" for the sequences of a request, whichever costs less; every choice
        is logged. "swap" only if the swap tier has room.
        """
        num_blocks = kv.num_swap_in_blocks(held)
        # Shared tokens are recomputed once.
        num_tokens = kv.num_distinct_tokens(held) + len(held[0].request.encoder_token_ids)
        swap, recompute = self.swap_seconds(num_blocks), self.recompute_seconds(num_tokens)
        has_room = num_blocks <= kv.swap_pool.num_free
        mode = "swap" if has_room and swap < recompute else "recompute"
        logger.info(
            "preempting %s by %s: swapping %d blocks takes %.2f ms, recomputing %d tokens %.2f ms",
            held[0].request.request_id,
            mode,
            num_blocks,
            1e3 * swap,
            num_tokens,
            1e3 * recompute,
        )
        return mode

    def observe(self, plan: StepPlan, result: StepResult) -> None:
        """Learn from a step that computed prompts or moved blocks."""
        num_tokens = plan.num_tokens + plan.num_encoder_tokens if result.compute_seconds > 0 else 0
        # Decode steps say nothing about the cost of a prompt token.
        if num_tokens > 4 * len(plan.seq_ids):
            measured = result.compute_seconds / num_tokens
            self.seconds_per_token += SMOOTHING * (measured - self.seconds_per_token)
        num_moved = len(plan.swap_out) + len(plan.swap_in)
        if num_moved and result.swap_seconds > 0:
            measured = result.swap_seconds / num_moved
            self.seconds_per_block += SMOOTHING * (measured - self.seconds_per_block)


# -------------------------------------------------------------------- rebuilding what was shared


def num_common(a: Sequence, b: Sequence, known: int = 0) -> int:
    """The tokens after which `b` can fork off `a`: their common prefix, but for the last token of
    each, which must be computed. Both have the prompt, and the first `known` tokens, in common."""
    limit = min(a.num_tokens, b.num_tokens) - 1
    start = min(max(known, a.num_prompt_tokens), limit)
    return first_difference(a.token_ids, b.token_ids, start, limit)


def prepare_rebuild(request: Request) -> None:
    """Let the first sequence lead, and all others wait for it."""
    first, *others = request.sequences
    first.leader = None
    request.catching_up = bool(others)
    for seq in others:
        seq.leader = first
        seq.branch_at = num_common(first, seq)


def rebuild_goals(sequences: Seq[Sequence]) -> dict[Sequence, int]:
    """How many tokens of each sequence may be computed now: up to the next fork off it, or all but
    the last one, which waits until all sequences have caught up."""
    goals = {seq: seq.num_tokens - 1 for seq in sequences}
    for seq in sequences:
        if seq.leader is not None:
            goals[seq.leader] = min(goals[seq.leader], seq.branch_at)
    return goals


def is_leader(seq: Sequence, sequences: Seq[Sequence]) -> bool:
    """Whether another sequence is still to fork off this one."""
    return any(other.leader is seq for other in sequences)


def take_ready_forks(sequences: Seq[Sequence]) -> list[tuple[Sequence, Sequence]]:
    """(leader, follower) pairs whose follower forks off now. Followers that leave the same leader
    at the same token share what they can: one of them leads the others."""
    ready = []
    first_of: dict[tuple[Sequence, int, int], Sequence] = {}  # leader, place and next token
    for seq in sequences:
        leader, place = seq.leader, seq.branch_at
        if leader is None or leader.table is None or leader.num_computed_tokens < place:
            continue
        first = seq
        if seq.num_tokens - 1 > place:
            first = first_of.setdefault((leader, place, seq.token_ids[place]), seq)
        if first is seq:
            ready.append((leader, seq))
            seq.leader = None
        else:
            seq.leader = first
            seq.branch_at = num_common(first, seq, place + 1)
    return ready
