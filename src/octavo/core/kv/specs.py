"""Which tokens' KV a layer keeps, and how layers that keep the same tokens form groups.

A group of layers shares one block table. All groups share one pool of blocks of equal size in
bytes; a group of fewer or smaller layers may hold more tokens in each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import ClassVar, Literal, Protocol

MAX_GROUPS = 8  # unless there are more different specs: every sequence has a block table per group
# What a group costs beside its memory, as a fraction of the KV: so little that it decides only
# between layouts that take about equally much memory.
GROUP_COST = 0.002
MAX_SPAN = 8  # how many times as many tokens the blocks of one group hold as those of another
# Longer blocks waste more at the end of a sequence, and prompts share them only as a whole or by
# copying: they are taken where they save a tenth of the memory.
SPAN_COST = 0.1
TYPICAL_LENGTHS = (512, 2048, 8192, 32_768, 131_072)  # of sequences, in tokens
TYPICAL_BLOCK = 16  # tokens

# Whose tokens a layer keeps: those of the sequence, whose blocks are allocated as it grows, or
# those of the encoder's input, whose blocks are allocated at admission and never change.
Source = Literal["sequence", "encoder"]


class KVSpec(Protocol):
    """Which tokens a layer's queries read. Layers of equal specs share block tables, so a spec is
    hashable and compared by its value."""

    follows: ClassVar[Source]
    """What the length of a layer's KV is that of."""

    def first_needed_token(self, position: int) -> int:
        """The first token that the query at `position` reads; it never shrinks as positions grow.
        Blocks that are wholly before it are freed."""

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any moment, if at most `chunk`
        of them are computed in one step."""


@dataclass(frozen=True, slots=True)
class FullAttention:
    """Every earlier token is attended to, so every block is kept."""

    follows: ClassVar[Source] = "sequence"

    def __str__(self) -> str:
        return "full attention"

    def first_needed_token(self, position: int) -> int:
        """The first token that the query at `position` reads."""
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The most blocks that a sequence of `num_tokens` holds at any moment."""
        return math.ceil(num_tokens / block_size)


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The query at p reads tokens p - window + 1 .. p; blocks wholly before are returned."""

    follows: ClassVar[Source] = "sequence"
    window: int

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"window must be a positive number of tokens, not {self.window!r}")

    def __str__(self) -> str:
        return f"window of {self.window:,}"

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


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Every query reads all tokens of the request's encoder input, whatever its own position.

    The blocks are allocated at admission, as many as the encoder input fills, and never grow. The
    step that runs the encoder writes all of them, no later step writes any, and all samples and
    beams of the request share them.
    """

    follows: ClassVar[Source] = "encoder"

    def __str__(self) -> str:
        return "cross-attention"

    def first_needed_token(self, position: int) -> int:
        """The first token of the encoder input that the query at `position` reads."""
        return 0

    def max_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """The blocks that an encoder input of `num_tokens` takes."""
        return math.ceil(num_tokens / block_size)


def _comes_late(spec: KVSpec) -> bool:
    return spec.follows == "encoder"


def check_order(specs: Sequence[KVSpec]) -> None:
    """Assert that the groups of these specs that follow the sequence come first."""
    assert sorted(specs, key=_comes_late) == list(specs), "the encoder's groups come last"
    assert any(spec.follows == "sequence" for spec in specs), (
        "at least one group grows with the sequence"
    )


def first_needed_block(spec: KVSpec, block_size: int, num_computed_tokens: int) -> int:
    """The first block that queries at `num_computed_tokens` and later still read."""
    return spec.first_needed_token(num_computed_tokens) // block_size


def num_read_tokens(spec: KVSpec, num_tokens: int) -> int:
    """How many tokens the last query of a sequence of `num_tokens` reads."""
    return num_tokens - spec.first_needed_token(num_tokens - 1)


