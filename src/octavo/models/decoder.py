"""The transformer that a ModelDescription describes: a decoder, perhaps with an encoder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from octavo.layers.attention import (
    Attention,
    CrossAttention,
    QueryScale,
    RelativePositionBias,
    Step,
)
from octavo.layers.config import QueryScaleConfig
from octavo.layers.embedding import Embedding, LMHead, TokenInputs, make_positions
from octavo.layers.experts import MixtureOfExperts, Router, make_mlp
from octavo.layers.linear import make_linear
from octavo.layers.mlp import LayerInput
from octavo.layers.norm import (
    Branches,
    Joining,
    Norm,
    RouterNorm,
    StreamScale,
    add_partial,
    make_norm,
)
from octavo.layers.rotary import rotary_table
from octavo.models.base import CausalLM
from octavo.models.config import EncoderConfig, LayerConfig, ModelDescription, NormPlacement
from octavo.ops import AttentionBackend, RotaryTable
from octavo.ops.bidirectional import BidirectionalAttention, TorchBidirectional
from octavo.ops.communicator import Communicator, Reduction, ReductionSite
from octavo.ops.linear import MaybeRounded


class LayerContext(NamedTuple):
    """What the layers of a stack have in common."""

    num_layers: int
    rotaries: Sequence[RotaryTable]
    relative_biases: Sequence[RelativePositionBias]
    query_scales: Mapping[QueryScaleConfig, QueryScale]
    communicator: Communicator
    attentions: Sequence[Attention]  # of the layers before


class DecoderLayer(nn.Module):
    """Attention and a feed-forward block, with norms."""

    passes_partial_sums: ClassVar[bool]
    """Whether `hidden`, before and after a layer, is this rank's partial sum: the norm that follows
    adds up the partial sums of all ranks."""

    mlp_norm: Norm
    joining: Joining | None
    """How the layer's result is added to the residual stream by the norm that follows; None: as it
    is."""

    def __init__(self, config: LayerConfig, layer_id: int, context: LayerContext) -> None:
        super().__init__()
        attention, communicator = config.attention, context.communicator
        rotary = None if attention.rotary is None else context.rotaries[attention.rotary]
        bias = None
        if attention.relative_bias is not None:
            bias = context.relative_biases[attention.relative_bias]
        scale = None
        if attention.query_scale is not None:
            scale = context.query_scales[attention.query_scale]
        source = None
        if config.kv_source is not None:
            source = context.attentions[config.kv_source]
            source.is_source = True
        before_attention, before_mlp = self.reduction_sites(layer_id)
        self.attention_norm = make_norm(
            config.norm,
            None if before_attention is None else Reduction(communicator, before_attention),
        )
        self.attention = Attention(attention, layer_id, rotary, communicator, bias, scale, source)
        if config.norm_placement != "parallel":
            self.mlp_norm = make_norm(config.norm, Reduction(communicator, before_mlp))
        self.mlp = make_mlp(config.mlp)
        if config.chains_projections:
            for each in (self.attention.qkv, self.attention.output, *self.mlp.projections):
                each.is_chained = True
        self.attention.qkv.follows_experts = config.queries_follow_experts
        self.joining = None

    @staticmethod
    def reduction_sites(layer_id: int) -> tuple[ReductionSite | None, ReductionSite]:
        """Whose partial sums `attention_norm` and `mlp_norm` add up over the ranks; None: what it
        reads is complete."""
        raise NotImplementedError

    def forward(
        self,
        hidden: Branches,
        residual: Tensor | None,
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Branches, Tensor | None]:
        """One layer's step.

        Args:
            hidden: [num_tokens, hidden_size], still to be added to the residual; perhaps a partial
                sum of this rank's, and perhaps in several tensors (Branches).
            residual: [num_tokens, hidden_size], or None if there is nothing to add to.
            step: see Step.
            indices: int64, the tokens that are computed beyond the last attention; None: all.

        Returns:
            The same two, for the next layer.
        """
        raise NotImplementedError

    @property
    def last_attention(self) -> Attention | CrossAttention:
        """The attention that comes directly before the feed-forward block."""
        return self.attention

    def _read_encoder(
        self, attended: MaybeRounded, residual: Tensor, backend: AttentionBackend
    ) -> tuple[MaybeRounded, Tensor]:
        """Cross-attention, in layers that have it.

        Args:
            attended: the self-attention's result, before its output projection.
            residual: what that projection's result is added to.
            backend: has been given the step's metadata.

        Returns:
            The same two for `last_attention`.
        """
        return attended, residual


class PreNormLayer(DecoderLayer):
    """Each block's input is normalised (GPT-2, OPT, Llama)."""

    passes_partial_sums = True

    @staticmethod
    def reduction_sites(layer_id: int) -> tuple[ReductionSite | None, ReductionSite]:
        """See DecoderLayer.reduction_sites."""
        before = ReductionSite.MLP if layer_id else ReductionSite.EMBEDDING
        return before, ReductionSite.ATTENTION

    def forward(
        self,
        hidden: Branches,
        residual: Tensor | None,
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Branches, Tensor | None]:
        """See DecoderLayer.forward."""
        normed, residual = self.attention_norm.forward_for(self.attention, hidden, residual)
        attended = self.attention.forward(normed, step, may_round=indices is None)
        attended, residual = self._read_encoder(attended, residual, step.backend)
        if indices is not None:
            assert isinstance(attended, Tensor)
            attended, residual = attended[indices], residual[indices]
        branch = self.last_attention.output.project_partial(attended)
        return self._feed_forward(branch, residual)

    def _feed_forward(self, branch: Tensor, residual: Tensor) -> tuple[Branches, Tensor]:
        """The feed-forward block.

        Args:
            branch: the attention's result, still to be added to the residual.
            residual: [num_tokens, hidden_size].

        Returns:
            The same two, of this block.
        """
        normed, residual = self.mlp_norm.forward_for(self.mlp, branch, residual)
        return self.mlp.forward(normed), residual


