"""Well-behaved streams beside hostile clients: `python benchmarks/server_hostile.py` (Linux).

Starts `octavo serve demo` with a soft limit of 1,024 open files. Thirty streams run undisturbed;
then beside thousands of connections that never send a complete request, streams that are never
read, prompts of megabytes and bodies of 60,000 messages; then once more beside all of these while
the engine process is killed. A second server, which cannot open more than 1,024 files, gets 1,300
completions at once. The last line is JSON; the exit status is 1 unless

- all streams complete with the tokens of the undisturbed run;
- the longest gap between two chunks of a stream is under ten times the undisturbed one;
- every request for /health is answered;
- the API process's memory stays flat, and its files and blocks are free once the clients have left;
- every one of the 1,300 completions gets 200, or 429 or 503 with Retry-After.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hostile_clients import post
from server_load import exit_with, served, settle

CLIENTS = Path(__file__).with_name("hostile_clients.py")
FILES = 1024
FILES_PER_PROCESS = 3000  # connections of one client process
MAX_GAP_RATIO = 10.0  # to the undisturbed gap
MAX_PEAK_MIB = 300.0  # growth over the memory before
MAX_AFTER_MIB = 64.0  # the same; Python's allocator keeps pages that are partly used
SETTLE_SECONDS = 30.0
STREAM_SECONDS = 900.0  # a stream that takes longer has failed
HEALTH_SECONDS = 0.25  # between two requests for /health
SAMPLE_SECONDS = 0.1  # between two samples of the memory
CROWD_REPLIES = {"200", "429+retry-after", "503+retry-after"}


def limited(hard: int | None = None) -> list[str]:
    """A command prefix that limits open files to FILES; `hard` also sets the hard limit."""
    limits = f"ulimit -Sn {FILES}" + ("" if hard is None else f" && ulimit -Hn {hard}")
    return ["/bin/sh", "-c", f'{limits} && exec "$@"', "sh"]


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(re.findall(r"^VmRSS:\s+(\d+)", status, re.M)[0]) / 1024


def num_files(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def engine_pid(pid: int) -> int:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    [engine] = [each for task in tasks for each in (task / "children").read_text().split()]
    return int(engine)


class Streams:
    """Well-behaved streams of seeded samples: their tokens, and the gaps between chunks."""

    def __init__(self, url: str, num_streams: int, num_tokens: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self.num_started = 0  # streams that have received a chunk

    async def run(self) -> tuple[list[list[int] | str], float]:
        """The tokens of each stream, or its error, and the longest gap in seconds."""
        results = await asyncio.gather(*map(self._stream, range(self._num_streams)))
        return [tokens for tokens, _ in results], max(gap for _, gap in results)

    async def _stream(self, seed: int) -> tuple[list[int] | str, float]:
        body = {
            "prompt": f"Once upon a time, {seed} little dogs",
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        gap, last, is_done = 0.0, 0.0, False
        try:
            async with asyncio.timeout(STREAM_SECONDS):
                reader, writer = await asyncio.open_connection(*self._address)
                writer.write(post("/v1/completions", body))
                while not is_done:
                    line = await reader.readuntil(b"\n")
                    is_done = line.startswith(b"data: [DONE]")
                    if not line.startswith(b"data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        return str(chunk["error"]["message"]), gap
                    now = time.monotonic()
                    self.num_started += last == 0.0
                    gap = max(gap, now - last) if last else gap
                    last = now
                    tokens += chunk["choices"][0].get("token_ids") or []
                writer.close()
        except (OSError, EOFError, TimeoutError) as error:
            return f"{type(error).__name__} after {len(tokens)} tokens", gap
        return tokens, gap


class Monitor:
    """Polls /health and the memory of the API process while it is open."""

    def __init__(self, url: str, pid: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname, parts.port
        self._pid = pid
        self.peak_mib = rss_mib(pid)
        self.num_answers = 0
        self.slowest = 0.0
        self.failures: list[str] = []

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask()), asyncio.create_task(self._measure())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _measure(self) -> None:
        while True:
            self.peak_mib = max(self.peak_mib, rss_mib(self._pid))
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _ask(self) -> None:
        while True:
            start = time.monotonic()
            try:
                async with asyncio.timeout(30):
                    reader, writer = await asyncio.open_connection(*self._address)
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    await reader.readuntil(b'{"status"')
                    writer.close()
                self.num_answers += 1
            except (OSError, EOFError, TimeoutError) as error:
                self.failures.append(type(error).__name__)
            self.slowest = max(self.slowest, time.monotonic() - start)
            await asyncio.sleep(HEALTH_SECONDS)


class HostileClients:
    """Processes that run hostile_clients.py."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

    @classmethod
    @contextlib.asynccontextmanager
    async def at(cls, url: str, num_connections: int) -> AsyncIterator[HostileClients]:
        processes = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, str(CLIENTS), url),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            for _ in range(-(-num_connections // FILES_PER_PROCESS))
        ]
        try:
            yield cls(processes)
        finally:
            for process in processes:
                process.terminate()
                await process.wait()

    async def first(self, **command: Any) -> dict[str, Any]:
        """Send a command to the first process; returns its answer."""
        return await self._send(self._processes[0], command)

    async def each(self, **command: Any) -> list[dict[str, Any]]:
        """Send a command to all processes, with its numbers divided among them."""
        count = len(self._processes)
        commands = [
            {
                name: value if isinstance(value, str) else value // count + (index < value % count)
                for name, value in command.items()
            }
            for index in range(count)
        ]
        return await asyncio.gather(*map(self._send, self._processes, commands))

    async def _send(
        self, process: asyncio.subprocess.Process, command: dict[str, Any]
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await process.stdout.readline())
        return answer


async def disturb(url: str, pid: int, args: argparse.Namespace) -> dict[str, Any]:
    """Run the streams alone, beside the hostile clients, and beside them with the engine killed."""
    streams = Streams(url, args.streams, args.tokens)
    await streams.run()  # warm-up
    expected, gap = await streams.run()
    files, memory = num_files(pid), rss_mib(pid)
    monitor = Monitor(url, pid)
    total = args.silent + args.heads + args.bodies + args.unread
    async with monitor.open(), HostileClients.at(url, total) as hostile:
        held = await hostile.each(
            do="hold",
            silent=args.silent,
            heads=args.heads,
            bodies=args.bodies,
            unread=args.unread,
        )
        print(f"held open: {sum(each['open'] for each in held)}", file=sys.stderr)
        fire = asyncio.create_task(
            hostile.first(
                do="fire", prompts=args.prompts, megabytes=args.megabytes, messages=args.messages
            )
        )
        beside, gap_beside = await streams.run()
        replies = await fire
        print(f"beside them: longest gap {gap_beside:.3f} s ({gap:.3f} s)", file=sys.stderr)
        streams.num_started = 0
        again = asyncio.create_task(streams.run())
        while streams.num_started < args.streams and not again.done():
            await asyncio.sleep(0.01)
        os.kill(engine_pid(pid), signal.SIGKILL)
        killed, gap_killed = await again
        await hostile.each(do="leave")
        held_blocks = await settle(url)
        deadline = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < deadline and (
            num_files(pid) > files + 8 or rss_mib(pid) > memory + MAX_AFTER_MIB
        ):
            await asyncio.sleep(0.5)
    return {
        "streams": args.streams,
        "right_beside": sum(a == b for a, b in zip(beside, expected, strict=True)),
        "right_killed": sum(a == b for a, b in zip(killed, expected, strict=True)),
        "wrong": [each for each in (*beside, *killed) if isinstance(each, str)],
        "gap_seconds": {"alone": gap, "beside": gap_beside, "killed": gap_killed},
        "replies_to_large_bodies": replies,
        "health": {
            "answers": monitor.num_answers,
            "failures": monitor.failures,
            "slowest_seconds": monitor.slowest,
        },
        "memory_mib": {"before": memory, "peak": monitor.peak_mib, "after": rss_mib(pid)},
        "files": {"before": files, "after": num_files(pid)},
        "blocks_held_after": held_blocks,
    }


async def crowd(url: str, count: int) -> dict[str, Any]:
    """Send `count` completions at once; returns the counted replies."""
    async with HostileClients.at(url, 1) as clients:
        return await clients.first(do="crowd", count=count)


def misses(result: dict[str, Any]) -> list[str]:
    """The conditions of the module docstring that do not hold."""
    found = []
    gaps, memory, files = result["gap_seconds"], result["memory_mib"], result["files"]
    for what in ("right_beside", "right_killed"):
        if result[what] < result["streams"]:
            found.append(f"{what}: {result[what]} of {result['streams']} streams")
    if gaps["beside"] > MAX_GAP_RATIO * gaps["alone"]:
        found.append(f"longest gap between tokens: {gaps['beside'] / gaps['alone']:.1f} times")
    if result["health"]["failures"]:
        found.append(f"/health: {result['health']['failures']}")
    if memory["peak"] > memory["before"] + MAX_PEAK_MIB:
        found.append(f"memory at its peak: {memory}")
    if memory["after"] > memory["before"] + MAX_AFTER_MIB:
        found.append(f"memory afterwards: {memory}")
    if files["after"] > files["before"] + 8:
        found.append(f"open files: {files}")
    if result["blocks_held_after"]:
        found.append(f"blocks still held: {result['blocks_held_after']}")
    for where in ("crowd", "crowd_of_few_files"):
        if not result[where].keys() <= CROWD_REPLIES or "200" not in result[where]:
            found.append(f"{where}: {result[where]}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--streams", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=200, help="output tokens per stream")
    parser.add_argument("--silent", type=int, default=3000, help="connections that send nothing")
    parser.add_argument(
        "--heads", type=int, default=500, help="connections with unfinished headers"
    )
    parser.add_argument(
        "--bodies", type=int, default=500, help="connections with unfinished bodies"
    )
    parser.add_argument("--unread", type=int, default=40, help="streams that are never read")
    parser.add_argument("--prompts", type=int, default=8, help="long prompts sent at once")
    parser.add_argument("--megabytes", type=float, default=3.9, help="size of each long prompt")
    parser.add_argument("--messages", type=int, default=60_000, help="messages per body")
    parser.add_argument("--crowd", type=int, default=1300, help="completions sent at once")
    args = parser.parse_args()
    options = ["demo", "--log-level", "warning", "--num-threads", "1"]
    with served([*options, "--max-num-seqs", "256"], limited()) as (url, pid):
        result = asyncio.run(disturb(url, pid, args))
        result["crowd"] = asyncio.run(crowd(url, args.crowd))
    with served(options, limited(FILES)) as (url, pid):
        result["crowd_of_few_files"] = asyncio.run(crowd(url, args.crowd))
    exit_with(result, "missed", misses(result))


if __name__ == "__main__":
    main()
