"""Routing on NVIDIA GPUs: logits, top-k, and the rows of each expert.

One kernel computes the logits; a program has some experts and, while tokens are few, some of the
inputs. Of the programs that share a tile of tokens, the one that finishes last adds up and chooses
their experts, and lists the rows of each expert if there is no other tile. For more tokens a second
kernel does, with a program per expert: it counts and ranks instead of using atomics, so lists are
in the order of tokens.
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
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.experts import Routed, RouterWeights
from octavo.routing import RoutingConfig, Scoring

SOFTMAX = tl.constexpr(int(Scoring.SOFTMAX))
SIGMOID = tl.constexpr(int(Scoring.SIGMOID))
SPARSEMIXER = tl.constexpr(int(Scoring.SPARSEMIXER))
LEAST_SUM = tl.constexpr(1e-20)  # that weights are divided by
LOWEST_KEY = tl.constexpr(-(2**63))  # of experts that cannot be chosen, or have been
NAN_KEY = tl.constexpr(-(2**31) + 1)  # below that of -inf
MOST_RANKED = tl.constexpr(256)  # ids or experts that are compared with each other
TILE_TOKENS = 16
FEW_TOKENS = 256  # with more, programs compute more logits each
_PROGRAMS = 512  # into about so many the inputs of few tokens are cut
_MOST_AHEAD = 4  # blocks of columns that are loaded together
SCANNED = 1024  # ids that the listing kernel looks at together
_MAX_TILES = 1 << 16


class BlockLists(NamedTuple):
    """The rows of each expert, cut into blocks of at most `block_rows` rows of one expert."""

    rows: Tensor  # int32 [num_tokens * top_k]: by expert; row r is the expert r of all ids
    experts: Tensor  # int32 [max_blocks]: of each block
    begins: Tensor  # int32 [max_blocks]: where in `rows` it begins
    ends: Tensor  # int32 [max_blocks]
    num_blocks: Tensor  # int32 [1]; blocks from here on have no meaning
    block_rows: int


class CudaRouter:
    """Uses the router's weights in place."""

    def __init__(self, weights: RouterWeights, config: RoutingConfig, num_hit: Tensor) -> None:
        self._weights = weights
        self._config = config
        self._num_hit = num_hit

    def apply(self, x: Tensor) -> Routed:
        """See RouterKernel.apply."""
        return route(x, self._weights, self._config, self._num_hit)


