"""Forms with a file (RFC 7578), of which the file's bytes go to disk as they come."""

from __future__ import annotations

import logging
from pathlib import Path
from types import TracebackType

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from octavo.server.http.errors import ApiError, refused
from octavo.server.http.gate import too_large

MAX_HEADERS = 16  # of a part
MAX_HEADER = 4_096  # bytes, of a part's header
MAX_VALUE = 256  # bytes, of a field that is no file
MAX_FILENAME = 255  # characters

# It has a line for each broken form; the reply says what is wrong.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


class Upload:
    """Reads a form with the field `file` and others of text, piece by piece.

    What is wrong with a form is known by `finish`, so that a client that sends all of its form
    before it reads a reply gets one. Nothing is written once that is known.
    """

    def __init__(self, content_type: str, path: Path, max_bytes: int, names: set[str]) -> None:
        """
        Args:
            content_type: the header of the request.
            path: where the file is written, while this object is used as a context manager.
            max_bytes: of the file.
            names: the fields of text; the form has each of them once.

        Raises:
            ApiError: the body is no form with files.
        """
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise refused("Content-Type", f"{content_type[:64]} is not multipart/form-data")
        self.filename = ""
        self.values: dict[str, str] = {}
        self._path = path
        self._max_bytes = max_bytes
        self._names = names
        self._error: ApiError | None = None
        self._is_over = False
        self._num_bytes = 0
        self._parts: dict[str, bytearray] = {}  # the file's stays empty
        self._name = ""  # of the present part
        self._header = bytearray()
        self._header_value = bytearray()
        self._disposition = b""
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._begin_part,
                    "on_header_field": self._take_header_name,
                    "on_header_value": self._take_header_value,
                    "on_header_end": self._end_header,
                    "on_headers_finished": self._end_headers,
                    "on_part_data": self._take_data,
                    "on_end": self._end,
                },
                max_header_count=MAX_HEADERS,
                max_header_size=MAX_HEADER,
            )
        except FormParserError as error:
            raise refused("Content-Type", str(error)) from None

    def __enter__(self) -> Upload:
        self._file = self._path.open("wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()

    def feed(self, chunk: bytes) -> None:
        """Take in the next bytes of the body. Raises OSError if they cannot be written."""
        if self._error is None and not self._is_over:
            try:
                self._parser.write(chunk)
            except FormParserError as error:
                self._error = refused("body", f"the form is broken: {error}")
            except ApiError as error:
                self._error = error

    def finish(self) -> None:
        """The body is over. Raises ApiError if the form is not as it should be, and OSError if the
        file cannot be written."""
        if self._error is not None:
            raise self._error
        if not self._is_over:
            raise refused("body", "the form is broken: it has no end")
        for name in ("file", *sorted(self._names)):
            if name not in self._parts:
                raise ApiError(400, f"{name}: it is missing", name, "missing_field")
        self.values = {name: self._parts[name].decode(errors="replace") for name in self._names}
        self._file.flush()

    # ---------------------------------------------------------------- what the parser calls

    def _begin_part(self) -> None:
        self._disposition = b""

    def _take_header_name(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _take_header_value(self, data: bytes, start: int, end: int) -> None:
        self._header_value += data[start:end]

    def _end_header(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = bytes(self._header_value)
        self._header.clear()
        self._header_value.clear()

    def _end_headers(self) -> None:
        _, options = parse_options_header(self._disposition.decode("latin-1"))
        if b"name" not in options:
            raise refused("body", "the form is broken: a part has no name")
        name = self._name = options[b"name"].decode(errors="replace")[:64]
        if name != "file" and name not in self._names:
            raise refused(name, "there is no such field", "unknown_field")
        if name in self._parts:
            raise refused(name, "it is given twice")
        self._parts[name] = bytearray()
        if name == "file":
            if b"filename" not in options:
                raise refused("file", "it is not a file; send it with a filename")
            self.filename = options[b"filename"].decode(errors="replace")[:MAX_FILENAME]

    def _take_data(self, data: bytes, start: int, end: int) -> None:
        if self._name == "file":
            self._num_bytes += end - start
            if self._num_bytes > self._max_bytes:
                raise too_large(self._max_bytes)
            self._file.write(memoryview(data)[start:end])
            return
        value = self._parts[self._name]
        value += data[start:end]
        if len(value) > MAX_VALUE:
            raise refused(self._name, f"it has more than {MAX_VALUE} bytes")

    def _end(self) -> None:
        self._is_over = True
