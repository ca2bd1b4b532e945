"""What clients get to see: new tokens, their text, and finished requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.scheduler import Progress, Scheduler
from octavo.core.sequence import Request, Sequence
from octavo.engine.output_text import OutputText
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import Params
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput, StepOutput
from octavo.sampling_params import SamplingParams


@dataclass(slots=True)
class _Client:
    """One request, as its client knows it."""

    prompt: str | None
    params: Params | None  # None: token ids are all that is wanted
    texts: dict[int, OutputText]  # by sequence id, if text is wanted
    num_sent: dict[int, int]  # tokens already handed out, by sequence id


class Delivery:
    """Owns what each client has been told so far, and finds stop strings on the way."""

    def __init__(
        self, tokenizer: Tokenizer | None, scheduler: Scheduler, clock: Callable[[], float]
    ) -> None:
        self._tokenizer = tokenizer
        self._scheduler = scheduler
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    def expect(self, request: Request, prompt: str | None, params: Params | None) -> None:
        """Results of `request` will come; `prompt` is its text, if it came as text."""
        self._clients[request.request_id] = _Client(prompt, params, {}, {})

    def resume(self, request: Request) -> None:
        """What its sequences have by now was handed out before."""
        client = self._clients[request.request_id]
        for seq in request.sequences:
            client.num_sent[seq.seq_id] = seq.num_output_tokens

    def knows(self, request_id: str) -> bool:
        return request_id in self._clients

    def forget(self, request: Request) -> None:
        self._clients.pop(request.request_id, None)

    @property
    def num_open(self) -> int:
        """Requests whose results are still to come."""
        return len(self._clients)

    def report(self, progress: Progress) -> StepOutput:
        """What a step's progress means to the clients."""
        output = StepOutput()
        now = self._clock()
        finished = list(progress.finished)
        for seq in progress.advanced:
            client = self._clients[seq.request.request_id]
            if seq.request.first_token_time is None:
                seq.request.first_token_time = now
            if seq.request.method.wants == "token":
                delta, ended = self._delta(client, seq)
                output.deltas.append(delta)
                finished += ended
        for request in finished:
            if request.first_token_time is None and any(
                seq.num_output_tokens for seq in request.finished
            ):
                request.first_token_time = now  # beams that ended with their first token
            output.finished.append(self.conclude(request))
            if request.error is not None:
                output.errors[request.request_id] = request.error
        return output

    def _delta(self, client: _Client, seq: Sequence) -> tuple[SequenceDelta, list[Request]]:
        """Hand out a sequence's new tokens, and end it if its text contains a stop string.

        Also returns its request if that is finished by it."""
        num_sent = client.num_sent.get(seq.seq_id, 0)
        token_ids = seq.token_ids[seq.num_prompt_tokens + num_sent :]
        text, ended = "", None
        output_text = self._text_of(client, seq)
        if output_text is not None:
            text, ended = self._advance_text(client, seq, output_text, token_ids)
        client.num_sent[seq.seq_id] = num_sent + len(token_ids)
        delta = SequenceDelta(
            seq.request.request_id,
            seq.sample_index,
            text,
            token_ids,
            seq.logprobs[-len(token_ids) :],  # a resumed sequence has only those from then on
            seq.finish_reason,
            seq.stop_reason,
        )
        return delta, [] if ended is None else [ended]

    def _advance_text(
        self, client: _Client, seq: Sequence, output_text: OutputText, token_ids: list[int]
    ) -> tuple[str, Request | None]:
        params = client.params
        assert isinstance(params, SamplingParams), "only samples stream text"
        num_before = seq.num_output_tokens - len(token_ids)
        _, stop = output_text.extend(token_ids, num_before, seq.finish_reason, params)
        ended = None
        if stop is not None and seq.finish_reason != "stop":
            ended = self._scheduler.finish_by_stop_string(seq, stop)
        return output_text.release(finished=seq.finish_reason is not None), ended

    def _text_of(self, client: _Client, seq: Sequence) -> OutputText | None:
        params = client.params
        if self._tokenizer is None or params is None or not params.detokenize:
            return None
        known = client.texts.get(seq.seq_id)
        if known is None:
            detokenizer = self._tokenizer.detokenizer(
                seq.request.prompt_token_ids, params.skip_special_tokens
            )
            stops = params.stop_strings if isinstance(params, SamplingParams) else ()
            include = isinstance(params, SamplingParams) and params.include_stop_str_in_output
            known = client.texts[seq.seq_id] = OutputText(detokenizer, stops, include)
        return known

    def conclude(self, request: Request) -> RequestOutput:
        """The whole result of a request that is over."""
        client = self._clients.pop(request.request_id)
        prompt_logprobs = None
        if request.sampling.num_prompt_logprobs is not None:
            prompt_logprobs = [None, *request.prompt_logprobs]
        outputs = [self._sequence_output(client, seq) for seq in request.finished]
        # A request and its sequences know each other. Parted, they go at once, not when the garbage
        # collector looks through everything, which would keep a step waiting.
        request.finished.clear()
        return RequestOutput(
            request.request_id,
            client.prompt,
            request.prompt_token_ids,
            outputs,
            prompt_logprobs,
            request.num_cached_tokens,
            request.num_preemptions,
            request.arrival_time,
            request.first_token_time,
            self._clock(),
            None if request.error is None else str(request.error),
        )

    def _sequence_output(self, client: _Client, seq: Sequence) -> SequenceOutput:
        assert seq.finish_reason is not None, f"{seq} has not finished"
        is_beam = seq.score is not None
        scored = seq.request.sampling.num_logprobs is not None
        output_text = self._text_of(client, seq)
        if is_beam and output_text is not None:
            ended = seq.output_token_ids
            for token_id in ended[:-1] if seq.finish_reason == "stop" else ended:
                output_text.add(token_id, search=False)
            output_text.finish()
        return SequenceOutput(
            seq.sample_index,
            seq.output_token_ids,
            output_text.text if output_text is not None else "",
            seq.finish_reason,
            seq.stop_reason,
            seq.logprobs if scored else None,
            seq.cumulative_logprob if scored or is_beam else None,
            seq.score,
        )