@cache
def _arrivals(device: torch.device) -> Tensor:
    """How many programs of each tile are done: 0 between kernels. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def route(x: Tensor, weights: RouterWeights, config: RoutingConfig, num_hit: Tensor) -> Routed:
    """Route x [num_tokens, size], dense.

    Args:
        num_hit: see make_router_kernel.

    Returns:
        With BlockLists, if there are several tokens.
    """
    assert x.stride(1) == 1
    num_tokens, size = x.shape
    num_experts, top_k = config.num_experts, config.top_k
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=x.device)
    chosen = torch.empty((num_tokens, top_k), dtype=torch.float32, device=x.device)
    is_one = num_tokens == 1
    if is_one:
        tile, columns = 1, min(4096, power_of_2(size))
        at_once = 4 if columns <= 2048 else 2
    else:
        at_once = 16 if num_tokens <= FEW_TOKENS else 64
        tile, columns = TILE_TOKENS, min(256, max(16, power_of_2(size)))
    tiles = triton.cdiv(num_experts, at_once), triton.cdiv(num_tokens, tile)
    ahead = 0 if is_one else _blocks_ahead(tiles[0] * tiles[1], triton.cdiv(size, columns))
    grid = *tiles, triton.cdiv(size, ahead * columns) if ahead else 1
    shape = grid[2], num_tokens, num_experts
    logits = torch.empty(shape, dtype=torch.float32, device=x.device)
    lists = None if is_one else _empty_lists(num_tokens, top_k, num_experts, x.device)
    is_few = grid[1] == 1 and top_k * tile <= MOST_RANKED.value
    listed: tuple[Tensor | None, ...] = (None,) * 5
    if lists is not None and is_few:
        listed = lists[:5]
    assert grid[1] <= _MAX_TILES, f"{num_tokens} tokens are more than a step has"
    _route_kernel[grid](
        x,
        weights.weight,
        weights.bias,
        weights.correction,
        logits,
        ids,
        chosen,
        _arrivals(x.device),
        num_hit,
        *listed,
        num_tokens,
        x.stride(0),
        size,
        num_experts,
        config.scale,
        2 * config.jitter,
        TOKENS=tile,
        EXPERTS=at_once,
        COLUMNS=columns,
        AHEAD=ahead,
        SPLITS=grid[2],
        ALL_EXPERTS=power_of_2(num_experts),
        TOP_K=top_k,
        SLOTS=power_of_2(top_k),
        LISTED=power_of_2(min(num_tokens, TILE_TOKENS) * top_k),
        SCORING=int(config.scoring),
        RENORMALISES=config.renormalised,
        GROUPS=config.num_groups,
        GROUP_SLOTS=power_of_2(config.num_groups),
        TOP_GROUPS=config.top_groups,
        IEEE=x.dtype == torch.float32,
        num_warps=4,
        num_stages=4,
        **launch_options(x.device),
    )
    if lists is not None and not is_few:
        _list(ids, lists, num_experts, num_hit)
    return Routed(ids, chosen, lists)


def _blocks_ahead(num_tiles: int, num_blocks: int) -> int:
    """How many of `num_blocks` blocks of inputs a program takes, and loads the weights of before
    the preceding kernel has ended; 0: all of them, one after the other."""
    ahead = triton.cdiv(num_blocks, max(1, _PROGRAMS // num_tiles))
    return ahead if ahead <= _MOST_AHEAD else 0


def list_blocks(ids: Tensor, num_experts: int, num_hit: Tensor) -> BlockLists:
    """The rows of each expert, of dense int32 ids [num_tokens, top_k]; num_hit: see
    make_router_kernel."""
    num_tokens, top_k = ids.shape
    lists = _empty_lists(num_tokens, top_k, num_experts, ids.device)
    _list(ids, lists, num_experts, num_hit)
    return lists


def _empty_lists(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> BlockLists:
    tokens = tokens_per_tile(num_tokens, num_experts, top_k)
    most = max_blocks(num_tokens, num_experts, top_k, tokens)
    rows = torch.empty(num_tokens * top_k, dtype=torch.int32, device=device)
    experts, begins, ends = torch.empty((3, most), dtype=torch.int32, device=device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=device)
    return BlockLists(rows, experts, begins, ends, num_blocks, tokens)


def _list(ids: Tensor, lists: BlockLists, num_experts: int, num_hit: Tensor) -> None:
    num_ids = ids.numel()
    _list_kernel[(num_experts,)](
        ids,
        *lists[:5],
        num_hit,
        num_ids,
        # One bin more than experts, for what is beyond the end.
        BINS=power_of_2(num_experts + 1),
        SCANNED=min(SCANNED, power_of_2(num_ids)),
        BLOCK_ROWS=lists.block_rows,
        num_warps=4,
        **launch_options(ids.device),
    )


@triton.jit
def _keys(scores, columns, ALL_EXPERTS: tl.constexpr):
    """Integers in the order of scores, all different: of equal scores, the first is the largest.
    NaN is below all others."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)  # -0 becomes 0
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = tl.where(scores != scores, NAN_KEY, keys)
    return (keys.to(tl.int64) << 16) | (ALL_EXPERTS - 1 - columns)[None, :].to(tl.int64)


@triton.jit
def _at(values, columns, column):
    """Each row's value [TOKENS, n] at its column [TOKENS]."""
    return tl.sum(tl.where(columns[None, :] == column[:, None], values, 0.0), 1)


@triton.jit
def _best(keys, ALL_EXPERTS: tl.constexpr):
    """Each row's column with the largest key."""
    return ALL_EXPERTS - 1 - (tl.max(keys, 1) & 0xFFFF).to(tl.int32)