class AroundNormLayer(PreNormLayer):
    """Each block's result is normalised, too (Gemma 2)."""

    def __init__(self, config: LayerConfig, layer_id: int, context: LayerContext) -> None:
        super().__init__(config, layer_id, context)
        self.attention_branch_norm = make_norm(config.norm)
        self.mlp_norm.follow(Joining(self.attention_branch_norm))
        self.branch_norm = make_norm(config.norm)
        self.stream_scale = StreamScale() if config.scales_stream else None
        self.joining = Joining(self.branch_norm, scale=self.stream_scale)


class ApartNormLayer(AroundNormLayer):
    """Each block's input and result are normalised; experts, their router and a shared expert read
    inputs of norms of their own, and their results are normed before they are added up, too (Gemma
    4). The router's input is divided by the root of its size."""

    def __init__(self, config: LayerConfig, layer_id: int, context: LayerContext) -> None:
        super().__init__(config, layer_id, context)
        assert isinstance(self.mlp, MixtureOfExperts)
        self.router_norm = RouterNorm(replace(config.norm, multiplier=config.norm.size**-0.5))
        self.experts_norm = make_norm(config.norm)
        self.experts_branch_norm = make_norm(config.norm)
        self.shared_branch_norm = make_norm(config.norm)
        assert self.joining is not None
        both = self.experts_branch_norm, self.shared_branch_norm
        self.joining = self.joining._replace(norms=both)

    def _feed_forward(self, branch: Tensor, residual: Tensor) -> tuple[Branches, Tensor]:
        assert isinstance(self.mlp, MixtureOfExperts)
        (for_shared, for_router, for_experts), residual = self.mlp_norm.forward_each(
            branch, residual, self.router_norm, self.experts_norm
        )
        return self.mlp.forward_apart(for_router, for_experts, for_shared), residual


