"""From a request's body to a checked model, or to a 400 that names the field, value and limit.

Each kind of body is one pydantic model: it validates requests, and /openapi.json describes it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError, PydanticOmit, core_schema
from starlette.requests import ClientDisconnect, Request

from octavo.errors import shown
from octavo.server.http.errors import ApiError, ClientGone, lowered, refused
from octavo.server.offload import Offload

MAX_SHOWN = 64  # characters of a client's own words in an error message
MAX_MESSAGE = 256  # characters of a message by pydantic
# pydantic holds the GIL while it validates, so the time of one call must be bounded. What takes
# longest are arrays, objects and the members of objects, and no body needs many.
MAX_NODES = 1 << 16
UNKNOWN, UNSUPPORTED = "unknown_field", "unsupported_field"
NOT_SUPPORTED = "octavo does not support it"  # why a field is refused
# pydantic's error types -> the API's error codes; every other type is an invalid value.
CODES = {
    "json_invalid": "invalid_json",
    "missing": "missing_field",
    UNKNOWN: UNKNOWN,
    UNSUPPORTED: UNSUPPORTED,
}


def without_nulls(values: Mapping[str, Any]) -> dict[str, Any]:
    """What is given: a null counts as not given."""
    return {name: value for name, value in values.items() if value is not None}


_STRING_OR_NODE = re.compile(rb'"[^"]*"?|[\[{:]')  # in JSON without escapes in its strings


class Body(BaseModel):
    """A request's body. A null counts as an absent field, whatever its name, and unknown fields are
    errors."""

    # Unknown fields are collected and checked below: as pydantic's own errors they would all be
    # listed, and a body may have tens of thousands.
    model_config = ConfigDict(
        strict=True,
        extra="allow",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        json_schema_extra={"additionalProperties": {"type": "null"}},
    )

    @model_validator(mode="after")
    def _refuse_unknown_fields(self) -> Self:
        for name, value in (self.model_extra or {}).items():
            if value is None:
                continue
            hint = _hint(type(self), name)
            raise PydanticCustomError(
                UNKNOWN, "there is no such field{hint}", {"name": name, "hint": hint}
            )
        return self


B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Refused:
    """Annotates a field of other servers' APIs that octavo does not support.

    It is refused for `reason`, unless its value changes nothing: null, or one of `harmless`. The
    API's description leaves it out.
    """

    reason: str
    harmless: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        raise PydanticOmit

    def _check(self, value: object) -> None:
        if value is not None and not any(same_json(value, each) for each in self.harmless):
            raise PydanticCustomError(UNSUPPORTED, "{reason}", {"reason": self.reason})


class _WholeFloats:
    """Annotates integers and lists of them: 1.0 is one, too, because clients whose language has no
    integers write it so."""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return _or_whole_floats(handler(source))


@dataclass(frozen=True, slots=True)
class Integer:
    """Annotates an integer within bounds; 1.0 is one, too."""

    least: int | None = None
    most: int | None = None

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return _or_whole_floats(core_schema.int_schema(strict=True, ge=self.least, le=self.most))


class _FailFast:
    """Annotates lists and dicts: the first bad item ends their validation, because there may be a
    million of them. (pydantic's own annotation is not hashable, so it cannot stand in a union.)"""

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


WHOLE_FLOATS = _WholeFloats()
FAIL_FAST = _FailFast()

# A client's own notes on what it asks for, within OpenAI's limits.
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    FAIL_FAST,
    BeforeValidator(lambda value: without_nulls(value) if isinstance(value, dict) else value),
]


async def read_body(
    request: Request, kind: type[B], offload: Offload, ignore_unknown: bool = False
) -> B:
    """The body of a request as a `kind`; large ones are decoded in a thread.

    Raises:
        ApiError: 400, if it is none; `param` names the field.
        ClientGone: the client left before it had sent all of it.
    """
    content_type = request.headers.get("content-type", "")
    # A web page can send other types to any address without asking; this one it cannot.
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise refused("Content-Type", f"{_clipped(content_type)} is not application/json")
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise refused("Content-Encoding", f"{_clipped(encoding)}: send the body as it is")
    data = await received(request)
    if not data and "upgrade" in request.headers:  # what follows belongs to another protocol
        raise refused("Upgrade", "this server speaks HTTP/1.1 alone; send the request without it")
    return await offload.body(len(data), lambda: decode_body(data, kind, ignore_unknown))


