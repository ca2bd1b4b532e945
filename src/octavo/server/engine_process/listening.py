"""Two ways to observe the engine: callbacks, and batches of events.

The observers themselves (metrics, logs, the dashboard) are in `octavo.server.observability`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from octavo.engine.events import Event
from octavo.outputs import RequestOutput
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.messages import EngineInfo, StepReport

MAX_BATCHES = 256  # that wait for a subscriber


class Listener:
    """Callbacks for what happens in the engine; metrics and logs override some. These do nothing.

    They are called in the API process, in its event loop between messages, and must be quick. Times
    are those of `time.monotonic`.
    """

    def request_added(self, request: OpenRequest) -> None:
        """A request was accepted by the engine."""

    def request_refused(self, error: Exception) -> None:
        """A request was refused: InvalidRequest, RequestTooLong, Overloaded, Unavailable."""

    def request_admitted(self, request: OpenRequest) -> None:
        """It runs for the first time: `request.admitted_time` is known, `request.admission` too."""

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, now: float) -> None:
        """A step added tokens to one of its samples."""

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        """It has ended, by itself or by abort."""

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        """It could not be computed, killed the engine process, or the engine is gone for good."""

    def stepped(self, report: StepReport) -> None:
        """Every step of the engine: gauges, the counters of this engine process, preemptions."""

    def engine_started(self, info: EngineInfo) -> None:
        """The first time, and after each restart."""

    def engine_died(self, reason: str) -> None:
        """The engine process has ended and a new one will be started."""


class Subscription:
    """Holds the event batches that a reader has not taken yet."""

    def __init__(self) -> None:
        self._batches: deque[list[Event]] = deque(maxlen=MAX_BATCHES)
        self._wake = asyncio.Event()
        self._is_closed = False

    def add(self, events: list[Event]) -> None:
        self._batches.append(events)
        self._wake.set()

    def close(self) -> None:
        self._is_closed = True
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[list[Event]]:
        return self

    async def __anext__(self) -> list[Event]:
        while not self._batches:
            if self._is_closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._batches.popleft()
