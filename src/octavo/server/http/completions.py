"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from fastapi import APIRouter, Request, Response

from octavo.core.step import TokenLogprobs
from octavo.errors import RequestTooLong
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.server.engine_process.client import RequestStream
from octavo.server.http.context import Context, context_of, reply
from octavo.server.http.errors import refused
from octavo.server.http.params import check_streaming, completion_params
from octavo.server.http.replies import Completion, CompletionChoice
from octavo.server.http.requests import CompletionBody
from octavo.server.http.schema import documented
from octavo.server.http.streams import EventStream, close, open_streams, results, while_connected
from octavo.server.http.token_texts import CompletionScores, joined
from octavo.server.http.writer import Writer, finish_reason, in_order

router = APIRouter(tags=["OpenAI"])


EXAMPLE = {"prompt": "Once upon a time", "max_tokens": 40, "temperature": 0.7}


@router.post(
    "/v1/completions",
    **documented(CompletionBody, Completion, example=EXAMPLE, streams=Completion),
)
async def create_completion(request: Request) -> Response:
    """Continue prompts."""
    body = await context_of(request).body(request, CompletionBody)
    return await while_connected(request.receive, _answer(request, body))


async def _answer(request: Request, body: CompletionBody) -> Response:
    context = context_of(request)
    model = context.model_name(body.model)
    check_streaming(body)
    params = completion_params(body, context.client.model_config.sampling_defaults)
    prompts = await _prompts(context, body)
    streams = await open_streams(request, body, prompts, params, {})
    writer = CompletionWriter(request, body, model, streams)
    if body.stream:
        return EventStream(writer.events(), streams)
    try:
        return reply(writer.completion(await results(streams)))
    finally:
        close(streams)


async def _prompts(context: Context, body: CompletionBody) -> list[list[int]]:
    """The token ids of each prompt."""
    prompt = body.prompt
    if isinstance(prompt, str):
        many: list[str | list[int]] = [prompt]
    elif prompt and isinstance(prompt[0], int):
        many = [_ids(prompt, context.client.info.max_model_len)]
    else:
        # An integer among prompts is found when their kinds are compared.
        many = cast("list[str | list[int]]", prompt)
    if not many:
        raise refused("prompt", "it is empty")
    limit = context.settings.max_prompts
    if len(many) > limit:
        raise refused("prompt", f"{len(many)} prompts are more than {limit}")
    kind = type(many[0])
    for index, each in enumerate(many):
        where = "prompt" if len(many) == 1 else f"prompt[{index}]"
        if type(each) is not kind:
            raise refused(where, "prompts must be all text or all token ids")
        if not each:
            raise refused(where, "it is empty")
    if kind is not str:
        return cast("list[list[int]]", many)
    add_special = body.add_special_tokens is not False
    return await context.client.encode(cast("list[str]", many), "prompt", add_special)


def _ids(prompt: list[str | int | list[int]], max_model_len: int) -> list[int]:
    """One prompt of token ids. Raises ApiError or RequestTooLong."""
    if len(prompt) >= max_model_len:  # known before each of them is looked at
        raise RequestTooLong(
            "prompt", f"{len(prompt)} tokens leave no room in a context of {max_model_len}"
        )
    if not all(type(each) is int for each in prompt):
        raise refused("prompt", "token ids must be integers, and not mixed with text")
    return cast("list[int]", prompt)


class CompletionWriter(Writer[CompletionBody, CompletionChoice]):
    """Writes completions; with `echo`, each choice begins with its prompt."""

    id_prefix = "cmpl"

    def __init__(
        self, request: Request, body: CompletionBody, model: str, streams: Sequence[RequestStream]
    ) -> None:
        super().__init__(request, body, model, streams)
        # An output of no tokens still draws one: it is what scores the prompt.
        self._hides_output = body.max_tokens == 0
        self._scores: dict[int, CompletionScores] = {}  # by choice, once it has begun

    def completion(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The whole reply."""
        choices = [
            self._whole_choice(prompt, place, each)
            for prompt, output in enumerate(outputs)
            for place, each in enumerate(in_order(output))
        ]
        whole = self.chunk(choices)
        whole.usage = self.usage()
        self.note(whole.usage)
        return whole

    def chunk(self, choices: list[CompletionChoice]) -> Completion:
        return Completion(id=self.id, created=self.created, model=self.model, choices=choices)

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

    def beam_choices(self, prompt: int, output: RequestOutput) -> list[CompletionChoice]:
        return [
            self._whole_choice(prompt, place, each) for place, each in enumerate(in_order(output))
        ]

    def _whole_choice(self, prompt: int, place: int, output: SequenceOutput) -> CompletionChoice:
        index = prompt * self.num_samples + place
        choice = self._choice(index, prompt, output.text, output.token_ids, output.logprobs or [])
        choice.finish_reason = finish_reason(output)
        choice.stop_reason = output.stop_reason
        if output.score is not None:
            choice.score = output.score
            choice.cumulative_logprob = output.cumulative_logprob or 0.0
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
        """More of a choice: new text and tokens, and before the first ones what is echoed."""
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
        """Put before the choice's text what comes before it."""
        body, stream = self.body, self.streams[prompt]
        scores = CompletionScores(
            self.texts, body.logprobs or 0, show_special=body.skip_special_tokens is False
        )
        self._scores[choice.index] = scores
        if body.echo:
            choice.text = self._echo(prompt) + choice.text
            if body.logprobs is not None:
                known = stream.prompt_logprobs or []
                choice.logprobs = scores.prompt(stream.prompt_token_ids, known)
        if body.return_token_ids:
            choice.prompt_token_ids = stream.prompt_token_ids
        return scores

    def _echo(self, prompt: int) -> str:
        """The prompt as it was given, or the text of its token ids."""
        given = self.body.prompt
        each = given if isinstance(given, str) else given[prompt]
        if isinstance(each, str):
            return each
        tokenizer = context_of(self.request).client.tokenizer
        if tokenizer is None:
            return ""
        skip = self.body.skip_special_tokens is not False
        return tokenizer.decode(self.streams[prompt].prompt_token_ids, skip)
