"""The header of GGUF files: metadata, and where which tensor lies.

    file     := "GGUF" version:u32 num_tensors:u64 num_values:u64 value* entry* padding data
    value    := key:string type:u32 content
    entry    := name:string num_dims:u32 dim:u64* type:u32 offset:u64

(https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.) The types of tensors are those of the
`gguf` package, which also dequantizes them. Its reader is not used: it makes several arrays of each
string, which takes 7.5 seconds and 640 MB for the vocabulary of Llama 3 (this takes 0.3 seconds),
and believes the lengths in the file. Here, nothing is read or allocated that the file is too short
for.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from octavo.errors import ModelError, shown

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_KEY_BYTES = 65_535
MAX_TENSOR_NAME_BYTES = 64
MAX_ARRAY_LENGTH = 1 << 24  # vocabularies have up to some 300,000 tokens
MAX_DIMS = 4
SPLIT_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)

# By the type of a value: the format with which struct reads it. Strings and arrays have none.
_FORMATS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
_LEAST_VALUE_BYTES = 8 + 4 + 1
_LEAST_ENTRY_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where a tensor lies, and how it is stored."""

    path: Path
    name: str
    shape: tuple[int, ...]  # of the values, outermost dimension first
    type: str  # as ggml calls it: "F32", "Q8_0", ...
    offset: int  # in the file
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """What the header of a model says; of one in several files, those of all of them."""

    path: Path  # the first file
    metadata: Mapping[str, Any]  # arrays are lists
    tensors: Mapping[str, GgufTensor]

    def error(self, key: str, expected: str) -> ModelError:
        """About a value of the metadata."""
        value = shown(self.metadata.get(key))
        return ModelError(f"{self.path}: {shown(key)[1:-1]} is {value}; {expected}")

    def find(self, key: str, kind: type | tuple[type, ...], expected: str) -> Any:
        """The value of a key, or None. Raises ModelError if it is of another kind."""
        value = self.metadata.get(key)
        kinds = kind if isinstance(kind, tuple) else (kind,)
        is_right = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
        if value is not None and not is_right:
            raise self.error(key, f"it must be {expected}")
        return value

    def text(self, key: str) -> str | None:
        """A string; None: there is none."""
        value: str | None = self.find(key, str, "a string")
        return value

    def flag(self, key: str) -> bool | None:
        """True or false; None: it is not there."""
        value: bool | None = self.find(key, bool, "true or false")
        return value

    def texts(self, key: str) -> list[str] | None:
        """An array of strings; None: there is none."""
        values: list[str] | None = self.find(key, list, "an array of strings")
        if values is not None and not all(isinstance(each, str) for each in values):
            raise self.error(key, "it must be an array of strings")
        return values

    def numbers(self, key: str) -> list[int] | list[float] | None:
        """An array of numbers; None: there is none."""
        values: list[Any] | None = self.find(key, list, "an array of numbers")
        is_number = (isinstance(each, int | float) for each in values or ())
        if values is not None and not all(is_number):
            raise self.error(key, "it must be an array of numbers")
        return values


def is_gguf(path: Path) -> bool:
    """Whether a model's path is that of a GGUF file, not of a directory."""
    return path.suffix.lower() == SUFFIX and path.is_file()


def find_gguf(directory: Path) -> Path | None:
    """The GGUF file in a directory that has no other weights; of a model in several files, the
    first. None: there is no such file.

    Raises:
        ModelError: there are several models.
    """
    files = sorted(directory.glob(f"*{SUFFIX}"))
    if not files or any(directory.glob("*.safetensors")):
        return None
    matches = [SPLIT_NAME.fullmatch(path.name) for path in files]
    models = {
        path.name if match is None else match["stem"]
        for path, match in zip(files, matches, strict=True)
    }
    if len(models) > 1:
        names = ", ".join(path.name for path in files[:4])
        raise ModelError(f"{directory} has {len(models)} GGUF models; give one of them: {names}")
    return files[0]


def split_names(match: re.Match[str]) -> tuple[str, ...]:
    """The names of all files of a model, from a match of SPLIT_NAME."""
    count = int(match["count"])
    return tuple(f"{match['stem']}-{i + 1:05}-of-{match['count']}{SUFFIX}" for i in range(count))


