"""The GPU backend: Triton kernels that read the blocks in place.

In each layer a step's decodes are one kernel (of clusters, if they are few, on Hopper GPUs), plus a
cascade kernel where several of them share many keys; its prompts are two more (writing K and V to
blocks, attention). `plan` lists the work items on the host (attention_work_items.py), and programs
read them from device memory. The grid of a decode depends on the number of sequences alone, so a
captured graph serves all context lengths.
docs/performance.md has the measurements; docs/experiments.md and each kernel's module say what
else was tried.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.base import (
    CROSS_ATTENTION,
    FP8_KV_CACHE,
    MAX_CASCADE_LEVELS,
    AttentionBatch,
    CascadeSegments,
    DecodeItems,
    EncodedInputs,
    HeadNorms,
    LayerPlace,
    LayerSpec,
    RotaryTable,
    Staging,
    upload,
)
from octavo.ops.cuda import attention_prefill_hopper
from octavo.ops.cuda.attention_cascade import CascadeConfig, cascade_attention, cascade_config
from octavo.ops.cuda.attention_decode import (
    MAX_PROGRAMS,
    DecodeConfig,
    Scratch,
    can_round,
    decode_attention,
    decode_config,
)
from octavo.ops.cuda.attention_decode_cluster import CONTEXT_LIMITS, ClusterConfig, cluster_config
from octavo.ops.cuda.attention_dequantized import (
    SPAN_FIELDS,
    DequantizedBlocks,
    DequantizedPrompts,
    numbers_of_passes,
)
from octavo.ops.cuda.attention_prefill import (
    KEY_SECONDS,
    HopperPrefillConfig,
    PrefillConfig,
    PrefillSplits,
    PrefillTimes,
    prefill_attention,
    prefill_config,
    prefill_times,
)
from octavo.ops.cuda.attention_scores import KernelScores
from octavo.ops.cuda.attention_work_items import (
    MAX_CASCADE_RESULTS,
    CascadeWork,
    Int32s,
    Sequences,
    Splitting,
    cascade_capacity,
    cascade_work,
    decode_items,
    item_capacity,
    num_places,
    prefill_items,
)
from octavo.ops.cuda.devices import is_on_hopper, num_sms, shared_memory
from octavo.ops.cuda.kv_write import HeadChanges, write_kv
from octavo.ops.cuda.paged import ITEM_FIELDS, MEMBER_FIELDS, PREFILL_FIELDS, tile_alignment
from octavo.ops.cuda.quantize import empty_inputs
from octavo.ops.quantized import RoundedInputs, Rounding

# Seconds that a layer's attention may take longer in a captured step: about what it takes the host
# to launch a layer's kernels one by one.
_MOST_LOST = 150e-6


@dataclass(frozen=True, slots=True)
class _Shape:
    """Layers of the same shape share their work items."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    block_size: int
    reads_encoder: bool

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads

    def keys_of(self, causal: Sequences, encoded: Sequences | None) -> Sequences:
        """Sequences with the keys that these layers read."""
        if not self.reads_encoder:
            return causal
        assert encoded is not None, "the step has encoder inputs"
        return encoded


@dataclass(frozen=True, slots=True)
class _CascadeSupport:
    """How layers of one shape run cascade attention."""

    config: CascadeConfig
    kv_groups: tuple[int, ...]  # whose block tables hold the shared keys
    num_splits: int  # that all shared keys are cut into, roughly


@dataclass(frozen=True, slots=True)
class _CascadeLaunch:
    """A step's cascade work items, on the device."""

    items: Tensor
    members: Tensor
    config: CascadeConfig


@dataclass(frozen=True, slots=True)
class _PrefillLaunch:
    """The work items of a step's prompts, on the device."""

    items: Tensor
    config: PrefillConfig | HopperPrefillConfig
    spans: Tensor | None  # of blocks that are converted before: see DequantizedBlocks.fill
    num_passes: int  # see DequantizedPrompts


@dataclass(frozen=True, slots=True)
class _Layer:
    spec: LayerSpec
    shape: _Shape
    scores: KernelScores
    group: int
    cache: Tensor  # [num_blocks, num_kv_heads, 2, block_size, head_dim], blocks strided


