"""The engine, as the API process sees it: prompts in, text out, whatever becomes of its process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from types import TracebackType

from octavo.config import EngineConfig
from octavo.core.step import TokenLogprobs
from octavo.engine.events import Counters, Event, Gauges
from octavo.engine.snapshot import RequestView, Snapshot
from octavo.engine.tokenizer import Tokenizer
from octavo.model_config import ModelConfig
from octavo.outputs import RequestOutput, SequenceDelta
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.journal import OpenRequest
from octavo.server.messages import EngineInfo, StepReport
from octavo.server.supervisor import Supervision

StreamEvent = SequenceDelta | RequestOutput


@dataclass(frozen=True, slots=True)
class Health:
    """Whether the server can do its work; `reason` says why not."""

    healthy: bool
    reason: str | None
    state: str  # "starting", "ready", "restarting", "draining", "failed" or "closed"
    num_open: int  # requests without an end
    num_restarts: int
    seconds_since_step: float | None  # None before the first step


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that stays in the cache (paper section 4.4)."""

    name: str
    num_tokens: int  # whole blocks
    cache_salt: str


class Listener:
    """Is told what happens, in the API process; the base for metrics. All methods do nothing.

    They are called in the event loop, between messages, and must be quick. Times are of
    `time.monotonic`.
    """

    def request_added(self, request: OpenRequest) -> None:
        """A request was accepted by the engine."""

    def request_refused(self, error: Exception) -> None:
        """A request was refused: InvalidRequest, RequestTooLong, Overloaded, Unavailable."""

    def request_admitted(self, request: OpenRequest) -> None:
        """It runs for the first time: `request.admitted_time` is known, `request.admission` too."""

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, now: float) -> None:
        """A step added tokens to one of its samples. `request.last_token_time` is still that of
        the step before; None if these are the first."""

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        """It has ended, by itself or by abort."""

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        """It killed the engine process, or the engine is gone for good."""

    def stepped(self, report: StepReport) -> None:
        """Every step of the engine: gauges, the counters of this engine process, preemptions."""

    def engine_started(self, info: EngineInfo) -> None:
        """The first time, and after each restart."""

    def engine_died(self, reason: str) -> None:
        """The engine process has ended and a new one will be started."""


class RequestStream:
    """One request's results as they come.

    An async iterator: `SequenceDelta`s of the samples (new text and tokens; the last one of a
    sample has its finish_reason), and as the last item the `RequestOutput` with everything. Beam
    search streams nothing but the last item. Raises RequestFailed if the request killed the engine,
    EngineFailed if there is no engine any more. If the reader is slow, deltas of a sample are
    merged.

    Also a context: leaving it before the end aborts the request.
    """

    request_id: str
    prompt_token_ids: list[int]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """If asked for, known before the first delta is. Entry i scores prompt token i; the first
        has no predecessor and is None."""
        raise NotImplementedError

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in the prefix cache; known before the first delta is."""
        raise NotImplementedError

    def __aiter__(self) -> AsyncIterator[StreamEvent]:
        raise NotImplementedError

    async def __anext__(self) -> StreamEvent:
        raise NotImplementedError

    async def result(self) -> RequestOutput:
        """Skip the deltas."""
        raise NotImplementedError

    def abort(self) -> None:
        """End the request now, if it has not ended; the iterator then yields the RequestOutput with
        what there is, finish_reason "abort" where a sample had not finished."""
        raise NotImplementedError

    async def __aenter__(self) -> RequestStream:
        raise NotImplementedError

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        raise NotImplementedError


class EngineClient:
    """Owns the engine process, through its supervisor, and everything that is text.

    >>> client = EngineClient(make_config("demo"))
    >>> await client.start()
    >>> async with await client.generate("Once upon a time", SamplingParams()) as stream:
    ...     async for event in stream: ...
    >>> await client.close()
    """

    tokenizer: Tokenizer | None  # None: the model has none; prompts are token ids
    model_config: ModelConfig

    def __init__(
        self,
        config: EngineConfig,
        supervision: Supervision | None = None,
        listeners: list[Listener] | None = None,
    ) -> None:
        """Reads config.json and the tokenizer. Raises ModelError or ConfigError."""
        raise NotImplementedError

    async def start(self) -> None:
        """Start the engine process and wait until it is ready.

        Raises what the engine raised: ConfigError, ModelError, OutOfMemory; EngineFailed if the
        process died.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """End the engine process; open requests end as aborted. A second call does nothing."""
        raise NotImplementedError

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, and wait for the open ones, at most this long. Returns how many are
        still open; `close` aborts them."""
        raise NotImplementedError

    @property
    def info(self) -> EngineInfo:
        """Of the engine process that runs, or ran last. Only after `start`."""
        raise NotImplementedError

    @property
    def health(self) -> Health:
        raise NotImplementedError

    @property
    def gauges(self) -> Gauges:
        """How things stood after the last step."""
        raise NotImplementedError

    @property
    def counters(self) -> Counters:
        """Totals over all engine processes."""
        raise NotImplementedError

    @property
    def open_requests(self) -> dict[str, OpenRequest]:
        """By request id; not to be changed."""
        raise NotImplementedError

    # ---------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: str | list[int],
        params: SamplingParams | BeamSearchParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Queue a request; returns when the engine has accepted it.

        Raises:
            InvalidRequest: a bad value (RequestTooLong: it can never fit); `field` names it.
                `request_id` must not be that of an open request.
            Overloaded: too many requests wait already; `retry_after` is an estimate in seconds.
            Unavailable: the server drains or has closed, or the engine is gone for good.
        """
        raise NotImplementedError

    def abort(self, request_id: str) -> bool:
        """End an open request now. False if there is none of this name."""
        raise NotImplementedError

    # ---------------------------------------------------------------- pinned prefixes

    async def pin_prefix(
        self, prompt: str | list[int], name: str | None = None, cache_salt: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in the cache, also after a restart of the engine.

        Raises InvalidRequest: it is shorter than a block, too long, or the name is taken.
        """
        raise NotImplementedError

    async def unpin_prefix(self, name: str) -> PinnedPrefix:
        """Raises InvalidRequest if there is no such prefix."""
        raise NotImplementedError

    def list_prefixes(self) -> list[PinnedPrefix]:
        raise NotImplementedError

    # ---------------------------------------------------------------- looking inside

    async def snapshot(self) -> Snapshot:
        """Blocks, queues and block tables between two steps. Raises Unavailable while there is no
        engine process to ask."""
        raise NotImplementedError

    async def inspect(self, request_id: str) -> RequestView | None:
        """One open request with its tokens; None if the engine does not know it."""
        raise NotImplementedError

    def events(self) -> AbstractAsyncContextManager[AsyncIterator[list[Event]]]:
        """A subscription to all events, batch by batch (one a step that had any).

        >>> async with client.events() as batches:
        ...     async for batch in batches: ...

        While nobody subscribes, the engine sends only admissions and preemptions. A subscriber that
        does not keep up loses the oldest batches.
        """
        raise NotImplementedError
