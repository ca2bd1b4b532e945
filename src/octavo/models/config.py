"""What a model computes, as a description: its layers, norms, rotary embeddings and token ids.

Families write these descriptions from `config.json` (families/); decoder.py builds modules from
them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Self

from octavo.core.kv.specs import FullAttention, KVSpec, SlidingWindow
from octavo.errors import ConfigError, ModelError
from octavo.layers.config import (
    AttentionConfig,
    EmbeddingScale,
    LinearConfig,
    MLPConfig,
    NormConfig,
    RotaryConfig,
)
from octavo.models.quantization import Quantization
from octavo.parallel import WHOLE, Shard

NormPlacement = Literal["pre", "post", "branch", "around", "parallel", "twin"]
# How many norms a layer has.
NUM_NORMS: dict[NormPlacement, int] = {
    **{"pre": 2, "post": 2, "branch": 2, "around": 4},
    **{"parallel": 1, "twin": 2},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Attention and a feed-forward block, with norms.

    Each block adds its result to the residual stream. norm_placement says what is normalised:
        "pre": each block's input (Llama).
        "post": the residual stream after each block (OPT-350m).
        "branch": each block's result before it is added (OLMo 2).
        "around": each block's input, and its result before it is added (Gemma).
        "parallel": the input of both blocks, which are computed side by side (GPT-J).
        "twin": the same, by a norm for each block (GPT-NeoX).
    kv_spec: which tokens' KV the layer keeps, at least those that the attention's window reads;
    None: exactly those.
    """

    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig
    norm_placement: NormPlacement = "pre"
    kv_spec: KVSpec | None = None

    def sharded(self, shard: Shard) -> LayerConfig:
        """One rank's part. Raises ConfigError if something does not divide."""
        return replace(self, attention=self.attention.sharded(shard), mlp=self.mlp.sharded(shard))

    @property
    def num_parameters(self) -> int:
        blocks = self.attention.num_parameters + self.mlp.num_parameters
        return blocks + NUM_NORMS[self.norm_placement] * self.norm.num_parameters


