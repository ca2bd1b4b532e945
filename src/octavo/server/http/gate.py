"""What every request passes first: request id, API key, host, size of the body. And what answers
exceptions that no endpoint handles.

Plain ASGI middleware, because every piece of a stream passes it, too.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.http.settings import ServerSettings

OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
UPLOAD_PATH = "/v1/files"
LARGEST_FORM = 65_536  # bytes, without the file
ADMIN_PATHS = ("/admin/", "/abort_requests", "/reset_prefix_cache")  # and what begins so
# The key of a scope under which code in this process names the tenant that it asks for; no request
# from outside can set it.
TENANT = "octavo.tenant"
PORT = re.compile(r":[0-9]+$")
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")

logger = logging.getLogger("octavo.server.requests")


class Gate:
    """Middleware: authentication, limits, request ids, and an answer to any exception."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        passage = _Passage(scope, receive, send, self._max_bytes(scope))
        try:
            self._admit(scope)
            await self._app(scope, passage.receive, passage.send)
        except Exception as error:
            await passage.fail(as_api_error(error))
        if self._settings.log_requests:
            passage.log()

    def _admit(self, scope: Scope) -> None:
        """Note the tenant; nothing is asked of code in this process.

        ApiError 400 if it is not clear which host is meant, 403 if it is not this one, 401 without
        a valid key, 413 if the body is too long.
        """
        if TENANT in scope:
            scope["state"]["tenant"] = scope[TENANT]
            return
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (not hosts and scope["http_version"] == "1.1"):
            raise ApiError(
                400, f"{len(hosts)} Host headers; HTTP/1.1 needs exactly one", code="invalid_http"
            )
        self._check_host(hosts[0] if hosts else "")
        keys = self._settings.api_keys
        if scope["path"].startswith(ADMIN_PATHS) and self._settings.admin_keys:
            keys = self._settings.admin_keys
        authorization = headers.get("authorization")
        if authorization is None and "x-api-key" in headers:  # as Anthropic's clients send it
            authorization = f"Bearer {headers['x-api-key']}"
        tenant = keys.tenant(authorization)
        if tenant is None and scope["path"] not in OPEN_PATHS:
            # A browser asks its user for the key if it is offered Basic; other clients use Bearer.
            wants_page = "text/html" in headers.get("accept", "")
            raise ApiError(
                401,
                "a valid API key is needed: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"www-authenticate": 'Basic realm="octavo"' if wants_page else "Bearer"},
            )
        scope["state"]["tenant"] = tenant
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_bytes(scope):
            raise too_large(self._max_bytes(scope))

    def _max_bytes(self, scope: Scope) -> int:
        """The largest body; a form with a file is a little larger than the file."""
        if scope["path"] == UPLOAD_PATH:
            return self._settings.max_file_bytes + LARGEST_FORM
        return self._settings.max_body_bytes

    def _check_host(self, given: str) -> None:
        """A page from elsewhere may have its own name resolved to this machine (DNS rebinding): its
        requests then look like those of our own pages, but for the Host header."""
        allowed = self._settings.allowed_hosts
        host = PORT.sub("", given).lower()
        if allowed and host not in allowed:
            raise ApiError(
                403,
                f"this server is not called {host!r}, but {', '.join(allowed)}; "
                "start it with --allowed-host to add a name, or with an API key",
                code="unknown_host",
            )


class _Passage:
    """One request between the client and the application."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, max_body_bytes: int) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._max_body_bytes = max_body_bytes
        self._num_body_bytes = 0
        self._status: int | None = None
        self._start = time.monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        # A body may bring another one.
        scope.setdefault("state", {})["request_id"] = request_id

    async def receive(self) -> Message:
        message = await self._receive()
        self._num_body_bytes += len(message.get("body", b""))
        if self._num_body_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            MutableHeaders(scope=message)["x-request-id"] = self._scope["state"]["request_id"]
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Answer with `error`; if the answer has begun, the connection is closed by uvicorn."""
        if self._status is None:
            await error.response()(self._scope, self._receive, self.send)

    def log(self) -> None:
        logger.info(
            "request",
            extra={
                "request_id": self._scope["state"]["request_id"],
                "method": self._scope.get("method"),
                "path": self._scope["path"],
                "status": self._status,
                "seconds": round(time.monotonic() - self._start, 6),
                **self._scope["state"].get("log", {}),
            },
        )


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
