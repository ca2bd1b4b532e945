"""Attention of encoders: every token of an input sees all of it. Nothing is cached.

All inputs of a step are one launch, whatever their lengths: a work item is some tokens of one
input, and one program per head computes it. Keys and values are read where the projection has left
them. Reference: `TorchBidirectional`.

Relative biases are read as tiles, from strips in which a tile of them lies as its keys do.

Measured on one H200 (bf16, 32 heads of 128, Triton 3.6; microseconds with relative biases), as
queries x keys x warps, tiles in flight; and without biases, as 64 x 64 x 4, 3:
               64 x 64 x 4, 2   64 x 64 x 4, 3   64 x 32 x 4, 2   64 x 32 x 4, 3   without
  15 x 512            250              329              246              225         191
   4 x 2,048          881             1161              926              882         705
   1 x 512             19               24               25               25          14
With biases that are read one by one, 15 x 512 take 615, 4 x 2,048 2,985, and 1 x 512 51. torch's
own attention, one input after the other, takes 5,609 for 15 x 512, and 439 without biases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.base import LOG2_E, LayerSpec, RelativeBias, upload
from octavo.ops.bidirectional import BidirectionalAttention
from octavo.ops.cuda.attention_work_items import Int32s, parts_of
from octavo.ops.cuda.devices import shared_memory
from octavo.ops.cuda.paged import LOWEST, precision_of
from octavo.ops.cuda.pdl import allow_next, launch_options, wait_previous
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY, power_of_2

_LOG2_E = tl.constexpr(LOG2_E)
_MAX_TILE = 64  # queries or keys
_ITEM_FIELDS = 4  # int32s: first token of the input, end of the input, first query, 0


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Compile-time choices: queries and keys per tile, warps per program, tiles in flight."""

    queries: int
    tile: int
    num_warps: int
    num_stages: int


