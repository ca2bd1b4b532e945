"""Models whose shapes come with octavo; any directory with a config.json does as well."""

from __future__ import annotations

from pathlib import Path

from octavo.errors import ModelError
from octavo.models.config import ModelConfig
from octavo.models.hub import resolve_model
from octavo.models.registry import read_model_config

DIRECTORY = Path(__file__).parent / "models"


def model_names() -> list[str]:
    return sorted(path.name for path in DIRECTORY.iterdir())


def find_model(name: str) -> ModelConfig:
    """The shapes of a model: a name in `model_names`, "demo", a directory, a GGUF file or a hub id.

    Raises:
        ModelError: there is none; the message lists the names. Or its config.json is refused.
    """
    if name in model_names():
        return read_model_config(DIRECTORY / name)
    try:
        directory = resolve_model(name, weights=False)
    except ModelError as error:
        raise ModelError(f"{error}, nor one of {', '.join(model_names())}") from error
    return read_model_config(directory)
