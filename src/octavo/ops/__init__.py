"""Kernels by device. Attention over a paged KV cache has one interface and several backends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.base import (
    MAX_CASCADE_LEVELS,
    AttentionBackend,
    AttentionBatch,
    CascadeSegments,
    HeadNorm,
    HostStaging,
    LayerPlace,
    LayerSpec,
    PaddedSizes,
    RotaryTable,
    ScoreFunction,
    Sinks,
    Staging,
)
from octavo.registry import ATTENTION_BACKENDS


def load_backend(name: str) -> type[AttentionBackend]:
    """The attention backend of that name; its module is imported only now.

    Raises ConfigError if there is none.
    """
    backend: type[AttentionBackend] = ATTENTION_BACKENDS.find(name)
    return backend


def make_backend(
    backend: type[AttentionBackend],
    layers: Sequence[LayerSpec],
    layer_places: Sequence[LayerPlace],
    kv_cache: Tensor,
    block_size: int,
) -> AttentionBackend:
    """Construct a backend, as the engine does; see AttentionBackend for the arguments.

    Raises ConfigError where a layer's score function has a feature that the backend does not list
    among its `score_features`; a backend that lists none computes none.
    """
    computed: frozenset[str] = getattr(backend, "score_features", frozenset())
    for layer in layers:
        if missing := layer.scores.features - computed:
            raise ConfigError(
                "attention_backend",
                f"{backend.__name__} does not compute {', '.join(sorted(missing))}, which the "
                f"scores of layer {layer.layer_id} need",
            )
    return backend(layers, layer_places, kv_cache, block_size)


__all__ = [
    "MAX_CASCADE_LEVELS",
    "AttentionBackend",
    "AttentionBatch",
    "CascadeSegments",
    "HeadNorm",
    "HostStaging",
    "LayerPlace",
    "LayerSpec",
    "PaddedSizes",
    "RotaryTable",
    "ScoreFunction",
    "Sinks",
    "Staging",
    "load_backend",
    "make_backend",
]