@dataclass(frozen=True, slots=True)
class PositionTable:
    """Learned positions: position p is row p + offset."""

    num_rows: int
    offset: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A decoder-only language model, whatever names its family uses in config.json."""

    vocab_size: int
    hidden_size: int
    max_model_len: int  # tokens, prompt and output together
    layers: tuple[LayerConfig, ...]
    rotaries: tuple[RotaryConfig, ...] = ()
    positions: PositionTable | None = None
    final_norm: NormConfig | None
    embedding_size: int | None = None  # None: hidden_size; OPT-350m projects its embeddings to it
    embedding_scale: EmbeddingScale | None = None
    embedding_norm: NormConfig | None = None
    tied_embeddings: bool = False
    head_bias: bool = False
    logits_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    shard: Shard = WHOLE  # which part of the model the layers describe

    def __post_init__(self) -> None:
        attentions = [layer.attention for layer in self.layers]
        kv_shapes = {(attention.num_kv_heads, attention.head_dim) for attention in attentions}
        assert len(kv_shapes) == 1, "blocks of the KV cache have one shape in all layers"
        placements = {layer.norm_placement for layer in self.layers}
        assert len(placements) == 1, "a layer takes what the one before it returns"
        layers = tuple(_within_context(layer, self.max_model_len) for layer in self.layers)
        object.__setattr__(self, "layers", layers)
        _check_kv_specs(layers, self.max_model_len)

    def sharded(self, shard: Shard) -> Self:
        """What one rank holds of the whole model: its heads, MLP elements and vocabulary rows.

        Counts of parameters and heads are then the rank's own; sizes of the vocabulary and of
        hidden states are not divided.

        Raises:
            ConfigError: something does not divide into so many parts; names it.
        """
        assert self.shard.size == 1, "already sharded"
        if shard.size == 1:
            return self
        shard.padded(self.vocab_size)
        layers = tuple(layer.sharded(shard) for layer in self.layers)
        return replace(self, layers=layers, shard=shard)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_kv_heads(self) -> int:
        """KV heads of every layer."""
        return self.layers[0].attention.num_kv_heads

    @property
    def head_dim(self) -> int:
        """Elements of a head in every layer."""
        return self.layers[0].attention.head_dim

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens; None: full attention."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def project_in(self) -> LinearConfig | None:
        """From embeddings to hidden states, where their sizes differ."""
        if self.embedding_size is None or self.embedding_size == self.hidden_size:
            return None
        return LinearConfig(self.embedding_size, (self.hidden_size,))

    @property
    def project_out(self) -> LinearConfig | None:
        """From hidden states to what the head takes, where their sizes differ."""
        projection = self.project_in
        if projection is None:
            return None
        return LinearConfig(self.hidden_size, (projection.in_features,))

    @property
    def head(self) -> LinearConfig:
        """From the final hidden states to logits of this rank's part of the vocabulary."""
        rows = self.shard.padded(self.vocab_size)
        return LinearConfig(
            self.embedding_size or self.hidden_size,
            (rows,),
            self.head_bias,
            out_shards=(self.shard,),
            padding=rows * self.shard.size - self.vocab_size,
        )

    def kv_specs(self) -> list[KVSpec]:
        """Which tokens' KV each layer keeps."""
        return [
            _window_spec(layer.attention.window) if layer.kv_spec is None else layer.kv_spec
            for layer in self.layers
        ]

    def num_lookup_parameters(self) -> int:
        """Parameters of tables of which a step reads only the rows of its tokens and positions."""
        positions = 0 if self.positions is None else self.positions.num_rows * self.hidden_size
        if self.tied_embeddings:
            return positions
        # The embedding has as many rows as the head, of each rank.
        return positions + self.head.out_features * self.head.in_features

    def num_parameters(self) -> int:
        """Weights in the model, from the declared shapes alone; tied embeddings count once."""
        norms = (self.embedding_norm, self.final_norm)
        parts = (self.head, self.project_in, self.project_out, *norms, *self.layers)
        declared = sum(part.num_parameters for part in parts if part is not None)
        return declared + self.num_lookup_parameters()

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights and of the rotary tables, which are float32 whatever the weights."""
        tables = sum(4 * self.max_model_len * rotary.dim for rotary in self.rotaries)
        return self.num_parameters() * dtype_bytes + tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelDescription):
    """A model in a directory: its description, and what its files say about serving it."""

    directory: Path
    architecture: str  # the class in config.json, such as "LlamaForCausalLM"
    family: str  # config.json's model_type
    dtype: str = "float32"  # of the weights in the files
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None  # of the weights in the files
    # What generation_config.json sets (temperature, top_p, ...) for requests that do not.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def with_max_model_len(self, max_model_len: int) -> ModelConfig:
        """The same model limited to shorter sequences; ConfigError beyond its own limit."""
        if max_model_len > self.max_model_len:
            raise ConfigError(
                "max_model_len",
                f"{max_model_len} is more than the {self.max_model_len} positions of "
                f"{self.directory}",
            )
        return replace(self, max_model_len=max_model_len)


def _within_context(layer: LayerConfig, max_model_len: int) -> LayerConfig:
    """A window as long as the model's context is full attention."""
    window = layer.attention.window
    if window is None or window < max_model_len:
        return layer
    return replace(layer, attention=replace(layer.attention, window=None))


def _window_spec(window: int | None) -> KVSpec:
    """The spec that keeps what a window reads, and nothing else."""
    return FullAttention() if window is None else SlidingWindow(window)


def _check_kv_specs(layers: Sequence[LayerConfig], max_model_len: int) -> None:
    """Raise ModelError if a layer's own KV spec frees tokens that its attention still reads."""
    checked = set()
    for layer_id, layer in enumerate(layers):
        spec, window = layer.kv_spec, layer.attention.window
        if spec is None or (spec, window) in checked:
            continue
        checked.add((spec, window))
        read = _window_spec(window)
        for position in range(max_model_len):
            kept, needed = spec.first_needed_token(position), read.first_needed_token(position)
            if kept > needed:
                raise ModelError(
                    f"kv_spec of layer {layer_id}: {spec} keeps no token before {kept} at position "
                    f"{position}, where the attention reads tokens from {needed} on "
                    f"(window: {window})"
                )
