"""How clients ask for outputs of a form: `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import WithJsonSchema

from octavo.server.http.bodies import without_nulls
from octavo.server.http.errors import refused
from octavo.structured.output import StructuredOutput

MAX_NAME = 64  # characters

# Validated below: a schema is any JSON, and its keys are not ours.
ResponseFormat = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["text", "json_object", "json_schema"]},
                "json_schema": {
                    "type": "object",
                    "properties": {
                        "name": {"type": "string", "maxLength": MAX_NAME},
                        "description": {"type": ["string", "null"]},
                        "schema": {"type": ["object", "boolean"]},
                        "strict": {"type": ["boolean", "null"]},
                    },
                    "required": ["schema"],
                    "additionalProperties": {"type": "null"},
                },
            },
            "required": ["type"],
            "additionalProperties": {"type": "null"},
        }
    ),
]
StructuredOutputs = Annotated[
    dict[str, Any],
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                "json": {"type": ["object", "boolean", "string"]},
                "json_object": {"type": "boolean"},
                "regex": {"type": "string"},
                "choice": {"type": "array", "items": {"type": "string"}, "minItems": 1},
                "grammar": {"type": "string"},
            },
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        }
    ),
]

# What vLLM calls the fields of StructuredOutput.
_NAMES = {
    "json": "json_schema",
    **{name: name for name in ("json_object", "regex", "choice", "grammar")},
}


def structured_output(
    response_format: Mapping[str, Any] | None, structured_outputs: Mapping[str, Any] | None
) -> StructuredOutput | None:
    """What a body's fields ask for; None if they ask for nothing.

    Raises:
        InvalidRequest, ApiError: they are not what they should be, or contradict each other.
    """
    by_format = None if response_format is None else _of_response_format(response_format)
    if structured_outputs is None:
        return by_format
    if by_format is not None:
        raise refused("structured_outputs", "it contradicts response_format; give one of them")
    return _of_structured_outputs(structured_outputs)


def _of_response_format(value: Mapping[str, Any]) -> StructuredOutput | None:
    field = "response_format"
    given = _given(field, value, ("type", "json_schema"))
    kind = given.get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise refused(f"{field}.type", "it is not one of text, json_object, json_schema")
    if kind != "json_schema":
        if "json_schema" in given:
            raise refused(f"{field}.json_schema", f"it contradicts the type, {kind}")
        return None if kind == "text" else StructuredOutput(json_object=True, field=field)
    field = "response_format.json_schema"
    inner = given.get("json_schema")
    if not isinstance(inner, dict):
        raise refused(field, "it is not an object with a schema", "missing_field")
    parts = _given(field, inner, ("name", "description", "schema", "strict"))
    for name in ("name", "description"):
        if not isinstance(parts.get(name, ""), str):
            raise refused(f"{field}.{name}", "it is not a string")
    if len(parts.get("name", "")) > MAX_NAME:
        raise refused(f"{field}.name", f"it has more than {MAX_NAME} characters")
    if not isinstance(parts.get("strict", True), bool):
        raise refused(f"{field}.strict", "it is not true or false")
    if not isinstance(parts.get("schema"), dict | bool):
        raise refused(f"{field}.schema", "it is not a JSON schema", "missing_field")
    return StructuredOutput(json_schema=parts["schema"], field=f"{field}.schema")


def _of_structured_outputs(value: Mapping[str, Any]) -> StructuredOutput:
    field = "structured_outputs"
    given = _given(field, value, tuple(_NAMES))
    asked = {name: each for name, each in given.items() if (name, each) != ("json_object", False)}
    if len(asked) != 1:
        raise refused(field, f"it has {len(asked)} forms; give one of {', '.join(_NAMES)}")
    [(name, form)] = asked.items()
    return StructuredOutput(**{_NAMES[name]: form}, field=f"{field}.{name}")


def _given(field: str, value: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The entries that are given. Raises ApiError: there is no such field."""
    given = without_nulls(value)
    for name in given:
        if name not in names:
            shown = name[:MAX_NAME]
            raise refused(f"{field}.{shown}", "there is no such field", "unknown_field")
    return given
