"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from pydantic import Field

from octavo.core.step import TokenLogprobs
from octavo.engine.validation import Prompt
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.sampling_params import SamplingParams
from octavo.server.engine_process.stream import RequestStream, StreamEvent
from octavo.server.http.bodies import WHOLE_FLOATS, Refused
from octavo.server.http.context import Context, context_of
from octavo.server.http.dialect import Dialect, Writer, finish_reason, in_order, note_end
from octavo.server.http.errors import refused
from octavo.server.http.generation import (
    GenerationBody,
    NonEmptyIds,
    NonNegative,
    Params,
    generation_params,
)
from octavo.server.http.prompts import PromptField, prompt_ids, prompt_list
from octavo.server.http.replies import Choice, CompletionLogprobs, PromptLogprobs, Reply, Usage
from octavo.server.http.schema import documented
from octavo.server.http.token_texts import CompletionScores, joined

router = APIRouter(tags=["OpenAI"])

DEFAULT_MAX_TOKENS = 16  # OpenAI's
EXAMPLE = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.7}


class CompletionBody(GenerationBody):
    """POST /v1/completions"""

    prompt: Annotated[PromptField, Field(union_mode="left_to_right"), WHOLE_FLOATS]
    """Text, token ids, or a list of either; with an encoder, its input."""
    echo: bool | None = None
    """Put the prompt in front of the output."""
    logprobs: NonNegative | None = None
    """Score the output's tokens, with the k likeliest at each."""
    decoder_input_ids: Annotated[NonEmptyIds | None, WHOLE_FLOATS] = None
    """With an encoder, what the decoder starts with; not given: decoder_start_token_id."""
    add_special_tokens: bool | None = None
    """Begin text prompts with what the model expects, such as BOS."""

    suffix: Annotated[object, Refused("octavo does not fill in the middle", ("",))] = None
    prompt_embeds: Annotated[object, Refused("give text or token ids")] = None
    messages: Annotated[object, Refused("conversations go to /v1/chat/completions")] = None
    max_completion_tokens: Annotated[object, Refused("in completions it is max_tokens")] = None
    top_logprobs: Annotated[object, Refused("in completions it is logprobs that says how many")] = (
        None
    )


class CompletionChoice(Choice, kw_only=True):
    """One continuation of a prompt, or a piece of it in a stream."""

    text: str
    logprobs: CompletionLogprobs | None = None
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET  # left out of streams
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(Reply, kw_only=True):
    """The reply to prompts, or an event of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET


def completion_params(body: CompletionBody, defaults: Mapping[str, Any]) -> Params:
    """The engine's parameters.

    `max_tokens` 0 becomes 1: the engine samples a token to score the prompt, and it is not shown.

    Raises:
        InvalidRequest, ApiError: a value that cannot be, or that contradicts another; named.
    """
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise refused("max_tokens", "0 gives nothing, unless echo is on")
        max_tokens = 1
    params = generation_params(body, defaults, max_tokens, body.logprobs)
    if not isinstance(params, SamplingParams) or not body.echo or params.logprobs is None:
        return params
    return replace(params, prompt_logprobs=max(params.logprobs, params.prompt_logprobs or 0))


async def _prompts(context: Context, body: CompletionBody) -> Sequence[Prompt]:
    """The token ids of each prompt, with the decoder's if they are given."""
    if body.echo and context.client.model_config.encoder is not None:
        raise refused("echo", "the output does not continue the input of an encoder")
    prompts = await prompt_ids(
        context, body, prompt_list(body.prompt), "prompt", body.add_special_tokens is not False
    )
    if body.decoder_input_ids is None:
        return prompts
    return [{"prompt": each, "decoder_input_ids": body.decoder_input_ids} for each in prompts]


@dataclass(slots=True)
class Echo:
    """What the choices of one prompt begin with, until all have begun."""

    text: str
    logprobs: CompletionLogprobs | None
    num_choices: int  # that are yet to begin


