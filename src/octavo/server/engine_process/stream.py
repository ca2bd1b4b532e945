"""One request's output as its reader in the server gets it: piece by piece, or whole."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from octavo.core.step import TokenLogprobs
from octavo.engine.output_stream import Added, OutputStream
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import Params
from octavo.errors import OctavoError
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.messages import unpack_logprobs

StreamEvent = SequenceDelta | RequestOutput
# Tokens. What a slow reader has not read is merged up to here, so that a connection's buffer, which
# takes whole deltas, stays small.
MAX_DELTA_TOKENS = 32
CANCELLED = "cancelled"  # finish reason of what its client has ended on purpose


class Ends(Protocol):
    """What a reader can do to end a stream; see `Delivery`."""

    def abort(self, stream: RequestStream, reason: str = "abort") -> None: ...

    def cancel(self, stream: RequestStream, index: int) -> None: ...


class RequestStream(OutputStream[bytes]):
    """One request's results as they come.

    An async iterator: `SequenceDelta`s of the samples (new text and tokens; the last one of a
    sample has its finish_reason), and as the last item the `RequestOutput` with everything but
    log-probabilities. Beam search streams nothing but the last item. Raises
    RequestFailed if the request killed the engine, LogitsNotFinite if the model has no finite
    logits for it, EngineFailed if there is no engine any more. If the reader is slow, deltas of a
    sample are merged, up to MAX_DELTA_TOKENS.

    Also a context: leaving it before the end aborts the request.
    """

    def __init__(
        self,
        entry: OpenRequest,
        params: Params,
        tokenizer: Tokenizer | None,
        ends: Ends,
    ) -> None:
        super().__init__(entry, params, tokenizer, entry.prompt)
        self.entry = entry
        entry.samples = self.samples  # with which the next engine process can go on
        self.cancelled: set[int] = set()  # samples that are to end as soon as they have begun
        self._ends = ends
        # Not yet read. Their log-probabilities are in the samples, in fewer bytes.
        self._deltas: deque[SequenceDelta] = deque()
        self._growing: dict[int, SequenceDelta] = {}  # of these, the last of each sample
        self._num_read = [0] * len(self.samples)  # tokens
        self._is_over = False  # the reader has got the last item
        self._arrival: asyncio.Future[None] | None = None  # what the reader waits for

    # ---------------------------------------------------------------- for the reader

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt found in the prefix cache; known before the first delta is."""
        return self.entry.num_cached_tokens

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        return self

    async def __anext__(self) -> StreamEvent:
        event = await self._next()
        if isinstance(event, SequenceDelta):
            end = self._num_read[event.index]
            event.logprobs = self.logprobs(event.index, end - len(event.token_ids), end)
        return event

    @property
    def num_entries(self) -> int:
        """Outputs, and tokens that have log-probabilities, of which each output may repeat those of
        the prompt: how long it takes to write all of them."""
        num_outputs = len(self.samples) + len(self.beams)
        num_scored = sum(len(sample.logprobs) for sample in self.samples)
        return num_outputs + num_scored + num_outputs * len(self._prompt_scores or ())

    async def result(self) -> RequestOutput:
        """Skip the deltas; what has all log-probabilities is this, not the iterator's last item."""
        return self.completed(await self.unscored())

    async def unscored(self) -> RequestOutput:
        """Skip the deltas. `completed` adds the log-probabilities to this, which takes long if
        there are many."""
        if self.output is None or not self._is_over:
            while isinstance(await self._next(), SequenceDelta):
                pass
        assert self.output is not None, "the iterator has ended without an error"
        return self.output

    def abort(self) -> None:
        """End the request now, if it has not ended; the iterator then yields the RequestOutput with
        what there is, finish_reason "abort" where a sample had not finished."""
        self._ends.abort(self)

    def cancel(self, index: int | None = None) -> None:
        """End one sample, or all of them, as the client wishes: the finish_reason is "cancelled".
        The others go on."""
        if index is None:
            self._ends.abort(self, CANCELLED)
        else:
            self._ends.cancel(self, index)

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *raised: object) -> None:
        self._ends.abort(self)

    # ---------------------------------------------------------------- for the client

    def unpacked(self, scores: Sequence[bytes]) -> list[TokenLogprobs]:
        return list(map(unpack_logprobs, scores))

    def offer(self, index: int, added: Added) -> None:
        """What is added may be merged into a delta that has not been read."""
        text, token_ids, reason, stop_reason = added
        waiting = self._growing.get(index)
        if waiting is None or len(waiting.token_ids) >= MAX_DELTA_TOKENS:
            delta = SequenceDelta(self.request_id, index, text, token_ids, [], reason, stop_reason)
            self._deltas.append(delta)
            self._growing[index] = delta
            self._wake()
            return
        waiting.text += text
        # Not in place: the list is the result's, which stays as it is.
        waiting.token_ids = [*waiting.token_ids, *token_ids]
        waiting.finish_reason = reason
        waiting.stop_reason = stop_reason

    def conclude(self, now: float) -> RequestOutput:
        output = super().conclude(now)
        self._wake()
        return output

    def fail(self, error: OctavoError) -> None:
        """There will be no output; the reader gets the error."""
        self.error = error
        self._wake()

    # ---------------------------------------------------------------- inside

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
            if self.error is not None:
                self._is_over = True
                raise self.error
            if self.output is not None:
                self._is_over = True
                return self.output
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival

    def _wake(self) -> None:
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