async def received(request: Request) -> bytes:
    """The whole body of a request; ClientGone if the client left before it had sent all of it."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientGone from None


def decode_body(data: bytes, kind: type[B], ignore_unknown: bool = False) -> B:
    """JSON as a `kind`; ApiError 400 that names the field if it is none."""
    check_num_nodes(data)
    try:
        return kind.model_validate_json(data, extra="ignore" if ignore_unknown else None)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    if errors[0]["type"] == "missing" and len(errors[0]["loc"]) == 1 and not ignore_unknown:
        # An unknown name is most likely the missing one, misspelt.
        for name, value in errors[0]["input"].items():
            if name not in kind.model_fields and value is not None:
                where = _clipped(name)
                raise refused(where, f"there is no such field{_hint(kind, name)}", UNKNOWN)
        # Or what stands in its place in another API, such as a prompt in a chat.
        errors = [each for each in errors if each["type"] == UNSUPPORTED] or errors
    raise _api_error(kind, errors)


def same_json(value: Any, other: Any) -> bool:
    """Whether two values are equal as JSON: 1 and 1.0 are, 0 and false are not."""
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)


def _or_whole_floats(exact: CoreSchema) -> CoreSchema:
    rounded = core_schema.no_info_before_validator_function(_as_integers, exact)
    return core_schema.union_schema([exact, rounded], mode="left_to_right")


def _as_integers(value: Any) -> Any:
    if isinstance(value, list):
        return [_as_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _api_error(kind: type[Body], errors: Sequence[ErrorDetails]) -> ApiError:
    """The 400 for the first wrong field.

    A value that fits no alternative of a union has errors for each of them. What the client meant
    is most likely the alternative that got furthest.
    """
    paths = [_path(kind, error) for error in errors]
    of_field = [path for path in paths if path[:1] == paths[0][:1]]
    path = max(of_field, key=lambda path: [item for item in path if isinstance(item, int)])
    chosen = [error for error, each in zip(errors, paths, strict=True) if each == path]
    kind_of_error, value = chosen[0]["type"], chosen[0]["input"]
    param = _written(path) or None
    where = param or "the body"
    is_field = bool(path) and isinstance(path[-1], str)
    if kind_of_error == "missing" or (value is None and is_field):
        return ApiError(400, f"{where}: it is missing", param, "missing_field")
    # A message may quote what the client sent.
    messages = dict.fromkeys(_clipped(lowered(error["msg"]), MAX_MESSAGE) for error in chosen)
    message = ", or ".join(messages)
    if kind_of_error not in CODES and isinstance(value, str | int | float):
        message += f", not {shown(value)}"
    return ApiError(400, f"{where}: {message}", param, CODES.get(kind_of_error, "invalid_value"))


def _path(kind: type[BaseModel], error: ErrorDetails) -> tuple[str | int, ...]:
    """Where the error is: names of fields and indices of lists, without pydantic's names for the
    alternatives of a union."""
    path: list[str | int] = []
    models: set[type[BaseModel]] = {kind}
    for item in error["loc"]:
        if isinstance(item, int):
            path.append(item)
            continue
        field = next((m.model_fields[item] for m in models if item in m.model_fields), None)
        if field is not None:
            path.append(item)
            models = _models_in(field.annotation)
    if error["type"] == UNKNOWN:
        path.append(_clipped(error["ctx"]["name"]))
    return tuple(path)


def _models_in(hint: Any) -> set[type[BaseModel]]:
    """The models that a type names, also within unions and lists."""
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return {hint}
    return set[type[BaseModel]]().union(*map(_models_in, get_args(hint)))


def _written(path: Sequence[str | int]) -> str:
    """messages[0].content"""
    parts = (f"[{item}]" if isinstance(item, int) else f".{item}" for item in path)
    return "".join(parts).removeprefix(".")


def check_num_nodes(data: bytes, param: str | None = None) -> None:
    """ApiError 400 if a body, or the JSON texts in its strings (one after the other), have more
    nodes than may be decoded at once."""
    if len(data) <= MAX_NODES or sum(map(data.count, (b"[", b"{", b":"))) <= MAX_NODES:
        return
    unescaped = data.replace(rb"\\", b"").replace(rb"\"", b"")
    count = 0
    for match in _STRING_OR_NODE.finditer(unescaped):
        count += match[0][:1] != b'"'  # text may contain any number of these characters
        if count > MAX_NODES:
            raise ApiError(
                400,
                f"{param or 'the body'}: it has more than {MAX_NODES} arrays, objects and fields",
                param,
                "body_too_complex",
            )


def _hint(kind: type[Body], name: str) -> str:
    """The field that a client may have meant by an unknown name."""
    close = get_close_matches(name[:MAX_SHOWN], kind.model_fields, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _clipped(text: str, limit: int = MAX_SHOWN) -> str:
    return text if len(text) <= limit else f"{text[:limit]}..."
