"""Attention of prompts and their chunks: new tokens over cached and new keys, all in blocks.

On Hopper GPUs attention_prefill_hopper.py computes most of it. The kernel here computes what is
left, and on other GPUs everything.

A work item is some new tokens of one sequence; one program per KV head computes it for all query
heads of that KV head: row r of its tile is head r % group of token r // group. Few tokens of a long
context make few items, so those with many keys are split: each program leaves partial results, and
the last one of an item adds them up.
Reference: `ReferenceBackend`.

Measured on one H200 (bf16, heads of 128, blocks of 16, 8 x 512 to 1 x 8,192 tokens; TFLOP/s), as
rows x keys x warps, 2 tiles in flight; the first is used for heads that share K and V, the second
for heads that do not:
            64 x 64 x 4    128 x 32 x 8    128 x 64 x 8    64 x 32 x 4    128 x 128 x 8
  32 / 8     209 to 453      194 to 353      202 to 455     199 to 351       171 to 467
  40 / 40    174 to 443      215 to 408      169 to 391     171 to 343       170 to 380
With 64 x 64 x 4, 40 heads fall to 290 at 4 x 2,048, where 128 x 32 x 8 has 345. Three tiles in
flight leave no room for a second program on an SM: 0.6 of the speed. Launching all items of
one KV head before those of the next: 1.05 at best, 0.7 to 0.87 at 1 x 2,048.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, NamedTuple, Self

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import KVScales
from octavo.ops.cuda import attention_prefill_hopper
from octavo.ops.cuda.attention_scores import (
    KernelScores,
    has_fast_tanh,
    log2_scores,
)
from octavo.ops.cuda.attention_work_items import Sequences, Splitting
from octavo.ops.cuda.paged import (
    FLOAT16_WEIGHT,
    LOWEST,
    PREFILL_FIELDS,
    in_float16,
    key_offsets,
    precision_of,
    scale_arguments,
    tile_blocks,
    unscaled,
)
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY, power_of_2

_MAX_ITEMS = 65_535  # per launch: CUDA's limit for the second dimension of a grid
_LONG = 2048  # keys of a sequence, from which on larger tiles take less time
KEY_SECONDS = 12e-9  # of a program of attention_prefill_hopper.py for a key; 22e-9 in heads of 256
# What a program takes for a key, beside half as many rows as attention_prefill_hopper.py has, or as
# many, each in 16 bits and in e4m3: in keys of that kernel.
_SPLIT_KEY_OF_HALF, _SPLIT_KEY = (1.7, 2.5), (2.7, 3.5)
# What one SM would take to convert a key of e4m3, and the launch that converts: in the same.
_CONVERTED_KEY, _CONVERSION = 2.4, 600


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Compile-time choices: rows and keys per tile, warps per program, tiles in flight."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    per_sm: int = 1  # programs that an SM has registers and shared memory for
    added_keys: int = 32  # see Splitting

    def splitting(self, num_kv_heads: int, num_sms: int) -> Splitting:
        """On a GPU with so many multiprocessors."""
        return Splitting(max(1, num_sms * self.per_sm // num_kv_heads), self.added_keys)


@dataclass(frozen=True, slots=True)
class HopperPrefillConfig:
    """Rows and keys per tile of attention_prefill_hopper.py."""

    tile: int
    rows: ClassVar[int] = attention_prefill_hopper.ROWS

    @classmethod
    def of(
        cls, contexts: Sequence[int], window: int | None, head_dim: int, num_passes: int = 1
    ) -> HopperPrefillConfig:
        """contexts: how many keys each sequence has; num_passes: see DequantizedPrompts."""
        if head_dim > 128:  # larger tiles would leave no room for a second one
            return cls(64)
        if num_passes > 1:  # of so many keys that most contexts are long
            return cls(128)
        # On average half of an item's last tile is in vain, which with few keys is much. Most of
        # the work is that of the longest sequences.
        lens = [min(each, window or each) for each in contexts]
        is_long = sum(each * each for each in lens) >= _LONG * sum(lens)
        return cls(128 if is_long else 64)


class PrefillTimes(NamedTuple):
    """What two kernels are estimated to take for the prompts of one layer, in KEY_SECONDS."""

    split: float  # this module's, which splits keys
    whole: float  # that of Hopper GPUs, which does not


def prefill_times(
    seqs: Sequences,
    window: int | None,
    group: int,
    num_kv_heads: int,
    num_sms: int,
    config: PrefillConfig,
    is_fp8: bool,
    num_passes: int = 1,
) -> PrefillTimes:
    """Few tokens over many keys take less time where these are split.

    config: of this module's kernel; is_fp8: whether the cache is e4m3; num_passes: of the other
    kernel, each of which takes as long as its longest item.
    """
    # On average. Of an encoder there may be fewer keys than new tokens.
    visible = np.maximum(seqs.contexts.astype(np.int64) - seqs.lens // 2, 1)
    if window is not None:
        visible = np.minimum(visible, window + np.minimum(seqs.lens, config.rows // group))
    own, other = (
        int((-(-seqs.lens * group // rows) * visible).sum())
        for rows in (config.rows, HopperPrefillConfig.rows)
    )
    keys = _SPLIT_KEY if config.rows >= HopperPrefillConfig.rows else _SPLIT_KEY_OF_HALF
    longest = int(visible.max(initial=0))
    splitting = config.splitting(num_kv_heads, num_sms)
    share = max(own / splitting.at_once, splitting.min_split(longest), 1)
    split = keys[is_fp8] * (share + splitting.added_keys * longest / share)
    whole = max(other * num_kv_heads / num_sms, num_passes * longest)
    if is_fp8:
        whole += _CONVERTED_KEY * int(visible.sum()) * num_kv_heads / num_sms + _CONVERSION
    return PrefillTimes(split, whole)


@cache
def prefill_config(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    shared_memory: int = MUCH_SHARED_MEMORY,
    is_fp8: bool = False,
) -> PrefillConfig:
    """group: query heads per KV head; shared_memory: bytes that a program may take; is_fp8: whether
    the cache is e4m3."""
    padded = max(16, power_of_2(head_dim))
    if dtype == torch.float32:
        rows = max(16, power_of_2(group))
        return PrefillConfig(rows, tile=max(16, 2048 // padded), num_warps=4, num_stages=1)
    rows = max(128, power_of_2(group))  # a tile has room for at least one token
    if padded > 256 or (padded > 128 and shared_memory < MUCH_SHARED_MEMORY):
        rows, tile = (64, 32) if group <= 64 else (rows, 16)
        return PrefillConfig(rows, tile, num_warps=8, num_stages=2)
    if padded > 128:
        return PrefillConfig(rows, tile=32, num_warps=8, num_stages=2)
    if group == 1 or group > 64:
        return PrefillConfig(rows, tile=32, num_warps=8, num_stages=3, per_sm=1 if is_fp8 else 2)
    added_keys = 32 if is_fp8 else 128
    return PrefillConfig(64, tile=64, num_warps=4, num_stages=3, per_sm=2, added_keys=added_keys)


@dataclass(frozen=True, slots=True)
class PrefillSplits:
    """Places of split items' partial results, for one stream. A program's rows have one each."""

    sums: Tensor  # float32, flat: of values times weights
    sizes: Tensor  # float32, flat: of each row, log2 of the largest weight, and the sum of weights
    arrivals: Tensor  # int32, flat: programs of an item that have ended; 0 between launches

    @classmethod
    def of(cls, num_programs: int, num_rows: int, head_dim: int, device: torch.device) -> Self:
        """For so many programs with so many rows each, at most."""
        rows = num_programs * num_rows
        return cls(
            torch.empty(rows * max(16, power_of_2(head_dim)), dtype=torch.float32, device=device),
            torch.empty(2 * rows, dtype=torch.float32, device=device),
            torch.zeros(num_programs, dtype=torch.int32, device=device),
        )


@triton.jit
def attend(
    top,
    total,
    acc,
    q,
    up,
    last,
    position,
    slope,
    bias,
    keys,
    values,
    blocks,
    first,
    end,
    block_stride,
    scale,
    cap,
    MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FAST_TANH: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add one tile of keys to the rows' online softmax.

    q, up: queries, and their factors if they are `in_float16`. last, position [ROWS]: the last key
    that a row may see, and where its query is. slope, bias: see `log2_scores`.
    """
    dim = tl.arange(0, DIM_PAD)
    lane = tl.arange(0, TILE)
    offsets = key_offsets(blocks, first, block_stride, TILE, BLOCK_SIZE, HEAD_DIM)
    places = offsets[:, None] + dim[None, :]
    in_head = dim[None, :] < HEAD_DIM
    if DIM_PAD == HEAD_DIM:
        k = tl.load(keys + places)
    else:
        k = tl.load(keys + places, mask=in_head, other=0.0)
    scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    EXPONENT: tl.constexpr = FLOAT16_WEIGHT if up is not None else 0.0
    if up is not None:
        scores *= up[:, None]
    if (cap is not None) or (slope is not None) or (bias is not None):
        distance = first + lane[None, :] - position[:, None]
        scores = log2_scores(scores, scale, cap, slope, bias, distance, FAST_TANH, MAX_DISTANCE)
        scale = 1.0
    # A scale waits for the exponent, where it is a part of a fused multiply-add.
    if MASKED:
        visible = first + lane[None, :] <= last[:, None]
        if WINDOW > 0:
            visible = visible & (first + lane[None, :] > position[:, None] - WINDOW)
        scores = tl.where(visible, scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) * scale - EXPONENT)
    weights = tl.exp2(scores * scale - new_top[:, None])
    old_weight = tl.exp2(top - new_top)
    total = total * old_weight + tl.sum(weights, 1)
    acc = acc * old_weight[:, None]
    # Values never written may be NaN, which a weight of 0 does not remove.
    if MASKED:
        v = tl.load(values + places, mask=(first + lane < end)[:, None] & in_head, other=0.0)
    elif DIM_PAD == HEAD_DIM:
        v = tl.load(values + places)
    else:
        v = tl.load(values + places, mask=in_head, other=0.0)
    acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc, input_precision=PRECISION)
    return new_top, total, acc


