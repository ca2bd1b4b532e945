"""The executor in this process, on a real (tiny) model; and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from model_zoo import model_directory, random_token_ids, reference_model, write_model
from octavo.config import CacheConfig, EngineConfig, QuantizationName, SchedulerConfig
from octavo.core.step import OpenedRow, SamplingSpec, StepPlan, TableWrite
from octavo.errors import ConfigError, OutOfMemory
from octavo.executor.base import Executor
from octavo.executor.local import LocalExecutor
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.cpu.int8 import has_int8_product
from octavo.worker.input_batch import InputBatch

SCHEDULER = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64)


def make_executor(name: str = "llama", **options: Any) -> LocalExecutor:
    directory = model_directory(name)
    cache = CacheConfig(
        block_size=options.pop("block_size", 8),
        num_blocks=options.pop("num_blocks", 64),
        kv_cache_memory=options.pop("kv_cache_memory", None),
        swap_space=options.pop("swap_space", 1 << 20),
    )
    config = EngineConfig(str(directory), cache=cache, scheduler=SCHEDULER, **options)
    return LocalExecutor(config, read_model_config(directory))


def prompt_plan(token_ids: list[int], num_groups: int = 1) -> StepPlan:
    return StepPlan(
        0, [1], [len(token_ids)], [1], [],
        opened=[OpenedRow(1, tuple(token_ids), len(token_ids), 0, SamplingSpec(0.0), 0, 0)],
        table_writes=[
            TableWrite(1, group, 0, tuple(range(10 * group + 1, 10 * group + 9)))
            for group in range(num_groups)
        ],
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("name", ["llama", "qwen2"])  # qwen2: full and sliding layers
def test_a_step_computes_what_transformers_does(name: str, backend: str) -> None:
    executor = make_executor(name, attention_backend=backend)
    token_ids = random_token_ids(40)
    plan = prompt_plan(token_ids, len(executor.capacity.layout.groups))
    result = executor.submit(plan).result()
    with torch.no_grad():
        logits = reference_model(name)(torch.tensor([token_ids])).logits
    assert result.token_ids == [int(logits[0, -1].argmax())]
    assert result.compute_seconds > 0
    executor.shutdown()
    executor.shutdown()
    with pytest.raises(AssertionError, match="shut down"):
        executor.submit(plan).result()


def test_capacity_is_what_the_budget_says() -> None:
    executor: Executor = make_executor("qwen2", attention_backend="reference")
    capacity = executor.capacity
    config = read_model_config(model_directory("qwen2"))
    layers, attention = config.num_layers // 2, config.layers[0].attention  # in each of two groups
    block_bytes = layers * 2 * 8 * attention.num_kv_heads * attention.head_dim * 4
    assert len(capacity.layout.groups) == 2
    assert capacity.block_bytes == block_bytes
    assert capacity.num_blocks == 64
    assert capacity.num_swap_blocks == min((1 << 20) // block_bytes, 64)
    assert capacity.budget.kv_cache == 65 * block_bytes
    assert not config.tied_embeddings
    assert capacity.budget.weights == config.weight_bytes(4)


@pytest.mark.skipif(not has_int8_product(), reason="no exact int8 product here")
def test_the_budget_counts_weights_as_they_are_kept(tmp_path: Path) -> None:
    def weights(directory: Path, quantization: QuantizationName | None) -> int:
        config = EngineConfig(str(directory), cache=CacheConfig(num_blocks=64))
        config = replace(config, quantization=quantization, scheduler=SCHEDULER)
        model = read_model_config(directory)
        if quantization is not None:
            model = quantized_on_load(model, quantization)
        return LocalExecutor(config, model).capacity.budget.weights

    def saved(directory: Path, quantization: QuantizationName) -> int:
        return weights(directory, None) - weights(directory, quantization)

    llama, mixtral = model_directory("llama3"), model_directory("mixtral")
    layers = read_model_config(llama).layers
    projections = sum(each.num_parameters - 2 * each.norm.num_parameters for each in layers)
    assert saved(llama, "int8") == 3 * projections > 0
    of_groups = write_model("llama3", tmp_path, hidden_size=64, intermediate_size=96)
    assert saved(of_groups, "int4") == 0, "dequantized"
    config = quantized_on_load(read_model_config(mixtral), "int8")
    assert saved(mixtral, "int8") == 3 * config.quantized_parts[0] > 0, "but for the experts"


def test_blocks_follow_from_memory() -> None:
    wanted = 1 << 20
    capacity = make_executor(num_blocks=None, kv_cache_memory=wanted).capacity
    assert capacity.num_blocks == wanted // capacity.block_bytes - 1
    # The default is a share of what is free, and no more than 4 GiB.
    capacity = make_executor(num_blocks=None).capacity
    assert capacity.block_bytes * (capacity.num_blocks + 1) <= 4 << 30
    assert capacity.num_blocks > 1000


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"device": "tpu"}, "device", "'tpu' is not one of"),
        ({"device": "cuda"}, "device", "PyTorch finds no NVIDIA GPU here"),
        ({"attention_backend": "triton"}, "attention_backend", "'triton' runs on a GPU"),
        ({"attention_backend": "flash"}, "attention_backend", "'flash' is not one of auto, cpu"),
        ({"dtype": "float16"}, "dtype", "float16 is not served on a CPU"),
    ],
)
def test_options_that_cannot_work_are_refused(
    options: dict[str, str], field: str, message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        make_executor(**options)
    assert raised.value.field == field
    assert message in str(raised.value)


def test_a_model_length_that_does_not_fit_is_refused_with_one_that_does() -> None:
    with pytest.raises(OutOfMemory, match="set max_model_len to 80 or less"):
        make_executor(num_blocks=10, max_model_len=300)
    make_executor(num_blocks=10, max_model_len=80)
    # The model's own limit of 512 may be more than fits.
    assert make_executor(num_blocks=10).capacity.num_blocks == 10


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octavo.worker import worker
    from octavo.worker.device import cpu

    monkeypatch.setattr(cpu, "host_memory", lambda: 100_000)
    monkeypatch.setattr(worker, "load_model", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(
        OutOfMemory, match=r"of 97\.66 KiB, weights take .* which leaves 0 B.* free"
    ):
        make_executor(num_blocks=None)


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(OutOfMemory, match=r"num_blocks=1000000000 does not fit.*What fits"):
        make_executor(num_blocks=1_000_000_000)


@pytest.mark.parametrize(
    ("asked", "stored", "dtype"),
    [
        ("auto", "float32", torch.float32),
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
    ],
)
def test_dtypes(asked: str, stored: str, dtype: torch.dtype) -> None:
    from octavo.worker.device.base import DTYPES
    from octavo.worker.device.cpu import CpuDevice

    config = CpuDevice().adapt(EngineConfig("demo", dtype=asked))
    assert DTYPES[config.dtype_for(stored)] == dtype


def test_bfloat16_runs() -> None:
    executor = make_executor(dtype="bfloat16")
    half = executor.capacity.block_bytes
    assert half * 2 == make_executor().capacity.block_bytes
    assert len(executor.submit(prompt_plan(random_token_ids(20))).result().token_ids) == 1


def test_the_number_of_threads_holds_while_octavo_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octavo.worker.device import cpu

    monkeypatch.setattr(cpu, "num_cpus", lambda: 3)
    executor = make_executor(num_threads=3)
    before = torch.get_num_threads()
    assert before != 3
    seen = []
    model_input = InputBatch.model_input

    def noted(*args: Any) -> Any:
        seen.append(torch.get_num_threads())
        return model_input(*args)

    monkeypatch.setattr(InputBatch, "model_input", noted)
    executor.submit(prompt_plan(random_token_ids(5)))
    assert seen == [3]
    assert torch.get_num_threads() == before
    with pytest.raises(ConfigError, match="num_threads: 4 is more than the 3 CPUs"):
        make_executor(num_threads=4)
    assert torch.get_num_threads() == before


def test_dummy_weights_depend_on_the_seed_alone() -> None:
    plan = prompt_plan(random_token_ids(30))
    spec = SamplingSpec(num_logprobs=5)
    plan = replace(plan, opened=[plan.opened[0]._replace(sampling=spec)])
    results = [
        make_executor(load_format="dummy", seed=seed).submit(plan).result().logprobs
        for seed in (1, 1, 2)
    ]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_spinning_is_limited_while_torch_is_loaded_and_no_longer(
    environment: dict[str, str], expected: str
) -> None:
    code = (
        "import os, sys; from octavo.host_memory import limited_spinning;"
        "from octavo.executor import local; assert 'torch' not in sys.modules; "
        "before = dict(os.environ); context = limited_spinning(); context.__enter__();"
        "print(os.environ.get('GOMP_SPINCOUNT')); context.__exit__(None, None, None);"
        "assert dict(os.environ) == before"
    )
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**environment, **path}, capture_output=True, check=True
    )
    assert done.stdout.decode().strip() == expected


@pytest.mark.parametrize(
    ("cuda", "capability", "modules", "words"),
    [
        (None, (9, 4), {}, "only NVIDIA's are served"),
        ("13.0", (7, 5), {}, "compute capability 7.5, and 8.0 is needed; device='cpu'"),
        ("13.0", (8, 0), {"triton": None}, "needs Triton: pip install triton"),
    ],
)
def test_gpus_that_are_not_served_are_refused_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    cuda: str | None,
    capability: tuple[int, int],
    modules: dict[str, None],
    words: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "octavo.worker.device.cuda", raising=False)
    with pytest.raises(ConfigError, match=words):
        make_executor(device="cuda")
