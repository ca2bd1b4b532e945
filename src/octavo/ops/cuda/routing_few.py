"""Routing of few tokens on NVIDIA GPUs, with the norm before it, in one kernel.

Prototype of kernels for a tile or a few tiles of tokens.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.cuda.norm import _standardised
from octavo.ops.cuda.pdl import allow_next, launch_options, not_before, wait_previous
from octavo.ops.cuda.quantize import empty_inputs, store_group_in_two, store_rounded
from octavo.ops.cuda.routing import (
    BlockLists,
    _choose,
    _empty_lists,
    _empty_marks,
    _list,
    _multiplied,
)
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.experts import Routed, RouterWeights
from octavo.ops.quantized import RoundedInputs, Rounding
from octavo.routing import RoutingConfig, Scoring

EMPTY = tl.constexpr(-2147483648)  # minus zero, which no program leaves
_PLACES = 1 << 20  # logits of splits


class Cut(NamedTuple):
    tokens: int
    experts: int
    columns: int
    ahead: int
    warps: int
    by_rank: bool = True
    sampled: bool = False
    warm: bool = True


class Few(NamedTuple):
    """Arguments of a norm."""

    x: Tensor  # [splits, num_tokens, size] or [num_tokens, size], dense
    residual: Tensor  # [num_tokens, size]
    weight: Tensor
    eps: float


@cache
def _board(device: torch.device) -> Tensor:
    """EMPTY between kernels. For one stream."""
    if device.type == "cuda":
        assert not torch.cuda.is_current_stream_capturing(), "run a step before capturing it"
    return torch.full((_PLACES,), EMPTY.value, dtype=torch.int32, device=device)


def choose_cut(num_tokens: int, size: int, num_experts: int) -> Cut:
    tokens = 8 if num_tokens <= 8 else 16
    return Cut(tokens, 64, 256, max(1, triton.cdiv(size, 256 * 16)), 4)


def route_few(
    x: Tensor | Few,
    weights: RouterWeights,
    config: RoutingConfig,
    num_hit: Tensor,
    in_two: bool = False,
    cut: Cut | None = None,
    stamps: Tensor | None = None,
) -> tuple[Routed, Tensor | None, Tensor | None]:
    """Route; returns also the normed inputs and the residual stream, if x is Few."""
    few = x if isinstance(x, Few) else None
    if few is not None:
        x, residual = few.x, few.residual
        num_tokens, size = residual.shape
        device, dtype = residual.device, residual.dtype
        splits_of_x = x.shape[0] if x.dim() == 3 else 1
        normed, total = torch.empty_like(residual), torch.empty_like(residual)
        stride = size
        split_stride = x.stride(0) if x.dim() == 3 else 0
    else:
        assert isinstance(x, Tensor)
        assert x.stride(1) == 1
        num_tokens, size = x.shape
        device, dtype = x.device, x.dtype
        residual = normed = total = None
        splits_of_x, split_stride = 1, 0
        stride = x.stride(0)
    num_experts, top_k = config.num_experts, config.top_k
    ids = torch.empty((num_tokens, top_k), dtype=torch.int32, device=device)
    chosen = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
    cut = cut or choose_cut(num_tokens, size, num_experts)
    num_tiles = triton.cdiv(num_tokens, cut.tokens)
    blocks = triton.cdiv(num_experts, cut.experts)
    splits = triton.cdiv(size, cut.columns * cut.ahead)
    lists = _empty_lists(num_tokens, top_k, num_experts, device)
    marks = None if num_tiles == 1 else _empty_marks(num_tiles, top_k, num_experts, device)
    listed: tuple[Tensor | None, ...] = lists[:5] if marks is None else (None,) * 5
    inputs = empty_inputs(num_tokens, size, Rounding.IN_TWO, device) if in_two else None
    if few is not None:
        num_others = cut.tokens
    else:
        num_others = 0 if inputs is None else len(inputs.scales)
    board = _board(device)
    assert (splits + 1) * num_tiles * cut.tokens * num_experts <= _PLACES
    is_softmax = config.scoring is Scoring.SOFTMAX
    _route_few_kernel[(blocks * splits + num_others + 1, num_tiles)](
        x,
        residual,
        total,
        normed,
        None if few is None else few.weight,
        weights.weight,
        weights.bias,
        weights.correction,
        board,
        ids,
        chosen,
        num_hit,
        *listed,
        *(marks or (None, None)),
        *(inputs or (None, None)),
        stamps,
        num_tokens,
        stride,
        split_stride,
        size,
        num_experts,
        num_tiles * cut.tokens,
        0 if inputs is None else inputs.scales.stride(0),
        0 if cut.warm else 1,
        0.0 if few is None else few.eps,
        config.scale,
        2 * config.jitter,
        TOKENS=cut.tokens,
        EXPERTS=cut.experts,
        COLUMNS=cut.columns,
        AHEAD=cut.ahead,
        BLOCKS=blocks,
        BLOCK_SLOTS=power_of_2(blocks),
        SPLITS=splits,
        SPLIT_SLOTS=power_of_2(splits),
        X_SPLITS=splits_of_x,
        ALL_COLUMNS=power_of_2(size),
        ALL_EXPERTS=max(128, power_of_2(num_experts)),
        TOP_K=top_k,
        SLOTS=power_of_2(top_k),
        SCORING=int(config.scoring),
        RENORMALISES=config.renormalised,
        GROUPS=config.num_groups,
        GROUP_SLOTS=power_of_2(config.num_groups),
        TOP_GROUPS=config.top_groups,
        BY_LOGITS=is_softmax and weights.correction is None and config.num_groups == 1,
        IEEE=dtype == torch.float32,
        GROUP=Rounding.IN_TWO.group,
        IN_TWO=int(Rounding.IN_TWO),
        BY_RANK=cut.by_rank,
        SAMPLED=cut.sampled,
        num_warps=cut.warps,
        num_stages=1,  # nothing is to be loaded before the wait
        **launch_options(device),
    )
    if marks is not None:
        _list(marks, lists, top_k, num_hit)
    return Routed(ids, chosen, lists, inputs), normed, total


@triton.jit
def _filled(x):
    """The bits of x; zero instead of minus zero, which is EMPTY."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits == EMPTY, 0, bits)


