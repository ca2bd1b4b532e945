from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from octavo.engine.events import Copied
from octavo.engine.snapshot import Snapshot
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.supervision import Health
from octavo.server.http.context import Context
from octavo.server.http.errors import add_error_handlers
from octavo.server.http.gate import Gate
from octavo.server.http.keys import ApiKeys
from octavo.server.http.pages import pages_router
from octavo.server.http.playpool import TEXTBOOK
from octavo.server.http.settings import ServerSettings
from octavo.server.http.token_texts import TokenTexts
from octavo.server.observability import feed as feed_module
from octavo.server.observability.debug import Lookups, debug_router
from octavo.server.observability.feed import MAX_EVENTS, MAX_VIEWERS, Feed, Feeds, feed_router
from octavo.server.observability.metrics import Metrics
from octavo.server.observability.observation import Observation
from server.clients import SECONDS
from server.observed import (
    NUM_BLOCKS,
    FakeClient,
    admitted,
    engine_info,
    open_request,
    snapshot,
    view,
)


def new_feed(client: FakeClient) -> Feed:
    return Feed(cast(EngineClient, client), Metrics("demo"))


def new_app(client: FakeClient, feeds: Feeds | None = None) -> TestClient:
    app = FastAPI()
    app.state.context = Context(
        cast(EngineClient, client), ServerSettings(("demo",)), TokenTexts(None)
    )
    routers = [
        pages_router(),
        debug_router(cast(EngineClient, client), Lookups()),
        feed_router(feeds or Feeds(cast(EngineClient, client), Metrics("demo"))),
    ]
    add_error_handlers(app, routers)
    for router in routers:
        app.include_router(router)
    return TestClient(app)


def parse(data: bytes) -> list[tuple[str, dict[str, Any]]]:
    """The server-sent events in a piece of a stream."""
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", data.decode())
    return [(name, json.loads(values)) for name, values in found]


async def next_frame(frames: AsyncIterator[bytes]) -> dict[str, Any]:
    return parse(await asyncio.wait_for(anext(frames), SECONDS))[-1][1]


# -------------------------------------------------------------------- the feed


def test_frames_tell_what_changed() -> None:
    async def scenario() -> None:
        client = FakeClient()
        feed = new_feed(client)
        client.picture = snapshot([view("r1", [3, 4], [3, 5])], cached={3, 9})
        frames = feed.frames()
        (hello, about), (_, frame) = parse(await asyncio.wait_for(anext(frames), SECONDS))
        assert (hello, about["num_blocks"]) == ("hello", NUM_BLOCKS)
        assert about["kv_group_names"] == ["full attention"]
        [request] = frame["requests"]
        assert [seq["tables"] for seq in request["sequences"]] == [[[0, [3, 4]]], [[0, [3, 5]]]]
        assert frame["counts"]["held"] == 3
        assert frame["cached"] == [3, 1, 5, 1, 3]  # runs from the null block on: 3 and 9 are
        # One table grows by a block, the other one's tail is copied.
        client.picture = snapshot([view("r1", [3, 4, 7], [3, 8])], cached={3, 9})
        client.counters.num_steps += 1
        frame = await next_frame(frames)
        [request] = frame["requests"]
        assert [seq["tables"] for seq in request["sequences"]] == [[[2, [7]]], [[1, [8]]]]
        assert "cached" not in frame
        # Preempted by recompute, it holds nothing; then it holds blocks again.
        waiting = view("r1", [3, 4])
        waiting = replace(waiting, sequences=[replace(waiting.sequences[0], tables=[])])
        for picture, tables in ((waiting, []), (view("r1", [3, 6]), [[0, [3, 6]]])):
            client.picture = snapshot([picture], cached={3, 9})
            client.counters.num_steps += 1
            [request] = (await next_frame(frames))["requests"]
            assert request["sequences"][0]["tables"] == tables
        client.picture = snapshot([])
        client.counters.num_steps += 1
        frame = await next_frame(frames)
        assert (frame["gone"], frame["requests"]) == (["r1"], [])
        # A new engine: everything is told anew. No engine: that is told.
        client.info = engine_info(pid=2)
        client.picture = snapshot([view("r2", [1])])
        client.counters.num_steps += 1
        names = [name for name, _ in parse(await asyncio.wait_for(anext(frames), SECONDS))]
        assert names == ["hello", "frame"]
        client.picture = None
        client.counters.num_steps += 1
        lost = ("lost", {"replicas": [["ready", 0]]})
        assert parse(await asyncio.wait_for(anext(frames), SECONDS)) == [lost]
        await frames.aclose()

    asyncio.run(scenario())


