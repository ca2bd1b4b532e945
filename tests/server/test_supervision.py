"""Engine processes die in every way; requests go on, and only what kills them fails."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from core.symbolic import EOS, Ask, expected_beams
from octavo.config import make_config
from octavo.demo import demo_model_path
from octavo.errors import EngineFailed, LogitsNotFinite, ModelError, RequestFailed, Unavailable
from octavo.sampling_params import BeamSearchParams
from octavo.server.engine_process import process
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.quarantine import MAX_CRASHES_ALONE, MAX_KILLS_ALONE
from octavo.server.engine_process.supervision import Supervision
from octavo.server.observability.metrics import Metrics
from server.clients import (
    PROGRAM,
    SECONDS,
    assert_nothing_is_held,
    complete,
    keep_busy,
    kill,
    run,
    sampling,
    symbolic_client,
)
from server.symbolic_engine import (
    DEADLY,
    HANGING,
    NOT_FINITE,
    NOT_QUEUED,
    RAISING,
    RANK_KILLED,
    UNACCEPTABLE,
)


async def load_of_requests(client: EngineClient) -> None:
    """One, two and three samples, some of them waiting for their turn; all must be right."""
    await asyncio.gather(
        *[complete(client, [seed % 5] * (20 + seed), 90, seed, 1 + seed % 3) for seed in range(16)]
    )


def test_killed_again_and_again_under_load() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", max_num_seqs=12) as client:
            killing = asyncio.create_task(kill(client, times=4, num_steps=15))
            await load_of_requests(client)
            await keep_busy(client, killing)
            assert client.info.num_restarts == 4
            assert client.health.healthy
            await assert_nothing_is_held(client)

    run(test())


def test_a_beam_search_starts_again() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.005") as client:
            prompt = [3, 1, 4]
            params = BeamSearchParams(3, max_tokens=150, ignore_eos=True, stop_token_ids=[EOS])
            stream = await client.generate(prompt, params)
            killing = asyncio.create_task(kill(client, times=1, num_steps=4))
            output = await stream.result()
            await keep_busy(client, killing)
            beams = expected_beams(Ask("r", tuple(prompt), "beam", 3, 150, 0))
            assert [prompt + beam.token_ids for beam in output.outputs] == [
                prompt + beam for beam in beams
            ]

    run(test())


@pytest.mark.parametrize(
    ("token", "cause"),
    [
        (DEADLY, "signal 6"),
        (RAISING, "that raises"),
        # Beside a second replica in test_replicas.py.
        pytest.param(UNACCEPTABLE, "signal 6", marks=pytest.mark.slow),
    ],
)
def test_a_request_that_kills_the_engine_fails_alone(token: int, cause: str) -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", max_num_seqs=12) as client:
            poison = asyncio.create_task(complete(client, [1, token, 2], 10))
            await load_of_requests(client)
            with pytest.raises(RequestFailed, match=cause):
                await poison
            assert client.health.healthy
            await complete(client, [1, 2], 10)
            await assert_nothing_is_held(client)

    run(test())


def test_a_process_that_has_failed_and_does_not_end_is_killed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Long before it would count as one that hangs."""
    monkeypatch.setattr(process, "EXIT_SECONDS", 0.1)

    async def test() -> None:
        async with symbolic_client("stuck") as client:
            with pytest.raises(RequestFailed, match="that raises"):
                await complete(client, [1, RAISING, 2], 10)
            await complete(client, [1, 2], 10)
            assert client.info.num_restarts == 2

    run(test())


@pytest.mark.parametrize(
    ("token", "kind", "words"),
    [
        (NOT_FINITE, LogitsNotFinite, "they are not"),
        (NOT_QUEUED, RequestFailed, r"could not queue the request \(RuntimeError\)"),
    ],
)
def test_what_goes_wrong_with_one_request_is_no_matter_of_the_engine(
    token: int, kind: type[RequestFailed], words: str
) -> None:
    async def test() -> None:
        metrics = Metrics("demo")
        async with symbolic_client("step=0.002", max_num_seqs=12, listeners=(metrics,)) as client:
            wrong = [
                asyncio.create_task(complete(client, [1, token, n], 10, n=n)) for n in (1, 2, 3)
            ]
            await load_of_requests(client)
            for each in wrong:
                with pytest.raises(kind, match=words):
                    await each
            assert client.open_requests == {}
            assert client.info.num_restarts == 0
            await assert_nothing_is_held(client)
        num_failed = metrics.registry.get_sample_value(
            "octavo_request_failures_total",
            {"model_name": "demo", "reason": "logits_not_finite"},
        )
        assert num_failed == (3 if kind is LogitsNotFinite else 0)

    run(test())


