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

MAX_BATCHES = 256  # queued for a subscriber


class Listener:
    """Callbacks for what happens in the engine, which do nothing by default.

    They are called in the API process, in its event loop between messages, and must be quick. Times
    are those of `time.monotonic`.
    """

    def request_added(self, request: OpenRequest) -> None:
        """A request was accepted by the engine."""

    def request_refused(self, error: Exception) -> None:
        """A request was refused: InvalidRequest, RequestTooLong, Overloaded, Unavailable."""

    def request_admitted(self, request: OpenRequest) -> None:
        """A request runs for the first time; `admitted_time` and `admission` are set."""

    def tokens_arrived(self, request: OpenRequest, num_tokens: int, now: float) -> None:
        """A step added tokens to one of the request's samples."""

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        """A request has ended, by itself or by abort."""

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        """A request could not be computed, killed the engine process, or lost the engine."""

    def stepped(self, report: StepReport) -> None:
        """The engine has taken a step; reports gauges, this process's counters and preemptions."""

    def engine_started(self, info: EngineInfo) -> None:
        """The engine is ready, for the first time or after a restart."""

    def engine_died(self, reason: str) -> None:
        """The engine process has ended and a new one will be started."""


class Subscription:
    """Holds the event batches of one replica that a reader has not taken yet."""

    def __init__(self, replica: int) -> None:
        self.replica = replica
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
