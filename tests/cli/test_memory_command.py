from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from click_harness import Octavo

import gguf_files
from gguf_files import Kind
from model_zoo import model_directory, write_model
from octavo import LLM
from octavo.cli.memory import CONTEXT
from octavo.layers.config import CopyForm, LinearConfig
from octavo.memory_budget import format_bytes
from octavo.models.registry import read_model_config
from octavo.simulation.cost_model import CostModel, ModelSize
from octavo.simulation.gpus import find_gpu
from octavo.simulation.step_shape import StepShape

ROOT = Path(__file__).parents[2]
OPT_13B = ROOT / "benchmarks/configs/opt-13b"
LLAMA_8B = ROOT / "benchmarks/configs/llama-3-8b"


def test_the_paper_s_opt_13b(octavo: Octavo) -> None:
    """Table 1: 26 GB of parameters, 800 KiB a token, 12 GB hold 15.7K slots."""
    args = ("memory", OPT_13B, "--device-memory", "40GiB", "--num-blocks", 983)
    values = json.loads(octavo(*args, "--json", "--lengths", "512,2048,4096").stdout)
    assert 25.5e9 < values["budget"]["weights"] < 26.5e9
    assert values["kv_bytes_per_token"] == 819_200
    assert values["kv_slots"] == 15_728
    assert values["sequences"] == {"512": 30, "2048": 7, "4096": None}
    text = octavo(*args).stdout
    assert "12,853.5 M parameters, float16" in text
    assert "819,200 bytes (800.00 KiB): 40 x full attention" in text
    assert "7 sequences at once" in text


def test_an_fp8_kv_cache_has_twice_the_slots_in_the_same_memory(octavo: Octavo) -> None:
    args = ("memory", OPT_13B, "--device-memory", "40GiB", "--json")
    plain, fp8 = (
        json.loads(octavo(*args, "--kv-cache-dtype", each).stdout) for each in ("auto", "fp8")
    )
    assert (plain["kv_cache_dtype"], fp8["kv_cache_dtype"]) == ("float16", "float8_e4m3fn")
    assert plain["kv_bytes_per_token"] == 2 * fp8["kv_bytes_per_token"]
    assert plain["budget"]["block_bytes"] == 2 * fp8["budget"]["block_bytes"]
    assert plain["budget"]["weights"] == fp8["budget"]["weights"]
    assert fp8["budget"]["num_blocks"] - 2 * plain["budget"]["num_blocks"] in (1, 2)
    shown = octavo(*args[:-1], "--kv-cache-dtype", "fp8").stdout
    assert "409,600 bytes (400.00 KiB): 40 x full attention, float8_e4m3fn" in shown


def without_torch(model: Path) -> str:
    """What the command prints in a process that cannot import torch."""
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from octavo.cli.main import main; main(prog_name='octavo')"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "memory", str(model), "--device-memory", "80GiB"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_it_needs_neither_weights_nor_torch() -> None:
    shown = without_torch(ROOT / "benchmarks/configs/qwen3-0.6b")
    assert "114,688 bytes" in shown  # 2 x 28 layers x 8 heads x 128 x 2 bytes


def test_a_gguf_file(tmp_path: Path) -> None:
    path = gguf_files.write_pair("llama", tmp_path, gguf_files.everywhere(Kind.Q4_0))
    shown = without_torch(path)
    assert f"{path}: LlamaForCausalLM, 0.1 M parameters, bfloat16" in shown
    assert "768 bytes (768 B): 3 x full attention, bfloat16" in shown  # 2 x 3 x 4 x 16 x 2


def test_it_is_the_budget_of_each_rank(octavo: Octavo) -> None:
    directory = model_directory("qwen2")
    options = {"num_blocks": 60, "max_num_batched_tokens": 300, "tensor_parallel_size": 2}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    values = json.loads(octavo("memory", directory, *flags, "--json").stdout)
    with LLM(directory, **options, attention_backend="reference") as llm:
        capacity = llm.engine.executor.capacity
    assert (values["tensor_parallel_size"], capacity.num_ranks) == (2, 2)
    assert capacity.block_bytes == 2 * capacity.budget.block_bytes
    for name in ("weights", "activations", "kv_cache", "num_blocks", "num_swap_blocks"):
        assert values["budget"][name] == getattr(capacity.budget, name), name
    whole = json.loads(octavo("memory", directory, *flags[:-1], "--json").stdout)
    assert values["kv_bytes_per_token"] * 2 == whole["kv_bytes_per_token"]
    assert 0.5 < values["budget"]["weights"] / whole["budget"]["weights"] < 0.6
    assert "; each of 2 devices" in octavo("memory", directory, *flags).stdout