class InputLayer(AroundNormLayer):
    """A layer that takes in a token's vector for it after the feed-forward block (Gemma 4). Between
    such layers, hidden is complete."""

    passes_partial_sums = False

    def __init__(self, config: LayerConfig, layer_id: int, context: LayerContext) -> None:
        super().__init__(config, layer_id, context)
        assert config.layer_input is not None
        assert self.joining is not None
        self._layer_id = layer_id
        self.branch_norm = make_norm(
            config.norm, Reduction(context.communicator, ReductionSite.MLP)
        )
        self._block_joining = self.joining._replace(norm=self.branch_norm, scale=None)
        self.layer_input = LayerInput(config.layer_input)
        self.input_norm = make_norm(config.norm)
        self.joining = Joining(self.input_norm, scale=self.stream_scale)

    @staticmethod
    def reduction_sites(layer_id: int) -> tuple[ReductionSite | None, ReductionSite]:
        """See DecoderLayer.reduction_sites."""
        return None, ReductionSite.ATTENTION

    def forward(
        self,
        hidden: Branches,
        residual: Tensor | None,
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Branches, Tensor | None]:
        """See DecoderLayer.forward."""
        hidden, residual = super().forward(hidden, residual, step, indices)
        assert residual is not None
        assert step.inputs is not None
        residual = self._block_joining.add(hidden, residual)
        vectors = step.inputs[:, self._layer_id]
        if indices is not None:
            vectors = vectors[indices]
        return self.layer_input.forward(residual, vectors), residual


class ApartNormInputLayer(InputLayer, ApartNormLayer):
    """Both."""


class NormAfterLayer(DecoderLayer):
    """A norm follows each block. Between such layers, hidden is complete and residual None."""

    passes_partial_sums = False

    @staticmethod
    def reduction_sites(layer_id: int) -> tuple[ReductionSite | None, ReductionSite]:
        """See DecoderLayer.reduction_sites."""
        return ReductionSite.ATTENTION, ReductionSite.MLP

    def forward(
        self,
        hidden: Branches,
        residual: Tensor | None,
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Branches, Tensor | None]:
        """See DecoderLayer.forward."""
        assert isinstance(hidden, Tensor)
        attended = self.attention.forward(hidden, step, may_round=indices is None)
        attended, hidden = self._read_encoder(attended, hidden, step.backend)
        if indices is not None:
            assert isinstance(attended, Tensor)
            attended, hidden = attended[indices], hidden[indices]
        branch = self.last_attention.output.project_partial(attended)
        hidden = self._add(branch, hidden, self.norm_of_last_attention)
        return self._add(self.mlp.forward(hidden), hidden, self.mlp_norm), None

    @property
    def norm_of_last_attention(self) -> Norm:
        """The norm that follows `last_attention`."""
        return self.attention_norm

    def _add(self, branch: Branches, hidden: Tensor, norm: Norm) -> Tensor:
        """The residual stream after a block, with the norm that follows it."""
        raise NotImplementedError


class BranchNormLayer(NormAfterLayer):
    """Each block's result is normalised, and its input is not (OLMo 2)."""

    def _add(self, branch: Branches, hidden: Tensor, norm: Norm) -> Tensor:
        assert isinstance(branch, Tensor), "a norm takes one result: there is no shared expert"
        return norm.add_normed(branch, hidden)


class PostNormLayer(NormAfterLayer):
    """The residual stream is normalised after each block (OPT-350m)."""

    def _add(self, branch: Branches, hidden: Tensor, norm: Norm) -> Tensor:
        return norm.forward(branch, hidden)[0]


