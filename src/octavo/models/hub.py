"""Where a model's files are: the demo, a local directory, or the hub."""

from __future__ import annotations

import re
from pathlib import Path

from octavo.errors import ModelError, shown
from octavo.gguf import find_gguf, is_gguf
from octavo.gguf.file import SUFFIX

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.json", "*.jinja"]
HUB_WEIGHTS = ["*.safetensors"]
# Files in subdirectories (other formats), and a second copy of the weights some repositories keep.
HUB_EXCLUDED = ["*/*", "consolidated*"]


def resolve_model(name: str, weights: bool = True) -> Path:
    """The directory of a model; or the GGUF file that it is in.

    Args:
        name: "demo", a GGUF file, a local directory, or a hub id, whose files are fetched.
        weights: whether the weights of a hub id are fetched, too.

    Raises:
        ModelError: there is no such model; says what was looked for.
    """
    if name == "demo":
        # The demo model is unpacked only when it is asked for.
        from octavo.demo import demo_model_path

        return Path(demo_model_path())
    try:
        path = Path(name).expanduser()
        is_directory, exists = path.is_dir(), path.exists()
    except (OSError, RuntimeError) as error:  # too long a name, or an unknown user's home
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"no model {shown(name)}: {reason}") from error
    if is_directory:
        return find_gguf(path) or path
    if is_gguf(path):
        return path
    if exists:
        raise ModelError(
            f"{name} is a file; give the directory that holds config.json, or a {SUFFIX} file"
        )
    if path.suffix == SUFFIX:
        raise ModelError(f"no model {name!r}: there is no such file ({path.absolute()})")
    if HUB_ID.fullmatch(name):
        return _fetch_from_hub(name, HUB_WEIGHTS + HUB_FILES if weights else HUB_FILES)
    raise ModelError(
        f"no model {name!r}: it is not a directory or file ({path.absolute()}), not 'demo', and "
        "not a hub id of the form organisation/name"
    )


def _fetch_from_hub(hub_id: str, patterns: list[str]) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=HUB_EXCLUDED)
        )
    except Exception as error:  # its errors have no common base; all mean that there is no model
        reason = str(error).strip().splitlines()
        raise ModelError(
            f"no model {hub_id!r}: there is no such directory, and it could not be fetched from "
            f"the hub ({reason[0] if reason else type(error).__name__})"
        ) from error
