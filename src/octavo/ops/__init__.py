"""Kernels by device. Attention over a paged KV cache has one interface and several backends."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo.ops.base import (
    CROSS_ATTENTION,
    FP8_KV_CACHE,
    MAX_CASCADE_LEVELS,
    MOST_CONTINUED,
    AttentionBackend,
    AttentionBatch,
    CapturedBackend,
    CascadeSegments,
    ContinuingBackend,
    DecodeItems,
    EncodedInputs,
    HeadNorm,
    HeadNorms,
    HostStaging,
    KVScales,
    LayerPlace,
    LayerSpec,
    PaddedSizes,
    RelativeBias,
    RotaryTable,
    ScoreFunction,
    Sinks,
    Staging,
    StagingPart,
    cached_dtype,
    upload,
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
    dtype: torch.dtype | None = None,
) -> AttentionBackend:
    """Construct a backend, as the engine does; see AttentionBackend for the arguments.

    dtype: None: that of the cache.

    Raises ConfigError where `check_score_features` does.
    """
    for layer in layers:
        check_score_features(backend, layer.layer_id, layer.features)
    return backend(layers, layer_places, kv_cache, block_size, dtype or kv_cache.dtype)


def token_size_of(backend: type[AttentionBackend]) -> Callable[[int, int], int]:
    """How many elements a backend keeps of a token's keys and values in a layer of so many KV heads
    of so many elements each: octavo.models.config.TokenSize."""
    return lambda num_kv_heads, head_dim: math.prod(
        backend.kv_block_shape(1, num_kv_heads, head_dim)
    )


def check_score_features(
    backend: type[AttentionBackend], layer_id: int, features: frozenset[str]
) -> None:
    """Raise ConfigError unless the backend computes all that a layer needs beyond dot products.

    A backend without the attribute `score_features` computes none.
    """
    computed: frozenset[str] = getattr(backend, "score_features", frozenset())
    if missing := features - computed:
        raise ConfigError(
            "attention_backend",
            f"{backend.__name__} does not compute {', '.join(sorted(missing))}, which layer "
            f"{layer_id} needs",
        )


__all__ = [
    "CROSS_ATTENTION",
    "FP8_KV_CACHE",
    "MAX_CASCADE_LEVELS",
    "MOST_CONTINUED",
    "AttentionBackend",
    "AttentionBatch",
    "CapturedBackend",
    "CascadeSegments",
    "ContinuingBackend",
    "DecodeItems",
    "EncodedInputs",
    "HeadNorm",
    "HeadNorms",
    "HostStaging",
    "KVScales",
    "LayerPlace",
    "LayerSpec",
    "PaddedSizes",
    "RelativeBias",
    "RotaryTable",
    "ScoreFunction",
    "Sinks",
    "Staging",
    "StagingPart",
    "cached_dtype",
    "check_score_features",
    "load_backend",
    "make_backend",
    "upload",
]
