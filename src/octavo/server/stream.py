"""One request's results: token ids from the engine become text, and wait for their reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType

from octavo.core.step import TokenLogprobs
from octavo.engine.output_text import OutputText
from octavo.engine.tokenizer import Tokenizer
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.journal import OpenRequest, Sample, pack_logprobs, unpack_logprobs

StreamEvent = SequenceDelta | RequestOutput
# Tokens. What a slow reader has not read is merged up to here, so that a connection's buffer, which
# takes whole deltas, stays small.
MAX_DELTA_TOKENS = 32


class RequestStream:
    """One request's results as they come.

    An async iterator: `SequenceDelta`s of the samples (new text and tokens; the last one of a
    sample has its finish_reason), and as the last item the `RequestOutput` with everything but the
    log-probabilities that the deltas had. Beam search streams nothing but the last item. Raises
    RequestFailed if the request killed the engine, LogitsNotFinite if the model has no finite
    logits for it, EngineFailed if there is no engine any more. If the reader is slow, deltas of a
    sample are merged, up to MAX_DELTA_TOKENS.

    Also a context: leaving it before the end aborts the request.
    """

    def __init__(
        self,
        entry: OpenRequest,
        params: SamplingParams | BeamSearchParams,
        tokenizer: Tokenizer | None,
        abort: Callable[[RequestStream], None],
    ) -> None:
        self.entry = entry
        self.request_id = entry.request_id
        self.prompt_token_ids = entry.request.prompt_token_ids
        self._params = params
        self._tokenizer = tokenizer if params.detokenize else None
        self._abort = abort
        self._texts = [self._new_text() for _ in entry.samples]
        # Not yet read. Their log-probabilities are in the samples, in fewer bytes.
        self._deltas: deque[SequenceDelta] = deque()
        self._growing: dict[int, SequenceDelta] = {}  # of these, the last of each sample
        self._num_read = [0] * len(entry.samples)  # tokens
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._is_over = False  # the reader has got the last item
        self._arrival: asyncio.Future[None] | None = None  # what the reader waits for

    # ---------------------------------------------------------------- for the reader

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """If asked for, known before the first delta is. Entry i scores prompt token i; the first
        has no predecessor and is None."""
        scores = self.entry.prompt_scores
        return None if scores is None else [None, *scores]

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache; known before the first delta is."""
        admission = self.entry.admission
        return 0 if admission is None else admission.num_hit_tokens

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._next()
        if isinstance(event, SequenceDelta):
            end = self._num_read[event.index]
            packed = self.entry.samples[event.index].logprobs[end - len(event.token_ids) : end]
            event.logprobs = list(map(unpack_logprobs, packed))
        return event

    async def result(self) -> RequestOutput:
        """Skip the deltas; what has all log-probabilities is this, not the iterator's last item."""
        if self._output is None or not self._is_over:
            while isinstance(await self._next(), SequenceDelta):
                pass
        assert self._output is not None, "the iterator has ended without an error"
        request = self.entry.request
        if request.beam is None and request.sampling.num_logprobs is not None:
            for output, sample in zip(self._output.outputs, self.entry.samples, strict=True):
                output.logprobs = list(map(unpack_logprobs, sample.logprobs))
                output.cumulative_logprob = sum(score.logprob for score in output.logprobs)
        return self._output

    async def _next(self) -> StreamEvent:
        """The next item, without its log-probabilities."""
        while True:
            if self._deltas:
                delta = self._deltas.popleft()
                if self._growing[delta.index] is delta:
                    del self._growing[delta.index]
                self._num_read[delta.index] += len(delta.token_ids)
                return delta
            if self._is_over:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_over = True
                raise self._error
            if self._output is not None:
                self._is_over = True
                return self._output
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def abort(self) -> None:
        """End the request now, if it has not ended; the iterator then yields the RequestOutput with
        what there is, finish_reason "abort" where a sample had not finished."""
        self._abort(self)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._abort(self)

    # ---------------------------------------------------------------- for the client

    @property
    def output(self) -> RequestOutput | None:
        """None before the end."""
        return self._output

    def take(self, delta: m.Delta) -> tuple[int, str | None]:
        """Take in what a step brought. Returns how many tokens that adds, and the stop string if
        one ends the sample before the engine would have ended it."""
        sample = self.entry.samples[delta.index]
        if sample.finish_reason is not None:
            return 0, None  # was under way when the stop string was found
        token_ids, logprobs = delta.token_ids, delta.logprobs
        reason, stop_reason = delta.finish_reason, delta.stop_reason
        found: str | None = None
        text = ""
        output_text = self._texts[delta.index]
        if output_text is not None:
            assert isinstance(self._params, SamplingParams), "only samples stream"
            num_used, found = output_text.extend(
                token_ids, len(sample.token_ids), reason, self._params
            )
            token_ids, logprobs = token_ids[:num_used], logprobs[:num_used]
            is_early = found is not None and reason is None
            if found is not None and reason != "stop":
                reason, stop_reason = "stop", None
            else:
                found = None
            text = output_text.release(finished=reason is not None)
        else:
            is_early = False
        sample.token_ids += token_ids
        sample.logprobs += map(pack_logprobs, logprobs)
        sample.finish_reason = reason
        sample.stop_reason = found if found is not None else stop_reason
        self._offer(
            SequenceDelta(
                self.request_id,
                delta.index,
                text,
                token_ids,
                finish_reason=reason,
                stop_reason=sample.stop_reason,
            )
        )
        return len(token_ids), found if is_early else None

    def conclude(self, now: float) -> None:
        """All samples have ended, or are cut off here."""
        for sample in self.entry.samples:
            if sample.finish_reason is None:
                self._cut_off(sample)
        self._end(now, [self._sample_output(sample) for sample in self.entry.samples])

    def conclude_beams(self, beams: list[m.Beam], now: float) -> None:
        self._end(now, [self._beam_output(beam) for beam in beams])

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    # ---------------------------------------------------------------- inside

    def _new_text(self) -> OutputText | None:
        if self._tokenizer is None:
            return None
        params = self._params
        detokenizer = self._tokenizer.detokenizer(self.prompt_token_ids, params.skip_special_tokens)
        if isinstance(params, BeamSearchParams):
            return OutputText(detokenizer, (), include_stop=False)
        return OutputText(detokenizer, params.stop_strings, params.include_stop_str_in_output)

    def _offer(self, delta: SequenceDelta) -> None:
        waiting = self._growing.get(delta.index)
        if waiting is None or len(waiting.token_ids) >= MAX_DELTA_TOKENS:
            self._deltas.append(delta)
            self._growing[delta.index] = delta
            self._wake()
            return
        waiting.text += delta.text
        waiting.token_ids += delta.token_ids
        waiting.finish_reason = delta.finish_reason
        waiting.stop_reason = delta.stop_reason

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def _end(self, now: float, outputs: list[SequenceOutput]) -> None:
        entry = self.entry
        self._output = RequestOutput(
            self.request_id,
            entry.prompt,
            self.prompt_token_ids,
            outputs,
            self.prompt_logprobs,
            self.num_cached_tokens,
            entry.num_preemptions,
            entry.arrival_time,
            entry.first_token_time,
            now,
        )
        self._wake()

    def _sample_output(self, sample: Sample) -> SequenceOutput:
        output_text = self._texts[sample.index]
        assert sample.finish_reason is not None, "it has ended"
        return SequenceOutput(
            sample.index,
            sample.token_ids,
            "" if output_text is None else output_text.text,
            sample.finish_reason,
            sample.stop_reason,
        )

    def _cut_off(self, sample: Sample) -> None:
        """End a sample, and hand out the text that it held back."""
        sample.finish_reason, text = "abort", ""
        output_text = self._texts[sample.index]
        if output_text is not None:
            output_text.finish()
            text = output_text.release(finished=True)
        self._offer(SequenceDelta(self.request_id, sample.index, text, [], finish_reason="abort"))

    def _beam_output(self, beam: m.Beam) -> SequenceOutput:
        output_text = self._new_text()
        if output_text is not None:
            is_stopped = beam.finish_reason == "stop"
            for token_id in beam.token_ids[:-1] if is_stopped else beam.token_ids:
                output_text.add(token_id, search=False)
            output_text.finish()
        return SequenceOutput(
            beam.index,
            beam.token_ids,
            "" if output_text is None else output_text.text,
            beam.finish_reason,
            cumulative_logprob=beam.cumulative_logprob,
            score=beam.score,
        )
