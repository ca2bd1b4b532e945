"""The engine, as the API process sees it: prompts in, text out, whatever becomes of its process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.events import Admitted, Counters, Event, Gauges
from octavo.engine.prepared import Params, Prompt, RequestPreparer
from octavo.engine.snapshot import RequestView, Snapshot
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest, OctavoError, Overloaded, Unavailable
from octavo.model_config import ModelConfig, resolve_model
from octavo.outputs import RequestOutput
from octavo.server import messages as m
from octavo.server.journal import Journal, OpenRequest, Pin, Sample
from octavo.server.listening import Listener, Subscription
from octavo.server.messages import EngineInfo, StepReport
from octavo.server.process import COMMAND
from octavo.server.stream import RequestStream, StreamEvent
from octavo.server.supervisor import Supervision, Supervisor

__all__ = [
    "EngineClient",
    "Health",
    "Listener",
    "PinnedPrefix",
    "RequestStream",
    "StreamEvent",
    "Supervision",
]

logger = logging.getLogger(__name__)

LONG_PROMPT = 1 << 15  # characters; longer ones are tokenized beside the event loop
MAX_RETRY_SECONDS = 60.0


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


class EngineClient:
    """Owns the engine process, through its supervisor, and everything that is text.

    >>> client = EngineClient(make_config("demo"))
    >>> await client.start()
    >>> async with await client.generate("Once upon a time", SamplingParams()) as stream:
    ...     async for event in stream: ...
    >>> await client.close()
    """

    def __init__(
        self,
        config: EngineConfig,
        supervision: Supervision | None = None,
        listeners: Sequence[Listener] = (),
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Reads config.json and the tokenizer. Raises ModelError or ConfigError.

        `command` starts an engine process; see `EngineProcess`.
        """
        directory = resolve_model(config.model)
        self.config = config
        self.model_config = ModelConfig.from_directory(directory)
        if config.max_model_len is not None:
            self.model_config = self.model_config.with_max_model_len(config.max_model_len)
        # None: the model has none; prompts are token ids.
        self.tokenizer: Tokenizer | None = None
        if (directory / "tokenizer.json").exists():
            self.tokenizer = Tokenizer.from_directory(directory)
        self._supervision = supervision or Supervision()
        self._listeners = list(listeners)
        self._journal = Journal()
        self._supervisor = Supervisor(config, self._supervision, self._journal, self, command)
        self._exchange = self._supervisor.exchange
        self._preparer = RequestPreparer(
            self.model_config,
            self.tokenizer,
            self.model_config.max_model_len,
            config.max_logprobs,
            config.seed,
        )
        self._streams: dict[str, RequestStream] = {}
        self._subscribers: list[Subscription] = []
        self._is_draining = False
        self._all_done = asyncio.Event()
        self._info: EngineInfo | None = None
        self._gauges = Gauges()
        self._counters = Counters()  # of the engine process that runs
        self._earlier_counters = Counters()  # of those before it
        self._last_step_time: float | None = None
        self._seconds_per_request = 1.0  # between the ends of two, smoothed
        self._last_end_time: float | None = None
        self._new_admissions: list[Admitted] = []

    async def start(self) -> None:
        """Start the engine process and wait until it is ready.

        Raises what the engine raised: ConfigError, ModelError, OutOfMemory; EngineFailed if the
        process died.
        """
        await self._supervisor.start()

    async def close(self) -> None:
        """End the engine process; open requests end as aborted. A second call does nothing."""
        for request_id in list(self._streams):
            self.abort(request_id)
        await self._supervisor.close()
        for subscriber in self._subscribers:
            subscriber.close()

    async def drain(self, seconds: float) -> int:
        """Refuse new requests, and wait for the open ones, at most this long. Returns how many are
        still open; `close` aborts them."""
        self._is_draining = True
        if self._streams:
            self._all_done.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_done.wait(), seconds)
        return len(self._streams)

    def add_listener(self, listener: Listener) -> None:
        self._listeners.append(listener)

    @property
    def info(self) -> EngineInfo:
        """Of the engine process that runs, or ran last. Only after `start`."""
        assert self._info is not None, "start() has not returned"
        return self._info

    @property
    def health(self) -> Health:
        state = self._supervisor.state
        stalled = self._supervisor.seconds_stalled
        reason = None
        if state not in ("ready", "restarting"):
            reason = f"the engine is {state}" if state != "failed" else "the engine is given up"
        elif stalled >= self._supervision.stall_seconds:
            what = "no engine process" if state == "restarting" else "no step"
            reason = f"{what} for {stalled:.0f} s while {len(self._streams)} requests are open"
        elif self._is_draining:
            reason = "the server is shutting down"
        since_step = self._last_step_time
        return Health(
            reason is None,
            reason,
            "draining" if self._is_draining and state == "ready" else state,
            len(self._streams),
            self._supervisor.num_restarts,
            None if since_step is None else time.monotonic() - since_step,
        )

    @property
    def gauges(self) -> Gauges:
        """How things stood after the last step."""
        return self._gauges

    @property
    def counters(self) -> Counters:
        """Totals over all engine processes."""
        return _sum(self._earlier_counters, self._counters)

    @property
    def open_requests(self) -> dict[str, OpenRequest]:
        """By request id; not to be changed."""
        return self._journal.requests

    # ---------------------------------------------------------------- requests

    async def generate(
        self,
        prompt: Prompt,
        params: Params,
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
        arrival_time = time.monotonic()
        try:
            stream = await self._open(
                prompt, params, request_id, priority, cache_salt, arrival_time
            )
        except OctavoError as error:
            self._notify("request_refused", error)
            raise
        self._notify("request_added", stream.entry)
        return stream

    def abort(self, request_id: str) -> bool:
        """End an open request now. False if there is none of this name."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        if stream.entry.is_sent:
            self._exchange.tell(m.Abort(request_id))
        self._end(stream, stream.conclude(time.monotonic()))
        return True

    # ---------------------------------------------------------------- pinned prefixes

    async def pin_prefix(
        self, prompt: Prompt, name: str | None = None, cache_salt: str = ""
    ) -> PinnedPrefix:
        """Compute a prefix and keep it in the cache, also after a restart of the engine.

        Raises InvalidRequest: it is shorter than a block, too long, or the name is taken.
        """
        self._check_open()
        if not self.info.enable_prefix_caching:
            raise InvalidRequest("prefix", "prefixes can be pinned only with prefix caching on")
        token_ids = await self._tokenize(prompt)
        token_ids = self._preparer.whole_blocks(token_ids, self.info.block_size)
        if name is None:
            name = f"prefix-{uuid.uuid4().hex[:8]}"
        if name in self._journal.pins:
            raise InvalidRequest("name", f"a prefix {name!r} is pinned already")
        pin = Pin(name, token_ids, cache_salt, asyncio.get_running_loop().create_future())
        self._exchange.pin(pin)
        try:
            await asyncio.shield(pin.computed)
        except asyncio.CancelledError:
            if self._journal.pins.get(name) is pin:
                await self._exchange.unpin(pin)
            raise
        return _pinned(pin)

    async def unpin_prefix(self, name: str) -> PinnedPrefix:
        """Raises InvalidRequest if there is no such prefix."""
        self._check_open()
        pin = self._journal.pins.get(name)
        if pin is None or not pin.computed.done():
            known = ", ".join(sorted(prefix.name for prefix in self.list_prefixes())) or "none"
            raise InvalidRequest("name", f"no prefix {name!r} is pinned; pinned: {known}")
        await self._exchange.unpin(pin)
        return _pinned(pin)

    def list_prefixes(self) -> list[PinnedPrefix]:
        return [_pinned(pin) for pin in self._journal.pins.values() if pin.computed.done()]

    # ---------------------------------------------------------------- looking inside

    async def snapshot(self) -> Snapshot:
        """Blocks, queues and block tables between two steps. Raises Unavailable while there is no
        engine process to ask."""
        snapshot: Snapshot = await self._exchange.ask(m.Look)
        return snapshot

    async def inspect(self, request_id: str) -> RequestView | None:
        """One open request with its tokens; None if the engine does not know it. Raises
        Unavailable while there is no engine process to ask."""
        view: RequestView | None = await self._exchange.ask(m.Look, request_id=request_id)
        return view

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[AsyncIterator[list[Event]]]:
        """A subscription to all events, batch by batch (one a step that had any).

        >>> async with client.events() as batches:
        ...     async for batch in batches: ...

        While nobody subscribes, the engine sends only admissions and preemptions. A subscriber that
        does not keep up loses the oldest batches. The iterator ends when the client is closed.
        """
        subscriber = Subscription()
        self._subscribers.append(subscriber)
        if len(self._subscribers) == 1:
            self._exchange.watch(True)
        try:
            yield subscriber
        finally:
            self._subscribers.remove(subscriber)
            if not self._subscribers:
                self._exchange.watch(False)

    # ---------------------------------------------------------------- a request's beginning and end

    async def _open(
        self,
        prompt: Prompt,
        params: Params,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        arrival_time: float,
    ) -> RequestStream:
        self._check_open()
        self._check_room()
        token_ids = await self._tokenize(prompt)
        prepared = self._preparer.prepare(token_ids, params, priority, cache_salt)
        if request_id is None:
            request_id = uuid.uuid4().hex
        if request_id in self._streams:
            raise InvalidRequest("request_id", f"{request_id!r} is in use")
        self._check_open()  # tokenizing may have taken a while
        samples = [Sample(index) for index in range(prepared.n)] if prepared.beam is None else []
        text = prompt if isinstance(prompt, str) else None
        entry = OpenRequest(request_id, prepared, text, arrival_time, samples)
        stream = RequestStream(entry, params, self.tokenizer, lambda: self._abort_stream(stream))
        self._streams[request_id] = stream
        try:
            await self._exchange.open(entry)
        except asyncio.CancelledError:
            self._abort_stream(stream)
            raise
        except OctavoError:
            self._forget(stream)
            raise
        return stream

    async def _tokenize(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str) and len(prompt) >= LONG_PROMPT:
            return await asyncio.to_thread(self._preparer.tokenize, prompt)
        return self._preparer.tokenize(prompt)

    def _check_open(self) -> None:
        state = self._supervisor.state
        if self._is_draining or state == "closed":
            raise Unavailable("the server is shutting down")
        if state == "failed":
            raise Unavailable("the engine has failed and is not restarted")

    def _check_room(self) -> None:
        limit = self._supervision.max_waiting
        num_waiting = self._journal.num_waiting
        if num_waiting >= limit:
            seconds = num_waiting * self._seconds_per_request
            raise Overloaded(
                f"{num_waiting} requests wait already, and max_waiting is {limit}",
                min(MAX_RETRY_SECONDS, max(1.0, seconds)),
            )

    def _abort_stream(self, stream: RequestStream) -> None:
        if self._streams.get(stream.request_id) is stream:
            self.abort(stream.request_id)

    def _end(self, stream: RequestStream, output: RequestOutput) -> None:
        """A request has come to its end; the stream has the output."""
        if self._journal.requests.get(stream.request_id) is stream.entry:
            self._exchange.drop(stream.entry)
        self._forget(stream)
        self._note_pace(output.finish_time)
        self._notify("request_finished", stream.entry, output)

    def _forget(self, stream: RequestStream) -> None:
        self._streams.pop(stream.request_id, None)
        if not self._streams:
            self._all_done.set()

    def _note_pace(self, now: float) -> None:
        if self._last_end_time is not None:
            gap = now - self._last_end_time
            self._seconds_per_request += 0.1 * (gap - self._seconds_per_request)
        self._last_end_time = now

    def _notify(self, method: str, *values: object) -> None:
        """A listener that fails must not take a request down with it."""
        for listener in self._listeners:
            try:
                getattr(listener, method)(*values)
            except Exception:
                logger.exception("%s.%s failed", type(listener).__name__, method)

    # ---------------------------------------------------------------- what the supervisor reports

    def engine_ready(self, info: EngineInfo) -> None:
        self._info = info = msgspec.structs.replace(
            info, num_restarts=self._supervisor.num_restarts
        )
        self._preparer.max_model_len = info.max_model_len
        self._notify("engine_started", info)

    def engine_died(self, cause: str) -> None:
        self._earlier_counters = self.counters
        self._counters, self._gauges = Counters(), Gauges()
        self._notify("engine_died", cause)

    def admitted(self, admitted: Admitted) -> None:
        self._new_admissions.append(admitted)
        stream = self._streams.get(admitted.request_id)
        if stream is not None and stream.entry.admission is None:
            stream.entry.admission = admitted
            stream.entry.admitted_time = admitted.time
            self._notify("request_admitted", stream.entry)

    def reported(self, report: StepReport) -> None:
        self._last_step_time = now = time.monotonic()
        self._gauges, self._counters = report.gauges, report.counters
        report.admitted, self._new_admissions = self._new_admissions, []
        for preempted in report.preempted:
            if (stream := self._streams.get(preempted.request_id)) is not None:
                stream.entry.num_preemptions += 1
        for scores in report.prompt_scores:
            if (stream := self._streams.get(scores.request_id)) is not None:
                stream.entry.prompt_scores = scores.scores
        for delta in report.deltas:
            if (stream := self._streams.get(delta.request_id)) is not None:
                self._take(stream, delta, now)
        for finished in report.finished:
            if (stream := self._streams.get(finished.request_id)) is not None:
                self._take_beams(stream, finished.beams, now)
        self._notify("stepped", report)
        if self._subscribers:
            events: list[Event] = [*report.admitted, *report.preempted, *report.watched]
            if events:
                for subscriber in self._subscribers:
                    subscriber.add(events)

    def failed(self, entry: OpenRequest, error: OctavoError) -> None:
        stream = self._streams.get(entry.request_id)
        if stream is not None:
            stream.fail(error)
            self._forget(stream)
        self._notify("request_failed", entry, error)

    def _take(self, stream: RequestStream, delta: m.Delta, now: float) -> None:
        entry = stream.entry
        num_before = entry.num_output_tokens
        stop = stream.take(delta)
        if stop is not None:
            self._exchange.tell(m.FinishSample(entry.request_id, delta.index, stop))
        num_new = entry.num_output_tokens - num_before
        if num_new:
            if entry.first_token_time is None:
                entry.first_token_time = now
            self._notify("tokens_arrived", entry, num_new, now)
            entry.last_token_time = now
        if all(sample.finish_reason is not None for sample in entry.samples):
            self._end(stream, stream.conclude(now))

    def _take_beams(self, stream: RequestStream, beams: list[m.Beam], now: float) -> None:
        entry = stream.entry
        num_tokens = sum(len(beam.token_ids) for beam in beams)
        entry.first_token_time = now
        self._notify("tokens_arrived", entry, num_tokens, now)
        entry.last_token_time = now
        self._end(stream, stream.conclude_beams(beams, now))


def _pinned(pin: Pin) -> PinnedPrefix:
    return PinnedPrefix(pin.name, len(pin.token_ids), pin.cache_salt)


def _sum(a: Counters, b: Counters) -> Counters:
    pairs: Any = zip(msgspec.structs.astuple(a), msgspec.structs.astuple(b), strict=True)
    return Counters(*(x + y for x, y in pairs))
