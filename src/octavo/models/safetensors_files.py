"""The tensors of a directory in Hugging Face format, of which only slices that are asked for are
read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ModelError, OutOfMemory, few
from octavo.models.base import FileTensor
from octavo.models.config import ModelConfig
from octavo.models.dequantize import joined
from octavo.models.kv_scales import find_kv_scales
from octavo.models.safetensors_paths import INDEX_FILE, unreadable, weight_files
from octavo.ops import KVScales


class SafetensorsFiles:
    """See WeightFiles."""

    config_name = "config.json"

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @contextmanager
    def tensors(self, dtype: torch.dtype, device: torch.device) -> Iterator[Iterable[FileTensor]]:
        """See WeightFiles.tensors."""
        config = self._config
        with ExitStack() as files:
            stored = _read_tensors(config.path, files)
            if config.quantization is None or not config.is_stored_quantized:
                yield stored
            else:
                yield joined(stored, config.quantization, device)

    def kv_scales(self) -> list[KVScales]:
        """See WeightFiles.kv_scales."""
        with ExitStack() as files:
            return find_kv_scales(self._config, _read_tensors(self._config.path, files))


@dataclass(frozen=True, slots=True)
class TensorInFile:
    """A tensor of an open weight file, of which only slices that are asked for are read."""

    path: Path
    file: Any
    name: str
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of it; all of it is memory-mapped.

        Raises ModelError if torch has no such dtype.
        """
        sizes = [each.stop - each.start for each in index]
        try:
            if tuple(sizes) == self.shape:
                tensor: Tensor = self.file.get_tensor(self.name)
            else:
                tensor = self.file.get_slice(self.name)[index]
        except SafetensorError as error:
            raise ModelError(f"{self.path}: {self.name} cannot be read: {error}") from error
        return tensor


def _read_tensors(directory: Path, files: ExitStack) -> Iterator[FileTensor]:
    """Every tensor in the weight files, which `files` will close."""
    for path, expected in weight_files(directory).items():
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
            names = set(file.keys())
            lacking = sorted(expected - names)
            if lacking:
                raise ModelError(f"{path} lacks {few(lacking)}, which {INDEX_FILE} lists")
            for name in sorted(names):
                shape = tuple(file.get_slice(name).get_shape())
                yield path, name, TensorInFile(path, file, name, shape)
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from error
        except RuntimeError as error:  # beyond a limit on the process's addresses
            raise OutOfMemory(f"{path} cannot be mapped into memory: {error}") from error