def test_who_waits_behind_those_shown_has_not_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot has only the first that wait, and those of higher priority come before them."""

    async def scenario() -> None:
        client = FakeClient()
        monkeypatch.setattr(
            FakeClient, "exchange", SimpleNamespace(open={"r2": open_request("r2")})
        )
        client.picture = snapshot([view("r1", [3]), view("r2", [4])])
        frames = new_feed(client).frames()
        await next_frame(frames)
        client.picture = snapshot([])
        client.counters.num_steps += 1
        frame = await next_frame(frames)
        assert (frame["gone"], frame["hidden"]) == (["r1"], ["r2"])
        client.picture = snapshot([view("r2", [4, 5])])
        client.counters.num_steps += 1
        [request] = (await next_frame(frames))["requests"]
        assert request["sequences"][0]["tables"] == [[0, [4, 5]]]
        await frames.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize("cached", [set(), {1}, {NUM_BLOCKS}, {1, 2, 5, NUM_BLOCKS}])
def test_cached_blocks_are_told_as_runs(cached: set[int]) -> None:
    async def scenario() -> None:
        client = FakeClient()
        client.picture = snapshot([], cached)
        frames = new_feed(client).frames()
        runs = (await next_frame(frames))["cached"]
        assert runs == [
            len(list(run)) for _, run in groupby(range(NUM_BLOCKS + 1), cached.__contains__)
        ]
        await frames.aclose()

    asyncio.run(scenario())


def test_events_are_told_in_words_and_bounded() -> None:
    async def scenario() -> None:
        client = FakeClient()
        frames = new_feed(client).frames()
        await next_frame(frames)
        [queue] = client.subscribers
        queue.put_nowait([admitted("r7"), Copied(2.0, [(3, 8)])])
        events: list[dict[str, Any]] = []
        while not events:
            events = (await next_frame(frames))["events"]
        assert [event["kind"] for event in events] == ["admit", "copy"]
        assert "16 of 32 tokens from the cache" in events[0]["text"]
        assert events[1]["text"] == "before a write: 3 → 8"
        for _ in range(MAX_EVENTS + 20):
            queue.put_nowait([Copied(2.0, [(3, 8)])])
        frame = await next_frame(frames)
        while not frame["events"]:
            frame = await next_frame(frames)
        assert len(frame["events"]) <= MAX_EVENTS
        await frames.aclose()

    asyncio.run(scenario())


def test_what_viewers_have_in_common_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of large pools take long, and requests would wait for those of all pages."""
    encoded: list[str] = []
    sse = feed_module._sse

    def count(name: str, values: dict[str, Any]) -> bytes:
        encoded.append(name)
        return sse(name, values)

    monkeypatch.setattr(feed_module, "_sse", count)

    async def scenario() -> None:
        client = FakeClient()
        client.picture = snapshot([view("r1", [3, 4])])
        feed = new_feed(client)
        viewers = [feed.frames() for _ in range(MAX_VIEWERS)]
        first = await asyncio.gather(*(asyncio.wait_for(anext(each), SECONDS) for each in viewers))
        assert len(set(first)) == 1
        assert encoded == ["hello", "frame"]
        encoded.clear()
        # One that skips a frame gets what the others get in two.
        *quick, slow = viewers
        for tables, events in (([3, 4, 5], "e1"), ([3, 4, 5, 6], "e2")):
            client.subscribers[0].put_nowait([admitted(events)])
            client.picture = snapshot([view("r1", tables)])
            client.counters.num_steps += 1
            frames = [parse(data)[0][1] for data in await asyncio.gather(*map(anext, quick))]
            assert all(frame == frames[0] for frame in frames)
            assert [event["text"].split(":")[0] for event in frames[0]["events"]] == [events]
            assert frames[0]["requests"][0]["sequences"][0]["tables"] == [
                [len(tables) - 1, tables[-1:]]
            ]
        assert encoded == ["frame", "frame"]
        late = await next_frame(slow)
        assert [event["text"].split(":")[0] for event in late["events"]] == ["e1", "e2"]
        assert late["requests"][0]["sequences"][0]["tables"] == [[2, [5, 6]]]
        # From then on it knows what the others know, and so does one that has just come.
        viewers.append(feed.frames())
        await next_frame(viewers[-1])
        await asyncio.gather(*map(anext, [*quick, slow]))  # the frame that the new one caused
        encoded.clear()
        client.picture = snapshot([view("r1", [3, 4, 5, 6, 7])])
        client.counters.num_steps += 1
        assert len(set(await asyncio.gather(*map(anext, viewers)))) == 1
        assert encoded == ["frame"]
        for frames_of_one in viewers:
            await frames_of_one.aclose()

    asyncio.run(scenario())