def test_it_is_the_budget_of_the_worker(octavo: Octavo) -> None:
    # qwen2 of the zoo mixes full and sliding layers: two KV groups.
    directory = model_directory("qwen2")
    options = ("--num-blocks", 60, "--block-size", 8, "--max-num-batched-tokens", 300)
    result = octavo("memory", directory, *options, "--json")
    values = json.loads(result.stdout)["budget"]
    with LLM(
        str(directory),
        num_blocks=60,
        block_size=8,
        max_num_batched_tokens=300,
        attention_backend="reference",  # it pads no heads
    ) as llm:
        budget = llm.engine.executor.capacity.budget
    for name in ("weights", "activations", "kv_cache", "num_blocks", "num_swap_blocks"):
        assert values[name] == getattr(budget, name), name
    text = octavo("memory", directory, *options, "--lengths", "64").stdout
    assert "2 x full attention, 2 x window of 20" in text
    assert re.search(r"^0: full attention +2 +384 +8 +64$", text, re.M)
    assert re.search(r"^1: window of 20 +2 +384 +8 +4$", text, re.M)
    assert re.search(
        r"^of 64 tokens .* sequences at once; .* of KV each, 1\.\d\d times", text, re.M
    )


@pytest.mark.parametrize("memory", [64 << 20, 64 << 30])  # a share of the first, and a limit
def test_it_is_the_budget_of_this_host(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int
) -> None:
    """Where neither a device's memory nor a size of the KV cache is given: of a model whose head is
    packed beside the table, and that a CPU computes in another dtype than its files are in."""
    directory = write_model("gemma", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    for module in ("octavo.cli.memory", "octavo.worker.device.cpu"):
        monkeypatch.setattr(f"{module}.host_memory", lambda: memory)
    options = ("--max-num-batched-tokens", 300)
    values = json.loads(octavo("memory", directory, *options, "--json").stdout)
    assert values["dtype"] == "float32"
    with LLM(
        directory, max_num_batched_tokens=300, device="cpu", attention_backend="reference"
    ) as llm:
        budget = llm.engine.executor.capacity.budget
    for name in ("total", "weights", "activations", "kv_cache", "num_blocks", "num_swap_blocks"):
        assert values["budget"][name] == getattr(budget, name), name
    text = octavo("memory", directory, *options, "--gpu=cpu").stdout
    assert f"float32 takes {format_bytes(budget.weights)} and leaves" in " ".join(text.split())


def test_a_model_that_only_transformers_computes(octavo: Octavo, tmp_path: Path) -> None:
    directory = write_model("cohere", tmp_path, use_qk_norm=True)
    refused = octavo("memory", directory)
    assert "(model_impl='transformers')" in refused.stderr
    values = json.loads(octavo("memory", directory, "--model-impl=transformers", "--json").stdout)
    with LLM(directory, model_impl="transformers") as llm:
        budget = llm.engine.executor.capacity.budget
    assert values["budget"]["activations"] == budget.activations


def test_no_weights_are_fetched_for_a_hub_id(
    octavo: Octavo, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def fetch(hub_id: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(OPT_13B)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    assert octavo("memory", "facebook/opt-13b", "--device-memory", "40GiB").exit_code == 0
    assert asked
    assert not any("safetensors" in pattern for pattern in asked)


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (["--device-memory", "20GiB"], 1, "error: a KV cache of one block does not fit"),
        (["--device-memory", "40GiB", "--num-blocks", "99999"], 1, "num_blocks from 1 to 12"),
        (["--device-memory", "0"], 1, "error: device_memory: 0 bytes is not positive"),
        (["--gpu", "h200", "--device-memory", "0"], 1, "device_memory: 0 bytes is not positive"),
        (["--device-memory", "much"], 2, "'much' is not a size"),
        (["--lengths", "12,x"], 2, "'12,x' is not a list of positive integers"),
        (["--max-model-len", "4096"], 1, "error: max_model_len: 4096 is more than the 2048"),
    ],
)
def test_mistakes(octavo: Octavo, args: list[str], exit_code: int, message: str) -> None:
    result = octavo("memory", OPT_13B, *args)
    assert message in result.stderr
    assert result.exit_code == exit_code


def test_sequences_hold_the_input_of_the_encoder_too(octavo: Octavo, tmp_path: Path) -> None:
    """T5-small, with 6 layers of 8 heads: 32 blocks of 16 tokens for 512 tokens of input."""
    config = {
        "model_type": "t5",
        "architectures": ["T5ForConditionalGeneration"],
        **{"vocab_size": 32_128, "d_model": 512, "d_kv": 64, "d_ff": 2048},
        **{"num_layers": 6, "num_heads": 8, "decoder_start_token_id": 0, "eos_token_id": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = ("memory", tmp_path, "--device-memory", "1GiB", "--num-blocks", 960)
    steps = ("--max-num-batched-tokens", 513)
    values = json.loads(octavo(*args, *steps, "--json", "--lengths", "16,512").stdout)
    assert values["max_encoder_len"] == 512
    assert values["sequences"] == {"16": 960 // 33, "512": 960 // 64}
    assert [group["spec"] for group in values["kv_groups"]] == ["full attention", "cross-attention"]
    assert values["kv_groups"][1]["blocks"] == 32
    assert "encoder input" in octavo(*args, *steps).stdout


def test_the_memory_command_says_what_auto_takes_and_what_is_dequantized(octavo: Octavo) -> None:
    def values(*options: object, directory: Path = LLAMA_8B) -> dict[str, object]:
        run = octavo("memory", directory, *options, "--json")
        return cast("dict[str, object]", json.loads(run.stdout))

    small = ("--gpu", "h200", "--device-memory", "20GiB")
    found = values(*small, "--quantization", "auto")
    assert cast("dict[str, object]", found["auto"])["quantization"] == "fp8"
    assert found["budget"] == values(*small, "--quantization", "fp8")["budget"]
    assert found["dequantized"] is None
    text = octavo("memory", LLAMA_8B, *small).stdout
    assert "--quantization auto: fp8, because bfloat16 takes 14.96 GiB" in " ".join(text.split())
    assert "dequantized" not in text

    assert values("--gpu", "a100-40gb", "--quantization", "fp8")["dequantized"] == (
        "fp8 projections are dequantized to bfloat16, because octavo has no kernels for them "
        "there; they take 14.96 GiB instead of 8.46 GiB"
    )
    text = octavo("memory", ROOT / "tests/models/quantized" / "awq", "--gpu", "a100-40gb").stdout
    assert "awq projections are dequantized to" in text
    assert "as stored (dequantized)" in text
    run = octavo("memory", LLAMA_8B, "--gpu", "h200", "--device-memory", "12GiB")
    assert "of 12.00 GiB, weights take 14.96 GiB" in run.stderr
    assert re.search(r"^as stored +do not fit", run.stdout, re.M), "what would fit is shown"
    assert re.search(r"^int4 +6\.\d\d GiB", run.stdout, re.M)
    assert "auto: int4, because bfloat16 takes 14.96 GiB and does" in " ".join(run.stdout.split())
    run = octavo("memory", LLAMA_8B, "--quantization", "auto")
    assert "quantization: auto depends on the device: name it by --gpu" in run.stderr
    run = octavo("memory", LLAMA_8B, *small[:2], "--device-memory", "4GiB", "--quantization=auto")
    assert re.search(r"of 4\.00 GiB, .* int4 takes 5\.\d\d GiB and does not fit", run.stderr)
    assert run.exit_code == 1


def test_copies_of_weights_are_counted(octavo: Octavo) -> None:
    def values(*options: str) -> dict[str, Any]:
        run = octavo("memory", LLAMA_8B, *options, "--json")
        found: dict[str, Any] = json.loads(run.stdout)
        return found

    options = ("--weight-copies", "--no-weight-copies")
    copied, plain = (values("--gpu", "h200", each) for each in options)
    rows = 128_256 + 32 * (6144 + 4096 + 2 * 14336 + 4096)
    weights = 128_256 * 4096 + 32 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096)
    size = 3 * weights // 2 + 4 * rows
    assert (copied["weight_copy_bytes"], plain["weight_copy_bytes"]) == (size, 0)
    assert copied["budget"]["weights"] == plain["budget"]["weights"] + size
    assert copied["kv_slots"] < plain["kv_slots"]
    rates = [each["forms"][0]["tokens_per_second"] for each in (copied, plain)]
    assert rates[0]["1"] > 1.2 * rates[1]["1"]
    assert rates[0]["256"] == rates[1]["256"]
    line = "copies of weights 10.49 GiB of the weights"
    for option, is_there in zip(options, (True, False), strict=True):
        text = " ".join(octavo("memory", LLAMA_8B, "--gpu", "h200", option).stdout.split())
        assert (line in text) == is_there
    for others in (("--gpu", "a100-80gb"), ("--gpu", "h200", "--dtype", "float16")):
        assert values(*others)["weight_copy_bytes"] == 0
    on_this_cpu = octavo("memory", LLAMA_8B.with_name("qwen3-0.6b"), "--json")
    assert json.loads(on_this_cpu.stdout)["weight_copy_bytes"] == 0


def test_equal_layers_are_computed_once(
    octavo: Octavo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A deep model's projections are described no more often than those of a shallow one."""
    described: list[LinearConfig] = []
    with_copy = LinearConfig.with_copy

    def counting(self: LinearConfig, form: CopyForm | None) -> LinearConfig:
        described.append(self)
        return with_copy(self, form)

    monkeypatch.setattr(LinearConfig, "with_copy", counting)
    fields = json.loads((LLAMA_8B / "config.json").read_text())
    counts = []
    for num_layers in (4, 40):
        (tmp_path / "config.json").write_text(
            json.dumps(fields | {"num_hidden_layers": num_layers})
        )
        described.clear()
        assert octavo("memory", tmp_path, "--gpu", "h200").exit_code == 0
        counts.append(len(described))
    # Copies that fit only some layers divide them into two kinds.
    assert counts[1] < 2 * counts[0]


def test_each_group_of_layers_takes_blocks_of_its_own(octavo: Octavo) -> None:
    """A token of a Gemma 3 is in seven groups; windows keep, and read, only a part of a context."""
    gemma = ROOT / "benchmarks/configs/gemma-3-4b"
    options = ("--gpu", "h200", "--no-weight-copies", "--json")

    def values(*more: str) -> dict[str, Any]:
        run = octavo("memory", gemma, *options, *more)
        found: dict[str, Any] = json.loads(run.stdout)
        return found

    whole = values()
    budget = whole["budget"]
    room = budget["num_blocks"] * budget["block_bytes"]
    assert whole["kv_slots"] == room // whole["kv_bytes_per_token"]
    assert len(whole["kv_groups"]) == 7
    rates = whole["forms"][0]["tokens_per_second"]
    assert set(rates) == {"1", "64", "256"}
    # Room for 64 sequences of 1,024 tokens, if every group has their blocks, but not for 256.
    some = values("--num-blocks", str(7 * 64 * 70))
    assert set(some["forms"][0]["tokens_per_second"]) == {"1", "64"}


def test_layers_with_windows_read_less(octavo: Octavo, tmp_path: Path) -> None:
    fields = json.loads((ROOT / "benchmarks/configs/gemma-3-4b/config.json").read_text())
    rates = []
    for window in (1024, 128):
        text = fields.get("text_config", fields)
        text["sliding_window"] = window
        (tmp_path / "config.json").write_text(json.dumps(fields))
        run = octavo("memory", tmp_path, "--gpu", "h200", "--no-weight-copies", "--json")
        rates.append(json.loads(run.stdout)["forms"][0]["tokens_per_second"]["256"])
    assert rates[1] > 1.5 * rates[0]


def test_devices_that_divide_a_model_read_all_of_its_contexts(octavo: Octavo) -> None:
    """Each of them reads its part of the heads, of as many tokens as one device would."""
    model, options = read_model_config(str(LLAMA_8B)), ("--gpu", "h200", "--no-weight-copies")
    for size in (1, 2):
        run = octavo("memory", LLAMA_8B, *options, "--json", "--tensor-parallel-size", size)
        rates = json.loads(run.stdout)["forms"][0]["tokens_per_second"]
        cost = CostModel(ModelSize.of(model, "bfloat16", num_gpus=size), find_gpu("h200"), size)
        step = StepShape(64, 64, 64, 64 * CONTEXT, 0, num_requests=64)
        assert rates["64"] == pytest.approx(64 / cost.compute_seconds(step))


def test_the_time_of_an_encoder_is_not_known(octavo: Octavo) -> None:
    t5 = ROOT / "benchmarks/configs/t5-3b"
    values = json.loads(octavo("memory", t5, "--gpu", "h200", "--json").stdout)
    assert [each["tokens_per_second"] for each in values["forms"]] == [None] * len(values["forms"])
    text = octavo("memory", t5, "--gpu", "h200").stdout
    assert re.search(r"^as stored .*( +not known){3}$", text, re.M)
