"""The description of a model that transformers computes. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from octavo.errors import ConfigError
from octavo.layers.config import CopyForm, ExpertsConfig, LinearConfig
from octavo.models.config import ModelConfig, ModelDescription
from octavo.parallel import OPTION, Shard

Weight = LinearConfig | ExpertsConfig
# What checkpoints have before the names of layers that take text, as saved by old and new versions
# of transformers, of models that take other input, too, or do not.
PREFIXES = ("", "model.", "language_model.", "language_model.model.", "model.language_model.")
# What is behind the name of a layer's experts in that of one of its weights.
FIRST_OF_EXPERTS = ("", ".0.gate_proj", ".0.w1")


class NamedWeight(NamedTuple):
    """A projection, several that are merged, or the experts of a layer."""

    names: tuple[str, ...]  # of transformers' modules
    config: Weight


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

    def sharded(self, shard: Shard) -> TransformersConfig:
        """See ModelDescription.sharded. Raises ConfigError for more than one rank."""
        if shard.size > 1:
            raise ConfigError(
                OPTION,
                f"{shard.size} ranks cannot share {self.architecture}, which is served through "
                f"transformers: only families of octavo's own are divided",
            )
        return self

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
            names[0]: [possible(name, weight) for name in names]
            for of_layer in self.weights
            for names, weight in of_layer
        }

    def quantizable_weights(self) -> Iterator[tuple[str, Weight]]:
        """See ModelDescription.quantizable_weights; by the name of the first module."""
        for of_layer in self.weights:
            for names, weight in of_layer:
                yield names[0], weight

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
            tuple(NamedWeight(names, function(number, weight)) for names, weight in of_layer)
            for number, of_layer in enumerate(self.weights)
        )

    @property
    def copyable(self) -> tuple[tuple[Weight, ...], ...]:
        """See ModelConfig.copyable."""
        return tuple(
            tuple(self._copied(names[0], weight) for names, weight in of_layer)
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