class TritonBackend:
    """Owns the work items of a step; a block holds [num_kv_heads, K or V, tokens, elements].

    Takes fp16, bf16 and fp32, cached as they are or as e4m3; any head size, block size and ratio of
    heads.
    """

    score_features = frozenset(
        {"softcap", "alibi_slopes", "sinks", "relative_bias", CROSS_ATTENTION, FP8_KV_CACHE}
    )
    context_limits: tuple[int, ...] = CONTEXT_LIMITS

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"the triton attention backend has no kernels for {dtype}")
        assert kv_cache.is_contiguous(), "the cache is one dense allocation"
        self._layers = {
            layer.layer_id: _make_layer(layer, place, kv_cache, place.span * block_size)
            for layer, place in zip(layers, layer_places, strict=True)
        }
        self._shapes = list(dict.fromkeys(layer.shape for layer in self._layers.values()))
        self._dtype = dtype
        self._is_fp8 = kv_cache.dtype == torch.float8_e4m3fn
        self._shared_memory = shared_memory(kv_cache.device)
        self._num_sms = num_sms(kv_cache.device)
        num_layers = Counter(layer.shape for layer in self._layers.values())
        self._hopper_shapes = {  # with the number of such layers
            shape: num_layers[shape]
            for shape in self._shapes
            if self._is_for_hopper(shape, kv_cache.device)
        }
        self._cluster_shapes = {
            shape for shape in self._shapes if self._is_for_clusters(shape, kv_cache.device)
        }
        self._cascade_supports = {
            shape: support
            for shape in self._shapes
            if (support := self._cascade_support(shape)) is not None
        }
        self._scratch = _make_scratch(self._shapes, self._cascade_supports, kv_cache.device)
        self._tokens: Tensor | None = None
        self._encoded: tuple[Tensor, Sequence[Tensor]] | None = None  # tokens, and block tables
        self._tables: list[Tensor] = []
        self._cascades: dict[_Shape, _CascadeLaunch] = {}
        self._decodes: dict[_Shape, tuple[Tensor, DecodeConfig | ClusterConfig]] = {}
        self._prefills: dict[_Shape, _PrefillLaunch] = {}
        self._splits = self._make_prefill_splits(kv_cache.device)
        self._dequantized: DequantizedBlocks | None = None
        if self._is_fp8 and self._hopper_shapes:
            self._dequantized = DequantizedBlocks(dtype, kv_cache.device)
            if kv_cache.is_cuda:
                self._compile_passes(kv_cache.device)

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return (num_kv_heads, 2, block_size, head_dim)

    def captures(self, batch: AttentionBatch) -> bool:
        """See CapturedBackend. In captured steps one kernel computes all prompts, which over long
        contexts takes longer than that of Hopper GPUs."""
        seqs, encoded = _sequences_of(batch)
        chunks, lost = seqs.lens > 1, 0.0
        for shape, num_layers in self._hopper_shapes.items():
            times, _ = self._prefill_times(shape, shape.keys_of(seqs, encoded).select(chunks))
            lost += num_layers * max(0.0, times.split - times.whole)
        return lost * KEY_SECONDS < _MOST_LOST * len(self._layers)

    def plan(self, batch: AttentionBatch) -> Hashable:
        seqs, encoded = _sequences_of(batch)
        self._tables = list(batch.block_tables)
        self._cascades.clear()
        self._decodes.clear()
        self._prefills.clear()
        is_decode = seqs.lens == 1
        padded = batch.padded
        if is_decode.all() and padded is None:
            self._plan_decodes(seqs, encoded, batch, batch.cascade)
        else:
            num_singles = padded.num_singles if padded else 0
            num_chunks = padded.num_chunks if padded else 0
            self._tokens = _stage_tokens(batch, seqs)
            cascade = _renumbered(batch.cascade, is_decode)
            singles, chunks = (
                (seqs.select(mask), None if encoded is None else encoded.select(mask))
                for mask in (is_decode, ~is_decode)
            )
            self._plan_decodes(*singles, batch, cascade, num_singles)
            self._plan_prefills(*chunks, batch, num_chunks)
        return tuple(config for _, config in self._decodes.values()), bool(self._cascades)

    def _plan_decodes(
        self,
        causal: Sequences,
        encoded: Sequences | None,
        batch: AttentionBatch,
        cascade: Sequence[CascadeSegments | None],
        num_padded: int = 0,
    ) -> None:
        """`causal`, `encoded`: the same sequences, with the keys of layers of either kind;
        `cascade`: of them, where `batch` has more."""
        staging = batch.staging
        num_seqs = max(len(causal.lens), num_padded)
        if not num_seqs:
            return
        for index, shape in enumerate(self._shapes):
            seqs, kv_heads = shape.keys_of(causal, encoded), shape.num_kv_heads
            work = self._cut_cascade(shape, seqs, cascade, num_padded)
            longest = int(seqs.contexts.max(initial=batch.longest))
            config = self._decode_config(shape, num_seqs * kv_heads, longest, work is not None)
            alignment = _alignment(shape, config)
            splits: dict[str, Any] = {"num_splits": None}
            if isinstance(config, DecodeConfig):
                at_once = config.splits_of_each(num_seqs, kv_heads, shape.group, shape.head_dim)
                splits["num_splits"] = config.num_splits(num_seqs, kv_heads, at_once)
                splits["min_split"] = config.min_split
                splits["at_once"] = at_once if config.is_early else None
            decodes = decode_items(
                seqs,
                shape.window,
                config.tile,
                alignment,
                num_padded=num_padded,
                cascade=work,
                is_causal=not shape.reads_encoder,
                **splits,
            )
            max_splits = max(1, MAX_PROGRAMS // kv_heads)
            capacity = item_capacity(staging.max_num_seqs, max_splits) * ITEM_FIELDS
            name = f"attention.decode.{index}"
            self._decodes[shape] = staging.put(name, decodes.items.reshape(-1), capacity), config
            if work is not None:
                members = work.member_table(seqs, decodes.first_places)
                self._stage_cascade(index, shape, work, members, staging)

    def _decode_config(
        self, shape: _Shape, num_pairs: int, longest: int, has_cascade: bool
    ) -> DecodeConfig | ClusterConfig:
        """num_pairs: sequences times KV heads. longest: keys of a sequence, at most. has_cascade:
        partial results of a cascade may be there, which clusters do not take."""
        clusters = None
        if shape in self._cluster_shapes and not has_cascade:
            clusters = cluster_config(
                self._dtype, shape.head_dim, shape.group, num_pairs, longest, shape.window
            )
        if clusters is not None:
            return clusters
        config = decode_config(
            *(self._dtype, shape.head_dim, shape.group, num_pairs),
            self._shared_memory,
            self._is_fp8,
        )
        return replace(config, has_cascade=True) if has_cascade else config

    def decode_items(self) -> list[DecodeItems]:
        return [
            DecodeItems(items, shape.window, _alignment(shape, config))
            for shape, (items, config) in self._decodes.items()
        ]

    # ---------------------------------------------------------------- cascade attention

    def _cascade_support(self, shape: _Shape) -> _CascadeSupport | None:
        """How layers of this shape run cascade attention; None if they cannot."""
        config = cascade_config(self._dtype, shape.head_dim, shape.group)
        groups = {layer.group for layer in self._layers.values() if layer.shape == shape}
        if config is None or shape.window is not None or shape.reads_encoder:
            return None
        return _CascadeSupport(
            config, tuple(groups), max(1, config.num_programs // shape.num_kv_heads)
        )

    def _cut_cascade(
        self,
        shape: _Shape,
        seqs: Sequences,
        cascade: Sequence[CascadeSegments | None],
        num_padded: int,
    ) -> CascadeWork | None:
        """Cascade work items, possibly none; None if the step has no cascade attention."""
        support = self._cascade_supports.get(shape)
        if support is None or not cascade:
            return None
        config = support.config
        members_per_item = config.rows // shape.group
        segments = None
        if all(cascade[group] is not None for group in support.kv_groups):
            segments = cascade[support.kv_groups[0]]  # the others are equal
        return cascade_work(
            seqs, segments, config.tile, support.num_splits, members_per_item, num_padded
        )

    def _stage_cascade(
        self, index: int, shape: _Shape, work: CascadeWork, members: Int32s, staging: Staging
    ) -> None:
        support = self._cascade_supports[shape]
        capacity = cascade_capacity(staging.max_num_seqs, support.num_splits) * ITEM_FIELDS
        max_members = MAX_CASCADE_LEVELS * staging.max_num_seqs * MEMBER_FIELDS
        self._cascades[shape] = _CascadeLaunch(
            staging.put(f"attention.cascade.{index}", work.items.reshape(-1), capacity),
            staging.put(f"attention.members.{index}", members.reshape(-1), max_members),
            support.config,
        )

    def _plan_prefills(
        self, causal: Sequences, encoded: Sequences | None, batch: AttentionBatch, num_padded: int
    ) -> None:
        staging = batch.staging
        for index, shape in enumerate(self._shapes):
            seqs, spans, num_passes = shape.keys_of(causal, encoded), None, 1
            config, dequantized = self._choose_prefill(shape, seqs, batch.padded is not None)
            if dequantized is not None:
                assert self._dequantized is not None, "it has planned them"
                seqs, num_passes = dequantized.seqs, dequantized.num_passes
                capacity = self._dequantized.capacity(staging.max_num_seqs)
                name, values = f"attention.spans.{index}", dequantized.spans.reshape(-1)
                spans = staging.put(name, values, capacity, part="tokens")
            splitting = self._splitting(shape)
            alignment = tile_alignment(config.tile, shape.block_size)
            tokens_per_item = config.rows // shape.group
            items = prefill_items(
                seqs,
                shape.window,
                config.tile,
                alignment,
                tokens_per_item,
                is_causal=not shape.reads_encoder,
                splitting=splitting if isinstance(config, PrefillConfig) else None,
            )
            if batch.padded is not None:
                num_tokens = batch.padded.num_tokens
                num_items = min(num_tokens // tokens_per_item + num_padded, num_tokens)
                capacity = item_capacity(num_items, splitting.at_once)
                empty = np.zeros((capacity - len(items), PREFILL_FIELDS), np.int32)
                items = np.concatenate([items, empty])  # they name no keys and no tokens
            # A work item has at least one token, or is one of those that are split.
            capacity = item_capacity(staging.max_num_tokens, splitting.at_once) * PREFILL_FIELDS
            name = f"attention.prefill.{index}"
            staged = staging.put(name, items.reshape(-1), capacity, part="tokens")
            self._prefills[shape] = _PrefillLaunch(staged, config, spans, num_passes)

    def _choose_prefill(
        self, shape: _Shape, seqs: Sequences, is_captured: bool
    ) -> tuple[PrefillConfig | HopperPrefillConfig, DequantizedPrompts | None]:
        """By which kernel prompts are computed, and whether from blocks that are converted first.
        Captured steps, which are small, have one configuration for all contexts."""
        config = self._prefill_config(shape)
        if is_captured or shape not in self._hopper_shapes:
            return config, None
        times, num_passes = self._prefill_times(shape, seqs)
        if times.split < times.whole:
            return config, None
        dequantized = None
        if self._dequantized is not None:
            dequantized = self._dequantized.plan(seqs, num_passes, shape.block_size, shape.window)
        of_shape = shape.window, shape.head_dim
        return HopperPrefillConfig.of(seqs.contexts.tolist(), *of_shape, num_passes), dequantized

    def _prefill_times(self, shape: _Shape, seqs: Sequences) -> tuple[PrefillTimes, int]:
        """What prompts take on a Hopper GPU, and in how many passes the kernel that does not split
        keys computes them."""
        num_passes: int | None = 1
        if self._dequantized is not None:
            sizes = shape.num_kv_heads, shape.head_dim, shape.block_size, shape.group
            num_passes = self._dequantized.num_passes(seqs, *sizes, shape.window)
        heads, config = (shape.group, shape.num_kv_heads), self._prefill_config(shape)
        of_kernel = shape.window, *heads, self._num_sms, config, self._is_fp8
        times = prefill_times(seqs, *of_kernel, num_passes or 1)
        if num_passes is None:
            return times._replace(whole=math.inf), 0
        return times, num_passes

    def _make_prefill_splits(self, device: torch.device) -> PrefillSplits:
        programs, rows = 0, 0
        for shape in self._shapes:
            places = num_places(self._splitting(shape).at_once)
            programs = max(programs, places * shape.num_kv_heads)
            rows = max(rows, self._prefill_config(shape).rows)
        return PrefillSplits.of(programs, rows, max(s.head_dim for s in self._shapes), device)

    def _splitting(self, shape: _Shape) -> Splitting:
        return self._prefill_config(shape).splitting(shape.num_kv_heads, self._num_sms)

    def _prefill_config(self, shape: _Shape) -> PrefillConfig:
        memory, is_fp8 = self._shared_memory, self._is_fp8
        return prefill_config(self._dtype, shape.head_dim, shape.group, memory, is_fp8)

    def _is_for_hopper(self, shape: _Shape, device: torch.device) -> bool:
        """Whether attention_prefill_hopper.py computes the prompts of layers of this shape."""
        if not is_on_hopper(device):
            return False
        layers = [layer for layer in self._layers.values() if layer.shape == shape]
        are_rows = all(layer.cache.stride(0) % shape.head_dim == 0 for layer in layers)
        takes = attention_prefill_hopper.takes
        return (
            (are_rows or self._is_fp8)
            and not self._need_distances(shape)
            and takes(self._dtype, shape.head_dim, shape.group, shape.block_size, shape.window)
        )

    def _is_for_clusters(self, shape: _Shape, device: torch.device) -> bool:
        """Whether `cluster_config` knows how few decodes of layers of this shape are computed."""
        return is_on_hopper(device) and not self._need_distances(shape)

    def _need_distances(self, shape: _Shape) -> bool:
        """Whether scores of any layer of this shape depend on how far a key is."""
        layers = [layer for layer in self._layers.values() if layer.shape == shape]
        return any(layer.scores.need_distances for layer in layers)

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: HeadNorms | None = None,
        rounded: RoundedInputs | None = None,
        rounding: Rounding = Rounding.NONE,
    ) -> Tensor:
        """See AttentionBackend.forward.

        rounded: where results go that are rounded so; then its values are returned.
        """
        layer = self._layers[layer_id]
        spec, shape, cache, table = layer.spec, layer.shape, layer.cache, self._tables[layer.group]
        _check(self._dtype, query, key, value)
        changes = _changes(rotary, head_norms)
        if rounded is None:
            output = query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))
        else:
            output = rounded.values
        if key.stride(0) != value.stride(0):  # the kernels have one stride for both
            key, value = key.contiguous(), value.contiguous()
        if shape in self._cascades:
            work = self._cascades[shape]
            cascade_attention(
                query,
                cache,
                table,
                work.items,
                work.members,
                self._scratch,
                changes,
                layer.scores,
                work.config,
                spec.kv_scales,
            )
        if shape in self._decodes:
            decodes, decode = self._decodes[shape]
            decode_attention(
                query,
                key,
                value,
                cache,
                table,
                decodes,
                self._scratch,
                output if rounded is None else rounded,
                changes,
                layer.scores,
                spec.window,
                decode,
                spec.kv_scales,
                rounding,
            )
        if shape in self._prefills:
            assert self._tokens is not None, "staged with the prefills"
            assert rounded is None, "`rounds` says so of decodes alone"
            query = write_kv(query, key, value, self._tokens, table, cache, changes, spec.kv_scales)
            self._attend_prompts(layer, query, table, output)
        return output

    def _attend_prompts(self, layer: _Layer, query: Tensor, table: Tensor, output: Tensor) -> None:
        """Attend for the prompts of the planned step, into their rows of `output`. Their keys and
        values are in the cache."""
        prefill, shape = self._prefills[layer.shape], layer.shape
        attend = partial(
            prefill_attention,
            items=prefill.items,
            window=layer.spec.window,
            config=prefill.config,
            is_causal=not shape.reads_encoder,
            kv_scales=layer.spec.kv_scales,
            splits=self._splits,
        )
        if prefill.spans is None:
            attend(query, layer.cache, table, output=output, scores=layer.scores)
            return
        assert self._dequantized is not None, "it has planned the spans"
        num_kv_heads = shape.num_kv_heads // prefill.num_passes
        for first in range(0, shape.num_kv_heads, num_kv_heads):
            cache = layer.cache[:, first : first + num_kv_heads]
            begin, end = (shape.group * each for each in (first, first + num_kv_heads))
            attend(
                query[:, begin:end],
                *self._dequantized.fill(cache, table, prefill.spans),
                output=output[:, begin * shape.head_dim : end * shape.head_dim],
                scores=layer.scores.of_heads(begin, end),
            )

    def _compile_passes(self, device: torch.device) -> None:
        """Compile the kernels of prompts whose blocks are converted, with every number of passes.

        Steps that the device's memory is measured with have short contexts; the first step with
        long ones would keep all requests waiting for several seconds.
        """
        table = torch.zeros((1, 1), dtype=torch.int32, device=device)
        for layer in self._layers.values():
            shape = layer.shape
            if shape not in self._hopper_shapes:
                continue
            num_heads = shape.num_kv_heads * shape.group
            query = torch.zeros((1, num_heads, shape.head_dim), dtype=self._dtype, device=device)
            for num_passes in numbers_of_passes(shape.num_kv_heads):
                of_shape = shape.window, shape.head_dim, num_passes
                few, many = (HopperPrefillConfig.of([n], *of_shape) for n in (1, 1 << 20))
                for config in {few, many}:
                    item, span = (table.new_zeros(n) for n in (PREFILL_FIELDS, SPAN_FIELDS))
                    self._prefills[shape] = _PrefillLaunch(item, config, span, num_passes)
                    self._attend_prompts(layer, query, table, torch.empty_like(query.flatten(1)))
        self._prefills.clear()

    def rounds(self, layer_id: int, rounding: Rounding) -> bool:
        """See RoundingBackend.rounds: a step of decodes alone, if each program has all results that
        share a scale."""
        shape = self._layers[layer_id].shape
        if rounding is Rounding.NONE or shape not in self._decodes or shape in self._prefills:
            return False
        return can_round(rounding, self._decodes[shape][1], shape.group, shape.head_dim)

    def forward_rounded(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None,
        head_norms: HeadNorms | None,
        rounding: Rounding,
    ) -> RoundedInputs:
        size = query.shape[1] * query.shape[2]
        rounded = empty_inputs(len(query), size, rounding, query.device)
        self.forward(layer_id, query, key, value, rotary, head_norms, rounded, rounding)
        return rounded

    def plan_encoded(self, inputs: EncodedInputs) -> None:
        tokens = np.empty((len(inputs.positions), 2), np.int32)
        tokens[:, 0] = inputs.rows.numpy().repeat(inputs.lens.numpy())
        tokens[:, 1] = inputs.positions.numpy()
        tables = inputs.block_tables
        self._encoded = upload(tokens.reshape(-1), tables[0].device), tables

    def write_encoded(self, layer_id: int, key: Tensor, value: Tensor) -> None:
        assert self._encoded is not None, "plan_encoded() comes before write_encoded()"
        layer, (tokens, tables) = self._layers[layer_id], self._encoded
        _check(self._dtype, key, value)
        if key.stride(0) != value.stride(0):
            key, value = key.contiguous(), value.contiguous()
        table, changes = tables[layer.group], _changes(None, None)
        write_kv(key, key, value, tokens, table, layer.cache, changes, layer.spec.kv_scales)

    def attend_encoded(self, layer_id: int, query: Tensor) -> Tensor:
        layer = self._layers[layer_id]
        shape, cache, table = layer.shape, layer.cache, self._tables[layer.group]
        _check(self._dtype, query)
        output = query.new_empty((query.shape[0], query.shape[1] * query.shape[2]))
        if shape in self._decodes:
            # The items name no new token, so that key and value are not read.
            decode_attention(
                query,
                query,
                query,
                cache,
                table,
                self._decodes[shape][0],
                self._scratch,
                output,
                _changes(None, None),
                layer.scores,
                None,
                self._decodes[shape][1],
                layer.spec.kv_scales,
            )
        if shape in self._prefills:
            self._attend_prompts(layer, query, table, output)
        return output

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        layer = self._layers[layer_id]
        block, offset = divmod(slot, layer.shape.block_size)
        cells = layer.cache[block]
        return cells[:, 0, offset].clone(), cells[:, 1, offset].clone()