def read_gguf(path: Path) -> GgufFile:
    """The header of a GGUF file, and those of the others that the model is split into.

    The result for the model that was read last is kept until its files change, or `forget_gguf`:
    tokenizer, configuration and weights are read from it one after the other.

    Raises:
        ModelError: it is no GGUF file, is truncated, contradicts itself, or a part of the model is
            missing; names the value or the tensor.
    """
    match = SPLIT_NAME.fullmatch(path.name)
    names = [path.name] if match is None else split_names(match)
    return _read_all(path, tuple(map(_stamp, map(path.with_name, names))))


def forget_gguf() -> None:
    """Free the memory of the header that was read last, some 30 MB with a large vocabulary."""
    _read_all.cache_clear()


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is written again; None: it cannot be read."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


@lru_cache(maxsize=1)
def _read_all(path: Path, stamps: tuple[tuple[int, ...] | None, ...]) -> GgufFile:
    """See read_gguf; `stamps` are those of the model's files."""
    first = _read_one(path)
    count = first.find("split.count", int, "a number of files") or 1
    if count <= 1:
        return first
    match = SPLIT_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise first.error("split.count", f"its files are called NAME-00001-of-{count:05}{SUFFIX}")
    names = split_names(match)
    absent = [name for name in names if not path.with_name(name).is_file()]
    if absent:
        raise ModelError(
            f"{path}: the model has {count} files, of which {absent[0]} does not exist"
        )
    parts = [first if name == path.name else _read_one(path.with_name(name)) for name in names]
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != count:
            raise part.error("split.no", f"{part.path.name} is file {number} of {count}")
        for name, tensor in part.tensors.items():
            if name in tensors:
                raise ModelError(f"{part.path}: {name} is also in {tensors[name].path.name}")
            tensors[name] = tensor
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise parts[0].error("split.tensors.count", f"the files have {len(tensors)} tensors")
    return GgufFile(parts[0].path, parts[0].metadata, tensors)