@triton.jit
def _stamp(stamps, value, OFFSET: tl.constexpr):
    """Experimental: nanoseconds of the GPU's timer, when there is a value (int32)."""
    if stamps is not None:
        now = tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l,r", [value], dtype=tl.int64, is_pure=False, pack=1
        )
        slot = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        tl.store(stamps + slot * 8 + OFFSET, now)


@triton.jit
def _sum_of(x, residual, places, split_stride, inside, X_SPLITS: tl.constexpr):
    """The sum of partial sums and of the residual stream, rounded as that is."""
    held = tl.load(residual + places, mask=inside, other=0.0)
    parts = (tl.load(x + places, mask=inside, other=0.0),)
    for i in tl.static_range(1, X_SPLITS):
        parts += (tl.load(x + i * split_stride + places, mask=inside, other=0.0),)  # type: ignore
    values = parts[0].to(tl.float32)
    for i in tl.static_range(1, X_SPLITS):
        values += parts[i].to(tl.float32)
    return (values + held.to(tl.float32)).to(held.dtype)


@triton.jit
def _leave_logits(
    x,
    residual,
    norm_weight,
    weight,
    board,
    tokens,
    is_token,
    block,
    split,
    num_rows,
    stride,
    split_stride,
    size,
    num_experts,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    X_SPLITS: tl.constexpr,
    IEEE: tl.constexpr,
    PDL: tl.constexpr,
    stamps,
    first,
):
    TOKENS: tl.constexpr = tokens.shape[0]
    experts = block * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, COLUMNS)
    weight_places = weight + tl.minimum(experts, num_experts - 1)[:, None] * size + columns[None, :]
    pieces = ()
    scales = ()
    for i in tl.static_range(AHEAD):
        start = (split * AHEAD + i) * COLUMNS
        inside = columns < size - start
        piece = tl.load(weight_places + start, mask=inside[None, :], other=0.0)
        pieces += (piece,)  # type: ignore[assignment]
        if residual is not None:
            scale = tl.load(norm_weight + start + columns, mask=inside, other=0.0)
            scales += (scale.to(tl.float32),)  # type: ignore[assignment]
    places = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
    zeros = tl.zeros([EXPERTS, TOKENS], tl.float32)
    targets = board + (split * num_rows + tokens)[None, :] * num_experts + experts[:, None]
    is_stored = (experts < num_experts)[:, None] & is_token[None, :]
    for turn in range(first, 2):
        is_real = turn > 0
        if is_real:
            wait_previous(PDL)
        _stamp(stamps, split, 0)
        result = zeros
        loaded = ()
        for i in tl.static_range(AHEAD):
            start = (split * AHEAD + i) * COLUMNS
            wanted = (is_token & is_real)[:, None] & (columns < size - start)[None, :]
            if residual is None:
                values = tl.load(x + places + start, mask=wanted, other=0.0)
            else:
                values = _sum_of(x, residual, places + start, split_stride, wanted, X_SPLITS)
                values = (values.to(tl.float32) * scales[i][None, :]).to(values.dtype)
                if values.dtype.primitive_bitwidth < 32:
                    # Otherwise partial sums, and not their sum, would pass through shared memory.
                    values = not_before(values, PDL)
            loaded += (values,)  # type: ignore[assignment]
        for i in tl.static_range(AHEAD):
            result += _multiplied(pieces[i], loaded[i], zeros, IEEE)
        tl.store(targets, _filled(result), mask=is_stored & is_real)
        _stamp(stamps, split, 1)