def test_a_prefix_that_cannot_be_computed_is_not_pinned() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            with pytest.raises(LogitsNotFinite, match="they are not"):
                await client.pin_prefix([NOT_FINITE, *[2] * 40], "system")
            assert client.list_prefixes() == []
            await client.pin_prefix([2] * 40, "system")
            with pytest.raises(LogitsNotFinite, match="they are not"):
                await complete(client, [*[2] * 40, NOT_FINITE], 10)
            output = await complete(client, [*[2] * 40, 3], 5)
            assert output.num_cached_tokens == 32, "a pinned prefix stays"

    run(test())


def test_alone_it_fails_at_its_second_death() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            with pytest.raises(RequestFailed, match="died 2 times"):
                await complete(client, [DEADLY], 10)
            while client.health.state != "ready":
                await asyncio.sleep(0.01)
            assert client.info.num_restarts == 2

    run(test())


def test_an_engine_that_hangs_is_replaced() -> None:
    async def test() -> None:
        patience = Supervision(stall_seconds=0.4, hang_seconds=1.0)
        async with symbolic_client("step=0.002", supervision=patience) as client:
            good = asyncio.create_task(complete(client, [1, 2, 3], 200))
            while client.gauges.step_seqs == 0:
                await asyncio.sleep(0.01)
            stuck = asyncio.create_task(complete(client, [HANGING], 10))
            while client.health.healthy:
                await asyncio.sleep(0.01)
            assert "no step for" in str(client.health.reason)
            await good
            with pytest.raises(RequestFailed, match="SIGKILL"):
                await stuck

    run(test())


def test_a_rank_that_was_killed_proves_as_little_as_an_engine_that_was() -> None:
    """A request is given up after one crash alone, or after three kills from outside."""

    async def num_restarts(token: int) -> int:
        async with symbolic_client() as client:
            with pytest.raises(RequestFailed):
                await complete(client, [token], 10)
            await complete(client, [1, 2], 5)
            return client.info.num_restarts

    async def test() -> None:
        crashes, kills = await asyncio.gather(num_restarts(RAISING), num_restarts(RANK_KILLED))
        assert kills - crashes == MAX_KILLS_ALONE - MAX_CRASHES_ALONE

    run(test())


def test_pinned_prefixes_are_pinned_again() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            prefix = [5] * 40
            await client.pin_prefix(prefix, "system")
            os.kill(client.info.pid, signal.SIGKILL)
            while client.info.num_restarts == 0:
                await asyncio.sleep(0.01)
            while not (await client.snapshot()).pins:  # it is computed again
                await asyncio.sleep(0.01)
            output = await complete(client, [*prefix, 6], 5)
            assert output.num_cached_tokens == 32
            assert [pin.name for pin in (await client.snapshot()).pins] == ["system"]
            await client.unpin_prefix("system")
            assert client.list_prefixes() == []
            await assert_nothing_is_held(client)

    run(test())


def test_a_prefix_that_is_given_up_leaves_nothing_to_wait_for() -> None:
    async def test() -> None:
        limits = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
        async with symbolic_client("step=0.1", **limits) as client:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.pin_prefix([5] * 64, "late")
            assert client.list_prefixes() == []
            [replica] = client.replicas
            # An idle engine that is waited for is taken for a stuck one after `hang_seconds`.
            while replica.exchange.has_work:
                await asyncio.sleep(0.01)
            await assert_nothing_is_held(client)
            assert client.info.num_restarts == 0

    run(test())


def test_closing_answers_those_whom_no_engine_has_accepted() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            os.kill(client.info.pid, signal.SIGKILL)
            while client.health.state != "restarting":
                await asyncio.sleep(0.01)
            waiting = asyncio.create_task(client.generate([1], sampling(5)))
            await asyncio.sleep(0)
            assert len(client.open_requests) == 1
        with pytest.raises(Unavailable):
            await asyncio.wait_for(waiting, SECONDS)

    run(test())


