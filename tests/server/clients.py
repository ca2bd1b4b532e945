"""Engine clients over the symbolic engine process, and what their requests must bring."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from octavo.config import make_config
from octavo.outputs import RequestOutput
from octavo.sampling_params import SamplingParams
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.supervision import Supervision
from server.symbolic_engine import expected_tokens

T = TypeVar("T")
PROGRAM = Path(__file__).with_name("symbolic_engine.py")
SECONDS = 300.0  # a hang must end a test; engines start slowly where others compute, too
BLOCK_SIZE = 16


def run(test: Coroutine[Any, Any, T], seconds: float = SECONDS) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(test, seconds)

    return asyncio.run(limited())


@contextlib.asynccontextmanager
async def symbolic_client(
    *flags: str,
    supervision: Supervision | None = None,
    listeners: tuple[Listener, ...] = (),
    replication: Replication | None = None,
    **options: Any,
) -> AsyncIterator[EngineClient]:
    config = make_config("demo", block_size=BLOCK_SIZE, **options)
    command = (sys.executable, str(PROGRAM), *flags)
    client = EngineClient(config, supervision, listeners, command, replication)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


def sampling(num_tokens: int, seed: int = 0, n: int = 1, **fields: Any) -> SamplingParams:
    """Samples of exactly this length."""
    return SamplingParams(max_tokens=num_tokens, seed=seed, n=n, ignore_eos=True, **fields)


async def complete(
    client: EngineClient, prompt: list[int], num_tokens: int, seed: int = 0, n: int = 1
) -> RequestOutput:
    """A request from its beginning to its end; its tokens and its stream must be right."""
    streamed: list[list[int]] = [[] for _ in range(n)]
    async with await client.generate(prompt, sampling(num_tokens, seed, n)) as stream:
        async for event in stream:
            if isinstance(event, RequestOutput):
                output = event
            else:
                streamed[event.index] += event.token_ids
    tokens = [sample.token_ids for sample in output.outputs]
    assert tokens == [expected_tokens(prompt, seed, index, num_tokens) for index in range(n)]
    assert streamed == tokens
    assert {sample.finish_reason for sample in output.outputs} == {"length"}
    return output


async def kill(client: EngineClient, times: int, num_steps: int) -> None:
    """Kill the engine process again and again, each after it has taken `num_steps`."""
    for count in range(times):
        while client.info.num_restarts < count or client.gauges.step_seqs == 0:
            await asyncio.sleep(0.01)
        target = client.counters.num_steps + num_steps
        while client.counters.num_steps < target:
            await asyncio.sleep(0.001)
        os.kill(client.info.pid, signal.SIGKILL)
        while client.info.num_restarts <= count:
            await asyncio.sleep(0.01)


async def keep_busy(client: EngineClient, killing: asyncio.Task[None]) -> None:
    """Requests until a `kill` is done, which waits for steps. Those of the test may have ended
    before, where this process was held up and the engine was not."""
    while not killing.done():
        await complete(client, [9, 8, 7], 40)
    await killing


async def assert_nothing_is_held(client: EngineClient) -> None:
    """Once all replicas serve: one that restarts has no engine to ask."""
    for replica in client.replicas:
        while not replica.is_serving:
            await asyncio.sleep(0.01)
        snapshot = await client.snapshot(replica.number)
        assert snapshot.device.num_free == snapshot.device.num_blocks
        assert not any(snapshot.device.ref_counts)
        assert (snapshot.running, snapshot.swapped, snapshot.waiting) == ([], [], [])
        assert (replica.load, replica.exchange.open) == (0, {})
