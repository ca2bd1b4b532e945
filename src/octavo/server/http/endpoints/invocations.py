"""POST /invocations: the one path to which Amazon SageMaker sends all requests."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Raw

from octavo.server.http.bodies import received
from octavo.server.http.context import context_of
from octavo.server.http.endpoints.chat import create_chat_completion
from octavo.server.http.endpoints.completions import (
    EXAMPLE,
    Completion,
    CompletionBody,
    create_completion,
)
from octavo.server.http.endpoints.embeddings import create_embeddings
from octavo.server.http.errors import ApiError
from octavo.server.http.schema import documented

router = APIRouter(tags=["Server"])

NOT_GIVEN = Raw(b"null")


class _Kind(msgspec.Struct):
    """The fields by which requests are told apart; what is in them does not matter here."""

    messages: Raw = NOT_GIVEN
    prompt: Raw = NOT_GIVEN
    input: Raw = NOT_GIVEN


# In the order in which they are looked for.
ENDPOINTS: dict[str, Callable[[Request], Awaitable[Response]]] = {
    "messages": create_chat_completion,
    "prompt": create_completion,
    "input": create_embeddings,
}


@router.post(
    "/invocations",
    **documented(CompletionBody, Completion, example=EXAMPLE, streams=Completion),
)
async def invoke(request: Request) -> Response:
    """A chat if there are messages, a completion if there is a prompt, embeddings if there is an
    input; bodies and replies are those of their endpoints."""
    data = await received(request)
    try:
        kind = await context_of(request).client.offload.body(
            len(data), lambda: msgspec.json.decode(data, type=_Kind)
        )
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return await create_completion(request)  # which says what is wrong
    for name, endpoint in ENDPOINTS.items():
        if getattr(kind, name) != NOT_GIVEN:
            return await endpoint(request)
    names = " or ".join(ENDPOINTS)
    raise ApiError(400, f"the body has none of the fields {names}", code="missing_field")
