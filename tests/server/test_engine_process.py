"""The engine in its own process: what a client of it gets, and what is left when it is gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from core.symbolic import EOS, Ask, expected_beams, expected_samples
from octavo.channel import Channel
from octavo.config import EngineConfig, make_config
from octavo.engine.engine import Engine
from octavo.engine.events import Admitted, Copied, Event, Evicted, Forked, Preempted, Swapped
from octavo.engine.snapshot import Snapshot, unpack_ids
from octavo.engine.validation import RequestPreparer
from octavo.errors import InvalidRequest, Overloaded, RequestTooLong, Unavailable
from octavo.models.hub import resolve_model
from octavo.models.registry import read_model_config
from octavo.outputs import RequestOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.engine_process import loop as engine_loop
from octavo.server.engine_process.exchange import Exchange
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.loop import EngineLoop
from octavo.server.engine_process.messages import (
    Abort,
    Add,
    Command,
    Look,
    StepReport,
    decode_message,
    encode,
)
from octavo.server.engine_process.stream import RequestStream
from octavo.server.engine_process.supervision import Supervision
from processes import assert_gone
from server.clients import (
    BLOCK_SIZE,
    SECONDS,
    assert_nothing_is_held,
    complete,
    run,
    sampling,
    symbolic_client,
)
from server.symbolic_engine import HarmfulExecutor, expected_tokens

REPOSITORY = Path(__file__).resolve().parents[2]


def test_tokens_ends_and_usage() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            prompt = [1, 2, 3] * 20
            params = SamplingParams(
                n=3, max_tokens=20, seed=7, ignore_eos=True, stop_token_ids=[EOS]
            )
            output = await (await client.generate(prompt, params)).result()
            expected = expected_samples(Ask("r", tuple(prompt), "sample", 3, 20, 7))
            assert [sample.token_ids for sample in output.outputs] == expected
            for sample in output.outputs:
                ended = sample.token_ids[-1] == EOS
                assert sample.finish_reason == ("stop" if ended else "length")
                assert sample.stop_reason == (EOS if ended else None)
            again = await complete(client, prompt, 4)
            assert (output.num_cached_tokens, again.num_cached_tokens) == (0, 59)
            assert again.first_token_time is not None
            assert again.arrival_time <= again.first_token_time <= again.finish_time
            beams = BeamSearchParams(2, max_tokens=9, ignore_eos=True, stop_token_ids=[EOS])
            stream = await client.generate([4], beams)
            events = [event async for event in stream]
            assert isinstance(events[-1], RequestOutput)
            assert len(events) == 1
            assert [[4, *beam.token_ids] for beam in events[-1].outputs] == [
                [4, *tokens] for tokens in expected_beams(Ask("r", (4,), "beam", 2, 9, 0))
            ]
            await assert_nothing_is_held(client)

    run(test())


def test_bad_requests_are_refused_before_there_is_a_stream() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", max_num_seqs=4) as client:
            with pytest.raises(RequestTooLong, match=r"^prompt: 2048 tokens leave no room"):
                await client.generate([1] * 2048, sampling(1))
            with pytest.raises(InvalidRequest, match=r"^n: 5 sequences exceed max_num_seqs") as n:
                await client.generate([1], sampling(1, n=5))
            assert n.value.field == "n"
            with pytest.raises(InvalidRequest, match=r"^beam_width: 5 sequences exceed"):
                await client.generate([1], BeamSearchParams(5))
            with pytest.raises(InvalidRequest, match="outside the vocabulary"):
                await client.generate([4096], sampling(1))
            with pytest.raises(InvalidRequest, match=r"^name: no prefix 'x' is pinned; .*: 0$"):
                await client.unpin_prefix("x")
            with pytest.raises(InvalidRequest, match="shorter than one block"):
                await client.pin_prefix([1] * 15)
            with pytest.raises(InvalidRequest, match=r"^request_id: .* is not valid Unicode"):
                await client.generate([1], sampling(1), request_id="\ud800")
            with pytest.raises(InvalidRequest, match=r"^name: .* is not valid Unicode"):
                await client.pin_prefix([1] * 16, "\ud800")
            assert not client.replicas[0].exchange.has_work, "it would count as one that hangs"
            first = asyncio.create_task(client.generate([1], sampling(50), request_id="a"))
            await asyncio.sleep(0)  # it has been sent, and nothing has come back
            with pytest.raises(InvalidRequest, match="'a' is in use"):
                await client.generate([1], sampling(1), request_id="a")
            assert len((await (await first).result()).outputs[0].token_ids) == 50
            await complete(client, [1, 2], 3)

    run(test())


def test_the_queue_is_bounded() -> None:
    async def test() -> None:
        patience = Supervision(max_waiting=3)
        async with symbolic_client("step=0.002", max_num_seqs=2, supervision=patience) as client:
            long = [await client.generate([i], sampling(1500)) for i in range(2)]
            while client.gauges.num_running < 2:
                await asyncio.sleep(0.001)
            good = [asyncio.create_task(complete(client, [i], 5)) for i in range(2, 5)]
            while client.gauges.num_waiting < 3:
                await asyncio.sleep(0.001)
            with pytest.raises(Overloaded, match="max_waiting is 3") as refusal:
                await client.generate([1], sampling(1))
            assert 1 <= refusal.value.retry_after <= 60
            for stream in long:
                stream.abort()
            await asyncio.gather(*good)
            await complete(client, [1], 1)

    run(test())


def test_the_queue_is_bounded_for_those_who_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is room for each of them when it comes, and for some when its text is tokenized."""

    async def test() -> None:
        async with symbolic_client(supervision=Supervision(max_waiting=3)) as client:
            num_here, are_all_here = 0, asyncio.Event()

            async def late(size: int, work: Callable[[], Any]) -> Any:
                nonlocal num_here
                num_here += 1
                if num_here == 8:
                    are_all_here.set()
                await are_all_here.wait()
                return work()

            monkeypatch.setattr(client.offload, "text", late)
            asked = [client.generate("a", sampling(1)) for _ in range(8)]
            answers = await asyncio.gather(*asked, return_exceptions=True)
            assert Counter(map(type, answers)) == {RequestStream: 3, Overloaded: 5}

    run(test())


