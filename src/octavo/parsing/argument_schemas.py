"""What the JSON schema of a tool says of single arguments, for notations that write them one by one
and without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

# What is looked at of each argument, of which a schema may have many. More counts as unknown.
MAX_ALTERNATIVES = 64
MAX_LISTED = 512  # values

_DEFINITIONS = ("$defs", "definitions")
_ALTERNATIVES = ("anyOf", "oneOf", "allOf")
# Keywords that say more of a string than its type does.
_OF_STRINGS = ("pattern", "format", "minLength", "maxLength", "enum")
_VALUES_OF_TYPES: Mapping[str, list[Any]] = {"null": [None], "boolean": [True, False]}
_INDEX = re.compile(r"[0-9]{1,9}")  # of a list, in a reference


def properties_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schemas of an object's properties, each with the definitions that it may refer to."""
    found = _of_object(schema, "properties")
    if not isinstance(found, dict):
        return {}
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    return {
        name: {**definitions, **each} if isinstance(each, dict) and _refers(each) else each
        for name, each in found.items()
    }


def required_of(schema: Mapping[str, Any]) -> list[Any]:
    """The names of the properties that an object must have."""
    found = _of_object(schema, "required")
    return found if isinstance(found, list) else []


def types_of(schema: object) -> list[str]:
    """The types that a schema names, in its order; [] if it does not say."""
    return list(dict.fromkeys(kind for each in _alternatives(schema) for kind in _own_types(each)))


def listed_values(schema: object) -> dict[str, Any]:
    """The values that a schema lists, by how they are written: strings as they are, others as JSON.
    {} if there are others than those that it lists, or more than MAX_LISTED."""
    found: dict[str, Any] = {}
    num_values = 0
    for each in _alternatives(schema):
        if _is_choice(each):
            continue
        values = _own_values(each)
        num_values += len(values)
        if not values or num_values > MAX_LISTED:
            return {}
        for value in values:
            written = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found.setdefault(written, value)
    return found


def may_be_text(schema: object) -> bool:
    """Whether a value may be a string. What is no schema is none."""
    if isinstance(schema, bool):
        return schema
    for each in _alternatives(schema):
        if _is_choice(each):
            continue
        kinds = _own_types(each)
        if "string" in kinds or not (kinds or _own_values(each)):
            return True
        if not kinds and any(isinstance(value, str) for value in _own_values(each)):
            return True
    return False


def limits_of_strings(schema: object) -> list[str]:
    """The keywords by which a schema limits its strings."""
    used = {name for each in _alternatives(schema) for name in _OF_STRINGS if name in each}
    return [name for name in _OF_STRINGS if name in used]


def pointed_at(root: object, reference: str) -> object:
    """What a reference within a schema, such as "#/$defs/a", points at; None if it is not found."""
    if not reference.startswith("#"):
        return None
    found = root
    for part in reference[1:].strip("/").split("/") if len(reference) > 1 else ():
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return None
    return found


def _of_object(schema: Mapping[str, Any], keyword: str) -> object:
    """A keyword of an object's schema, which may be a reference to that."""
    found = _target(schema, schema)
    return found.get(keyword) if isinstance(found, Mapping) else None


def _alternatives(schema: object) -> Iterator[dict[str, Any]]:
    """A schema, and those that it names as alternatives of it or refers to, each once, in their
    order. One that lists its values has no others. If there are too many, the last one says
    nothing."""
    pending, seen = [schema], set[str]()
    for number in count(1):
        if not pending:
            return
        each = pending.pop() if number <= MAX_ALTERNATIVES else {}
        if not isinstance(each, dict):
            continue
        yield each
        if number > MAX_ALTERNATIVES:
            return
        if "enum" in each or "const" in each:
            continue
        reference = each.get("$ref")
        if isinstance(reference, str) and reference not in seen:
            seen.add(reference)
            pending.append(_target(schema, each))
        for name in _ALTERNATIVES:
            options = each.get(name)
            if isinstance(options, list):
                pending += reversed(options[:MAX_ALTERNATIVES])


def _is_choice(schema: Mapping[str, Any]) -> bool:
    """Whether it says nothing but which other schemas a value fits, one of which suffices."""
    if _own_types(schema) or _own_values(schema):
        return False
    several = schema.get("allOf")
    if isinstance(several, list) and len(several) > 1:
        return False
    return any(schema.get(name) for name in ("$ref", *_ALTERNATIVES))


def _own_types(schema: Mapping[str, Any]) -> list[str]:
    declared = schema.get("type")
    kinds = list(declared) if isinstance(declared, list) else [declared]
    if declared is None and "properties" in schema:
        kinds = ["object"]
    elif declared is None and "items" in schema:
        kinds = ["array"]
    if schema.get("nullable"):
        kinds.append("null")
    return [each for each in kinds if isinstance(each, str)]


def _own_values(schema: Mapping[str, Any]) -> list[Any]:
    """The values that it lists; [] if it lists none."""
    if isinstance(schema.get("enum"), list):
        values: list[Any] = schema["enum"]
        return values
    if "const" in schema:
        return [schema["const"]]
    kind = schema.get("type")
    return _VALUES_OF_TYPES.get(kind, []) if isinstance(kind, str) else []


def _target(root: object, schema: object) -> object:
    """What the reference of a schema within `root` points at, the schema itself if it has none;
    None if that is not found."""
    found, seen = schema, set[str]()
    while isinstance(found, Mapping) and isinstance(reference := found.get("$ref"), str):
        if reference in seen or not reference.startswith("#/"):
            return None
        seen.add(reference)
        found = pointed_at(root, reference)
    return found


def _refers(value: object) -> bool:
    """Whether there is a reference in a schema."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            if "$ref" in each:
                return True
            pending += each.values()
        elif isinstance(each, list):
            pending += each
    return False
