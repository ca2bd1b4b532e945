"""POST /v1/embeddings: vectors of texts, from the model's last hidden states."""

from __future__ import annotations

import asyncio
import base64
import sys
import time
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta, Raw
from pydantic import Field

from octavo.engine.validation import Prompt
from octavo.sampling_params import Pooling, PoolingParams
from octavo.server.http.bodies import WHOLE_FLOATS, Integer, Refused
from octavo.server.http.context import Context, context_of, encode, reply, request_id_of
from octavo.server.http.generation import PromptBody
from octavo.server.http.prompts import PromptField, prompt_ids, prompt_list, truncated
from octavo.server.http.schema import documented
from octavo.server.http.streams import aborted, close, open_streams, while_connected

router = APIRouter(tags=["OpenAI"])

MAX_INPUTS = 2_048  # OpenAI's
CLIENT_NAMES = {"prompt": "input", "max_tokens": "input"}
EXAMPLE = {"input": ["A cat is a small animal.", "The sun is warm."]}


class EmbeddingBody(PromptBody):
    """POST /v1/embeddings"""

    input: Annotated[PromptField, Field(union_mode="left_to_right"), WHOLE_FLOATS]
    """Text, token ids, or a list of either: at most 2,048."""
    encoding_format: Literal["float", "base64"] | None = None
    """base64: of the numbers as float32, little-endian. Not given: float."""
    dimensions: Annotated[int, Integer(1)] | None = None
    """Keep so many of the first elements, for models that were trained for it."""
    pooling: Pooling | None = None
    """The mean of all tokens' hidden states, that of the last token, or of the first ("cls"). Not
    given: last."""
    normalize: bool | None = None
    """Divide the vector by its length. Not given: true."""
    add_special_tokens: bool | None = None
    """Begin and end texts with what the model expects, such as BOS."""

    messages: Annotated[object, Refused("render conversations with /tokenize first")] = None


class EmbeddingData(msgspec.Struct, kw_only=True):
    """The embedding of one input."""

    object: Literal["embedding"] = "embedding"
    index: Annotated[int, Meta(description="Of the input.")]
    embedding: list[float] | str


class EmbeddingUsage(msgspec.Struct):
    """How many tokens the inputs had."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    """The embeddings of all inputs of a request."""

    object: Literal["list"] = "list"
    id: str
    created: int
    model: str
    data: list[EmbeddingData]
    usage: EmbeddingUsage


@router.post("/v1/embeddings", **documented(EmbeddingBody, Embeddings, example=EXAMPLE))
async def create_embeddings(request: Request) -> Response:
    """Make a vector of each input."""
    body = await context_of(request).body(request, EmbeddingBody)
    if body.request_id is not None:
        request.state.request_id = body.request_id
    return await while_connected(request.receive, _respond(request, body))


async def _respond(request: Request, body: EmbeddingBody) -> Response:
    context = context_of(request)
    model = context.model_name(body.model)
    params = PoolingParams(
        body.pooling or "last", body.dimensions, True if body.normalize is None else body.normalize
    )
    prompts = await _prompts(context, body)
    data, num_tokens, width = [], 0, context.settings.max_prompts
    for begin in range(0, len(prompts), width):  # a request may not fill the queue for all
        part = prompts[begin : begin + width]
        streams = await open_streams(request, body, part, params, CLIENT_NAMES)
        try:
            for index, stream in enumerate(streams, start=begin):
                output = await stream.result()
                if output.embedding is None:
                    raise aborted()
                num_tokens += len(output.prompt_token_ids)
                data.append(_encoded(index, output.embedding, body.encoding_format))
                await asyncio.sleep(0)  # thousands of numbers take a while to write
        finally:
            close(streams)
    request.state.log = {"prompt_tokens": num_tokens}
    if body.end_user is not None:
        request.state.log["user"] = body.end_user
    head = {"id": f"embd-{request_id_of(request)}", "created": int(time.time()), "model": model}
    usage = EmbeddingUsage(num_tokens, num_tokens)
    return reply({"object": "list", **head, "data": data, "usage": usage})


async def _prompts(context: Context, body: EmbeddingBody) -> Sequence[Prompt]:
    """The inputs in token ids, each of which can be computed."""
    inputs, add_special = prompt_list(body.input), body.add_special_tokens is not False
    found = await prompt_ids(
        context, body, inputs, "input", add_special, MAX_INPUTS, before_output=False
    )
    prompts = truncated(found, body, context.client.info.max_model_len, 0)
    # All of them before the first is computed: they are not all opened at once.
    client, size = context.client, sum(map(len, found))
    await client.offload.text(size, lambda: client.check_prompts(prompts, "input"))
    return prompts


def _encoded(index: int, values: array[float], encoding_format: str | None) -> Raw:
    """An EmbeddingData as JSON."""
    embedding: str | list[float] = values.tolist()
    if encoding_format == "base64":
        if sys.byteorder == "big":
            values.byteswap()
        embedding = base64.b64encode(values).decode()
    return Raw(encode(EmbeddingData(index=index, embedding=embedding)))
