"""The fast CPU backend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.attention.base import AttentionBatch, LayerPlace, LayerSpec, RotaryTable
from octavo.attention.cpu_kernel import LANES, STEP, run_layer

ITEM_ROWS = 96  # queries x heads of one work item
WRITE_TOKENS = 64
LOG2_E = 1.4426950408889634


class CpuBackend:
    """Owns one kernel call's worth of plain numbers for each layer; the blocks themselves stay where they are."""

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
    ) -> None:
        assert kv_cache.is_contiguous()
        self._kv_cache = kv_cache
        self._dtype = kv_cache.dtype
        self._block_size = block_size
        self._places = {l.layer_id: p for l, p in zip(layers, layer_places, strict=True)}
        self._layers = {l.layer_id: l for l in layers}
        self._batch: AttentionBatch | None = None
        self._steps: dict[int, np.ndarray] = {}
        self._counters = np.zeros(24, np.int64)
        self._element = np.zeros(0, np.float32 if self._dtype == torch.float32 else np.uint16)
        self._word = np.zeros(0, np.float32 if self._dtype == torch.float32 else np.uint32)
        for layer, place in zip(layers, layer_places, strict=True):
            step = np.zeros(1, STEP)
            layer_cache = kv_cache[0, place.index]
            padded = -(-layer.head_dim // LANES) * LANES
            step["kv"] = layer_cache.data_ptr()
            step["counters"] = self._counters.ctypes.data
            step["block_stride"] = kv_cache.stride(0)
            step["block_size"] = block_size
            step["num_heads"] = layer.num_heads
            step["num_kv_heads"] = layer.num_kv_heads
            step["head_dim"] = layer.head_dim
            step["padded_dim"] = padded
            step["window"] = layer.window or 2**40
            step["scale"] = layer.scale * LOG2_E
            self._steps[layer.layer_id] = step

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_kv_heads, 2, block_size, -(-head_dim // LANES) * LANES)

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        query_lens = batch.query_lens.numpy()
        starts = batch.query_starts.numpy()
        self._writes = []
        for s, n in enumerate(query_lens.tolist()):
            ctx = int(batch.context_lens[s])
            first = ctx - n
            t = first
            while t < ctx:
                e = min(ctx, (t // WRITE_TOKENS + 1) * WRITE_TOKENS)
                self._writes.append((starts[s] + t - first, starts[s] + e - first))
                t = e
        self._writes = np.array(self._writes, np.int32).reshape(-1, 2)
        plans: dict[int, tuple[np.ndarray, int]] = {}
        for layer_id, step in self._steps.items():
            layer = self._layers[layer_id]
            place = self._places[layer_id]
            g = layer.num_heads // layer.num_kv_heads
            chunk = max(1, ITEM_ROWS // g)
            if g not in plans:
                kvh = layer.num_kv_heads
                items = []
                for s, n in enumerate(query_lens.tolist()):
                    if n == 1:
                        items.append((s, 0, 1, 0, kvh))
                        continue
                    items += [
                        (s, b, min(b + chunk, n), h, h + 1)
                        for b in reversed(range(0, n, chunk))
                        for h in range(kvh)
                    ]
                plans[g] = (np.array(items, np.int32).reshape(-1, 5), max(chunk * g, g * kvh))
            items_arr, max_rows = plans[g]
            table = batch.block_tables[place.group]
            step["tables"] = table.data_ptr()
            step["table_stride"] = table.stride(0)
            step["slots"] = batch.slots[place.group].data_ptr()
            step["positions"] = batch.positions.data_ptr()
            step["context_lens"] = batch.context_lens.data_ptr()
            step["query_starts"] = batch.query_starts.data_ptr()
            step["writes"] = self._writes.ctypes.data
            step["num_writes"] = len(self._writes)
            step["items"] = items_arr.ctypes.data
            step["num_items"] = len(items_arr)
            step["max_rows"] = max_rows
        self._plans = plans

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
    ) -> Tensor:
        step = self._steps[layer_id]
        step["query"] = query.data_ptr()
        step["key"] = key.data_ptr()
        step["value"] = value.data_ptr()
        step["query_stride"] = query.stride(0)
        step["key_stride"] = key.stride(0)
        step["value_stride"] = value.stride(0)
        output = torch.empty((query.shape[0], query.shape[1] * query.shape[2]), dtype=query.dtype)
        step["output"] = output.data_ptr()
        if rotary is None:
            step["rotary_half"] = 0
        else:
            step["cos"] = rotary.cos.data_ptr()
            step["sin"] = rotary.sin.data_ptr()
            step["rotary_half"] = rotary.cos.shape[1]
        self._counters[:] = 0
        run_layer(step, self._word, self._element)
        return output

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        layer, place = self._layers[layer_id], self._places[layer_id]
        block, offset = divmod(slot, self._block_size)
        pair = 4 // self._kv_cache.element_size()
        cells = self._kv_cache[block, place.index]  # [num_kv_heads, 2, block_size, padded_dim]
        padded = cells.shape[-1]
        if self._block_size % LANES:
            k, v = cells[:, 0, offset], cells[:, 1, offset]
        else:
            tile, t = divmod(offset, LANES)
            kvh = cells.shape[0]
            tiles = cells.reshape(kvh, 2, -1, LANES * padded)[:, :, tile]
            k = tiles[:, 0].view(kvh, padded // pair, LANES, pair)[:, :, t].reshape(kvh, padded)
            v = tiles[:, 1].view(kvh, LANES // pair, padded, pair)[:, t // pair, :, t % pair]
        return k[:, : layer.head_dim].clone(), v[:, : layer.head_dim].clone()
