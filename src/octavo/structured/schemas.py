"""What a JSON schema says about itself: whether any value fits it, and where a keyword stands."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Mapping, Set
from decimal import Decimal
from typing import Any, TypeGuard

from octavo.parsing.argument_schemas import pointed_at

MAX_DEPTH = 100  # of a schema, in JSON values
MAX_OPTIONAL = 1_024  # properties of an object, each of which the library follows at its beginning
MAX_LOOKS = 100_000  # at schemas, to find out whether values end; about a tenth of a second
ALL_EXACT = 2**53  # whole numbers that are less are all doubles
END_OF_INTEGERS = 2**63  # the library writes none beyond 64 bits where the type is "integer"

# Keywords whose values are schemas, lists of schemas, or mappings from names to schemas.
_ONE = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def refusal(schema: object) -> str | None:
    """Why outputs cannot be made to keep to a schema, as far as the library does not say so: it
    is none, allows nothing, is nested too deeply, counts names that may repeat, has too many that
    may be left out, or each of its values would contain another one of the same kind, without
    end."""
    if not isinstance(schema, dict | bool):
        return "a schema must be an object or boolean"
    if schema is False:
        return "false allows no value"
    if _depth_exceeds(schema, MAX_DEPTH):
        return f"it is nested more than {MAX_DEPTH} levels deep"
    for path, each in _subschemas(schema):
        least, required = each.get("minProperties"), _list(each, "required")
        is_closed = each.get("additionalProperties") is False and "patternProperties" not in each
        if isinstance(least, int | float) and least > len(required) and not is_closed:
            return f"{path}: minProperties: the same name could be written more than once"
        num_optional = len(_mapping(each, "properties").keys() - set(map(str, required)))
        if num_optional > MAX_OPTIONAL:
            return f"{path}: {num_optional} optional properties are more than {MAX_OPTIONAL}"
    if not _Endings(schema).has_end(schema):
        return "it recurses without end: each of its values must contain another one"
    return None


def refusal_of_numbers(schema: object) -> str | None:
    """The first keyword with a number that would come out as another one: the library knows
    numbers as doubles, and integers of 64 bits."""
    return next((f"{path}: {name}: {why}" for path, _, name, why in _lost_numbers(schema)), None)


def leave_lost_numbers_aside(schema: object) -> None:
    """Remove from a schema the keywords that refusal_of_numbers speaks of."""
    for _, each, name, _ in list(_lost_numbers(schema)):
        del each[name]


def patterns_of(schema: object) -> set[str]:
    """All patterns of strings in a schema."""
    found = (each.get("pattern") for _, each in _subschemas(schema))
    return {pattern for pattern in found if isinstance(pattern, str)}


def leave_patterns_aside(schema: object, patterns: Set[str]) -> None:
    """Remove these patterns from a schema."""
    for _, each in _subschemas(schema):
        pattern = each.get("pattern")
        if isinstance(pattern, str) and pattern in patterns:
            del each["pattern"]


def place_of(schema: object, message: str) -> str:
    """Where the first keyword that a message quotes stands, as "#/properties/a: "; "" if none of
    them is found."""
    names = set(re.findall(r'"([^"\s]+)"', message))
    for path, each in _subschemas(schema):
        if not names.isdisjoint(each):
            return f"{path}: "
    return ""


def move_excluded_bounds(schema: object) -> None:
    """Change a schema in place so that llguidance keeps to its excluded bounds.

    It allows a whole number that is excluded (`"exclusiveMinimum": 0`) if the other bound is less
    than 1 away. Such a bound is replaced by one that is allowed, a millionth of the way to the
    other: what lies between them is lost, and nothing is allowed that should not be.
    """
    for _, each in _subschemas(schema):
        for own, other, towards in (("Minimum", "Maximum", max), ("Maximum", "Minimum", min)):
            bound, allowed = each.get(f"exclusive{own}"), own.lower()
            for end in (each.get(other.lower()), each.get(f"exclusive{other}")):
                if not (_is_bound(bound) and _is_bound(end) and abs(end - bound) < 1):
                    continue
                moved = bound + (end - bound) * 1e-6
                if bound == int(bound) and moved != bound:
                    each[allowed] = towards(each.get(allowed, moved), moved)


def move_large_bounds(schema: object) -> None:
    """Change a schema in place so that llguidance, which reads them as doubles, keeps to its
    large bounds.

    A bound is replaced by the next number towards the inside that is a double and is written with
    digits that are inside, too: what lies between them is lost.
    """
    for _, each in _subschemas(schema):
        for name, own, inside, bound in list(_large_bounds(each)):
            del each[name]
            tighter = max if inside > 0 else min
            each[own] = tighter(each.get(own, bound), bound)


def _lost_numbers(schema: object) -> Iterator[tuple[str, dict[str, Any], str, str]]:
    """Keywords whose numbers come out as others: their place, schema and name, and why."""
    for path, each in _subschemas(schema):
        for name in ("const", "enum"):
            number = next(filter(_is_rounded, _numbers(each.get(name))), None)
            if number is not None:
                yield path, each, name, f"{_short(number)} has more digits than are kept"
        kinds = each.get("type")
        if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds):
            for name, _, inside, bound in _large_bounds(each):
                if bound >= END_OF_INTEGERS if inside > 0 else bound < -END_OF_INTEGERS:
                    why = f"no integer of 64 bits is beyond {_short(each[name])}"
                    yield path, each, name, why


def _large_bounds(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, int, float]]:
    """Bounds that a double may miss: their name and that of the bound that is allowed itself, on
    which side of it numbers are, and the double there that is nearest to it."""
    for own, inside in (("minimum", 1), ("maximum", -1)):
        excluded = f"exclusive{own.capitalize()}"
        for name in (own, excluded):
            bound = schema.get(name)
            if _is_number(bound) and ALL_EXACT <= abs(bound) <= sys.float_info.max / 2:
                whole = int(bound) + (inside if name == excluded else 0)
                yield name, own, inside, _double_inside(whole, inside)


def _double_inside(bound: int, inside: int) -> float:
    found = float(bound)
    while (int(found) - bound) * inside < 0 or (_written(found) - bound) * inside < 0:
        found = math.nextafter(found, inside * math.inf)
    return found


def _written(number: float) -> int:
    """What the fewest digits stand for that tell a large double from others."""
    return int(Decimal(repr(number)))


def _is_rounded(number: int) -> bool:
    if abs(number) < ALL_EXACT:
        return False
    return abs(number) > sys.float_info.max or _written(float(number)) != number


def _numbers(value: object) -> Iterator[int]:
    """The whole numbers in a JSON value."""
    if isinstance(value, int):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _numbers(each)


def _short(number: float) -> str:
    text = str(number)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _is_bound(value: object) -> TypeGuard[float]:
    """Whether it is a number, and not a very large one."""
    return _is_number(value) and abs(value) < 1e9


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _depth_exceeds(value: object, limit: int) -> bool:
    level: list[Any] = [value]
    for _ in range(limit):
        nested = [each for each in level if isinstance(each, dict | list)]
        level = [v for each in nested for v in (each.values() if isinstance(each, dict) else each)]
        if not level:
            return False
    return True


def _subschemas(schema: object, path: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within a schema, itself first, with their places."""
    if not isinstance(schema, dict):
        return
    yield path, schema
    for name in _ONE:
        yield from _subschemas(schema.get(name), f"{path}/{name}")
    for name in _SEVERAL:
        parts = schema.get(name)
        for i, each in enumerate(parts if isinstance(parts, list) else ()):
            yield from _subschemas(each, f"{path}/{name}/{i}")
    for name in _NAMED:
        parts = schema.get(name)
        for key, each in parts.items() if isinstance(parts, dict) else ():
            yield from _subschemas(each, f"{path}/{name}/{key}")


