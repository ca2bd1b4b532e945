"""The tools that a request offers, and which of them the model is to call."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from octavo.parsing.argument_schemas import properties_of
from octavo.server.http.bodies import FAIL_FAST
from octavo.server.http.errors import refused
from octavo.structured.output import MAX_GRAMMAR_BYTES

MAX_TOOLS = 512
MAX_NAME = 128  # characters
NAME = re.compile(r"[A-Za-z0-9_.:/-]+")

# Keywords by which a schema says itself whether there are arguments beside its properties. To one
# that does not, there are none.
_OPENINGS = {
    *("additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames"),
    *("$ref", "allOf", "anyOf", "oneOf", "dependentSchemas", "minProperties"),
}


class _Lenient(BaseModel):
    """What clients of several servers send: fields that octavo does not know are ignored."""

    model_config = ConfigDict(
        strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True
    )


class FunctionTool(_Lenient):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=MAX_NAME, pattern=f"^{NAME.pattern}$")]
    """Letters, digits and _ . : / -"""
    description: str | None = None
    """What it does, for the model."""
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments, an object."""
    strict: bool | None = None
    """Refuse a schema that cannot be enforced completely; not given: enforce what can be."""


class Tool(_Lenient):
    """A tool: a function."""

    type: Literal["function"]
    function: FunctionTool


class NamedFunction(_Lenient):
    """The function that has to be called."""

    name: Annotated[str, Field(min_length=1)]
    """One of the tools."""


class NamedTool(_Lenient):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(_Lenient):
    """Those of the tools that may be called, and whether one has to be."""

    mode: Literal["auto", "required"]
    """As if it were the whole tool_choice, and there were no other tools."""
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS), FAIL_FAST]
    """Their names; the model is shown the others, too."""


class AllowedToolChoice(_Lenient):
    """Some of the tools may be called."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), FAIL_FAST]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolChoice


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A tool that may be called.

    Attributes:
        name: of the function.
        schema: of its arguments; allows objects alone.
        is_strict: whether all of the schema must be enforced.
        field: what the client calls the schema.
        properties: the schemas of the arguments.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool
    field: str
    properties: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model knows, and what it is to do with them.

    Attributes:
        shown: all tools, as chat templates expect them.
        callable: those that may be called.
        is_required: the answer is a call.
        is_parallel: it may have several.
    """

    shown: Sequence[Mapping[str, Any]]
    callable: Sequence[CallableTool]
    is_required: bool
    is_parallel: bool

    @property
    def is_limited(self) -> bool:
        """Whether some of the tools that the model knows may not be called."""
        return len(self.callable) < len(self.shown)


def tool_use(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """What a request's fields mean together; None if no tool may be called.

    Args:
        tools: in the order of the request.
        choice: not given: "auto".
        parallel: whether several calls are allowed; not given: they are.

    Raises:
        ApiError: they contradict each other; names the field.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", "it needs tools")
        return None
    counts = Counter(each.function.name for each in tools)
    for i, each in enumerate(tools):
        if counts[each.function.name] > 1:
            raise refused(
                f"tools[{i}].function.name",
                f"{counts[each.function.name]} tools are called {each.function.name!r}",
            )
    if choice == "none":
        return None
    able = [_callable(each.function, f"tools[{i}].function") for i, each in enumerate(tools)]
    is_required, is_parallel = choice == "required", parallel is not False
    if isinstance(choice, NamedTool):
        is_required, is_parallel = True, False
        able = _named(able, {"tool_choice": choice})
    elif isinstance(choice, AllowedToolChoice):
        is_required = choice.allowed_tools.mode == "required"
        place, allowed = "tool_choice.allowed_tools.tools", choice.allowed_tools.tools
        able = _named(able, {f"{place}[{i}]": each for i, each in enumerate(allowed)})
    shown = [each.model_dump(exclude_none=True) for each in tools]
    return ToolUse(shown, able, is_required, is_parallel)


def _named(tools: Sequence[CallableTool], choices: Mapping[str, NamedTool]) -> list[CallableTool]:
    """Those of the tools that are named; `choices`: by what the client calls them."""
    known = {each.name for each in tools}
    for where, choice in choices.items():
        name = choice.function.name
        if name not in known:
            raise refused(f"{where}.function.name", f"there is no tool {name[:MAX_NAME]!r}")
    names = {each.function.name for each in choices.values()}
    return [each for each in tools if each.name in names]


def _callable(function: FunctionTool, field: str) -> CallableTool:
    where = f"{field}.parameters"
    schema = dict(function.parameters or {"properties": {}})
    if schema.setdefault("type", "object") != "object":
        raise refused(f"{where}.type", "the arguments of a function are an object")
    for name, kind in (("properties", dict), ("required", list)):
        if not isinstance(schema.get(name, kind()), kind):
            raise refused(
                f"{where}.{name}", f"it is not {'an object' if kind is dict else 'a list'}"
            )
    if "properties" in schema and _OPENINGS.isdisjoint(schema):
        schema["additionalProperties"] = False
    size = len(json.dumps(schema))
    if size > MAX_GRAMMAR_BYTES:
        raise refused(where, f"{size} bytes are more than {MAX_GRAMMAR_BYTES}")
    is_strict, properties = bool(function.strict), properties_of(schema)
    return CallableTool(function.name, schema, is_strict, where, properties)
