"""Measurements on a GPU, for figures 18 and 19: which files are read, and what they hold.

A directory of *.json, one object per file:

    {"kind": ..., "device": "NVIDIA H200", "model": "opt-13b, dummy weights",
     "command": "python benchmarks/block_sizes.py", "setting": "150 requests ...", "rows": [...]}

`kind` says what a row is. Other kinds are ignored; rows of several files of one kind are merged.

    "attention-kernel"   {"kernel": "paged" or "contiguous", "batch_size": 8, "context": 64,
                          "microseconds": 31.5}                                    figure 18a
    "block-size"         {"trace": "sharegpt", "block_size": 16,
                          "seconds_per_token": 0.085}                              figure 18c
    "preemption-cost"    {"method": "recompute", "swap-out" or "swap-in", "block_size": 16,
                          "milliseconds": 18.0}; of 256 tokens                     figure 19a
    "preemption"         {"method": "recompute" or "swap", "block_size": 16,
                          "seconds_per_token": 0.07}                               figure 19c
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

# Kind -> the fields that say what was measured, and the field that holds the value.
KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "attention-kernel": (("kernel", "batch_size", "context"), "microseconds"),
    "block-size": (("trace", "block_size"), "seconds_per_token"),
    "preemption-cost": (("method", "block_size"), "milliseconds"),
    "preemption": (("method", "block_size"), "seconds_per_token"),
}
FACTS = ("device", "model", "command", "setting")  # that each file states of its rows

Key = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Measurements:
    """All rows of one kind: (fields that say what was measured) -> value."""

    values: Mapping[Key, float]
    device: str  # one, or several joined, as is the description
    description: str  # device, model, command and setting


def read_measurements(folder: Path | None, kind: str) -> Measurements | None:
    """All measurements of a kind; None if there are none, or no folder.

    Raises ConfigError for a broken file; the message names it.
    """
    names, value_name = KINDS[kind]
    values: dict[Key, float] = {}
    devices: dict[str, None] = {}
    descriptions: dict[str, None] = {}
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        content = _read(path)
        if content.get("kind") != kind:
            continue
        for number, row in enumerate(_rows(path, content)):
            try:
                values[tuple(row[name] for name in names)] = _positive(row[value_name])
            except (KeyError, TypeError, ValueError) as error:
                expected = ", ".join((*names, value_name))
                what = f"{path}: row {number} needs {expected}, which is positive"
                raise ConfigError("measurements", what) from error
        device, model, command, setting = _facts(path, content)
        devices[device] = None
        descriptions[f"{device}, {model}, `{command}`: {setting}"] = None
    return Measurements(values, "; ".join(devices), "; ".join(descriptions)) if values else None


def _positive(value: Any) -> float:
    number = float(value)
    if not 0 < number < inf:
        raise ValueError(value)
    return number


def _read(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError("measurements", f"{path}: {error}") from error
    # Files of other kinds may hold anything.
    return content if isinstance(content, Mapping) else {}


def _facts(path: Path, content: Mapping[str, Any]) -> list[str]:
    """The values of FACTS."""
    for name in FACTS:
        value = content.get(name)
        if not isinstance(value, str):
            raise ConfigError("measurements", f"{path}: {name} must be a string, not {value!r}")
    return [content[name] for name in FACTS]


def _rows(path: Path, content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    rows = content.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError("measurements", f"{path}: rows must be a list of objects")
    yield from rows
