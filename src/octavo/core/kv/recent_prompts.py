"""Prompts hashed a moment ago, so that others which begin like them need not be hashed again."""

from __future__ import annotations

from collections.abc import Iterator

from octavo.core.prefix_node import TOKEN_BYTES, first_difference, same_prefix
from octavo.core.sequence import Sequence

MAX_RECENT = 8  # different beginnings in turn, such as system prompts


class RecentPrompts:
    """A few sequences with different prefix nodes, the one used last at the end.

    A sequence that leaves must be dropped: none is kept alive here.
    """

    def __init__(self, block_size: int) -> None:
        self._block_bytes = block_size * TOKEN_BYTES
        self._seqs: dict[Sequence, None] = {}

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    def add(self, seq: Sequence) -> None:
        """Add a sequence whose blocks were hashed; the one used longest ago makes room."""
        self.drop(seq)
        self._seqs[seq] = None
        if len(self._seqs) > MAX_RECENT:
            self.drop(next(iter(self._seqs)))

    def drop(self, seq: Sequence) -> None:
        """Called when a sequence leaves, whether or not it is one of these."""
        self._seqs.pop(seq, None)

    def extend(self, seq: Sequence, num_blocks: int) -> int:
        """Extend a sequence's chain of at least one node to at most `num_blocks` nodes, as far as
        another prompt has the same tokens. Returns how many nodes that adds.

        Each prompt is compared from where the chain ends, and only if the chain is its own, too,
        so that a token is compared about once, however many prompts begin alike.
        """
        nodes, num_before, used = seq.prefix_nodes, len(seq.prefix_nodes), None
        for other in reversed(self._seqs):
            start, theirs = len(nodes), other.prefix_nodes
            in_prompt = len(other.request.packed_prompt) // self._block_bytes
            end = min(num_blocks, len(theirs), in_prompt)
            if start < end and same_prefix(theirs[start - 1], nodes[-1]):
                ours, others = seq.request.packed_prompt, other.request.packed_prompt
                stop = first_difference(ours, others, start, end, self._block_bytes)
                if stop > start:
                    nodes += theirs[start:stop]
                    used = other
        if used is not None:
            self.add(used)
        return len(nodes) - num_before
