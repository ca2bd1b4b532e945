"""HTTP/1.1 as uvicorn speaks it, with a bound on what comes before a body."""

from __future__ import annotations

from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.server.api.errors import ApiError

MAX_HEAD_BYTES = 1 << 16  # of a request line and its headers, apart from the first piece of them


class BoundedHttp(HttpToolsProtocol):
    """One connection. What is no HTTP, or has no end to its headers, is refused in the one shape
    of errors; uvicorn would keep headers of any size, and ask for no key before it has them all."""

    _is_in_head = False
    _num_head_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._is_in_head
        super().data_received(data)
        if was_in_head and self._is_in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._num_head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this for what it cannot read."""
        self._refuse(400, "this is no HTTP/1.1 request")

    def _refuse(self, status: int, message: str) -> None:
        body = msgspec.json.encode(ApiError(status, message, code="invalid_http").reply)
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(body)}\r\n"
            "connection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()
