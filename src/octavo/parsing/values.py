"""What the whole text of a region means, in the notations that a template may name."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from typing import Any

import regex

from octavo.parsing.argument_schemas import listed_values, types_of
from octavo.parsing.template import Region, placeholder

Arguments = Mapping[str, Any]
# Characters that stand for strings while the rest of a text is made JSON.
_MARKS = "\x01\x02"


class Unreadable(ValueError):
    """A text is not what its template says."""


def region_value(region: Region, body: str, captures: Mapping[str, str]) -> Any:
    """The value of a region with this text, arranged as its template says.

    `captures`: named groups of the delimiter that opened it. Raises Unreadable.
    """
    value = parsed(region.content, body, region.content_args)
    if region.transform is None:
        return value
    if not region.transform_each:
        return _arranged(region.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Unreadable("it is not a list of objects")
    return [_arranged(region.transform, {**captures, **each}) for each in value]


def parsed(kind: str, text: str, arguments: Arguments) -> Any:
    """A text in a notation. Raises Unreadable."""
    try:
        return _KINDS[kind](text, arguments)
    except (ValueError, RecursionError, SyntaxError, MemoryError) as error:  # of the parser's stack
        raise Unreadable(str(error)) from None


def _arranged(transform: Any, scope: Mapping[str, Any]) -> Any:
    if isinstance(transform, dict):
        return {name: _arranged(each, scope) for name, each in transform.items()}
    if isinstance(transform, list):
        return [_arranged(each, scope) for each in transform]
    path = placeholder(transform)
    if path is None:
        return transform
    value: Any = scope
    for name in path:
        if not isinstance(value, Mapping) or name not in value:
            raise Unreadable(f"there is no {'.'.join(path)}")
        value = value[name]
    return value


def _text(text: str, arguments: Arguments) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _json(text: str, arguments: Arguments) -> Any:
    """JSON, and what models write instead: strings in other quotes, keys without any."""
    strings: list[str] = []

    def mark(match: regex.Match[str]) -> str:
        strings.append(match[1])
        return f"{_MARKS[0]}{len(strings) - 1}{_MARKS[1]}"

    plain = text
    delimiters = arguments.get("string_delims", [])
    if delimiters and any(each in text for each in _MARKS):
        raise Unreadable("it has control characters")
    for opening, closing in delimiters:
        quoted = f"{regex.escape(opening)}(.*?){regex.escape(closing)}"
        plain = regex.sub(quoted, mark, plain, flags=regex.DOTALL)
    if arguments.get("unquoted_keys"):
        plain = regex.sub(r"(?<=[{,])(\w+):", r'"\1":', plain)
    if strings:
        marked = f"{_MARKS[0]}([0-9]+){_MARKS[1]}"
        plain = regex.sub(marked, lambda match: json.dumps(strings[int(match[1])]), plain)
    try:
        return json.loads(plain)
    except ValueError:
        if arguments.get("allow_non_json"):
            return _text(text, arguments)
        raise


def _tags(text: str, arguments: Arguments) -> dict[str, Any]:
    found: dict[str, Any] = {}
    merges = arguments.get("merge_duplicates", False)
    for match in regex.finditer(arguments["tag_pattern"], text, flags=regex.DOTALL):
        groups = match.groupdict()
        if groups.get("unclosed") is not None:
            break
        key, value = groups["key"], _inner(groups.get("value") or "", arguments)
        if key not in found or not merges:
            found[key] = value
            continue
        if not isinstance(found[key], list):
            found[key] = [found[key]]
        found[key].append(value)
    return found


def _lines(text: str, arguments: Arguments) -> dict[str, Any]:
    found: dict[str, Any] = {}
    separator = arguments.get("kv_sep", ":")
    for line in text.split(arguments.get("line_sep", "\n")):
        key, is_pair, value = _text(line, arguments).partition(separator)
        if is_pair:
            found[_text(key, arguments)] = _inner(_text(value, arguments), arguments)
    return found


def _inner(text: str, arguments: Arguments) -> Any:
    parser = arguments.get("value_parser")
    if parser is None:
        return text
    return parsed(parser.get("name", "text"), text, parser.get("args", {}))


_NAME = r"[\w$@][\w.:/$@-]*+"
# A string, or a word, before its arguments or its value or elsewhere. What is not closed ends with
# the text, so that nothing is searched twice.
_STRING_OR_NAME = regex.compile(
    r"""(?P<raw>[rR])?(?P<quote>"{3}|'{3}|["'])(?:\\.|(?!(?P=quote))[^\\])*+(?:(?P=quote)|\\?\Z)"""
    rf"""|(?P<name>{_NAME})(?P<after>\s*+[(=])?""",
    regex.DOTALL,
)
_ESCAPE = regex.compile(r"\\(.)", regex.DOTALL)
_ESCAPED = "\n\\'\"abfnrtv01234567xNuU"  # what a backslash may stand before in Python


