"""The OpenAPI description: from the same structures that bodies are decoded into."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo import __version__
from octavo.server.api.errors import ErrorReply
from octavo.server.api.requests import EXACTLY, REQUIRED

REF = "#/components/schemas/{name}"
ERRORS = {
    400: "A field is wrong, and `param` names it.",
    401: "A valid API key is needed.",
    403: "The request calls the server by a name that is not its own.",
    404: "There is no such model, prefix or endpoint.",
    413: "The body is too large.",
    429: "Too many requests wait already; Retry-After says when to try again.",
    500: "The engine failed, or the server has a bug.",
    503: "The server starts, stops, or has no engine.",
}
DESCRIPTION = """octavo serves large language models with PagedAttention.

Bodies are JSON. Every field is honoured, or refused with a 400 that names it. All errors have one
shape: `{"error": {"message", "type", "param", "code"}}`."""

# Of the 422 that octavo never sends.
FASTAPI_OWN = ("HTTPValidationError", "ValidationError")

_structures: dict[str, type] = {}


def documented(
    body: type | None, reply: type, *, streams: type | None = None, status: int = 200
) -> dict[str, Any]:
    """Arguments of a route: what it takes and gives. `streams`: the events it may send instead."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(reply)}}
    if streams is not None:
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-event": _ref(streams)}
    responses = {status: {"description": "Done.", "content": content}}
    extra: dict[str, Any] = {}
    if body is not None:
        schema = {"application/json": {"schema": _ref(body)}}
        extra["requestBody"] = {"required": True, "content": schema}
    return {"responses": responses, "status_code": status, "openapi_extra": extra}


def describe(app: FastAPI, needs_key: bool) -> dict[str, Any]:
    """The whole description, for /openapi.json."""
    whole = get_openapi(
        title="octavo", version=__version__, description=DESCRIPTION, routes=app.routes
    )
    content = {"application/json": {"schema": _ref(ErrorReply)}}
    errors = {str(code): {"description": text, "content": content} for code, text in ERRORS.items()}
    for methods in whole["paths"].values():
        for operation in methods.values():
            # FastAPI announces it for every path parameter; octavo never sends it.
            operation["responses"].pop("422", None)
            operation["responses"] |= errors
    components = whole.setdefault("components", {})
    own = components.get("schemas", {})
    components["schemas"] = {k: v for k, v in own.items() if k not in FASTAPI_OWN} | _schemas()
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        whole["security"] = [{"key": []}]
        for path in ("/health", "/version"):
            whole["paths"][path]["get"]["security"] = []
    return whole


def _ref(structure: type) -> dict[str, str]:
    _structures[structure.__name__] = structure
    return {"$ref": REF.format(name=structure.__name__)}


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_structures.values(), ref_template=REF)
    for schema in schemas.values():
        fields = {name: field for name, field in schema.get("properties", {}).items() if field}
        for name, field in fields.items():
            if REQUIRED in field:
                fields[name] = {"description": field["description"], **field[REQUIRED]}
                schema["required"].append(name)
            elif EXACTLY in field:
                kept = {key: field[key] for key in ("description", "default") if key in field}
                fields[name] = {**kept, "anyOf": field[EXACTLY]}
        if fields:
            schema["properties"] = fields  # without those that may hold anything: they are refused
    return schemas
