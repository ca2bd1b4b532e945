"""Which tokens' KV a layer keeps, and how layers that keep the same form groups.

A group of layers shares one block table. All groups share one pool of blocks of equal size in
bytes, so each holds the same number of layers (the last may be padded). CrossAttention (the
encoder's length, fixed at admission) takes its place here with the encoder-decoder models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class KVSpec(Protocol):
    """Which tokens a layer's queries read. Layers of equal specs share block tables, so a spec is
    hashable and compared by its value."""

    def first_needed_token(self, position: int) -> int:
        """The first token that the query at `position` reads; it never shrinks as positions grow.
        Blocks that are wholly before it are freed."""

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any moment, if at most `chunk`
        of them are computed in one step."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every earlier token is attended to, so every block is kept."""

    def first_needed_token(self, position: int) -> int:
        """The first token that the query at `position` reads."""
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any moment."""
        return math.ceil(num_tokens / block_size)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The query at p reads tokens p - window + 1 .. p; blocks wholly before are returned."""

    window: int

    def first_needed_token(self, position: int) -> int:
        """The first token that the query at `position` reads."""
        return max(0, position - self.window + 1)

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any moment.

        While a chunk of `chunk` tokens is computed, `window - 1 + chunk` tokens are held; they
        straddle one block more than they fill.
        """
        held = min(num_tokens, self.window - 1 + chunk)
        return min(math.ceil(num_tokens / block_size), math.ceil(held / block_size) + 1)


def first_needed_block(spec: KVSpec, block_size: int, num_computed_tokens: int) -> int:
    """The first block that queries at `num_computed_tokens` and later still read."""
    return spec.first_needed_token(num_computed_tokens) // block_size


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table; at most `KVLayout.layers_per_group` of them."""

    spec: KVSpec
    layer_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a model's layers are laid out in the blocks of one pool."""

    groups: tuple[KVGroup, ...]

    @property
    def layers_per_group(self) -> int:
        return max(len(group.layer_ids) for group in self.groups)

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        return tuple(group.spec for group in self.groups)

    def places(self) -> dict[int, tuple[int, int]]:
        """layer id -> (group, index inside the group)."""
        return {
            layer_id: (number, index)
            for number, group in enumerate(self.groups)
            for index, layer_id in enumerate(group.layer_ids)
        }


def group_layers(specs: Sequence[KVSpec]) -> KVLayout:
    """Form groups of equal size from the layers' specs, `specs[i]` being layer i's.

    Layers of the rarest spec set the group size; a spec with more layers takes several groups,
    so a model with 5 sliding layers for each full one pads at most one group per spec.
    """
    by_spec: dict[KVSpec, list[int]] = {}
    for layer_id, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer_id)
    size = min(len(layer_ids) for layer_ids in by_spec.values())
    groups = []
    for spec, layer_ids in by_spec.items():
        num_groups = math.ceil(len(layer_ids) / size)
        for number in range(num_groups):
            groups.append(KVGroup(spec, tuple(layer_ids[number::num_groups])))
    return KVLayout(tuple(groups))
