"""GET /dashboard/feed: snapshots of a replica's pool and events, for as long as a page is open.

One task for each replica that is looked at asks its engine for a snapshot ten times a second while
there is a viewer, and not at all otherwise. Each viewer gets the changes since its last frame; a
slow one skips frames. All that got the same frame last get the same bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from fastapi import APIRouter, Depends, Request, Response

from octavo import __version__
from octavo.engine.events import Counters, Event
from octavo.engine.snapshot import ID_BYTES, RequestView, SequenceView, Snapshot, unpack_ids
from octavo.errors import EngineFailed, Unavailable
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.messages import EngineInfo
from octavo.server.engine_process.replica import Replica
from octavo.server.http.context import context_of, existing_replica
from octavo.server.http.errors import ApiError
from octavo.server.http.streams import EventStream
from octavo.server.observability.event_text import describe
from octavo.server.observability.metrics import Metrics

FRAME_SECONDS = 0.1
IDLE_SECONDS = 1.0  # between frames while nothing happens
MAX_EVENTS = 100  # per frame; the oldest are left out
MAX_VIEWERS = 32

Tables = dict[int, list[bytes]]  # sequence id -> one table per KV group


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What viewers know after a frame: all who got it the same, whatever they had seen before."""

    info: EngineInfo
    snapshot: Snapshot | None  # the last one of this engine, if there was any
    num_events: int  # heard by the feed until then


class Frame:
    """A replica at one moment, as viewers are told of it. It is encoded once for all viewers who
    got the same frame last."""

    def __init__(
        self,
        number: int,
        replicas: Sequence[Replica],
        snapshot: Snapshot | None,
        metrics: Metrics,
        events: Sequence[Event],
        num_events: int,
    ) -> None:
        """
        Args:
            number: which of the `replicas` it is.
            snapshot: None: there is no engine.
            events: the latest ones.
            num_events: how many the feed has heard until now.
        """
        info = replicas[number].info
        assert info is not None, "a server that has started knows all its engines"
        self._info = info
        self._number, self._replicas, self._metrics = number, replicas, metrics
        self._snapshot, self._events = snapshot, events
        self._after = Seen(info, snapshot, num_events)
        self._states = [[each.state, len(each.exchange.open)] for each in replicas]
        self._open = replicas[number].exchange.open
        self._told: dict[Seen | None, tuple[bytes, Seen]] = {}  # by what was seen before

    def tell(self, seen: Seen | None) -> tuple[bytes, Seen]:
        """The frame as server-sent events, preceded by a greeting if the engine is new to those who
        have `seen` that; and what they have seen then."""
        if seen not in self._told:
            self._told[seen] = self._encode(seen)
        return self._told[seen]

    def _encode(self, seen: Seen | None) -> tuple[bytes, Seen]:
        greeting, info, snapshot = b"", self._info, self._snapshot
        num_heard = self._after.num_events if seen is None else seen.num_events
        if seen is None or seen.info is not info:
            seen = Seen(info, None, num_heard)
            about = {"version": __version__, "num_replicas": len(self._replicas)}
            greeting = _sse("hello", about | msgspec.structs.asdict(info))
        if snapshot is None:
            return greeting + _sse("lost", {"replicas": self._states}), seen
        before = seen.snapshot
        known = {} if before is None else {view.request_id: view for view in _views(before)}
        views = {view.request_id: view for view in _views(snapshot)}
        absent = [request_id for request_id in known if request_id not in views]
        frame = self._common(snapshot) | {
            "requests": [
                _request(view, known.get(view.request_id))
                for view in views.values()
                if known.get(view.request_id) != view
            ],
            "gone": [request_id for request_id in absent if request_id not in self._open],
            # They wait behind those that a snapshot has.
            "hidden": [request_id for request_id in absent if request_id in self._open],
            "events": self._events_since(num_heard),
        }
        cached = snapshot.device.is_cached
        if before is None or before.device.is_cached != cached:
            frame["cached"] = _runs(b"\0" + cached)
        if before is None or before.pins != snapshot.pins:
            frame["pins"] = {pin.name: unpack_ids(b"".join(pin.tables)) for pin in snapshot.pins}
        return greeting + _sse("frame", frame), self._after

    def _common(self, snapshot: Snapshot) -> dict[str, Any]:
        """What all viewers are told."""
        return {
            "time": time.time(),
            "counts": _counts(snapshot),
            "totals": _totals(self._replicas[self._number].counters),
            "latency": self._metrics.latency_counts(),
            "replicas": self._states,
        }

    def _events_since(self, num_heard: int) -> list[dict[str, Any]]:
        since_boot = time.time() - time.monotonic()
        num_new = min(self._after.num_events - num_heard, len(self._events))
        return [
            dict(zip(("kind", "title", "text"), describe(event), strict=True))
            | {"time": event.time + since_boot}
            for event in self._events[len(self._events) - num_new :]
        ]


