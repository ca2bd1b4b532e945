"""Request traces: lengths and arrivals, and for some sources the ids of shared prefix blocks.

CSV with a header that names `prompt_tokens`, `output_tokens` and perhaps `arrival_s`, or JSONL with
the same names and perhaps `hash_ids`; both may name a `tenant`. Either may be gzipped. No trace
holds any text.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import random
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import TraceError, shown

ENCODING = "utf-8-sig"  # with a byte order mark or without: spreadsheets write one
HASH_BLOCK_SIZE = 512  # tokens behind one of `hash_ids` in Mooncake's traces
MAX_LENGTH = 1 << 24  # tokens of a prompt or an output; prompts of these lengths are made


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None  # None: the source has no arrivals
    # Blocks of the prompt, chained: an id stands for the same tokens after the same prefix.
    hash_ids: tuple[int, ...] = ()
    tenant: str = ""  # for the fair policy

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


def read_trace(path: str | Path, limit: int | None = None) -> list[TraceRequest]:
    """The requests of a trace in its order, at most `limit` of them.

    Raises:
        TraceError: the file is missing, of an unknown kind, empty, or has a broken line; the
            message names the file and the line.
    """
    path = Path(path)
    requests: list[TraceRequest] = []
    try:
        with _open_text(path) as lines:
            records = _records(path, lines)
            for number, values in records:
                if limit is not None and len(requests) >= limit:
                    break
                requests.append(_request(path, number, values))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: cannot be read: {reason}") from error
    if not requests:
        raise TraceError(f"{path}: it has no requests")
    return requests


def make_prompts(
    requests: Sequence[TraceRequest],
    vocab_size: int,
    seed: int | str = 0,
    hash_block_size: int = HASH_BLOCK_SIZE,
) -> list[list[int]]:
    """Random token ids of the right lengths.

    Blocks with equal `hash_ids` get equal tokens, so the prefix cache finds what it would have
    found in the original; `hash_block_size` is their size.
    """
    return list(generate_prompts(requests, vocab_size, seed, hash_block_size))


def generate_prompts(
    requests: Iterable[TraceRequest],
    vocab_size: int,
    seed: int | str = 0,
    hash_block_size: int = HASH_BLOCK_SIZE,
) -> Iterator[list[int]]:
    """The same as an iterator, for traces whose prompts would take much memory."""
    draw = random.Random(seed)
    blocks: dict[int, array[int]] = {}  # packed: a trace may have a hundred thousand
    for request in requests:
        prompt: list[int] = []
        for hash_id in request.hash_ids:
            if len(prompt) >= request.prompt_tokens:
                break
            if hash_id not in blocks:
                own = random.Random(f"{seed}-{hash_id}")
                drawn = own.choices(range(vocab_size), k=hash_block_size)
                blocks[hash_id] = array("i", drawn)
            prompt += blocks[hash_id]
        del prompt[request.prompt_tokens :]
        prompt += draw.choices(range(vocab_size), k=request.prompt_tokens - len(prompt))
        yield prompt


def _open_text(path: Path) -> io.TextIOWrapper:
    if path.suffix == ".gz":
        return io.TextIOWrapper(gzip.open(path), encoding=ENCODING, newline="")
    return path.open(encoding=ENCODING, newline="")


def _records(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Each line of the file with its number, as names and values."""
    kind = Path(path.name.removesuffix(".gz")).suffix
    if kind == ".csv":
        return _csv_records(path, lines)
    if kind == ".jsonl":
        return _json_records(path, lines)
    raise TraceError(f"{path}: a trace is a .csv or .jsonl file, or one of them with .gz")


def _csv_records(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.reader(lines)
    try:
        header = next(reader, [])
        for name in ("prompt_tokens", "output_tokens"):
            if name not in header:
                raise TraceError(f"{path}:1: the header has no column {name}")
        for row in reader:
            if not row:
                continue
            if len(row) != len(header):
                raise TraceError(
                    f"{path}:{reader.line_num}: {len(row)} columns, but the header has "
                    f"{len(header)}"
                )
            yield reader.line_num, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise TraceError(f"{path}:{reader.line_num}: {error}") from error


def _json_records(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}:{number}: it is not JSON ({error})") from error
        if not isinstance(values, dict):
            raise TraceError(f"{path}:{number}: it is not a JSON object")
        yield number, values


def _request(path: Path, number: int, values: Mapping[str, Any]) -> TraceRequest:
    where = f"{path}:{number}"
    hash_ids = values.get("hash_ids") or []
    if not isinstance(hash_ids, list) or not all(type(i) is int for i in hash_ids):
        raise TraceError(f"{where}: hash_ids is not a list of integers")
    return TraceRequest(
        _length(where, values, "prompt_tokens"),
        _length(where, values, "output_tokens"),
        _arrival(where, values.get("arrival_s")),
        tuple(hash_ids),
        _tenant(where, values.get("tenant")),
    )


def _length(where: str, values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    try:
        number = int(value) if isinstance(value, str) else value
    except ValueError:
        number = None
    if type(number) is not int or not 1 <= number <= MAX_LENGTH:
        raise TraceError(
            f"{where}: {name} is {shown(value)}, not an integer from 1 to {MAX_LENGTH:,}"
        )
    return number


def _tenant(where: str, value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TraceError(f"{where}: tenant is {shown(value)}, not a string")
    return value


def _arrival(where: str, value: Any) -> float | None:
    if value is None or value == "":
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise TraceError(f"{where}: arrival_s is {shown(value)}, not a number of seconds")
    return seconds
