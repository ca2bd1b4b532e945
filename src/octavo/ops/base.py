"""The seam between the model and the paged KV cache: one interface, many backends.

A backend owns the layout of one layer's K and V inside a block, and nothing else: the cache itself
is one block-major allocation, in which a block holds one layer's `kv_block_shape` after the other,
so that the worker can copy and swap whole blocks without knowing what is in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.ops.quantized import RoundedInputs, Rounding

# Among the score_features of a backend that has it:
CROSS_ATTENTION = "cross_attention"
FP8_KV_CACHE = "fp8_kv_cache"
E4M3_MAX = 448.0  # the largest number of torch.float8_e4m3fn, which has no infinity
MIN_KV_SCALE, MAX_KV_SCALE = 1e-30, 1e30  # their inverses are float32 numbers, too
LOG2_E = 1.4426950408889634  # multiplies scores for a softmax in powers of 2


class Sinks(Protocol):
    """Attention sinks: one learned score per head that no key belongs to."""

    @property
    def weight(self) -> Any:
        """Tensor [num_heads], loaded before a backend is made."""


class RelativeBias(Protocol):
    """Relative position bias (T5): a learned number per head and bucket of distances.

    Near distances have a bucket each; farther ones share buckets whose width grows by a constant
    factor, and the last bucket has all from `max_distance` on.
    """

    weight: Any  # Tensor [num_buckets, num_heads], loaded before a backend is made
    max_distance: int

    def biases(self, distances: Tensor) -> Tensor:
        """float32 [num_heads, *distances.shape]; distances: int64, key minus query position."""


@dataclass(frozen=True, slots=True)
class ScoreFunction:
    """How the dot product of a query and a key becomes the weight of the key's value.

        score = scale * (query . key)
        score = softcap * tanh(score / softcap)                                  with a softcap
        score = score + slope of the head * (key position - query position)      with ALiBi
        score = score + bias of the head and of the same distance               with a relative bias
        weight = exp(score) / (sum of exp(score) over the visible keys + exp(sink of the head))

    The last summand is there only with sinks. The fields after `scale` are optional features: a
    backend lists those that it computes (AttentionBackend.score_features), and `make_backend`
    refuses layers that need any other.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: tuple[float, ...] | None = None  # per query head (arXiv:2108.12409)
    sinks: Sinks | None = None
    relative_bias: RelativeBias | None = None  # (arXiv:1910.10683, section 2.1)

    def __post_init__(self) -> None:
        # Kernels take the largest product for that of the largest score.
        if not 0 < self.scale < math.inf:
            raise ValueError(f"scale must be positive and finite, not {self.scale}")
        if self.softcap is not None and not 0 < self.softcap < math.inf:
            raise ValueError(f"softcap must be positive and finite, not {self.softcap}")
        if not all(map(math.isfinite, self.alibi_slopes or ())):
            raise ValueError(f"alibi_slopes must be finite, not {self.alibi_slopes}")

    @property
    def features(self) -> frozenset[str]:
        """The names of the optional features that are in use."""
        names = [each.name for each in fields(self) if each.name != "scale"]
        return frozenset(name for name in names if getattr(self, name) is not None)


@dataclass(frozen=True, slots=True)
class KVScales:
    """How one layer's keys and values are kept in an FP8 KV cache: as e4m3 (torch.float8_e4m3fn).

    The cache holds K / key and V / value, rounded to nearest even; what is larger than E4M3_MAX
    becomes that, and NaN stays NaN. Attention multiplies in the model's dtype, which holds every
    e4m3 number, and takes the scales into account once: that of K in the scale of the scores, that
    of V in the result.
    """

    key: float = 1.0
    value: float = 1.0

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            scale = getattr(self, name)
            if not MIN_KV_SCALE < scale < MAX_KV_SCALE:
                raise ValueError(
                    f"the scale of a layer's {name}s must be between {MIN_KV_SCALE:g} and "
                    f"{MAX_KV_SCALE:g}, not {scale:g}"
                )

    @staticmethod
    def quantize(x: Tensor, scale: float) -> Tensor:
        """x / scale as the cache holds it; the product with the inverse is in float32."""
        scaled = x.float() * (1 / scale)
        return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer, as the model declares it."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scores: ScoreFunction
    window: int | None = None
    """In tokens: the query at p sees the keys p - window + 1 .. p. None: all keys up to p."""
    reads_encoder: bool = False
    """Cross-attention: a query sees all keys of its sequence's encoder input, whatever its own
    position. They are in the cache before the step, which writes none."""
    kv_scales: KVScales | None = None
    """The cache holds e4m3, scaled by these; None: it holds the model's dtype."""

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"layer {self.layer_id}: {self.num_heads} query heads cannot share "
                f"{self.num_kv_heads} KV heads"
            )
        if self.head_dim < 1:
            raise ValueError(
                f"layer {self.layer_id}: head_dim must be positive, not {self.head_dim}"
            )
        if self.window is not None and self.window < 1:
            raise ValueError(f"layer {self.layer_id}: window must be positive, not {self.window}")
        if self.reads_encoder and (self.window or self.scores.features - {"softcap"}):
            raise ValueError(
                f"layer {self.layer_id}: cross-attention has no window, and no feature of scores "
                f"but softcap"
            )
        slopes, sinks, bias = self.scores.alibi_slopes, self.scores.sinks, self.scores.relative_bias
        counts = {
            "alibi_slopes": self.num_heads if slopes is None else len(slopes),
            "sinks": self.num_heads if sinks is None else len(sinks.weight),
            "relative_bias columns": self.num_heads if bias is None else bias.weight.shape[1],
        }
        for name, count in counts.items():
            if count != self.num_heads:
                raise ValueError(
                    f"layer {self.layer_id}: {count} {name} for {self.num_heads} query heads"
                )

    @property
    def features(self) -> frozenset[str]:
        """What a backend must compute beyond scaled dot products (score_features)."""
        optional = {CROSS_ATTENTION: self.reads_encoder, FP8_KV_CACHE: self.kv_scales is not None}
        return self.scores.features | {name for name, is_used in optional.items() if is_used}