def test_an_abort_gives_the_blocks_back() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002", max_num_seqs=3) as client:
            running = await client.generate([1] * 100, sampling(1400, n=2))
            waiting = await client.generate([2] * 100, sampling(900, n=2))
            await anext(aiter(running))
            running.abort()
            output = await running.result()
            assert {sample.finish_reason for sample in output.outputs} == {"abort"}
            assert all(0 < len(sample.token_ids) < 1400 for sample in output.outputs)
            async with waiting:
                await anext(aiter(waiting))
            with pytest.raises(asyncio.TimeoutError):
                async with asyncio.timeout(0.1):
                    await complete(client, [3], 900)
            await assert_nothing_is_held(client)
            while client.gauges.num_free_blocks < 200:  # told without a step, or this never ends
                await asyncio.sleep(0.001)
            assert (client.gauges.num_running, client.gauges.num_waiting) == (0, 0)

    run(test())


class Script(Channel):
    """Commands at each time of asking, and then the end; keeps the reports."""

    def __init__(self, *times: list[Command]) -> None:
        self._times = list(times)
        self.reports: list[StepReport] = []

    def receive(self, wait: bool) -> list[bytes] | None:
        return [encode(command) for command in self._times.pop(0)] if self._times else None

    def send(self, payload: bytes) -> None:
        message = decode_message(payload)
        if isinstance(message, StepReport):
            self.reports.append(message)


def test_a_step_is_reported_once() -> None:
    """Also if the last request is aborted at the last moment, so that no other step is taken."""
    config = make_config("demo", block_size=BLOCK_SIZE)
    executor = HarmfulExecutor(BLOCK_SIZE, 200, 0.0)
    model_config = read_model_config(resolve_model("demo"))
    prepared = RequestPreparer(model_config, None, EngineConfig("demo")).prepare(
        [1, 2, 3], sampling(50), 100
    )
    # Asked for before and within each step.
    script = Script([Add(0, "r", prepared, 0.0)], [], [], [Abort("r")])
    EngineLoop(Engine(config, model_config, executor), script).run()
    assert [report.gauges.step_tokens for report in script.reports] == [3, 0]


def test_what_predicts_steps_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is said of it is true of the engine's loop."""
    config = make_config("demo", block_size=BLOCK_SIZE)
    model_config = read_model_config(resolve_model("demo"))
    for found in (None, SimpleNamespace(seconds=lambda plan: 1.0)):
        finding = Mock(return_value=found)
        monkeypatch.setattr(engine_loop, "find_predictor", finding)
        engine = Engine(config, model_config, HarmfulExecutor(BLOCK_SIZE, 200, 0.0))
        loop = EngineLoop(engine, Script())
        assert loop.info().predicts_steps == (found is not None)
        loop.run()
        finding.assert_called_once_with(engine)


def test_a_name_can_be_used_again_at_once() -> None:
    """What is still on its way for the first request must not reach the second."""

    async def test() -> None:
        async with symbolic_client("step=0.001") as client:
            for seed in range(20):
                prompt = [seed % 7] * 3
                stream = await client.generate(prompt, sampling(2000, seed), request_id="same")
                for _ in range(seed % 4):
                    await anext(aiter(stream))
                stream.abort()
                params = sampling(5, seed + 1)
                second = await client.generate([6, *prompt], params, request_id="same")
                output = await second.result()
                expected = expected_tokens([6, *prompt], seed + 1, 0, 5)
                assert output.outputs[0].token_ids == expected

    run(test())


