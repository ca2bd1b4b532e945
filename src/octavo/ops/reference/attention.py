"""Attention in plain PyTorch, one sequence at a time, in fp32: the reference for the others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.ops.base import (
    CROSS_ATTENTION,
    FP8_KV_CACHE,
    AttentionBatch,
    EncodedInputs,
    HeadNorms,
    KVScales,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    ScoreFunction,
)


class ReferenceBackend:
    """Keeps K and V inside a block as [2, block_size, num_kv_heads, head_dim]."""

    score_features = frozenset(
        {"softcap", "alibi_slopes", "sinks", "relative_bias", CROSS_ATTENTION, FP8_KV_CACHE}
    )
    context_limits: tuple[int, ...] = ()

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        self._kv_cache = kv_cache
        self._layers = {
            layer.layer_id: (layer, place.group, self._layer_cache(layer, place, block_size))
            for layer, place in zip(layers, layer_places, strict=True)
        }
        self._batch: AttentionBatch | None = None
        self._encoded: EncodedInputs | None = None

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (2, block_size, num_kv_heads, head_dim)

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        batch = self._batch
        assert batch is not None, "plan() comes before forward()"
        layer, group, _ = self._layers[layer_id]
        if head_norms is not None:
            query, key, value = head_norms.apply(query, key, value)
        if rotary is not None:
            positions = batch.positions.to(query.device)
            query, key = rotary.apply(query, positions), rotary.apply(key, positions)

        self._write(layer_id, batch.slots[group], key, value)

        outputs = []
        for i, context_len in enumerate(batch.context_lens.tolist()):
            start, end = batch.query_starts[i : i + 2].tolist()
            first = context_len - (end - start)  # position of the first new token
            # Keys that no query sees may be in blocks already freed: never read them.
            first_key = 0 if layer.window is None else max(0, first - layer.window + 1)
            keys = torch.arange(first_key, context_len, device=query.device)
            queries = torch.arange(first, context_len, device=query.device)
            table = batch.block_tables[group][i]
            outputs.append(self._attend_row(layer_id, query[start:end], queries, table, keys))
        return torch.cat(outputs).flatten(1) if outputs else query.flatten(1)

    def plan_encoded(self, inputs: EncodedInputs) -> None:
        self._encoded = inputs

    def write_encoded(self, layer_id: int, key: Tensor, value: Tensor) -> None:
        assert self._encoded is not None, "plan_encoded() comes before write_encoded()"
        _, group, _ = self._layers[layer_id]
        self._write(layer_id, self._encoded.slots[group], key, value)

    def attend_encoded(self, layer_id: int, query: Tensor) -> Tensor:
        batch = self._batch
        assert batch is not None, "plan() comes before attend_encoded()"
        assert batch.encoder_lens is not None, "the step has encoder inputs"
        _, group, _ = self._layers[layer_id]
        outputs = []
        for i, num_keys in enumerate(batch.encoder_lens.tolist()):
            start, end = batch.query_starts[i : i + 2].tolist()
            keys = torch.arange(num_keys, device=query.device)
            # To queries behind the last key, all are visible.
            queries = torch.full((end - start,), num_keys, device=query.device)
            table = batch.block_tables[group][i]
            outputs.append(self._attend_row(layer_id, query[start:end], queries, table, keys))
        return torch.cat(outputs).flatten(1) if outputs else query.flatten(1)

    def _attend_row(
        self, layer_id: int, query: Tensor, positions: Tensor, table: Tensor, keys: Tensor
    ) -> Tensor:
        """The attention of one sequence's queries at `positions` to the keys at positions `keys`,
        found by its block table."""
        layer, _, (k_cache, v_cache) = self._layers[layer_id]
        size = k_cache.shape[1]
        blocks, offsets = table.to(keys.device)[keys // size].long(), keys % size
        key, value = k_cache[blocks, offsets], v_cache[blocks, offsets]
        return _attend(layer, query, key, value, positions, keys)

    def _write(self, layer_id: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        layer, _, (k_cache, v_cache) = self._layers[layer_id]
        slots, size = slots.to(key.device), k_cache.shape[1]
        if layer.kv_scales is not None:
            key = KVScales.quantize(key, layer.kv_scales.key)
            value = KVScales.quantize(value, layer.kv_scales.value)
        k_cache[slots // size, slots % size] = key
        v_cache[slots // size, slots % size] = value

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        _, _, (k_cache, v_cache) = self._layers[layer_id]
        block, offset = divmod(slot, k_cache.shape[1])
        return k_cache[block, offset].clone(), v_cache[block, offset].clone()

    def _layer_cache(
        self, layer: LayerSpec, place: LayerPlace, block_size: int
    ) -> tuple[Tensor, Tensor]:
        """K and V, each [num_blocks, tokens, num_kv_heads, head_dim]."""
        shape = self.kv_block_shape(place.span * block_size, layer.num_kv_heads, layer.head_dim)
        layer_cache = place.blocks(self._kv_cache, shape)
        return layer_cache[:, 0], layer_cache[:, 1]


def _attend(
    layer: LayerSpec,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_positions: Tensor,
    key_positions: Tensor,
) -> Tensor:
    """One sequence: query [q, num_heads, dim], key, value [k, num_kv_heads, dim] -> like query."""
    ratio = layer.num_heads // layer.num_kv_heads
    k = key.float().repeat_interleave(ratio, dim=1)
    v = value.float().repeat_interleave(ratio, dim=1)
    if layer.kv_scales is not None:
        k, v = k * layer.kv_scales.key, v * layer.kv_scales.value
    products = torch.einsum("qhd,khd->hqk", query.float(), k)
    distance = query_positions[:, None] - key_positions[None, :]
    visible = distance >= 0
    if layer.window is not None:
        visible &= distance < layer.window
    weights = _weights(layer.scores, products, distance, visible)
    return torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)


def _weights(
    function: ScoreFunction, products: Tensor, distance: Tensor, visible: Tensor
) -> Tensor:
    """From dot products [num_heads, q, k] to the weights of the values, in the same shape.

    distance [q, k]: by how many positions a key is behind a query; visible [q, k]: bool.
    """
    scores = products * function.scale
    if function.softcap is not None:
        scores = function.softcap * torch.tanh(scores / function.softcap)
    if function.alibi_slopes is not None:
        slopes = torch.tensor(function.alibi_slopes, device=scores.device)
        scores = scores - slopes[:, None, None] * distance
    if function.relative_bias is not None:
        scores = scores + function.relative_bias.biases(-distance)
    scores = scores.masked_fill(~visible, float("-inf"))
    if function.sinks is None:
        return scores.softmax(dim=-1)
    sinks = function.sinks.weight.float()[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