class Viewer:
    """One open page."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.frame: Frame | None = None  # the latest one
        self.seen: Seen | None = None
        self.is_over = False  # there will be no more frames


class _Closed(Exception):
    """The server is shutting down, which ends all streams."""


class Feed:
    """Owns the viewers of one replica, and the one task that asks its engine on their behalf."""

    def __init__(self, client: EngineClient, metrics: Metrics, number: int = 0) -> None:
        """Raises InvalidRequest: there is no replica of this number."""
        self._client = client
        self._metrics = metrics
        self._replica = client.replica(number)
        self._viewers: set[Viewer] = set()
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)  # the latest ones
        self._num_events = 0  # of all, also those that were left out
        self._task: asyncio.Task[None] | None = None

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Frames for a new viewer, without end; closing the iterator removes the viewer."""
        viewer = Viewer()
        self._viewers.add(viewer)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        task = self._task
        try:
            while True:
                await viewer.news.wait()
                viewer.news.clear()
                if viewer.is_over:
                    await task  # raises what ended it
                    return
                assert viewer.frame is not None, "it is the news"
                data, viewer.seen = viewer.frame.tell(viewer.seen)
                yield data
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                await self.stop()

    async def stop(self) -> None:
        """Stop asking the engine for snapshots."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _watch(self) -> None:
        try:
            async with (
                self._client.events(self._replica.number) as batches,
                asyncio.TaskGroup() as group,
            ):
                group.create_task(self._hear(batches))
                group.create_task(self._poll())
        except* _Closed:
            pass
        finally:
            # If the last viewer has left, the task has none: any new ones belong to the next task.
            if self._task is asyncio.current_task():
                for viewer in self._viewers:
                    viewer.is_over = True
                    viewer.news.set()

    async def _hear(self, batches: AsyncIterator[list[Event]]) -> None:
        async for batch in batches:
            self._events.extend(batch)
            self._num_events += len(batch)

    async def _poll(self) -> None:
        last_state: tuple[Any, ...] = ()
        last_time = 0.0
        while True:
            if self._client.health.state == "closed":
                raise _Closed
            now = time.monotonic()
            state = self._state()
            is_due = now - last_time >= IDLE_SECONDS
            has_new = any(viewer.frame is None for viewer in self._viewers)
            if is_due or has_new or state != last_state:
                last_state, last_time = state, now
                try:
                    snapshot = await self._client.snapshot(self._replica.number)
                except (Unavailable, EngineFailed):
                    snapshot = None
                frame = self._frame(snapshot)
                for viewer in self._viewers:
                    viewer.frame = frame
                    viewer.news.set()
            await asyncio.sleep(FRAME_SECONDS)

    def _frame(self, snapshot: Snapshot | None) -> Frame:
        number, replicas = self._replica.number, self._client.replicas
        events = [*self._events]
        return Frame(number, replicas, snapshot, self._metrics, events, self._num_events)

    def _state(self) -> tuple[Any, ...]:
        """Changes whenever a new snapshot may differ; costs the engine nothing."""
        replica, num_open = self._replica, len(self._client.open_requests)
        return replica.counters.num_steps, replica.gauges, replica.state, num_open


class Feeds:
    """Owns a feed for each replica that is looked at, or has been."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        self._feeds: dict[int, Feed] = {}
        self._num_viewers = 0  # also those whose streams have not begun

    def of(self, number: int) -> Feed:
        """The feed of a replica, for one more viewer, of whom `leave` must tell the end.

        Raises InvalidRequest: there is no such replica. ApiError: too many pages watch.
        """
        if number not in self._feeds:
            self._feeds[number] = Feed(self._client, self._metrics, number)
        if self._num_viewers >= MAX_VIEWERS:
            raise ApiError(
                503, f"{MAX_VIEWERS} pages watch already", code="too_many_viewers", retry_after=10
            )
        self._num_viewers += 1
        return self._feeds[number]

    def leave(self) -> None:
        """A viewer has gone."""
        self._num_viewers -= 1


