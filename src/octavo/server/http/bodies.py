"""From a request's body to a checked structure, or to a 400 that names the field.

A body is split into its top-level fields, and each field is decoded by a typed decoder of its own.
The names of the fields are therefore known without a look at their values, and an unknown name
costs no second pass over the body.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from msgspec import NODEFAULT
from starlette.requests import ClientDisconnect, Request

from octavo.server.http.aside import aside
from octavo.server.http.errors import ApiError, ClientGone, refused

MAX_SHOWN = 64  # characters of a client's own words in a message
LARGE_BODY = 1 << 16  # bytes; larger bodies are decoded in a thread
# msgspec holds the GIL while it decodes, so the time of one call must be bounded. What takes long
# are arrays, objects and the members of objects: 100 to 300 ns each, and no body needs many.
MAX_PARTS = 1 << 16
NULL = b"null"

_split = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_STRING_OR_PART = re.compile(rb'"[^"]*"?|[\[{:]')  # in JSON without escapes in its strings


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field of other servers' APIs that octavo refuses, unless it asks for nothing."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that change nothing; null is always one

    def check(self, path: str, value: bytes | msgspec.Raw) -> None:
        """ApiError 400 unless the value (JSON) at `path` asks for nothing."""
        # Harmless values are short, and the beginning of a long one is not a whole value.
        compact = b"".join(bytes(value)[:MAX_SHOWN].split())
        if compact != NULL and compact not in map(msgspec.json.encode, self.harmless):
            raise refused(path, self.reason, "unsupported_field")


class Body(msgspec.Struct, forbid_unknown_fields=True):
    """A request's body; a field that it does not have is an error."""

    @classmethod
    def refusals(cls) -> Mapping[str, Refusal]:
        """Fields that clients know from elsewhere and octavo does not serve."""
        return {}


B = TypeVar("B", bound=Body)


async def read_body(request: Request, kind: type[B], ignore_unknown: bool = False) -> B:
    """The body as a `kind`; ApiError 400 that names the field if it is none, ClientGone if the
    client leaves before it has sent all."""
    content_type = request.headers.get("content-type", "")
    # A web page can send other types to any address without asking; this one it cannot.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise refused("Content-Type", f"{_shown(content_type)} is not application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise refused("Content-Encoding", f"{_shown(encoding)}: send the body as it is")
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientGone from None
    if not data and "upgrade" in request.headers:  # what follows belongs to another protocol
        raise refused("Upgrade", "this server speaks HTTP/1.1 alone; send the request without it")
    if len(data) <= LARGE_BODY:
        return decode_body(data, kind, ignore_unknown)
    return await aside(lambda: decode_body(data, kind, ignore_unknown))


def decode_body(data: bytes, kind: type[B], ignore_unknown: bool = False) -> B:
    """JSON as a `kind`; ApiError 400 that names the field if it is none."""
    _check_size(data)
    try:
        return _decode(data, kind, "", ignore_unknown)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _decode(data: bytes, kind: type[B], path: str, ignore_unknown: bool) -> B:
    """The object `data`, at `path` (empty, or with a dot at its end), as a `kind`."""
    try:
        raw_fields = _split(data)
    except msgspec.ValidationError as error:  # it is no object
        raise _invalid(path.rstrip("."), error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    fields, refusals = _fields_of(kind), kind.refusals()
    values = {}
    for name, raw in raw_fields.items():
        if name in fields:
            value = bytes(raw)
            if value != NULL:
                values[name] = _value(value, fields[name], f"{path}{name}", ignore_unknown)
        elif name in refusals:
            refusals[name].check(f"{path}{name}", raw)
        elif not ignore_unknown:
            raise _unknown(name, path, [*fields, *refusals])
    for name, field in fields.items():
        if field.is_required and name not in values:
            raise refused(f"{path}{name}", "it is missing", "missing_field")
    return kind(**values)


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field is decoded."""

    decoder: msgspec.json.Decoder[Any]
    body: type[Body] | None  # the kind of body that it holds itself
    has_integers: bool  # it is an integer, or a list of them
    is_required: bool


@cache
def _fields_of(kind: type[Body]) -> Mapping[str, _Field]:
    return {
        field.name: _Field(
            msgspec.json.Decoder(field.type),
            next((t for t in _leaves(field.type) if _is_body(t)), None),
            int in _leaves(field.type),
            field.default is NODEFAULT and field.default_factory is NODEFAULT,
        )
        for field in msgspec.structs.fields(kind)
    }


def _leaves(hint: Any) -> set[Any]:
    """The types that a hint names, also within unions and lists, but not within mappings."""
    if get_origin(hint) is Annotated:
        return _leaves(get_args(hint)[0])
    if get_origin(hint) in (Union, UnionType, list):
        return set().union(*map(_leaves, get_args(hint)))
    return {hint}


def _is_body(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Body)


def _value(data: bytes, field: _Field, path: str, ignore_unknown: bool) -> Any:
    """The value of one field. Raises ApiError."""
    if field.body is not None:
        return _decode(data, field.body, f"{path}.", ignore_unknown)
    try:
        try:
            return field.decoder.decode(data)
        except msgspec.ValidationError:
            if not field.has_integers:
                raise
        # Clients without integers write 1.0.
        return msgspec.convert(_whole_numbers(msgspec.json.decode(data)), field.decoder.type)
    except msgspec.ValidationError as error:
        raise _invalid(path, error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"{path}: it is not JSON: {error}", path, "invalid_json") from None


def _whole_numbers(value: Any) -> Any:
    """The same with 1 for 1.0: to JSON they are one number."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(each) for each in value]
    return value


def _invalid(path: str, error: msgspec.ValidationError) -> ApiError:
    """msgspec says where in the field it is: "Expected `str`, got `int` - at `$[0].role`"."""
    message, _, inside = str(error).partition(" - at `$")
    where = f"{path}{inside.rstrip('`')}".lstrip(".")
    message = f"{message[:1].lower()}{message[1:]}"
    return ApiError(400, f"{where or 'the body'}: {message}", where or None, "invalid_value")


def _check_size(data: bytes) -> None:
    """ApiError 400 if the body has more parts than may be decoded at once."""
    if sum(map(data.count, (b"[", b"{", b":"))) <= MAX_PARTS:
        return
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    count = 0
    for match in _STRING_OR_PART.finditer(unescaped):
        count += match[0][:1] != b'"'  # text may contain any number of these characters
        if count > MAX_PARTS:
            raise ApiError(
                400,
                f"the body has more than {MAX_PARTS} arrays, objects and fields",
                code="body_too_complex",
            )


def _unknown(name: str, path: str, known: list[str]) -> ApiError:
    close = get_close_matches(name[:MAX_SHOWN], known, n=1)
    hint = f"; did you mean {path}{close[0]}?" if close else ""
    return refused(f"{path}{_shown(name)}", f"there is no such field{hint}", "unknown_field")


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