@triton.jit
def _norm_row(
    x,
    residual,
    total,
    normed,
    norm_weight,
    factors,
    rounded,
    input_scales,
    row,
    num_tokens,
    split_stride,
    size,
    input_scale_stride,
    eps,
    ALL_COLUMNS: tl.constexpr,
    X_SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    IN_TWO: tl.constexpr,
    PDL: tl.constexpr,
    stamps,
    first,
    num_experts,
    ALL_EXPERTS: tl.constexpr,
):
    columns = tl.arange(0, ALL_COLUMNS)
    inside = columns < size
    scale = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    for turn in range(first, 2):
        is_real = turn > 0
        if is_real:
            wait_previous(PDL)
        _stamp(stamps, row, 0)
        is_there = (row < num_tokens) & is_real
        there = inside & is_there
        places = row.to(tl.int64) * size + columns
        values = _sum_of(x, residual, places, split_stride, there, X_SPLITS)
        exact = values.to(tl.float32)
        factor = tl.rsqrt(tl.sum(exact * exact, 0) / size + eps)
        every = tl.arange(0, ALL_EXPERTS)
        same = tl.zeros([ALL_EXPERTS], tl.int32) + _filled(factor)
        tl.store(factors + row * num_experts + every, same, mask=(every < num_experts) & is_there)
        _stamp(stamps, row, 1)
        tl.store(total + places, values, mask=there)
        result = (exact * factor * scale).to(values.dtype)
        tl.store(normed + places, result, mask=there)
        if rounded is not None:
            if is_there:
                store_rounded(
                    result.to(tl.float32),
                    rounded,
                    input_scales,
                    input_scale_stride,
                    row,
                    0,
                    size,
                    GROUP,
                    IN_TWO,
                )
        _stamp(stamps, row, 2)


