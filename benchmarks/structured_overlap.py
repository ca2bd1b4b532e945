"""What schemas cost where the device takes a given time for each step: the host's work alone.

The engine, the rows and llguidance are real (the demo model's vocabulary); the device is a clock.
It is done with a step so many milliseconds (--step-ms) after it was given the step and had finished
the one before, and only then are the tokens there, which are picked from the masks at random.
Sleeping takes no GIL, like a GPU. With --step-ms 0 a step takes what the host takes. The demo
model's masks are quick, for its vocabulary is small; with --mask-ms the library takes at least so
long for those of a step, as it does for a large one.

Prints one JSON line: milliseconds per step without and with a schema in every request, medians of
runs that take turns, and the share of the throughput that is left, the median over pairs of them.

With --beside it is the milliseconds between two tokens that other requests see beside one with an
ambiguous grammar, whose masks take long: with a schema in each of the others, and without; where
all rows wait for every mask, and where rows whose masks are late sit steps out. The longer the
vocabulary (--model, a directory with a config.json and a tokenizer), the longer the masks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from statistics import median
from typing import Any
from unittest.mock import patch

import llguidance
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.bench.throughput import Decoding, run_requests
from octavo.bench.traces import TraceRequest, make_prompts
from octavo.config import EngineConfig
from octavo.core.kv.specs import group_layers
from octavo.core.step import PendingStep, StepPlan
from octavo.executor.base import KVCapacity
from octavo.memory_budget import MemoryBudget
from octavo.models.config import ModelConfig
from octavo.ops import AttentionBatch, LayerSpec, ScoreFunction
from octavo.ops.communicator import SingleRank
from octavo.ops.reference.attention import ReferenceBackend
from octavo.ops.vocabulary import VocabularyShard
from octavo.registry import EXECUTORS
from octavo.structured import guidance
from octavo.structured.constraint import Words
from octavo.worker.device.base import Moment, PendingTokens
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.device.cpu_sampling import CpuDrawer
from octavo.worker.model_runner import ModelRunner
from octavo.worker.row_edits import DeviceEdits
from octavo.worker.sampler import SamplingBatch

LLExecutor = llguidance.LLExecutor

INPUT, OUTPUT = 32, 120  # tokens
AMBIGUOUS = 'start: s\ns: s s | s s s | "a" | "b" | "ab" | ""'
NUM_BLOCKS = 20_000


class Reached(Moment):
    """A time at which the device has done what it was given."""

    __slots__ = ("_at",)

    def __init__(self, at: float) -> None:
        super().__init__()
        self._at = at

    def wait(self) -> None:
        time.sleep(max(0.0, self._at - time.perf_counter()))

    def seconds_since(self, earlier: Moment) -> float:
        assert isinstance(earlier, Reached)
        return self._at - earlier._at


class Picker(CpuDrawer):
    """Picks tokens that the masks allow; other rows get token 7."""

    def __init__(self) -> None:
        super().__init__()
        self._random = np.random.default_rng(0)

    def draw(self, logits: Tensor, draws: SamplingBatch, vocabulary: VocabularyShard) -> Tensor:
        token_ids = np.full(draws.num_sampled, 7, np.int64)
        if draws.mask_places is not None and self._words is not None:
            is_masked = draws.mask_places >= 0
            token_ids[is_masked] = self._pick(self._words[draws.mask_places[is_masked]])
        return torch.from_numpy(token_ids)

    def _pick(self, words: Words) -> NDArray[np.int64]:
        """The first token that is allowed from a random word on."""
        shift = int(self._random.integers(words.shape[1]))
        turned = np.roll(words.view(np.uint32), -shift, axis=1)
        place = (turned != 0).argmax(axis=1)
        word = turned[np.arange(len(turned)), place].astype(np.int64)
        bit = np.log2(word & -word).astype(np.int64)
        token_ids: NDArray[np.int64] = 32 * ((place + shift) % words.shape[1]) + bit
        return token_ids


class Kept(PendingTokens):
    """See PendingTokens: no token matters to this model."""

    def fill(self, input_ids: Tensor, rows: Tensor) -> None:
        pass

    def keep(self, token_ids: Tensor, rows: Tensor, are_edited: bool) -> None:
        pass


class Clock(CpuDevice):
    """A device that takes `seconds` for each step."""

    is_asynchronous = True

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self._seconds = seconds
        self._free = 0.0  # when it will have done all that it was given

    def compute(self) -> None:
        self._free = max(self._free, time.perf_counter()) + self._seconds

    def moment(self) -> Reached:
        self._free = max(self._free, time.perf_counter())
        return Reached(self._free)

    def allocate_blocks(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(1, dtype=dtype).expand(tuple(shape))  # nobody writes them

    def copy_blocks(self, blocks: Tensor, copies: Tensor) -> None:
        pass

    def drawer(self, staging: Any, vocab_size: int) -> Picker:
        return Picker()

    def pending_tokens(self, num_rows: int, edits: DeviceEdits | None) -> Kept:
        return Kept()


class NoAttention(ReferenceBackend):
    """See AttentionBackend: one that has nothing to plan."""

    def plan(self, batch: AttentionBatch) -> None:
        pass


class NoModel:
    """See CausalLM: its steps take time, and that is all."""

    num_hit_experts = None

    def __init__(self, device: Clock, vocab_size: int) -> None:
        self.attention_layers = [LayerSpec(0, 1, 1, 8, ScoreFunction(1.0))]
        self._device = device
        self._logits = torch.zeros(1, vocab_size)

    def parameters(self) -> Iterator[Tensor]:
        return iter([self._logits])

    def forward(self, input_ids: Tensor, *_: object) -> Tensor:
        self._device.compute()
        return torch.zeros(len(input_ids), 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits.expand(len(hidden), -1)


class SlowLibrary:
    """llguidance's LLExecutor, which takes at least `seconds` for a step's masks."""

    seconds = 0.0

    def __init__(self, num_threads: int) -> None:
        self._own = LLExecutor(num_threads)

    def unsafe_compute_mask_ptr(self, *args: Any) -> None:
        end = time.perf_counter() + self.seconds
        self._own.unsafe_compute_mask_ptr(*args)
        time.sleep(max(0.0, end - time.perf_counter()))


class ClockExecutor:
    """See Executor."""

    is_asynchronous = True
    step_seconds = 0.0

    def __init__(self, config: EngineConfig, model_config: ModelConfig) -> None:
        self.config = config
        device = Clock(self.step_seconds)
        model: Any = NoModel(device, model_config.vocab_size)
        self._runner = ModelRunner(
            config, model_config, model, NoAttention, (NUM_BLOCKS, 0), device, SingleRank()
        )
        layout = group_layers(model_config.kv_specs())
        size = config.cache.block_size
        budget = MemoryBudget(0, 0, 0, 0, 0, 1, size, NUM_BLOCKS, 0, size * NUM_BLOCKS)
        self.capacity = KVCapacity.of(budget, layout)

    def submit(self, plan: StepPlan) -> PendingStep:
        return self._runner.submit(plan)

    def check(self) -> None:
        """A clock does not fail."""

    def shutdown(self) -> None:
        self._runner.shutdown()


def measure(num_requests: int, step_ms: float, mask_ms: float, rounds: int) -> dict[str, float]:
    """Milliseconds per step without and with schemas, and the share that is left."""
    ClockExecutor.step_seconds, SlowLibrary.seconds = step_ms / 1e3, mask_ms / 1e3
    trace = [TraceRequest(INPUT, OUTPUT)] * num_requests
    times: dict[bool, list[float]] = {False: [], True: []}
    with LLM("demo", executor="clock", owns_process=True, max_num_seqs=num_requests) as llm:
        vocab_size = llm.engine.model_config.vocab_size
        for number in range(rounds + 1):  # the first is to warm up
            prompts = make_prompts(trace, vocab_size, number)
            for structured, found in times.items():
                began = time.perf_counter()
                run_requests(llm.client, trace, prompts, Decoding(structured=structured))
                if number:
                    found.append(1e3 * (time.perf_counter() - began) / OUTPUT)
    shares = [a / b for a, b in zip(times[False], times[True], strict=True)]
    return {
        "requests": num_requests,
        "step_ms": step_ms,
        "mask_ms": mask_ms,
        "without_ms": round(median(times[False]), 2),
        "with_ms": round(median(times[True]), 2),
        "share": round(median(shares), 3),
    }


@contextmanager
def waiting_for_all() -> Iterator[None]:
    """No mask is computed apart from others."""
    with (
        patch.object(guidance.Pace, "note_slow", lambda pace: None),
        patch.object(guidance, "NUM_TRIED", 0),
    ):
        yield


def measure_beside(
    model: str, num_requests: int, step_ms: float, structured: bool, wait: bool
) -> dict[str, Any]:
    """Milliseconds between two tokens of requests, one of `num_requests` being ambiguous.

    wait: whether all rows of a step wait for its slowest mask.
    """
    ClockExecutor.step_seconds, SlowLibrary.seconds = step_ms / 1e3, 0.0
    trace = [TraceRequest(INPUT, OUTPUT)] * (num_requests - 1)
    ambiguous = SamplingParams(
        max_tokens=OUTPUT, detokenize=False, min_tokens=OUTPUT, structured={"grammar": AMBIGUOUS}
    )
    gaps: list[float] = []
    with LLM(
        model, executor="clock", owns_process=True, max_num_seqs=num_requests, max_model_len=1024
    ) as llm:
        client, decoding = llm.client, Decoding(structured=structured)
        prompts = make_prompts(trace, llm.engine.model_config.vocab_size, 0)
        run_requests(client, trace, prompts, decoding)  # to warm up
        with waiting_for_all() if wait else nullcontext():
            begun = [client.make_request(prompts[0], ambiguous)]
            for i, prompt in enumerate(prompts):
                begun.append(client.make_request(prompt, decoding.params(OUTPUT, i)))
            for stream in begun:
                client.add_request(stream)
            others = {stream: (0, 0.0) for stream in begun[1:]}
            while any(number < OUTPUT for number, _ in others.values()):
                client.step()
                now = time.perf_counter()
                for stream, (number, before) in others.items():
                    if len(stream.samples[0].token_ids) > number:
                        others[stream] = len(stream.samples[0].token_ids), now
                        if number:
                            gaps.append(1e3 * (now - before))
            num_ambiguous = len(begun[0].samples[0].token_ids)
    return {
        "requests": num_requests,
        "step_ms": step_ms,
        "schemas": structured,
        "all_wait": wait,
        **{f"p{q}_ms": round(float(np.percentile(gaps, q)), 1) for q in (50, 90, 99, 100)},
        "ambiguous_tokens": num_ambiguous,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--step-ms", nargs="+", type=float, default=[4.5, 12.0])
    parser.add_argument("--mask-ms", nargs="+", type=float, default=[0.0, 0.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--model", default="demo")
    args = parser.parse_args()
    if not len(args.requests) == len(args.step_ms) == len(args.mask_ms):
        parser.error("--requests, --step-ms and --mask-ms must have as many values")
    EXECUTORS.register("clock", ClockExecutor)
    if args.beside:
        with patch.object(llguidance, "LLExecutor", SlowLibrary):
            for number, step_ms in zip(args.requests, args.step_ms, strict=True):
                for case in product((False, True), (True, False)):
                    print(json.dumps(measure_beside(args.model, number, step_ms, *case)))
        return
    cases = zip(args.requests, args.step_ms, args.mask_ms, strict=True)
    with patch.object(llguidance, "LLExecutor", SlowLibrary):
        print(json.dumps([measure(*case, args.rounds) for case in cases]))


if __name__ == "__main__":
    main()