def _check(dtype: torch.dtype, *heads: Tensor) -> None:
    """Queries, keys or values are as the kernels take them."""
    for x in heads:
        assert x.dtype == dtype, f"{x.dtype} for a backend of {dtype}"
        assert x.stride(2) == 1, "heads must be dense"
        assert x.stride(1) == x.shape[2] or x.shape[1] == 1, "heads must be dense"


def _alignment(shape: _Shape, config: DecodeConfig | ClusterConfig) -> int:
    """What the first key of a work item of decodes must be a multiple of."""
    if isinstance(config, ClusterConfig):
        return 1
    return tile_alignment(config.tile, shape.block_size)


def _sequences_of(batch: AttentionBatch) -> tuple[Sequences, Sequences | None]:
    """Sequences with the keys of layers that read their own, and of those that read the encoder's,
    if there are any."""
    lens = batch.query_lens.numpy()
    rows = np.arange(len(lens), dtype=np.int32) if batch.rows is None else batch.rows.numpy()
    seqs = Sequences(batch.query_starts.numpy()[:-1], rows, batch.context_lens.numpy(), lens)
    if batch.encoder_lens is None:
        return seqs, None
    return seqs, seqs._replace(contexts=batch.encoder_lens.numpy())


def _renumbered(
    cascade: Sequence[CascadeSegments | None], is_decode: NDArray[np.bool_]
) -> list[CascadeSegments | None]:
    """The same segments with members numbered among the decodes alone."""
    number = (is_decode.cumsum() - 1).astype(np.int32)
    return [
        None if segments is None else segments._replace(members=number[segments.members])
        for segments in cascade
    ]


