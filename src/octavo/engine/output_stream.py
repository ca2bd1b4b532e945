"""One request's output as it grows: token ids from an engine in, text and outputs out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from octavo.core.step import TokenLogprobs
from octavo.engine.output_text import OutputText
from octavo.engine.results import (
    Beam,
    Embedding,
    Finished,
    PromptScores,
    Scores,
    StepResults,
    error_of,
)
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import Params
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput, SequenceOutput
from octavo.sampling_params import PoolingParams, SamplingParams

# What new tokens have added to a sample, one field of `SequenceDelta` after the other: text, token
# ids, finish reason and stop reason. A plain tuple, because it is made for every token.
Added = tuple[str, list[int], str | None, int | str | None]


class RequestState(Protocol):
    """What an output says of its request, beside what was generated: the core's `Request` if the
    engine is in this process, the journal's `OpenRequest` if it is in another."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt_token_ids(self) -> list[int]: ...  # what the output continues

    @property
    def input_token_ids(self) -> list[int]: ...  # what the client calls the prompt

    @property
    def arrival_time(self) -> float: ...

    @property
    def first_token_time(self) -> float | None: ...

    @property
    def num_cached_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...


@dataclass(slots=True)
class Sample(Generic[Scores]):
    """One sample's output so far."""

    index: int
    text: OutputText | None = None  # None: no text was requested
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Scores] = field(default_factory=list)  # one per token, if asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class OutputStream(ABC, Generic[Scores]):
    """Makes text of one request's tokens, finds stop strings in it, and builds the output.

    Offline and in the server, all that the engine reports about a request goes through
    `take_prompt_scores`, `take_tokens` and `take_end`, which `take_results` calls, and `conclude`
    makes the output when the request is over. Tokens' log-probabilities are kept in the form in
    which they come; `unpacked` reads it.
    """

    def __init__(
        self,
        request: RequestState,
        params: Params,
        tokenizer: Tokenizer | None,
        prompt: str | None = None,
    ) -> None:
        """Begin with no tokens.

        Args:
            request: who it is about; its times and counts are read when the output is made.
            params: how many samples there are, and what of them becomes text.
            tokenizer: that of the model. None: it has none, and texts stay empty.
            prompt: the prompt's text, if it came as text.
        """
        self.request_id = request.request_id
        self.prompt_token_ids = request.input_token_ids
        self.samples: list[Sample[Scores]] = []  # empty for beam search
        self.beams: Sequence[Beam] = ()  # known at the end of a beam search, best first
        self.error: OctavoError | None = None  # why it could not be computed to its end
        self.output: RequestOutput | None = None  # None before the end
        self._request = request
        self._params = params
        self._prompt = prompt
        wants_text = not isinstance(params, PoolingParams) and params.detokenize
        self._tokenizer = tokenizer if wants_text else None
        self._prompt_scores: list[Scores] | None = None
        self._pooled: bytes | None = None
        if isinstance(params, SamplingParams):
            self.samples = [Sample(index, self._new_text()) for index in range(params.n)]
        # Samples that have not ended; a beam search counts as one.
        self._num_unended = max(1, len(self.samples))

    @property
    def has_ended(self) -> bool:
        """Whether nothing can be added to it any more."""
        return self._num_unended == 0

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """If asked for, known before the first delta is. Entry i scores prompt token i; the first
        has no predecessor and is None, and so are those before `prompt_logprobs_start`."""
        scores = self._prompt_scores
        if scores is None:
            return None
        num_unscored = len(self._request.prompt_token_ids) - len(scores)
        return [*[None] * num_unscored, *self.unpacked(scores)]

    def take_prompt_scores(self, result: PromptScores[Scores]) -> None:
        """Take in the prompt's log-probabilities, which come before the first token."""
        self._prompt_scores = result.scores

    def take_embedding(self, result: Embedding) -> None:
        """Take in what was pooled of the prompt, which comes with the end of the request."""
        self._pooled = result.values

    def take_tokens(
        self,
        index: int,
        token_ids: list[int],
        reason: str | None = None,
        stop_reason: int | str | None = None,
        logprobs: Sequence[Scores] = (),
    ) -> Added | None:
        """Take in new tokens of one sample.

        Args:
            index: which of the request's samples it is.
            token_ids: the tokens.
            reason: why the engine has ended the sample with them. None: it has not.
            stop_reason: the token that ended it, if that is not the model's own end token.
            logprobs: of each token, if they were asked for.

        Returns what they have added to it; their log-probabilities are in the sample. None if the
        sample has ended: they were under way when its stop string was found. A finish reason that
        the engine's tokens do not have means that the text has ended the sample; the engine is to
        be told.
        """
        sample = self.samples[index]
        if sample.finish_reason is not None:
            return None
        text = ""
        if sample.text is not None:
            num_used, stop = sample.text.extend(token_ids, len(sample.token_ids), reason)
            if stop is not None:
                token_ids, logprobs = token_ids[:num_used], logprobs[:num_used]
                if reason != "stop":
                    reason, stop_reason = "stop", stop
            text = sample.text.release(finished=reason is not None)
        sample.token_ids += token_ids
        if logprobs:
            sample.logprobs += logprobs
        if reason is not None:
            sample.finish_reason, sample.stop_reason = reason, stop_reason
            self._num_unended -= 1
        added = text, token_ids, reason, stop_reason
        self.offer(index, added)
        return added

    def take_end(self, result: Finished) -> None:
        """Take in the end of the request: nothing more is reported about it."""
        self._num_unended = 0
        self.beams = result.beams
        if result.error is not None:
            self.error = error_of(result.error)
            for sample in self.samples:
                sample.finish_reason = sample.finish_reason or "error"

    @abstractmethod
    def unpacked(self, scores: Sequence[Scores]) -> list[TokenLogprobs]:
        """Tokens' log-probabilities, from the form in which they come."""

    def logprobs(self, index: int, start: int, end: int) -> list[TokenLogprobs]:
        """Those of a sample's tokens `start` to `end`, if they were asked for."""
        return self.unpacked(self.samples[index].logprobs[start:end])

    def offer(self, index: int, added: Added) -> None:
        """Called with what was added to a sample; streams that are read piece by piece keep it."""

    def cut_off(self, reason: str = "abort") -> None:
        """End all samples here, with the text that was held back."""
        for sample in self.samples:
            if sample.finish_reason is None:
                self.cut_off_sample(sample, reason)
        self._num_unended = 0

    def cut_off_sample(self, sample: Sample[Scores], reason: str) -> None:
        """End a sample that has not ended here, with the text that was held back."""
        sample.finish_reason, text = reason, ""
        if sample.text is not None:
            sample.text.finish()
            text = sample.text.release(finished=True)
        self._num_unended -= 1
        self.offer(sample.index, (text, [], reason, None))

    def conclude(self, now: float) -> RequestOutput:
        """Make the output, without log-probabilities. All samples have ended."""
        request, error = self._request, self.error
        self.output = RequestOutput(
            self.request_id,
            self._prompt,
            self.prompt_token_ids,
            [_sample_output(sample) for sample in self.samples]
            + [self._beam_output(beam) for beam in self.beams],
            None,
            request.num_cached_tokens,
            request.num_preemptions,
            request.arrival_time,
            request.first_token_time,
            now,
            None if error is None else str(error),
            self._embedding() if error is None else None,
        )
        return self.output

    def completed(self, output: RequestOutput) -> RequestOutput:
        """The request's output with all log-probabilities that were asked for."""
        return replace(self.scored(output), prompt_logprobs=self.prompt_logprobs)

    def scored(self, output: RequestOutput) -> RequestOutput:
        """The request's output with those log-probabilities of its tokens that were asked for."""
        if not isinstance(self._params, SamplingParams) or self._params.logprobs is None:
            return output
        outputs = []
        for sample, each in zip(self.samples, output.outputs, strict=True):
            scores = self.logprobs(sample.index, 0, len(sample.token_ids))
            total = sum(score.logprob for score in scores)
            outputs.append(replace(each, logprobs=scores, cumulative_logprob=total))
        return replace(output, outputs=outputs)

    def _embedding(self) -> array[float] | None:
        if self._pooled is None or not isinstance(self._params, PoolingParams):
            return None
        return self._params.finish(self._pooled, len(self._request.prompt_token_ids))

    def _new_text(self) -> OutputText | None:
        params = self._params
        if self._tokenizer is None or isinstance(params, PoolingParams):
            return None
        detokenizer = self._tokenizer.detokenizer(
            self._request.prompt_token_ids,
            params.skip_special_tokens,
            params.kept_special_tokens,
        )
        if not isinstance(params, SamplingParams):
            return OutputText(detokenizer)
        return OutputText(
            detokenizer, params.stop_strings, params.include_stop_str_in_output, params.min_tokens
        )

    def _beam_output(self, beam: Beam) -> SequenceOutput:
        text = self._new_text()
        is_scored = beam.score is not None
        if text is not None and is_scored:
            text.extend(beam.token_ids, 0, beam.finish_reason)
        return SequenceOutput(
            beam.sample_index,
            beam.token_ids,
            "" if text is None else text.text,
            beam.finish_reason,
            cumulative_logprob=beam.cumulative_logprob if is_scored else None,
            score=beam.score,
        )


