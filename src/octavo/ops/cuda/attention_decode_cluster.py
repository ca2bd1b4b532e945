"""Decodes of few sequences on Hopper GPUs: a cluster of programs for each KV head of a sequence.

What one sequence waits for is latency, not bytes. Much of it are partial results that pass through
the L2 cache (attention_decode.py); the programs of a cluster (clusters.py) send them to each other.
So a cluster takes all keys of a sequence and KV head, an equal share for each program, and then
each program adds up some columns of the output.

A program's warps take 16 keys of a tile each, and need nothing of each other until all keys are
done. Up to there nothing passes through shared memory but the queries: keys come from memory as the
left operand of the tensor cores, in registers, and queries are the right one, whose 8 columns are
the heads of a group. Scores [keys, heads] become weights in the same registers, and are transposed
by one instruction for 8 x 8 of them (movmatrix). Values are the left operand of the second product:
a thread has 8 neighbouring elements of a key, and which rows of the product they are is a matter of
names. So a thread loads 16 bytes at once, of keys and of values.

Of an FP8 cache the products are in float16, which every e4m3 number is, too (`in_float16`).

The first tile is loaded before the preceding kernel has ended (pdl.py). The program with the last
keys of a sequence also takes the new token, whose key is rotated beside the queries.

With more pairs of sequences and KV heads, or more keys, the kernel is slower than that of
attention_decode.py (`cluster_config`): a program has one tile under way, and a cluster no more than
16 programs. docs/experiments.md, Clusters for one sequence, has the figures.

Reference: `ReferenceBackend`. Heads of any other kind have attention_decode.py's kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from octavo.ops.base import MOST_CONTINUED, KVScales
from octavo.ops.cuda.attention_scores import TANH, KernelScores
from octavo.ops.cuda.clusters import (
    BARRIER_BYTES,
    declare_inbox,
    inbox_of,
    keep_own,
    launch,
    of_rank,
    open_inbox,
    read_own,
    send,
    send_pair,
    wait_for_bytes,
    wait_until_open,
)
from octavo.ops.cuda.hopper import sync_threads
from octavo.ops.cuda.kv_write import HeadChanges
from octavo.ops.cuda.paged import (
    ITEM_FIELDS,
    LOWEST,
    REREAD,
    float16_factors,
    scale_arguments,
    stored,
    unscaled,
)
from octavo.ops.cuda.pdl import launch_options
from octavo.ops.cuda.rotary import partner_of
from octavo.ops.cuda.tile_sizes import power_of_2

_HEAD_DIMS = (64, 128, 256)
_CLUSTER = 16
_KEYS = tl.constexpr(16)  # of a warp
_HEADS = tl.constexpr(8)  # of a group, padded
_MOST_COLUMNS = 1024  # of the output, for each KV head
_TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """Says that a step's decodes have this module's kernel, in programs of so many warps."""

    num_warps: int = 4
    is_one_tile: bool = False  # no sequence has more keys than one tile of each program

    @property
    def tile(self) -> int:
        """Keys that a program takes at once."""
        return self.num_warps * int(_KEYS.value)

    def takes(self, dtype: torch.dtype, head_dim: int, group: int) -> bool:
        """Whether the kernel computes decodes of such layers on a Hopper GPU.

        The cache is of the same dtype, or e4m3; scores do not depend on distances.

        group: query heads of a KV head.
        """
        return (
            dtype in (torch.float16, torch.bfloat16)
            and head_dim in _HEAD_DIMS
            and group <= _HEADS.value
            # An output column for each thread, and what the warps keep fits in 48 KB.
            and 32 * self.num_warps <= power_of_2(group) * head_dim <= _MOST_COLUMNS
        )


_ONE_TILE = ClusterConfig(is_one_tile=True)
_KEYS_OF_TILES = _CLUSTER * _ONE_TILE.tile  # one for each program
# Up to so many tokens of a sequence its keys are one tile of each program, also when steps have
# continued; and programs of four and of eight warps are faster than other kernels.
CONTEXT_LIMITS = (_KEYS_OF_TILES + 1 - MOST_CONTINUED, 4096, 8192)


def cluster_config(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_pairs: int,
    longest: int,
    window: int | None = None,
) -> ClusterConfig | None:
    """How decodes of such layers are computed; None: by another kernel, which is faster or has to.

    Args:
        dtype, head_dim, group: see `ClusterConfig.takes`.
        num_pairs: sequences times KV heads. Up to eight clusters have an SM for each program, and
            up to four leave room for programs of more registers.
        longest: tokens of a sequence, at most, in the first of the steps that continue each other.
        window: of which a token sees so many, itself included.
    """
    narrow, wide = ClusterConfig(), ClusterConfig(8)
    _, most, most_of_wide = CONTEXT_LIMITS
    if not narrow.takes(dtype, head_dim, group) or num_pairs > 8:
        return None
    has_few_pairs, last_longest = num_pairs <= 4, longest + MOST_CONTINUED
    if has_few_pairs and min(last_longest, window or last_longest) - 1 <= _KEYS_OF_TILES:
        return _ONE_TILE
    if head_dim > 128:
        return None
    keys = min(longest, window or longest)
    if has_few_pairs and head_dim == 128 and wide.takes(dtype, head_dim, group):
        return wide if keys <= most_of_wide else None
    return narrow if keys <= most else None


@gluon.jit
def _along(AXIS: gl.constexpr, SIZE: gl.constexpr, LAYOUT: gl.constexpr):
    """0 .. SIZE - 1 along an axis of a tensor with three."""
    if AXIS == 0:
        index = gl.arange(0, SIZE, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
        return index[:, None, None]
    elif AXIS == 1:
        index = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
        return index[None, :, None]
    else:
        index = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        return index[None, None, :]


@gluon.jit
def _tile_keys(first, WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Which keys [WARPS, 16] are in a tile, for a tensor [WARPS, 16, HEAD_DIM] of `LAYOUT`."""
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    key = gl.arange(0, _KEYS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    return first + warp[:, None] * _KEYS + key[None, :]


@gluon.jit
def _blocks_of(table, key, end, BLOCK_SIZE: gl.constexpr):
    """The blocks that hold these keys; the null block from `end` on."""
    return gl.load(table + key // BLOCK_SIZE, mask=key < end, other=0, eviction_policy=REREAD)


@gluon.jit
def _load_tile(
    cached,
    blocks,
    key,
    end,
    block_stride,
    BLOCK_SIZE: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Cached keys or values [WARPS, 16, HEAD_DIM]; 0 from `end` on. Past the L1 cache: see pdl.py,
    rule 2."""
    places = blocks.to(gl.int64) * block_stride + key % BLOCK_SIZE * HEAD_DIM
    dim = _along(2, HEAD_DIM, LAYOUT)
    inside = (key < end)[:, :, None] & (dim >= 0)
    return gl.load(
        cached + (places[:, :, None] + dim), mask=inside, other=0.0, cache_modifier=".cg"
    )


@gluon.jit
def _scored(products, scale, cap):
    """See capped_scores."""
    scores = products * scale
    if cap is not None:
        scores = cap * gl.inline_asm_elementwise(
            TANH, "=f,f", [scores], dtype=gl.float32, is_pure=True, pack=1
        )
    return scores


@gluon.jit
def _transposed(x):
    """Each 8 x 8 matrix of [WARPS, 16, 8] in a warp's registers, of 16 bits."""
    bits = gl.inline_asm_elementwise(
        _TRANSPOSE, "=r,r", [x.to(gl.int16, bitcast=True)], dtype=gl.int16, is_pure=False, pack=2
    )
    return bits.to(x.dtype, bitcast=True)


@gluon.jit
def _weigh(
    k,
    q,
    up,
    top,
    total,
    first,
    end,
    scale,
    cap,
    WARPS: gl.constexpr,
    MMA: gl.constexpr,
):
    """The maximum and the sum of each warp's weights so far [WARPS, 8], with the keys of one more
    tile; what earlier weights are multiplied by; and the new ones, as a right operand.

    up: see in_float16; None: queries are as they came.
    """
    products = mma_v2(k.to(q.dtype), q, gl.zeros([WARPS, _KEYS, _HEADS], gl.float32, MMA))
    if up is not None:
        products *= up[None, None, :]
    key = first + _along(0, WARPS, MMA) * _KEYS + _along(1, _KEYS, MMA)
    scores = gl.where(key < end, _scored(products, scale, cap), -float("inf"))
    new_top = gl.maximum(top, gl.max(scores, 1))
    weights = gl.exp2(scores - new_top[:, None, :])
    old_weight = gl.exp2(top - new_top)
    total = total * old_weight + gl.sum(weights, 1)
    # As the transposed matrices lie, keys are rows of the right operand.
    weights = _transposed(weights.to(q.dtype)).reshape([WARPS, 2, 8, 8]).permute(0, 1, 3, 2)
    weights = gl.convert_layout(
        weights.reshape([WARPS, _KEYS, _HEADS]), gl.DotOperandLayout(1, MMA, 2), assert_trivial=True
    )
    return new_top, total, old_weight, weights


@gluon.jit
def _add(acc, old_weight, v, weights, WARPS: gl.constexpr, HEAD_DIM: gl.constexpr):
    """The weighted sums of values so far, [WARPS, HEAD_DIM, 8], with those of one more tile."""
    MMA: gl.constexpr = acc.type.layout
    v = v.reshape([WARPS, _KEYS, HEAD_DIM // 64, 8, 8]).permute(0, 2, 4, 3, 1)
    v = gl.convert_layout(
        v.reshape([WARPS, HEAD_DIM, _KEYS]), gl.DotOperandLayout(0, MMA, 2), assert_trivial=True
    )
    return mma_v2(v.to(weights.dtype), weights, acc * old_weight[:, None, :])


@gluon.jit
def _read_heads(query, key, row, dim, queries, new_key, HEAD_DIM: gl.constexpr):
    """Elements `dim` of the rows: of queries, and of the new key."""
    x = gl.load(query + (row * HEAD_DIM + dim[None, :]), mask=queries, other=0.0, volatile=True)
    new = gl.load(key + (row * 0 + dim[None, :]), mask=new_key, other=0.0, volatile=True)
    return gl.where(queries, x, new)


@gluon.jit(do_not_specialize=["table_stride"])
def _cluster_kernel(
    query,
    key,
    value,
    cache,
    table,
    items,
    output,
    cos,
    sin,
    query_weight,
    key_weight,
    query_eps,
    key_eps,
    value_eps,
    query_stride,
    kv_stride,
    table_stride,
    block_stride,
    scale,  # these three: KernelScores
    cap,
    sinks,
    key_inverse,  # these three: KVScales
    value_inverse,
    value_scale,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    GROUP_PAD: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
    WARPS: gl.constexpr,
    ONE_TILE: gl.constexpr,
    CLUSTER: gl.constexpr,
    ROTARY_HALF: gl.constexpr,
    INTERLEAVED: gl.constexpr,
    HAS_NORM: gl.constexpr,
    FIELDS: gl.constexpr,
    VALUES: gl.constexpr,
    SUMS: gl.constexpr,
    GATHERED: gl.constexpr,
    PREPARED: gl.constexpr,
    INBOX: gl.constexpr,
    PDL: gl.constexpr,
):
    """VALUES, SUMS, GATHERED, PREPARED: see `_layouts`; INBOX: see `_inbox_bytes`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    TILE: gl.constexpr = WARPS * _KEYS
    COLUMNS: gl.constexpr = GROUP_PAD * HEAD_DIM // CLUSTER  # of the output, for each program
    LINE: gl.constexpr = (COLUMNS + 8) * 4  # bytes of a program's results in an inbox
    SUM_LINE: gl.constexpr = HEAD_DIM * 4 + 16  # of a warp's sums for a head
    VEC: gl.constexpr = min(4, GROUP_PAD * HEAD_DIM // (32 * WARPS))
    # Those of the queries, and as many behind them, of which the first is the new key.
    ROWS: gl.constexpr = max(2 * GROUP_PAD, _HEADS)
    DTYPE: gl.constexpr = query.dtype.element_ty
    FACTOR: gl.constexpr = gl.float16 if key_inverse is not None else DTYPE  # of products
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[WARPS, 1, 1], instr_shape=[1, 16, 8]
    )
    KEYS: gl.constexpr = gl.DotOperandLayout(0, MMA, 8)
    QUERIES: gl.constexpr = gl.DotOperandLayout(1, MMA, 8)
    READ: gl.constexpr = gl.BlockedLayout([1, HEAD_DIM // 32], [1, 32], [WARPS, 1], [1, 0])
    OF_WARPS: gl.constexpr = gl.SliceLayout(2, GATHERED)
    OF_ALL: gl.constexpr = gl.SliceLayout(0, GATHERED)
    RECEIVED: gl.constexpr = gl.BlockedLayout(
        [1, max(1, COLUMNS // (8 * WARPS))], [4, 8], [1, WARPS], [1, 0]
    )
    rank = gl.program_id(0) % CLUSTER
    head = gl.program_id(0) // CLUSTER
    # Items and tables are complete before a step's embedding: they may be read before the wait.
    item = items + gl.program_id(1) * FIELDS
    token = gl.load(item, eviction_policy=REREAD)
    table += gl.load(item + 1, eviction_policy=REREAD).to(gl.int64) * table_stride
    begin = gl.load(item + 2, eviction_policy=REREAD)
    end = gl.load(item + 3, eviction_policy=REREAD)
    position = gl.load(item + 4, eviction_policy=REREAD)
    share = gl.cdiv(end - begin, CLUSTER * _KEYS) * _KEYS
    begin += rank * share
    end = gl.minimum(end, begin + share)
    keys = cache + head * (2 * BLOCK_SIZE * HEAD_DIM)
    values = keys + BLOCK_SIZE * HEAD_DIM
    if token < 0:
        if PDL:
            tl.extra.cuda.gdc_wait()
    else:
        inbox = declare_inbox(INBOX)
        open_inbox(inbox, CLUSTER * (COLUMNS * 4 + 8))
        tile_keys = _tile_keys(begin, WARPS, KEYS)
        key_blocks = _blocks_of(table, tile_keys, end, BLOCK_SIZE)
        k = _load_tile(keys, key_blocks, tile_keys, end, block_stride, BLOCK_SIZE, HEAD_DIM, KEYS)
        tile_values = _tile_keys(begin, WARPS, VALUES)
        value_blocks = _blocks_of(table, tile_values, end, BLOCK_SIZE)
        v = _load_tile(
            values, value_blocks, tile_values, end, block_stride, BLOCK_SIZE, HEAD_DIM, VALUES
        )
        # The new token, which no block holds yet, has a position, but not where keys are encoded.
        has_new = (position >= 0) & (rank == CLUSTER - 1)
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, READ))[:, None]
        dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, READ))
        is_query = row < GROUP
        is_key = (row == GROUP_PAD) & has_new
        partner = dim
        c = gl.full([HEAD_DIM], 1.0, gl.float32, gl.SliceLayout(0, READ))
        s = gl.zeros([HEAD_DIM], gl.float32, gl.SliceLayout(0, READ))
        if ROTARY_HALF > 0:
            partner = partner_of(dim, ROTARY_HALF, INTERLEAVED)
            pair = dim // 2 if INTERLEAVED else dim % ROTARY_HALF
            angle = gl.maximum(position, 0).to(gl.int64) * ROTARY_HALF + pair
            rotated = dim < 2 * ROTARY_HALF
            c = gl.load(cos + angle, mask=rotated, other=1.0, eviction_policy=REREAD)
            s = gl.load(sin + angle, mask=rotated, other=0.0, eviction_policy=REREAD)
            s = gl.where(dim % 2 == 0 if INTERLEAVED else dim < ROTARY_HALF, -s, s)
        if HAS_NORM:
            weight = gl.where(
                is_query,
                gl.load(query_weight + dim).to(gl.float32)[None, :],
                gl.load(key_weight + dim).to(gl.float32)[None, :],
            )
            partner_weight = gl.where(
                is_query,
                gl.load(query_weight + partner).to(gl.float32)[None, :],
                gl.load(key_weight + partner).to(gl.float32)[None, :],
            )
            eps = gl.where(is_query, query_eps, key_eps)
        head_row = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(0, OF_WARPS))
        sum_dim = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OF_ALL))
        if sinks is not None:
            sink = gl.load(sinks + head * GROUP + head_row, mask=head_row < GROUP, other=LOWEST)
        new_block = gl.load(table + gl.maximum(position, 0) // BLOCK_SIZE, eviction_policy=REREAD)
        slot = new_block.to(gl.int64) * block_stride
        slot += gl.maximum(position, 0) % BLOCK_SIZE * HEAD_DIM
        query += token.to(gl.int64) * query_stride + head * (GROUP * HEAD_DIM)
        key += token.to(gl.int64) * kv_stride + head * HEAD_DIM
        value += token.to(gl.int64) * kv_stride + head * HEAD_DIM
        if PDL:
            tl.extra.cuda.gdc_wait()
        # All that the preceding kernel wrote is asked for before any of it is used.
        queries = is_query & (dim >= 0)[None, :]
        new_key = is_key & (dim >= 0)[None, :]
        x = _read_heads(query, key, row, dim, queries, new_key, HEAD_DIM)
        if ROTARY_HALF > 0:
            y = _read_heads(query, key, row, partner, queries, new_key, HEAD_DIM)
        new = has_new & (sum_dim >= 0)
        new_value = gl.load(value + sum_dim, mask=new, other=0.0, volatile=True)
        if value_eps is not None:  # once more, in the layout of queries, whose sums are of a warp
            same = gl.load(value + dim, mask=has_new & (dim >= 0), other=0.0, volatile=True)
            wide_value = same.to(gl.float32)
            value_factor = gl.rsqrt(gl.sum(wide_value * wide_value, 0) / HEAD_DIM + value_eps)
            new_value = (new_value.to(gl.float32) * value_factor).to(DTYPE)
        if HAS_NORM:
            wide = x.to(gl.float32)
            factor = gl.rsqrt(gl.sum(wide * wide, 1)[:, None] / HEAD_DIM + eps)
            x = (wide * factor * weight).to(DTYPE)
            if ROTARY_HALF > 0:
                y = (y.to(gl.float32) * factor * partner_weight).to(DTYPE)
        if ROTARY_HALF > 0:
            x = (x.to(gl.float32) * c[None, :] + y.to(gl.float32) * s[None, :]).to(DTYPE)
        shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        prepared = gl.allocate_shared_memory(FACTOR, [ROWS, HEAD_DIM], PREPARED)
        new_key_stored = stored(x, key_inverse)
        up = None
        if key_inverse is None:
            prepared.store(x)
        else:
            wide = x.to(gl.float32)
            down, up = float16_factors(gl.max(gl.abs(wide), 1))
            narrow = (wide * down[:, None]).to(FACTOR)
            prepared.store(gl.where(queries, narrow, new_key_stored.to(FACTOR)))
            factors = gl.allocate_shared_memory(gl.float32, [ROWS], shared)
            factors.store(up)
            up = factors.slice(0, _HEADS).load(gl.SliceLayout(0, gl.SliceLayout(1, MMA)))
        q = prepared.slice(0, _HEADS, dim=0) if ROWS > _HEADS else prepared
        q = q.permute((1, 0)).load(gl.SliceLayout(0, QUERIES))
        q = q[None, :, :] + gl.zeros([WARPS, HEAD_DIM, _HEADS], FACTOR, QUERIES)

        top = gl.full([WARPS, _HEADS], LOWEST, gl.float32, gl.SliceLayout(1, MMA))
        total = gl.zeros([WARPS, _HEADS], gl.float32, gl.SliceLayout(1, MMA))
        acc = gl.zeros([WARPS, HEAD_DIM, _HEADS], gl.float32, MMA)
        top, total, old_weight, weights = _weigh(
            k, q, up, top, total, begin, end, scale, cap, WARPS, MMA
        )
        if not ONE_TILE and begin + TILE < end:
            # Ids of blocks are loaded one tile ahead, so that keys do not wait for the table.
            tile_keys = _tile_keys(begin + TILE, WARPS, KEYS)
            key_blocks = _blocks_of(table, tile_keys, end, BLOCK_SIZE)
            tile_values = _tile_keys(begin + TILE, WARPS, VALUES)
            value_blocks = _blocks_of(table, tile_values, end, BLOCK_SIZE)
            for first in range(begin + TILE, end, TILE):
                tile_keys = _tile_keys(first, WARPS, KEYS)
                k = _load_tile(
                    keys, key_blocks, tile_keys, end, block_stride, BLOCK_SIZE, HEAD_DIM, KEYS
                )
                key_blocks = _blocks_of(table, tile_keys + TILE, end, BLOCK_SIZE)
                acc = _add(acc, old_weight, v, weights, WARPS, HEAD_DIM)
                tile_values = _tile_keys(first, WARPS, VALUES)
                v = _load_tile(
                    values, value_blocks, tile_values, end, block_stride,
                    BLOCK_SIZE, HEAD_DIM, VALUES,
                )  # fmt: skip
                value_blocks = _blocks_of(table, tile_values + TILE, end, BLOCK_SIZE)
                top, total, old_weight, weights = _weigh(
                    k, q, up, top, total, first, end, scale, cap, WARPS, MMA
                )
        acc = _add(acc, old_weight, v, weights, WARPS, HEAD_DIM)

        # What the warps have found, for all threads. A product's row is one of eight neighbouring
        # elements for each eight threads.
        acc = acc.reshape([WARPS, HEAD_DIM // 64, 8, 8, _HEADS]).permute(0, 4, 1, 3, 2)
        acc = gl.convert_layout(acc.reshape([WARPS, _HEADS, HEAD_DIM]), SUMS, assert_trivial=True)
        received = inbox + BARRIER_BYTES + CLUSTER * 8
        kept = received + CLUSTER * LINE
        sum_line = (_along(0, WARPS, SUMS) * GROUP_PAD + _along(1, _HEADS, SUMS)) * SUM_LINE
        places = kept + sum_line + _along(2, HEAD_DIM, SUMS) * 4
        keep_own(acc, places, ((_along(1, _HEADS, SUMS) < GROUP_PAD) & (places >= 0)).to(gl.int32))
        by_warp: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        tops = gl.allocate_shared_memory(gl.float32, [WARPS, _HEADS], by_warp)
        totals = gl.allocate_shared_memory(gl.float32, [WARPS, _HEADS], by_warp)
        tops.store(top)
        totals.store(total)
        scores = gl.allocate_shared_memory(gl.float32, [ROWS], shared)
        new_value = stored(new_value, value_inverse)
        if has_new:
            rotated_key = prepared.slice(GROUP_PAD, 1, dim=0).load(READ).to(gl.float32)
            scores.store(_scored(gl.sum(x.to(gl.float32) * rotated_key, 1), scale, cap))
            gl.store(keys + ((slot + dim)[None, :] + row * 0), new_key_stored, mask=new_key)
            gl.store(values + (slot + sum_dim), new_value)
        sync_threads()
        every_top = tops.slice(0, GROUP_PAD, dim=1).load(OF_WARPS)
        highest = gl.max(every_top, 0)
        new_score = scores.slice(0, GROUP_PAD).load(gl.SliceLayout(0, OF_WARPS))
        new_score = gl.where(has_new, new_score, LOWEST)
        highest = gl.maximum(highest, new_score)
        if sinks is not None:  # takes part once, beside the new token
            sink = gl.where(has_new, sink, LOWEST)
            highest = gl.maximum(highest, sink)
        warp_weights = gl.exp2(every_top - highest[None, :])
        new_weight = gl.where(has_new, gl.exp2(new_score - highest), 0.0)
        every_total = totals.slice(0, GROUP_PAD, dim=1).load(OF_WARPS)
        whole = gl.sum(warp_weights * every_total, 0) + new_weight
        if sinks is not None:
            whole += gl.exp2(sink - highest)
        line = (_along(0, WARPS, GATHERED) * GROUP_PAD + _along(1, GROUP_PAD, GATHERED)) * SUM_LINE
        sums = read_own(kept + line + _along(2, HEAD_DIM, GATHERED) * 4, VEC)
        results = gl.sum(warp_weights[:, :, None] * sums, 0)
        new_weight = gl.convert_layout(new_weight, gl.SliceLayout(1, OF_ALL), assert_trivial=True)
        highest = gl.convert_layout(highest, gl.SliceLayout(1, OF_ALL), assert_trivial=True)
        whole = gl.convert_layout(whole, gl.SliceLayout(1, OF_ALL), assert_trivial=True)
        results += new_weight[:, None] * new_value.to(gl.float32)[None, :]

        # Each program adds up some columns of all programs.
        row_of = gl.arange(0, GROUP_PAD, layout=gl.SliceLayout(1, OF_ALL))
        column = row_of[:, None] * HEAD_DIM + sum_dim[None, :]
        to = column // COLUMNS
        wait_until_open()
        barrier = of_rank(inbox + column * 0, to)
        send(results, of_rank(received + rank * LINE + column % COLUMNS * 4, to), barrier, VEC)
        pairs = of_rank(inbox + BARRIER_BYTES + rank * 8 + column * 0, to)
        highest, _ = gl.broadcast(highest[:, None], results)
        whole, _ = gl.broadcast(whole[:, None], results)
        send_pair(highest, whole, pairs, barrier, (column % COLUMNS == 0).to(gl.int32))
        wait_for_bytes(inbox)
        source = gl.arange(0, CLUSTER, layout=gl.SliceLayout(1, RECEIVED))
        own = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, RECEIVED))
        its_top = read_own(inbox + BARRIER_BYTES + source * 8, 1)
        its_whole = read_own(inbox + BARRIER_BYTES + source * 8 + 4, 1)
        found = read_own(received + source[:, None] * LINE + own[None, :] * 4, 1)
        its_weight = gl.exp2(its_top - gl.max(its_top, 0))
        all_weights = gl.sum(its_weight * its_whole, 0)
        out = gl.sum(its_weight[:, None] * found, 0)
        out = out / gl.where(all_weights == 0.0, 1.0, all_weights)  # 0: padding
        out = unscaled(out, value_scale)
        of_head = token.to(gl.int64) * (NUM_KV_HEADS * GROUP * HEAD_DIM) + head * (GROUP * HEAD_DIM)
        own += rank * COLUMNS
        gl.store(output + (of_head + own), out.to(DTYPE), mask=own < GROUP * HEAD_DIM)


def _layouts(group: int, head_dim: int, num_warps: int) -> dict[str, Any]:
    """How values and their sums lie in registers.

    VALUES, [WARPS, 16, HEAD_DIM]: as a left operand takes them, but that a thread has neighbouring
    elements of each key, where it takes every eighth. SUMS, [WARPS, 8, HEAD_DIM]: as products leave
    them, with the elements in their order again. GATHERED, [WARPS, heads, HEAD_DIM]: columns of all
    warps for a thread, each one in a single thread, and neighbouring ones in neighbours. PREPARED:
    of queries and the new key in shared memory, such that eight rows are read without conflicts.
    """
    panels = [[0, 0, 64 << i] for i in range((head_dim // 64).bit_length() - 1)]
    eight, of_eight = ([[0, 0, first << i] for i in range(3)] for first in (1, 8))
    warps = [[1 << i, 0, 0] for i in range(num_warps.bit_length() - 1)]
    values = gl.DistributedLinearLayout(
        reg_bases=[*eight, *panels, [0, 1, 0], [0, 8, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], *of_eight],
        warp_bases=warps,
        block_bases=[],
        shape=[num_warps, _KEYS.value, head_dim],
    )
    sums = gl.DistributedLinearLayout(
        reg_bases=[*eight, *panels, [0, 1, 0]],
        lane_bases=[[0, 2, 0], [0, 4, 0], *of_eight],
        warp_bases=warps,
        block_bases=[],
        shape=[num_warps, _HEADS.value, head_dim],
    )
    vec = min(4, group * head_dim // (32 * num_warps))
    lanes = min(32, head_dim // vec)  # of a row
    rows = min(num_warps, group * lanes // 32)
    gathered = gl.BlockedLayout(
        [num_warps, 1, vec], [1, 32 // lanes, lanes], [1, rows, num_warps // rows], [2, 1, 0]
    )
    prepared = gl.PaddedSharedLayout.with_identity_for(
        [[head_dim, 8]], [max(2 * group, _HEADS.value), head_dim], [1, 0]
    )
    return {"VALUES": values, "SUMS": sums, "GATHERED": gathered, "PREPARED": prepared}


def _inbox_bytes(group: int, head_dim: int, num_warps: int) -> int:
    """Bytes for a barrier, maxima and sums of weights, results, and what the warps keep."""
    line = (group * head_dim // _CLUSTER + 8) * 4
    kept = num_warps * group * (head_dim * 4 + 16)
    return int(BARRIER_BYTES.value) + _CLUSTER * (8 + line) + kept


def attend_in_clusters(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: Tensor,
    table: Tensor,
    items: Tensor,
    output: Tensor,
    changes: HeadChanges,
    scores: KernelScores,
    config: ClusterConfig,
    kv_scales: KVScales | None = None,
) -> None:
    """As `decode_attention`, of what `config` takes.

    Args:
        items: one for each sequence, with all cached keys that it sees, which may begin anywhere;
            or of none, token -1.
        output: [num_tokens, num_heads * head_dim], dense.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, _, block_size, _ = layer_cache.shape[1:]
    group = num_heads // num_kv_heads
    padded = power_of_2(group)
    assert key.stride(0) == value.stride(0) or len(key) == 1, "K and V have the same strides"
    launch(
        _cluster_kernel,
        (num_kv_heads, len(items) // ITEM_FIELDS),
        _CLUSTER,
        query,
        key,
        value,
        layer_cache,
        table,
        items,
        output,
        *changes.arguments(query),
        changes.value_eps,
        query.stride(0),
        key.stride(0),
        table.stride(0),
        layer_cache.stride(0),
        scores.scale,
        scores.cap,
        scores.sinks,
        *scale_arguments(kv_scales),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_PAD=padded,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        WARPS=config.num_warps,
        ONE_TILE=config.is_one_tile,
        CLUSTER=_CLUSTER,
        ROTARY_HALF=changes.rotary_half,
        INTERLEAVED=changes.interleaved,
        HAS_NORM=changes.query_norm is not None,
        FIELDS=ITEM_FIELDS,
        **_layouts(padded, head_dim, config.num_warps),
        INBOX=inbox_of(_inbox_bytes(padded, head_dim, config.num_warps)),
        num_warps=config.num_warps,
        **launch_options(query.device),
    )
