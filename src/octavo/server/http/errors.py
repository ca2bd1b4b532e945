"""Errors as clients see them: one shape for every status, OpenAI's and Anthropic's.

`{"type": "error", "error": {"message": ..., "type": ..., "param": ..., "code": ...}}`
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence
from http import HTTPStatus
from typing import Annotated

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from msgspec import Meta
from starlette.exceptions import HTTPException
from starlette.routing import Match

from octavo.errors import (
    EngineFailed,
    InvalidRequest,
    LogitsNotFinite,
    NoTokenLeft,
    OctavoError,
    Overloaded,
    RequestFailed,
    RequestTooLong,
    Unavailable,
    shown,
)

logger = logging.getLogger(__name__)

BAD_REQUEST = "invalid_request_error"
TYPES = {
    400: BAD_REQUEST,
    401: "authentication_error",
    404: "not_found_error",
    405: BAD_REQUEST,
    413: BAD_REQUEST,
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
# The first that fits: status and code.
REPLIES: dict[type[OctavoError], tuple[int, str]] = {
    RequestTooLong: (400, "context_length_exceeded"),
    InvalidRequest: (400, "invalid_value"),
    Overloaded: (429, "overloaded"),
    Unavailable: (503, "unavailable"),
    LogitsNotFinite: (500, "logits_not_finite"),
    NoTokenLeft: (400, "no_token_left"),
    EngineFailed: (500, "engine_failed"),
    RequestFailed: (500, "engine_failed"),
}


class ErrorDetail(msgspec.Struct):
    """What went wrong, and where."""

    message: str
    type: Annotated[str, Meta(description="The kind of error; one for each status.")]
    param: Annotated[str | None, Meta(description="The field at fault.")] = None
    code: Annotated[str | None, Meta(description="The error's name, for programs.")] = None


class ErrorReply(msgspec.Struct, tag_field="type", tag="error"):
    """Every error of every endpoint."""

    error: ErrorDetail


class ApiError(Exception):
    """An error with its HTTP status; `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.reply = ErrorReply(ErrorDetail(message, TYPES.get(status, BAD_REQUEST), param, code))
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def response(self) -> Response:
        return Response(
            msgspec.json.encode(self.reply), self.status, self.headers, "application/json"
        )


class ClientGone(ApiError):
    """The client has closed its connection. No client sees the status; it is for the log."""

    def __init__(self) -> None:
        super().__init__(499, "the client has closed the connection")


def refused(param: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, f"{param}: {message}", param, code)


def as_api_error(error: Exception) -> ApiError:
    """The reply to any exception. One that is not the client's fault is logged, and its message is
    not shown."""
    if isinstance(error, ApiError):
        return error
    for kind, (status, code) in REPLIES.items():
        if isinstance(error, kind):
            field, retry_after = getattr(error, "field", None), getattr(error, "retry_after", None)
            return ApiError(status, str(error), field, code, retry_after)
    if isinstance(error, RequestValidationError):
        return _of_parameter(error)
    if isinstance(error, HTTPException):
        return _of_http_exception(error)
    log_internal("internal error", error)
    return ApiError(500, "an internal error; the server's log has the details", code="internal")


def log_internal(what: str, error: BaseException) -> None:
    """Log an error that is not the client's fault: lines of code without the error's message, which
    may hold a piece of a prompt."""
    where = "".join(traceback.format_tb(error.__traceback__))
    logger.error("%s: %s\n%s", what, type(error).__name__, where)


def add_error_handlers(app: FastAPI, routers: Sequence[APIRouter]) -> None:
    """Give every error of `app`'s routes, which are those of `routers`, the one shape."""
    routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]

    async def handle(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 405:
            error.headers = {"Allow": ", ".join(_allowed_methods(request, routes))}
        return as_api_error(error).response()

    for kind in (ApiError, OctavoError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


def _allowed_methods(request: Request, routes: Sequence[APIRoute]) -> list[str]:
    """What the request's path can be asked with: Starlette names the methods of one route alone,
    and a path has a route for each method."""
    methods = set[str]()
    for route in routes:
        if route.matches(request.scope)[0] is Match.PARTIAL:
            methods.update(route.methods or ())
    return sorted(methods | {"HEAD"} if "GET" in methods else methods)


def _of_parameter(error: RequestValidationError) -> ApiError:
    """What FastAPI finds wrong in a path or a query; by itself it would answer 422."""
    first = error.errors()[0]
    return refused(str(first["loc"][-1]), f"{lowered(first['msg'])}, not {shown(first['input'])}")


def lowered(message: str) -> str:
    """A message of pydantic's, to stand behind a field's name."""
    return message[:1].lower() + message[1:]


def _of_http_exception(error: HTTPException) -> ApiError:
    messages = {
        404: "there is no such endpoint; /docs lists them",
        405: "the endpoint does not know this method",
    }
    message = messages.get(error.status_code, str(error.detail))
    code = HTTPStatus(error.status_code).phrase.lower().replace(" ", "_")
    return ApiError(error.status_code, message, code=code, headers=dict(error.headers or {}))