@triton.jit
def _keys_of_best_groups(
    keys,
    choice,
    columns,
    group_size,
    ALL_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Keys, the lowest for experts of groups that are not among the best by their two best."""
    choice = tl.where(choice != choice, -1e38, choice)
    slots = tl.arange(0, GROUP_SLOTS)
    sums = tl.zeros([keys.shape[0], GROUP_SLOTS], tl.float32) - float("inf")
    for group in range(GROUPS):
        own = tl.where((columns // group_size == group)[None, :], keys, LOWEST_KEY)
        first = _best(own, ALL_EXPERTS)
        own = tl.where(columns[None, :] == first[:, None], LOWEST_KEY, own)
        second = _best(own, ALL_EXPERTS)
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
    num_experts,
    scale,
    reach,
    ALL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
):
    """Ids and weights [TOKENS, SLOTS] by logits [TOKENS, ALL_EXPERTS]."""
    is_expert = (columns < num_experts)[None, :]
    if SCORING == SIGMOID:
        scores = 1 / (1 + tl.exp(-logits))
    elif SCORING == SOFTMAX:
        largest = tl.max(tl.where(is_expert, logits, -float("inf")), 1)[:, None]
        scores = tl.where(is_expert, tl.exp(logits - largest), 0.0)
        sums = tl.sum(scores, 1)[:, None]
        scores = scores / sums
    else:
        scores = logits
    choice = scores
    if correction is not None:
        choice += tl.load(correction + columns, mask=columns < num_experts, other=0.0)[None, :]
    elif SCORING == SOFTMAX and GROUPS == 1:
        choice = logits  # whose order is that of the probabilities, and which differ more
    keys = tl.where(is_expert, _keys(choice, columns, ALL_EXPERTS), LOWEST_KEY)
    if GROUPS > 1:
        size = num_experts // GROUPS
        keys = _keys_of_best_groups(
            keys, choice, columns, size, ALL_EXPERTS, GROUPS, GROUP_SLOTS, TOP_GROUPS
        )
    slots = tl.arange(0, SLOTS)
    if logits.shape[0] == 1 and ALL_EXPERTS <= MOST_RANKED and SCORING != SPARSEMIXER:
        # All ranks at once: of one token, it takes a fraction of the time of one after the other.
        key = tl.reshape(keys, [ALL_EXPERTS])
        ranks = tl.sum((key[:, None] > key[None, :]).to(tl.int32), 0)
        is_at = ranks[None, :] == slots[:, None]
        ids = tl.sum(tl.where(is_at, columns[None, :], 0), 1)[None, :]
        own = tl.reshape(scores, [ALL_EXPERTS])
        weights = tl.sum(tl.where(is_at, own[None, :], 0.0), 1)[None, :]
        weights = tl.where(slots[None, :] < TOP_K, weights, 0.0)
    else:
        ids, weights = _choose_in_turn(
            keys,
            scores,
            logits,
            columns,
            reach,
            ALL_EXPERTS,
            TOP_K,
            SLOTS,
            SCORING,
            correction is None,
        )
        if correction is None and SCORING == SOFTMAX and GROUPS == 1:
            weights = tl.where(slots[None, :] < TOP_K, tl.exp(weights - largest) / sums, 0.0)
    if RENORMALISES:
        total = tl.sum(weights, 1)
        weights = weights / tl.where(total < LEAST_SUM, LEAST_SUM, total)[:, None]
    return ids, weights * scale


@triton.jit
def _choose_in_turn(
    keys,
    scores,
    logits,
    columns,
    reach,
    ALL_EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SLOTS: tl.constexpr,
    SCORING: tl.constexpr,
    IN_KEYS: tl.constexpr,
):
    """Ids and weights [TOKENS, SLOTS], one expert after the other; with IN_KEYS, weights are what
    keys were made of, which needs no sum over the experts."""
    slots = tl.arange(0, SLOTS)
    ids = tl.zeros([logits.shape[0], SLOTS], tl.int32)
    weights = tl.zeros([logits.shape[0], SLOTS], tl.float32)
    for slot in range(TOP_K):
        key = tl.max(keys, 1)
        best = ALL_EXPERTS - 1 - (key & 0xFFFF).to(tl.int32)
        if IN_KEYS:
            bits = (key >> 16).to(tl.int32)
            weight = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        else:
            weight = _at(scores, columns, best)
        if SCORING == SPARSEMIXER:
            largest = weight[:, None]
            limit = tl.where(tl.abs(logits) > largest, tl.abs(logits), largest)
            is_far = largest - logits > reach * limit
            near = tl.where((keys == LOWEST_KEY) | is_far, 0.0, tl.exp(logits - largest))
            weight = 1 / tl.sum(near, 1)
        ids = tl.where(slots[None, :] == slot, best[:, None], ids)
        weights = tl.where(slots[None, :] == slot, weight[:, None], weights)
        keys = tl.where(columns[None, :] == best[:, None], LOWEST_KEY, keys)
    return ids, weights


@triton.jit
def _count_hit(num_hit, count):
    """An addition that nothing waits for, as the kernel's end would for a load."""
    tl.atomic_add(num_hit, tl.cast(count, tl.int64), sem="relaxed")


@triton.jit
def _list_few(ids, rows, experts, begins, ends, num_blocks, num_hit, num_ids, LISTED: tl.constexpr):
    """What `_list_kernel` writes, of at most LISTED ids, among which an expert has one block."""
    places = tl.arange(0, LISTED)
    is_id = places < num_ids
    # In two arrangements: each id is compared with each.
    own = tl.load(ids + places, mask=is_id, other=1 << 30)
    others, other_places = own[:, None], places[:, None]
    is_less = others < own[None, :]
    is_same = others == own[None, :]
    begin = tl.sum(is_less.to(tl.int32), 0)
    count = tl.sum(is_same.to(tl.int32), 0)
    rank = tl.sum((is_same & (other_places < places[None, :])).to(tl.int32), 0)
    is_first = (rank == 0) & is_id
    block = tl.sum((is_less & is_first[:, None]).to(tl.int32), 0)
    tl.store(rows + begin + rank, places, mask=is_id)
    tl.store(experts + block, own, mask=is_first)
    tl.store(begins + block, begin, mask=is_first)
    tl.store(ends + block, begin + count, mask=is_first)
    total = tl.sum(is_first.to(tl.int32), 0)
    tl.store(num_blocks, total)
    _count_hit(num_hit, total)


@triton.jit
def _multiplied(values, piece, result, IEEE: tl.constexpr):
    """result plus values times piece^T; with IEEE as exact as float32 is."""
    if IEEE:
        result = tl.dot(values, tl.trans(piece), result, input_precision="ieee")
    else:
        result = tl.dot(values, tl.trans(piece), result)
    return result


@triton.jit(do_not_specialize=["num_tokens"])
def _route_kernel(
    x,
    weight,
    bias,
    correction,
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
    num_tokens,
    stride,
    size,
    num_experts,
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
    LISTED: tl.constexpr,
    SCORING: tl.constexpr,
    RENORMALISES: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_SLOTS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Logits [SPLITS, num_tokens, num_experts] of some inputs; and all that follows from their
    sums, by the last program of a tile.

    Args:
        AHEAD: blocks of inputs of a program; 0: all.
    """
    allow_next(PDL)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    tile = tl.program_id(1)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    columns = tl.arange(0, COLUMNS)
    # Rows beyond the end read the last one; their results are not stored.
    weight_places = weight + tl.minimum(experts, num_experts - 1)[:, None] * size + columns[None, :]
    split = tl.program_id(2)
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
        result = tl.sum(acc, 1)[None, :]
    else:
        places = x + tokens.to(tl.int64)[:, None] * stride + columns[None, :]
        result = tl.zeros([TOKENS, EXPERTS], tl.float32)
        for i in tl.static_range(AHEAD):
            start = (split * AHEAD + i) * COLUMNS
            inside = (columns < size - start)[None, :]
            values = tl.load(places + start, mask=is_token[:, None] & inside, other=0.0)
            result = _multiplied(values, pieces[i], result, IEEE)
        if AHEAD == 0:
            for start in range(0, size, COLUMNS):
                inside = (columns < size - start)[None, :]
                values = tl.load(places + start, mask=is_token[:, None] & inside, other=0.0)
                piece = tl.load(weight_places + start, mask=inside, other=0.0)
                result = _multiplied(values, piece, result, IEEE)
    if bias is not None:
        shift = tl.load(bias + experts, mask=experts < num_experts, other=0.0).to(tl.float32)
        result += tl.where(split == 0, shift, 0.0)[None, :]
    logit_rows = logits + tokens.to(tl.int64)[:, None] * num_experts
    is_stored = is_token[:, None] & (experts < num_experts)[None, :]
    of_split = num_tokens * num_experts
    tl.store(logit_rows + split * of_split + experts[None, :], result, mask=is_stored)
    tl.debug_barrier()
    seen = tl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu")
    if seen == tl.num_programs(0) * SPLITS - 1:
        every = tl.arange(0, ALL_EXPERTS)
        is_given = is_token[:, None] & (every < num_experts)[None, :]
        given = tl.load(logit_rows + every[None, :], mask=is_given, other=0.0)
        for i in tl.static_range(1, SPLITS):
            given += tl.load(logit_rows + i * of_split + every[None, :], mask=is_given, other=0.0)
        found, chosen = _choose(
            given,
            every,
            correction,
            num_experts,
            scale,
            reach,
            ALL_EXPERTS,
            TOP_K,
            SLOTS,
            SCORING,
            RENORMALISES,
            GROUPS,
            GROUP_SLOTS,
            TOP_GROUPS,
        )
        slots = tl.arange(0, SLOTS)
        targets = tokens[:, None] * TOP_K + slots[None, :]
        is_slot = is_token[:, None] & (slots < TOP_K)[None, :]
        tl.store(ids + targets, found, mask=is_slot)
        tl.store(weights + targets, chosen, mask=is_slot)
        tl.store(arrivals + tile, 0)
        if TOKENS == 1:
            _count_hit(num_hit, TOP_K)
        if rows is not None:
            tl.debug_barrier()
            _list_few(
                ids,
                rows,
                block_experts,
                begins,
                ends,
                num_blocks,
                num_hit,
                num_tokens * TOP_K,
                LISTED,
            )


@triton.jit(do_not_specialize=["num_ids"])
def _list_kernel(
    ids,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    num_hit,
    num_ids,
    BINS: tl.constexpr,
    SCANNED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The rows and blocks of one expert. Every program counts the rows of all experts, for the
    places of its own."""
    allow_next(PDL)
    wait_previous(PDL)
    expert = tl.program_id(0)
    offsets = tl.arange(0, SCANNED)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_ids, SCANNED):
        found = tl.load(ids + start + offsets, mask=offsets < num_ids - start, other=BINS - 1)
        counts += tl.histogram(found, BINS)
    every = tl.arange(0, BINS)
    counts = tl.where(every < tl.num_programs(0), counts, 0)
    blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    count = tl.sum(tl.where(every == expert, counts, 0), 0)
    begin = tl.sum(tl.where(every < expert, counts, 0), 0)
    block = tl.sum(tl.where(every < expert, blocks, 0), 0)
    place = begin
    for start in range(0, num_ids, SCANNED):
        found = tl.load(ids + start + offsets, mask=offsets < num_ids - start, other=BINS - 1)
        is_own = (found == expert).to(tl.int32)
        ranks = tl.cumsum(is_own, 0) - 1
        tl.store(rows + place + ranks, start + offsets, mask=is_own > 0)
        place += tl.sum(is_own, 0)
    for first in range(0, count, BLOCK_ROWS):
        tl.store(experts + block, expert)
        tl.store(begins + block, begin + first)
        tl.store(ends + block, begin + tl.minimum(first + BLOCK_ROWS, count))
        block += 1
    if expert == 0:
        tl.store(num_blocks, tl.sum(blocks, 0))
        hit = tl.sum((counts > 0).to(tl.int64), 0)
        _count_hit(num_hit, hit)
