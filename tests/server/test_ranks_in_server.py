"""A server whose model two ranks share: a rank that is killed or stopped under load costs no token,
and no process outlives its parent."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from processes import HANG, assert_gone, descendants, engines, running
from server.live_server import LiveServer, live_server

NUM_STREAMS = 8
OPTIONS = ("--tensor-parallel-size", "2", "--rank-timeout", "6", "--load-format", "dummy")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(*OPTIONS) as running:
        yield running


def say(server: LiveServer, number: int) -> str:
    """One stream's text: greedy, or drawn with a seed."""
    fields = {"max_tokens": 120, "ignore_eos": True, "temperature": number % 2, "seed": number}
    return server.complete([number + 5] * 9, **fields)["choices"][0]["text"]


def say_all(server: LiveServer, victim: int | None = None, number: int = 0) -> list[str]:
    """All streams at once; `victim` gets the signal while they run."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        streams = [pool.submit(say, server, number) for number in range(NUM_STREAMS)]
        if victim is not None:
            wait_for_steps(server)
            os.kill(victim, number)
        return [stream.result() for stream in streams]


def wait_for_steps(server: LiveServer) -> None:
    """Return when most streams run."""
    deadline = time.monotonic() + HANG
    while time.monotonic() < deadline:
        running = re.search(
            r"^octavo_num_requests_running\S* (\S+)", server.get("/metrics").text, re.M
        )
        if running is not None and float(running[1]) > NUM_STREAMS / 2:
            return
    raise AssertionError("the streams were not seen running")


def rank_pids(server: LiveServer) -> list[int]:
    return running(server.process.pid, "octavo.executor.rank")


def ranks_of(server: LiveServer) -> list[int]:
    ranks = rank_pids(server)
    assert len(ranks) == 2
    return ranks


@pytest.fixture(scope="module")
def expected(server: LiveServer) -> list[str]:
    texts = say_all(server)
    assert len(set(texts)) == NUM_STREAMS
    return texts


def test_what_is_shown_of_ranks(server: LiveServer) -> None:
    metrics = server.get("/metrics").text
    assert re.search(r"^octavo_num_ranks\S* 2\.0$", metrics, re.M)
    values = re.findall(r'^octavo_device_memory_bytes{component="(\w+)"\S* (\S+)$', metrics, re.M)
    memory = {component: float(value) for component, value in values}
    assert set(memory) == {"weights", "activations", "graphs", "kv_cache", "unused"}
    assert 0 < memory["weights"] < memory["kv_cache"]
    assert "octavo_engine_healthy" in metrics


@pytest.mark.parametrize(
    ("rank", "number"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_streams_survive_a_rank(
    server: LiveServer, expected: list[str], rank: int, number: int
) -> None:
    ranks = ranks_of(server)
    assert say_all(server, ranks[rank], number) == expected
    assert_gone(ranks)


def test_a_rank_that_dies_while_nothing_runs_is_replaced(server: LiveServer) -> None:
    ranks = ranks_of(server)
    os.kill(ranks[1], signal.SIGKILL)
    assert_gone(ranks)
    deadline = time.monotonic() + HANG
    while len(found := rank_pids(server)) < 2 or set(found) & set(ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_ranks_end_with_their_engine_and_streams_go_on(
    server: LiveServer, expected: list[str]
) -> None:
    ranks = ranks_of(server)
    [engine] = engines(server.process.pid)
    assert say_all(server, engine, signal.SIGKILL) == expected
    assert_gone([engine, *ranks])


def test_nothing_outlives_a_server_that_is_killed(server: LiveServer) -> None:
    pids = list(descendants(server.process.pid))
    assert len(pids) == 3
    server.process.kill()
    server.process.wait()
    assert_gone(pids)