class ParallelLayer(DecoderLayer):
    """Both blocks read the same input, normalised by one norm (GPT-J)."""

    passes_partial_sums = True

    @staticmethod
    def reduction_sites(layer_id: int) -> tuple[ReductionSite | None, ReductionSite]:
        """See DecoderLayer.reduction_sites; one per layer, of both blocks, at alternating sites."""
        if layer_id == 0:
            return ReductionSite.EMBEDDING, ReductionSite.EMBEDDING
        site = ReductionSite.MLP if layer_id % 2 else ReductionSite.ATTENTION
        return site, site

    def forward(
        self,
        hidden: Branches,
        residual: Tensor | None,
        step: Step,
        indices: Tensor | None = None,
    ) -> tuple[Branches, Tensor | None]:
        """See DecoderLayer.forward."""
        hidden, mlp_hidden, residual = self._normalise(hidden, residual)
        attended = self.attention.forward(hidden, step, may_round=indices is None)
        if indices is not None:
            assert isinstance(attended, Tensor)
            attended, mlp_hidden = attended[indices], mlp_hidden[indices]
            residual = residual[indices]
        branch = self.attention.output.project_partial(attended)
        second = self.mlp.forward(mlp_hidden)
        assert isinstance(second, Tensor), "there is no place for a shared expert's result"
        return (branch, second), residual

    def _normalise(
        self, hidden: Branches, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The input of each block, and the residual."""
        hidden, residual = self.attention_norm.forward(hidden, residual)
        return hidden, hidden, residual


class TwinNormLayer(ParallelLayer):
    """Both blocks read the same input, each normalised by a norm of its own (GPT-NeoX)."""

    def _normalise(
        self, hidden: Branches, residual: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        (first, second), residual = self.attention_norm.forward_each(
            hidden, residual, self.mlp_norm
        )
        return first, second, residual


class CrossLayer(DecoderLayer):
    """A layer with cross-attention between its attention and its feed-forward block."""

    def __init__(self, config: LayerConfig, layer_id: int, context: LayerContext) -> None:
        super().__init__(config, layer_id, context)
        assert config.cross_attention is not None
        before_cross, before_mlp = self.cross_sites
        communicator = context.communicator
        self.cross_norm = make_norm(config.norm, Reduction(communicator, before_cross))
        self.mlp_norm = make_norm(config.norm, Reduction(communicator, before_mlp))
        self.cross_attention = CrossAttention(config.cross_attention, context.num_layers + layer_id)

    cross_sites: ClassVar[tuple[ReductionSite, ReductionSite]]
    """Whose partial sums `cross_norm` and `mlp_norm` add up over the ranks."""

    @property
    def last_attention(self) -> CrossAttention:
        """See DecoderLayer.last_attention."""
        return self.cross_attention


class PreNormCrossLayer(CrossLayer, PreNormLayer):
    """Each block's input is normalised (T5)."""

    cross_sites = ReductionSite.ATTENTION, ReductionSite.CROSS_ATTENTION

    def _read_encoder(
        self, attended: MaybeRounded, residual: Tensor, backend: AttentionBackend
    ) -> tuple[MaybeRounded, Tensor]:
        branch = self.attention.output.project_partial(attended)
        normed, residual = self.cross_norm.forward_for(self.cross_attention, branch, residual)
        return self.cross_attention.forward(normed, backend), residual


class PostNormCrossLayer(CrossLayer, PostNormLayer):
    """The residual stream is normalised after each block (BART)."""

    cross_sites = ReductionSite.CROSS_ATTENTION, ReductionSite.MLP

    def _read_encoder(
        self, attended: MaybeRounded, residual: Tensor, backend: AttentionBackend
    ) -> tuple[MaybeRounded, Tensor]:
        branch = self.attention.output.project_partial(attended)
        hidden, _ = self.attention_norm.forward(branch, residual)
        return self.cross_attention.forward(hidden, backend), hidden

    @property
    def norm_of_last_attention(self) -> Norm:
        """See NormAfterLayer.norm_of_last_attention."""
        return self.cross_norm


LAYERS: dict[NormPlacement, type[DecoderLayer]] = {
    "pre": PreNormLayer,
    "post": PostNormLayer,
    "branch": BranchNormLayer,
    "around": AroundNormLayer,
    "apart": ApartNormLayer,
    "parallel": ParallelLayer,
    "twin": TwinNormLayer,
}


INPUT_LAYERS: dict[NormPlacement, type[InputLayer]] = {
    "around": InputLayer,
    "apart": ApartNormInputLayer,
}


CROSS_LAYERS: dict[NormPlacement, type[CrossLayer]] = {
    "pre": PreNormCrossLayer,
    "post": PostNormCrossLayer,
}


class Stack(nn.Module):
    """Owns the layers of a decoder or of an encoder, and what comes before and after them."""

    def __init__(
        self,
        config: ModelDescription | EncoderConfig,
        hidden_size: int,
        device: torch.device,
        communicator: Communicator,
    ) -> None:
        super().__init__()
        self.communicator = communicator
        positions = config.positions
        self.embedding_norm: Norm | None = None
        if config.embedding_norm is not None:
            # A site at which no layer begins or ends: consecutive reductions must have others.
            reduction = Reduction(communicator, ReductionSite.CROSS_ATTENTION)
            self.embedding_norm = make_norm(config.embedding_norm, reduction)
        self.positions = (
            None if positions is None else make_positions(positions, hidden_size, device)
        )
        rotaries = [rotary_table(each, config.max_model_len, device) for each in config.rotaries]
        biases = [RelativePositionBias(each) for each in config.relative_biases]
        self.relative_biases = nn.ModuleList(biases)
        scales = {each.attention.query_scale for each in config.layers}
        self._query_scales = {
            each: QueryScale(each, config.max_model_len, device)
            for each in scales
            if each is not None
        }
        attentions: list[Attention] = []
        context = LayerContext(
            len(config.layers), rotaries, biases, self._query_scales, communicator, attentions
        )
        layers: list[DecoderLayer] = []
        for i, each in enumerate(config.layers):
            layers.append(_make_layer(each, i, context))
            attentions.append(layers[-1].attention)
        self.layers = nn.ModuleList(layers)
        last, norm = None, config.final_norm
        if layers[-1].passes_partial_sums:
            site, _ = layers[-1].reduction_sites(len(layers))
            assert site is not None
            last = Reduction(communicator, site)
        self.norm = None if norm is None else make_norm(norm, last)
        for layer, following in pairwise([*layers, None]):
            if layer is not None and layer.joining is not None:
                entry = self.norm if following is None else following.attention_norm
                assert entry is not None, "nothing adds the last layer's result to the residual"
                entry.follow(layer.joining)

    def vectors(self, inputs: Tensor) -> Tensor:
        """The embeddings of `forward`'s inputs: [num_tokens, hidden_size], perhaps partial sums of
        this rank's."""
        raise NotImplementedError

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        attention: AttentionBackend,
        logits_indices: Tensor | None = None,
    ) -> Tensor:
        """Hidden states of the inputs, or of those at `logits_indices`; see CausalLM.forward."""
        first = self._begin(self.vectors(inputs), positions)
        step = Step(attention, self._token_inputs(inputs, first), {})
        hidden: Branches = first
        for scale in self._query_scales.values():
            scale.begin(positions)
        residual: Tensor | None = None
        *layers, last = self.layers
        for layer in layers:
            hidden, residual = layer.forward(hidden, residual, step)
        hidden, residual = last.forward(hidden, residual, step, logits_indices)
        if self.norm is not None:
            return self.norm.forward(hidden, residual)[0]
        assert isinstance(hidden, Tensor), "parallel layers are followed by a norm"
        if residual is not None:
            hidden = add_partial(residual, self.communicator.all_reduce(hidden))
        return hidden

    def _token_inputs(self, inputs: Tensor, embedded: Tensor) -> Tensor | None:
        """Step.inputs, of `forward`'s inputs and the first layer's."""
        return None

    def _begin(self, hidden: Tensor, positions: Tensor) -> Tensor:
        """The first layer's input: embeddings with positions added, normalised and reduced."""
        is_first_rank = self.communicator.shard.rank == 0
        takes_partial_sums = self.layers[-1].passes_partial_sums
        # All but the norm is linear: the ranks' partial sums may be added up after it.
        if self.positions is not None and is_first_rank:
            hidden = hidden.add_(self.positions.forward(positions))
        if self.embedding_norm is None:
            return hidden if takes_partial_sums else self.communicator.all_reduce(hidden)
        hidden, _ = self.embedding_norm.forward(hidden)
        return hidden if is_first_rank or not takes_partial_sums else torch.zeros_like(hidden)


