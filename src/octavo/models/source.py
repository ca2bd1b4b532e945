"""What a model's files say of it: the seam between models and formats of files. Imports no torch.

A format is a ModelSource here, the WeightFiles (base.py) that it names, and a ModelFiles
(octavo/model_files.py), which has what does not depend on models.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import ClassVar, Protocol

from octavo.json_fields import Fields, read_json, read_optional_json
from octavo.model_files import open_files
from octavo.models.family import Family
from octavo.models.quantization import Quantization
from octavo.models.quantization_config import find_quantization, read_quantization
from octavo.models.safetensors_paths import tensor_names
from octavo.models.weight_names import WeightNames
from octavo.registry import Registry


class ModelSource(Protocol):
    """What the files of one model say; all methods raise ModelError about what they read."""

    weight_files: ClassVar[str]
    """Its WeightFiles, "module:class", whose module is imported late."""

    is_for_transformers: ClassVar[bool]
    """Whether transformers reads such files."""

    @property
    def path(self) -> Path:
        """Where the model is."""

    def config(self) -> Fields:
        """config.json, or what would be in it."""

    def generation(self) -> Fields:
        """generation_config.json, or what would be in it; empty where there is none."""

    def quantization(self) -> Quantization | None:
        """How the weights are stored; None: as values."""

    def weight_names(self, family: Family) -> WeightNames:
        """What the files call the weights of a family."""

    def tensor_names(self) -> Collection[str]:
        """The names of the weights; none where a model is only described."""

    def transformers_directory(self) -> Path:
        """What transformers reads the model from. Raises ConfigError if it cannot."""


class HuggingFaceSource:
    """See ModelSource. A directory in Hugging Face format."""

    weight_files: ClassVar[str] = "octavo.models.safetensors_files:SafetensorsFiles"
    is_for_transformers: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self._config = read_json(path / "config.json")

    def config(self) -> Fields:
        """See ModelSource.config."""
        return self._config

    def generation(self) -> Fields:
        """See ModelSource.generation."""
        return read_optional_json(self.path / "generation_config.json")

    def quantization(self) -> Quantization | None:
        """See ModelSource.quantization."""
        return read_quantization(find_quantization(self._config, self.path))

    def weight_names(self, family: Family) -> WeightNames:
        """See ModelSource.weight_names."""
        names = family.weights
        return names.in_files(self.tensor_names()) if names.merged else names

    def tensor_names(self) -> Collection[str]:
        """See ModelSource.tensor_names."""
        return tensor_names(self.path)

    def transformers_directory(self) -> Path:
        """See ModelSource.transformers_directory."""
        return self.path


SOURCES: Registry[Callable[[Path], ModelSource]] = Registry(
    "format", {"huggingface": HuggingFaceSource, "gguf": "octavo.models.gguf:GgufSource"}
)


def open_source(path: str | Path) -> ModelSource:
    """What the model at `path` says of itself. Raises ModelError if there is none."""
    files = open_files(path)
    return SOURCES[files.format](files.path)
