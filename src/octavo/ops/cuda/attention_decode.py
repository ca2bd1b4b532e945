"""Split-KV decode: attention of sequences with one new token, split over the context.

A work item is (a sequence, a split of its keys): one program per KV head computes it for all query
heads of that KV head, which fill the rows of one tile. The program of a sequence's last split also
writes the new token's K and V, so a decode is one kernel. If a sequence has several splits, each
leaves a partial result, and the last ones combine them in their order: equal lengths give equal
bits. Reference: `ReferenceBackend`.

The results announce themselves, as in all_reduce.py: a place of the scratch holds EMPTY, a bit
pattern that no program leaves there, until its result has come. Who combines looks until there is
none left, and makes the places EMPTY again; the next kernel's programs write only when this one has
ended. So there is no counter, no fence, and no second way to the L2 cache. Programs start in the
order of their index, and all but the last of a sequence leave their result without waiting for
programs: one that waits for those before it always gets it. Of up to 8 pairs of sequences and KV
heads, several programs combine some query heads each, and so also wait for programs that start
after them: these find room on any GPU that has more SMs than such programs wait (`_ROOMY`). The
splits of a cascade have no program here: beside them, the last program combines all heads.

Measured on one H200 (bf16, heads of 128, blocks of 16; microseconds for keys per tile, warps, tiles
in flight):
                          32, 2, 4   32, 2, 2   32, 1, 2   16, 1, 2   16, 1, 3   64, 4, 2
  40 / 40: 256 x 33             92         63         57         48         52        103
           512 x 65            236        184        173        170        170        218
           64 x 1,024          311        322        316        334        307        311
           8 x 1,024            49                    46         45         52
  32 / 8:  256 x 33             22         17         15         13         14         27
           1,024 x 65          109         83         78         76         75        108
           64 x 1,024           71         79         69         69         75         69
           256 x 1,024         255        260        249        251        255        256
Short contexts cost the latency of a program, not bytes: small programs, of which ten or eleven fit
on an SM, take half the time there and lose nothing elsewhere. Up to 66 pairs of sequences and KV
heads are too few for them: one program per SM with 128 keys per tile leaves less to combine, also
where some SMs have none (docs/experiments.md, Nine to 66 pairs). Adding the new token after the
cached ones took 0.5 to 1 us longer for one sequence.

Where four programs share an SM, or one has it, they fetch their first 32 or 64 keys to the L2 cache
before the preceding kernel has ended, and load them when the queries have come: 0.3 to 1 us less
for 4 to 64 sequences (docs/experiments.md, First keys in the L2 cache). A few more keys cost what
they save: memory is not idle then. Eight and more programs on an SM lose by it.

Heads of 256 (Gemma 3, tiles of 16 keys; by warps, tiles in flight and programs):
                          2, 4, 528   1, 2, 1056   1, 3, 1056
  8 / 4:  64 x 1,024          89          68           72
          256 x 1,024        264         246
          256 x 65            31          22           26
  16 / 8: 64 x 1,024         167         128
          256 x 65            57          42           45

An FP8 cache (heads of 128; by keys per tile, warps, tiles in flight and programs) has half the
bytes, and takes this many times as long as bf16 with the configuration above:
                          64, 1, 2, 1056   32, 1, 2, 1056   32, 1, 3, 1056   128, 4, 3, 132
  32 / 8:  16 x 32,768         0.53             0.65             0.62             1.12
           64 x 4,096          0.53             0.64             0.62             0.71
           256 x 1,024         0.55             0.65             0.59             0.62
           64 x 1,024          0.58             0.66             0.69             0.78
           8 x 1,024           0.84             0.94             0.87             1.03
           1 x 1,024           1.19             1.27             1.22             1.19
           1 x 8,192           1.32             1.43             1.37             1.08
           256 x 33            1.00             0.78             0.79             2.62
           1,024 x 65          0.82             0.69             0.72             1.93
  40 / 40: 64 x 1,024          0.58             0.58             0.57             0.60
           256 x 33            1.17             0.77             0.83             3.18
           8 x 1,024           0.62             0.71             0.68             0.63
One sequence is a matter of latency, to which the conversions add. Other head sizes and groups have
the tiles of bf16; they were not measured.

Up to 8 pairs of sequences and KV heads are a matter of latency: what counts is how many loads wait
for others. Their splits are single tiles, which are loaded before the preceding kernel has ended
and not waited for before the queries have come, and several programs combine them
(docs/experiments.md, Decode attention). Constants are loaded early, too:
after the wait, their layouts would be changed through shared memory before the queries are asked
for, and each would be a latency of its own.

Block ids are carried from tile to tile: loaded in the same iteration, Triton would copy them
through shared memory, 4 bytes per copy and as many copies as the keys themselves need.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import KVScales
from octavo.ops.cuda.announcing import EMPTY, announced
from octavo.ops.cuda.attention_decode_cluster import ClusterConfig, attend_in_clusters
from octavo.ops.cuda.attention_scores import (
    KernelScores,
    capped_scores,
    has_fast_tanh,
    log2_scores,
)
from octavo.ops.cuda.attention_work_items import MIN_SPLIT
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.kv_write import HeadChanges
from octavo.ops.cuda.paged import (
    FLOAT16_WEIGHT,
    ITEM_FIELDS,
    LOWEST,
    REREAD,
    halves,
    in_float16,
    key_offsets,
    precision_of,
    scale_arguments,
    stored,
    tile_blocks,
    unscaled,
)
from octavo.ops.cuda.pdl import (
    allow_next,
    fetch_to_l2,
    launch_options,
    not_before,
    wait_previous,
)
from octavo.ops.cuda.quantize import store_rounded
from octavo.ops.cuda.rotary import (
    change_heads,
    load_angles,
    load_weights,
    normed_values,
    read_heads,
)
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY, power_of_2
from octavo.ops.quantized import RoundedInputs, Rounding

MAX_PROGRAMS = 1056  # the most that any configuration splits the keys for
_MOST_COMBINED = 64  # splits of a sequence that is not long
_MOST_COLLECTING = 8  # programs that share the results of a sequence and KV head
_MOST_AT_ONCE, _MOST_OF_NARROW = 16, 32  # splits whose results a thread loads at once
_NARROW = 64  # heads of up to so many elements
_COLLECTED = 64  # elements that it then holds, at most
_ROOMY = 8 * _MOST_COLLECTING  # SMs: more than programs of 8 pairs that wait for later ones
_SMS = 132  # of the GPU that the configurations were measured on


class _Collecting(NamedTuple):
    """How partial results are combined."""

    heads: int  # that are combined together
    columns: int  # elements of their results, padded
    piece: int  # elements that a thread loads together
    splits: int  # that it loads at once


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Compile-time choices: keys per tile, warps per program, tiles in flight."""

    tile: int
    num_warps: int
    num_stages: int
    num_programs: int  # that the keys are split for
    is_early: bool = False  # loads its first tile before the preceding kernels have ended
    has_cascade: bool = False  # some splits may be a cascade's, which have no program here
    min_split: int = MIN_SPLIT  # keys that a split has at least
    combined: int = 32  # elements of partial results for each thread, up to which splits are many
    fetched: int = 0  # keys fetched to the L2 cache before the preceding kernel has ended

    @property
    def most_collecting(self) -> int:
        """How many programs combine the results of a sequence and KV head, at most: those of its
        last splits, which must not be a cascade's."""
        return _MOST_COLLECTING if self.is_early and not self.has_cascade else 1

    def combined_splits(self, group: int, head_dim: int) -> int:
        """Up to how many splits of `group` query heads combining them costs little."""
        num_held = self.num_warps * 32 * self.combined
        return min(_MOST_COMBINED, max(1, num_held // power_of_2(group * head_dim)))

    def splits_of_each(self, num_seqs: int, num_kv_heads: int, group: int, head_dim: int) -> int:
        """For how many splits a sequence that is not long is cut: as many as are combined at once,
        or twice as many, where the programs of all then still have an SM each."""
        combined = self.combined_splits(group, head_dim)
        even = self.num_programs // (num_seqs * num_kv_heads)
        return max(combined, min(2 * combined, even // combined * combined, _MOST_COMBINED))

    def collecting(self, group: int, head_dim: int) -> _Collecting:
        """How the results of the splits of `group` query heads are combined."""
        heads, num_threads = group, self.num_warps * 32
        if self.most_collecting > 1:
            heads = min(group, max(-(-group // self.most_collecting), num_threads // head_dim))
        columns = power_of_2(heads * head_dim)
        held = min(self.combined, _COLLECTED) * num_threads
        most = _MOST_OF_NARROW if head_dim <= _NARROW else _MOST_AT_ONCE
        piece = math.gcd(head_dim, min(4, max(1, columns // num_threads)))
        return _Collecting(heads, columns, piece, min(most, max(1, held // columns)))

    def num_splits(self, num_seqs: int, num_kv_heads: int, at_once: int) -> int:
        """For how many splits the keys of all sequences are cut at most; at_once: see
        `splits_of_each`."""
        most = max(1, MAX_PROGRAMS // num_kv_heads)
        even = max(1, self.num_programs // num_kv_heads)
        return min(most, max(even, num_seqs * at_once)) if self.is_early else even


@dataclass(frozen=True, slots=True)
class Scratch:
    """Places of partial results, as bits of float32: EMPTY before a step, and after it."""

    means: Tensor  # int32 [num_places, num_kv_heads, group, head_dim], flat
    sizes: Tensor  # int32 [num_places, num_kv_heads, group], flat: log2 of the sum of weights

    @classmethod
    def of(cls, num_rows: int, num_elements: int, device: torch.device) -> Scratch:
        """Make places for so many rows of results, with so many elements in all."""
        means, sizes = (
            torch.full((num,), EMPTY.value, dtype=torch.int32, device=device)
            for num in (num_elements, num_rows)
        )
        return cls(means, sizes)


@cache
def decode_config(
    dtype: torch.dtype,
    head_dim: int,
    group: int,
    num_pairs: int,
    shared_memory: int = MUCH_SHARED_MEMORY,
    is_fp8: bool = False,
) -> DecodeConfig:
    """The configuration for a step.

    group: query heads per KV head; num_pairs: sequences times KV heads; shared_memory: bytes that a
    program may take; is_fp8: whether the cache is e4m3.
    """
    padded = max(16, power_of_2(head_dim))
    # Queries of up to 16 heads take the rows of one tile, however many there are.
    if is_fp8 and dtype != torch.float32 and padded == 128 and group <= 16:
        if num_pairs <= 16:
            return DecodeConfig(128, 4, num_stages=3, num_programs=_SMS)
        if group == 1 and num_pairs >= 512:
            return DecodeConfig(32, 1, num_stages=3, num_programs=MAX_PROGRAMS)
        return DecodeConfig(64, 1, num_stages=2, num_programs=MAX_PROGRAMS)
    if num_pairs <= 8 and not is_fp8 and dtype != torch.float32 and group <= 16 and padded <= 256:
        tile = 64 if padded <= 128 else 32
        return DecodeConfig(tile, 4, 2, _SMS, is_early=True, min_split=tile, combined=128)
    if dtype == torch.float32:
        return DecodeConfig(max(16, 2048 // padded), 4, num_stages=2, num_programs=MAX_PROGRAMS)
    has_room = shared_memory >= MUCH_SHARED_MEMORY
    is_measured = 1 < group <= 16 and padded in (64, 128) and not is_fp8
    if has_room and is_measured and _pays_with_two_warps(num_pairs, padded):
        return DecodeConfig(4096 // padded, 2, num_stages=4, num_programs=_SMS * 4, fetched=32)
    if has_room and num_pairs <= _SMS // 2:  # takes 138 KB; also where some SMs have no program
        return DecodeConfig(max(16, 16384 // padded), 4, 3, num_programs=_SMS, fetched=64)
    if padded > 256 and group <= 16:
        tile, stages = max(16, 8192 // padded), 3 if has_room else 2
        return DecodeConfig(tile, 4, stages, num_programs=_SMS * 2)
    if group > 16:  # too much for the registers of one warp
        return DecodeConfig(max(16, 4096 // padded), 2, num_stages=4, num_programs=_SMS * 4)
    if padded <= 128 and group == 1 and num_pairs >= 512:
        return DecodeConfig(max(16, 2048 // padded), 1, num_stages=3, num_programs=MAX_PROGRAMS)
    return DecodeConfig(max(16, 4096 // padded), 1, num_stages=2, num_programs=MAX_PROGRAMS)


def _pays_with_two_warps(num_pairs: int, padded: int) -> bool:
    """Whether programs of two warps and four tiles in flight are faster than smaller and more ones,
    of heads of 64 or 128: they are where about as many have something to do as fit, four on an SM.
    """
    if num_pairs < (64 if padded == 64 else _SMS // 2 + 1) or num_pairs * padded > 2**15:
        return False
    num_programs = _SMS * 4
    has_work = num_programs // num_pairs * num_pairs >= 0.9 * num_programs  # most of them
    return num_pairs <= 160 or padded == 64 or has_work


@triton.jit
def leave_result(means, sizes, place, inside, top, total, acc, HEAD_DIM: tl.constexpr):
    """Leave the softmax over some keys for `_collect`.

    place, inside [ROWS]: each row's place, and whether it has one; top, total [ROWS]: maximum
    (log2) and sum of its weights; acc [ROWS, DIM_PAD]: weighted sum of values.
    """
    dim = tl.arange(0, acc.shape[1])
    is_empty = total == 0.0
    mean = acc * (1.0 / tl.where(is_empty, 1.0, total))[:, None]
    # One number says how much the mean counts; that of no keys counts nothing.
    size = tl.where(is_empty, LOWEST, top + tl.log2(total))
    elements = means + place.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(elements, announced(mean), mask=inside[:, None] & (dim < HEAD_DIM)[None, :])
    tl.store(sizes + place, announced(size), mask=inside)


@triton.jit
def _collect(
    means,
    sizes,
    num_splits,
    value_scale,
    num_heads,
    STRIDE: tl.constexpr,  # results from one split to the next
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Wait for the results of all splits for some heads of one sequence, and leave their places
    EMPTY. Returns them, combined in the order of the splits: float32 [COLUMNS // PIECE, PIECE].

    means, sizes: of the first head and split; heads lie one behind the other. A thread loads its
    piece of all splits at once, and exchanges nothing with others but whether all is there.
    """
    piece = tl.arange(0, COLUMNS // PIECE)
    column = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
    inside = piece * PIECE < num_heads * HEAD_DIM
    split = tl.arange(0, CHUNK)
    top = tl.full([COLUMNS // PIECE], LOWEST, tl.float32)
    total = tl.zeros([COLUMNS // PIECE], tl.float32)
    acc = tl.zeros([COLUMNS // PIECE, PIECE], tl.float32)
    for first in tl.range(0, num_splits, CHUNK):
        there = inside[:, None] & (split < num_splits - first)[None, :]
        elements = means + tl.cast(first, tl.int64) * (STRIDE * HEAD_DIM) + column[:, :, None]
        elements += (split * (STRIDE * HEAD_DIM))[None, None, :]
        # Otherwise a thread would take four elements that follow each other, of fewer splits.
        elements = tl.max_contiguous(elements, [1, PIECE, 1])
        of_split = sizes + first * STRIDE + (piece * PIECE // HEAD_DIM)[:, None]
        of_split += (split * STRIDE)[None, :]
        bits = tl.zeros([COLUMNS // PIECE, PIECE, CHUNK], tl.int32)
        size_bits = tl.zeros([COLUMNS // PIECE, CHUNK], tl.int32)
        lowest = tl.cast(EMPTY, tl.int32)  # EMPTY is the least integer
        while lowest == EMPTY:
            size_bits = tl.load(of_split, mask=there, other=0, volatile=True)
            bits = tl.load(elements, mask=there[:, None, :], other=0, volatile=True)
            lowest = tl.min(tl.minimum(tl.min(tl.min(bits, 2), 1), tl.min(size_bits, 1)), 0)
        size = tl.where(there, size_bits.to(tl.float32, bitcast=True), LOWEST)
        new_top = tl.maximum(top, tl.max(size, 1))
        old_weight = tl.exp2(top - new_top)
        weight = tl.exp2(size - new_top[:, None])
        mean = bits.to(tl.float32, bitcast=True)
        total = total * old_weight + tl.sum(weight, 1)
        acc = acc * old_weight[:, None] + tl.sum(mean * weight[:, None, :], 2)
        top = new_top
        tl.store(elements, EMPTY, mask=there[:, None, :])
        begins = piece * PIECE % HEAD_DIM == 0
        tl.store(of_split, EMPTY, mask=there & begins[:, None])
    total = tl.where(inside, total, 1.0)
    return unscaled(acc / total[:, None], value_scale)


@triton.jit
def _load_tile(
    keys,
    values,
    blocks,
    first,
    end,
    block_stride,
    TILE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAIRED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """K and V of the keys first .. first + TILE - 1; V is 0 past `end`.

    PAIRED: values of e4m3 are loaded as int16, two elements of a token in each. Tensor cores
    take tokens in pairs, which Triton gathers byte by byte where elements have only 8 bits; of
    int16, the lower and the upper halves are two matrices, each with every other element.
    EARLY: before the preceding kernels have ended, so past the L1 cache (pdl.py).
    """
    dim = tl.arange(0, DIM_PAD)
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    offsets = key_offsets(blocks, first, block_stride, TILE, BLOCK_SIZE, HEAD_DIM)
    places = offsets[:, None] + dim[None, :]
    # Values never written may be NaN, which a weight of 0 does not remove.
    written = (first + tl.arange(0, TILE) < end)[:, None]
    in_head = dim[None, :] < HEAD_DIM
    if EARLY:  # programs without keys load nothing
        k = tl.load(keys + places, mask=written & in_head, other=0.0, cache_modifier=CACHE)
    elif DIM_PAD == HEAD_DIM:
        k = tl.load(keys + places)
    else:
        k = tl.load(keys + places, mask=in_head, other=0.0)
    if PAIRED:
        pairs = values.to(tl.pointer_type(tl.int16), bitcast=True)
        pair = tl.arange(0, DIM_PAD // 2)
        if DIM_PAD != HEAD_DIM:
            written = written & (pair < HEAD_DIM // 2)[None, :]
        places = (offsets // 2)[:, None] + pair[None, :]
        v = tl.load(pairs + places, mask=written, other=0, cache_modifier=CACHE)
    else:
        if DIM_PAD != HEAD_DIM:
            written = written & in_head
        v = tl.load(values + places, mask=written, other=0.0, cache_modifier=CACHE)
    return k, v


@triton.jit
def _attend(
    q,
    up,
    k,
    v,
    top,
    total,
    acc,
    upper,
    first,
    end,
    position,
    scale,
    cap,
    slope,
    bias,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    FAST_TANH: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """The softmax so far (top, total, acc, upper), with the keys of one more tile."""
    EXPONENT: tl.constexpr = FLOAT16_WEIGHT if up is not None else 0.0
    key = first + tl.arange(0, TILE)
    products = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
    if up is not None:
        products *= up[:, None]
    distance = (key - position)[None, :]
    scores = log2_scores(products, scale, cap, slope, bias, distance, FAST_TANH, MAX_DISTANCE)
    visible = key < end
    if WINDOW > 0:
        visible = visible & (key > position - WINDOW)
    scores = tl.where(visible[None, :], scores, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1) - EXPONENT)
    weights = tl.exp2(scores - new_top[:, None])
    old_weight = tl.exp2(top - new_top)
    total = total * old_weight + tl.sum(weights, 1)
    acc = acc * old_weight[:, None]
    weights = weights.to(q.dtype)
    if PAIRED:
        upper = upper * old_weight[:, None]
        low, high = halves(v, q.dtype)
        acc = tl.dot(weights, low, acc, input_precision=PRECISION)
        upper = tl.dot(weights, high, upper, input_precision=PRECISION)
    else:
        acc = tl.dot(weights, v.to(q.dtype), acc, input_precision=PRECISION)
    return new_top, total, acc, upper


@triton.jit(do_not_specialize=["table_stride", "scale_stride"])
def _decode_kernel(
    query,
    key,
    value,
    cache,
    table,
    items,
    means,
    sizes,
    output,
    output_scales,
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
    scale_stride,
    scale,  # these five: KernelScores
    cap,
    slopes,
    sinks,
    biases,
    key_inverse,  # these three: KVScales
    value_inverse,
    value_scale,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    COLLECTING: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PIECE: tl.constexpr,
    CHUNK: tl.constexpr,
    WINDOW: tl.constexpr,
    ROTARY_HALF: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    FAST_TANH: tl.constexpr,
    MAX_DISTANCE: tl.constexpr,
    PRECISION: tl.constexpr,
    PAIRED: tl.constexpr,
    EARLY: tl.constexpr,
    FETCHED: tl.constexpr,
    FIELDS: tl.constexpr,
    ROUNDED_GROUP: tl.constexpr,
    ROUNDING: tl.constexpr,
    PDL: tl.constexpr,
):
    """PAIRED: see `_load_tile`. EARLY: the first tile is loaded before the preceding kernels have
    ended. FETCHED: so many blocks of keys are fetched to the L2 cache until then. ROUNDING: output
    and output_scales are RoundedInputs, with a scale for each ROUNDED_GROUP results."""
    allow_next(PDL)
    head = tl.program_id(0)
    # Items and tables are complete before a step's embedding: they may be read before the wait.
    item = items + tl.program_id(1) * FIELDS
    token = tl.load(item, eviction_policy=REREAD)
    table += tl.load(item + 1, eviction_policy=REREAD).to(tl.int64) * table_stride
    begin = tl.load(item + 2, eviction_policy=REREAD)
    end = tl.load(item + 3, eviction_policy=REREAD)
    position = tl.load(item + 4, eviction_policy=REREAD)
    split = tl.load(item + 5, eviction_policy=REREAD)
    num_splits = tl.load(item + 6, eviction_policy=REREAD)
    first_place = tl.load(item + 7, eviction_policy=REREAD)
    of_new = table + tl.maximum(position, 0) // BLOCK_SIZE
    new_block = tl.load(of_new, eviction_policy=REREAD)
    blocks = tile_blocks(table, begin, end, TILE, BLOCK_SIZE)
    keys = cache + head * (2 * BLOCK_SIZE * HEAD_DIM)
    values = keys + BLOCK_SIZE * HEAD_DIM
    if EARLY:
        # Earlier steps have written the cached keys, and a step begins when all before have ended.
        rest_blocks = tile_blocks(table, begin + TILE, end, TILE, BLOCK_SIZE)
        first_k, first_v = _load_tile(
            keys, values, blocks, begin, end, block_stride,
            TILE, BLOCK_SIZE, HEAD_DIM, DIM_PAD, PAIRED, True,
        )  # fmt: skip
    elif PDL and FETCHED > 0:
        index = begin // BLOCK_SIZE + tl.arange(0, FETCHED)
        inside = index * BLOCK_SIZE < end
        fetched = tl.load(table + index, mask=inside, other=0, eviction_policy=REREAD)
        fetch_to_l2(keys + fetched.to(tl.int64) * block_stride, 2 * BLOCK_SIZE * HEAD_DIM)
    # Constants, too: later, their layouts would be changed one after the other before queries load.
    c, s = load_angles(position, cos, sin, DIM_PAD, ROTARY_HALF, INTERLEAVED)
    q_weight, q_partner_weight = load_weights(
        query_weight, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM
    )
    k_weight, k_partner_weight = load_weights(
        key_weight, HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM
    )
    if token < 0:
        wait_previous(PDL)
    else:
        row = tl.arange(0, ROWS)
        dim = tl.arange(0, DIM_PAD)
        in_query = (row[:, None] < GROUP) & (dim[None, :] < HEAD_DIM)
        query += token.to(tl.int64) * query_stride + head * (GROUP * HEAD_DIM)
        one = tl.arange(0, 1)
        new_inside = (one < 1)[:, None] & (dim < HEAD_DIM)[None, :]
        from_token = token.to(tl.int64) * kv_stride + head * HEAD_DIM
        key += from_token
        value += from_token
        slope = None
        if slopes is not None:
            slope = tl.load(slopes + head * GROUP + row, mask=row < GROUP, other=0.0)
        sink = None
        if sinks is not None:
            sink = tl.load(sinks + head * GROUP + row, mask=row < GROUP, other=LOWEST)
        wait_previous(PDL)
        # All that the preceding kernel wrote is asked for before any of it is used: queries, which
        # are used first, last. The new key comes once for each query, so that its products with
        # them need no exchange between threads.
        k_new, k_partner = read_heads(
            key + tl.zeros_like(row)[:, None], row < GROUP,
            HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, True,
        )  # fmt: skip
        v_new = tl.load(value + dim[None, :], mask=new_inside, other=0.0, volatile=True)
        q, q_partner = read_heads(
            query + row[:, None] * HEAD_DIM, row < GROUP,
            HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, True,
        )  # fmt: skip
        q = change_heads(
            q, q_partner, q_weight, q_partner_weight, c, s, query_eps,
            HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
        )  # fmt: skip

        if EARLY:  # queries come from the L2 cache, and keys may still be on their way from memory
            first_k = not_before(first_k, PDL)
            first_v = not_before(first_v, PDL)
        bias = None
        if biases is not None:
            bias = biases + (head * GROUP + tl.minimum(row, GROUP - 1)) * (MAX_DISTANCE + 1)
        top = tl.full([ROWS], LOWEST, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
        if (split == num_splits - 1) & (position >= 0):
            # The new token, which no other program reads, is taken from the projection.
            new_key = change_heads(
                k_new, k_partner, k_weight, k_partner_weight, c, s, key_eps,
                HEAD_DIM, DIM_PAD, ROTARY_HALF, INTERLEAVED, HAS_NORM,
            )  # fmt: skip
            slot = new_block.to(tl.int64) * block_stride + position % BLOCK_SIZE * HEAD_DIM
            # Attended to as it is cached: the result is that of any later query.
            new_key = stored(new_key, key_inverse)
            new_value = stored(normed_values(v_new, value_eps, HEAD_DIM), value_inverse)
            places = tl.zeros_like(row)[:, None] + dim[None, :]
            in_first = (row[:, None] < 1) & (dim[None, :] < HEAD_DIM)
            tl.store(keys + slot + places, new_key, mask=in_first)
            tl.store(values + slot + dim[None, :], new_value, mask=new_inside)
            product = tl.sum(q.to(tl.float32) * new_key.to(tl.float32), 1)
            top = capped_scores(product, scale, cap, FAST_TANH)
            if bias is not None:
                top += tl.load(bias)
            total = total + 1.0
            acc = acc + new_value.to(tl.float32)
            if sink is not None:  # joins here, so once, however the keys are split
                new_top = tl.maximum(top, sink)
                weight = tl.exp2(top - new_top)
                total = weight + tl.exp2(sink - new_top)
                acc = acc * weight[:, None]
                top = new_top
        up = None
        if (key_inverse is not None) and (q.dtype == tl.bfloat16):
            q, up = in_float16(q)
        upper = 0.0
        if PAIRED:
            acc, upper = tl.split(tl.reshape(acc, [ROWS, DIM_PAD // 2, 2]))
        rest = begin
        if EARLY:
            top, total, acc, upper = _attend(
                q, up, first_k, first_v, top, total, acc, upper,
                begin, end, position, scale, cap, slope, bias,
                TILE, WINDOW, FAST_TANH, MAX_DISTANCE, PRECISION, PAIRED,
            )  # fmt: skip
            blocks = rest_blocks
            rest = begin + TILE
        if rest < end:  # a loop over no tiles takes time, too
            for first in tl.range(rest, end, TILE):
                # One tile ahead, so that loading keys never waits for the table.
                next_blocks = tile_blocks(table, first + TILE, end, TILE, BLOCK_SIZE)
                k, v = _load_tile(
                    keys, values, blocks, first, end, block_stride,
                    TILE, BLOCK_SIZE, HEAD_DIM, DIM_PAD, PAIRED, False,
                )  # fmt: skip
                top, total, acc, upper = _attend(
                    q, up, k, v, top, total, acc, upper,
                    first, end, position, scale, cap, slope, bias,
                    TILE, WINDOW, FAST_TANH, MAX_DISTANCE, PRECISION, PAIRED,
                )  # fmt: skip
                blocks = next_blocks
        if PAIRED:
            acc = tl.interleave(acc, upper)

        SIZE: tl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
        DTYPE: tl.constexpr = query.dtype.element_ty
        start = head * (GROUP * HEAD_DIM)
        of_head = output + token.to(tl.int64) * SIZE + start
        if num_splits <= 1:
            total = tl.where(total == 0.0, 1.0, total)  # padding
            out = unscaled(acc / total[:, None], value_scale).to(DTYPE)
            if ROUNDING:
                store_rounded(
                    tl.reshape(out.to(tl.float32), [ROWS * DIM_PAD]), output, output_scales,
                    scale_stride, token.to(tl.int64), start, start + GROUP * HEAD_DIM, SIZE,
                    ROUNDED_GROUP, ROUNDING,
                )  # fmt: skip
            else:
                tl.store(of_head + row[:, None] * HEAD_DIM + dim[None, :], out, mask=in_query)
        else:
            place = (first_place * NUM_KV_HEADS + head) * GROUP
            mine = place + split * (NUM_KV_HEADS * GROUP) + row
            leave_result(means, sizes, mine, row < GROUP, top, total, acc, HEAD_DIM)
            num_collecting = tl.minimum(num_splits, COLLECTING)
            part = split - (num_splits - num_collecting)
            if part >= 0:
                tl.debug_barrier()  # its own results are on their way before it waits for any
                piece = tl.arange(0, COLUMNS // PIECE)
                column = piece[:, None] * PIECE + tl.arange(0, PIECE)[None, :]
                while part * HEADS < GROUP:
                    first_head = place + part * HEADS
                    num_heads = tl.minimum(GROUP - part * HEADS, HEADS)
                    collected = _collect(
                        means + first_head.to(tl.int64) * HEAD_DIM,
                        sizes + first_head,
                        num_splits,
                        value_scale,
                        num_heads,
                        NUM_KV_HEADS * GROUP,
                        HEAD_DIM,
                        COLUMNS,
                        PIECE,
                        CHUNK,
                    ).to(DTYPE)
                    first_column = start + part * (HEADS * HEAD_DIM)
                    if ROUNDING:
                        store_rounded(
                            tl.reshape(collected.to(tl.float32), [COLUMNS]), output, output_scales,
                            scale_stride, token.to(tl.int64), first_column,
                            first_column + num_heads * HEAD_DIM, SIZE, ROUNDED_GROUP, ROUNDING,
                        )  # fmt: skip
                    else:
                        in_part = (piece * PIECE < num_heads * HEAD_DIM)[:, None]
                        target = of_head + part * (HEADS * HEAD_DIM)
                        tl.store(target + column, collected, mask=in_part)
                    part += num_collecting


@cache
def _may_wait(device: torch.device) -> bool:
    """Whether programs may wait for programs that start after them.

    Those need room beside all that wait, and the interpreter runs one program after the other.
    """
    return device.type == "cuda" and num_sms(device) >= _ROOMY


def can_round(
    rounding: Rounding, config: DecodeConfig | ClusterConfig, group: int, head_dim: int
) -> bool:
    """Whether `decode_attention` rounds results so: whether each program that has results of some
    heads has all that share a scale."""
    if isinstance(config, ClusterConfig):  # whose programs have some columns of a head each
        return False
    size = rounding.group
    if size == 0 or head_dim != max(16, power_of_2(head_dim)) or group * head_dim % size:
        return False
    return config.collecting(group, head_dim).heads * head_dim % size == 0


def decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer_cache: Tensor,
    table: Tensor,
    items: Tensor,
    scratch: Scratch,
    output: Tensor | RoundedInputs,
    changes: HeadChanges,
    scores: KernelScores,
    window: int | None,
    config: DecodeConfig | ClusterConfig,
    kv_scales: KVScales | None = None,
    rounding: Rounding = Rounding.NONE,
) -> None:
    """Write K and V of the tokens that `items` names, attend, and write their rows of `output`.

    With the kernel that `config` stands for: this module's, or attention_decode_cluster.py's, which
    takes one split of each sequence, and no rounding.

    Args:
        query, key, value: [num_tokens, num_heads or num_kv_heads, head_dim]; tokens strided, in
            the same way in key and value.
        layer_cache: [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided.
        table: int32 [num_rows, max_blocks].
        items: int32 [num_items * ITEM_FIELDS], each (token, table row, first key, end of keys, the
            token's position, split, splits, place of the first split); token -1: no work, position
            -1: padding, or a query that reads cached keys alone, without key and value of its own.
            The keys are the cached ones, before the position; the first is a multiple of
            `tile_alignment(config.tile, block_size)`.
        output: [num_tokens, num_heads * head_dim], dense; with a rounding as `empty_inputs` makes
            it (quantize.py).
        rounding: of the results, if `can_round`; exactly what rounding them in query's dtype gives.
        kv_scales: if the cache is e4m3.
    """
    if isinstance(config, ClusterConfig):
        assert isinstance(output, Tensor), "`can_round` says so"
        tensors = query, key, value, layer_cache, table, items, output
        attend_in_clusters(*tensors, changes, scores, config, kv_scales)
        return
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, _, block_size, _ = layer_cache.shape[1:]
    group = num_heads // num_kv_heads
    assert key.stride(0) == value.stride(0) or len(key) == 1, "K and V have the same strides"
    group_pad = power_of_2(group)
    collecting = config.collecting(group, head_dim)
    dim_pad = max(16, power_of_2(head_dim))
    _decode_kernel[(num_kv_heads, len(items) // ITEM_FIELDS)](
        query,
        key,
        value,
        layer_cache,
        table,
        items,
        scratch.means,
        scratch.sizes,
        *((output, None) if isinstance(output, Tensor) else output[:2]),
        *changes.arguments(query),
        changes.value_eps,
        query.stride(0),
        key.stride(0),
        table.stride(0),
        layer_cache.stride(0),
        0 if isinstance(output, Tensor) else output.scales.stride(0),
        scores.scale,
        scores.cap,
        scores.slopes,
        scores.sinks,
        scores.biases,
        *scale_arguments(kv_scales),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=config.tile,
        ROWS=max(16, group_pad),
        COLLECTING=config.most_collecting if _may_wait(query.device) else 1,
        HEADS=collecting.heads,
        COLUMNS=collecting.columns,
        PIECE=collecting.piece,
        CHUNK=collecting.splits,
        WINDOW=window or 0,
        ROTARY_HALF=changes.rotary_half,
        INTERLEAVED=changes.interleaved,
        HAS_NORM=changes.query_norm is not None,
        FAST_TANH=has_fast_tanh(query.dtype, query.device),
        MAX_DISTANCE=scores.max_distance,
        PRECISION=precision_of(query.dtype),
        PAIRED=kv_scales is not None and head_dim % 2 == 0,
        EARLY=config.is_early,
        FETCHED=power_of_2(-(-config.fetched // block_size)) if config.fetched else 0,
        FIELDS=ITEM_FIELDS,
        ROUNDED_GROUP=rounding.group,
        ROUNDING=int(rounding),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(query.device),
    )
