"""From a request's body to a checked structure, or to a 400 that names the field.

The usual body is decoded in one go. Only one with a field that the structure does not have, or with
1.0 where it has an integer, is looked at twice: the field may be known and not supported, misspelt,
or to be ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
from starlette.requests import ClientDisconnect, Request

from octavo.server.api.errors import ApiError, ClientGone, refused

# Of msgspec's messages: what the body may contain all the same.
SECOND_LOOK = ("Object contains unknown field", "got `float`")
MAX_SHOWN = 64  # characters of a client's own words in a message


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field of other servers' APIs that octavo refuses, unless it asks for nothing."""

    reason: str
    harmless: tuple[Any, ...] = ()  # values that change nothing; null is always one


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
    return decode_body(data, kind, ignore_unknown)


def decode_body(data: bytes, kind: type[B], ignore_unknown: bool = False) -> B:
    """JSON as a `kind`; ApiError 400 that names the field if it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        if not any(words in str(error) for words in SECOND_LOOK):
            raise _invalid(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    try:
        values = _whole_numbers(msgspec.json.decode(data))
        return msgspec.convert(_admit(values, kind, "", ignore_unknown), kind)
    except msgspec.ValidationError as error:
        raise _invalid(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from None


def _whole_numbers(value: Any) -> Any:
    """The same with 1 for 1.0: to JSON they are one number, and some clients know no other."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_whole_numbers(each) for each in value]
    if isinstance(value, dict):
        return {name: _whole_numbers(each) for name, each in value.items()}
    return value


def _invalid(error: msgspec.ValidationError) -> ApiError:
    message, _, path = str(error).partition(" - at `$")
    missing = re.fullmatch(r"Object missing required field `(.*)`", message)
    param = path.rstrip("`").lstrip(".")
    if missing is not None:
        param = f"{param}.{missing[1]}".lstrip(".")
        return ApiError(400, f"{param}: it is missing", param, "missing_field")
    message = f"{message[:1].lower()}{message[1:]}"
    return ApiError(400, f"{param or 'the body'}: {message}", param or None, "invalid_value")


def _admit(values: Any, kind: type[Body], path: str, ignore_unknown: bool) -> Any:
    """`values` without the fields that `kind` does not have; ApiError if one of them matters."""
    if not isinstance(values, dict):
        return values  # of a wrong type, as the second decoding will say
    hints = get_type_hints(kind)
    admitted = {}
    for name, value in values.items():
        here = f"{path}{name}"
        if name in hints:
            admitted[name] = _admit_inside(value, hints[name], here, ignore_unknown)
        elif name in kind.refusals():
            _refuse(kind.refusals()[name], here, value)
        elif not ignore_unknown:
            raise _unknown(name, here, [*hints, *kind.refusals()])
    return admitted


def _admit_inside(value: Any, hint: Any, path: str, ignore_unknown: bool) -> Any:
    """The same for structures in a field: one, or a list of them."""
    item = _body_in(hint)
    if item is None:
        return value
    if isinstance(value, list):
        return [_admit(v, item, f"{path}[{i}].", ignore_unknown) for i, v in enumerate(value)]
    return _admit(value, item, f"{path}.", ignore_unknown)


def _body_in(hint: Any) -> type[Body] | None:
    """The kind of body that a field holds, or a list of it; None if it holds none."""
    if isinstance(hint, type) and issubclass(hint, Body):
        return hint
    if get_origin(hint) in (Union, UnionType, Annotated, list):
        found = [_body_in(each) for each in get_args(hint)]
        return next((each for each in found if each is not None), None)
    return None


def _refuse(refusal: Refusal, path: str, value: Any) -> None:
    if value is not None and value not in refusal.harmless:
        raise refused(path, refusal.reason, "unsupported_field")


def _unknown(name: str, path: str, known: list[str]) -> ApiError:
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return refused(_shown(path), f"there is no such field{hint}", "unknown_field")


def _shown(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."
