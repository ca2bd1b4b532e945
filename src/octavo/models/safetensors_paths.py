"""Which files hold the weights of a directory in Hugging Face format, and which tensors are in
them. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from octavo.errors import ModelError, few
from octavo.json_fields import read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def weight_files(directory: Path) -> dict[Path, set[str]]:
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


def tensor_names(directory: Path) -> Collection[str]:
    """The names of all tensors in the weight files; none if there are no such files.

    Raises ModelError about files that cannot be read.
    """
    single = directory / SINGLE_FILE
    if single.is_file():
        try:
            with safe_open(single, framework="numpy") as file:
                return set(file.keys())
        except (SafetensorError, OSError) as error:
            raise unreadable(single, error) from error
    if not (directory / INDEX_FILE).is_file():
        return ()
    return set().union(*weight_files(directory).values())


def unreadable(path: Path, error: Exception) -> ModelError:
    """The error for a weight file that cannot be opened."""
    return ModelError(f"{path} is truncated or not a safetensors file: {error}")
