"""The description of a model that transformers computes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Self

from octavo.layers.config import CopyForm, ExpertsConfig, LinearConfig
from octavo.models.config import LayerConfig, ModelConfig, ModelDescription, map_distinct
from octavo.parallel import WHOLE, Shard

Weight = LinearConfig | ExpertsConfig
# What checkpoints have before the names of layers that take text, as saved by old and new versions
# of transformers, of models that take other input, too, or do not.
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
# What is behind the name of a layer's experts in that of one of its weights.
FIRST_OF_EXPERTS = ("", ".0.gate_proj", ".0.w1")


class Division(NamedTuple):
    """What of projections ranks may share, in which units that cannot be cut: heads, or
    intermediate elements."""

    # Of the outputs of each merged projection, or of several equal parts of these; 0: all ranks
    # have all of them. Where there are fewer than ranks, several have the same one.
    outputs: tuple[int, ...] = ()
    inputs: int = 0  # of the inputs; 0: all ranks have all of them


UNDIVIDED = Division()


class NamedWeight(NamedTuple):
    """A projection, several that are merged, or the experts of a layer."""

    names: tuple[str, ...]  # of transformers' modules
    config: Weight
    division: Division = UNDIVIDED  # of projections; experts are divided by elements

    def sharded(self, shard: Shard) -> NamedWeight:
        """One rank's part. Raises ConfigError if it does not divide."""
        config, division = self.config, self.division
        if isinstance(config, ExpertsConfig):
            return self._replace(config=config.sharded(shard))
        if division.inputs:
            size = config.in_features // shard.size
            config = replace(config, in_features=size, in_shard=shard)
        if any(division.outputs):
            number = len(division.outputs) // len(config.out_sizes)
            sizes = [size // number for size in config.out_sizes for _ in range(number)]
            shards = [shard.of_kv_heads(units) if units else WHOLE for units in division.outputs]
            config = replace(
                config,
                out_sizes=tuple(
                    size // each.size for size, each in zip(sizes, shards, strict=True)
                ),
                out_shards=tuple(shards),
            )
        return self._replace(config=config.with_copy(config.copy))


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """As ModelConfig, from a recorded pass (recording.py).

    The attention of its layers is described as it is. What else a layer has is known by its size
    alone: `mlp` is a block as wide as the results of the layer's projections together, perhaps
    beside experts.
    """

    model_class: str = "octavo.models.fallback.model:TransformersLM"
    parameters: int  # of the whole model; tied ones count once
    lookup_parameters: int  # of these, tables of embeddings that are not those of logits, too
    table_width: int  # float32 numbers that tables of rotary embeddings hold for each position
    # That octavo's layers hold, of each layer, by its number in the paths; without routers.
    weights: tuple[tuple[NamedWeight, ...], ...]
    # By layer, whether each rank projects the heads of all ranks, and attends with its own.
    whole_heads: tuple[bool, ...]
    divides_head: bool  # whether a rank's rows of the projection to logits make its logits

    def sharded(self, shard: Shard) -> Self:
        """See ModelDescription.sharded. What nothing is known to divide, all ranks have."""
        assert self.shard.size == 1, "already sharded"
        if shard.size == 1:
            return self
        num_rows = shard.padded(self.vocab_size)

        def of_layer(layer: LayerConfig) -> LayerConfig:
            mlp = layer.mlp
            if isinstance(mlp, ExpertsConfig):  # beside a block that is as wide on every rank
                mlp = replace(replace(mlp, shared=None).sharded(shard), shared=mlp.shared)
            return replace(layer, attention=layer.attention.sharded(shard), mlp=mlp)

        layers = tuple(map_distinct(of_layer, self.layers))
        for each in chain.from_iterable(self.weights):
            block = each.names[0].rpartition(".")[0]  # heads divide, as layers have shown
            shard.divide(each.division.inputs, f"the intermediate size of {block}")
        weights = tuple(tuple(each.sharded(shard) for each in of) for of in self.weights)
        parameters = self.parameters - _num_weights(self.weights) + _num_weights(weights)
        lookup_parameters = self.lookup_parameters
        if self.divides_head:
            others = (self.vocab_size - num_rows) * (self.head.in_features + self.head_bias)
            if self.tied_embeddings:
                lookup_parameters += others
            else:
                parameters -= others
        return replace(
            self,
            layers=layers,
            shard=shard,
            weights=weights,
            parameters=parameters,
            lookup_parameters=lookup_parameters,
        )

    def held(self) -> dict[str, Weight]:
        """What layers hold, by the names of all modules."""
        return {name: each.config for of in self.weights for each in of for name in each.names}

    def possible_names(self) -> dict[str, list[list[str]]]:
        """For each path of `quantizable_weights`, what a checkpoint may call each of the modules
        that are merged there: what transformers does, or with another prefix before the layers."""
        own = f"{self.weight_names.layers.rpartition('.')[0]}."
        prefixes = dict.fromkeys((own, *PREFIXES))

        def possible(name: str, weight: Weight) -> list[str]:
            rest = name.removeprefix(own)
            ends = FIRST_OF_EXPERTS if isinstance(weight, ExpertsConfig) else ("",)
            return [f"{prefix}{rest}{end}" for prefix in prefixes for end in ends]

        return {
            each.names[0]: [possible(name, each.config) for name in each.names]
            for of_layer in self.weights
            for each in of_layer
        }

    def quantizable_weights(self) -> Iterator[tuple[str, Weight]]:
        """See ModelDescription.quantizable_weights; by the name of the first module."""
        for of_layer in self.weights:
            for each in of_layer:
                yield each.names[0], each.config

    def with_linear_method(self, method: str) -> Self:
        """See ModelDescription.with_linear_method."""

        def changed(_: int, weight: Weight) -> Weight:
            if isinstance(weight, ExpertsConfig):
                return weight.with_linear_method(method)
            return replace(weight, method=method)

        described = ModelDescription.with_linear_method(self, method)
        return replace(described, weights=self._changed(changed))

    def _with_copied_layers(self, num_layers: int, num_expert_layers: int) -> Self:
        """See ModelConfig._with_copied_layers."""

        def changed(number: int, weight: Weight) -> Weight:
            form = self.copy_form
            if isinstance(weight, LinearConfig):
                return weight.with_copy(form if number < num_layers else None)
            of_experts: CopyForm | None = None if form == "dequantized" else form
            return weight.with_copies(None, of_experts if number < num_expert_layers else None)

        return replace(self, weights=self._changed(changed))

    def _changed(
        self, function: Callable[[int, Weight], Weight]
    ) -> tuple[tuple[NamedWeight, ...], ...]:
        """`weights` after a function of each layer's number and each weight in it."""
        return tuple(
            tuple(each._replace(config=function(number, each.config)) for each in of_layer)
            for number, of_layer in enumerate(self.weights)
        )

    @property
    def copyable(self) -> tuple[tuple[Weight, ...], ...]:
        """See ModelConfig.copyable."""
        return tuple(
            tuple(self._copied(each.names[0], each.config) for each in of_layer)
            for of_layer in self.weights
        )

    def num_parameters(self) -> int:
        """See ModelDescription.num_parameters."""
        return self.parameters

    def num_lookup_parameters(self) -> int:
        """See ModelDescription.num_lookup_parameters."""
        return self.lookup_parameters

    def weight_bytes(self, dtype_bytes: int) -> int:
        """See ModelDescription.weight_bytes."""
        return self.parameters * dtype_bytes + 4 * self.table_width * self.max_model_len


def _num_weights(weights: Iterable[Iterable[NamedWeight]]) -> int:
    """How many parameters they have; experts count with their router."""
    return sum(each.config.num_parameters for each in chain.from_iterable(weights))
