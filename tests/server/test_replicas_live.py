"""`octavo serve --replicas`: streams of all kinds, one engine process killed under them."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from processes import engines, wait_for_engines
from server.live_server import OPEN, LiveServer, live_server

NUM_STREAMS = 30


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    # In float32, tokens do not depend on the batch, even if the sums of the CPU's library do.
    with live_server("--replicas", str(request.param), "--dtype", "float32") as running:
        yield running


def body(number: int) -> dict[str, Any]:
    """One of six kinds: greedy, drawn with a seed, several samples, penalties, beams, logprobs."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 1, "seed": number},
        {"temperature": 1, "seed": number, "n": 3},
        {"temperature": 1, "seed": number, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        {"beam_width": 3, "n": 3, "max_tokens": 30},
        {"temperature": 0.7, "seed": number, "logprobs": 2},
    )
    text = f"Once upon a time, number {number // 2}"
    return {"prompt": text, "max_tokens": 120, "ignore_eos": True, **kinds[number % 6]}


def texts(server: LiveServer, number: int) -> list[str]:
    """The text of each choice, as a stream or whole."""
    fields = body(number)
    if number % 2 or number % 6 == 4:
        response = server.post("/v1/completions", fields)
        assert response.status_code == 200, response.text
        return [choice["text"] for choice in response.json()["choices"]]
    found = [""] * fields.get("n", 1)
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json={**fields, "stream": True}, **OPEN
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            data = line.removeprefix("data: ")
            if data == line or data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                found[choice["index"]] += choice["text"]
    return found


def num_running(server: LiveServer) -> float:
    found = re.search(r"^octavo_num_requests_running\S* (\S+)", server.get("/metrics").text, re.M)
    assert found is not None
    return float(found[1])


@pytest.mark.slow
def test_no_stream_is_lost_or_altered_when_a_replica_is_killed(server: LiveServer) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        expected = [*pool.map(lambda number: texts(server, number), range(NUM_STREAMS))]
        for _ in range(2):
            pids = engines(server.process.pid)
            streams = [pool.submit(texts, server, number) for number in range(NUM_STREAMS)]
            while num_running(server) < NUM_STREAMS / 2:
                assert not all(stream.done() for stream in streams), "not seen running"
                time.sleep(0.01)
            os.kill(pids[0], signal.SIGKILL)
            assert server.get("/health").status_code == 200
            assert [stream.result() for stream in streams] == expected
            wait_for_engines(server.process.pid, len(pids))
