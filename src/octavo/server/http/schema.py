"""The OpenAPI description, from the models that validate bodies and those that replies are."""

from __future__ import annotations

import json
import shlex
import textwrap
from pprint import pformat
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, models_json_schema

from octavo import __version__
from octavo.server.http.errors import ErrorReply
from octavo.server.http.gate import OPEN_PATHS

REF = "#/components/schemas/{model}"
ERRORS = {
    400: "A field is wrong, and `param` names it.",
    401: "A valid API key is needed.",
    403: "The request calls the server by a name that is not its own.",
    404: "There is no such model, prefix or endpoint.",
    409: "Replicas are being drained already.",
    413: "The body is too large.",
    429: "Too many requests wait already; Retry-After says when to try again.",
    500: "The engine failed, or the server has a bug.",
    503: "The server starts, stops, or has no engine.",
}
EXAMPLE_ORIGIN = "http://localhost:8000"  # /docs puts its own in its place
PREFIX_EXAMPLE = {
    "prefix": "Once upon a time there was a little girl who lived with her mother in a small house "
    "at the edge of a big forest. Every morning she went to the well and brought home some water.",
    "name": "story",
}
DESCRIPTION = """octavo serves large language models with PagedAttention.

Bodies are JSON. Every field is honoured, or refused with a 400 that names it. All errors have one
shape: `{"type": "error", "error": {"message", "type", "param", "code"}}`."""

# FastAPI's schemas for the 422 response, which octavo never sends.
FASTAPI_OWN = ("HTTPValidationError", "ValidationError")

# By their names in the description; filled as routes are declared.
_described: dict[str, type] = {}


def documented(
    body: type | None,
    reply: type,
    *,
    example: dict[str, Any] | None = None,
    form: dict[str, str] | None = None,
    streams: type | None = None,
    status: int = 200,
) -> dict[str, Any]:
    """The arguments of a route that describe what it takes and gives.

    Args:
        body: the pydantic model of its requests; None: they have no body.
        reply: the msgspec structure or dataclass of its replies; bytes: they are a file.
        example: a body that any model of the server answers.
        form: the fields of a form that is sent instead of a body; "@NAME" is a file.
        streams: the structure of the events that it may send instead of `reply`.
        status: of its replies.
    """
    content: dict[str, Any] = {
        "application/octet-stream": {"schema": {"type": "string", "format": "binary"}}
    }
    if reply is not bytes:
        content = {"application/json": {"schema": _ref(reply)}}
    if streams is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": _ref(streams)}
    responses = {status: {"description": "Done.", "content": content}}
    extra: dict[str, Any] = {}
    if body is not None:
        content = {"application/json": {"schema": _ref(body), "example": example}}
        extra["requestBody"] = {"required": True, "content": content}
    if form is not None:
        fields = {
            name: {"type": "string"} | ({"format": "binary"} if value[:1] == "@" else {})
            for name, value in form.items()
        }
        schema = {"type": "object", "properties": fields, "required": list(form)}
        content = {"multipart/form-data": {"schema": schema, "example": form}}
        extra["requestBody"] = {"required": True, "content": content}
    return {"responses": responses, "status_code": status, "openapi_extra": extra}


def describe(app: FastAPI, model_name: str, needs_key: bool) -> dict[str, Any]:
    """The whole description, for /openapi.json. `model_name`: one that the server answers to."""
    whole = get_openapi(
        title="octavo", version=__version__, description=DESCRIPTION, routes=app.routes
    )
    reply = {"application/json": {"schema": _ref(ErrorReply)}}
    errors = {str(code): {"description": text, "content": reply} for code, text in ERRORS.items()}
    path_examples = {
        "model": model_name,
        "name": PREFIX_EXAMPLE["name"],
        "request_id": "my-request",
        "response_id": "resp_my-request",
        "file_id": "file-ID",
        "batch_id": "batch-ID",
        "fork_id": "fork-my-request",
        "index": "0",
    }
    for path, methods in whole["paths"].items():
        for method, operation in methods.items():
            # FastAPI announces it for every path parameter; octavo never sends it.
            operation["responses"].pop("422", None)
            operation["responses"] |= errors
            url = f"{EXAMPLE_ORIGIN}{path.format_map(path_examples)}"
            content = operation.get("requestBody", {}).get("content", {})
            body = content.get("application/json", {}).get("example")
            form = content.get("multipart/form-data", {}).get("example")
            has_key = needs_key and path not in OPEN_PATHS
            example = method, url, body, form, has_key
            operation["x-codeSamples"] = [
                {"lang": "Shell", "label": "curl", "source": _curl(*example)},
                {"lang": "Python", "label": "Python", "source": _python(*example)},
            ]
    components = whole.setdefault("components", {})
    own = components.get("schemas", {})
    components["schemas"] = {k: v for k, v in own.items() if k not in FASTAPI_OWN} | _schemas()
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
        for path in OPEN_PATHS:
            for operation in whole["paths"][path].values():
                operation["security"] = []
    return whole


def _curl(
    method: str,
    url: str,
    body: dict[str, Any] | None,
    form: dict[str, str] | None,
    has_key: bool,
) -> str:
    """A command line that asks for an example."""
    words = ["curl", url]
    if method != ("get" if body is form is None else "post"):  # which curl chooses by itself
        words[1:1] = ["-X", method.upper()]
    if has_key:
        words += ["-H", "Authorization: Bearer KEY"]
    if body is not None:
        words += ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    for name, value in (form or {}).items():
        words += ["-F", f"{name}={value}"]
    return shlex.join(words)


def _python(
    method: str,
    url: str,
    body: dict[str, Any] | None,
    form: dict[str, str] | None,
    has_key: bool,
) -> str:
    """A program that asks for an example."""
    arguments = [repr(url)]
    if has_key:
        arguments.append(f"headers={ {'Authorization': 'Bearer KEY'} }")
    if body is not None:
        arguments.append(f"json={pformat(body, sort_dicts=False)}")
    if form is not None:
        texts = {name: value for name, value in form.items() if value[:1] != "@"}
        files = (f'{name!r}: open({v[1:]!r}, "rb")' for name, v in form.items() if v[:1] == "@")
        arguments += [f"data={texts}", f"files={{{', '.join(files)}}}"]
    call = ",\n".join(textwrap.indent(each, "    ") for each in [*arguments, "timeout=60"])
    lines = ["import httpx", "", f"reply = httpx.{method}(\n{call},\n)", "print(reply.text)"]
    return "\n".join(lines)


def _ref(kind: type) -> dict[str, str]:
    known = _described.setdefault(kind.__name__, kind)
    if known is not kind:
        raise ValueError(f"{known} and {kind} have one name in the API's description")
    return {"$ref": REF.format(model=kind.__name__)}


def _schemas() -> dict[str, Any]:
    kinds = _described.values()
    bodies = [kind for kind in kinds if issubclass(kind, BaseModel)]
    replies = [kind for kind in kinds if not issubclass(kind, BaseModel)]
    _, of_bodies = models_json_schema(
        [(kind, "validation") for kind in bodies],
        ref_template=REF,
        schema_generator=_WithoutFieldTitles,
    )
    _, of_replies = msgspec.json.schema_components(
        replies, ref_template=REF.replace("{model}", "{name}")
    )
    return {**of_bodies["$defs"], **of_replies}


class _WithoutFieldTitles(GenerateJsonSchema):
    """pydantic gives each field its own name as a title, too."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False
