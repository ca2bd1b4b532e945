"""Kernels by device. Attention over a paged KV cache has one interface and several backends."""

from __future__ import annotations

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
    Staging,
)
from octavo.registry import ATTENTION_BACKENDS


def load_backend(name: str) -> type[AttentionBackend]:
    """The attention backend of that name; its module is imported only now.

    Raises ConfigError if there is none.
    """
    backend: type[AttentionBackend] = ATTENTION_BACKENDS.find(name)
    return backend


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
    "Staging",
    "load_backend",
]