@triton.jit
def _store_sums(
    output,
    places,
    is_row,
    sums,
    sizes,
    first,
    stride,
    num_splits,
    value_scale,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write the results of an item, all splits of which have left theirs.

    places: of the rows in `output`. first: where the first split's results are, in rows; stride: to
    the next one's.
    """
    # Loads wait for memory: several splits' are under way at once, for a part of the columns, which
    # leaves registers for them.
    COLUMNS: tl.constexpr = min(DIM_PAD, max(32, DIM_PAD // 4))
    AT_ONCE: tl.constexpr = 4
    SIZES: tl.constexpr = 16
    row = tl.arange(0, ROWS)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for i in tl.range(0, num_splits, SIZES):
        split = i + tl.arange(0, SIZES)
        is_split = (split < num_splits)[:, None] & (row < ROWS)[None, :]
        own = sizes + (first + split * stride)[:, None] * 2 + row[None, :]
        # Here and below, past the L1 cache, which may have what was in these places before.
        tops = tl.load(own, is_split, other=LOWEST, cache_modifier=".cg")
        totals = tl.load(own + ROWS, is_split, other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(tops, 0))
        total = total * tl.exp2(top - new_top)
        total += tl.sum(totals * tl.exp2(tops - new_top[None, :]), 0)
        top = new_top
    for begin in tl.static_range(0, DIM_PAD, COLUMNS):
        dim = begin + tl.arange(0, COLUMNS)
        inside = is_row[:, None] & (dim < HEAD_DIM)[None, :]
        acc = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.range(0, num_splits, AT_ONCE):
            for j in tl.static_range(AT_ONCE):
                own = first + (i + j) * stride
                is_split = i + j < num_splits
                its_top = tl.load(
                    sizes + own * 2 + row, is_split & (row < ROWS), other=LOWEST,
                    cache_modifier=".cg",
                )  # fmt: skip
                its_sums = tl.load(
                    sums + own * DIM_PAD + row[:, None] * DIM_PAD + dim[None, :], is_split & inside,
                    other=0.0, cache_modifier=".cg",
                )  # fmt: skip
                acc += tl.exp2(its_top - top)[:, None] * its_sums
        out = unscaled(_mean(acc, total), value_scale).to(output.dtype.element_ty)
        tl.store(output + places[:, None] + dim[None, :], out, mask=inside)


@triton.jit
def _mean(acc, total):
    """Of values; total 0: a row past the last token."""
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    query,
    cache,
    table,
    items,
    output,
    sums,  # these three: PrefillSplits
    sizes,
    arrivals,
    query_stride,
    table_stride,
    block_stride,
    scale,  # these five: KernelScores
    cap,
    slopes,
    sinks,
    biases,
    key_inverse,  # these two: KVScales
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAUSAL: tl.constexpr,
    FAST_TANH: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_previous(PDL)
    head = tl.program_id(0)
    item = items + tl.program_id(1) * FIELDS
    token = tl.load(item)
    table += tl.load(item + 1).to(tl.int64) * table_stride
    begin = tl.load(item + 2)
    seen_by_all = tl.load(item + 3)
    end = tl.load(item + 4)
    first_position = tl.load(item + 5)
    count = tl.load(item + 6)
    num_splits, split = 1, 0
    if arrivals is not None:
        split = tl.load(item + 8)
        num_splits = tl.load(item + 9)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    inside = (row < count * GROUP)[:, None]
    if DIM_PAD != HEAD_DIM:
        inside = inside & (dim < HEAD_DIM)[None, :]
    place = (row // GROUP).to(tl.int64)
    member = (head * GROUP + row % GROUP) * HEAD_DIM
    query += token.to(tl.int64) * query_stride
    q = tl.load(
        query + (place * query_stride + member)[:, None] + dim[None, :], mask=inside, other=0.0
    )
    up = None
    if (key_inverse is not None) and (q.dtype == tl.bfloat16):
        q, up = in_float16(q)
    position = first_position + row // GROUP
    last = position
    if not CAUSAL:
        last = tl.zeros([ROWS], tl.int32) + (end - 1)
    keys = cache + head * (2 * BLOCK_SIZE * HEAD_DIM)
    values = keys + BLOCK_SIZE * HEAD_DIM

    slope = None
    if slopes is not None:
        slope = tl.load(slopes + head * GROUP + row % GROUP, mask=row < ROWS, other=0.0)
    bias = None
    if biases is not None:
        bias = biases + (head * GROUP + row % GROUP) * (MAX_DISTANCE + 1)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        sink = tl.maximum(tl.load(sinks + head * GROUP + row % GROUP), LOWEST)
        top = tl.where(split == 0, sink, top)
        total = tl.where(split == 0, 1.0, total)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    blocks = tile_blocks(table, begin, end, TILE, BLOCK_SIZE)
    if WINDOW == 0:
        for first in tl.range(begin, seen_by_all, TILE):
            # One tile ahead, so that loading keys never waits for the table.
            next_blocks = tile_blocks(table, first + TILE, end, TILE, BLOCK_SIZE)
            top, total, acc = attend(
                top, total, acc, q, up, last, position, slope, bias,
                keys, values, blocks, first, end, block_stride, scale, cap,
                False, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, WINDOW, FAST_TANH, MAX_DISTANCE,
                PRECISION,
            )  # fmt: skip
            blocks = next_blocks
        begin = seen_by_all
    for first in tl.range(begin, end, TILE):
        next_blocks = tile_blocks(table, first + TILE, end, TILE, BLOCK_SIZE)
        top, total, acc = attend(
            top, total, acc, q, up, last, position, slope, bias,
            keys, values, blocks, first, end, block_stride, scale, cap,
            True, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, WINDOW, FAST_TANH, MAX_DISTANCE, PRECISION,
        )  # fmt: skip
        blocks = next_blocks

    ROW_SIZE: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    output += token.to(tl.int64) * ROW_SIZE
    if arrivals is not None and num_splits > 1:
        first_slot = tl.load(item + 10) * NUM_KV_HEADS + head
        own = (first_slot + split * NUM_KV_HEADS).to(tl.int64) * ROWS
        tl.store(sums + own * DIM_PAD + row[:, None] * DIM_PAD + dim[None, :], acc, inside)
        tl.store(sizes + own * 2 + row, top)
        tl.store(sizes + own * 2 + ROWS + row, total)
        tl.debug_barrier()
        seen = tl.atomic_add(arrivals + first_slot, 1, sem="acq_rel", scope="gpu")
        if seen == num_splits - 1:
            tl.store(arrivals + first_slot, 0)
            _store_sums(
                output, place * ROW_SIZE + member, row < count * GROUP, sums, sizes,
                first_slot.to(tl.int64) * ROWS, NUM_KV_HEADS * ROWS, num_splits, value_scale,
                HEAD_DIM, DIM_PAD, ROWS,
            )  # fmt: skip
    else:
        out = unscaled(_mean(acc, total), value_scale).to(output.dtype.element_ty)
        tl.store(output + (place * ROW_SIZE + member)[:, None] + dim[None, :], out, mask=inside)


def prefill_attention(
    query: Tensor,
    layer_cache: Tensor,
    table: Tensor,
    items: Tensor,
    output: Tensor,
    scores: KernelScores,
    window: int | None,
    config: PrefillConfig | HopperPrefillConfig,
    is_causal: bool = True,
    kv_scales: KVScales | None = None,
    splits: PrefillSplits | None = None,
) -> None:
    """Attend for the tokens that `items` names, and write their rows of `output`.

    Args:
        query: [num_tokens, num_heads, head_dim], tokens strided.
        layer_cache: [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided.
        table: int32 [num_rows, max_blocks].
        items: int32 [num_items * PREFILL_FIELDS], each (first token, table row, first key, end of
            the tiles whose keys all rows see, end of keys, first token's position, tokens, end of
            the sequence's keys, which split of the keys, number of splits, place of the first one).
            The first key is a multiple of `tile_alignment(config.tile, block_size)`, and tokens *
            group <= config.rows.
        output: [num_tokens, num_heads * head_dim], dense; with HopperPrefillConfig tokens may be
            strided.
        is_causal: whether a query sees no key behind its position; otherwise all up to the end.
        kv_scales: if the cache is e4m3, or, with HopperPrefillConfig, what was e4m3 and is not
            multiplied by them yet.
        splits: if items may be split; with HopperPrefillConfig they are whole.
    """
    if isinstance(config, HopperPrefillConfig):
        assert not scores.need_distances
        attention_prefill_hopper.attend_on_hopper(
            query,
            layer_cache,
            table,
            items,
            output,
            scores.scale,
            scores.cap,
            scores.sinks,
            window,
            config.tile,
            is_causal,
            1.0 if kv_scales is None else kv_scales.value,
        )
        return
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, _, block_size, _ = layer_cache.shape[1:]
    places = (None,) * 3 if splits is None else (splits.sums, splits.sizes, splits.arrivals)
    for part in torch.split(items, _MAX_ITEMS * PREFILL_FIELDS):
        _prefill_kernel[(num_kv_heads, len(part) // PREFILL_FIELDS)](
            query,
            layer_cache,
            table,
            part,
            output,
            *places,
            query.stride(0),
            table.stride(0),
            layer_cache.stride(0),
            scores.scale,
            scores.cap,
            scores.slopes,
            scores.sinks,
            scores.biases,
            *scale_arguments(kv_scales)[::2],
            NUM_KV_HEADS=num_kv_heads,
            GROUP=num_heads // num_kv_heads,
            HEAD_DIM=head_dim,
            DIM_PAD=max(16, power_of_2(head_dim)),
            BLOCK_SIZE=block_size,
            ROWS=config.rows,
            TILE=config.tile,
            WINDOW=window or 0,
            CAUSAL=is_causal,
            FAST_TANH=has_fast_tanh(query.dtype, query.device),
            MAX_DISTANCE=scores.max_distance,
            PRECISION=precision_of(query.dtype),
            FIELDS=PREFILL_FIELDS,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **launch_options(query.device),
        )
