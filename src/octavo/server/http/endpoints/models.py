"""How the server is and what it serves: /health, /ping, /load, /version and /v1/models; and what
routers ask, /server_info and /model_info."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from octavo import __version__
from octavo.server.engine_process.replica import State
from octavo.server.http.context import Context, context_of, reply
from octavo.server.http.errors import ApiError
from octavo.server.http.schema import documented

router = APIRouter(tags=["Server"])

# A replica's state -> the count of /health that it belongs to.
COUNTED_AS: dict[State, str] = {
    "ready": "alive",
    "starting": "starting",
    "restarting": "starting",
    "draining": "draining",
    "stopped": "stopped",
    "failed": "failed",
    "closed": "stopped",
}


class ModelCard(msgspec.Struct, kw_only=True):
    """A name by which requests may ask for the model, and the model's limits."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "octavo"
    root: Annotated[str, Meta(description="The name that the model is reported by.")]
    max_model_len: Annotated[
        int,
        Meta(description="Tokens, prompt and output together; with an encoder: of the decoder."),
    ]
    max_encoder_len: Annotated[
        int | None,
        Meta(description="Tokens of a prompt that an encoder reads; null: there is no encoder."),
    ]
    quantization: Annotated[
        str, Meta(description="How weights are quantized, with what `auto` has chosen; or none.")
    ]


class ModelList(msgspec.Struct, kw_only=True):
    """All names of the model."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class ReplicaCounts(msgspec.Struct, kw_only=True):
    """How many of the engines behind the address are how."""

    alive: Annotated[int, Meta(description="They take requests.")] = 0
    starting: Annotated[int, Meta(description="For the first time or again.")] = 0
    draining: Annotated[int, Meta(description="They take no more requests.")] = 0
    stopped: Annotated[int, Meta(description="By /admin/drain.")] = 0
    failed: Annotated[int, Meta(description="They are started again after a while.")] = 0


class Health(msgspec.Struct, kw_only=True):
    """The server takes requests."""

    status: Literal["ok"] = "ok"
    replicas: ReplicaCounts


class Load(msgspec.Struct, kw_only=True):
    """How many requests the server has."""

    server_load: Annotated[int, Meta(description="Requests that are open, of all replicas.")]
    num_running: Annotated[int, Meta(description="Those that have blocks of the KV cache.")]
    num_waiting: Annotated[int, Meta(description="Those that have not begun, or were swapped out.")]


class Version(msgspec.Struct):
    """octavo's version."""

    version: str


class ServerInfo(msgspec.Struct, kw_only=True):
    """What SGLang's router registers a server by, with its names."""

    version: str
    model_path: Annotated[str, Meta(description="The model, as it was given to the server.")]
    served_model_name: str
    tp_size: Annotated[int, Meta(description="Devices that share the model.")]
    dp_size: Annotated[int, Meta(description="1: replicas share one address and one queue.")] = 1
    num_replicas: int
    max_running_requests: Annotated[int, Meta(description="Sequences, of all replicas.")]
    max_total_num_tokens: Annotated[int, Meta(description="In the KV cache, of all replicas.")]
    context_length: Annotated[int, Meta(description="Tokens, prompt and output together.")]


class ModelInfo(msgspec.Struct, kw_only=True):
    """What the server runs, with SGLang's names."""

    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: Literal[True] = True


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
    client = context_of(request).client
    state = client.health
    if not state.healthy:
        code = "stalled" if state.state == "ready" else state.state
        raise ApiError(503, state.reason or state.state, code=code, retry_after=1.0)
    counts = Counter(COUNTED_AS[replica.state] for replica in client.replicas)
    return reply(Health(replicas=ReplicaCounts(**counts)))


@router.get("/ping", **documented(None, Health))
@router.post("/ping", **documented(None, Health))
async def ping(request: Request) -> Response:
    """The same, where Amazon SageMaker asks for it. Needs no key."""
    return await health(request)


@router.get("/load", **documented(None, Load))
async def load(request: Request) -> Response:
    """How much work there is."""
    client = context_of(request).client
    gauges = client.gauges
    return reply(
        Load(
            server_load=len(client.open_requests),
            num_running=gauges.num_running,
            num_waiting=gauges.num_waiting + gauges.num_swapped,
        )
    )


@router.get("/version", **documented(None, Version))
async def version() -> Response:
    """The version of octavo. Needs no key."""
    return reply(Version(__version__))


@router.get("/server_info", **documented(None, ServerInfo))
async def server_info(request: Request) -> Response:
    """What SGLang's router asks of a server that it is to register."""
    context = context_of(request)
    client, info = context.client, context.client.info
    num_replicas = len(client.replicas)
    sizes = [replica.info.num_blocks for replica in client.replicas if replica.info is not None]
    return reply(
        ServerInfo(
            version=__version__,
            model_path=info.model,
            served_model_name=context.settings.model_names[0],
            tp_size=info.num_ranks,
            num_replicas=num_replicas,
            max_running_requests=info.max_num_seqs * num_replicas,
            max_total_num_tokens=sum(sizes) * info.block_size,
            context_length=info.max_model_len,
        )
    )


@router.get("/model_info", **documented(None, ModelInfo))
async def model_info(request: Request) -> Response:
    """What SGLang's router asks of a server's model."""
    context = context_of(request)
    path, name = context.client.info.model, context.settings.model_names[0]
    return reply(ModelInfo(model_path=path, tokenizer_path=path, served_model_name=name))


def _card(context: Context, name: str) -> ModelCard:
    info = context.client.info
    return ModelCard(
        id=name,
        created=context.created,
        root=context.settings.model_names[0],
        max_model_len=info.max_model_len,
        max_encoder_len=info.max_encoder_len,
        quantization=info.quantization,
    )