def test_events_and_pictures() -> None:
    async def test() -> None:
        heard = Recording()
        # Blocks for two of the requests: the third waits, or one is preempted.
        async with symbolic_client("blocks=40", "step=0.002", listeners=(heard,)) as client:
            seen: list[Event] = []

            async def watch() -> None:
                async with client.events() as batches:
                    subscribed.set()
                    async for batch in batches:
                        seen.extend(batch)

            subscribed = asyncio.Event()
            watching = asyncio.create_task(watch())
            await subscribed.wait()
            prompts = [[i] * 100 for i in range(3)]
            await asyncio.gather(*[complete(client, prompt, 140, n=2) for prompt in prompts])
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            kinds = {type(event) for event in seen}
            assert kinds >= {Admitted, Copied, Forked, Preempted, Evicted}
            assert Swapped in kinds or client.counters.num_recompute_preemptions
            preempted = [event for event in seen if isinstance(event, Preempted)]
            assert len(preempted) == heard.num_preempted
            counters = client.counters
            assert counters.num_output_tokens == 3 * 2 * 140
            assert counters.num_steps == heard.num_steps
            assert len(preempted) == (
                counters.num_swap_preemptions + counters.num_recompute_preemptions
            )
            first = next(event for event in seen if isinstance(event, Admitted))
            assert (first.num_tokens, first.num_hit_tokens) == (100, 0)
            assert first.lookup_end == "unknown"
            num_seen = len(seen)
            async with await client.generate([1, 2, 3], sampling(280, n=2)) as stream:
                await anext(aiter(stream))
                picture = await client.snapshot()
                [view] = picture.running
                assert (view.request_id, view.max_sequences) == (stream.request_id, 2)
                held = {b for seq in view.sequences for b in unpack_ids(seq.tables[0])}
                shown = {i + 1 for i, c in enumerate(picture.device.ref_counts) if c}
                assert held == shown
                detail = await client.inspect(stream.request_id)
                assert detail is not None
                assert all(seq.output_token_ids for seq in detail.sequences)
            assert await client.inspect(stream.request_id) is None
            assert len(seen) == num_seen

    run(test())


class Recording(Listener):
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_preempted = 0

    def stepped(self, report: StepReport) -> None:
        self.num_steps += 1
        self.num_preempted += len(report.preempted)

    def request_added(self, request: OpenRequest) -> None:
        raise RuntimeError("a listener that fails does no harm")


def test_those_who_look_at_once_share_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests would wait while the engine takes one for each."""
    looks: list[Look] = []
    send = Exchange._send

    def count(exchange: Exchange, command: Command) -> None:
        if isinstance(command, Look):
            looks.append(command)
        send(exchange, command)

    monkeypatch.setattr(Exchange, "_send", count)

    async def test() -> None:
        async with symbolic_client("step=0.002") as client:
            early = [asyncio.create_task(client.snapshot()) for _ in range(50)]
            await asyncio.sleep(0)
            leaving = asyncio.create_task(client.snapshot())
            while not looks:
                await asyncio.sleep(0)
            # One that was asked for before may not show what has happened since.
            stream = await client.generate([1, 2, 3], sampling(2000))
            late = [asyncio.create_task(client.snapshot()) for _ in range(50)]
            await asyncio.sleep(0)
            leaving.cancel()
            pictures = await asyncio.gather(*early, *late)
            assert all(picture.running or picture.waiting for picture in pictures[50:])
            assert len(looks) <= 3
            stream.abort()
            # Those who wait for one learn that there is no engine any more.
            last = [asyncio.create_task(client.snapshot()) for _ in range(2)]
            await asyncio.sleep(0)
            last += [asyncio.create_task(client.snapshot()) for _ in range(2)]
            os.kill(client.info.pid, signal.SIGKILL)
            ends = await asyncio.gather(*last, return_exceptions=True)
            assert all(isinstance(end, Unavailable | Snapshot) for end in ends)

    run(test())


def test_drain_finishes_what_is_open() -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002") as client:
            short = asyncio.create_task(complete(client, [1], 30))
            stream = await client.generate([2], sampling(2000))
            draining = asyncio.create_task(client.drain(SECONDS))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="shutting down"):
                await client.generate([1], sampling(1))
            assert not client.health.healthy
            await short
            assert not draining.done()
            draining.cancel()
            assert await client.drain(0.01) == 1
            pid = client.info.pid
        assert (await stream.result()).outputs[0].finish_reason == "abort"
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    run(test())


def test_an_idle_engine_sleeps() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            await complete(client, [1], 5)
            seconds = []
            for _ in range(10):
                before = _cpu_ticks(client.info.pid), time.process_time()
                await asyncio.sleep(1.0)
                after = _cpu_ticks(client.info.pid), time.process_time()
                seconds.append((after[0] - before[0], after[1] - before[1]))
                if seconds[-1][0] <= 1 and seconds[-1][1] < 0.05:
                    return
            # Something else, such as a collection of garbage, may fall into some of them.
            pytest.fail(f"CPU time in each second: {seconds}")

    run(test())


def _cpu_ticks(pid: int) -> int:
    """Hundredths of a second of CPU time."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_engine_does_not_outlive_its_parent() -> None:
    program = f"""
import asyncio, sys
sys.path[:0] = [{str(REPOSITORY / "tests")!r}]
from processes import assert_gone
from server.clients import symbolic_client, sampling
async def main():
    async with symbolic_client("step=0.002") as client:
        await client.generate([1], sampling(2000))
        print(client.info.pid, flush=True)
        await asyncio.sleep(100)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.send_signal(signal.SIGKILL)
    assert_gone([pid])