Stream = TypeVar("Stream", bound=OutputStream[Any])


def take_results(
    results: StepResults[Scores],
    find: Callable[[str], Stream | None],
    on_tokens: Callable[[Stream, int, Added, bool], None],
    on_end: Callable[[Stream], None],
) -> None:
    """Let the requests' streams take in what a step has brought.

    Args:
        results: those of the step.
        find: the stream of a request id. None: nothing of that request is wanted any more.
        on_tokens: called with what new tokens have added to a sample of this index; True: the text
            has ended the sample, which the engine does not know yet.
        on_end: called when a stream has taken in the end of its request.
    """
    for prompt in results.prompt_scores:
        if (stream := find(prompt.request_id)) is not None:
            stream.take_prompt_scores(prompt)
    for request_id, index, token_ids, reason, stop_reason, logprobs in results.tokens.rows():
        if (stream := find(request_id)) is None:
            continue
        added = stream.take_tokens(index, token_ids, reason, stop_reason, logprobs)
        if added is not None:
            on_tokens(stream, index, added, added[2] is not None and reason is None)
    for embedding in results.embeddings:
        if (stream := find(embedding.request_id)) is not None:
            stream.take_embedding(embedding)
    for finished in results.finished:
        if (stream := find(finished.request_id)) is not None:
            stream.take_end(finished)
            on_end(stream)


def _sample_output(sample: Sample[Scores]) -> SequenceOutput:
    assert sample.finish_reason is not None, "it has ended"
    return SequenceOutput(
        sample.index,
        sample.token_ids,
        "" if sample.text is None else sample.text.text,
        sample.finish_reason,
        sample.stop_reason,
    )
