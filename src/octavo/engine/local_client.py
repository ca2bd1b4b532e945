"""A client of an engine in the same process: prompts in, outputs back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.core.sequence import DecodingMethod, Request
from octavo.core.step import TokenLogprobs
from octavo.engine.engine import Engine
from octavo.engine.interrupts import InterruptsAfter
from octavo.engine.output_stream import Added, OutputStream, take_results
from octavo.engine.tokenizer import Tokenizer
from octavo.engine.validation import Params, Prompt, RequestPreparer, parts_of
from octavo.outputs import RequestOutput, SequenceDelta


class LocalStream(OutputStream[TokenLogprobs]):
    """One request to an engine in this process, and its output as it grows."""

    def __init__(
        self, request: Request, params: Params, tokenizer: Tokenizer | None, prompt: str | None
    ) -> None:
        super().__init__(request, params, tokenizer, prompt)
        self.request = request
        # What each step adds, for a reader that wants it piece by piece.
        self.deltas: deque[SequenceDelta] | None = None

    def unpacked(self, scores: Sequence[TokenLogprobs]) -> list[TokenLogprobs]:
        return list(scores)

    def offer(self, index: int, added: Added) -> None:
        if self.deltas is None:
            return
        text, token_ids, reason, stop_reason = added
        end = len(self.samples[index].token_ids)
        scores = self.logprobs(index, end - len(token_ids), end)
        self.deltas.append(
            SequenceDelta(self.request_id, index, text, token_ids, scores, reason, stop_reason)
        )


class LocalClient:
    """Owns the streams of an engine's open requests, and the rules for new ones.

    Example:
        >>> stream = client.make_request("Once upon a time", SamplingParams())
        >>> client.add_request(stream)
        >>> while stream.output is None:
        ...     client.step()
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None = None) -> None:
        """Serve the engine's only client.

        Args:
            engine: takes requests in token ids.
            tokenizer: that of its model. None: prompts are token ids, and outputs have no text.
        """
        self.engine = engine
        self.tokenizer = tokenizer
        self._preparer = RequestPreparer(engine.model_config, tokenizer, engine.config)
        self._open: dict[str, LocalStream] = {}  # by request id

    @property
    def num_open(self) -> int:
        """Requests that were added and have not ended."""
        return len(self._open)

    @property
    def has_unfinished(self) -> bool:
        """Whether `step` has something to do."""
        return self.engine.has_unfinished

    def make_request(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        tenant: str = "",
        method: DecodingMethod | None = None,
    ) -> LocalStream:
        """Check a request, without queueing it yet.

        Args:
            prompt: text or token ids; for a model with an encoder perhaps PromptParts.
            params: how to go on from it.
            request_id: its name; None: a new one.
            priority: with the "priority" policy, smaller runs first.
            cache_salt: only what was cached under an equal salt is reused.
            tenant: with the "fair" policy, whose share of the service it counts against.
            method: a decoding method of your own; `params` still say how tokens are sampled, and
                how many samples there are. None: sampling or beam search, as `params` say.

        Raises:
            InvalidRequest: an argument cannot be; `field` names it.
            RequestTooLong: the prompt leaves no room for output, or the request can never fit.
            EngineFailed, EngineClosed: there is no engine to run it.
        """
        prepared = self._preparer.prepare(
            prompt, params, self.engine.max_model_len, priority, cache_salt, tenant
        )
        request = self.engine.make_request(prepared, request_id, method)
        given, _ = parts_of(prompt)
        text = given if isinstance(given, str) else None
        return LocalStream(request, params, self.tokenizer, text)

    def add_request(self, stream: LocalStream) -> None:
        """Queue a request, once.

        Raises:
            InvalidRequest: it was queued before, or has ended.
            EngineFailed, EngineClosed: there is no engine to run it.
        """
        self.engine.add_request(stream.request)
        self._open[stream.request_id] = stream

    def step(self) -> list[RequestOutput]:
        """Run a step of the engine, and take in what it has brought to all streams.

        Returns the outputs of requests that have ended; each is its stream's `output`, too. Ctrl-C
        takes effect when the step is over and nothing of it is lost.

        Raises:
            EngineFailed, EngineClosed: there is no engine any more; an error of the executor's as
                it is.
        """
        ended: list[LocalStream] = []

        def add(stream: LocalStream, index: int, added: Added, ends_by_text: bool) -> None:
            if ends_by_text and self.engine.finish_sample(stream.request_id, index, str(added[3])):
                ended.append(stream)

        with InterruptsAfter():
            results = self.engine.step()
            now = self.engine.clock()
            take_results(results, self._open.get, add, ended.append)
            # Not earlier: samples that the engine has ended in this step may follow the last one
            # that ends by its text.
            return [self._conclude(stream, now) for stream in ended]

    def abort_request(self, stream: LocalStream) -> RequestOutput | None:
        """End a request at once: its output has what was generated so far. None if it was not
        queued, or has ended."""
        if self._open.get(stream.request_id) is not stream:
            return None
        self.engine.abort_request(stream.request_id)
        stream.cut_off()
        return self._conclude(stream, self.engine.clock())

    def pin_prefix(self, prefix: str | list[int], name: str, cache_salt: str = "") -> None:
        """Compute a prefix and pin its blocks.

        Raises:
            InvalidRequest: the prefix is shorter than a block, the name is taken, or prefix
                caching is off.
            RequestTooLong: too few KV blocks would be left for other requests.
            LogitsNotFinite: the result is not finite; nothing is kept.
            EngineFailed, EngineClosed: there is no engine any more.
        """
        engine = self.engine
        token_ids = self._preparer.whole_blocks(prefix, engine.max_model_len, engine.kv.block_size)
        request = engine.pin_prefix(name, token_ids, cache_salt)
        try:
            while not request.is_finished:
                self.step()
            if request.error is not None:
                raise request.error
        finally:
            engine.abort_request(request.request_id)

    def _conclude(self, stream: LocalStream, now: float) -> RequestOutput:
        del self._open[stream.request_id]
        output = stream.output = stream.completed(stream.conclude(now))
        return output