def cached_dtype(layers: Sequence[LayerSpec], dtype: torch.dtype) -> torch.dtype:
    """What the KV cache of these layers of a model in `dtype` holds; they share its blocks."""
    (is_scaled,) = {layer.kv_scales is not None for layer in layers}
    return torch.float8_e4m3fn if is_scaled else dtype


@dataclass(frozen=True, slots=True)
class LayerPlace:
    """Where a layer's KV lives: its KV group, and its index among the group's layers.

    The group's blocks hold `span` times as many tokens as the block size says.
    """

    group: int
    index: int
    span: int = 1

    def blocks(self, kv_cache: Tensor, block_shape: Sequence[int]) -> Tensor:
        """The layer's part of all blocks of the cache: [num_blocks, *block_shape], a view.

        block_shape: `kv_block_shape` for the tokens that the group's blocks hold.
        """
        size = math.prod(block_shape)
        part = kv_cache.view(len(kv_cache), -1)[:, self.index * size : (self.index + 1) * size]
        return part.view(len(kv_cache), *block_shape)


@dataclass(frozen=True, slots=True)
class RotaryTable:
    """Rotary embedding of every position.

    Pair i of a head's elements turns by angle i: elements 2 i and 2 i + 1 if `interleaved`,
    otherwise elements i and i + rotary_dim / 2.
    """

    cos: Tensor  # float32 [max_positions, rotary_dim / 2]
    sin: Tensor  # float32 [max_positions, rotary_dim / 2]
    interleaved: bool = False

    @property
    def rotary_dim(self) -> int:
        """Leading elements of a head that are rotated; the rest pass unchanged."""
        return 2 * int(self.cos.shape[1])

    def apply(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotate x [num_tokens, heads, head_dim] at int64 positions [num_tokens].

        Computed in fp32, returned in x's dtype.
        """
        cos = self.cos[positions].unsqueeze(1)
        sin = self.sin[positions].unsqueeze(1)
        shape = (-1, 2) if self.interleaved else (2, -1)
        axis = -1 if self.interleaved else -2
        x1, x2 = x[..., : self.rotary_dim].float().reshape(*x.shape[:-1], *shape).unbind(axis)
        rotated = torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), axis).flatten(-2)
        return torch.cat((rotated.to(x.dtype), x[..., self.rotary_dim :]), dim=-1)


class HeadNorm(Protocol):
    """An RMS norm over each head's elements, before the rotary embedding (Qwen3)."""

    weight: Any  # Tensor [head_dim]; None: without a scale, as norms of values are
    eps: float

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(norm of hidden [num_tokens, heads, head_dim], hidden)."""


class HeadNorms(NamedTuple):
    """The norms of a layer's heads, as a backend applies them."""

    query: HeadNorm
    key: HeadNorm
    value: HeadNorm | None = None

    def apply(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """All three, normalised: for backends whose kernels do not."""
        if self.value is not None:
            value = self.value.forward(value)[0]
        return self.query.forward(query)[0], self.key.forward(key)[0], value


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """The values on a device, for what is about to be launched; the host does not wait for it."""
    host = torch.from_numpy(values)
    if device.type == "cpu":
        return host
    # From pinned memory, whose reuse the allocator delays until the copy is done.
    return host.pin_memory().to(device, non_blocking=True)


StagingPart = Literal["sequences", "tokens", "blocks"]
"""What arrays of a step grow with; the last with the blocks that are new in tables, or copied."""


class Staging(Protocol):
    """Uploads a step's small arrays to the device before the step computes, in a copy for each part
    that has some."""

    max_num_seqs: int
    max_num_tokens: int

    def put(
        self, name: str, values: NDArray[Any], capacity: int, part: StagingPart = "sequences"
    ) -> Tensor:
        """`values` on the device, valid once the step computes.

        The address depends on the name alone, so that a captured graph may keep it; in the other
        parts than "sequences", also on whether there are more than `max_num_seqs` values.

        Args:
            capacity: the largest length that will ever be put under this name.
            part: of what there may be as many values as the step has. A part in which a step puts
                nothing is not uploaded.
        """

    def begin(self) -> None:
        """Start a new step."""

    def flush(self, then: Callable[[], None] | None = None) -> None:
        """Upload what was put; the device computes with it from here on.

        then: launches what comes directly after the upload; it may change what no kernel reads that
            was given to the device since the last `release`.
        """

    def send(self, then: Callable[[], None] | None = None) -> None:
        """As `flush`, but the device may compute with it from the next `receive` on: what it is
        given until then does not wait for the upload."""

    def receive(self) -> None:
        """The device computes with what was sent from here on."""

    def release(self) -> None:
        """What the device is given from here on does not read what was received last."""


class HostStaging:
    """The staging of devices that compute where the arrays are: nothing is copied."""

    max_num_seqs = max_num_tokens = 1 << 30

    def begin(self) -> None:
        """See Staging.begin."""

    def flush(self, then: Callable[[], None] | None = None) -> None:
        """See Staging.flush."""
        if then is not None:
            then()

    send = flush

    def receive(self) -> None:
        """See Staging.receive."""

    def release(self) -> None:
        """See Staging.release."""

    def put(
        self, name: str, values: NDArray[Any], capacity: int, part: StagingPart = "sequences"
    ) -> Tensor:
        return torch.from_numpy(values)


MAX_CASCADE_LEVELS = 3  # shared segments of one sequence, nested in each other


class CascadeSegments(NamedTuple):
    """Segments of cached keys that several sequences share, for cascade attention.

    A segment is a run of whole blocks that are the same in the tables of all its members, of which
    there are at least two. The segments of one sequence start at its first key and follow each
    other without gaps.
    """

    begins: NDArray[np.int32]  # [num_segments], in tokens
    ends: NDArray[np.int32]  # [num_segments], in tokens
    starts: NDArray[np.int32]  # [num_segments + 1]: where each segment's members begin
    members: NDArray[np.int32]  # indices of sequences in the batch, each with one new token

    @classmethod
    def empty(cls) -> CascadeSegments:
        """No segments: a backend launches the same kernels, which find no work."""
        none = np.zeros(0, np.int32)
        return cls(none, none, np.zeros(1, np.int32), none)


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """Sizes that a captured step of prompts and decodes is padded to."""

    num_tokens: int
    num_singles: int  # sequences with one new token
    num_chunks: int  # sequences with several


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Host metadata of one step: dense CPU tensors; chunks and decodes in any order.

    No sequence reads what another one writes in the same step.
    """

    query_lens: Tensor  # int32 [num_seqs]: new tokens, at least 1
    # int32 [num_seqs]: tokens in the cache after this step, new ones included. 0 marks padding, on
    # a GPU only: nothing is written for it and its output is 0.
    context_lens: Tensor
    query_starts: Tensor  # int32 [num_seqs + 1]: where each sequence's tokens begin
    positions: Tensor  # int64 [num_tokens]: for the rotary embedding
    # One tensor per KV group. Block 0 is the null block, which is never read.
    block_tables: Sequence[Tensor]  # int32 [num_seqs, max_blocks]
    slots: Sequence[Tensor]  # int64 [num_tokens]: block_id * block_size + offset
    # On a GPU the tables stay on the device, as int32 [num_rows, max_blocks], and `slots` is empty:
    # sequence i's table is row rows[i].
    rows: Tensor | None = None  # int32 [num_seqs]
    staging: Staging = field(default_factory=HostStaging)
    # One entry per KV group, or empty: keys that a backend may read once for all their sequences.
    # Entries that are not None are equal.
    cascade: Sequence[CascadeSegments | None] = ()
    # Set while a step is captured: launches depend on these sizes alone. Padding tokens come last.
    padded: PaddedSizes | None = None
    # Keys that kernels are chosen for where no sequence has as many: padding stands for longer ones
    # when a step is captured.
    longest: int = 0
    # int32 [num_seqs]: tokens of each sequence's encoder input, all of which the layers that read
    # it see; 0 marks padding. None: no layer does.
    encoder_lens: Tensor | None = None


@dataclass(frozen=True, slots=True)
class EncodedInputs:
    """Encoder inputs that have just been run: where K and V of their tokens, which lie flat, go."""

    lens: Tensor  # int32 [num_inputs]: tokens, at least 1
    starts: Tensor  # int32 [num_inputs + 1]: where each input's tokens begin
    positions: Tensor  # int64 [num_tokens]: in their inputs
    # As in AttentionBatch, for the sequences that the inputs are of.
    slots: Sequence[Tensor]
    block_tables: Sequence[Tensor]
    rows: Tensor  # int32 [num_inputs]


class AttentionBackend(Protocol):
    """Writes a step's K and V into blocks and attends to all of them."""

    # The optional fields of ScoreFunction that it computes, CROSS_ATTENTION if it has the last
    # three methods, and FP8_KV_CACHE if it takes layers with kv_scales.
    score_features: frozenset[str]
    # Up to and beyond so many keys of the longest sequence, a step may have other kernels,
    # ascending. A backend without the attribute has the same ones for all.
    context_limits: tuple[int, ...]

    def __init__(
        self,
        layers: Sequence[LayerSpec],
        layer_places: Sequence[LayerPlace],
        kv_cache: Tensor,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """`layer_places[i]` belongs to `layers[i]`; `kv_cache` is dense. A layer's part of it is
        `LayerPlace.blocks`, with `span * block_size` tokens per block. `dtype`: the model's, of
        queries, keys, values and results; that of the cache is the same, or e4m3 if the layers have
        kv_scales."""

    @staticmethod
    def kv_block_shape(block_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Shape of one layer's K and V inside one block; its size is proportional to block_size."""

    def plan(self, batch: AttentionBatch) -> Hashable:
        """Prepare a step: host work, once per step, before the first `forward`.

        Returns a name of the kernels that the step has. Steps of the same padded sizes with the
        same name make the same launches, so one captured graph computes them.
        """

    def forward(
        self,
        layer_id: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rotary: RotaryTable | None = None,
        head_norms: HeadNorms | None = None,
    ) -> Tensor:
        """Normalise heads, rotate query and key, write key and value to the slots, attend.

        query [num_tokens, num_heads, head_dim], key and value [num_tokens, num_kv_heads, head_dim],
        in the model's dtype; heads and elements are dense, tokens may be strided (views of one
        fused projection). Key and value may be one tensor, whose norms differ. Returns
        [num_tokens, num_heads * head_dim]; the inputs stay unchanged.
        """

    def read_slot(self, layer_id: int, slot: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one token as cached, each [num_kv_heads, head_dim], in the cache's dtype and
        without scales: for tests and tools."""

    def plan_encoded(self, inputs: EncodedInputs) -> None:
        """Prepare `write_encoded`: host work, once for all layers. Independent of `plan`."""

    def write_encoded(self, layer_id: int, key: Tensor, value: Tensor) -> None:
        """Write K and V of the planned inputs, each [num_tokens, num_kv_heads, head_dim], for a
        layer that reads the encoder; strided as in `forward`."""

    def attend_encoded(self, layer_id: int, query: Tensor) -> Tensor:
        """Attend to the encoder inputs of the planned step's sequences; query and result as in
        `forward`. Nothing is written."""


class DecodeItems(NamedTuple):
    """Work items of decodes, which go on when their sequences do: `begin_decodes`
    (cuda/pending_tokens.py) reads and writes their fields."""

    items: Tensor  # int32 [num_items * ITEM_FIELDS], as `decode_attention` reads them
    window: int | None
    alignment: int  # what an item's first key is a multiple of, if there is a window


# Steps that the device goes on with by itself, one after the other: meanwhile a sequence's last
# split of keys grows. A window leaves the first one, and must not get beyond it: these are fewer
# steps than the smallest tile has keys.
MOST_CONTINUED = 15


@runtime_checkable
class ContinuingBackend(Protocol):
    """What an AttentionBackend has, too, whose decodes need not be planned again for every step:
    MOST_CONTINUED steps may follow a planned one."""

    def decode_items(self) -> list[DecodeItems]:
        """The work items of the step planned last, which computes one token of each sequence."""


@runtime_checkable
class CapturedBackend(Protocol):
    """What an AttentionBackend has, too, some of whose steps are faster without a graph."""

    def captures(self, batch: AttentionBatch) -> bool:
        """Whether a step with prompts, which is not padded yet, is to be computed by a graph if
        there is one of its size."""


@runtime_checkable
class RoundingBackend(Protocol):
    """What an AttentionBackend has, too, that can round results for the projection after it."""

    def rounds(self, layer_id: int, rounding: Rounding) -> bool:
        """Whether `forward_rounded` is to compute the planned step, whose results are to be rounded
        so."""

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
        """As AttentionBackend.forward, with the results rounded: exactly what rounding them in the
        model's dtype gives."""
