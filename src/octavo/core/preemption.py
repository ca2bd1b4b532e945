"""Swap or recompute: what it costs to take a request off the device and bring it back.

The paper compares the two in section 7.3: recomputing costs time in proportion to the tokens,
swapping in proportion to the blocks, and which is cheaper depends on the machine.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from octavo.core.kv.manager import KVCacheManager
from octavo.core.sequence import Sequence
from octavo.core.step import StepPlan, StepResult

logger = logging.getLogger(__name__)

SMOOTHING = 0.2  # weight of the newest measurement


@dataclass(slots=True)
class PreemptionCosts:
    """Measured costs. The defaults only serve until the first measurements are in."""

    seconds_per_token: float = 1e-3  # of prompt computed
    seconds_per_block: float = 1e-4  # moved one way between the device and the swap tier

    def recompute_seconds(self, num_tokens: int) -> float:
        return num_tokens * self.seconds_per_token

    def swap_seconds(self, num_blocks: int) -> float:
        """Out and back in."""
        return 2 * num_blocks * self.seconds_per_block

    def choose(self, held: Seq[Sequence], kv: KVCacheManager) -> str:
        """ "swap" or "recompute" for a gang, whichever costs less; every choice is logged.

        Swapping only if the swap tier has room.
        """
        num_blocks = kv.num_swap_in_blocks(held)
        # What several sequences share is recomputed once, so count slots rather than tokens.
        num_tokens = min(num_blocks * kv.block_size, sum(seq.num_computed_tokens for seq in held))
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
        num_tokens = plan.num_tokens if result.compute_seconds > 0 else 0
        # Steps of decodes say nothing about the price of a prompt's token.
        if num_tokens > 4 * len(plan.seq_ids):
            measured = result.compute_seconds / num_tokens
            self.seconds_per_token += SMOOTHING * (measured - self.seconds_per_token)
        num_moved = len(plan.swap_out) + len(plan.swap_in)
        if num_moved and result.swap_seconds > 0:
            measured = result.swap_seconds / num_moved
            self.seconds_per_block += SMOOTHING * (measured - self.seconds_per_block)