def is_name_of_argument(name: str) -> bool:
    """Whether a call that is written as in Python may have `name=value`. An argument of another
    name stands in an object there: `**{"a name": value}`."""
    return regex.fullmatch(_NAME, name) is not None


def _python_calls(text: str, arguments: Arguments) -> list[dict[str, Any]]:
    """[f(a=1), g(**{"b": 2})], or such calls in lines, whose arguments are literals of Python or of
    JSON. Names need not be ones in Python."""
    stand_ins: dict[str, str] = {}

    def as_python(match: regex.Match[str]) -> str:
        if match["quote"] is not None and match["raw"] is None:
            as_in_json = match["quote"] == '"'
            return str(_ESCAPE.sub(lambda escape: _escaped(escape[1], as_in_json), match[0]))
        if match["after"] is None:
            return str(match[0])
        return f"{stand_ins.setdefault(match['name'], f'_{len(stand_ins)}')}{match['after']}"

    source = _STRING_OR_NAME.sub(as_python, text.strip())
    names = {stand_in: name for name, stand_in in stand_ins.items()}
    calls: list[ast.AST] = []
    for statement in ast.parse(source).body:
        value = statement.value if isinstance(statement, ast.Expr) else statement
        calls += value.elts if isinstance(value, ast.List) else [value]
    if not calls:
        raise Unreadable("there is no call")
    found = []
    for call in calls:
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise Unreadable("it is something else than calls with named arguments")
        pairs: list[tuple[str, Any]] = []
        for each in call.keywords:
            value = _literal(each.value)
            if each.arg is not None:
                pairs.append((names.get(each.arg, each.arg), value))
            elif isinstance(value, dict):
                pairs += value.items()
            else:
                raise Unreadable("what stands behind ** is no object")
        named = dict(pairs)
        if len(named) != len(pairs):
            raise Unreadable("an argument is there twice")
        found.append({"name": names.get(call.func.id, call.func.id), "arguments": named})
    return found


def _escaped(character: str, as_in_json: bool) -> str:
    """A character behind a backslash, so that Python does not warn of it."""
    if as_in_json and character == "/":
        return "/"
    return f"\\{character}" if character in _ESCAPED else f"\\\\{character}"


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(node: ast.expr) -> Any:
    if isinstance(node, ast.Name) and node.id in _JSON_NAMES:
        return _JSON_NAMES[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        keys = [None if each is None else _literal(each) for each in node.keys]
        if not all(isinstance(each, str) for each in keys):
            raise Unreadable("the key of an object is not a string")
        return dict(zip(keys, map(_literal, node.values), strict=True))
    value = ast.literal_eval(node)
    if not isinstance(value, str | int | float | None):
        raise Unreadable("an argument is no JSON")
    return value


_KINDS: dict[str, Callable[[str, Arguments], Any]] = {
    "text": _text,
    "int": lambda text, arguments: int(_text(text, arguments)),
    "float": lambda text, arguments: float(_text(text, arguments)),
    "bool": lambda text, arguments: _text(text, arguments).lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _tags,
    "kv-lines": _lines,
    "python-calls": _python_calls,
}


# ---------------------------------------------------------------- by the schemas of the tools


def cast_arguments(arguments: Any, properties: Mapping[str, Any], is_bare: bool) -> Any:
    """Arguments as the types that a tool's schema has for them. `is_bare`: they were written as
    bare text, which is a string only if it is nothing else that it may be."""
    if not isinstance(arguments, dict):
        return arguments
    return {name: _cast(each, properties.get(name), is_bare) for name, each in arguments.items()}


def _cast(value: Any, schema: Any, is_bare: bool) -> Any:
    kinds = types_of(schema)
    if isinstance(value, list) and "array" not in kinds:
        return [_cast(each, schema, is_bare) for each in value]
    if not isinstance(value, str) or ("string" in kinds and not is_bare):
        return value
    listed = listed_values(schema)
    if value in listed:
        return listed[value]
    for kind in kinds:
        try:
            return _CASTS[kind](value)
        except (KeyError, ValueError, RecursionError):
            continue
    return value


def _as_integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _as_number(text: str) -> int | float:
    number = float(text)
    if number != number or number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return int(number) if number.is_integer() and "." not in text else number


def _as_boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _as_null(text: str) -> None:
    if text.strip() not in ("null", "None"):
        raise ValueError(text)


def _as_container(kind: type) -> Callable[[str], Any]:
    def cast(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(text)
        return value

    return cast


_CASTS: dict[str, Callable[[str], Any]] = {
    "integer": _as_integer,
    "number": _as_number,
    "boolean": _as_boolean,
    "null": _as_null,
    "object": _as_container(dict),
    "array": _as_container(list),
}