def feed_router(feeds: Feeds) -> APIRouter:
    """What the dashboard reads. Authentication is up to the gate."""
    router = APIRouter(include_in_schema=False)

    @router.get("/dashboard/feed")
    async def frames(
        request: Request, replica: Annotated[int, Depends(existing_replica)]
    ) -> Response:
        feed = feeds.of(replica)
        ping_seconds = context_of(request).settings.ping_seconds
        return EventStream(feed.frames(), ping_seconds, on_end=feeds.leave)

    return router


def _views(snapshot: Snapshot) -> list[RequestView]:
    return [*snapshot.running, *snapshot.swapped, *snapshot.waiting]


def _runs(marks: bytes) -> list[int]:
    """The lengths of runs of equal bytes."""
    values = np.frombuffer(marks, np.uint8)
    starts = np.flatnonzero(values[1:] != values[:-1]) + 1
    lengths: list[int] = np.diff(starts, prepend=0, append=len(values)).tolist()
    return lengths


def _request(view: RequestView, before: RequestView | None) -> dict[str, Any]:
    """A request with what has changed since it was told last."""
    known = {} if before is None else {seq.seq_id: seq.tables for seq in before.sequences}
    return {
        "id": view.request_id,
        "state": view.status,
        "method": view.method,
        "prompt_tokens": view.num_prompt_tokens,
        "cached_tokens": view.num_cached_tokens,
        "preemptions": view.num_preemptions,
        "sequences": [
            # Beams have no index of their own: they are numbered in their present order.
            _sequence(seq, place if view.method == "beam_search" else seq.index, known)
            for place, seq in enumerate(view.sequences)
        ],
    }


def _sequence(seq: SequenceView, index: int, known: Tables) -> dict[str, Any]:
    """A sequence with what was added to its tables: [entries that stay, the entries after them]."""
    before = known.get(seq.seq_id)
    if not before or not seq.tables:  # it held no blocks, or holds none now
        before = [b"" for _ in seq.tables]
    return {
        "id": seq.seq_id,
        "index": index,
        "tokens": seq.num_tokens,
        "computed": seq.num_computed_tokens,
        "tier": "device" if seq.on_device else "swap",
        "tables": [_addition(old, new) for old, new in zip(before, seq.tables, strict=True)],
    }


def _addition(old: bytes, new: bytes) -> tuple[int, list[int]]:
    num_equal = len(old) // ID_BYTES
    if not new.startswith(old):
        size = min(len(old), len(new))
        one, other = (np.frombuffer(each[:size], f"i{ID_BYTES}") for each in (old, new))
        differing = np.flatnonzero(one != other)
        num_equal = int(differing[0]) if len(differing) else len(one)
    return num_equal, unpack_ids(new[num_equal * ID_BYTES :])


def _counts(snapshot: Snapshot) -> dict[str, int]:
    device, swap = snapshot.device, snapshot.swap
    return {
        "running": len(snapshot.running),
        "waiting": snapshot.num_waiting,
        "swapped": len(snapshot.swapped),
        "held": device.num_held,
        "cached": device.num_free_cached,
        "free": device.num_free,
        "swap_held": swap.num_held,
    }


def _totals(counters: Counters) -> dict[str, int]:
    return {
        "output_tokens": counters.num_output_tokens,
        "computed_tokens": counters.num_computed_tokens,
        "lookup_tokens": counters.num_lookup_tokens,
        "hit_tokens": counters.num_hit_tokens,
    }


def _sse(name: str, values: dict[str, Any]) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(values) + b"\n\n"
