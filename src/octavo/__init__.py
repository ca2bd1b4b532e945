"""octavo: serving large language models with PagedAttention.

Names are loaded on first use, so that `import octavo` is quick and imports no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.core.step import TokenLogprobs
    from octavo.errors import OctavoError, RequestFailed
    from octavo.llm import LLM
    from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
    from octavo.sampling_params import BeamSearchParams, PoolingParams, SamplingParams
    from octavo.structured.output import StructuredOutput

__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "SamplingParams": "octavo.sampling_params",
    "BeamSearchParams": "octavo.sampling_params",
    "PoolingParams": "octavo.sampling_params",
    "StructuredOutput": "octavo.structured.output",
    "RequestOutput": "octavo.outputs",
    "SequenceOutput": "octavo.outputs",
    "SequenceDelta": "octavo.outputs",
    "TokenLogprobs": "octavo.core.step",
    "OctavoError": "octavo.errors",
    "RequestFailed": "octavo.errors",
}

__all__ = [
    "LLM",
    "BeamSearchParams",
    "OctavoError",
    "PoolingParams",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "SequenceDelta",
    "SequenceOutput",
    "StructuredOutput",
    "TokenLogprobs",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