def _read_one(path: Path) -> GgufFile:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelError(f"{path} is not a GGUF file: it does not begin with {MAGIC!r}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Header(path, data).read()
    except OSError as error:
        raise ModelError(f"{path} cannot be read ({error.strerror})") from error


class _Header:
    """Reads one header, from its beginning to its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = len(MAGIC)
        self._types = tensor_types(path)

    def read(self) -> GgufFile:
        """Raises ModelError."""
        (version,) = self._unpack("I", "version")
        if version not in VERSIONS:
            hint = " (it is big-endian)" if version & 0xFFFF == 0 else ""
            versions = " and ".join(map(str, VERSIONS))
            raise ModelError(f"{self._path}: GGUF version {version}{hint}; octavo reads {versions}")
        num_tensors, num_values = self._unpack("QQ", "the header")
        self._check_count(num_values, _LEAST_VALUE_BYTES, "values of metadata")
        self._check_count(num_tensors, _LEAST_ENTRY_BYTES, "tensors")
        metadata: dict[str, Any] = {}
        for number in range(num_values):
            key = self._string(f"the key of value {number}", MAX_KEY_BYTES)
            if key in metadata:
                raise ModelError(f"{self._path}: two values are called {shown(key)}")
            (kind,) = self._unpack("I", key)
            metadata[key] = self._value(kind, key)
        entries = [self._entry(number) for number in range(num_tensors)]
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_whole = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_whole or alignment < 1 or alignment & (alignment - 1):
            raise ModelError(
                f"{self._path}: general.alignment is {shown(alignment)}; it must be a power of two"
            )
        begin = self._at + -self._at % alignment
        tensors: dict[str, GgufTensor] = {}
        for name, shape, kind, offset in entries:
            if name in tensors:
                raise ModelError(f"{self._path}: two tensors are called {shown(name)}")
            tensors[name] = self._tensor(name, shape, kind, begin, offset, alignment)
        for one, other in pairwise(sorted(tensors.values(), key=lambda each: each.offset)):
            if one.offset + one.num_bytes > other.offset:
                raise ModelError(f"{self._path}: tensors {one.name} and {other.name} overlap")
        return GgufFile(self._path, metadata, tensors)

    def _tensor(
        self, name: str, shape: tuple[int, ...], kind: int, begin: int, offset: int, alignment: int
    ) -> GgufTensor:
        types = self._types
        where = f"{self._path}: tensor {name}"
        if kind not in types:
            known = ", ".join(name for name, *_ in types.values())
            raise ModelError(f"{where} is of type {kind}, which is none of {known}")
        type_name, block, block_bytes = types[kind]
        if shape[-1] % block:
            raise ModelError(
                f"{where} has shape {list(shape)}; rows of {type_name} are multiples of {block}"
            )
        if offset % alignment:
            raise ModelError(f"{where} begins at {offset}, which is no multiple of {alignment}")
        num_bytes = prod(shape) // block * block_bytes
        if begin + offset + num_bytes > self._size:
            raise ModelError(
                f"{where} ({type_name} {list(shape)}) ends at byte "
                f"{begin + offset + num_bytes:,} of {self._size:,}: the file is truncated"
            )
        return GgufTensor(self._path, name, shape, type_name, begin + offset, num_bytes)

    def _entry(self, number: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, type and offset of a tensor."""
        name = self._string(f"the name of tensor {number}", MAX_TENSOR_NAME_BYTES)
        (num_dims,) = self._unpack("I", name)
        if not 1 <= num_dims <= MAX_DIMS:
            raise ModelError(
                f"{self._path}: tensor {name} has {num_dims} dimensions; they are 1 to {MAX_DIMS}"
            )
        *dims, kind, offset = self._unpack(f"{num_dims}QIQ", name)
        if 0 in dims:
            raise ModelError(f"{self._path}: tensor {name} has shape {dims[::-1]}: it is empty")
        return name, tuple(dims[::-1]), kind, offset

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _FORMATS:
            (value,) = self._unpack(_FORMATS[kind], key)
            return value
        name = shown(key)[1:-1]
        if kind != _ARRAY:
            raise ModelError(f"{self._path}: {name} is of type {kind}, which GGUF does not have")
        kind, length = self._unpack("IQ", key)
        if kind != _STRING and kind not in _FORMATS:
            raise ModelError(f"{self._path}: {name} is an array of type {kind}; octavo reads none")
        width = 8 if kind == _STRING else struct.calcsize(f"<{_FORMATS[kind]}")
        if length > MAX_ARRAY_LENGTH:
            raise ModelError(
                f"{self._path}: {name} has {length:,} elements; octavo reads {MAX_ARRAY_LENGTH:,}"
            )
        self._check_count(length, width, f"elements of {name}")
        if kind == _STRING:
            return [self._string(key) for _ in range(length)]
        return list(self._unpack(f"{length}{_FORMATS[kind]}", key))

    def _string(self, what: str, limit: int | None = None) -> str:
        (length,) = self._unpack("Q", what)
        begin, end = self._at, self._at + length
        if limit is not None and length > limit:
            raise ModelError(
                f"{self._path}: {shown(what)[1:-1]} has {length:,} bytes; at most {limit:,} are "
                "allowed"
            )
        if end > self._size:
            raise ModelError(
                f"{self._path}: {shown(what)[1:-1]} has {length:,} bytes, and "
                f"{self._size - begin:,} are left in the file"
            )
        self._at = end
        try:
            return str(self._data[begin:end], "utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._path}: {shown(what)[1:-1]} is not UTF-8 ({error})") from error

    def _unpack(self, layout: str, what: str) -> tuple[Any, ...]:
        layout = f"<{layout}"
        begin, self._at = self._at, self._at + struct.calcsize(layout)
        if self._at > self._size:
            raise ModelError(
                f"{self._path} is truncated: {shown(what)[1:-1]} ends at byte {self._at:,} of "
                f"{self._size:,}"
            )
        return struct.unpack_from(layout, self._data, begin)

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        left = self._size - self._at
        if count * least_bytes > left:
            raise ModelError(
                f"{self._path} says that it has {count:,} {what}, which take at least "
                f"{count * least_bytes:,} bytes; {left:,} are left in the file"
            )


def tensor_types(path: Path | str) -> dict[int, tuple[str, int, int]]:
    """Number -> name, values in a block, and bytes of a block.

    Raises ModelError if the gguf package is not installed.
    """
    try:
        from gguf.constants import GGML_QUANT_SIZES
    except ImportError as error:
        raise ModelError(
            f"{path}: reading GGUF files takes the gguf package: pip install 'octavo[gguf]'"
        ) from error
    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