def test_nobody_looks_nothing_is_asked() -> None:
    async def scenario() -> None:
        client = FakeClient()
        feed = new_feed(client)
        assert (client.num_looks, client.subscribers) == (0, [])
        one, two = feed.frames(), feed.frames()
        await next_frame(one)
        await next_frame(two)
        assert feed.num_viewers == 2
        await one.aclose()
        assert len(client.subscribers) == 1  # one for all viewers, still there for the second
        await two.aclose()
        assert (feed.num_viewers, client.subscribers) == (0, [])
        looks = client.num_looks
        client.counters.num_steps += 5
        await asyncio.sleep(0.3)
        assert client.num_looks == looks
        # And it works again for the next one, even one who comes while the last one leaves.
        again = feed.frames()
        await next_frame(again)
        assert client.num_looks == looks + 1
        leaving = asyncio.create_task(again.aclose())
        await asyncio.sleep(0)
        coming = feed.frames()
        await next_frame(coming)
        await leaving
        client.counters.num_steps += 1
        await next_frame(coming)
        await coming.aclose()
        assert (feed.num_viewers, client.subscribers) == (0, [])

    asyncio.run(scenario())


def test_a_failure_ends_the_stream_with_its_error() -> None:
    async def scenario() -> None:
        client = FakeClient()
        feed = new_feed(client)
        frames = feed.frames()
        await next_frame(frames)
        client.picture = cast(Snapshot, "no snapshot")
        client.counters.num_steps += 1
        with pytest.raises(Exception, match="has no attribute"):
            await next_frame(frames)
        assert (feed.num_viewers, client.subscribers) == (0, [])
        # What went wrong in the watching task ends the stream, too; a later page starts anew.
        client.picture = snapshot([])
        frames = feed.frames()
        await next_frame(frames)
        client.num_looks = cast(int, None)
        client.counters.num_steps += 1
        with pytest.raises(ExceptionGroup) as caught:
            await next_frame(frames)
        assert caught.group_contains(TypeError)
        assert feed.num_viewers == 0

    asyncio.run(scenario())


def test_streams_end_with_the_server() -> None:
    async def scenario() -> None:
        client = FakeClient()
        feed = new_feed(client)
        frames = feed.frames()
        await next_frame(frames)
        client.health = Health(False, "closed", "closed", 0)
        with pytest.raises(StopAsyncIteration):
            await next_frame(frames)
        assert (feed.num_viewers, client.subscribers) == (0, [])

    asyncio.run(scenario())