class _Endings:
    """Which schemas have values of finite size, by what must be in them: the least solution, found
    by looking at all references again until nothing changes. After MAX_LOOKS all that is not known
    to end counts as if it did."""

    def __init__(self, root: object) -> None:
        self._num_looks = 0
        self._ending: set[str] = set()  # references to schemas with finite values
        targets = {
            each["$ref"]: pointed_at(root, each["$ref"])
            for _, each in _subschemas(root)
            if isinstance(each.get("$ref"), str)
        }
        open_names = list(targets)
        while open_names:
            for name in open_names:
                if targets[name] is None or self.has_end(targets[name]):
                    self._ending.add(name)
            left = [name for name in reversed(open_names) if name not in self._ending]
            if len(left) == len(open_names):
                return
            open_names = left

    def has_end(self, schema: object) -> bool:
        """Whether a value of finite size fits, as far as that is known."""
        self._num_looks += 1
        if self._num_looks > MAX_LOOKS:
            return True
        if not isinstance(schema, dict) or "enum" in schema or "const" in schema:
            return True
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._ending:
            return False
        if not all(map(self.has_end, _list(schema, "allOf"))):
            return False
        for name in ("anyOf", "oneOf"):
            options = _list(schema, name)
            if options and not any(map(self.has_end, options)):
                return False
        kinds = schema.get("type")
        if isinstance(kinds, list) and any(each not in ("object", "array") for each in kinds):
            return True
        is_object = kinds == "object" or kinds == ["object"]
        is_array = kinds == "array" or kinds == ["array"]
        if is_object:
            members = _mapping(schema, "properties")
            return all(
                self.has_end(members.get(name))
                for name in _list(schema, "required")
                if isinstance(name, str)
            )
        if is_array:
            first, least = _list(schema, "prefixItems"), schema.get("minItems", 0)
            least = least if isinstance(least, int | float) else 0
            needed = [*first[: int(least)], *([schema.get("items")] if least > len(first) else [])]
            return all(map(self.has_end, needed))
        return True


def _list(schema: Mapping[str, Any], name: str) -> list[Any]:
    value = schema.get(name)
    return value if isinstance(value, list) else []


def _mapping(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = schema.get(name)
    return value if isinstance(value, dict) else {}