@triton.jit
def _list_by_rank(
    found,
    tokens,
    is_token,
    rows,
    experts,
    begins,
    ends,
    num_blocks,
    num_hit,
    TOP_K: tl.constexpr,
    is_real,
):
    """What `_list_tile` writes, of ids [TOKENS, SLOTS]: each row counts those before it."""
    TOKENS: tl.constexpr = found.shape[0]
    SLOTS: tl.constexpr = found.shape[1]
    ROWS: tl.constexpr = TOKENS * SLOTS
    FAR: tl.constexpr = 1 << 20
    slots = tl.arange(0, SLOTS)
    is_row = is_token[:, None] & (slots < TOP_K)[None, :]
    # Rows in the order of experts and tokens; others, which differ too, behind them.
    key = tl.where(is_row, found * TOKENS + tl.arange(0, TOKENS)[:, None], FAR)
    row = tokens[:, None] * TOP_K + slots[None, :]
    keys = tl.reshape(key, [ROWS])
    row_of = tl.reshape(row, [ROWS])
    own = keys[:, None]
    other = keys[None, :]
    is_before = (other < own).to(tl.int32)
    is_same = ((other ^ own) < TOKENS).to(tl.int32)  # TOKENS is a power of 2
    counts = tl.sum(is_before + (is_same << 10) + ((is_same & is_before) << 20), 1)
    place = counts & 1023
    count = (counts >> 10) & 1023
    is_there = keys < FAR
    is_first = is_there & ((counts >> 20) == 0)
    first_keys = tl.where(is_first, keys, FAR)
    block = tl.sum((first_keys[None, :] < own).to(tl.int32), 1)
    tl.store(rows + place, row_of, mask=is_there)
    tl.store(experts + block, keys // TOKENS, mask=is_first)
    tl.store(begins + block, place, mask=is_first)
    tl.store(ends + block, place + count, mask=is_first)
    total = tl.sum(is_first.to(tl.int32), 0)
    tl.store(num_blocks, total, mask=is_real)
    tl.atomic_add(num_hit, tl.cast(total, tl.int64), mask=is_real, sem="relaxed")


@triton.jit
def _list_tile_if(
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
    is_real,
):
    is_own = (marks > 0).to(tl.int32)
    counts = tl.sum(is_own, 0)
    is_hit = (counts > 0).to(tl.int32)
    begin = tl.cumsum(counts, 0) - counts
    block = tl.cumsum(is_hit, 0) - is_hit
    places = begin[None, :] + tl.cumsum(is_own, 0) - is_own
    tl.store(rows + places, tokens[:, None] * TOP_K + marks - 1, mask=marks > 0)
    tl.store(experts + block, columns, mask=counts > 0)
    tl.store(begins + block, begin, mask=counts > 0)
    tl.store(ends + block, begin + counts, mask=counts > 0)
    total = tl.sum(is_hit, 0)
    tl.store(num_blocks, total, mask=is_real)
    tl.atomic_add(num_hit, tl.cast(total, tl.int64), mask=is_real, sem="relaxed")


@triton.jit
def _store_marks_if(
    marks, tile, tokens, columns, marked, counts, num_experts, marked_stride, is_real
):
    is_expert = (columns < num_experts) & is_real
    places = marked + columns[None, :] * marked_stride + tokens[:, None]
    tl.store(places, marks.to(tl.uint8), mask=is_expert[None, :])
    count = tl.sum((marks > 0).to(tl.int32), 0)
    tl.store(counts + tile * num_experts + columns, count.to(tl.uint8), mask=is_expert)


@triton.jit(do_not_specialize=["num_tokens", "first"])
def _route_few_kernel(
    x,
    residual,
    total,
    normed,
    norm_weight,
    weight,
    bias,
    correction,
    board,
    ids,
    weights,
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
    stamps,
    num_tokens,
    stride,
    split_stride,
    size,
    num_experts,
    marked_stride,
    input_scale_stride,
    first,
    eps,
    scale,
    reach,
    TOKENS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_SLOTS: tl.constexpr,
    X_SPLITS: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
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
    IN_TWO: tl.constexpr,
    BY_RANK: tl.constexpr,
    SAMPLED: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    program = tl.program_id(0)
    tile = tl.program_id(1)
    tokens = tile * TOKENS + tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    num_rows = tl.num_programs(1) * TOKENS
    PRODUCTS: tl.constexpr = BLOCKS * SPLITS
    if program < PRODUCTS:
        _leave_logits(
            x,
            residual,
            norm_weight,
            weight,
            board,
            tokens,
            is_token,
            program % BLOCKS,
            program // BLOCKS,
            num_rows,
            stride,
            split_stride,
            size,
            num_experts,
            EXPERTS,
            COLUMNS,
            AHEAD,
            X_SPLITS,
            IEEE,
            PDL,
            stamps,
            first,
        )
        return
    if program < tl.num_programs(0) - 1:
        if residual is not None:
            _norm_row(
                x,
                residual,
                total,
                normed,
                norm_weight,
                board + SPLITS * num_rows * num_experts,
                rounded,
                input_scales,
                tile * TOKENS + program - PRODUCTS,
                num_tokens,
                split_stride,
                size,
                input_scale_stride,
                eps,
                ALL_COLUMNS,
                X_SPLITS,
                GROUP,
                IN_TWO,
                PDL,
                stamps,
                first,
                num_experts,
                ALL_EXPERTS,
            )
        else:
            wait_previous(PDL)
            if rounded is not None:
                store_group_in_two(
                    x,
                    rounded,
                    input_scales,
                    stride,
                    size,
                    input_scale_stride,
                    tokens,
                    is_token,
                    program - PRODUCTS,
                    GROUP,
                )
        return
    every = tl.arange(0, ALL_EXPERTS)
    shift = tl.zeros([ALL_EXPERTS], tl.float32)
    if bias is not None:
        shift = tl.load(bias + every, mask=every < num_experts, other=0.0).to(tl.float32)
    for turn in range(first, 2):
        is_real = turn > 0
        if is_real:
            wait_previous(PDL)
        there = is_token & is_real
        _stamp(stamps, tile, 0)
        is_given = there[:, None] & (every < num_experts)[None, :]
        places = board + tokens[:, None] * num_experts + every[None, :]
        of_split = num_rows * num_experts
        logits = tl.zeros([TOKENS, ALL_EXPERTS], tl.float32)
        lowest = tl.cast(EMPTY, tl.int32)  # EMPTY is the least integer
        if SAMPLED:
            # One logit of each program, until all are there.
            parts = tl.arange(0, SPLIT_SLOTS)
            block = tl.arange(0, BLOCK_SLOTS)
            sample = board + (parts * num_rows + tile * TOKENS)[:, None] * num_experts
            sample += (block * EXPERTS)[None, :]
            is_sample = ((parts < SPLITS) & is_real)[:, None] & (block < BLOCKS)[None, :]
            while lowest == EMPTY:
                seen = tl.load(sample, mask=is_sample, other=0, volatile=True)
                lowest = tl.min(tl.min(seen, 1), 0)
            lowest = tl.cast(EMPTY, tl.int32)
        while lowest == EMPTY:
            loaded = (tl.load(places, mask=is_given, other=0, volatile=True),)
            for i in tl.static_range(1, SPLITS):
                bits = tl.load(places + i * of_split, mask=is_given, other=0, volatile=True)
                loaded += (bits,)  # type: ignore[assignment]
            if residual is not None:
                factor_bits = tl.load(
                    places + SPLITS * of_split, mask=is_given, other=0, volatile=True
                )
            logits = loaded[0].to(tl.float32, bitcast=True)
            least = loaded[0]
            for i in tl.static_range(1, SPLITS):
                logits += loaded[i].to(tl.float32, bitcast=True)
                least = tl.minimum(least, loaded[i])
            if residual is not None:
                least = tl.minimum(least, factor_bits)
                logits *= factor_bits.to(tl.float32, bitcast=True)
            lowest = tl.min(tl.min(least, 1), 0)
        _stamp(stamps, tile, 1)
        for i in tl.static_range(SPLITS):
            tl.store(places + i * of_split, EMPTY, mask=is_given)
        if residual is not None:
            tl.store(places + SPLITS * of_split, EMPTY, mask=is_given)
        if bias is not None:
            logits += shift[None, :]
        found, chosen, marks = _choose(
            logits,
            every,
            correction,
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
        )
        slots = tl.arange(0, SLOTS)
        chosen_places = tokens[:, None] * TOP_K + slots[None, :]
        is_slot = there[:, None] & (slots < TOP_K)[None, :]
        tl.store(ids + chosen_places, found, mask=is_slot)
        tl.store(weights + chosen_places, chosen, mask=is_slot)
        _stamp(stamps, tile, 2)
        if rows is not None:
            if BY_RANK:
                _list_by_rank(
                    found,
                    tokens,
                    there,
                    rows,
                    block_experts,
                    begins,
                    ends,
                    num_blocks,
                    num_hit,
                    TOP_K,
                    is_real,
                )
            else:
                marks = tl.where(there[:, None], marks, 0)
                _list_tile_if(
                    marks,
                    tokens,
                    every,
                    rows,
                    block_experts,
                    begins,
                    ends,
                    num_blocks,
                    num_hit,
                    TOP_K,
                    is_real,
                )
        if marked is not None:
            marks = tl.where(there[:, None], marks, 0)
            _store_marks_if(
                marks, tile, tokens, every, marked, counts, num_experts, marked_stride, is_real
            )
        _stamp(stamps, tile, 3)


@triton.jit(do_not_specialize=["first"])
def _norm_warm_kernel(
    x, residual, weight, out, split_stride, size, first, eps,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < size
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    for turn in range(first, 2):
        is_real = turn > 0
        there = inside & is_real
        if is_real:
            wait_previous(PDL)
        values = _sum_of(x, residual, row * size + columns, split_stride, there, SPLITS)
        if is_real:
            allow_next(PDL)
        tl.store(residual + row * size + columns, values, mask=there)
        exact = values.to(tl.float32)
        factor = tl.rsqrt(tl.sum(exact * exact, 0) / size + eps)
        tl.store(out + row * size + columns, (exact * factor * scale).to(values.dtype), mask=there)


def norm_warm(x: Tensor, weight: Tensor, eps: float, residual: Tensor, first: int = 0) -> Tensor:
    out = torch.empty_like(residual)
    num_rows, size = residual.shape
    block = power_of_2(size)
    _norm_warm_kernel[(num_rows,)](
        x, residual, weight, out, x.stride(0), size, first, eps, BLOCK=block, SPLITS=x.shape[0],
        num_warps=2 * min(16, max(1, block // 256)), num_stages=1,
        maxnreg=min(255, 65536 // (32 * 2 * min(16, max(1, block // 256)))),
        **launch_options(x.device),
    )
    return out