class CompletionWriter(Writer[CompletionBody, CompletionChoice]):
    """Writes completions; with `echo`, each choice begins with its prompt."""

    id_prefix = "cmpl-"

    def __init__(
        self, request: Request, body: CompletionBody, model: str, streams: Sequence[RequestStream]
    ) -> None:
        super().__init__(request, body, model, streams)
        # With max_tokens 0 the engine samples a token all the same, to score the prompt.
        self._hides_output = body.max_tokens == 0
        self._scores: dict[int, CompletionScores] = {}  # by choice, once it has begun
        self._given = prompt_list(body.prompt) if body.echo else []
        self._echoes: dict[int, Echo] = {}  # by prompt

    def whole(self, outputs: Iterable[RequestOutput]) -> Completion:
        choices = [
            self._whole_choice(prompt, place, each)
            for prompt, output in enumerate(outputs)
            for place, each in enumerate(in_order(output))
        ]
        return self.chunk(choices)

    def chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(**self.head, choices=choices)

    def delta_choices(self, prompt: int, delta: SequenceDelta) -> list[CompletionChoice]:
        index = prompt * self.num_samples + delta.index
        is_first = index not in self._scores
        choice = self._choice(index, prompt, delta.text, delta.token_ids, delta.logprobs)
        choice.finish_reason = finish_reason(delta)
        choice.stop_reason = delta.stop_reason
        is_empty = not choice.text and not choice.token_ids and choice.logprobs is None
        if is_empty and not is_first and choice.finish_reason is None:
            return []
        return [choice]

    def num_scores(self, prompt: int, item: StreamEvent) -> int:
        """See Writer.num_scores; the first piece of a choice has those of the prompt."""
        size = super().num_scores(prompt, item)
        if not isinstance(item, SequenceDelta) or not self.body.echo or self.body.logprobs is None:
            return size
        has_begun = prompt * self.num_samples + item.index in self._scores
        return size if has_begun else size + len(self.streams[prompt].prompt_token_ids)

    def beam_choices(self, prompt: int, output: RequestOutput) -> list[CompletionChoice]:
        return [
            self._whole_choice(prompt, place, each) for place, each in enumerate(in_order(output))
        ]

    def _whole_choice(self, prompt: int, place: int, output: SequenceOutput) -> CompletionChoice:
        index = prompt * self.num_samples + place
        choice = self._choice(index, prompt, output.text, output.token_ids, output.logprobs or [])
        note_end(choice, output)
        choice.prompt_logprobs = None
        if self.body.prompt_logprobs is not None:
            scores = self.streams[prompt].prompt_logprobs or []
            choice.prompt_logprobs = self.texts.prompt_logprobs(scores, self.body.prompt_logprobs)
        return choice

    def _choice(
        self,
        index: int,
        prompt: int,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprobs],
    ) -> CompletionChoice:
        """The next piece of a choice: new text and tokens; the first piece also has the echo."""
        if self._hides_output:
            text, token_ids, logprobs = "", [], []
        self.num_output_tokens += len(token_ids)
        scores = self._scores.get(index)
        choice = CompletionChoice(index=index, text=text)
        if scores is None:
            scores = self._begin(choice, prompt)
        if logprobs:
            entries = scores.output(logprobs)
            known = choice.logprobs
            choice.logprobs = entries if known is None else joined(known, entries)
        if self.body.return_token_ids:
            choice.token_ids = token_ids
        return choice

    def _begin(self, choice: CompletionChoice, prompt: int) -> CompletionScores:
        """Start the choice's scores, and put in front of its text what is echoed."""
        echo = self._echoes.get(prompt)
        if echo is None:
            echo = self._echoes[prompt] = self._echo(prompt)
        echo.num_choices -= 1
        if not echo.num_choices:
            del self._echoes[prompt]
        choice.text = echo.text + choice.text
        choice.logprobs = echo.logprobs
        if self.body.return_token_ids:
            choice.prompt_token_ids = self.streams[prompt].prompt_token_ids
        prompt_ids = self.streams[prompt].prompt_token_ids
        scores = self._scores[choice.index] = self._scores_after(prompt_ids, len(echo.text))
        return scores

    def _scores_after(self, prompt_ids: Sequence[int], offset: int) -> CompletionScores:
        """The scores of tokens that follow these, and begin there in the choice's text."""
        count, detokenizer = self.body.logprobs, None
        if count is not None:
            skip = self.body.skip_special_tokens is not False
            detokenizer = self.texts.detokenizer(prompt_ids, skip)
        return CompletionScores(self.texts, count or 0, detokenizer, offset)

    def _echo(self, prompt: int) -> Echo:
        """What is echoed of a prompt: nothing, unless that is asked for."""
        body, stream = self.body, self.streams[prompt]
        text, logprobs = "", None
        if body.echo:
            text = self._echoed_text(prompt)
            if body.logprobs is not None:
                known = stream.prompt_logprobs or []
                scores = self._scores_after((), 0)
                logprobs = scores.prompt(stream.prompt_token_ids, known)
        return Echo(text, logprobs, self.num_samples)

    def _echoed_text(self, prompt: int) -> str:
        """The prompt as it was given, or the text of its token ids."""
        given = self._given[prompt]
        if isinstance(given, str) and self.body.truncate_prompt_tokens is None:
            return given
        tokenizer = context_of(self.request).client.tokenizer
        if tokenizer is None:
            return ""
        skip = self.body.skip_special_tokens is not False
        return tokenizer.decode(self.streams[prompt].prompt_token_ids, skip)


DIALECT = Dialect(CompletionBody, completion_params, _prompts, CompletionWriter)


@router.post(
    "/v1/completions",
    **documented(CompletionBody, Completion, example=EXAMPLE, streams=Completion),
)
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    return await DIALECT.respond(request)