class Encoder(Stack):
    """Owns the layers of an encoder; the token embedding is the decoder's."""

    def vectors(self, inputs: Tensor) -> Tensor:
        """See Stack.vectors: the inputs are embeddings."""
        return inputs

    def encode(self, vectors: Tensor, positions: Tensor, lens: Sequence[int]) -> Tensor:
        """Hidden states of whole inputs: embeddings [num_tokens, hidden_size] -> the same."""
        self._attention.plan(lens, vectors.dtype)
        return self.forward(vectors, positions, cast(AttentionBackend, self._attention))

    @cached_property
    def _attention(self) -> BidirectionalAttention:
        """Made when the weights are loaded."""
        specs = [cast(DecoderLayer, layer).attention.spec for layer in self.layers]
        device = next(self.parameters()).device
        if device.type == "cuda":
            from octavo.ops.cuda.attention_encoder import TritonBidirectional

            return TritonBidirectional(specs, device)
        return TorchBidirectional(specs, device)


class Decoder(Stack, CausalLM):
    """Owns the weights and the rotary tables."""

    def __init__(
        self, config: ModelDescription, device: torch.device, communicator: Communicator
    ) -> None:
        """`config`: of the communicator's shard (ModelDescription.sharded)."""
        super().__init__(config, config.hidden_size, device, communicator)
        project_in, project_out = config.project_in, config.project_out
        self.embedding = Embedding(
            config.vocab_size, config.head.in_features, config.shard, config.embedding_scale
        )
        self.encoder: Encoder | None = None
        self._cross_attentions: list[CrossAttention] = []
        if config.encoder is not None:
            self.encoder = Encoder(config.encoder, config.hidden_size, device, communicator)
            self._cross_attentions = [
                cast(CrossAttention, layer.cross_attention) for layer in self.layers
            ]
        self.project_in = None if project_in is None else make_linear(project_in)
        self.token_inputs: TokenInputs | None = None
        if config.token_inputs is not None:
            self.token_inputs = TokenInputs(config.token_inputs, communicator)
        own = [cast(DecoderLayer, layer).attention.spec for layer in self.layers]
        self.attention_layers = own + [cross.spec for cross in self._cross_attentions]
        self.project_out = None if project_out is None else make_linear(project_out)
        self.head = LMHead(config.head, config.logits_softcap, config.logits_bias)
        routers = [each for each in self.modules() if isinstance(each, Router)]
        if routers:
            self.num_hit_experts = torch.zeros(1, dtype=torch.int64, device=device)
        for router in routers:
            assert self.num_hit_experts is not None
            router.num_hit = self.num_hit_experts

    def vectors(self, inputs: Tensor) -> Tensor:
        """See Stack.vectors: the inputs are token ids."""
        vectors = self.embedding.forward(inputs)
        return vectors if self.project_in is None else self.project_in.forward(vectors)

    def _token_inputs(self, inputs: Tensor, embedded: Tensor) -> Tensor | None:
        return None if self.token_inputs is None else self.token_inputs.forward(inputs, embedded)

    def encode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lens: Sequence[int],
        attention: AttentionBackend,
    ) -> None:
        """See CausalLM.encode."""
        assert self.encoder is not None
        encoded = self.encoder.encode(self.embedding.forward(input_ids), positions, lens)
        for cross_attention in self._cross_attentions:
            cross_attention.write(encoded, attention)

    def logits(self, hidden: Tensor) -> Tensor:
        """See CausalLM.logits."""
        if self.project_out is not None:
            hidden = self.project_out.forward(hidden)
        return super().logits(hidden)


def _make_layer(config: LayerConfig, layer_id: int, context: LayerContext) -> DecoderLayer:
    kinds: Mapping[NormPlacement, type[DecoderLayer]] = LAYERS
    if config.cross_attention is not None:
        kinds = CROSS_LAYERS
    elif config.layer_input is not None:
        kinds = INPUT_LAYERS
    return kinds[config.norm_placement](config, layer_id, context)
