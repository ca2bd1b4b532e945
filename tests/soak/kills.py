"""Kills the engine process at random moments under load: no answer may be lost or altered."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from processes import engines
from server.live_server import LiveServer, live_server
from soak.report import Report

NUM_REQUESTS = 54  # different requests, which are sent repeatedly
CONCURRENCY = 12
TIMEOUT = 300.0  # for one answer, restarts included
PREFIX = "The old wizard of the tower had a blue hat and a small grey cat. " * 4
STARTS = ("Once upon a time", "One morning, a little girl", "The dog sees the house. =>", "A king")
# Few blocks, so that requests wait, are preempted and swapped. float32: compared exactly.
OPTIONS = ("--num-blocks", "160", "--swap-space", "4MiB", "--max-num-seqs", "24", "--dtype=float32")
LOGPROB_TOLERANCE = 1e-3  # recomputation adds up the same sums in another order
MAX_EVENTS = 1000  # stream events between a restart and the next kill
EARLY_KILLS = 0.15  # fraction of kills that hit a process which has just been started
# A beam search starts again in every new process, and would never end if none lived long enough:
# when a request has survived this many kills, the next kill waits until it is answered.
MAX_SURVIVED_KILLS = 5
USAGE = -1  # where an answer has its numbers of tokens, beside its choices


@dataclass
class Choice:
    """Everything that a client has received of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[float] = field(default_factory=list)  # of the likeliest tokens
    ending: tuple[Any, ...] = ()

    def differs_from(self, other: Choice) -> str | None:
        for name in ("text", "token_ids", "ending"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name}: {mine!r} is not {theirs!r}"
        for name in ("logprobs", "top_logprobs"):
            mine, theirs = getattr(self, name), getattr(other, name)
            pairs = zip(mine, theirs, strict=False)
            far = [pair for pair in pairs if not abs(pair[0] - pair[1]) <= LOGPROB_TOLERANCE]
            if far or len(mine) != len(theirs):
                return f"{name}: {far[:1] or 'another number of them'}"
        return None


