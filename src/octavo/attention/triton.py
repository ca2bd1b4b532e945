"""The GPU backend: Triton kernels that read the blocks in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import (
    AttentionBatch,
    HeadNorm,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    Staging,
)
from octavo.attention.triton_items import (
    FIELDS,
    Sequences,
    decode_items,
    item_capacity,
    num_places,
    prefill_items,
)
from octavo.kernels.attention_decode import (
    DecodeConfig,
    Scratch,
    decode_attention,
    decode_config,
)
from octavo.kernels.attention_prefill import PrefillConfig, prefill_attention, prefill_config
from octavo.kernels.kv_write import HeadChanges, write_kv
from octavo.kernels.paged import tile_alignment

PROGRAMS = 1056  # that a decode step's keys are cut into: 8 a multiprocessor of an H200


@dataclass(frozen=True, slots=True)
class _Shape:
    """Layers with the same shape share their pieces of work."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def num_pieces(self) -> int:
        return -(-PROGRAMS // self.num_kv_heads)


class TritonBackend:
    """Owns the pieces of work of a step; a block holds [num_kv_heads, K or V, tokens, elements].

    Takes fp16, bf16 and fp32; any head size, block size and ratio of heads.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
    ) -> None:
        if kv_cache.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"the triton attention backend has no kernels for {kv_cache.dtype}")
        assert kv_cache.is_contiguous(), "the cache is one dense allocation"
        self._device = kv_cache.device
        self._block_size = block_size
        self._layers = {layer.layer_id: layer for layer in layers}
        self._groups = {
            layer.layer_id: place.group for layer, place in zip(layers, layer_places, strict=True)
        }
        self._caches = {
            layer.layer_id: kv_cache[:, place.index]
            for layer, place in zip(layers, layer_places, strict=True)
        }
        shapes = {layer.layer_id: _shape_of(layer) for layer in layers}
        self._shape_of = shapes
        self._shapes = list(dict.fromkeys(shapes.values()))
        dtype = kv_cache.dtype
        self._decode_configs: dict[_Shape, DecodeConfig] = {
            shape: decode_config(dtype, shape.head_dim) for shape in self._shapes
        }
        self._prefill_configs: dict[_Shape, PrefillConfig] = {
            shape: prefill_config(dtype, shape.head_dim) for shape in self._shapes
        }
        self._scratch = _make_scratch(self._shapes, self._device)
        self._tokens: Tensor | None = None
        self._tables: list[Tensor] = []
        self._decodes: dict[_Shape, Tensor] = {}
        self._prefills: dict[_Shape, Tensor] = {}

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_kv_heads, 2, block_size, head_dim)

    def plan(self, batch: AttentionBatch) -> None:
        seqs = _sequences_of(batch)
        self._tables = list(batch.block_tables)
        self._decodes.clear()
        self._prefills.clear()
        is_decode = seqs.lens == 1
        if is_decode.all():
            self._plan_decodes(seqs, batch.staging)
        else:
            self._tokens = _stage_tokens(batch, seqs)
            self._plan_decodes(seqs.select(is_decode), batch.staging)
            self._plan_prefills(seqs.select(~is_decode), batch.staging)

    def _plan_decodes(self, seqs: Sequences, staging: Staging) -> None:
        if not len(seqs.lens):
            return
        for index, shape in enumerate(self._shapes):
            tile = self._decode_configs[shape].tile
            alignment = tile_alignment(tile, self._block_size)
            items = decode_items(seqs, shape.window, tile, alignment, shape.num_pieces)
            capacity = item_capacity(staging.max_num_seqs, shape.num_pieces) * FIELDS
            self._decodes[shape] = staging.put(
                f"attention.decode.{index}", items.reshape(-1), capacity
            )

    def _plan_prefills(self, seqs: Sequences, staging: Staging) -> None:
        for index, shape in enumerate(self._shapes):
            config = self._prefill_configs[shape]
            alignment = tile_alignment(config.tile, self._block_size)
            items = prefill_items(
                seqs, shape.window, config.tile, alignment, config.rows // shape.group
            )
            self._prefills[shape] = staging.put(
                f"attention.prefill.{index}", items.reshape(-1), staging.max_num_tokens * FIELDS
            )

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: tuple[HeadNorm, HeadNorm] | None = None,
    ) -> Tensor:
        layer, cache, shape = (
            self._layers[layer_id],
            self._caches[layer_id],
            self._shape_of[layer_id],
        )
        table = self._tables[self._groups[layer_id]]
        for x in (query, key, value):
            assert x.dtype == cache.dtype, f"{x.dtype} for a {cache.dtype} cache"
            assert x.stride(2) == 1, "heads must be dense"
            assert x.stride(1) == x.shape[2] or x.shape[1] == 1, "heads must be dense"
        changes = _changes(rotary, head_norms)
        output = query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))
        if shape in self._decodes:
            decode_attention(
                query,
                key,
                value,
                cache,
                table,
                self._decodes[shape],
                self._scratch,
                output,
                changes,
                layer.scale,
                layer.window,
                self._decode_configs[shape],
            )
        if shape in self._prefills:
            assert self._tokens is not None, "staged with the prefills"
            query = write_kv(query, key, value, self._tokens, table, cache, changes)
            prefill_attention(
                query,
                cache,
                table,
                self._prefills[shape],
                output,
                layer.scale,
                layer.window,
                self._prefill_configs[shape],
            )
        return output

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        block, offset = divmod(slot, self._block_size)
        cells = self._caches[layer_id][block]
        return cells[:, 0, offset].clone(), cells[:, 1, offset].clone()


def _sequences_of(batch: AttentionBatch) -> Sequences:
    lens = batch.query_lens.numpy()
    rows = np.arange(len(lens), dtype=np.int32) if batch.rows is None else batch.rows.numpy()
    return Sequences(batch.query_starts.numpy()[:-1], rows, batch.context_lens.numpy(), lens)


def _stage_tokens(batch: AttentionBatch, seqs: Sequences) -> Tensor:
    """int32 [num_tokens * 2]: each token's table row and position; a decode's position is -1."""
    tokens = np.empty((len(batch.positions), 2), np.int32)
    tokens[:, 0] = seqs.rows.repeat(seqs.lens)
    tokens[:, 1] = batch.positions.numpy()
    tokens[seqs.tokens[seqs.lens == 1], 1] = -1
    staging = batch.staging
    return staging.put("attention.tokens", tokens.reshape(-1), 2 * staging.max_num_tokens)


def _changes(
    rotary: RotaryTable | None, head_norms: tuple[HeadNorm, HeadNorm] | None
) -> HeadChanges:
    query_norm, key_norm = head_norms or (None, None)
    return HeadChanges(
        rotary=None if rotary is None else (rotary.cos, rotary.sin),
        query_norm=None if query_norm is None else (query_norm.weight, query_norm.eps),
        key_norm=None if key_norm is None else (key_norm.weight, key_norm.eps),
    )


def _shape_of(layer: LayerSpec) -> _Shape:
    return _Shape(layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.window)


def _make_scratch(shapes: Sequence[_Shape], device: torch.device) -> Scratch:
    """Room for the unfinished results of any step, once."""
    places = [num_places(shape.num_pieces) for shape in shapes]
    rows = [place * shape.num_heads for place, shape in zip(places, shapes, strict=True)]
    sums = max(n * shape.head_dim for n, shape in zip(rows, shapes, strict=True))
    heads = max(n * shape.num_kv_heads for n, shape in zip(places, shapes, strict=True))
    return Scratch(
        sums=torch.empty(sums, dtype=torch.float32, device=device),
        stats=torch.empty(2 * max(rows), dtype=torch.float32, device=device),
        counters=torch.zeros(heads, dtype=torch.int32, device=device),
    )