def test_too_many_viewers_are_refused() -> None:
    async def scenario() -> None:
        client = FakeClient()
        feeds = Feeds(cast(EngineClient, client), Metrics("demo"))
        many = [feeds.of(0).frames() for _ in range(MAX_VIEWERS)]
        # Also while none of their streams has begun, as when all come at once.
        for _ in range(2):
            reply = new_app(client, feeds).get("/dashboard/feed")
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "10")
            for frames in many:
                await next_frame(frames)
        for frames in many:
            await frames.aclose()

    asyncio.run(scenario())


def test_a_viewer_who_leaves_makes_room() -> None:
    client = FakeClient()
    feeds = Feeds(cast(EngineClient, client), Metrics("demo"))
    for _ in range(MAX_VIEWERS - 1):
        feeds.of(0)
    client.health = Health(False, "closed", "closed", 0)  # which ends a stream at once
    http = new_app(client, feeds)
    for _ in range(3):
        assert http.get("/dashboard/feed").status_code == 200


@pytest.mark.parametrize("number", [-1, 1, 10**30])
def test_there_is_no_such_replica(number: int) -> None:
    http = new_app(FakeClient())
    for path in ("/", "/dashboard/feed", "/debug/kv"):
        reply = http.get(path, params={"replica": number})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (404, "replica")
        assert "is not one of the 1 replicas" in error["message"]
        reply = http.get(path, params={"replica": "first"})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "replica")


# -------------------------------------------------------------------- the documents


@pytest.mark.parametrize("path", ["/", "/pool"])
def test_pages_are_whole_and_run_their_own_scripts_only(path: str) -> None:
    reply = new_app(FakeClient()).get(path)
    html, policy = reply.text, reply.headers["content-security-policy"]
    assert "<!-- s" not in html  # every part has been put in
    for attribute in re.findall(r'(?:src|href)="([^"]*)"', html):
        assert attribute.startswith(("/", "#", "data:")), attribute
    assert not re.search(r"@import|url\(|\son\w+=", html)
    [script] = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "innerHTML" not in script


def test_everything_is_behind_the_api_key() -> None:
    client = cast(EngineClient, FakeClient())
    app = FastAPI()
    settings = ServerSettings(("demo",), ApiKeys(["key-12345"]))
    app.state.context = Context(client, settings, TokenTexts(None))
    routers = Observation("demo").routers(client)
    for router in routers:
        app.include_router(router)
    app.add_middleware(Gate, settings=settings)
    http = TestClient(app)
    routes = [route for router in routers for route in router.routes]
    paths = [route.path for route in routes if isinstance(route, APIRoute)]
    assert {"/", "/pool", "/dashboard/feed", "/metrics", "/debug/kv"} <= set(paths)
    for path in paths:
        method = "POST" if path == "/pool/play" else "GET"
        assert http.request(method, path).status_code == 401, path
    page = http.get("/", headers={"accept": "text/html"})
    assert page.headers["www-authenticate"].startswith("Basic")  # a browser asks its user
    assert http.get("/", auth=("", "key-12345")).status_code == 200
    bearer = {"authorization": "Bearer key-12345"}
    assert http.get("/metrics", headers=bearer).status_code == 200


def test_play_endpoints() -> None:
    http = new_app(FakeClient())
    lesson = http.get("/pool/textbook").json()
    assert (lesson["operations"], lesson["paged"], lesson["naive"]) == (TEXTBOOK, 12, 16)
    state = http.post("/pool/play", json={"operations": lesson["operations"]}).json()
    assert (state["num_held"], state["num_naive"]) == (8, 20)
    for body, message in (
        ({"operations": [{"op": "free", "sequence": "Z"}]}, "operations[0].sequence: there is no"),
        ({"operations": [3]}, "operations[0]: input should be an object, not 3"),
        ({"operation": []}, "operation: there is no such field; did you mean operations?"),
        ({}, "operations: it is missing"),
    ):
        reply = http.post("/pool/play", json=body)
        assert reply.status_code == 400
        assert message in reply.json()["error"]["message"]
    deep = '{"operations": [{"op": ' + "[" * 100_000
    reply = http.post("/pool/play", content=deep, headers={"content-type": "application/json"})
    assert reply.status_code == 400
