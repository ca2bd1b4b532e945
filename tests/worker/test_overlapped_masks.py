"""Masks that a library computes while the host goes on: a device whose steps overlap, on a CPU."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import model_zoo
from daily_cases import checkered
from octavo import BeamSearchParams, SamplingParams
from octavo.config import EngineConfig, make_config
from octavo.core.scheduler import Progress
from octavo.core.step import StepPlan, StepResult
from octavo.engine.engine import Engine
from octavo.engine.local_client import LocalClient
from octavo.executor.base import KVCapacity
from octavo.llm import load_engine
from octavo.models.config import ModelConfig
from octavo.models.loader import load_model
from octavo.ops import load_backend
from octavo.ops.communicator import SingleRank
from octavo.ops.vocabulary import VocabularyShard
from octavo.outputs import RequestOutput
from octavo.structured import guidance
from octavo.structured.output import StructuredOutput
from octavo.worker.device.base import PendingTokens
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.device.cpu_sampling import CpuDrawer
from octavo.worker.model_runner import ModelRunner
from octavo.worker.row_edits import DeviceEdits
from octavo.worker.sampler import SamplingBatch
from worker.late_masks import Gate

llguidance = pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, 22, 333]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = {"regex": "[a-f]{4,20}"}
THREADS = "masks", "new masks", "slow masks", "grammars"
BEAMS = StructuredOutput(regex="[xyz]{2,9}")


class Drawer(CpuDrawer):
    def __init__(self, threads: set[str]) -> None:
        super().__init__()
        self._threads = threads

    def draw(self, logits: Tensor, draws: SamplingBatch, vocabulary: VocabularyShard) -> Tensor:
        self._threads.add(threading.current_thread().name)
        assert torch.is_inference_mode_enabled()
        return super().draw(logits, draws, vocabulary)


class Pending(PendingTokens):
    """See PendingTokens."""

    def __init__(self, num_rows: int) -> None:
        self._last = torch.zeros(num_rows, dtype=torch.int64)

    def fill(self, input_ids: Tensor, rows: Tensor) -> None:
        input_ids.copy_(torch.where(input_ids < 0, self._last[rows.long()], input_ids))

    def keep(self, token_ids: Tensor, rows: Tensor, are_edited: bool) -> None:
        self._last[rows.long()] = token_ids


class OverlappingDevice(CpuDevice):
    """A CPU whose steps are submitted before the tokens of the steps before are looked at."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.drawing_threads: set[str] = set()

    def drawer(self, staging: Any, vocab_size: int) -> Drawer:
        return Drawer(self.drawing_threads)

    def pending_tokens(self, num_rows: int, edits: DeviceEdits | None) -> Pending:
        return Pending(num_rows)


class OverlappingExecutor:
    is_asynchronous = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        model = load_model(model_config, torch.float32, torch.device("cpu"), SingleRank())
        num_blocks = (config.cache.num_blocks or 0, config.cache.num_blocks or 0)
        self.device = OverlappingDevice()
        self.runner = ModelRunner(
            config,
            model_config,
            model,
            load_backend("reference"),
            num_blocks,
            self.device,
            SingleRank(),
        )
        layout = model_config.kv_layout()
        self.capacity = KVCapacity(*num_blocks, layout, 0, None)  # type: ignore[arg-type]
        self.submit = self.runner.submit

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self.runner.shutdown()


@contextmanager
def engines(preemption_mode: str = "recompute") -> Iterator[tuple[Engine, Engine]]:
    """One that overlaps steps and one that does not; both have room for a few requests only."""
    config = make_config(
        str(model_zoo.model_directory("llama3")),
        device="cpu",
        attention_backend="reference",
        max_model_len=64,
        block_size=4,
        num_blocks=24,
        max_num_seqs=12,
        max_num_batched_tokens=24,
        preemption_mode=preemption_mode,
        watermark=0.0,
    )
    plain = load_engine(config)
    executor: Any = OverlappingExecutor(config, plain.model_config)
    overlapped = Engine(config, plain.model_config, executor)
    try:
        yield overlapped, plain
    finally:
        overlapped.close()
        plain.close()