def _stage_tokens(batch: AttentionBatch, seqs: Sequences) -> Tensor:
    """int32 [num_tokens * 2]: each token's table row and position; -1 for decodes and padding."""
    num_tokens = len(batch.positions)
    tokens = np.zeros((batch.padded.num_tokens if batch.padded else num_tokens, 2), np.int32)
    tokens[:num_tokens, 0] = seqs.rows.repeat(seqs.lens)
    tokens[:num_tokens, 1] = batch.positions.numpy()
    tokens[num_tokens:, 1] = -1
    tokens[seqs.tokens[seqs.lens == 1], 1] = -1
    staging = batch.staging
    return staging.put(
        "attention.tokens", tokens.reshape(-1), 2 * staging.max_num_tokens, part="tokens"
    )


def _changes(rotary: RotaryTable | None, head_norms: HeadNorms | None) -> HeadChanges:
    if head_norms is None:
        return HeadChanges(rotary)
    query, key, value = head_norms
    assert value is None or value.weight is None, "kernels have no scale of values"
    return HeadChanges(
        rotary,
        (query.weight, query.eps),
        (key.weight, key.eps),
        None if value is None else value.eps,
    )


def _make_layer(spec: LayerSpec, place: LayerPlace, kv_cache: Tensor, block_size: int) -> _Layer:
    shape = _Shape(
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.window,
        block_size,
        spec.reads_encoder,
    )
    block_shape = TritonBackend.kv_block_shape(block_size, spec.num_kv_heads, spec.head_dim)
    key_scale = 1.0 if spec.kv_scales is None else spec.kv_scales.key
    scores = KernelScores.of(spec.scores, kv_cache.device, key_scale)
    return _Layer(spec, shape, scores, place.group, place.blocks(kv_cache, block_shape))


def _make_scratch(
    shapes: Sequence[_Shape], cascade_shapes: Container[_Shape], device: torch.device
) -> Scratch:
    """Buffers for the partial results of any step, allocated once."""
    places = [
        num_places(max(1, MAX_PROGRAMS // shape.num_kv_heads))
        + (MAX_CASCADE_RESULTS if shape in cascade_shapes else 0)
        for shape in shapes
    ]
    rows = [place * shape.num_heads for place, shape in zip(places, shapes, strict=True)]
    elements = max(n * shape.head_dim for n, shape in zip(rows, shapes, strict=True))
    return Scratch.of(max(rows), elements, device)
