"""The small trained model that ships with octavo, found by the name `demo`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from octavo.errors import ModelError

MANIFEST = "manifest.json"
_DIRECTORY = Path(__file__).parent / "weights"


def demo_model_path(directory: Path = _DIRECTORY) -> Path:
    """The directory of the demo model, once all of its files are known to be there and whole."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        for name, expected in manifest.items():
            _check(directory / name, expected["size"], expected["sha256"])
    except FileNotFoundError:
        raise ModelError(
            f"the demo model is missing: there is no {MANIFEST} in {directory}; {_ADVICE}"
        ) from None
    except ValueError as error:
        raise ModelError(
            f"the demo model's {MANIFEST} in {directory} is damaged ({error}); {_ADVICE}"
        ) from None
    except OSError as error:
        raise ModelError(
            f"the demo model cannot be read: {error.filename} ({error.strerror}); {_ADVICE}"
        ) from error
    return directory


_ADVICE = "reinstall octavo, or train the model again with `python -m octavo_demo.train`"


def _check(path: Path, size: int, sha256: str) -> None:
    if not path.is_file():
        raise ModelError(f"the demo model is not whole: {path} is missing; {_ADVICE}")
    found = path.stat().st_size
    if found != size:
        what = "truncated" if found < size else "too long"
        raise ModelError(
            f"the demo model is not whole: {path} is {what} "
            f"({found:,} bytes of {size:,}); {_ADVICE}"
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ModelError(
            f"the demo model is not whole: the content of {path} has changed; {_ADVICE}"
        )
