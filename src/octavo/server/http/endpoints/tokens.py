"""POST /tokenize and /detokenize, GET /tokenizer_info"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, Meta, UnsetType

from octavo.errors import InvalidRequest
from octavo.server.http.bodies import WHOLE_FLOATS, Body
from octavo.server.http.context import Context, context_of, reply
from octavo.server.http.conversations import Messages, conversation_prompt
from octavo.server.http.errors import refused
from octavo.server.http.generation import TokenIds
from octavo.server.http.schema import documented

router = APIRouter(tags=["Tokens"])


class TokenizeBody(Body):
    """POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    """Not given: true for a prompt, false for a conversation."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None
    """Also give each token as the vocabulary writes it."""


class DetokenizeBody(Body):
    """POST /detokenize"""

    model: str | None = None
    tokens: Annotated[TokenIds, WHOLE_FLOATS]
    """Token ids."""
    skip_special_tokens: bool | None = None
    """Not given: false."""


class Tokens(msgspec.Struct):
    """The tokens of a prompt or a conversation."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class TokenizerInfo(msgspec.Struct):
    """The model's tokenizer."""

    tokenizer_class: Annotated[str, Meta(description="The class of transformers for its files.")]
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | None
    vocab_size: int
    model_max_length: int


class Text(msgspec.Struct):
    """The text of some tokens."""

    prompt: str


@router.post(
    "/tokenize", **documented(TokenizeBody, Tokens, example={"prompt": "Once upon a time"})
)
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt or of a conversation."""
    context = context_of(request)
    body = await context.body(request, TokenizeBody)
    context.model_name(body.model)
    token_ids = await _token_ids(context, body)
    tokens = Tokens(token_ids, len(token_ids), context.client.info.max_model_len)
    if body.return_token_strs:
        tokenizer = context.tokenizer("return_token_strs")
        tokens.token_strs = await context.client.offload.text(
            len(token_ids), lambda: list(map(tokenizer.piece, token_ids))
        )
    return reply(tokens)


async def _token_ids(context: Context, body: TokenizeBody) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise refused("prompt", "give either prompt or messages")
    if body.prompt is not None:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
            if getattr(body, name) is not None:
                raise refused(name, "it needs messages")
        add_special = body.add_special_tokens is not False
        [ids] = await context.client.encode([body.prompt], "prompt", add_special, any_length=True)
        return ids
    assert body.messages is not None, "one of the two is given"
    return await conversation_prompt(
        context,
        body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
        add_special_tokens=bool(body.add_special_tokens),
        any_length=True,
    )


@router.post("/detokenize", **documented(DetokenizeBody, Text, example={"tokens": [100, 101, 102]}))
async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    context = context_of(request)
    body = await context.body(request, DetokenizeBody)
    context.model_name(body.model)
    tokenizer = context.tokenizer("tokens")
    vocab_size = context.client.info.vocab_size

    def text() -> str:
        for token_id in body.tokens:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    "tokens", f"token id {token_id} is outside the vocabulary of {vocab_size}"
                )
        return tokenizer.decode(body.tokens, bool(body.skip_special_tokens))

    return reply(Text(await context.client.offload.text(len(body.tokens), text)))


@router.get("/tokenizer_info", **documented(None, TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """What a client needs to prepare prompts as the server does."""
    context = context_of(request)
    tokenizer = context.tokenizer("tokenizer")
    special = tokenizer.special_tokens
    info = TokenizerInfo(
        tokenizer_class=tokenizer.class_name,
        bos_token=special.get("bos_token"),
        eos_token=special.get("eos_token"),
        pad_token=special.get("pad_token"),
        unk_token=special.get("unk_token"),
        chat_template=tokenizer.chat_template,
        vocab_size=tokenizer.vocab_size,
        model_max_length=context.client.info.max_prompt_len,
    )
    return reply(info)
