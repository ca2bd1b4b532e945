"""Cascade attention: decodes attend to keys in blocks that they share, which are read only once.

A work item is (a split of a shared segment of keys, some of the sequences that share it). One
program per KV head computes it for all query heads of that KV head of all these sequences: row r of
its tile is head r % group of member r // group. It leaves a partial result for each, as the splits
of attention_decode.py do, and counts as one of them; the decode kernel that follows combines them.
What joins a softmax beside the keys (attention sinks) is left to the decode kernel.
Reference: `ReferenceBackend`, which reads every key for every sequence.

Measured on one H200 (bf16, heads of 128, blocks of 16): microseconds of attention if every sequence
reads all its keys, and with this kernel (rows, keys per tile, warps, tiles in flight):
                                     40 / 40, apart  16, 16, 1, 3  64, 64, 4, 3
  64 x 6 beams, 128 + 32 own tokens             167           161           197
  64 x 4 beams, 512 + 32                        344           225           251
  4 x 8 beams, 2,048 + 128                      167            79            85
  512 behind 1,024, 96 each                   1,261           363           348
                                      32 / 8, apart
  64 x 6 beams, 128 + 32                         41            46            54
  64 x 4 beams, 512 + 32                         78            61            67
  4 x 8 beams, 2,048 + 128                       48            38            32
  512 behind 1,024, 96 each                     246           132           105
Of few sequences it pays for long contexts alone (docs/experiments.md, Few sequences that share
keys); worker/cascade.py has the limits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import KVScales
from octavo.ops.cuda.attention_decode import Scratch, leave_result
from octavo.ops.cuda.attention_prefill import attend
from octavo.ops.cuda.attention_scores import KernelScores, has_fast_tanh
from octavo.ops.cuda.kv_write import HeadChanges
from octavo.ops.cuda.paged import (
    ITEM_FIELDS,
    LOWEST,
    MEMBER_FIELDS,
    in_float16,
    precision_of,
    scale_arguments,
    tile_blocks,
)
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.rotary import load_rows
from octavo.ops.cuda.tile_sizes import power_of_2

MAX_PROGRAMS = 1056  # the most that any configuration splits the keys for


@dataclass(frozen=True, slots=True)
class CascadeConfig:
    """Compile-time choices: rows and keys per tile, warps per program, tiles in flight."""

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    num_programs: int  # that the keys are split for


@cache
def cascade_config(dtype: torch.dtype, head_dim: int, group: int) -> CascadeConfig | None:
    """group: query heads per KV head. None: a tile has no room for two sequences."""
    padded = max(16, power_of_2(head_dim))
    if dtype == torch.float32:
        rows = max(16, 2 * power_of_2(group))
        tile = max(16, 2048 // padded)
        return CascadeConfig(rows, tile, 4, num_stages=1, num_programs=MAX_PROGRAMS // 4)
    if group > 32:
        return None
    if padded > 128:
        return CascadeConfig(64, tile=32, num_warps=4, num_stages=2, num_programs=MAX_PROGRAMS // 4)
    if group == 1:
        tile = max(16, 2048 // padded)
        return CascadeConfig(16, tile, num_warps=1, num_stages=3, num_programs=MAX_PROGRAMS)
    return CascadeConfig(64, tile=64, num_warps=4, num_stages=3, num_programs=MAX_PROGRAMS // 4)


@triton.jit(do_not_specialize=["table_stride"])
def _cascade_kernel(
    query,
    cache,
    table,
    items,
    members,
    means,
    sizes,
    cos,
    sin,
    query_weight,
    query_eps,
    query_stride,
    table_stride,
    block_stride,
    scale,  # these four: KernelScores
    cap,
    slopes,
    biases,
    key_inverse,  # of KVScales
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FAST_TANH: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    MEMBER_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    head = tl.program_id(0)
    # Items, members and tables are complete before a step's first kernel.
    item = items + tl.program_id(1) * FIELDS
    count = tl.load(item)
    table += tl.load(item + 1).to(tl.int64) * table_stride
    begin = tl.load(item + 2)
    end = tl.load(item + 3)
    first_member = tl.load(item + 4)
    split = tl.load(item + 5)
    blocks = tile_blocks(table, begin, end, TILE, BLOCK_SIZE)
    wait_previous(PDL)
    if count > 0:
        row = tl.arange(0, ROWS)
        inside = row < count * GROUP
        member = members + (first_member + row // GROUP) * MEMBER_SIZE
        token = tl.load(member, mask=inside, other=0).to(tl.int64)
        position = tl.load(member + 1, mask=inside, other=0)
        heads = token * query_stride + (head * GROUP + row % GROUP) * HEAD_DIM
        q = load_rows(
            query, heads, inside, position, cos, sin, query_weight, query_eps,
            HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
        )  # fmt: skip
        up = None
        if (key_inverse is not None) and (q.dtype == tl.bfloat16):
            q, up = in_float16(q)
        keys = cache + head * (2 * BLOCK_SIZE * HEAD_DIM)
        values = keys + BLOCK_SIZE * HEAD_DIM
        last = tl.zeros([ROWS], tl.int32) + (end - 1)  # all rows see all keys of the segment

        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head * GROUP + row % GROUP, mask=inside, other=0.0)
        bias = None
        if biases is not None:
            bias = biases + (head * GROUP + row % GROUP) * (MAX_DISTANCE + 1)
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        whole = begin + (end - begin) // TILE * TILE
        for first in tl.range(begin, whole, TILE):
            # One tile ahead, so that loading keys never waits for the table.
            next_blocks = tile_blocks(table, first + TILE, end, TILE, BLOCK_SIZE)
            top, total, acc = attend(
                top, total, acc, q, up, last, position, slope, bias,
                keys, values, blocks, first, end, block_stride, scale, cap,
                False, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, 0, FAST_TANH, MAX_DISTANCE, PRECISION,
            )  # fmt: skip
            blocks = next_blocks
        if whole < end:
            top, total, acc = attend(
                top, total, acc, q, up, last, position, slope, bias,
                keys, values, blocks, whole, end, block_stride, scale, cap,
                True, HEAD_DIM, DIM_PAD, BLOCK_SIZE, TILE, 0, FAST_TANH, MAX_DISTANCE, PRECISION,
            )  # fmt: skip

        place = tl.load(member + 2, mask=inside, other=0).to(tl.int64) + split
        result = (place * NUM_KV_HEADS + head) * GROUP + row % GROUP
        leave_result(means, sizes, result, inside, top, total, acc, HEAD_DIM)


def cascade_attention(
    query: Tensor,
    layer_cache: Tensor,
    table: Tensor,
    items: Tensor,
    members: Tensor,
    scratch: Scratch,
    changes: HeadChanges,
    scores: KernelScores,
    config: CascadeConfig,
    kv_scales: KVScales | None = None,
) -> None:
    """Attend to shared keys; partial results are splits that `decode_attention` combines.

    Args:
        query: [num_tokens, num_heads, head_dim], tokens strided, before the head norm and rotary
            embedding in `changes`.
        layer_cache: [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided.
        table: int32 [num_rows, max_blocks].
        items: int32 [num_items * ITEM_FIELDS], each (members, table row of any of them, first key,
            end of keys, first member, index of the split, 0, 0); no members: no work. The first
            key is a multiple of `tile_alignment(config.tile, block_size)`, and
            members * group <= config.rows.
        members: int32, MEMBER_FIELDS each (token, its position, place of the segment's first
            partial result).
        kv_scales: if the cache is e4m3.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, _, block_size, _ = layer_cache.shape[1:]
    cos, sin, query_weight, _, query_eps, _ = changes.arguments(query)
    _cascade_kernel[(num_kv_heads, len(items) // ITEM_FIELDS)](
        query,
        layer_cache,
        table,
        items,
        members,
        scratch.means,
        scratch.sizes,
        cos,
        sin,
        query_weight,
        query_eps,
        query.stride(0),
        table.stride(0),
        layer_cache.stride(0),
        scores.scale,
        scores.cap,
        scores.slopes,
        scores.biases,
        scale_arguments(kv_scales)[0],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        ROWS=config.rows,
        TILE=config.tile,
        ROTARY_HALF=changes.rotary_half,
        INTERLEAVED=changes.interleaved,
        HAS_NORM=changes.query_norm is not None,
        FAST_TANH=has_fast_tanh(query.dtype, query.device),
        MAX_DISTANCE=scores.max_distance,
        PRECISION=precision_of(query.dtype),
        FIELDS=ITEM_FIELDS,
        MEMBER_SIZE=MEMBER_FIELDS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(query.device),
    )