def slow(compute: Callable[..., None]) -> type:
    """llguidance's executor, around whose work something else is done."""
    original = llguidance.LLExecutor

    class Executor:
        def __init__(self, num_threads: int) -> None:
            self._own = original(num_threads)

        def unsafe_compute_mask_ptr(self, *args: object) -> None:
            compute(*args)
            self._own.unsafe_compute_mask_ptr(*args)

    return Executor


def run(engine: Engine, asks: list[tuple[list[int], Any]]) -> list[RequestOutput]:
    client = LocalClient(engine)
    streams = [client.make_request(prompt, params) for prompt, params in asks]
    for stream in streams:
        client.add_request(stream)
    finished: dict[str, RequestOutput] = {}
    while client.has_unfinished:
        finished |= {output.request_id: output for output in client.step()}
    return [finished[stream.request_id] for stream in streams]


def check_equal(got: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    for mine, other in zip(got, wanted, strict=True):
        assert mine.error is None
        pairs = zip(mine.outputs, other.outputs, strict=True)
        assert all(
            (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) for a, b in pairs
        )


def prompt(length: int, seed: int) -> list[int]:
    token_ids: list[int] = model_zoo.random_token_ids(length, seed=seed)
    return token_ids


SCHEMA_FORM = {"json_schema": SCHEMA}
ASKS: list[tuple[list[int], Any]] = [
    (prompt(20, 1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
    (prompt(5, 2), SamplingParams(seed=3, max_tokens=30, structured=SCHEMA_FORM)),
    (prompt(9, 3), SamplingParams(seed=4, n=3, max_tokens=22, structured=REGEX)),
    (prompt(13, 4), SamplingParams(temperature=0, max_tokens=30, structured=SCHEMA_FORM)),
    (prompt(6, 5), SamplingParams(seed=5, max_tokens=6, structured={"choice": ["yes", "no"]})),
    (
        prompt(7, 6),
        SamplingParams(seed=6, max_tokens=24, structured=REGEX, presence_penalty=1.0),
    ),
    (
        prompt(8, 7),
        SamplingParams(seed=7, max_tokens=20, allowed_token_ids=[9, 10], min_tokens=4),
    ),
    (prompt(3, 9), BeamSearchParams(3, max_tokens=8, structured=BEAMS)),
]


def test_draws_wait_for_slow_masks_and_stay_in_the_thread_that_submits_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where rows fork, are preempted, search beams, or end at a token that the host sees
    late."""
    computing: set[str] = set()

    def compute(*_: object) -> None:
        computing.add(threading.current_thread().name)
        time.sleep(0.003)

    monkeypatch.setattr(llguidance, "LLExecutor", slow(compute))
    with engines() as (overlapped, plain):
        check_equal(run(overlapped, ASKS), run(plain, ASKS))
        executor: Any = overlapped.executor
        assert executor.device.drawing_threads == {threading.current_thread().name}
        assert {name.rsplit("_", 1)[0] for name in computing} <= {"masks", "new masks"}
        assert sum(overlapped.scheduler.num_preemptions.values()) > 0
        assert overlapped.kv.pool.num_held == 0


def test_no_thread_computes_masks_without_grammars() -> None:
    asks = [(prompt(5, 2), SamplingParams(max_tokens=9, min_tokens=4, allowed_token_ids=[5, 6]))]
    before = set(threading.enumerate())
    with engines() as (overlapped, _):
        assert [output.error for output in run(overlapped, asks)] == [None]
        new = {thread.name for thread in set(threading.enumerate()) - before}
        assert not [name for name in new if name.startswith(THREADS)]


def test_what_fails_in_the_thread_ends_one_request_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The masks of a step cannot be computed together, and then the first one by itself, either."""
    failed: list[int] = []

    def compute(pairs: list[object], *_: object) -> None:
        if failed in ([], [2]) and len(pairs) == 2 - len(failed):
            failed.append(len(pairs))
            raise MemoryError("no room for masks")

    monkeypatch.setattr(llguidance, "LLExecutor", slow(compute))
    monkeypatch.setattr(guidance, "NUM_TRIED", 0)  # all masks of a step are computed together
    monkeypatch.setattr(guidance.Pace, "note_slow", lambda pace: None)  # on a busy machine, too
    before = set(threading.enumerate())
    params = [SamplingParams(seed=n, max_tokens=20, structured=REGEX) for n in (3, 4)]
    asks: list[tuple[list[int], Any]] = [(prompt(5, 2), each) for each in params]
    with engines() as (overlapped, plain):
        for _ in range(10):  # on a busy machine, one request may always be a step behind
            got = run(overlapped, asks)
            if failed:
                break
        monkeypatch.undo()
        wanted = run(plain, asks)
    assert failed == [2, 1]
    [error] = [output.error for output in got if output.error is not None]
    assert "MemoryError: no room for masks" in error
    pairs = zip(got, wanted, strict=True)
    [(mine, other)] = [pair for pair in pairs if pair[0].error is None]
    check_equal([mine], [other])
    alive = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in alive if name.startswith(THREADS)]


def _note_result(
    results: list[StepResult], plan: StepPlan, result: StepResult, progress: Progress
) -> None:
    results.append(result)


@cache
def without_late_masks(preemption_mode: str) -> list[RequestOutput]:
    with engines(preemption_mode) as (_, plain):
        return run(plain, ASKS)


# By day each seed has one mode, and each mode a small share of late masks and a large one.
SEEDS_AND_MODES = checkered(range(4), ("recompute", "swap"))


@pytest.mark.parametrize(("seed", "preemption_mode"), SEEDS_AND_MODES)
def test_tokens_do_not_depend_on_which_masks_were_late(seed: int, preemption_mode: str) -> None:
    """Also of those that are preempted meanwhile, search beams, or draw several samples."""
    rng = random.Random(seed)
    share = [0.2, 0.5, 0.9, 1.0][seed]
    gate = Gate(lambda grammar: True, lambda: rng.random() < share and rng.randint(1, 6))
    wanted = without_late_masks(preemption_mode)
    with gate.in_place(), engines(preemption_mode) as both:
        for engine in both:
            results: list[StepResult] = []
            engine.observers.append(partial(_note_result, results))
            gate.attach(engine)
            check_equal(run(engine, ASKS), wanted)
            assert len({seq_id for result in results for seq_id in result.undrawn}) > 3
            assert engine.scheduler.num_preemptions[preemption_mode] > 0
            assert engine.kv.pool.num_held == engine.kv.swap_pool.num_held == 0
            assert not engine.scheduler._resting


def test_others_go_on_while_a_mask_is_late() -> None:
    """And what has sat out is drawn once its mask is there; or ends, if it is aborted."""
    late = {"regex": "[xyz]{9,30}"}
    asks: list[tuple[list[int], Any]] = [
        (prompt(5, 1), SamplingParams(seed=1, max_tokens=30, structured=late)),
        (prompt(6, 2), SamplingParams(seed=2, max_tokens=20, structured=REGEX)),
        (prompt(7, 3), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)),
        (prompt(5, 4), SamplingParams(seed=4, max_tokens=30, structured=late)),
    ]
    with engines() as (_, plain):
        wanted = run(plain, asks)
    gate = Gate(lambda grammar: "xyz" in grammar.source, lambda: 1000)
    with gate.in_place(), engines() as both:
        for engine in both:
            client = LocalClient(engine)
            streams = [client.make_request(*ask) for ask in asks]
            for stream in streams:
                client.add_request(stream)
            finished: dict[str, RequestOutput] = {}
            results: list[StepResult] = []
            engine.observers.append(partial(_note_result, results))
            while len(finished) < 2:
                finished |= {output.request_id: output for output in client.step()}
            assert set(finished) == {streams[1].request_id, streams[2].request_id}
            assert not streams[0].samples[0].token_ids
            # A row that waits, for its grammar or its mask, is not computed again and again.
            assert len(results[-1].waiting) == 2
            assert sum(len(result.undrawn) for result in results) <= 3 * 2 * 2 < len(results)
            client.abort_request(streams[3])
            while client.has_unfinished:
                finished |= {output.request_id: output for output in client.step()}
            for i in range(3):
                check_equal([finished[streams[i].request_id]], [wanted[i]])
            assert engine.kv.pool.num_held == 0
