"""What all endpoints share: the engine's client, the settings, and the tenant of a request."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

import msgspec
from fastapi import Query, Request, Response

from octavo import __version__
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.parsing.formats import AnswerFormat, find_format
from octavo.server.engine_process.client import EngineClient
from octavo.server.http.batches import Batches
from octavo.server.http.bodies import B, read_body
from octavo.server.http.errors import ApiError
from octavo.server.http.file_store import FileStore
from octavo.server.http.forks import Forks
from octavo.server.http.keys import Tenant
from octavo.server.http.response_store import ResponseStore
from octavo.server.http.responses import Responses
from octavo.server.http.settings import ServerSettings
from octavo.server.http.token_texts import TokenIds, TokenTexts

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Storage:
    """What the server keeps on disk for its clients."""

    files: FileStore
    batches: Batches


encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Context:
    """One for each app; `context_of(request)` finds it."""

    client: EngineClient
    settings: ServerSettings
    texts: TokenTexts
    created: int = field(
        default_factory=lambda: int(time.time())
    )  # when the model was, for clients
    answer_format: AnswerFormat = field(default_factory=lambda: find_format(None))  # of the model
    opening: set[str] = field(default_factory=set)  # ids of requests that are being queued
    stored_responses: ResponseStore = field(default_factory=lambda: ResponseStore(0))
    storage: Storage | None = None  # None: the server keeps no files
    token_ids: TokenTexts = field(init=False)  # `texts`, for those who want ids instead
    responses: Responses = field(init=False)  # that can be forked
    forks: Forks = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", TokenIds(self.client.tokenizer))
        object.__setattr__(self, "responses", Responses(self.settings.max_forkable))
        object.__setattr__(self, "forks", Forks(self.settings.max_forkable))

    @property
    def fingerprint(self) -> str:
        """A hash of what decides about outputs beside the request itself."""
        info = self.client.info
        parts = (
            *(__version__, info.model, info.dtype, info.quantization, info.weight_copy_bytes),
            *(info.device, str(info.num_ranks)),
        )
        return f"fp_{hashlib.blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"

    @property
    def files(self) -> FileStore:
        """The files. Endpoints that use them are there only where files are kept."""
        assert self.storage is not None, "their routers are not included without it"
        return self.storage.files

    @property
    def batches(self) -> Batches:
        """The batches. Endpoints that use them are there only where files are kept."""
        assert self.storage is not None, "their routers are not included without it"
        return self.storage.batches

    async def body(self, request: Request, kind: type[B]) -> B:
        ignore_unknown = self.settings.ignore_unknown_fields
        return await read_body(request, kind, self.client.offload, ignore_unknown)

    async def translated(self, request: Request, translate: Callable[[], T]) -> T:
        """What `translate` makes of a request's body; large ones are translated where they are
        decoded, because it takes about as long."""
        return await self.client.offload.body(len(await request.body()), translate)

    def model_name(self, asked: str | None) -> str:
        """The name to reply with; ApiError 404 if `asked` is not served."""
        names = self.settings.model_names
        if asked is None:
            return names[0]
        if asked not in names:
            known = ", ".join(names)
            raise ApiError(
                404,
                f"model: {asked[:128]!r} is not served; served: {known}",
                "model",
                "model_not_found",
            )
        return asked

    def tokenizer(self, param: str) -> Tokenizer:
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            raise InvalidRequest(param, "the model has no tokenizer; give token ids")
        return tokenizer


def context_of(request: Request) -> Context:
    return cast(Context, request.app.state.context)


async def existing_replica(
    request: Request,
    replica: Annotated[int, Query(description="Which replica's, from 0 on.")] = 0,
) -> int:
    """The replica that a query names, as a dependency of endpoints. ApiError 404: there is none."""
    try:
        return context_of(request).client.replica(replica).number
    except InvalidRequest as error:
        raise ApiError(404, str(error), error.field, "replica_not_found") from error


def tenant_of(request: Request) -> Tenant:
    return cast(Tenant, request.state.tenant)


def request_id_of(request: Request) -> str:
    return cast(str, request.state.request_id)


def reply(value: Any, status: int = 200) -> Response:
    """A structure as JSON."""
    return Response(encode(value), status, media_type="application/json")
