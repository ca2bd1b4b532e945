"""Kernels by device, and the interface of attention over a paged KV cache.

A new attention backend is one class and one line in `BACKENDS`.
"""

from __future__ import annotations

from importlib import import_module

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

BACKENDS = {
    "reference": "octavo.ops.reference.attention:ReferenceBackend",
    "cpu": "octavo.ops.cpu.attention:CpuBackend",
    "triton": "octavo.ops.cuda.attention:TritonBackend",
}


def load_backend(name: str) -> type[AttentionBackend]:
    """The backend of that name; its module and its dependencies are imported only now.

    Raises:
        ValueError: there is no such backend; the message names them all.
    """
    if name not in BACKENDS:
        raise ValueError(
            f"unknown attention backend {name!r}; there are: {', '.join(sorted(BACKENDS))}"
        )
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(import_module(module), attribute)
    return backend


__all__ = [
    "BACKENDS",
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
