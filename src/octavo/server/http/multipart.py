"""Forms with files (RFC 7578): a body goes to disk as it comes, and its parts are found there."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from email.parser import BytesHeaderParser
from pathlib import Path

from octavo.server.http.errors import refused

MAX_PARTS = 16
MAX_HEADERS = 4_096  # bytes, of a part
_BLANK = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form; its value lies in the body from `start` to `end`."""

    name: str
    filename: str | None
    start: int
    end: int


def boundary_of(content_type: str) -> bytes:
    """What stands between the parts. Raises ApiError if the body is no form with files."""
    header = Message()
    header["Content-Type"] = content_type
    boundary = header.get_param("boundary")
    if header.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise refused("Content-Type", f"{content_type[:64]} is not multipart/form-data")
    return b"\r\n--" + boundary.encode("ascii", "replace")


def parts_of(path: Path, boundary: bytes) -> dict[str, Part]:
    """The fields of a form that lies in a file, by their names. Raises ApiError if it is broken."""
    with path.open("rb") as file:
        if not path.stat().st_size:
            raise refused("body", "the form is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as body:
            return {part.name: part for part in _parts(body, boundary)}


def _parts(body: mmap.mmap, boundary: bytes) -> Iterator[Part]:
    # The first boundary has no line before it.
    at = 0 if body[: len(boundary) - 2] == boundary[2:] else body.find(boundary) + 2
    position = at + len(boundary) - 2
    for _ in range(MAX_PARTS + 1):
        if body[position : position + 2] == b"--":
            return
        blank = body.find(_BLANK, position, position + MAX_HEADERS)
        end = body.find(boundary, max(position, blank))
        if at < 0 or blank < 0 or end < 0 or body[position : position + 2] != b"\r\n":
            raise refused("body", "the form is broken: a part has no headers or no end")
        headers = BytesHeaderParser().parsebytes(body[position + 2 : blank + len(_BLANK)])
        name = headers.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise refused("body", "the form is broken: a part has no name")
        yield Part(name[:64], headers.get_filename(), blank + len(_BLANK), end)
        position = end + len(boundary)
    raise refused("body", f"the form has more than {MAX_PARTS} parts")
