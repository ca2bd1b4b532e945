"""Long work: short work does not wait for it, and the longest waits for each other."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from octavo.server.engine_process.client import EngineClient
from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.settings import ServerSettings
from octavo.server.offload import HUGE_TEXT, LARGE_BODY, LARGE_REPLY, LONG_TEXT, Offload
from server.clients import run, symbolic_client


def test_nothing_waits_for_huge_texts_but_huge_ones() -> None:
    gate = threading.Event()
    threads: list[int] = []

    def wait() -> None:
        threads.append(threading.get_ident())
        gate.wait()

    async def scenario() -> None:
        work = Offload()
        huge = [asyncio.ensure_future(work.text(HUGE_TEXT, wait)) for _ in range(8)]
        main = threading.get_ident()
        assert await work.text(LONG_TEXT - 1, threading.get_ident) == main
        assert await work.text(LONG_TEXT, threading.get_ident) not in (main, *threads)
        await asyncio.to_thread(lambda: None)
        assert len(threads) <= 1  # the others wait
        assert not any(each.done() for each in huge)
        gate.set()
        await asyncio.gather(*huge)
        assert len(threads) == 8
        assert len(set(threads)) == 1
        work.close()

    asyncio.run(scenario())


def test_a_caller_that_leaves_gives_up_its_place() -> None:
    gate, began = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        began.set()
        gate.wait()

    async def scenario() -> None:
        work = Offload()
        running = asyncio.ensure_future(work.text(HUGE_TEXT, first))
        await asyncio.to_thread(began.wait)
        waiting = asyncio.ensure_future(work.text(HUGE_TEXT, lambda: done.append(1)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        gate.set()
        await running
        await work.text(HUGE_TEXT, lambda: done.append(2))
        work.close()

    asyncio.run(scenario())
    assert done == [2]


def test_large_bodies_wait_for_each_other_and_for_no_text() -> None:
    gate = threading.Event()
    threads: list[int] = []

    def decode() -> int:
        threads.append(threading.get_ident())
        return len(threads)

    async def scenario() -> None:
        work = Offload()
        huge = asyncio.ensure_future(work.text(HUGE_TEXT, gate.wait))
        main = threading.get_ident()
        assert await work.body(LARGE_BODY, threading.get_ident) == main
        assert await asyncio.gather(*[work.body(LARGE_BODY + 1, decode) for _ in range(4)]) == [
            1,
            2,
            3,
            4,
        ]
        assert len({*threads}) == 1
        assert main not in threads
        assert not huge.done()
        gate.set()
        await huge
        work.close()

    asyncio.run(scenario())


def test_large_replies_wait_for_each_other_and_for_no_body() -> None:
    gate = threading.Event()
    threads: list[int] = []

    async def scenario() -> None:
        work = Offload()
        body = asyncio.ensure_future(work.body(LARGE_BODY + 1, gate.wait))
        main = threading.get_ident()
        assert await work.reply(LARGE_REPLY, threading.get_ident) == main
        for each in await asyncio.gather(
            *[work.reply(LARGE_REPLY + 1, threading.get_ident) for _ in range(4)]
        ):
            threads.append(each)
        assert len({*threads}) == 1
        assert main not in threads
        assert not body.done()
        gate.set()
        await body
        work.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("number", [2, 300])
@pytest.mark.parametrize("path", ["/v1/score", "/v1/embeddings"])
def test_many_tokens_are_checked_in_a_thread(
    path: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt that pairs share counts for each, so that a short body may have millions."""
    threads = []
    check = EngineClient.check_prompts

    def checking(*args: Any) -> None:
        threads.append(threading.current_thread())
        check(*args)

    monkeypatch.setattr(EngineClient, "check_prompts", checking)
    tokens, wrong = [1] * 30, [-1]
    body = {
        "/v1/score": {"prompt": tokens, "continuation": [[2]] * (number - 1) + [wrong]},
        "/v1/embeddings": {"input": [tokens] * (number - 1) + [wrong]},
    }[path]

    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",)))
            status, _, data = await post(app, path, json.dumps(body).encode())
            assert (status, json.loads(data)["error"]["code"]) == (400, "invalid_value")

    run(test())
    [thread] = {*threads}
    assert (thread is threading.current_thread()) is (number == 2)
