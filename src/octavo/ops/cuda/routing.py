"""Routing on NVIDIA GPUs: logits, top-k, and the rows of each expert.

One kernel computes the logits; a program has some experts and, while tokens are few, some of the
inputs. Of the programs that share a tile of tokens, the one that finishes last adds up and chooses
their experts, and lists the rows of each expert if there is no other tile. Of more tokens it marks
and counts those of each expert, and a second kernel makes lists of that, with a warp for each
expert. Nothing uses atomics for places, so lists are in the order of tokens. While experts are
chosen, other programs make two e4m3 numbers of each input, for experts that take them so.
Nothing depends on the values that the host would have to know: launches follow from the number of
tokens, and can be captured in graphs.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.expert_tiles import max_blocks, tokens_per_tile
from octavo.ops.cuda.pdl import allow_next, fetch_to_l2, launch_options, wait_previous
from octavo.ops.cuda.quantize import empty_inputs, store_group_in_two, store_rounded
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.experts import Routed, RouterWeights
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import Rounding
from octavo.routing import RoutingConfig, Scoring

SOFTMAX = tl.constexpr(int(Scoring.SOFTMAX))
SIGMOID = tl.constexpr(int(Scoring.SIGMOID))
SPARSEMIXER = tl.constexpr(int(Scoring.SPARSEMIXER))
TOKENS_IN_TWO = tl.constexpr(int(Rounding.TOKENS_IN_TWO))
LEAST_SUM = tl.constexpr(1e-20)  # that weights are divided by
LOWEST_KEY = tl.constexpr(-(2**31))  # of experts that cannot be chosen, or have been
NAN_KEY = tl.constexpr(2**31 - 1)  # above that of inf: see _ordered of experts.py
TILE_TOKENS = 16
FEW_TOKENS = 512  # with more, programs take all inputs
_EXPERTS_AT_ONCE = 64  # that a tensor core's instruction multiplies with few tokens
_MOST_SPLITS = 16  # of the inputs, which the last program adds up
_MOST_AHEAD = 4  # blocks of columns that are loaded together
_MOST_TILES = 32  # that the listing kernel looks at together
_MAX_TILES = 1 << 16


class BlockLists(NamedTuple):
    """The rows of each expert, cut into blocks of at most `block_rows` rows of one expert."""

    rows: Tensor  # int32 [num_tokens * top_k]: by expert; row r is the expert r of all ids
    experts: Tensor  # int32 [max_blocks]: of each block
    begins: Tensor  # int32 [max_blocks]: where in `rows` it begins
    ends: Tensor  # int32 [max_blocks]
    num_blocks: Tensor  # int32 [1]; blocks from here on have no meaning
    block_rows: int


class _Marks(NamedTuple):
    """Which experts tokens take, by expert: all that the lists are made of."""

    # uint8, or int16 with many slots [num_experts, tokens of all tiles]: 0, or one more than the
    # expert's slot
    marks: Tensor
    counts: Tensor  # uint8 [num_tiles, num_experts]: how many tokens of a tile take the expert


class _Cut(NamedTuple):
    """What a program of the routing kernel computes of the logits of a tile of tokens."""

    experts: int
    columns: int  # at once
    ahead: int  # blocks of columns, whose weights are loaded early; 0: all, one after the other
    splits: int  # into which the inputs are cut
    warps: int


class CudaRouter:
    """Uses the router's weights in place."""

    def __init__(self, weights: RouterWeights, config: RoutingConfig, num_hit: Tensor) -> None:
        self._weights = weights
        self._config = config
        self._num_hit = num_hit

    def norms_inputs(self, num_tokens: int) -> bool:
        """See RouterKernel.norms_inputs."""
        return False

    def apply(self, x: Tensor | DeferredNorm, rounding: Rounding = Rounding.NONE) -> Routed:
        """See RouterKernel.apply."""
        assert isinstance(x, Tensor), "it norms nothing"
        return route(x, self._weights, self._config, self._num_hit, rounding)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """How many programs of each tile are done: 0 between kernels. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def route(
    x: Tensor,
    weights: RouterWeights,
    config: RoutingConfig,
    num_hit: Tensor,
    rounding: Rounding = Rounding.NONE,
) -> Routed:
    """Route x [num_tokens, size], dense.

    Args:
        num_hit: see make_router_kernel.
        rounding: see RouterKernel.apply.

    Returns:
        With BlockLists, if there are several tokens.
    """
    assert x.stride(1) == 1
    num_tokens, size = x.shape
    num_experts, top_k = config.num_experts, config.top_k
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x.device)
    chosen = torch.empty((num_tokens, top_k), dtype=torch.float32, device=x.device)
    is_one = num_tokens == 1
    tile = 1 if is_one else TILE_TOKENS
    cut = _cut(num_tokens, size, x.element_size())
    num_tiles = triton.cdiv(num_tokens, tile)
    grid = triton.cdiv(num_experts, cut.experts), num_tiles, cut.splits
    shape = cut.splits, num_tokens, num_experts
    logits = torch.empty(shape, dtype=torch.float32, device=x.device)
    lists = None if is_one else empty_lists(num_tokens, top_k, num_experts, x.device)
    marks = None if num_tiles == 1 else _empty_marks(num_tiles, top_k, num_experts, x.device)
    listed: tuple[Tensor | None, ...] = (None,) * 5
    if lists is not None and marks is None:
        listed = lists[:5]
    inputs = None
    if rounding is not Rounding.NONE:
        inputs = empty_inputs(num_tokens, size, rounding, x.device)
        num_rounding = len(inputs.scales) if rounding.group else tile
        grid = *grid[:2], cut.splits + triton.cdiv(num_rounding, grid[0])
    assert num_tiles <= _MAX_TILES, f"{num_tokens} tokens are more than a step has"
    is_softmax = config.scoring is Scoring.SOFTMAX
    _route_kernel[grid](
        x,
        weights.weight,
        weights.bias,
        weights.correction,
        weights.scales,
        logits,
        ids,
        chosen,
        _arrivals(x.device),
        num_hit,
        *listed,
        *(marks or (None, None)),
        *((None, None) if inputs is None else inputs[:2]),
        num_tokens,
        x.stride(0),
        size,
        num_experts,
        num_tiles * TILE_TOKENS,
        0 if inputs is None else inputs.scales.stride(0),
        config.scale,
        2 * config.jitter,
        TOKENS=tile,
        EXPERTS=cut.experts,
        COLUMNS=cut.columns,
        AHEAD=cut.ahead,
        SPLITS=cut.splits,
        ALL_EXPERTS=power_of_2(num_experts),
        TOP_K=top_k,
        # Where there is one tile, a warp has four tokens, and lists rows by their marks.
        SLOTS=power_of_2(top_k) if is_one or num_tiles > 1 else 0,
        SCORING=int(config.scoring),
        RENORMALISES=config.renormalised,
        GROUPS=config.num_groups,
        GROUP_SLOTS=power_of_2(config.num_groups),
        TOP_GROUPS=config.top_groups,
        BY_LOGITS=is_softmax and weights.correction is None and config.num_groups == 1,
        IEEE=x.dtype == torch.float32,
        GROUP=rounding.group or power_of_2(size),
        ROUNDING=int(rounding),
        num_warps=cut.warps,
        num_stages=4,
        **launch_options(x.device),
    )
    if lists is not None and marks is not None:
        _list(marks, lists, top_k, num_hit)
    return Routed(ids, chosen, lists, inputs)


def _cut(num_tokens: int, size: int, element_size: int) -> _Cut:
    """How the logits of so many tokens are cut among programs.

    Programs are few: the last one of a tile adds up what all have stored. Microseconds of a norm
    and routing of Qwen3-30B-A3B on one H200 in two runs, by experts x blocks of 256 inputs of a
    program:
        tokens    16 x 1    32 x 2    64 x 1    64 x 2    64 x 4
            64               11.16     11.40      9.90
           256                         17.19     14.31
             8      7.63                7.66      8.17
           256                                   12.71     11.43
    Four blocks, which take 160 KB of shared memory, are left to inputs that need them.
    """
    if num_tokens == 1:
        return _Cut(1, min(4096, power_of_2(size)), 0, 1, 1)
    columns = min(512 // element_size, max(16, power_of_2(size)))
    num_blocks = triton.cdiv(size, columns)
    ahead = 1 if num_tokens <= TILE_TOKENS else min(2, num_blocks)
    ahead = max(ahead, triton.cdiv(num_blocks, _MOST_SPLITS))
    if num_tokens > FEW_TOKENS or ahead > _MOST_AHEAD:
        return _Cut(_EXPERTS_AT_ONCE, min(columns, 256 // element_size), 0, 1, 4)
    return _Cut(_EXPERTS_AT_ONCE, columns, ahead, triton.cdiv(num_blocks, ahead), 4)


def list_blocks(ids: Tensor, num_experts: int, num_hit: Tensor) -> BlockLists:
    """The rows of each expert, of dense int32 ids [num_tokens, top_k]; num_hit: see
    make_router_kernel."""
    num_tokens, top_k = ids.shape
    num_tiles = triton.cdiv(num_tokens, TILE_TOKENS)
    marks = _empty_marks(num_tiles, top_k, num_experts, ids.device)
    _mark_kernel[(num_tiles,)](
        ids,
        *marks,
        num_tokens,
        num_experts,
        num_tiles * TILE_TOKENS,
        TOKENS=TILE_TOKENS,
        ALL_EXPERTS=power_of_2(num_experts),
        TOP_K=top_k,
        num_warps=4,
        **launch_options(ids.device),
    )
    lists = empty_lists(num_tokens, top_k, num_experts, ids.device)
    _list(marks, lists, top_k, num_hit)
    return lists


def empty_lists(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> BlockLists:
    """Lists with room for all that tokens may choose."""
    tokens = tokens_per_tile(num_tokens, num_experts, top_k)
    most = max_blocks(num_tokens, num_experts, top_k, tokens)
    rows = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    # Each is allocated by itself, and so begins at a multiple of 16 bytes: kernels are compiled for
    # such arrays, and would be again for others.
    experts, begins, ends, num_blocks = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (most, most, most, 1)
    )
    return BlockLists(rows, experts, begins, ends, num_blocks, tokens)


def _empty_marks(num_tiles: int, top_k: int, num_experts: int, device: torch.device) -> _Marks:
    dtype = torch.uint8 if top_k < 256 else torch.int16
    marks = torch.empty((num_experts, num_tiles * TILE_TOKENS), dtype=dtype, device=device)
    return _Marks(marks, torch.empty((num_tiles, num_experts), dtype=torch.uint8, device=device))


def _list(marks: _Marks, lists: BlockLists, top_k: int, num_hit: Tensor) -> None:
    num_tiles, num_experts = marks.counts.shape
    _list_kernel[(num_experts,)](
        *marks,
        *lists[:5],
        num_hit,
        num_tiles,
        num_tiles * TILE_TOKENS,
        ALL_EXPERTS=power_of_2(num_experts),
        TILES=power_of_2(min(num_tiles, _MOST_TILES)),
        SCANNED=power_of_2(min(num_tiles, _MOST_TILES) * TILE_TOKENS),
        TOP_K=top_k,
        BLOCK_ROWS=lists.block_rows,
        num_warps=1,
        **launch_options(marks.counts.device),
    )


@triton.jit
def _keys(scores):
    """Integers in the order of scores, of which NaN is above all others."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(scores != scores, NAN_KEY, keys)


