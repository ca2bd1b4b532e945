"""The description of a model that transformers computes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from octavo.errors import ConfigError
from octavo.layers.config import ExpertsConfig, LinearConfig
from octavo.models.config import ModelConfig
from octavo.parallel import OPTION, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """As ModelConfig, from a recorded pass (recording.py).

    The attention of its layers is described as it is. What else a layer has is known by its size
    alone: `mlp` is a block as wide as the results of the layer's projections together.
    """

    model_class: str = "octavo.models.fallback.model:TransformersLM"
    parameters: int  # of the whole model; tied ones count once
    lookup_parameters: int  # of these, tables of embeddings that are not those of logits, too
    table_width: int  # float32 numbers that tables of rotary embeddings hold for each position
    projections: tuple[tuple[LinearConfig, ...], ...]  # of each layer, by its number in the paths
    num_copied_layers: int = 0  # the first ones, whose projections have copies

    def sharded(self, shard: Shard) -> TransformersConfig:
        """See ModelDescription.sharded. Raises ConfigError for more than one rank."""
        if shard.size > 1:
            raise ConfigError(
                OPTION,
                f"{shard.size} ranks cannot share {self.architecture}, which is served through "
                f"transformers: only families of octavo's own are divided",
            )
        return self

    def _with_copied_layers(self, num_layers: int, num_expert_layers: int) -> Self:
        """See ModelConfig._with_copied_layers; experts have none."""
        return replace(self, num_copied_layers=num_layers)

    @property
    def copyable(self) -> tuple[tuple[LinearConfig | ExpertsConfig, ...], ...]:
        """See ModelDescription.copyable."""
        count = self.num_copied_layers
        form = self.copy_form
        copied = (tuple(each.with_copy(form) for each in of) for of in self.projections[:count])
        return (*copied, *self.projections[count:])

    def num_parameters(self) -> int:
        """See ModelDescription.num_parameters."""
        return self.parameters

    def num_lookup_parameters(self) -> int:
        """See ModelDescription.num_lookup_parameters."""
        return self.lookup_parameters

    def weight_bytes(self, dtype_bytes: int) -> int:
        """See ModelDescription.weight_bytes."""
        return self.parameters * dtype_bytes + 4 * self.table_width * self.max_model_len