Answer = dict[int, Choice]
STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def make_requests(rng: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Requests with every decoding method, of random sizes."""
    methods: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 1.0, "top_k": 40, "n": 3},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"beam_width": 4, "n": 2},
        {"temperature": 0.8, "stop": [" the", "."], "ignore_eos": False},
        {"temperature": 0.7, "logprobs": 3},
        {"temperature": 0.8, "logit_bias": {"300": -5, "301": 3}, "min_tokens": 10},
        {"temperature": 0.7, "echo": True, "bad_words": [" king"]},
        {"structured_outputs": {"regex": "( (cat|dog|king)[,.]?){9,40}"}, "ignore_eos": False},
    ]
    requests = []
    for number in range(NUM_REQUESTS):
        method = methods[number % len(methods)]
        body = {"max_tokens": rng.randrange(8, 160), "ignore_eos": True, **method}
        body["return_token_ids"] = True
        if "beam_width" not in method and body.get("temperature") != 0:
            body["seed"] = rng.randrange(1 << 32)
        start = rng.choice(STARTS) + " and the cat" * rng.randrange(4)
        if rng.random() < 0.2 and "echo" not in body:
            if "logprobs" in body:
                body |= {"logprobs": True, "top_logprobs": 3}
            body["messages"] = [{"role": "user", "content": start}]
            requests.append(("/v1/chat/completions", body))
        else:
            body["prompt"] = PREFIX + start if rng.random() < 0.4 else start
            requests.append(("/v1/completions", body))
    return requests


def add_reply(answer: Answer, reply: dict[str, Any]) -> None:
    """Add a complete reply, or one event of a stream, to `answer`."""
    if "error" in reply:
        raise RuntimeError(reply["error"]["message"])
    if usage := reply.get("usage"):
        numbers = usage["prompt_tokens"], usage["completion_tokens"]
        answer[USAGE] = Choice(ending=numbers)
    for each in reply["choices"]:
        choice = answer.setdefault(each["index"], Choice())
        content = each.get("message") or each.get("delta") or each
        choice.text += content.get("text") or content.get("content") or ""
        choice.token_ids += each.get("token_ids") or []
        scores = each.get("logprobs") or {}
        entries = scores.get("content") or []
        choice.logprobs += scores.get("token_logprobs") or [entry["logprob"] for entry in entries]
        for entry in entries:
            choice.top_logprobs += [top["logprob"] for top in entry["top_logprobs"]]
        for by_token in scores.get("top_logprobs") or []:
            choice.top_logprobs += sorted(by_token.values())
        if each.get("finish_reason") is not None:
            choice.ending = (each["finish_reason"], each.get("stop_reason"), each.get("score"))


class Load:
    """Clients that send all requests in random order, and compare the answers."""

    def __init__(self, server: LiveServer, rng: random.Random, report: Report) -> None:
        self.server = server
        self.report = report
        self.requests = make_requests(rng)
        self.expected: list[Answer] = []
        self.num_events = 0  # stream events received
        self.num_kills = 0
        self.is_over = False
        self._kills_at_start: dict[object, int] = {}  # number of kills before each open request
        self._rng = rng
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits)

    async def ask(self, number: int, is_stream: bool) -> Answer:
        path, body = self.requests[number]
        answer: Answer = {}
        if not is_stream:
            reply = await self._http.post(path, json=body)
            add_reply(answer, reply.json())
            return answer
        is_done = False
        async with self._http.stream("POST", path, json=body | STREAMED) as reply:
            if reply.status_code != 200:
                raise RuntimeError(f"{reply.status_code} {(await reply.aread()).decode()}")
            async for line in reply.aiter_lines():
                self.num_events += 1
                is_done = is_done or line == "data: [DONE]"
                if line.startswith("data: {"):
                    add_reply(answer, json.loads(line.removeprefix("data: ")))
        if not is_done:
            raise RuntimeError("the stream ended without [DONE]")
        return answer

    async def learn(self) -> None:
        """Get the undisturbed answer of each request."""
        slots = asyncio.Semaphore(CONCURRENCY)

        async def ask(number: int) -> Answer:
            async with slots:
                return await self.ask(number, is_stream=False)

        self.expected = await asyncio.gather(*map(ask, range(len(self.requests))))

    @property
    def should_pause_kills(self) -> bool:
        """Whether an open request has survived so many kills that it should now finish."""
        oldest = min(self._kills_at_start.values(), default=self.num_kills)
        return self.num_kills - oldest >= MAX_SURVIVED_KILLS

    async def client(self) -> None:
        me = object()
        for number in self._order():
            is_stream = self._rng.random() < 0.7
            kills = self._kills_at_start[me] = self.num_kills
            try:
                answer = await self.ask(number, is_stream)
            except Exception as error:  # of any kind: the answer is lost
                self.report.violate(f"request {number} is lost: {type(error).__name__} {error}")
                await asyncio.sleep(1)
                continue
            finally:
                del self._kills_at_start[me]
            self._compare(number, answer)
            self.report.count("streams" if is_stream else "whole_replies")
            if self.num_kills > kills:
                self.report.count("survived_kills")

    def _order(self) -> Iterator[int]:
        numbers = list(range(len(self.requests)))
        while True:
            self._rng.shuffle(numbers)
            for number in numbers:
                if self.is_over:
                    return
                yield number

    def _compare(self, number: int, answer: Answer) -> None:
        expected = self.expected[number]
        if answer.keys() != expected.keys():
            self.report.violate(f"request {number} has choices {sorted(answer)}")
            return
        for index, choice in answer.items():
            difference = choice.differs_from(expected[index])
            if difference is not None:
                path, body = self.requests[number]
                self.report.violate(
                    f"request {number} is altered: choice {index}, {difference}; {path} {body}"
                )

    async def close(self) -> None:
        await self._http.aclose()


def engine_pid(server: LiveServer) -> int | None:
    """The engine process; None while there is none."""
    found = engines(server.process.pid)
    return found[0] if found else None


async def kill_repeatedly(load: Load, rng: random.Random, num_kills: int) -> None:
    report, server = load.report, load.server
    while report.counts.get("kills", 0) < num_kills and not report.is_late:
        target = load.num_events + rng.randrange(1, MAX_EVENTS)
        while load.num_events < target or load.should_pause_kills:
            if report.is_late or server.process.poll() is not None:
                return
            await asyncio.sleep(0.005)
        victim = await asyncio.wait_for(_kill(load, None), TIMEOUT)
        if rng.random() < EARLY_KILLS:
            await asyncio.wait_for(_kill(load, victim, rng.uniform(0, 2)), TIMEOUT)


async def _kill(load: Load, old: int | None, delay: float = 0.0) -> int:
    """SIGKILL the engine process, once it is not `old` any more."""
    while (pid := engine_pid(load.server)) in (None, old):
        await asyncio.sleep(0.005)
    await asyncio.sleep(delay)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    load.num_kills += 1
    load.report.count("kills")
    return pid


def check_blocks(server: LiveServer, report: Report) -> int:
    """While nothing runs, only pins may hold blocks. Returns how many they hold."""
    server.complete("Once", max_tokens=1)  # alone, so that its last step is the engine's
    state = server.get("/debug/kv").json()
    ids = [pin["block_ids"] for pin in state["pinned_prefixes"]]
    pinned = {block_id for groups in ids for group in groups for block_id in group}
    held = state["device"]["num_held"] + state["swap"]["num_held"]
    if held != len(pinned):
        report.violate(f"{held} blocks are held, {len(pinned)} of them pinned")
    return len(pinned)


async def soak(load: Load, rng: random.Random, num_kills: int) -> None:
    report = load.report
    try:
        await load.learn()
        report.count("different_requests", len(load.expected))
        clients = [asyncio.create_task(load.client()) for _ in range(CONCURRENCY)]
        try:
            await kill_repeatedly(load, rng, num_kills)
        except TimeoutError:
            report.violate(f"no engine process for {TIMEOUT:.0f} s")
        load.is_over = True
        _, late = await asyncio.wait(clients, timeout=TIMEOUT)
        for task in late:
            task.cancel()
            report.violate("a client hangs")
        for ended in await asyncio.gather(*clients, return_exceptions=True):
            if isinstance(ended, Exception):
                report.violate(f"an answer cannot be compared: {ended!r}")
    finally:
        await load.close()


def run(seed: int, num_kills: int, seconds: float) -> Report:
    rng = random.Random(seed)
    with live_server("--log-level", "error", *OPTIONS) as server:
        report = Report("kills", seconds)
        pin = server.post("/v1/prefixes", {"prefix": PREFIX, "name": "wizard"})
        pin.raise_for_status()
        asyncio.run(soak(Load(server, rng, report), rng, num_kills))
        report.require("kills", num_kills)
        if check_blocks(server, report) != pin.json()["num_blocks"]:
            report.violate("the pinned prefix is lost")
        if server.get("/health").status_code != 200:
            report.violate("the server is not healthy")
    report.show()
    return report