@triton.jit
def _scores_of(keys):
    """What `_keys` made them of; NaN for LOWEST_KEY."""
    return (keys ^ ((keys >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _at(values, columns, column):
    """Each row's value [TOKENS, n] at its column [TOKENS]."""
    return tl.sum(tl.where(columns[None, :] == column[:, None], values, 0.0), 1)


@triton.jit
def _best(keys, columns):
    """Each row's largest key, and the first column that has it.

    Two reductions of 32-bit integers, for each of which a warp has one instruction, take a third of
    the instructions of one reduction of 64-bit integers that hold keys and columns.
    """
    largest = tl.max(keys, 1)
    has_it = keys == largest[:, None]
    return largest, tl.min(tl.where(has_it, columns[None, :], keys.shape[1] - 1), 1)


@triton.jit
def _keys_of_best_groups(
    keys,
    choice,
    columns,
    group_size,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Keys, the lowest for experts of groups that are not among the best by their two best."""
    choice = tl.where(choice != choice, float("inf"), choice)
    slots = tl.arange(0, GROUP_SLOTS)
    sums = tl.zeros([keys.shape[0], GROUP_SLOTS], tl.float32) - float("inf")
    for group in range(GROUPS):
        own = tl.where((columns // group_size == group)[None, :], keys, LOWEST_KEY)
        _, first = _best(own, columns)
        own = tl.where(columns[None, :] == first[:, None], LOWEST_KEY, own)
        _, second = _best(own, columns)
        total = _at(choice, columns, first) + _at(choice, columns, second)
        sums = tl.where(slots[None, :] == group, total[:, None], sums)
    above = (sums[:, None, :] > sums[:, :, None]) | (
        (sums[:, None, :] == sums[:, :, None]) & (slots[None, None, :] < slots[None, :, None])
    )
    is_best = tl.where(tl.sum(above.to(tl.int32), 2) < TOP_GROUPS, 1.0, 0.0)
    for group in range(GROUPS):
        is_in = _at(is_best, slots, tl.zeros([keys.shape[0]], tl.int32) + group)
        is_out = (is_in == 0.0)[:, None] & (columns // group_size == group)[None, :]
        keys = tl.where(is_out, LOWEST_KEY, keys)
    return keys


@triton.jit
def _choose(
    logits,
    columns,
    correction,
    expert_scales,
    num_experts,
    scale,
    reach,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Experts by logits [TOKENS, ALL_EXPERTS]: marks of the same shape, each one more than the slot
    of an expert, 0 of those that were not chosen; ids and weights.

    BY_LOGITS: experts are chosen by softmax alone: logits are in the order of the probabilities,
        differ more, and suffice for the weights of a renormalised softmax.
    SLOTS: ids and weights are [TOKENS, SLOTS]; with 0, weights are [TOKENS, ALL_EXPERTS], without a
        meaning where there is no mark, and ids [1, ALL_EXPERTS]. That takes fewer instructions for
        each choice, and more to store them: less time where a warp has few tokens.
    """
    is_expert = (columns < num_experts)[None, :]
    scores = logits
    if SCORING == SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    elif SCORING == SOFTMAX and not BY_LOGITS:
        largest = tl.max(tl.where(is_expert, logits, -float("inf")), 1)[:, None]
        scores = tl.where(is_expert, tl.exp(logits - largest), 0.0)
        scores = scores / tl.sum(scores, 1)[:, None]
    choice = scores
    if correction is not None:
        choice += tl.load(correction + columns, mask=columns < num_experts, other=0.0)[None, :]
    keys = tl.where(is_expert, _keys(choice), LOWEST_KEY)
    if GROUPS > 1:
        size = num_experts // GROUPS
        keys = _keys_of_best_groups(keys, choice, columns, size, GROUPS, GROUP_SLOTS, TOP_GROUPS)
    largest_key = tl.max(keys, 1)
    marks, ids, weights = _choose_in_turn(
        keys, scores, logits, columns, reach, TOP_K, SCORING, correction is None, SLOTS
    )
    is_chosen = marks > 0
    if SLOTS > 0:
        is_chosen = (tl.arange(0, SLOTS) < TOP_K)[None, :]
    if BY_LOGITS:
        largest = _scores_of(largest_key)[:, None]
        weights = tl.where(is_chosen, tl.exp(weights - largest), 0.0)
        if not RENORMALISES:
            every = tl.where(is_expert, tl.exp(logits - largest), 0.0)
            weights = weights / tl.sum(every, 1)[:, None]
    if RENORMALISES:
        total = tl.sum(tl.where(is_chosen, weights, 0.0), 1)
        weights = weights / tl.where(total < LEAST_SUM, LEAST_SUM, total)[:, None]
    if expert_scales is not None:
        weights *= tl.load(expert_scales + ids, mask=ids < num_experts, other=0.0).to(tl.float32)
    return marks, ids, weights * scale


@triton.jit
def _choose_in_turn(
    keys,
    scores,
    logits,
    columns,
    reach,
    TOP_K: tl.constexpr,
    SCORING: tl.constexpr,
    IN_KEYS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Marks, ids and weights (`_choose`), one expert after the other; with IN_KEYS, weights are
    what keys were made of, which needs no sum over the experts."""
    marks = tl.zeros(logits.shape, tl.int32)
    ids = columns[None, :]
    weights = scores
    slots = columns
    if SLOTS > 0:
        slots = tl.arange(0, SLOTS)
        ids = tl.zeros([logits.shape[0], SLOTS], tl.int32)
        weights = tl.zeros([logits.shape[0], SLOTS], tl.float32)
    for slot in range(TOP_K):
        key, best = _best(keys, columns)
        is_best = columns[None, :] == best[:, None]
        if SLOTS > 0 or SCORING == SPARSEMIXER:
            weight = _scores_of(key) if IN_KEYS else _at(scores, columns, best)
            if SCORING == SPARSEMIXER:
                largest = weight[:, None]
                limit = tl.where(tl.abs(logits) > largest, tl.abs(logits), largest)
                is_far = largest - logits > reach * limit
                near = tl.where((keys == LOWEST_KEY) | is_far, 0.0, tl.exp(logits - largest))
                weight = 1 / tl.sum(near, 1)
            is_its = (slots[None, :] == slot) if SLOTS > 0 else is_best
            weights = tl.where(is_its, weight[:, None], weights)
        if SLOTS > 0:
            ids = tl.where(slots[None, :] == slot, best[:, None], ids)
        marks = tl.where(is_best, slot + 1, marks)
        keys = tl.where(is_best, LOWEST_KEY, keys)
    return marks, ids, weights


@triton.jit
def _scatter(places, values, mask, PDL: tl.constexpr):
    """Store values of 32 bits, those that each thread has. Triton's own stores would have them and
    their places pass through shared memory, for threads whose places might be neighbours."""
    if PDL:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [places, values.to(tl.int32, bitcast=True), mask.to(tl.int32)],
            tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(places, values, mask=mask)


@triton.jit
def _store_choice(
    ids,
    weights,
    choice,
    tokens,
    is_token,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Store the choice of tokens (`_choose`); returns marks, 0 where there is no token."""
    marks, found, chosen = choice
    marks = tl.where(is_token[:, None], marks, 0)
    if SLOTS > 0:
        slots = tl.arange(0, SLOTS)
        places = tokens[:, None] * TOP_K + slots[None, :]
        is_slot = is_token[:, None] & (slots < TOP_K)[None, :]
        tl.store(ids + places, found, mask=is_slot)
        tl.store(weights + places, chosen, mask=is_slot)
    else:
        places = tokens[:, None] * TOP_K + marks - 1
        _scatter(ids + places, found, marks > 0, PDL)
        _scatter(weights + places, chosen, marks > 0, PDL)
    return marks


@triton.jit
def _count_hit(num_hit, count):
    """An addition that nothing waits for, as the kernel's end would for a load."""
    tl.atomic_add(num_hit, tl.cast(count, tl.int64), sem="relaxed")


@triton.jit
def _num_bits(bits):
    """How many of the lowest 16 bits are set."""
    bits -= (bits >> 1) & 0x5555
    bits = (bits & 0x3333) + ((bits >> 2) & 0x3333)
    bits = (bits + (bits >> 4)) & 0x0F0F
    return (bits + (bits >> 8)) & 0x1F


@triton.jit
def _list_tile(
    marks,
    tokens,
    columns,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    num_hit,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """What `_list_kernel` writes, of a single tile of at most 16 tokens, among which an expert has
    one block.

    Only an expert's tokens, as bits, pass from warp to warp: each counts for itself what comes
    before, and the first one stores the blocks.
    """
    bit = tl.arange(0, marks.shape[0])[:, None]
    takers = tl.sum((marks > 0).to(tl.int32) << bit, 0)[None, :] + tl.zeros_like(marks)
    count = _num_bits(takers)
    is_hit = takers > 0
    both = count + (is_hit.to(tl.int32) << 16)
    before = tl.cumsum(both, 1) - both
    begin = before & 0xFFFF
    block = before >> 16
    places = begin + _num_bits(takers & ((1 << bit) - 1))
    _scatter(rows + places, tokens[:, None] * TOP_K + marks - 1, marks > 0, PDL)
    is_stored = is_hit & (bit == 0)
    _scatter(experts + block, columns[None, :], is_stored, PDL)
    _scatter(begins + block, begin, is_stored, PDL)
    _scatter(ends + block, begin + count, is_stored, PDL)
    total = tl.max(tl.sum(is_hit.to(tl.int32), 1), 0)
    tl.store(num_blocks, total)
    _count_hit(num_hit, total)


@triton.jit
def _store_marks(marks, tile, tokens, columns, marked, counts, num_experts, marked_stride):
    """Marks by expert, and how many tokens of the tile each expert has, for `_list_kernel`."""
    is_expert = columns < num_experts
    places = marked + columns[None, :] * marked_stride + tokens[:, None]
    tl.store(places, marks.to(marked.dtype.element_ty), mask=is_expert[None, :])
    count = tl.sum((marks > 0).to(tl.int32), 0)
    tl.store(counts + tile * num_experts + columns, count.to(tl.uint8), mask=is_expert)


@triton.jit
def choose_and_list(
    logits,
    tokens,
    columns,
    is_token,
    correction,
    expert_scales,
    ids,
    weights,
    arrivals,
    num_hit,
    rows,
    block_experts,
    begins,
    ends,
    num_blocks,
    num_experts,
    scale,
    reach,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """What follows from the logits of a tile's tokens: their experts, stored; and with `rows`, the
    rows of each expert. Returns marks, as `_store_choice`.

    Args:
        arrivals: where 0 is stored when the choice is made, if given.
    """
    choice = _choose(
        logits,
        columns,
        correction,
        expert_scales,
        num_experts,
        scale,
        reach,
        TOP_K,
        SCORING,
        RENORMALISES,
        GROUPS,
        GROUP_SLOTS,
        TOP_GROUPS,
        BY_LOGITS,
        SLOTS,
    )
    marks = _store_choice(ids, weights, choice, tokens, is_token, TOP_K, SLOTS, PDL)
    if arrivals is not None:
        tl.store(arrivals, 0)
    if tokens.shape[0] == 1:
        _count_hit(num_hit, TOP_K)
    if rows is not None:
        _list_tile(
            marks,
            tokens,
            columns,
            rows,
            block_experts,
            begins,
            ends,
            num_blocks,
            num_hit,
            TOP_K,
            PDL,
        )
    return marks


@triton.jit
def add_product(piece, values, result, IEEE: tl.constexpr):
    """result plus piece times values^T; with IEEE as exact as float32 is."""
    if IEEE:
        result = tl.dot(piece, tl.trans(values), result, input_precision="ieee")
    else:
        result = tl.dot(piece, tl.trans(values), result)
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    x,
    weight,
    bias,
    correction,
    expert_scales,
    logits,
    ids,
    weights,
    arrivals,
    num_hit,
    rows,
    block_experts,
    begins,
    ends,
    num_blocks,
    marked,
    counts,
    rounded,
    input_scales,
    num_tokens,
    stride,
    size,
    num_experts,
    marked_stride,
    input_scale_stride,
    scale,
    reach,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    SPLITS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    BY_LOGITS: tl.constexpr,
    IEEE: tl.constexpr,
    GROUP: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits [SPLITS, num_tokens, num_experts] of some inputs; and all that follows from their
    sums, by the last program of a tile. With `rounded`, each program behind the last split
    stores GROUP inputs of a tile's tokens in two numbers, or all of one token.

    Args:
        AHEAD: blocks of inputs of a program; 0: all.
    """
    allow_next(PDL)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    tile = tl.program_id(1)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    split = tl.program_id(2)
    if rounded is not None and split >= SPLITS:
        wait_previous(PDL)
        group = (split - SPLITS) * tl.num_programs(0) + tl.program_id(0)
        if ROUNDING == TOKENS_IN_TWO:
            token = tile * TOKENS + group
            if group < TOKENS and token < num_tokens:
                row = token.to(tl.int64)
                places = tl.arange(0, GROUP)
                values = tl.load(x + row * stride + places, mask=places < size, other=0.0)
                store_rounded(
                    values.to(tl.float32),
                    rounded,
                    input_scales,
                    input_scale_stride,
                    row,
                    0,
                    size,
                    size,
                    GROUP,
                    ROUNDING,
                )
        elif group * GROUP < size:
            store_group_in_two(
                x,
                rounded,
                input_scales,
                stride,
                size,
                input_scale_stride,
                tokens,
                is_token,
                group,
                GROUP,
            )
        return
    columns = tl.arange(0, COLUMNS)
    # Rows beyond the end read the last one; their results are not stored.
    weight_places = weight + tl.minimum(experts, num_experts - 1)[:, None] * size + columns[None, :]
    pieces = ()
    if TOKENS == 1:
        piece = tl.load(weight_places, mask=(columns < size)[None, :], other=0.0)
    elif AHEAD > 0:
        for i in tl.static_range(AHEAD):
            start = (split * AHEAD + i) * COLUMNS
            inside = (columns < size - start)[None, :]
            piece = tl.load(weight_places + start, mask=inside, other=0.0)
            pieces += (piece,)  # type: ignore[assignment]
    elif PDL:
        fetch_to_l2(weight + tl.minimum(experts, num_experts - 1) * size, size)
    wait_previous(PDL)
    if TOKENS == 1:
        values = tl.load(x + columns, mask=columns < size, other=0.0)
        acc = piece.to(tl.float32) * values.to(tl.float32)[None, :]
        for start in range(COLUMNS, size, COLUMNS):
            inside = columns < size - start
            piece = tl.load(weight_places + start, mask=inside[None, :], other=0.0)
            values = tl.load(x + start + columns, mask=inside, other=0.0)
            acc += piece.to(tl.float32) * values.to(tl.float32)[None, :]
        result = tl.sum(acc, 1)[:, None]
    else:
        places = x + tokens.to(tl.int64)[:, None] * stride + columns[None, :]
        zeros = tl.zeros([EXPERTS, TOKENS], tl.float32)
        result = zeros
        loaded = ()
        for i in tl.static_range(AHEAD):
            start = (split * AHEAD + i) * COLUMNS
            inside = (columns < size - start)[None, :]
            values = tl.load(places + start, mask=is_token[:, None] & inside, other=0.0)
            loaded += (values,)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):  # no product waits for another one
            result += add_product(pieces[i], loaded[i], zeros, IEEE)
        if AHEAD == 0:
            for start in range(0, size, COLUMNS):
                inside = (columns < size - start)[None, :]
                values = tl.load(places + start, mask=is_token[:, None] & inside, other=0.0)
                piece = tl.load(weight_places + start, mask=inside, other=0.0)
                result = add_product(piece, values, result, IEEE)
    if bias is not None:
        shift = tl.load(bias + experts, mask=experts < num_experts, other=0.0).to(tl.float32)
        result += tl.where(split == 0, shift, 0.0)[:, None]
    logit_rows = logits + tokens.to(tl.int64)[:, None] * num_experts
    is_stored = (experts < num_experts)[:, None] & is_token[None, :]
    of_split = num_tokens * num_experts
    targets = logits + tokens.to(tl.int64)[None, :] * num_experts + experts[:, None]
    tl.store(targets + split * of_split, result, mask=is_stored)
    tl.debug_barrier()
    seen = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
    if seen == tl.num_programs(0) * SPLITS - 1:
        every = tl.arange(0, ALL_EXPERTS)
        is_given = is_token[:, None] & (every < num_experts)[None, :]
        given = tl.load(logit_rows + every[None, :], mask=is_given, other=0.0)
        for i in tl.static_range(1, SPLITS):
            given += tl.load(logit_rows + i * of_split + every[None, :], mask=is_given, other=0.0)
        marks = choose_and_list(
            given,
            tokens,
            every,
            is_token,
            correction,
            expert_scales,
            ids,
            weights,
            arrivals + tile,
            num_hit,
            rows,
            block_experts,
            begins,
            ends,
            num_blocks,
            num_experts,
            scale,
            reach,
            TOP_K,
            SLOTS,
            SCORING,
            RENORMALISES,
            GROUPS,
            GROUP_SLOTS,
            TOP_GROUPS,
            BY_LOGITS,
            PDL,
        )
        if marked is not None:
            _store_marks(marks, tile, tokens, every, marked, counts, num_experts, marked_stride)


@triton.jit(do_not_specialize=["num_tokens"])
def _mark_kernel(
    ids,
    marked,
    counts,
    num_tokens,
    num_experts,
    marked_stride,
    TOKENS: tl.constexpr,
    ALL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Marks of a tile of tokens whose experts were chosen elsewhere."""
    allow_next(PDL)
    wait_previous(PDL)
    tile = tl.program_id(0)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    columns = tl.arange(0, ALL_EXPERTS)
    marks = tl.zeros([TOKENS, ALL_EXPERTS], tl.int32)
    for slot in range(TOP_K):
        chosen = tl.load(ids + tokens * TOP_K + slot, mask=tokens < num_tokens, other=-1)
        marks = tl.where(chosen[:, None] == columns[None, :], slot + 1, marks)
    _store_marks(marks, tile, tokens, columns, marked, counts, num_experts, marked_stride)


@triton.jit(do_not_specialize=["num_tiles"])
def _list_kernel(
    marked,
    counts,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    num_hit,
    num_tiles,
    marked_stride,
    ALL_EXPERTS: tl.constexpr,
    TILES: tl.constexpr,
    SCANNED: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows and blocks of one expert, by a single warp, which waits for no other. Every program
    adds up the tokens of all experts, for the places of its own."""
    allow_next(PDL)
    wait_previous(PDL)
    expert = tl.program_id(0)
    num_experts = tl.num_programs(0)
    tokens = tl.arange(0, SCANNED)
    own_marks = marked + expert * marked_stride + tokens
    marks = tl.load(own_marks, mask=tokens < marked_stride, other=0).to(tl.int32)
    every = tl.arange(0, ALL_EXPERTS)
    totals = tl.zeros([ALL_EXPERTS], tl.int32)
    for start in range(0, num_tiles, TILES):
        tiles = start + tl.arange(0, TILES)
        is_count = (tiles < num_tiles)[:, None] & (every < num_experts)[None, :]
        places = counts + tiles[:, None] * num_experts + every[None, :]
        totals += tl.sum(tl.load(places, mask=is_count, other=0).to(tl.int32), 0)
    blocks = (totals + BLOCK_ROWS - 1) // BLOCK_ROWS
    count = tl.sum(tl.where(every == expert, totals, 0), 0)
    begin = tl.sum(tl.where(every < expert, totals, 0), 0)
    block = tl.sum(tl.where(every < expert, blocks, 0), 0)
    place = begin
    for start in range(0, marked_stride, SCANNED):
        following = start + SCANNED + tokens
        next_marks = tl.load(own_marks + start + SCANNED, mask=following < marked_stride, other=0)
        is_own = (marks > 0).to(tl.int32)
        targets = rows + place + tl.cumsum(is_own, 0) - is_own
        tl.store(targets, (start + tokens) * TOP_K + marks - 1, mask=marks > 0)
        place += tl.sum(is_own, 0)
        marks = next_marks.to(tl.int32)
    for first in range(0, count, BLOCK_ROWS):
        tl.store(experts + block, expert)
        tl.store(begins + block, begin + first)
        tl.store(ends + block, begin + tl.minimum(first + BLOCK_ROWS, count))
        block += 1
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
        _count_hit(num_hit, tl.sum((totals > 0).to(tl.int32), 0))