@cache
def encoder_config(
    dtype: torch.dtype, head_dim: int, has_bias: bool, shared_memory: int = MUCH_SHARED_MEMORY
) -> EncoderConfig:
    """shared_memory: bytes that a program may take; has_bias: tiles of biases take some, too."""
    padded, is_small = max(16, power_of_2(head_dim)), shared_memory < MUCH_SHARED_MEMORY
    if dtype == torch.float32:
        tile = min(max(16, 2048 // padded), _MAX_TILE)
        return EncoderConfig(16, tile, num_warps=4, num_stages=1)
    if padded > 128 or is_small:
        largest = 128 if has_bias and is_small else 256
        return EncoderConfig(64, 32 if padded <= largest else 16, num_warps=4, num_stages=2)
    return EncoderConfig(64, 32 if has_bias else 64, num_warps=4, num_stages=3)


class TritonBidirectional(BidirectionalAttention):
    """The attention of encoders on GPUs: one launch for all inputs."""

    def __init__(self, layers: Sequence[LayerSpec], device: torch.device) -> None:
        super().__init__(layers, device)
        self._items: Tensor
        # By module: layers may share one.
        self._strips = {
            bias: bias_strips(bias).to(device)
            for bias in (layer.scores.relative_bias for layer in layers)
            if bias is not None
        }

    def plan(self, lens: Sequence[int], dtype: torch.dtype) -> None:
        """See BidirectionalAttention.plan."""
        layer = next(iter(self._layers.values()))
        config = self._config(layer, dtype)
        items = encoder_items(np.array(lens, np.int32), config.queries)
        self._items = upload(items, self._device)

    def attend(self, layer: LayerSpec, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See BidirectionalAttention.attend."""
        bias = layer.scores.relative_bias
        config = self._config(layer, query.dtype)
        output = query.new_empty((len(query), layer.num_heads * layer.head_dim))
        encoder_attention(
            query,
            key,
            value,
            self._items,
            output,
            layer.scores.scale,
            None if bias is None else self._strips[bias],
            config,
        )
        return output

    def _config(self, layer: LayerSpec, dtype: torch.dtype) -> EncoderConfig:
        has_bias = layer.scores.relative_bias is not None
        return encoder_config(dtype, layer.head_dim, has_bias, shared_memory(self._device))


def bias_strips(bias: RelativeBias) -> Tensor:
    """Relative biases of a tile's queries, [num_heads, _MAX_TILE, 2 * reach + _MAX_TILE].

    Column reach + d + j of row i is for a tile whose first key is d behind its first query: the
    bias of key j and query i. So a tile of biases lies in consecutive columns, as its keys are
    consecutive. From `reach` on, all distances have the same bias. Of the weight's dtype: the
    biases are its elements.
    """
    reach = (-(-bias.max_distance // _MAX_TILE) + 1) * _MAX_TILE
    device = bias.weight.device
    columns = torch.arange(2 * reach + _MAX_TILE, device=device) - reach
    rows = torch.arange(_MAX_TILE, device=device)
    biases = bias.biases(columns[None, :] - rows[:, None])
    return biases.to(bias.weight.dtype).contiguous()


def encoder_items(lens: Int32s, queries: int) -> Int32s:
    """[num_items, _ITEM_FIELDS], the longest inputs first; `queries`: of an item, at most."""
    ends = lens.cumsum(dtype=np.int32)
    order = (-lens).argsort(kind="stable")
    counts = -(-lens.take(order) // queries)
    which, number = parts_of(counts)
    which = order.take(which)
    items = np.zeros((len(which), _ITEM_FIELDS), np.int32)
    items[:, 0] = (ends - lens).take(which)
    items[:, 1] = ends.take(which)
    items[:, 2] = items[:, 0] + number * queries
    return items


@triton.jit
def _encoder_kernel(
    query,
    key,
    value,
    items,
    output,
    strips,
    query_stride,
    kv_stride,
    scale,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    QUERIES: tl.constexpr,
    TILE: tl.constexpr,
    MAX_TILE: tl.constexpr,
    REACH: tl.constexpr,
    PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
    PDL: tl.constexpr,
):
    allow_next(PDL)
    wait_previous(PDL)
    item = items + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    begin = tl.load(item)
    end = tl.load(item + 1)
    first_query = tl.load(item + 2)
    row = tl.arange(0, QUERIES)
    token = first_query + row
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, DIM_PAD)
    in_head = (dim < HEAD_DIM)[None, :]
    inside = (token < end)[:, None] & in_head
    rows = token.to(tl.int64)[:, None]
    q = tl.load(query + rows * query_stride + head * HEAD_DIM + dim[None, :], mask=inside, other=0)
    key += head // GROUP * HEAD_DIM
    value += head // GROUP * HEAD_DIM
    strip = None
    if strips is not None:
        WIDTH: tl.constexpr = 2 * REACH + MAX_TILE
        strip = strips + (head * MAX_TILE + row)[:, None] * WIDTH + lane[None, :]

    top = tl.full([QUERIES], LOWEST, tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    acc = tl.zeros([QUERIES, DIM_PAD], tl.float32)
    for first in tl.range(begin, end, TILE):
        keys = first + lane
        is_key = keys < end
        places = keys.to(tl.int64)[:, None] * kv_stride + dim[None, :]
        there = is_key[:, None] & in_head
        k = tl.load(key + places, mask=there, other=0.0)
        v = tl.load(value + places, mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if strip is not None:
            shift = tl.minimum(tl.maximum(first - first_query, -REACH), REACH) + REACH
            # Queries and keys begin at multiples of their tiles from the beginning of the input.
            bias = tl.load(strip + tl.multiple_of(shift, min(QUERIES, TILE)))
            scores += bias.to(tl.float32) * _LOG2_E
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        old_weight = tl.exp2(top - new_top)
        total = total * old_weight + tl.sum(weights, 1)
        acc = acc * old_weight[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
        top = new_top
    out = (acc / total[:, None]).to(output.dtype.element_ty)
    places = rows * (NUM_HEADS * HEAD_DIM) + head * HEAD_DIM + dim[None, :]
    tl.store(output + places, out, mask=inside)


def encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    items: Tensor,
    output: Tensor,
    scale: float,
    strips: Tensor | None,
    config: EncoderConfig,
) -> None:
    """Attend for the tokens of all inputs, and write their rows of `output`.

    Args:
        query, key, value: [num_tokens, num_heads or num_kv_heads, head_dim], heads dense, tokens
            strided, in the same way in key and value.
        items: int32 [num_items, _ITEM_FIELDS]; see `encoder_items`.
        output: [num_tokens, num_heads * head_dim], dense.
        scale: of the dot products.
        strips: see `bias_strips`.
    """
    num_heads, head_dim = query.shape[1:]
    assert key.stride(0) == value.stride(0), "K and V have the same strides"
    assert all(x.stride(1) == head_dim and x.stride(2) == 1 for x in (query, key, value))
    _encoder_kernel[(len(items), num_heads)](
        query,
        key,
        value,
        items,
        output,
        strips,
        query.stride(0),
        key.stride(0),
        scale * LOG2_E,
        NUM_HEADS=num_heads,
        GROUP=num_heads // key.shape[1],
        HEAD_DIM=head_dim,
        DIM_PAD=max(16, power_of_2(head_dim)),
        QUERIES=config.queries,
        TILE=config.tile,
        MAX_TILE=_MAX_TILE,
        REACH=0 if strips is None else (strips.shape[2] - _MAX_TILE) // 2,
        PRECISION=precision_of(query.dtype),
        FIELDS=_ITEM_FIELDS,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **launch_options(query.device),
    )
