"""GET /v1/models, /health and /version"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from octavo import __version__
from octavo.server.http.context import Context, context_of, reply
from octavo.server.http.errors import ApiError
from octavo.server.http.schema import documented

router = APIRouter(tags=["Server"])


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: Annotated[str, Meta(description="The name that the model is reported by.")]
    max_model_len: Annotated[int, Meta(description="Tokens, prompt and output together.")]


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(msgspec.Struct):
    status: Literal["ok"] = "ok"


class Version(msgspec.Struct):
    version: str


@router.get("/v1/models", **documented(None, ModelList))
async def list_models(request: Request) -> Response:
    """The names by which clients may call the model."""
    context = context_of(request)
    return reply(ModelList(data=[_card(context, n) for n in context.settings.model_names]))


@router.get("/v1/models/{model:path}", **documented(None, ModelCard))
async def get_model(request: Request, model: str) -> Response:
    """One of these names."""
    context = context_of(request)
    return reply(_card(context, context.model_name(model)))


@router.get("/health", **documented(None, Health))
async def health(request: Request) -> Response:
    """200 while the engine works; 503 with the reason while it does not. Needs no key."""
    state = context_of(request).client.health
    if not state.healthy:
        code = "stalled" if state.state == "ready" else state.state
        raise ApiError(503, state.reason or state.state, code=code, retry_after=1.0)
    return reply(Health())


@router.get("/version", **documented(None, Version))
async def version() -> Response:
    """The version of octavo. Needs no key."""
    return reply(Version(__version__))


def _card(context: Context, name: str) -> ModelCard:
    return ModelCard(
        id=name,
        created=context.created,
        root=context.settings.model_names[0],
        max_model_len=context.client.info.max_model_len,
    )
