"""The fast CPU backend: Numba kernels that read the blocks in place.

Measured on one Zen 5 core (benchmarks/cpu_kernels.py; 64 decodes of 32-767 tokens; 8 prompts of
16-512; 6/2 heads of 64 and 16/8 heads of 128; block size 16), in multiples of this backend's time:
  torch, all blocks gathered, one SDPA    decode  fp32 9, 21    bf16 44, 69
  torch, SDPA sequence by sequence        decode  fp32 5, 4     bf16 25, 24    prefill 3 to 4
  Numba, plain loops, LLVM's vectoriser   decode  fp32 3, 2.6
What made the difference: K kept transposed in tiles of 16 tokens; register tiles, in which the
query heads of a KV head share each load; the CPU's own product of bf16 pairs; and software
prefetching, because scattered blocks defeat the hardware prefetcher (a third of the decode time).
A separate kernel for prompts without cached tokens would gain nothing.

Threads take small work items from a shared counter, so that a thread which loses its core to
another program delays the others by one item at most.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.base import (
    CROSS_ATTENTION,
    FP8_KV_CACHE,
    LOG2_E,
    AttentionBatch,
    EncodedInputs,
    HeadNorms,
    KVScales,
    LayerPlace,
    LayerSpec,
    RotaryTable,
)
from octavo.ops.cpu.threads import Runner, make_runner

try:
    from octavo.ops.cpu.attention_blocks import STEP
    from octavo.ops.cpu.attention_kernel import compile_layer
    from octavo.ops.cpu.vectors import LANES
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"the cpu attention backend needs {error.name} (pip install numba); "
        "the reference backend does without"
    ) from error

ITEM_ROWS = 96  # queries x heads per work item: amortises a pass over K and V
WRITE_TOKENS = 64

Key = TypeVar("Key", bound=Hashable)


class CpuBackend:
    """Owns the arguments of a kernel call per layer; a block is [num_kv_heads, K or V, ...] tiles.

    Limits: float32 and bfloat16, cached as they are or as e4m3; any head size, block size and ratio
    of heads. Block sizes that are not a multiple of 16 work, but cost a copy of each block that is
    read; so does e4m3.
    """

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
        if dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"the cpu attention backend has no kernels for {dtype}")
        assert kv_cache.is_contiguous(), "the cache is one dense allocation"
        self._kv_cache = kv_cache
        self._dtype = dtype
        self._layers = list(layers)
        self._block_sizes = [place.span * block_size for place in layer_places]
        self._caches = [  # by layer: [num_blocks, num_kv_heads, 2, tokens, padded_dim]
            place.blocks(kv_cache, self.kv_block_shape(size, layer.num_kv_heads, layer.head_dim))
            for layer, place, size in zip(layers, layer_places, self._block_sizes, strict=True)
        ]
        self._row = {layer.layer_id: row for row, layer in enumerate(layers)}
        self._counters = np.zeros(3 * 8, np.int64)  # each in its own cache line
        self._constants: list[NDArray[np.float32]] = []
        self._steps = np.zeros(len(layers), STEP)
        for row, layer in enumerate(layers):
            self._fill_constants(row, layer)
        self._rows_by_group = _positions_of([place.group for place in layer_places])
        self._rows_by_heads = _positions_of(
            [(layer.num_heads // layer.num_kv_heads, layer.num_kv_heads) for layer in layers]
        )
        # Which kernel a layer runs, by whether it is the general one; see `run_layer`.
        self._is_general = [bool(layer.features) for layer in layers]
        self._encoder_rows = [row for row, layer in enumerate(layers) if layer.reads_encoder]
        self._groups = [place.group for place in layer_places]
        self._encoded: tuple[EncodedInputs, NDArray[np.int32]] | None = None
        self._runners = {
            is_general: _layer_runner(dtype, kv_cache.dtype, is_general)
            for is_general in set(self._is_general)
        }
        self._held: list[object] = []  # keeps alive what the addresses of this step point to

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_kv_heads, 2, block_size, -(-head_dim // LANES) * LANES)

    def plan(self, batch: AttentionBatch) -> None:
        _check(batch)
        query_lens, context_lens = batch.query_lens.numpy(), batch.context_lens.numpy()
        prompts = np.flatnonzero(query_lens > 1)
        writes = _write_items(prompts, query_lens, batch.query_starts, batch.slots[0])
        self._held = [batch, writes]
        steps = self._steps
        steps["positions"] = batch.positions.data_ptr()
        steps["context_lens"] = batch.context_lens.data_ptr()
        steps["query_starts"] = batch.query_starts.data_ptr()
        steps["writes"] = writes.ctypes.data
        steps["num_writes"] = len(writes)
        for group, rows in self._rows_by_group.items():
            table = batch.block_tables[group]
            steps["slots"][rows] = batch.slots[group].data_ptr()
            steps["tables"][rows] = table.data_ptr()
            steps["table_stride"][rows] = table.stride(0)
        if self._encoder_rows:
            assert batch.encoder_lens is not None, "the step has encoder inputs"
            steps["context_lens"][self._encoder_rows] = batch.encoder_lens.data_ptr()
            steps["num_writes"][self._encoder_rows] = 0
        for (ratio, kv_heads), rows in self._rows_by_heads.items():
            items = _attention_items(query_lens, context_lens, ratio, kv_heads)
            self._held.append(items)
            steps["items"][rows] = items.ctypes.data
            steps["num_items"][rows] = len(items)
            steps["max_rows"][rows] = _max_rows(items, ratio)

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        if head_norms is not None:
            query, key, value = head_norms.apply(query, key, value)
        self._check_heads(query, key, value)
        row = self._row[layer_id]
        step = self._steps[row : row + 1]
        step["key"], step["key_stride"] = key.data_ptr(), key.stride(0)
        step["value"], step["value_stride"] = value.data_ptr(), value.stride(0)
        is_general = self._is_general[row]
        if rotary is None:
            step["rotary_half"] = 0
        else:
            is_general = is_general or rotary.interleaved
            step["cos"], step["sin"] = rotary.cos.data_ptr(), rotary.sin.data_ptr()
            step["rotary_half"] = rotary.rotary_dim // 2
            step["interleaved"] = rotary.interleaved
        return self._attend(step, query, is_general)

    def plan_encoded(self, inputs: EncodedInputs) -> None:
        lens = inputs.lens.numpy()
        slots = inputs.slots[self._groups[self._encoder_rows[0]]]
        self._encoded = inputs, _write_items(np.arange(len(lens)), lens, inputs.starts, slots)

    def write_encoded(self, layer_id: int, key: Tensor, value: Tensor) -> None:
        assert self._encoded is not None, "plan_encoded() comes before write_encoded()"
        self._check_heads(key, value)
        row, (inputs, writes) = self._row[layer_id], self._encoded
        step = self._steps[row : row + 1].copy()
        step["key"], step["key_stride"] = key.data_ptr(), key.stride(0)
        step["value"], step["value_stride"] = value.data_ptr(), value.stride(0)
        step["positions"] = inputs.positions.data_ptr()
        step["slots"] = inputs.slots[self._groups[row]].data_ptr()
        step["writes"], step["num_writes"] = writes.ctypes.data, len(writes)
        step["num_items"] = step["max_rows"] = 0
        self._run(step, self._is_general[row])

    def attend_encoded(self, layer_id: int, query: Tensor) -> Tensor:
        self._check_heads(query)
        row = self._row[layer_id]
        return self._attend(self._steps[row : row + 1], query, self._is_general[row])

    def _check_heads(self, *heads: Tensor) -> None:
        for x in heads:
            assert x.dtype == self._dtype, f"{x.dtype} for a backend of {self._dtype}"
            assert x.stride(2) == 1, "heads must be dense"
            assert x.stride(1) == x.shape[2] or x.shape[1] == 1, "heads must be dense"

    def _attend(self, step: NDArray[np.void], query: Tensor, is_general: bool) -> Tensor:
        num_tokens, num_heads, head_dim = query.shape
        output = torch.empty((num_tokens, num_heads * head_dim), dtype=query.dtype)
        step["query"], step["query_stride"] = query.data_ptr(), query.stride(0)
        step["output"] = output.data_ptr()
        self._run(step, is_general)
        return output

    def _run(self, step: NDArray[np.void], is_general: bool) -> None:
        self._counters.fill(0)
        run = self._runners.get(is_general)
        if run is None:
            run = self._runners[is_general] = _layer_runner(
                self._dtype, self._kv_cache.dtype, is_general
            )
        run(step.ctypes.data, torch.get_num_threads())

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        row = self._row[layer_id]
        layer, block_size = self._layers[row], self._block_sizes[row]
        block, offset = divmod(slot, block_size)
        cells = self._caches[row][block]
        heads, _, _, padded = cells.shape
        if block_size % LANES:
            k, v = cells[:, 0, offset], cells[:, 1, offset]
        else:
            pair = 4 // self._dtype.itemsize
            tile, t = divmod(offset, LANES)
            k, v = cells.view(heads, 2, -1, LANES * padded)[:, :, tile].unbind(1)
            k = k.view(heads, padded // pair, LANES, pair)[:, :, t].flatten(1)
            v = v.view(heads, LANES // pair, padded, pair)[:, t // pair, :, t % pair]
        return k[:, : layer.head_dim].clone(), v[:, : layer.head_dim].clone()

    def _fill_constants(self, row: int, layer: LayerSpec) -> None:
        step = self._steps[row : row + 1]
        step["kv"] = self._caches[row].data_ptr()
        step["counters"] = self._counters.ctypes.data
        step["block_stride"] = self._kv_cache.stride(0)
        step["block_size"] = self._block_sizes[row]
        step["num_heads"] = layer.num_heads
        step["num_kv_heads"] = layer.num_kv_heads
        step["head_dim"] = layer.head_dim
        step["padded_dim"] = -(-layer.head_dim // LANES) * LANES
        step["window"] = 2**40 if layer.window is None else layer.window
        scores = layer.scores
        bias = scores.relative_bias
        changed = bool(scores.features - {"sinks"})
        step["changes_scores"] = changed
        step["reads_encoder"] = layer.reads_encoder
        scales = layer.kv_scales or KVScales()
        product_scale = scores.scale * scales.key
        step["scale"] = LOG2_E if changed else product_scale * LOG2_E
        step["product_scale"] = product_scale
        step["key_inverse"], step["value_inverse"] = 1 / scales.key, 1 / scales.value
        step["value_scale"] = scales.value
        step["softcap"] = scores.softcap or 0
        if scores.alibi_slopes is not None:
            step["slopes"] = self._address(np.array(scores.alibi_slopes, np.float32))
        if bias is not None:
            biases = bias.biases(-torch.arange(bias.max_distance + 1)).contiguous()
            step["biases"] = self._address(biases.numpy())
            step["max_distance"] = bias.max_distance
        if scores.sinks is not None:
            sinks = scores.sinks.weight.float().numpy() * np.float32(LOG2_E)
            step["sinks"] = self._address(sinks)

    def _address(self, constants: NDArray[np.float32]) -> int:
        """Where they are, for as long as the backend lives."""
        self._constants.append(constants)
        return constants.ctypes.data


def _positions_of(keys: Sequence[Key]) -> dict[Key, list[int]]:
    positions: dict[Key, list[int]] = {}
    for position, key in enumerate(keys):
        positions.setdefault(key, []).append(position)
    return positions


def _check(batch: AttentionBatch) -> None:
    """Kernels take addresses, and would not notice a wrong dtype."""
    int32s = (batch.query_lens, batch.context_lens, batch.query_starts, *batch.block_tables)
    assert all(x.dtype == torch.int32 for x in int32s), "lengths and tables are int32"
    int64s = (batch.positions, *batch.slots)
    assert all(x.dtype == torch.int64 for x in int64s), "positions and slots are int64"
    assert all(x.stride(-1) == 1 or x.numel() == 1 for x in (*int32s, *int64s)), "not dense"


def _write_items(
    seqs: NDArray[np.integer[Any]], lens: NDArray[np.int32], starts: Tensor, slots: Tensor
) -> NDArray[np.int32]:
    """[begin, end) of tokens of `seqs` whose K and V one thread writes, before any prompt's item.

    A decode's work item writes its own token.
    """
    begins, places = starts.tolist(), slots.numpy()
    items = []
    for seq in seqs.tolist():
        cuts = np.arange(begins[seq], begins[seq] + int(lens[seq]), WRITE_TOKENS)
        # A token at an even slot clears the other half of its bf16 pair: never separate the two.
        cuts[1:] += places[cuts[1:]] & 1
        ends = np.append(cuts[1:], begins[seq + 1])
        items += [(begin, end) for begin, end in zip(cuts, ends, strict=True) if begin < end]
    return np.array(items, np.int32).reshape(-1, 2)


def _attention_items(
    query_lens: NDArray[np.int32], context_lens: NDArray[np.int32], group: int, num_kv_heads: int
) -> NDArray[np.int32]:
    """Rows of (sequence, first query, end of queries, first KV head, end of KV heads).

    Large items come first, so that threads end at about the same time. A query's result does not
    depend on which item computes it.
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
    # All KV heads of a block are contiguous in memory, but with few sequences the heads must be
    # spread over threads.
    heads = num_kv_heads if len(decodes) >= 4 * torch.get_num_threads() else 1
    singles = [
        (seq, 0, 1, head, min(head + heads, num_kv_heads))
        for seq in decodes
        for head in range(0, num_kv_heads, heads)
    ]
    return np.array(singles + prompts, np.int32).reshape(-1, 5)


def _max_rows(items: NDArray[np.int32], group: int) -> int:
    queries, heads = items[:, 2] - items[:, 1], items[:, 4] - items[:, 3]
    return int((queries * heads).max(initial=0)) * group


@cache
def _layer_runner(dtype: torch.dtype, cached: torch.dtype, is_general: bool) -> Runner:
    """The kernel for a dtype and its cache's: compiled on first use, then cached on disk."""
    return make_runner(compile_layer(dtype == torch.bfloat16, cached != dtype, is_general))
