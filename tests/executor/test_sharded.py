"""An engine whose model several processes share says what one with a single process says."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import model_zoo
from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import ConfigError, EngineFailed, ModelError, OutOfMemory, ProcessKilled
from octavo.executor import launching
from octavo.host_memory import num_cpus
from octavo.parallel import Shard
from octavo.worker.device import check_gpus
from octavo.worker.device.cpu import CpuDevice
from processes import children

OPTIONS = {"dtype": "float32", "block_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 8}
# Longer than a step's tokens, so that they are computed in chunks; and with a common prefix.
PREFIX = [5 * i % 300 + 2 for i in range(70)]
PROMPTS = [[*PREFIX, i, 7 * i] for i in range(2, 8)] + [[3, 4, 5], [9]]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(
    n=2, temperature=1.0, top_p=0.9, repetition_penalty=1.2, seed=5, max_tokens=20, logprobs=2
)
BEAMS = BeamSearchParams(beam_width=3, max_tokens=12)


def three_heads(directory: Path) -> Path:
    """A model whose heads can be divided among three ranks."""
    path = directory / "llama-of-3"
    sizes = {"hidden_size": 72, "intermediate_size": 96}
    model_zoo.write_model("llama3", path, num_attention_heads=6, num_key_value_heads=3, **sizes)
    return path


def say(model: Path, **options: Any) -> tuple[list[Any], dict[str, int], int]:
    """All that is generated; preemptions of each kind, and cached tokens."""
    with LLM(model, **OPTIONS, **options) as llm:
        said: list[Any] = []
        num_cached = 0
        for params in (GREEDY, DRAWN):
            outputs = llm.generate(PROMPTS, params, use_tqdm=False)
            num_cached += sum(output.num_cached_tokens for output in outputs)
            for output in outputs:
                said += [(each.token_ids, each.finish_reason) for each in output.outputs]
                said += [
                    [(entry.token_id, entry.rank) for entry in each.logprobs or ()]
                    for each in output.outputs
                ]
        for output in llm.beam_search(PROMPTS[-2:], BEAMS, use_tqdm=False):
            said += [each.token_ids for each in output.outputs]
        return said, dict(llm.engine.scheduler.num_preemptions), num_cached


@pytest.mark.parametrize(
    ("size", "mode", "overlap"),
    [
        (2, "swap", True),
        # Three ranks, and steps that do not overlap, are also those of tests/parallel.
        pytest.param(3, "recompute", False, marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens(size: int, mode: str, overlap: bool, tmp_path: Path) -> None:
    model = model_zoo.model_directory("llama3") if size == 2 else three_heads(tmp_path)
    options = {"num_blocks": 60, "preemption_mode": mode}
    expected, preemptions, num_cached = say(model, **options)
    assert sum(preemptions.values()) > 0
    assert num_cached > 0
    shared = say(model, **options, tensor_parallel_size=size, overlap=overlap)
    assert shared[0] == expected
    assert shared[1].keys() == preemptions.keys()
    assert shared[2] > 0


def test_a_rank_that_is_killed_ends_the_engine() -> None:
    before = children(os.getpid())
    with LLM(model_zoo.model_directory("llama3"), tensor_parallel_size=2, **OPTIONS) as llm:
        assert llm.engine.executor.capacity.num_ranks == 2
        ranks = children(os.getpid()) - before
        assert len(ranks) == 2
        deltas = llm.stream([3, 4, 5], GREEDY)
        next(deltas)
        os.kill(max(ranks), signal.SIGKILL)
        with pytest.raises(ProcessKilled, match=r"rank 1 .*: it was ended by signal 9 \(SIGKILL\)"):
            list(deltas)
        assert children(os.getpid()) <= before
        with pytest.raises(EngineFailed, match="rank 1"):
            llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)


needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_two_gpus_say_what_one_says(mode: str, cuda_graphs: bool) -> None:
    options = {"num_blocks": 60, "preemption_mode": mode, "cuda_graphs": cuda_graphs}
    model = model_zoo.model_directory("llama3")
    expected, preemptions, _ = say(model, **options, device="cuda")
    assert sum(preemptions.values()) > 0
    shared = say(model, **options, device="cuda", tensor_parallel_size=2)
    assert shared[0] == expected
    assert sum(shared[1].values()) > 0


@pytest.mark.gpu
@needs_two_gpus
@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (signal.SIGKILL, ProcessKilled, "was ended by signal 9"),
        (signal.SIGSTOP, EngineFailed, "a step has not been computed within rank_timeout"),
    ],
)
def test_a_gpu_s_rank_that_breaks_down(number: int, kind: type[Exception], text: str) -> None:
    """While kernels of the other wait for it on the device."""
    before = children(os.getpid())
    options = {"tensor_parallel_size": 2, "device": "cuda", "rank_timeout": 3.0}
    with LLM(model_zoo.model_directory("llama3"), **OPTIONS, **options) as llm:
        ranks = children(os.getpid()) - before
        deltas = llm.stream([3, 4, 5], replace(GREEDY, max_tokens=400))
        next(deltas)
        os.kill(max(ranks), number)
        with pytest.raises(kind, match=text):
            list(deltas)
        assert children(os.getpid()) <= before


def test_what_all_ranks_find_wrong_is_raised_here(tmp_path: Path) -> None:
    """The file ends too early, which ranks find when they read it."""
    model_zoo.write_model("llama3", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    before = children(os.getpid())
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        LLM(tmp_path, tensor_parallel_size=2, **OPTIONS)
    assert children(os.getpid()) <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size: 0 is less than 1"),
        ({"tensor_parallel_size": 2.0}, "tensor_parallel_size: 2.0 is not an integer"),
        ({"tensor_parallel_size": 3}, "heads (4) cannot be divided evenly among 3 ranks"),
        ({"tensor_parallel_size": 10**9}, "1000000000 ranks are too many for a vocab"),
        ({"tensor_parallel_size": 2, "executor": "local"}, "executor: local computes on one"),
        ({"rank_timeout": 0.0}, "rank_timeout: 0.0 is not between 0.1 and 1,000,000"),
        ({"rank_timeout": 1e300}, "rank_timeout: 1e+300 is not between"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: is not served; of several GPUs"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel: is not served"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    before = children(os.getpid())
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(model_zoo.model_directory("llama3"), **options)
    assert children(os.getpid()) <= before


def test_ranks_for_which_there_is_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "host_memory", lambda: 300 << 20)
    message = r"2 processes take about 256\.00 MiB each, and 300\.00 MiB are free"
    with pytest.raises(OutOfMemory, match=message):
        LLM(model_zoo.model_directory("llama3"), tensor_parallel_size=2)


def test_ranks_divide_the_threads() -> None:
    with CpuDevice(num_cpus(), num_ranks=2).computing:
        assert torch.get_num_threads() == max(1, num_cpus() // 2)
    with CpuDevice(num_ranks=10_000).computing:
        assert torch.get_num_threads() == 1


def test_gpus_that_are_too_few_or_differ() -> None:
    check_gpus(["H200"] * 2, Shard(1, 2))
    with pytest.raises(ConfigError, match="tensor_parallel_size: 4 is more than the 2 GPUs"):
        check_gpus(["H200"] * 2, Shard(3, 4))
    with pytest.raises(ConfigError, match=r"of different kinds \(H200, A100\)"):
        check_gpus(["H200", "A100", "H200"], Shard(0, 2))