def node_places(block_sizes: Sequence[int]) -> list[tuple[int, int]]:
    """The blocks that hold one node of the prefix cache, as many tokens as the largest of the
    groups' blocks: (group, number among the group's blocks of the node).

    All sizes divide the largest.
    """
    largest = max(block_sizes)
    assert all(largest % size == 0 for size in block_sizes), f"{block_sizes} do not fit together"
    return [
        (group, number)
        for group, size in enumerate(block_sizes)
        for number in range(largest // size)
    ]


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table. A block holds `span` times `block_size` tokens of them, so a
    group of few layers can fill blocks that have room for many.

    layer_size: elements that each of the layers keeps of a token: of its keys and its values.
    """

    spec: KVSpec
    layer_ids: tuple[int, ...]
    span: int = 1
    layer_size: int = 1

    @property
    def token_size(self) -> int:
        """Elements that all layers keep of a token."""
        return len(self.layer_ids) * self.layer_size


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a model's layers are laid out in the blocks of one pool. Groups that follow the sequence
    come first."""

    groups: tuple[KVGroup, ...]

    def __post_init__(self) -> None:
        check_order(self.specs)

    @property
    def token_size(self) -> int:
        """A block has so many elements for each of `block_size` tokens."""
        return max(group.token_size * group.span for group in self.groups)

    def block_sizes(self, block_size: int) -> tuple[int, ...]:
        """Tokens per block, by group."""
        return tuple(block_size * group.span for group in self.groups)

    @property
    def specs(self) -> tuple[KVSpec, ...]:
        return tuple(group.spec for group in self.groups)

    def places(self) -> dict[int, tuple[int, int, int]]:
        """layer id -> (group, index inside the group, the group's span)."""
        return {
            layer_id: (number, index, group.span)
            for number, group in enumerate(self.groups)
            for index, layer_id in enumerate(group.layer_ids)
        }

    def __str__(self) -> str:
        """As in `10 x full attention, 52 x window of 1,024 in 6 groups`."""
        num_layers: Counter[tuple[KVSpec, int]] = Counter()
        num_groups = Counter((group.spec, group.layer_size) for group in self.groups)
        for group in self.groups:
            num_layers[group.spec, group.layer_size] += len(group.layer_ids)
        return ", ".join(
            f"{number} x {kind[0]}" + (f" in {num_groups[kind]} groups" * (num_groups[kind] > 1))
            for kind, number in num_layers.items()
        )

    def relative_bytes(self, lengths: Sequence[int] = TYPICAL_LENGTHS) -> float:
        """The memory that decoding sequences of these lengths take, as a multiple of the KV that
        their layers read; the mean over the lengths."""
        return fmean(self._relative_bytes(length) for length in lengths)

    def _relative_bytes(self, num_tokens: int) -> float:
        taken = read = 0
        token_size = self.token_size  # which looks at all groups
        for group in self.groups:
            num_blocks = group.spec.max_blocks(num_tokens, TYPICAL_BLOCK * group.span, chunk=1)
            taken += num_blocks * TYPICAL_BLOCK * token_size
            read += group.token_size * num_read_tokens(group.spec, num_tokens)
        return taken / read


def group_layers(
    specs: Sequence[KVSpec | None], layer_sizes: Sequence[int] | None = None
) -> KVLayout:
    """The groups of a model's layers.

    Of all sizes of blocks, the one with which sequences of typical lengths take the least memory:
    padding costs little in a group of sliding windows, and much in one of full attention. There are
    at most MAX_GROUPS groups, or one for each different kind of layers.

    Args:
        specs: which tokens' KV each layer keeps; None: it reads another layer's KV, and keeps none.
        layer_sizes: elements that each layer keeps of a token; None: all layers keep as many.

    Raises:
        ValueError: no layer keeps KV.
    """
    sizes = [1] * len(specs) if layer_sizes is None else layer_sizes
    by_kind: dict[tuple[KVSpec, int], list[int]] = {}
    for layer_id, (spec, size) in enumerate(zip(specs, sizes, strict=True)):
        if spec is not None:
            by_kind.setdefault((spec, size), []).append(layer_id)
    if not by_kind:
        raise ValueError("a model without attention layers has no KV to lay out")
    by_kind = {
        kind: by_kind[kind] for kind in sorted(by_kind, key=lambda each: _comes_late(each[0]))
    }
    counts = [(len(layer_ids), size) for (_, size), layer_ids in by_kind.items()]
    limit = max(MAX_GROUPS, len(by_kind))
    # A block has room for as much as one of the groups has in it.
    least = max(size for _, size in counts)
    token_sizes = {
        span * size * -(-count // num_groups)
        for count, size in counts
        for span in range(1, MAX_SPAN + 1)
        for num_groups in range(1, limit + 1)
    }
    divisions = {
        tuple(_division(count, token_size // size, span) for count, size in counts): None
        for span in range(1, MAX_SPAN + 1)
        for token_size in sorted(token_sizes)
        if token_size >= least
    }
    layouts = (
        _layout(by_kind, division)
        for division in divisions
        if sum(num_groups for num_groups, _ in division) <= limit
    )
    return min(layouts, key=_cost)


def _division(num_layers: int, layers_per_block: int, span: int) -> tuple[int, int]:
    """Into how few groups layers of one kind can be divided, and the span of these: blocks hold
    `span` times as many tokens if that leaves less of them unused."""
    num_groups = -(-num_layers // layers_per_block)
    if span <= layers_per_block:
        spanned = -(-num_layers // (layers_per_block // span))
        if spanned < num_groups * span:  # blocks per `span` times `block_size` tokens
            return spanned, span
    return num_groups, 1


def _layout(
    by_kind: Mapping[tuple[KVSpec, int], Sequence[int]], division: Sequence[tuple[int, int]]
) -> KVLayout:
    """The layers of each kind in so many groups, about equally large, with such a span."""
    groups = [
        KVGroup(spec, tuple(layer_ids[number::num_groups]), span, size)
        for ((spec, size), layer_ids), (num_groups, span) in zip(
            by_kind.items(), division, strict=True
        )
        for number in range(num_groups)
    ]
    return KVLayout(tuple(groups))


def _cost(layout: KVLayout) -> float:
    """The memory that sequences take with this layout, and what else speaks against it."""
    has_spans = any(group.span > 1 for group in layout.groups)
    return layout.relative_bytes() + GROUP_COST * len(layout.groups) + SPAN_COST * has_spans
