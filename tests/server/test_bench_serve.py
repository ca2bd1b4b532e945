from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from cli.click_harness import run as octavo
from octavo.bench.client_load import Call, Query, Target, poisson_times, send_all
from octavo.bench.serve import find_capacity, report_of, run_serve, serve_values
from octavo.errors import ConfigError


class FakeServer:
    """Answers completions as the prompt's first token id says; keeps what it was asked."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.num_open = self.most_open = 0

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.keys.add(request.headers.get("Authorization"))
        behaviour = body["prompt"][0] if "prompt" in body else 0
        if behaviour == 429:
            error = {"error": {"message": "too many", "type": "rate_limit_error"}}
            return web.json_response(error, status=429, headers={"Retry-After": "7"})
        if behaviour == 500:
            return web.json_response({"error": {"message": "broken"}}, status=500)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            if behaviour == 13 and i == 1:
                await self._event(response, {"error": {"message": "engine gone"}})
            if behaviour == 14 and i == 1:
                self.num_open -= 1
                return response  # the stream ends without [DONE]
            await self._event(response, {"choices": [{"index": 0, "text": "x"}]})
        usage = {
            "prompt_tokens": 10,
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": 4},
        }
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        self.num_open -= 1
        return response

    async def _event(self, response: web.StreamResponse, value: dict[str, Any]) -> None:
        await response.write(b"data: " + json.dumps(value).encode() + b"\n\n")


@pytest.fixture
def fake() -> Iterator[tuple[FakeServer, str]]:
    """A server on loopback in a thread of its own, and its URL."""
    server, loop, address = FakeServer(), asyncio.new_event_loop(), []
    is_up = threading.Event()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/v1/models", server.models)
        app.router.add_post("/v1/completions", server.complete)
        app.router.add_get("/behind/v1/models", server.models)
        app.router.add_post("/behind/v1/completions", server.complete)
        app.router.add_post("/v1/chat/completions", server.complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        address.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        is_up.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert is_up.wait(60)
    yield server, address[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(60)


def call(sent: float, chunks: list[float], num_output: int, **values: Any) -> Call:
    gaps = [b - a for a, b in pairwise(chunks)]
    return Call("completed", sent, chunks[0], chunks[-1], gaps, 10, 0, num_output, **values)


def test_definitions() -> None:
    calls = [
        call(10.0, [10.5, 10.7, 11.5], 6),  # 3 chunks, 6 tokens
        call(10.2, [10.4], 1),  # one token: no TPOT, no ITL
        Call("refused", 10.3, None, 10.4, error="429: busy"),
        Call("failed", 10.3, None, 12.0, error="reset"),
    ]
    report = report_of(calls, 3.0)
    assert report.seconds == pytest.approx(2.0)
    assert (report.num_completed, report.num_refused, report.num_failed) == (2, 1, 1)
    assert report.peak_concurrency == 4
    assert report.ttft.mean == pytest.approx((0.5 + 0.2) / 2)
    assert report.tpot.mean == pytest.approx((1.5 - 0.5) / 5)
    assert report.itl.mean == pytest.approx((0.2 + 0.8) / 2)
    assert report.e2e.mean == pytest.approx((1.5 + 0.2) / 2)
    assert report.normalized.mean == pytest.approx((1.5 / 6 + 0.2 / 1) / 2)
    assert report.errors == {"reset": 1}
    values = serve_values(report)
    assert values["median_e2el_ms"] == pytest.approx(850)
    assert values["output_throughput"] == pytest.approx(7 / 2)


def test_poisson_times() -> None:
    times = poisson_times(4000, 50.0, seed=1)
    draw, now = random.Random(1), 0.0
    for time in times[:3]:
        now += draw.expovariate(50.0)
        assert time == now
    assert times[-1] == pytest.approx(4000 / 50, rel=0.05)
    assert poisson_times(3, float("inf"), seed=1) == [0.0, 0.0, 0.0]


def test_what_becomes_of_requests(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    target = Target(url, "fake", api_key="secret-key", temperature=0.5)
    queries = [Query([behaviour, 2], 4) for behaviour in (1, 429, 500, 13, 14)]
    fine, busy, broken, error_inside, cut = asyncio.run(send_all(target, queries, [0.0] * 5))
    assert (fine.outcome, fine.num_output_tokens, fine.num_cached_tokens) == ("completed", 4, 4)
    assert len(fine.gaps) == 3
    assert fine.first is not None
    assert fine.first - fine.sent + sum(fine.gaps) == pytest.approx(fine.seconds)
    assert (busy.outcome, busy.retry_after) == ("refused", 7.0)
    assert broken.outcome == "failed"
    assert "500" in str(broken.error)
    assert (error_inside.outcome, error_inside.error) == ("failed", "engine gone")
    assert (cut.outcome, cut.error) == ("failed", "the stream ended early")
    assert server.keys == {"Bearer secret-key"}
    body = server.bodies[0]
    assert (body["temperature"], body["ignore_eos"]) == (0.5, True)
    assert body["stream_options"] == {"include_usage": True}


def test_concurrency_limit_and_capacity(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    target = Target(url, "fake")
    queries = [Query([1], 3)] * 12
    report = asyncio.run(run_serve(target, queries, float("inf"), max_concurrency=2))
    assert report.num_completed == 12
    assert server.most_open == report.peak_concurrency == 2
    assert report.prefix_hit_rate == pytest.approx(0.4)
    assert asyncio.run(find_capacity(target, queries)) > 0


def test_command(fake: tuple[FakeServer, str], tmp_path: Path) -> None:
    server, url = fake
    trace = tmp_path / "trace.csv"
    trace.write_text("prompt_tokens,output_tokens\n40,6\n20,2\n8,1\n")
    args = ("bench", "serve", "--url", url, "--trace", trace)
    result = octavo(*args, "--scale", 0.5, "--request-rate", "200,inf")
    assert result.exit_code == 0, result.output
    *text, last = result.stdout.strip().splitlines()
    report = json.loads(last)
    assert [run["request_rate"] for run in report["runs"]] == [200, "inf"]
    assert [run["completed"] for run in report["runs"]] == [3, 3]
    assert report["settings"]["model"] == "fake"
    assert any("TTFT" in line for line in text)
    # At 200 requests/s they are sent 5 ms apart: on a busy machine one may arrive before another.
    assert sorted(len(body["prompt"]) for body in server.bodies[:3]) == [4, 10, 20]
    assert sorted(body["max_tokens"] for body in server.bodies[:3]) == [1, 1, 3]
    server.bodies.clear()
    overload = ("--overload", 10, "--num-prompts", 2, "--endpoint", "chat", "--json")
    report = json.loads(octavo(*args, *overload).stdout)
    [run] = report["runs"]
    assert run["request_rate"] == pytest.approx(10 * report["settings"]["capacity"])
    words = [len(body["messages"][0]["content"].split()) for body in server.bodies]
    assert sorted(words[:2]) == [20, 40]


def test_a_server_behind_a_path(fake: tuple[FakeServer, str]) -> None:
    server, url = fake
    result = octavo("bench", "serve", "--url", f"{url}/behind/", "--num-prompts", 2, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["runs"][0]["completed"] == len(server.bodies) == 2


def test_mistakes(fake: tuple[FakeServer, str]) -> None:
    _, url = fake
    for args, exit_code, message in (
        (["--request-rate", "0"], 2, "'0' is not a list of numbers above 0"),
        (["--request-rate", "2,many"], 2, "'2,many' is not a list"),
        (["--overload", 2, "--request-rate", "3"], 2, "--overload finds the rate by itself"),
        (["--url", "localhost:9", "--model", "m"], 1, "error: url: no request was answered"),
        (["--url", "http://[::1", "--model", "m"], 1, "error: url: no request was answered"),
        (["--url", "http://127.0.0.1:9"], 1, "error: url: http://127.0.0.1:9 offers no models"),
    ):
        result = octavo("bench", "serve", "--url", url, *args)
        assert message in result.stderr
        assert result.exit_code == exit_code
    with pytest.raises(ConfigError, match="no request was answered; the first error: 500"):
        asyncio.run(run_serve(Target(url, "fake"), [Query([500], 1)], float("inf")))
