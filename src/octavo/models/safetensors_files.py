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
from octavo.json_fields import read_json
from octavo.models.base import FileTensor
from octavo.models.config import ModelConfig
from octavo.models.dequantize import joined
from octavo.models.kv_scales import find_kv_scales
from octavo.ops import KVScales

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


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

    file: Any
    name: str
    shape: tuple[int, ...]

    def read(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of it; all of it is memory-mapped."""
        sizes = [each.stop - each.start for each in index]
        if tuple(sizes) == self.shape:
            tensor: Tensor = self.file.get_tensor(self.name)
        else:
            tensor = self.file.get_slice(self.name)[index]
        return tensor


def _read_tensors(directory: Path, files: ExitStack) -> Iterator[FileTensor]:
    """Every tensor in the weight files, which `files` will close."""
    for path, expected in _weight_files(directory).items():
        try:
            file = files.enter_context(safe_open(path, framework="pt"))
            names = set(file.keys())
            lacking = sorted(expected - names)
            if lacking:
                raise ModelError(f"{path} lacks {few(lacking)}, which {INDEX_FILE} lists")
            for name in sorted(names):
                shape = tuple(file.get_slice(name).get_shape())
                yield path, name, TensorInFile(file, name, shape)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} is truncated or not a safetensors file: {error}") from error
        except RuntimeError as error:  # beyond a limit on the process's addresses
            raise OutOfMemory(f"{path} cannot be mapped into memory: {error}") from error


def _weight_files(directory: Path) -> dict[Path, set[str]]:
    """The weight files, each with the tensors that the index (if there is one) expects in it."""
    if (directory / SINGLE_FILE).is_file():
        return {directory / SINGLE_FILE: set()}
    if not (directory / INDEX_FILE).is_file():
        raise ModelError(_no_weights(directory))
    weight_map = read_json(directory / INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError(f"{directory / INDEX_FILE}: weight_map does not map tensors to files")
    files: dict[Path, set[str]] = {}
    for name, file_name in weight_map.items():
        # Only the file name is used, so that an index cannot point outside the directory.
        files.setdefault(directory / Path(file_name).name, set()).add(name)
    present = {path.name for path in directory.iterdir() if path.is_file()}
    absent = [path.name for path in files if path.name not in present]
    if absent:
        raise ModelError(f"{directory}: {INDEX_FILE} lists {few(absent)}, which does not exist")
    return files


def _no_weights(directory: Path) -> str:
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{directory} holds its weights as pickle ({few(pickles)}), which can run any code "
            f"when it is read; convert it to {SINGLE_FILE}"
        )
    return f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE} is there"
