"""What several endpoints call a prompt or an input, texts or token ids, as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from octavo.engine.validation import Prompt
from octavo.server.http.bodies import FAIL_FAST
from octavo.server.http.context import Context
from octavo.server.http.errors import refused
from octavo.server.http.generation import NonEmptyIds, PromptBody, Text, Texts

PromptField = (
    Text
    | NonEmptyIds
    | Annotated[Texts, Field(min_length=1)]
    | Annotated[list[NonEmptyIds], Field(min_length=1), FAIL_FAST]
)


def prompt_list(given: str | Sequence[str | int | list[int]]) -> Sequence[str | list[int]]:
    """All prompts that a field holds: either all text or all token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given[0], int):
        return [[each for each in given if isinstance(each, int)]]
    return [each for each in given if not isinstance(each, int)]


async def prompt_ids(
    context: Context,
    body: PromptBody,
    prompts: Sequence[str | list[int]],
    field: str,
    add_special_tokens: bool,
    limit: int | None = None,
    before_output: bool = True,
) -> list[list[int]]:
    """The token ids of the prompts in a `field`, before they are truncated.

    Args:
        limit: how many there may be; None: as many as one request may have.
        before_output: whether they must leave room for a token.

    Raises:
        ApiError, InvalidRequest: there are too many, or one of them is too long.
    """
    limit = context.settings.max_prompts if limit is None else limit
    if len(prompts) > limit:
        raise refused(field, f"{len(prompts)} are more than {limit}")
    texts = [each for each in prompts if isinstance(each, str)]
    if not texts:  # else all are
        return [each for each in prompts if isinstance(each, list)]
    any_length = body.truncate_prompt_tokens is not None
    return await context.client.encode(texts, field, add_special_tokens, any_length, before_output)


def truncated(
    prompts: Sequence[Prompt], body: PromptBody, max_prompt_len: int, num_reserved: int
) -> Sequence[Prompt]:
    """The prompts without what `truncate_prompt_tokens` takes away from them.

    `num_reserved`: tokens that -1 leaves free for output. Raises ApiError if it leaves nothing,
    or is more than the `max_prompt_len` tokens that a prompt may have.
    """
    limit, side = body.truncate_prompt_tokens, body.truncation_side or "left"
    if limit is None:
        if body.truncation_side is not None:
            raise refused("truncation_side", "it needs truncate_prompt_tokens")
        return prompts
    if limit > max_prompt_len:
        raise refused(
            "truncate_prompt_tokens",
            f"{limit} is more than the {max_prompt_len} tokens that a prompt may have",
        )
    if limit < 0:
        limit = max_prompt_len - num_reserved
    if limit < 1:
        raise refused("truncate_prompt_tokens", "it leaves nothing of the prompt")

    def cut(prompt: Prompt) -> Prompt:
        if isinstance(prompt, dict):
            return {**prompt, "prompt": cut_ids(prompt["prompt"])}
        return cut_ids(prompt)

    def cut_ids(token_ids: str | list[int]) -> str | list[int]:
        return token_ids[-limit:] if side == "left" else token_ids[:limit]

    return [cut(prompt) for prompt in prompts]
