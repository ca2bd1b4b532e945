"""Masks that a library computes while the host goes on: a device whose steps overlap, on a CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import model_zoo
from octavo import BeamSearchParams, SamplingParams
from octavo.config import EngineConfig, make_config
from octavo.core.kv.specs import group_layers
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
from octavo.structured.output import StructuredOutput
from octavo.worker.device.base import PendingTokens
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.device.cpu_sampling import CpuDrawer
from octavo.worker.model_runner import ModelRunner
from octavo.worker.sampler import SamplingBatch

llguidance = pytest.importorskip("llguidance")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "maxLength": 3}, "b": {"enum": [1, 22, 333]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
REGEX = {"regex": "[a-f]{4,20}"}
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

    def keep(self, token_ids: Tensor, rows: Tensor) -> None:
        self._last[rows.long()] = token_ids


class OverlappingDevice(CpuDevice):
    """A CPU whose steps are submitted before the tokens of the steps before are looked at."""

    is_asynchronous = True

    def __init__(self) -> None:
        super().__init__()
        self.drawing_threads: set[str] = set()

    def drawer(self, staging: Any, vocab_size: int) -> Drawer:
        return Drawer(self.drawing_threads)

    def pending_tokens(self, num_rows: int) -> Pending:
        return Pending(num_rows)


class OverlappingExecutor:
    is_asynchronous = True

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        model = load_model(model_config, torch.float32, torch.device("cpu"), SingleRank())
        num_blocks = (config.cache.num_blocks or 0, 0)
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
        layout = group_layers(model_config.kv_specs())
        self.capacity = KVCapacity(*num_blocks, layout, 0, None)  # type: ignore[arg-type]
        self.submit = self.runner.submit

    def check(self) -> None:
        pass

    def shutdown(self) -> None:
        self.runner.shutdown()


@contextmanager
def engines() -> Iterator[tuple[Engine, Engine]]:
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
        preemption_mode="recompute",
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
            compute()
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


def prompt(length: int, seed: int) -> list[int]:
    token_ids: list[int] = model_zoo.random_token_ids(length, seed=seed)
    return token_ids


def test_draws_wait_for_slow_masks_and_stay_in_the_thread_that_submits_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where rows fork, are preempted, search beams, or end at a token that the host sees
    late."""
    computing: set[str] = set()

    def compute() -> None:
        computing.add(threading.current_thread().name)
        time.sleep(0.003)

    monkeypatch.setattr(llguidance, "LLExecutor", slow(compute))
    schema = {"json_schema": SCHEMA}
    asks: list[tuple[list[int], Any]] = [
        (prompt(20, 1), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)),
        (prompt(5, 2), SamplingParams(seed=3, max_tokens=30, structured=schema)),
        (prompt(9, 3), SamplingParams(seed=4, n=3, max_tokens=22, structured=REGEX)),
        (prompt(13, 4), SamplingParams(temperature=0, max_tokens=30, structured=schema)),
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
    with engines() as (overlapped, plain):
        got, wanted = run(overlapped, asks), run(plain, asks)
        for mine, other in zip(got, wanted, strict=True):
            assert mine.error is None
            pairs = zip(mine.outputs, other.outputs, strict=True)
            assert all(
                (a.token_ids, a.finish_reason) == (b.token_ids, b.finish_reason) for a, b in pairs
            )
        executor: Any = overlapped.executor
        assert executor.device.drawing_threads == {threading.current_thread().name}
        assert {name.rsplit("_", 1)[0] for name in computing} == {"masks"}
        assert sum(overlapped.scheduler.num_preemptions.values()) > 0
        assert overlapped.kv.pool.num_held == 0


def test_no_thread_computes_masks_without_grammars() -> None:
    asks = [(prompt(5, 2), SamplingParams(max_tokens=9, min_tokens=4, allowed_token_ids=[5, 6]))]
    before = set(threading.enumerate())
    with engines() as (overlapped, _):
        assert [output.error for output in run(overlapped, asks)] == [None]
        new = {thread.name for thread in set(threading.enumerate()) - before}
        assert not [name for name in new if name.startswith(("masks", "grammars"))]


def test_what_fails_in_the_thread_fails_the_step_and_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []

    def compute() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no room for masks")

    monkeypatch.setattr(llguidance, "LLExecutor", slow(compute))
    before = set(threading.enumerate())
    asks = [(prompt(5, 2), SamplingParams(seed=3, max_tokens=30, structured=REGEX))]
    with engines() as (overlapped, _), pytest.raises(MemoryError, match="no room for masks"):
        run(overlapped, asks)
    alive = {thread.name for thread in set(threading.enumerate()) - before}
    assert not [name for name in alive if name.startswith(("masks", "grammars"))]
