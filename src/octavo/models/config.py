"""What a model computes, as a description: its layers, norms, rotary embeddings and token ids.

Families write these descriptions from `config.json` (families/); decoder.py builds modules from
them. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, starmap
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from octavo.core.kv.specs import (
    CrossAttention,
    FullAttention,
    KVLayout,
    KVSpec,
    SlidingWindow,
    group_layers,
)
from octavo.errors import ConfigError, ModelError
from octavo.layers.config import (
    AttentionConfig,
    CopyForm,
    EmbeddingScale,
    ExpertsConfig,
    LayerInputConfig,
    LinearConfig,
    MLPConfig,
    NormConfig,
    PositionTable,
    RelativeBiasConfig,
    RotaryConfig,
    TokenInputsConfig,
)
from octavo.models.quantization import ON_LOAD_METHOD, Quantization, WeightKernels
from octavo.models.weight_names import UNNAMED, WeightNames
from octavo.parallel import WHOLE, Shard
from octavo.routing import RoutingConfig

# How many elements a backend keeps of a token's keys and values in a layer: of its number of KV
# heads, and the elements of each.
TokenSize = Callable[[int, int], int]

Item = TypeVar("Item")
Result = TypeVar("Result")

NormPlacement = Literal["pre", "post", "branch", "around", "apart", "parallel", "twin"]
# How many norms a layer has.
NUM_NORMS: dict[NormPlacement, int] = {
    **{"pre": 2, "post": 2, "branch": 2, "around": 4, "apart": 8},
    **{"parallel": 1, "twin": 2},
}


def dense_token_size(num_kv_heads: int, head_dim: int) -> int:
    """The size of a token without padding; see TokenSize."""
    return 2 * num_kv_heads * head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """Attention, perhaps cross-attention, and a feed-forward block, with norms.

    Each block adds its result to the residual stream. norm_placement says what is normalised:
        "pre": each block's input (Llama).
        "post": the residual stream after each block (OPT-350m).
        "branch": each block's result before it is added (OLMo 2).
        "around": each block's input, and its result before it is added (Gemma).
        "apart": the same; and of experts beside a shared one the inputs of both and of the router,
            each by a norm of its own, and both results before their sum (Gemma 4).
        "parallel": the input of both blocks, which are computed side by side (GPT-J).
        "twin": the same, by a norm for each block (GPT-NeoX).
    kv_spec: which tokens' KV the layer keeps, at least those that the attention's window reads;
    None: exactly those.
    kv_source: the layer before it whose keys and values it attends to, and which are given to its
    attention again; None: its own.
    layer_input: how it takes in a token's vector for it (ModelDescription.token_inputs), after the
    feed-forward block; its result is normalised before it is added.
    scales_stream: whether the residual stream is multiplied by a learned number in the end.
    """

    attention: AttentionConfig
    cross_attention: AttentionConfig | None = None
    mlp: MLPConfig | ExpertsConfig
    norm: NormConfig
    norm_placement: NormPlacement = "pre"
    kv_spec: KVSpec | None = None
    kv_source: int | None = None
    layer_input: LayerInputConfig | None = None
    scales_stream: bool = False

    @property
    def own_kv_spec(self) -> KVSpec:
        """Which tokens' KV its attention to its own sequence needs."""
        return _window_spec(self.attention.window) if self.kv_spec is None else self.kv_spec

    def can_read_kv_of(self, source: LayerConfig) -> bool:
        """Whether the other layer keeps its own keys and values, of the tokens that this one needs,
        in heads as this one has them."""
        own, other = self.attention, source.attention
        return (
            source.kv_source is None
            and self.own_kv_spec == source.own_kv_spec
            and (own.num_kv_heads, own.head_dim) == (other.num_kv_heads, other.head_dim)
        )

    @property
    def chains_projections(self) -> bool:
        """Whether nothing but attention and experts comes between the projections of one token,
        because they norm their inputs themselves (NormingKernel).

        Quantized ones between experts are left out: see `queries_follow_experts`.
        """
        if isinstance(self.mlp, ExpertsConfig) and self.attention.linear_method == "quantized":
            return False
        return self._can_chain

    @property
    def queries_follow_experts(self) -> bool:
        """Whether, of one token, queries, keys and values are computed directly after quantized
        experts, from quantized weights, while the output projection is no part of a chain: with it,
        that is slower (docs/experiments.md)."""
        experts = self.mlp
        are_quantized = isinstance(experts, ExpertsConfig) and experts.method == "quantized"
        return are_quantized and self.attention.linear_method == "quantized" and self._can_chain

    @property
    def _can_chain(self) -> bool:
        """Whether projections of one token can norm their inputs themselves, and nothing else comes
        between them but attention and experts."""
        norms_inputs = self.norm.kind == "rms" and self.norm_placement in ("pre", "around")
        attention = self.attention
        is_alone = attention.shard.size == 1 and self.cross_attention is None
        is_plain = attention.width_norm is None and attention.query_scale is None
        has_shared = isinstance(self.mlp, ExpertsConfig) and self.mlp.shared is not None
        is_plain = is_plain and self.layer_input is None and not self.scales_stream
        return norms_inputs and is_alone and is_plain and not has_shared

    def sharded(self, shard: Shard) -> LayerConfig:
        """One rank's part. Raises ConfigError if something does not divide."""
        cross = self.cross_attention
        return replace(
            self,
            attention=self.attention.sharded(shard),
            cross_attention=None if cross is None else cross.sharded(shard),
            mlp=self.mlp.sharded(shard),
        )

    def with_linear_method(self, method: str) -> LayerConfig:
        """The same layer with another linear method wherever it has the usual one."""
        cross, layer_input = self.cross_attention, self.layer_input
        return replace(
            self,
            attention=self.attention.with_linear_method(method),
            cross_attention=None if cross is None else cross.with_linear_method(method),
            mlp=self.mlp.with_linear_method(method),
            layer_input=None if layer_input is None else layer_input.with_linear_method(method),
        )

    def with_copies(
        self, of_projections: CopyForm | None, of_experts: CopyForm | None
    ) -> LayerConfig:
        """The same layer with copies in these forms: of the projections of attention and of a
        feed-forward block or a shared expert, and of experts that a router chooses from."""
        mlp = self.mlp
        if isinstance(mlp, ExpertsConfig):
            mlp = mlp.with_copies(of_projections, of_experts)
        else:
            mlp = replace(mlp, copies=of_projections)
        attention = replace(self.attention, copies=of_projections)
        return replace(self, attention=attention, mlp=mlp)

    @property
    def copyable(self) -> tuple[LinearConfig | ExpertsConfig, ...]:
        """All that may have copies."""
        mlp = self.mlp
        experts = (mlp,) if isinstance(mlp, ExpertsConfig) else ()
        dense = mlp.shared if isinstance(mlp, ExpertsConfig) else mlp
        projections = () if dense is None else (dense.up, dense.down)
        return (self.attention.qkv, self.attention.output, *projections, *experts)

    def copy_saves(self, num_tokens: int) -> int:
        """How many bytes fewer projections read for so many tokens because of their copies, without
        those of experts that a router chooses from."""
        return sum(
            each.copy_saves(num_tokens, self.chains_projections)
            for each in self.copyable
            if isinstance(each, LinearConfig)
        )

    @property
    def num_parameters(self) -> int:
        return self._beside_mlp + self.mlp.num_parameters

    @property
    def quantizable(self) -> dict[str, LinearConfig | ExpertsConfig]:
        """All that may be quantized, by paths in the layer (WeightNames.layer)."""
        attention, cross, mlp = self.attention, self.cross_attention, self.mlp
        found: dict[str, LinearConfig | ExpertsConfig] = {
            "attention.qkv": attention.qkv,
            "attention.output": attention.output,
        }
        if cross is not None:
            found["cross_attention.query"] = cross.query
            found["cross_attention.key_value"] = cross.key_value
            found["cross_attention.output"] = cross.output
        if self.layer_input is not None:
            found["layer_input.gate"] = self.layer_input.gate
            found["layer_input.output"] = self.layer_input.output
        if isinstance(mlp, MLPConfig):
            return found | {"mlp.up": mlp.up, "mlp.down": mlp.down}
        if mlp.shared is not None:
            found |= {"mlp.shared.up": mlp.shared.up, "mlp.shared.down": mlp.shared.down}
        return found | {"mlp.experts": mlp}

    @property
    def num_active_parameters(self) -> int:
        """Those that one token's result depends on: of a mixture of experts, some."""
        return self._beside_mlp + self.mlp.num_active_parameters

    @property
    def _beside_mlp(self) -> int:
        beside, norms = self.attention.num_parameters, NUM_NORMS[self.norm_placement]
        if self.cross_attention is not None:
            beside += self.cross_attention.num_parameters
            norms += 1
        if self.layer_input is not None:
            beside += self.layer_input.num_parameters
            norms += 1
        return beside + norms * self.norm.num_parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Layers whose tokens see all tokens of the same input. It embeds tokens as the decoder does.

    Field names are those of ModelDescription.
    """

    max_model_len: int  # tokens of an input
    layers: tuple[LayerConfig, ...]
    rotaries: tuple[RotaryConfig, ...] = ()
    relative_biases: tuple[RelativeBiasConfig, ...] = ()
    positions: PositionTable | None = None
    embedding_norm: NormConfig | None = None
    final_norm: NormConfig | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", _shared(self.layers))

    def sharded(self, shard: Shard) -> EncoderConfig:
        """One rank's part. Raises ConfigError if something does not divide."""
        return replace(
            self,
            layers=tuple(map_distinct(lambda each: each.sharded(shard), self.layers)),
            relative_biases=tuple(bias.sharded(shard) for bias in self.relative_biases),
        )

    @property
    def num_parameters(self) -> int:
        """Weights, but for learned positions."""
        norms = (self.embedding_norm, self.final_norm)
        parts = (*norms, *self.relative_biases)
        declared = sum(part.num_parameters for part in parts if part is not None)
        return declared + sum(map_distinct(lambda each: each.num_parameters, self.layers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """A language model, whatever names its family uses in config.json: a decoder, whose layers
    perhaps read the result of an encoder."""

    vocab_size: int
    hidden_size: int
    max_model_len: int  # tokens, prompt and output together
    layers: tuple[LayerConfig, ...]
    encoder: EncoderConfig | None = None
    rotaries: tuple[RotaryConfig, ...] = ()
    relative_biases: tuple[RelativeBiasConfig, ...] = ()
    positions: PositionTable | None = None
    final_norm: NormConfig | None
    embedding_size: int | None = None  # None: hidden_size; OPT-350m projects its embeddings to it
    embedding_scale: EmbeddingScale | None = None
    embedding_norm: NormConfig | None = None
    token_inputs: TokenInputsConfig | None = None  # vectors of tokens that layers take in
    tied_embeddings: bool = False
    head_bias: bool = False
    head_method: str = "plain"  # the linear method of the head
    head_copy: CopyForm | None = None  # what the head may have (LinearConfig.with_copy)
    logits_bias: bool = False  # a bias of the logits that is no part of the head's weights
    logits_softcap: float | None = None  # logits become softcap * tanh(logits / softcap)
    shard: Shard = WHOLE  # which part of the model the layers describe

    def __post_init__(self) -> None:
        has_encoder = self.encoder is not None
        assert all((layer.cross_attention is not None) == has_encoder for layer in self.layers)
        placements = {layer.norm_placement for layer in self.layers}
        assert len(placements) == 1, "a layer takes what the one before it returns"
        layers = _shared(
            map_distinct(lambda each: _within_context(each, self.max_model_len), self.layers)
        )
        object.__setattr__(self, "layers", layers)
        _check_kv_specs(layers, self.max_model_len)
        for layer in layers:
            assert layer.kv_source is None or layer.can_read_kv_of(layers[layer.kv_source])
            assert (layer.layer_input is None) == (self.token_inputs is None)

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
        encoder = self.encoder
        if encoder is not None:
            with _errors_name("the encoder"):
                encoder = encoder.sharded(shard)
        with _errors_name("the decoder") if encoder is not None else nullcontext():
            layers = tuple(map_distinct(lambda each: each.sharded(shard), self.layers))
            biases = tuple(bias.sharded(shard) for bias in self.relative_biases)
        inputs = self.token_inputs
        if inputs is not None:
            shard.padded(inputs.vocab_size)
            inputs = replace(inputs, shard=shard)
        return replace(
            self,
            layers=layers,
            relative_biases=biases,
            token_inputs=inputs,
            encoder=encoder,
            shard=shard,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attentions(self) -> list[AttentionConfig]:
        """By id of the attention layer: of all layers the attention to the sequence itself, then of
        all layers cross-attention, if there is an encoder."""
        crosses = [layer.cross_attention for layer in self.layers]
        own = [layer.attention for layer in self.layers]
        return own + [cross for cross in crosses if cross is not None]

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """Each layer's sliding window in tokens; None: full attention."""
        return tuple(layer.attention.window for layer in self.layers)

    @property
    def window_sizes(self) -> dict[int | None, int]:
        """By sliding window in tokens (None: full attention), how many elements the keys and values
        of a token have in all layers with that window."""
        sizes: Counter[int | None] = Counter()
        for window, layer in zip(self.layer_windows, self.layers, strict=True):
            own = layer.attention
            sizes[window] += dense_token_size(own.num_kv_heads, own.head_dim)
        return dict(sizes)

    @property
    def project_in(self) -> LinearConfig | None:
        """The projection from embeddings to hidden states, where their sizes differ."""
        if self.embedding_size is None or self.embedding_size == self.hidden_size:
            return None
        return LinearConfig(self.embedding_size, (self.hidden_size,))

    @property
    def project_out(self) -> LinearConfig | None:
        """The projection from hidden states to the head's inputs, where their sizes differ."""
        projection = self.project_in
        if projection is None:
            return None
        return LinearConfig(self.hidden_size, (projection.in_features,))

    @property
    def head(self) -> LinearConfig:
        """The projection from hidden states to the logits of this rank's part of the vocabulary."""
        rows = self.shard.padded(self.vocab_size)
        head = LinearConfig(
            self.embedding_size or self.hidden_size,
            (rows,),
            self.head_bias,
            # Rows of padding are zeros, which a quantized weight cannot take.
            self.head_method if rows * self.shard.size == self.vocab_size else "plain",
            out_shards=(self.shard,),
            padding=rows * self.shard.size - self.vocab_size,
        )
        return head.with_copy(self.head_copy)

    @property
    def copy_bytes(self) -> int:
        """What all copies of weights take."""

        def of_layer(layer: tuple[LinearConfig | ExpertsConfig, ...]) -> int:
            return sum(each.copy_bytes for each in layer)

        return self.head.copy_bytes + sum(map_distinct(of_layer, self.copyable))

    def copy_bytes_of(self, num_ranks: int) -> int:
        """What the copies of so many ranks take together: whether one has a copy depends on the
        shape of its part. Raises ConfigError if the ranks cannot share the model."""
        return num_ranks * self.sharded(Shard(0, num_ranks)).copy_bytes

    def copy_saves(self, num_tokens: int) -> int:
        """How many bytes fewer than the weights have a step of so many sequences reads, of one
        token each, if all choices of experts are equally likely."""
        saved = sum(map_distinct(lambda each: each.copy_saves(num_tokens), self.layers))
        saved += self._sum_of_experts(lambda each: each.copy_saves(num_tokens))
        return self.head.copy_saves(num_tokens) + saved

    @property
    def copyable(self) -> tuple[tuple[LinearConfig | ExpertsConfig, ...], ...]:
        """For each layer, the projections and experts that may have copies."""
        return tuple(map_distinct(lambda each: each.copyable, self.layers))

    def quantizable_weights(self) -> Iterator[tuple[str, LinearConfig | ExpertsConfig]]:
        """All that may be quantized, by paths of modules (WeightNames.of)."""
        encoder = () if self.encoder is None else self.encoder.layers
        for stack, layers in {"layers": self.layers, "encoder.layers": encoder}.items():
            for number, weights in enumerate(map_distinct(lambda each: each.quantizable, layers)):
                for path, weight in weights.items():
                    yield f"{stack}.{number}.{path}", weight

    def with_linear_method(self, method: str) -> Self:
        """The same model with other linear methods: of all projections in layers that have the
        usual one, and of the head, unless it shares the embedding's table."""
        encoder = self.encoder
        if encoder is not None:
            layers = map_distinct(lambda each: each.with_linear_method(method), encoder.layers)
            encoder = replace(encoder, layers=tuple(layers))
        return replace(
            self,
            layers=tuple(map_distinct(lambda each: each.with_linear_method(method), self.layers)),
            encoder=encoder,
            head_method=self.head_method if self.tied_embeddings else method,
        )

    def kv_specs(self) -> list[KVSpec | None]:
        """Which tokens' KV each attention layer keeps, in the order of `attentions`; None: it reads
        another layer's."""
        own = map_distinct(
            lambda each: each.own_kv_spec if each.kv_source is None else None, self.layers
        )
        return own if self.encoder is None else own + [CrossAttention()] * len(own)

    @property
    def kv_sources(self) -> list[int]:
        """By id of the attention layer, the layer whose keys and values it reads: most often
        itself."""
        sources = [layer.kv_source for layer in self.layers]
        sources += [None] * (len(self.attentions) - len(sources))
        return [i if source is None else source for i, source in enumerate(sources)]

    def kv_layout(self, token_size: TokenSize = dense_token_size) -> KVLayout:
        """How the KV of all attention layers is laid out in blocks.

        token_size: see TokenSize; by default, that of a backend without padding.
        """
        sizes = [token_size(each.num_kv_heads, each.head_dim) for each in self.attentions]
        return group_layers(self.kv_specs(), sizes)

    def longest_encoder_input(self, max_num_batched_tokens: int) -> int:
        """The most tokens of an encoder input that a step can take, beside one of the decoder's;
        0 without an encoder."""
        if self.encoder is None:
            return 0
        return min(self.encoder.max_model_len, max_num_batched_tokens - 1)

    def num_lookup_parameters(self) -> int:
        """Parameters of tables of which a step reads only the rows of its tokens and positions."""
        tables = [self.positions, None if self.encoder is None else self.encoder.positions]
        learned = [each for each in tables if each is not None and each.kind == "learned"]
        number = sum(table.num_rows for table in learned) * self.hidden_size
        if self.token_inputs is not None:
            number += self.token_inputs.table_parameters
        if self.tied_embeddings:
            return number
        # The embedding has as many rows as the head, of each rank.
        return number + self.head.out_features * self.head.in_features

    def num_encoding_parameters(self) -> int:
        """Parameters that only steps which run an encoder read: its own, and the projections of its
        result to keys and values."""
        crosses = [layer.cross_attention for layer in self.layers]
        own = 0 if self.encoder is None else self.encoder.num_parameters
        return own + sum(cross.key_value.num_parameters for cross in crosses if cross is not None)

    def num_parameters(self) -> int:
        """Weights in the model, from the declared shapes alone; tied embeddings count once."""
        norms = (self.embedding_norm, self.final_norm)
        projections = (self.head, self.project_in, self.project_out)
        parts = (*projections, *norms, self.token_inputs, self.encoder)
        declared = sum(part.num_parameters for part in parts if part is not None)
        declared += sum(map_distinct(lambda each: each.num_parameters, self.layers))
        declared += sum(bias.num_parameters for bias in self.relative_biases)
        if self.logits_bias:
            declared += self.head.out_features
        return declared + self.num_lookup_parameters()

    def num_active_parameters(self) -> int:
        """`num_parameters` without the experts that a token does not take."""
        inactive = map_distinct(
            lambda each: each.num_parameters - each.num_active_parameters, self.layers
        )
        return self.num_parameters() - sum(inactive)

    def num_expert_parameters(self) -> int:
        """Weights of experts that are chosen by a router: those of all of them."""
        return self._sum_of_experts(lambda each: each.routing.num_experts * each.expert_parameters)

    def _sum_of_experts(self, function: Callable[[ExpertsConfig], int]) -> int:
        """Over all layers that have experts which a router chooses from."""

        def of_layer(layer: LayerConfig) -> int:
            return function(layer.mlp) if isinstance(layer.mlp, ExpertsConfig) else 0

        return sum(map_distinct(of_layer, self.layers))

    def mixtures(self) -> dict[RoutingConfig, int]:
        """How many layers route their tokens in each of the ways that there are."""
        return Counter(
            each.mlp.routing for each in self.layers if isinstance(each.mlp, ExpertsConfig)
        )

    @property
    def last_routing(self) -> RoutingConfig | None:
        """How the last layer routes tokens, if it has experts; of a step with prompts it computes
        only the tokens whose logits are needed."""
        mlp = self.layers[-1].mlp
        return mlp.routing if isinstance(mlp, ExpertsConfig) else None

    def weight_bytes(self, dtype_bytes: int) -> int:
        """Bytes of the weights and of the tables of rotary and sinusoidal positions, which are
        float32 whatever the weights."""
        tables = sum(4 * self.max_model_len * rotary.dim for rotary in self.rotaries)
        for positions in (self.positions, self.encoder.positions if self.encoder else None):
            if positions is not None and positions.kind == "sinusoidal":
                tables += 4 * positions.num_rows * self.hidden_size
        return self.num_parameters() * dtype_bytes + tables


@dataclass(frozen=True, slots=True)
class DecodingRules:
    """What generation_config.json demands of every request's tokens."""

    first_token_id: int | None = None  # after a single token, such as decoder_start_token_id
    last_token_ids: tuple[int, ...] = ()  # of which one comes where max_tokens ends the output
    no_repeat_ngram_size: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    renormalises: bool = False  # scores of a beam search, after all that changes them


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(ModelDescription):
    """A model's description, and what its files say about serving it."""

    path: Path  # a directory, or a file (octavo/model_files.py)
    # The WeightFiles that its tensors are in; its module is imported late.
    weight_files: str = "octavo.models.safetensors_files:SafetensorsFiles"
    weight_names: WeightNames = field(default=UNNAMED, hash=False, repr=False)
    architecture: str  # the class in config.json, such as "LlamaForCausalLM"
    family: str  # config.json's model_type
    model_class: str = "octavo.models.decoder:Decoder"  # a CausalLM; its module is imported late
    dtype: str = "float32"  # of the weights in the files
    bos_token_id: int | None = None
    decoder_start_token_id: int | None = None  # set if there is an encoder
    decoding_rules: DecodingRules = DecodingRules()
    eos_token_ids: tuple[int, ...] = ()
    quantization: Quantization | None = None  # of the weights in the files
    # By paths of modules (WeightNames.of), how those are stored that differ from `quantization`;
    # None: not quantized, or merged of parts that differ.
    own_quantizations: Mapping[str, Quantization | None] = field(
        default_factory=dict, hash=False, repr=False
    )
    kernels: WeightKernels | None = None  # see kept_by; None: of a device that keeps all forms
    # What generation_config.json sets (temperature, top_p, ...) for requests that do not.
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def is_stored_quantized(self) -> bool:
        """Whether the files hold quantized weights."""
        return self.quantization is not None and self.quantization.method != ON_LOAD_METHOD

    @property
    def is_quantized_on_load(self) -> bool:
        """Whether the loader quantizes weights that the files hold as they are."""
        return self.quantization is not None and not self.is_stored_quantized

    def kept_by(self, kernels: WeightKernels) -> ModelConfig:
        """The same model with `least_weight_bytes` and `read_bytes` of a device with such kernels.

        Only for counting: the loader needs to know what the files have.
        """
        return replace(self, kernels=kernels)

    @property
    def quantized_parts(self) -> tuple[int, int]:
        """Parameters in projections, and in experts that routers choose from, that stay quantized
        if a device keeps them so."""
        return self._count_quantized(lambda stored, is_of_experts: True)

    @property
    def dequantized_parts(self) -> tuple[int, int]:
        """Those of `quantized_parts` that the device (`kept_by`) does not keep so."""
        return self._count_quantized(lambda *of: not self._keeps(*of))

    def _count_quantized(self, is_counted: Callable[[Quantization, bool], bool]) -> tuple[int, int]:
        numbers = [0, 0]
        for stored, weight in self._quantized_weights():
            is_of_experts = isinstance(weight, ExpertsConfig)
            if is_counted(stored, is_of_experts):
                number = weight.num_quantized_parameters(stored.divisors[-1])
                numbers[is_of_experts] += number
        return numbers[0], numbers[1]

    def _keeps(self, stored: Quantization, is_of_experts: bool) -> bool:
        """Whether the device keeps weights as they are stored."""
        return self.kernels is None or stored.kept_by(self.kernels)[is_of_experts]

    def _quantized_weights(self) -> Iterator[tuple[Quantization, LinearConfig | ExpertsConfig]]:
        """How each weight of layers is stored, but for those that are not quantized."""
        if self.quantization is None:
            return
        for path, weight in self.quantizable_weights():
            stored = self.own_quantizations.get(path, self.quantization)
            if stored is not None:
                of_experts = isinstance(weight, ExpertsConfig)
                yield stored.of_experts if of_experts else stored, weight

    def least_weight_bytes(self, dtype_bytes: int) -> int:
        """`weight_bytes` where quantized weights stay quantized: all of them, or those that a
        device keeps (`kept_by`). Copies are counted, the head's as if it were not quantized."""
        saved = sum(self._saved_bytes(dtype_bytes))
        return self.weight_bytes(dtype_bytes) - saved + self.copy_bytes

    def cpu_weight_bytes(self, dtype_bytes: int) -> int:
        """`least_weight_bytes` on a CPU, where tied embeddings are there twice: as a table to look
        up, and the same packed for the projection to logits."""
        packed = self.head.num_parameters * dtype_bytes if self.tied_embeddings else 0
        return self.least_weight_bytes(dtype_bytes) + packed

    def read_bytes(self, dtype_bytes: int) -> tuple[int, int]:
        """Bytes of weights that every step reads, and those of all experts that routers choose
        from, where quantized weights stay quantized as in `least_weight_bytes`. Of
        projections with copies it is the weight."""
        experts = self.num_expert_parameters()
        dense = self.num_parameters() - self.num_lookup_parameters() - experts
        saved, saved_experts = self._saved_bytes(dtype_bytes)
        return dense * dtype_bytes - saved, experts * dtype_bytes - saved_experts

    def _saved_bytes(self, dtype_bytes: int) -> tuple[int, int]:
        """What quantized projections and experts take less than in the model's dtype."""
        saved = [0.0, 0.0]
        for stored, weight in self._quantized_weights():
            is_of_experts = isinstance(weight, ExpertsConfig)
            if not self._keeps(stored, is_of_experts):
                continue
            counted = 0
            for divisor in stored.divisors:
                taken = stored.weight_bytes(divisor, is_of_experts)
                number = weight.num_quantized_parameters(divisor)
                if taken is not None:
                    saved[is_of_experts] += (dtype_bytes - taken) * (number - counted)
                counted = number
        return int(saved[0]), int(saved[1])

    @property
    def copy_form(self) -> CopyForm | None:
        """The form in which projections of layers may have copies; None: they have none."""
        return _copy_form(self.quantization)

    @property
    def copyable(self) -> tuple[tuple[LinearConfig | ExpertsConfig, ...], ...]:
        """See ModelDescription.copyable: those that are stored in a way which takes another form
        of copies than `copy_form` have none."""
        if not self.own_quantizations:
            return tuple(map_distinct(lambda each: each.copyable, self.layers))
        stored = map_distinct(lambda each: each.quantizable, self.layers)
        return tuple(
            tuple(self._copied(f"layers.{number}.{path}", each) for path, each in weights.items())
            for number, weights in enumerate(stored)
        )

    def _copied(
        self, path: str, weight: LinearConfig | ExpertsConfig
    ) -> LinearConfig | ExpertsConfig:
        """A weight of the layers as it is held, by its path (WeightNames.of)."""
        own = self.own_quantizations.get(path, self.quantization)
        if _copy_form(own) == self.copy_form:
            return weight
        if isinstance(weight, ExpertsConfig):
            return weight.with_copies(None, None)
        return weight.with_copy(None)

    def with_copies(
        self,
        num_layers: int | None = None,
        num_expert_layers: int | None = None,
        of_head: CopyForm | None = "float12",
    ) -> Self:
        """The same model with copies of the head, of projections in the first `num_layers` (None:
        in all), and of experts in the first `num_expert_layers` (None: in as many), where their
        forms and shapes take them."""
        count = len(self.copyable) if num_layers is None else num_layers
        num_experts = count if num_expert_layers is None else num_expert_layers
        return replace(self._with_copied_layers(count, num_experts), head_copy=of_head)

    def _with_copied_layers(self, num_layers: int, num_expert_layers: int) -> Self:
        """The same model with copies of projections in the first `num_layers` alone, and of experts
        in the first `num_expert_layers`."""
        form = self.copy_form
        of_experts = None if form == "dequantized" else form

        def copied(begin: int, end: int) -> list[LayerConfig]:
            forms = (
                form if begin < num_layers else None,
                of_experts if begin < num_expert_layers else None,
            )
            return map_distinct(lambda each: each.with_copies(*forms), self.layers[begin:end])

        bounds = sorted({0, num_layers, num_expert_layers, self.num_layers})
        return replace(self, layers=tuple(chain.from_iterable(starmap(copied, pairwise(bounds)))))

    def with_max_model_len(self, max_model_len: int) -> ModelConfig:
        """The same model limited to shorter sequences; ConfigError beyond its own limit."""
        if max_model_len > self.max_model_len:
            raise ConfigError(
                "max_model_len",
                f"{max_model_len} is more than the {self.max_model_len} positions of {self.path}",
            )
        return replace(self, max_model_len=max_model_len)


def _copy_form(quantization: Quantization | None) -> CopyForm | None:
    """The form in which projections that are stored so may have copies; None: they have none."""
    if quantization is None or quantization.form is None:
        return "float12"
    if quantization.fits_float7:
        return "float7"
    return "dequantized" if quantization.is_unpacked else None


@contextmanager
def _errors_name(stack: str) -> Iterator[None]:
    """Say of which of a model's stacks of layers an option does not fit."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(error.field, f"{stack}: {error.reason}") from error


def map_distinct(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """The results for all items, computed once for those that are the same object, as equal layers
    of a description are."""
    results: dict[int, Result] = {}
    for item in items:
        if id(item) not in results:
            results[id(item)] = function(item)
    return [results[id(item)] for item in items]


def _shared(layers: Sequence[LayerConfig]) -> tuple[LayerConfig, ...]:
    """The same layers, of which equal ones are the same object."""
    first: dict[LayerConfig, LayerConfig] = {}
    return tuple(map_distinct(lambda each: first.setdefault(each, each), layers))


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
