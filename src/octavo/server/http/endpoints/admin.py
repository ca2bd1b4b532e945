"""What is asked for with the admin key: /admin/drain, by which replicas are restarted or stopped
and no request is lost, /abort_requests and /reset_prefix_cache."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta
from pydantic import Field

from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.draining import DrainOrder, DrainRunning
from octavo.server.http.bodies import FAIL_FAST, Body, Integer
from octavo.server.http.context import context_of, reply
from octavo.server.http.errors import ApiError
from octavo.server.http.schema import documented
from octavo.server.http.streams import client_id_of

router = APIRouter(tags=["Server"])

MAX_SECONDS = 86_400.0
MAX_IDS = 4_096
ID_PREFIXES = re.compile("^(cmpl|chatcmpl|embd|fork|score|resp|msg)[-_]")  # of the ids in replies


class DrainBody(Body):
    """POST /admin/drain: which replicas, and what becomes of their requests and of them."""

    replica: Annotated[int, Integer(0)] | Literal["all"]
    """Its number, or "all": one after the other, a rolling restart."""
    requests: Literal["move", "finish"] | None = None
    """Not given: "move" them to other replicas at once. "finish": let them end first."""
    then: Literal["restart", "stop"] | None = None
    """Not given: "restart". "stop": the replica has no process until it is restarted."""
    seconds: Annotated[float, Field(gt=0, le=MAX_SECONDS)] | None = None
    """How long requests may take to finish; then they are moved. Not given: 300."""


class ReplicaState(msgspec.Struct, kw_only=True):
    """How one replica is, and how much it has to do."""

    replica: int
    state: str
    pid: Annotated[int | None, Meta(description="Of its engine process.")]
    num_open: Annotated[int, Meta(description="Requests that it has.")]
    load_tokens: Annotated[int, Meta(description="Their tokens, as routing counts them.")]
    num_restarts: int


class DrainState(msgspec.Struct, kw_only=True):
    """Whether a drain is under way, and how the replicas are."""

    is_draining: bool
    error: Annotated[str | None, Meta(description="Why the last drain did not get to its end.")]
    replicas: list[ReplicaState]


@router.get("/admin/drain", **documented(None, DrainState))
async def drain_state(request: Request) -> Response:
    """How the replicas are, and whether a drain is under way."""
    return reply(_state(context_of(request).client))


@router.post(
    "/admin/drain", **documented(DrainBody, DrainState, example={"replica": "all"}, status=202)
)
async def drain(request: Request) -> Response:
    """Restart or stop replicas; returns at once. Requests go on at the others, or wait."""
    context = context_of(request)
    body = await context.body(request, DrainBody)
    client = context.client
    numbers = range(len(client.replicas)) if body.replica == "all" else [body.replica]
    order = DrainOrder(
        numbers, body.requests or "move", body.then or "restart", body.seconds or 300.0
    )
    try:
        client.drainer.begin(order)
    except DrainRunning as error:
        raise ApiError(409, str(error), code="already_draining", retry_after=1.0) from error
    return reply(_state(client), 202)


class AbortBody(Body):
    """POST /abort_requests: which requests to end."""

    request_ids: Annotated[list[str], Field(min_length=1, max_length=MAX_IDS), FAIL_FAST]
    """The ids of requests, as in X-Request-Id, or as the `id` of replies."""


class Aborted(msgspec.Struct, kw_only=True):
    """Which of the requests that were named have been ended."""

    aborted: Annotated[list[str], Meta(description="Those that were open.")]
    unknown: Annotated[list[str], Meta(description="Those that were not.")]


class Reset(msgspec.Struct, kw_only=True):
    """The prefix cache has been emptied."""

    reset: Literal[True] = True


@router.post(
    "/abort_requests", **documented(AbortBody, Aborted, example={"request_ids": ["my-request"]})
)
async def abort_requests(request: Request) -> Response:
    """End open requests; their clients get an error 503, "aborted"."""
    context = context_of(request)
    body = await context.body(request, AbortBody)
    known = defaultdict(list)
    for name in context.client.open_requests:
        known[client_id_of(name)].append(name)
    reached = Aborted(aborted=[], unknown=[])
    for asked in dict.fromkeys(body.request_ids):
        names = known.get(asked) or known.get(ID_PREFIXES.sub("", asked), [])
        for name in names:
            context.client.abort(name)
        (reached.aborted if names else reached.unknown).append(asked)
    return reply(reached)


@router.post("/reset_prefix_cache", **documented(None, Reset))
async def reset_prefix_cache(request: Request) -> Response:
    """Forget all cached prefixes, except pinned ones; running requests keep their blocks."""
    await context_of(request).client.reset_prefix_cache()
    return reply(Reset())


def _state(client: EngineClient) -> DrainState:
    return DrainState(
        is_draining=client.drainer.is_running,
        error=client.drainer.error,
        replicas=[
            ReplicaState(
                replica=replica.number,
                state=replica.state,
                pid=replica.pid,
                num_open=len(replica.exchange.open),
                load_tokens=replica.load,
                num_restarts=replica.num_restarts,
            )
            for replica in client.replicas
        ],
    )