def test_a_prefix_that_kills_the_engine_is_given_up() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            with pytest.raises(RequestFailed, match="died twice"):
                await client.pin_prefix([DEADLY] * 16, "poison")
            while client.health.state != "ready":
                await asyncio.sleep(0.01)
            await complete(client, [1, 2], 5)

    run(test())


@pytest.mark.parametrize(
    ("flag", "kind", "message"),
    [
        ("refuse", ModelError, "there is no such model"),
        ("exit", EngineFailed, "exited with status 3"),
    ],
)
def test_an_engine_that_cannot_start(flag: str, kind: type[Exception], message: str) -> None:
    async def test() -> None:
        with pytest.raises(kind, match=message):
            async with symbolic_client(flag):
                pass

    run(test())


def test_an_engine_that_cannot_start_again_is_given_up_for_a_while(tmp_path: Path) -> None:
    async def test() -> None:
        obstacle = tmp_path / "obstacle"
        patience = Supervision(max_fruitless_restarts=1, revival_seconds=1.0)
        async with symbolic_client(
            "step=0.002", f"exit-if={obstacle}", supervision=patience
        ) as client:
            stream = await client.generate([1, 2, 3], sampling(1000))
            obstacle.touch()
            os.kill(client.info.pid, signal.SIGKILL)
            with pytest.raises(EngineFailed, match="2 times in a row"):
                await stream.result()
            assert (client.health.healthy, client.health.state) == (False, "failed")
            assert "it is started again in 1 s" in str(client.health.reason)
            with pytest.raises(Unavailable) as refused:
                await client.generate([1], sampling(1))
            assert refused.value.retry_after is not None
            obstacle.unlink()
            while not client.health.healthy:
                await asyncio.sleep(0.01)
            await complete(client, [1, 2], 10)

    run(test())


def test_want_of_files_is_no_failure_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often; the requests go on when there are some again."""
    make_pair, num_attempts = socket.socketpair, 0

    def exhausted() -> Any:
        nonlocal num_attempts
        num_attempts += 1
        if num_attempts <= 5:
            raise OSError(errno.EMFILE, "Too many open files")
        return make_pair()

    async def test() -> None:
        patience = Supervision(max_fruitless_restarts=1)
        async with symbolic_client("step=0.002", supervision=patience) as client:
            good = asyncio.create_task(complete(client, [1, 2, 3], 200))
            while client.gauges.step_seqs == 0:
                await asyncio.sleep(0.01)
            monkeypatch.setattr("octavo.child_process.socket.socketpair", exhausted)
            monkeypatch.setattr("octavo.server.engine_process.replica.NO_ROOM_SECONDS", 0.01)
            os.kill(client.info.pid, signal.SIGKILL)
            await good
            assert (num_attempts, client.info.num_restarts) == (6, 1)

    run(test())


def test_engines_have_the_revision_that_the_server_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that starts later does not ask the hub again, which may have another one by then."""
    monkeypatch.setattr(
        "octavo.server.engine_process.client.resolve_model", lambda name: demo_model_path()
    )

    async def test() -> None:
        client = EngineClient(make_config("org/tiny"), command=(sys.executable, str(PROGRAM)))
        await client.start()
        try:
            os.kill(client.info.pid, signal.SIGKILL)
            await complete(client, [1, 2], 10)
            assert (client.info.model, client.info.num_restarts) == ("org/tiny", 1)
        finally:
            await client.close()

    run(test())


def test_the_engine_outlives_the_thread_that_started_it() -> None:
    loop = asyncio.new_event_loop()
    client = EngineClient(make_config("demo"), command=(sys.executable, str(PROGRAM)))
    thread = threading.Thread(target=loop.run_until_complete, args=(client.start(),))
    thread.start()
    thread.join()
    try:
        loop.run_until_complete(asyncio.wait_for(complete(client, [1, 2], 10), SECONDS))
        assert client.info.num_restarts == 0
    finally:
        loop.run_until_complete(client.close())
        loop.close()
