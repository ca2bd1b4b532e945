"""GET /dashboard/feed: snapshots of a replica's pool and events, for as long as a page is open.

One task for each replica that is looked at asks its engine for a snapshot ten times a second while
there is a viewer, and not at all otherwise. Each viewer gets the changes since its last frame; a
slow one skips frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from itertools import groupby
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request, Response

from octavo import __version__
from octavo.engine.events import Counters, Event
from octavo.engine.snapshot import RequestView, SequenceView, Snapshot
from octavo.errors import EngineFailed, Unavailable
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.messages import EngineInfo
from octavo.server.engine_process.replica import Replica
from octavo.server.http.context import context_of, existing_replica
from octavo.server.http.errors import ApiError
from octavo.server.http.streams import EventStream
from octavo.server.observability.event_text import describe
from octavo.server.observability.metrics import LatencyCounts, Metrics

FRAME_SECONDS = 0.1
IDLE_SECONDS = 1.0  # between frames while nothing happens
MAX_EVENTS = 100  # per frame; the oldest are left out
MAX_VIEWERS = 32

Tables = dict[int, list[list[int]]]  # sequence id -> one table per KV group


class Viewer:
    """One open page: what has been sent to it, and what is to be sent next."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.is_new = True  # no frame has been sent yet
        self.is_over = False  # there will be no more frames
        self.snapshot: Snapshot | None = None  # None: there is no engine
        self.events: list[Event] = []
        self._info: EngineInfo | None = None
        self._requests: dict[str, RequestView] = {}
        self._tables: dict[str, Tables] = {}
        self._cached: bytes | None = None
        self._pins: Any = None

    def hear(self, batch: list[Event]) -> None:
        self.events = [*self.events, *batch][-MAX_EVENTS:]

    def encode(self, number: int, replicas: Sequence[Replica], latency: LatencyCounts) -> bytes:
        """The next frame of a replica as server-sent events, preceded by a greeting if its engine
        is new."""
        greeting, replica = b"", replicas[number]
        info = replica.info
        assert info is not None, "a server that has started knows all its engines"
        if info is not self._info:
            self._info = info
            self._requests, self._tables, self._cached, self._pins = {}, {}, None, None
            about = {"version": __version__, "num_replicas": len(replicas)}
            greeting = _sse("hello", about | msgspec.structs.asdict(info))
        states = [[each.state, len(each.exchange.open)] for each in replicas]
        snapshot = self.snapshot
        if snapshot is None:
            return greeting + _sse("lost", {"replicas": states})
        frame = {
            "time": time.time(),
            "counts": _counts(snapshot),
            "totals": _totals(replica.counters),
            "latency": latency,
            "replicas": states,
            "requests": self._changed_requests(snapshot),
            "gone": self._gone(snapshot),
            "events": self._new_events(),
        }
        if snapshot.device.is_cached != self._cached:
            self._cached = snapshot.device.is_cached
            frame["cached"] = [len(list(run)) for _, run in groupby(b"\0" + self._cached)]
        pins = {pin.name: [b for ids in pin.block_ids for b in ids] for pin in snapshot.pins}
        if pins != self._pins:
            self._pins = frame["pins"] = pins
        return greeting + _sse("frame", frame)

    def _changed_requests(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        changed = []
        for view in [*snapshot.running, *snapshot.swapped, *snapshot.waiting]:
            if self._requests.get(view.request_id) != view:
                changed.append(self._request(view))
                self._requests[view.request_id] = view
        return changed

    def _request(self, view: RequestView) -> dict[str, Any]:
        known = self._tables.get(view.request_id, {})
        self._tables[view.request_id] = {seq.seq_id: seq.block_ids for seq in view.sequences}
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

    def _gone(self, snapshot: Snapshot) -> list[str]:
        alive = {
            view.request_id for view in [*snapshot.running, *snapshot.swapped, *snapshot.waiting]
        }
        gone = [request_id for request_id in self._requests if request_id not in alive]
        for request_id in gone:
            del self._requests[request_id], self._tables[request_id]
        return gone

    def _new_events(self) -> list[dict[str, Any]]:
        since_boot = time.time() - time.monotonic()
        events, self.events = self.events, []
        return [
            dict(zip(("kind", "title", "text"), describe(event), strict=True))
            | {"time": event.time + since_boot}
            for event in events
        ]


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
                latency = self._metrics.latency_counts()
                yield viewer.encode(self._replica.number, self._client.replicas, latency)
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
            for viewer in self._viewers:
                viewer.hear(batch)

    async def _poll(self) -> None:
        last_state: tuple[Any, ...] = ()
        last_time = 0.0
        while True:
            if self._client.health.state == "closed":
                raise _Closed
            now = time.monotonic()
            state = self._state()
            is_due = now - last_time >= IDLE_SECONDS
            if is_due or state != last_state or any(viewer.is_new for viewer in self._viewers):
                last_state, last_time = state, now
                try:
                    snapshot = await self._client.snapshot(self._replica.number)
                except (Unavailable, EngineFailed):
                    snapshot = None
                for viewer in self._viewers:
                    viewer.snapshot = snapshot
                    viewer.is_new = False
                    viewer.news.set()
            await asyncio.sleep(FRAME_SECONDS)

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


def _sequence(seq: SequenceView, index: int, known: Tables) -> dict[str, Any]:
    """A sequence with what was added to its tables: [entries that stay, the entries after them]."""
    before = known.get(seq.seq_id)
    if not before or not seq.block_ids:  # it held no blocks, or holds none now
        before = [[] for _ in seq.block_ids]
    return {
        "id": seq.seq_id,
        "index": index,
        "tokens": seq.num_tokens,
        "computed": seq.num_computed_tokens,
        "tier": "device" if seq.on_device else "swap",
        "tables": [_addition(old, new) for old, new in zip(before, seq.block_ids, strict=True)],
    }


def _addition(old: list[int], new: list[int]) -> tuple[int, list[int]]:
    if new[: len(old)] == old:
        return len(old), new[len(old) :]
    num_equal = next(
        (i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
        min(len(old), len(new)),
    )
    return num_equal, new[num_equal:]


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
