"""The fast CPU backend: Numba kernels that read the blocks in place.

Measurements: benchmarks/cpu_kernels.py.

Work is cut into small pieces that threads take from a counter, so that one which loses its core to
another program holds up the others by one piece at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.attention.base import AttentionBatch, LayerPlace, LayerSpec, RotaryTable
from octavo.attention.cpu_threads import Runner, make_runner

try:
    from octavo.attention.cpu_kernel import STEP, compile_layer
    from octavo.attention.cpu_simd import LANES
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the cpu attention backend needs {error.name} (pip install numba); "
        "the reference backend does without"
    ) from error

ITEM_ROWS = 96  # of queries x heads in one piece of work: amortises a pass over K and V
WRITE_TOKENS = 64
LOG2_E = 1.4426950408889634


class CpuBackend:
    """Owns the numbers of one kernel call a layer; a block holds [num_kv_heads, K or V, ...] tiles.

    Limits: float32 and bfloat16; any head size, block size and ratio of heads. Block sizes that are
    no multiple of 16 work, but cost a copy of each block that is read.
    """

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
    ) -> None:
        if kv_cache.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the cpu attention backend has no kernels for {kv_cache.dtype}")
        assert kv_cache.is_contiguous(), "the cache is one dense allocation"
        self._layers = {
            layer.layer_id: (layer, place)
            for layer, place in zip(layers, layer_places, strict=True)
        }
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._counters = np.zeros(3 * 8, np.int64)  # each in its cache line
        self._steps = {
            layer_id: self._constants(layer, place)
            for layer_id, (layer, place) in self._layers.items()
        }
        self._run = _layer_runner(kv_cache.dtype)
        self._held: list[object] = []  # what the addresses of this step point to

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_kv_heads, 2, block_size, -(-head_dim // LANES) * LANES)

    def plan(self, batch: AttentionBatch) -> None:
        query_lens, context_lens = batch.query_lens.numpy(), batch.context_lens.numpy()
        writes = _write_pieces(batch.slots[0].numpy())
        self._held = [batch, writes]
        shared = {
            "positions": batch.positions.data_ptr(),
            "context_lens": batch.context_lens.data_ptr(),
            "query_starts": batch.query_starts.data_ptr(),
            "writes": writes.ctypes.data,
            "num_writes": len(writes),
        }
        items_of: dict[tuple[int, int], NDArray[np.int32]] = {}
        for layer_id, step in self._steps.items():
            layer, place = self._layers[layer_id]
            group, kv_heads = layer.num_heads // layer.num_kv_heads, layer.num_kv_heads
            if (group, kv_heads) not in items_of:
                items = _attention_pieces(query_lens, context_lens, group, kv_heads)
                items_of[group, kv_heads] = items
                self._held.append(items)
            items = items_of[group, kv_heads]
            table = batch.block_tables[place.group]
            _fill(
                step,
                **shared,
                slots=batch.slots[place.group].data_ptr(),
                tables=table.data_ptr(),
                table_stride=table.stride(0),
                items=items.ctypes.data,
                num_items=len(items),
                max_rows=_most_rows(items, group),
            )

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
    ) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        for x in (query, key, value):
            assert x.dtype == self._kv_cache.dtype, f"{x.dtype} for a {self._kv_cache.dtype} cache"
            assert x.stride()[1:] == (head_dim, 1), "heads must be dense"
        output = torch.empty((num_tokens, num_heads * head_dim), dtype=query.dtype)
        step = self._steps[layer_id]
        _fill(
            step,
            query=query.data_ptr(),
            key=key.data_ptr(),
            value=value.data_ptr(),
            output=output.data_ptr(),
            query_stride=query.stride(0),
            key_stride=key.stride(0),
            value_stride=value.stride(0),
            cos=rotary.cos.data_ptr() if rotary else 0,
            sin=rotary.sin.data_ptr() if rotary else 0,
            rotary_half=rotary.rotary_dim // 2 if rotary else 0,
        )
        self._counters.fill(0)
        self._run(step.ctypes.data, torch.get_num_threads())
        return output

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        layer, place = self._layers[layer_id]
        block, offset = divmod(slot, self._block_size)
        cells = self._kv_cache[block, place.index]  # [num_kv_heads, 2, block_size, padded_dim]
        heads, _, _, padded = cells.shape
        if self._block_size % LANES:
            k, v = cells[:, 0, offset], cells[:, 1, offset]
        else:
            pair = 4 // cells.element_size()
            tile, t = divmod(offset, LANES)
            k, v = cells.view(heads, 2, -1, LANES * padded)[:, :, tile].unbind(1)
            k = k.view(heads, padded // pair, LANES, pair)[:, :, t].flatten(1)
            v = v.view(heads, LANES // pair, padded, pair)[:, t // pair, :, t % pair]
        return k[:, : layer.head_dim].clone(), v[:, : layer.head_dim].clone()

    def _constants(self, layer: LayerSpec, place: LayerPlace) -> NDArray[np.void]:
        step = np.zeros(1, STEP)
        _fill(
            step,
            kv=self._kv_cache[:, place.index].data_ptr(),
            counters=self._counters.ctypes.data,
            block_stride=self._kv_cache.stride(0),
            block_size=self._block_size,
            num_heads=layer.num_heads,
            num_kv_heads=layer.num_kv_heads,
            head_dim=layer.head_dim,
            padded_dim=-(-layer.head_dim // LANES) * LANES,
            window=2**40 if layer.window is None else layer.window,
            scale=layer.scale * LOG2_E,  # the kernel's softmax is in powers of 2
        )
        return step


def _fill(step: NDArray[np.void], **fields: float) -> None:
    for name, value in fields.items():
        step[name] = value


def _write_pieces(slots: NDArray[np.int64]) -> NDArray[np.int32]:
    """[begin, end) of the tokens whose K and V one thread writes."""
    cuts = np.arange(0, len(slots), WRITE_TOKENS)
    # A token at an even slot clears its neighbour's half of a bf16 pair: never part the two.
    cuts[1:] += slots[cuts[1:]] & 1
    pieces = np.stack((cuts, np.append(cuts[1:], len(slots))), axis=1)
    return pieces[pieces[:, 0] < pieces[:, 1]].astype(np.int32)


def _attention_pieces(
    query_lens: NDArray[np.int32], context_lens: NDArray[np.int32], group: int, num_kv_heads: int
) -> NDArray[np.int32]:
    """Rows of (sequence, first query, end of queries, first KV head, end of KV heads).

    Large pieces first, so that threads end together. Which piece computes a query changes nothing
    in its result.
    """
    chunk = max(1, ITEM_ROWS // group)
    prompts = [
        (seq, begin, min(begin + chunk, int(query_lens[seq])), head, head + 1)
        for seq in np.flatnonzero(query_lens > 1).tolist()
        for begin in reversed(range(0, int(query_lens[seq]), chunk))
        for head in range(num_kv_heads)
    ]
    decodes = np.flatnonzero(query_lens == 1)
    decodes = decodes[np.argsort(-context_lens[decodes], kind="stable")].tolist()
    # All KV heads of a block lie in one stretch of memory, but few sequences must share the work.
    heads = num_kv_heads if len(decodes) >= 4 * torch.get_num_threads() else 1
    singles = [
        (seq, 0, 1, head, min(head + heads, num_kv_heads))
        for seq in decodes
        for head in range(0, num_kv_heads, heads)
    ]
    return np.array(prompts + singles, np.int32).reshape(-1, 5)


def _most_rows(items: NDArray[np.int32], group: int) -> int:
    queries, heads = items[:, 2] - items[:, 1], items[:, 4] - items[:, 3]
    return int((queries * heads).max(initial=0)) * group


@cache
def _layer_runner(dtype: torch.dtype) -> Runner:
    """The kernel for one dtype: compiled on first use, then kept on disk."""
    return make_runner(compile_layer(bf16=dtype == torch.bfloat16).address)
