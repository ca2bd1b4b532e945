"""Delivers what engine processes report to the streams, the metrics and the subscribers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from functools import partial

from octavo.engine.events import Admitted, Event
from octavo.engine.output_stream import Added, take_results
from octavo.errors import OctavoError
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.fleet import Fleet
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.listening import Listener, Subscription
from octavo.server.engine_process.stream import CANCELLED, RequestStream

logger = logging.getLogger(__name__)

PACE_SMOOTHING = 0.1  # weight of the newest gap between the ends of two requests


class Delivery:
    """Owns the streams of open requests, and tells the observers what happens."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self.fleet: Fleet  # which reports to this delivery; set before it does
        self.streams: dict[str, RequestStream] = {}  # by request id
        self.listeners = list(listeners)
        self.subscriptions: list[Subscription] = []
        self.all_ended = asyncio.Event()  # set when the last stream ends
        self.seconds_per_request = 1.0  # between the ends of two, smoothed
        self._last_end_time: float | None = None
        self._report_time = 0.0  # when the last report came

    def notify(self, method: str, *values: object) -> None:
        """Call all listeners. One that fails must not take a request down with it."""
        for listener in self.listeners:
            try:
                getattr(listener, method)(*values)
            except Exception:
                logger.exception("%s.%s failed", type(listener).__name__, method)

    # ---------------------------------------------------------------- ends

    def abort(self, stream: RequestStream, reason: str = "abort") -> None:
        """End a stream with what there is; nothing happens if it has ended."""
        if self.streams.get(stream.request_id) is not stream:
            return
        self.fleet.tell(stream.entry, m.Abort(stream.request_id))
        stream.cut_off(reason)
        self._conclude(stream, time.monotonic())

    def cancel(self, stream: RequestStream, index: int) -> None:
        """End one sample with what there is, as its client wishes; the others go on. One that has
        not begun ends with its first token, because the samples begin together."""
        sample = stream.samples[index]
        if self.streams.get(stream.request_id) is not stream or sample.finish_reason is not None:
            return
        if not sample.token_ids and len(stream.samples) > 1:
            stream.cancelled.add(index)
            return
        stream.cut_off_sample(sample, CANCELLED)
        if stream.has_ended:
            self.abort(stream)
        else:
            self.fleet.tell(stream.entry, m.FinishSample(stream.request_id, index, CANCELLED))

    def forget(self, stream: RequestStream) -> None:
        """Nothing more is to be delivered to a stream."""
        del self.streams[stream.request_id]
        if not self.streams:
            self.all_ended.set()

    def _conclude(self, stream: RequestStream, now: float | None = None) -> None:
        """A stream has ended; `now`: without a report."""
        output = stream.conclude(self._report_time if now is None else now)
        self.fleet.drop(stream.entry)
        self.forget(stream)
        if self._last_end_time is not None:
            # Time in which there was nothing to do says nothing of the pace.
            gap = output.finish_time - max(self._last_end_time, stream.entry.arrival_time)
            self.seconds_per_request += PACE_SMOOTHING * (gap - self.seconds_per_request)
        self._last_end_time = output.finish_time
        self.notify("request_finished", stream.entry, output)

    # ---------------------------------------------------------------- what the fleet reports

    def engine_ready(self, info: m.EngineInfo) -> None:
        self.notify("engine_started", info)

    def engine_died(self, cause: str) -> None:
        self.notify("engine_died", cause)

    def accepted(self, entry: OpenRequest) -> None:
        self.notify("request_added", entry)

    def admitted(self, entry: OpenRequest, admitted: Admitted) -> None:
        if entry.admission is None:
            entry.admission = admitted
            entry.admitted_time = admitted.time
            self.notify("request_admitted", entry)

    def reported(self, number: int, report: m.StepReport) -> None:
        self._report_time = time.monotonic()
        find = partial(self._find, number)
        for preempted in report.preempted:
            if (stream := find(preempted.request_id)) is not None:
                stream.entry.num_preemptions += 1
        take_results(report.results, find, self._take_tokens, self._take_end)
        self.notify("stepped", report)
        events: list[Event] = [*report.admitted, *report.preempted, *report.watched.in_order()]
        if events:
            for subscription in self.subscriptions:
                if subscription.replica == number:
                    subscription.add(events)

    def failed(self, entry: OpenRequest, error: OctavoError) -> None:
        stream = self.streams[entry.request_id]
        stream.fail(error)
        self.forget(stream)
        self.notify("request_failed", entry, error)

    def _find(self, number: int, request_id: str) -> RequestStream | None:
        """The stream that a replica's report means. What comes before the engine has accepted a
        request is about an earlier one of the same name, and what comes from another replica than
        the one that has it was computed before it moved."""
        stream = self.streams.get(request_id)
        at = None if stream is None else stream.entry.assignment
        return stream if at is not None and at.replica == number and at.is_accepted else None

    def _take_tokens(
        self, stream: RequestStream, index: int, added: Added, ends_by_text: bool
    ) -> None:
        _, token_ids, _, stop_reason = added
        if ends_by_text:
            self.fleet.tell(
                stream.entry, m.FinishSample(stream.request_id, index, str(stop_reason))
            )
        self._note_tokens(stream.entry, len(token_ids))
        if stream.has_ended:
            self._conclude(stream)
        elif index in stream.cancelled:
            self.cancel(stream, index)

    def _take_end(self, stream: RequestStream) -> None:
        if stream.error is not None:
            self.fleet.fail(stream.entry, stream.error)
            return
        if stream.beams:
            self._note_tokens(stream.entry, sum(len(beam.token_ids) for beam in stream.beams))
        self._conclude(stream)

    def _note_tokens(self, entry: OpenRequest, num_tokens: int) -> None:
        now = self._report_time
        if entry.first_token_time is None:
            entry.first_token_time = now
        self.notify("tokens_arrived", entry, num_tokens, now)
