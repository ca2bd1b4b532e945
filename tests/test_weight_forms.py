"""What the option quantization="auto" stands for, and what is said of weights without kernels."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_zoo import model_directory, write_model
from octavo import LLM
from octavo.config import EngineConfig, make_config
from octavo.errors import ConfigError, OutOfMemory
from octavo.layers.config import LinearConfig, MLPConfig
from octavo.layers.linear import QuantizedLinear
from octavo.models.quantization import WeightKernels
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.cpu.int8 import Int8Linear, has_int8_product
from octavo.ops.cpu.int8_packed import PackedInt8Linear
from octavo.simulation.config import SimulationConfig
from octavo.weight_forms import Estimate, choose_quantization, describe_dequantized
from octavo.worker import worker
from octavo.worker.device.cpu import CpuDevice
from octavo.worker.device.cuda import CudaDevice

ROOT = Path(__file__).parents[1]
LLAMA_8B = ROOT / "benchmarks/configs/llama-3-8b"
SAMPLES = Path(__file__).parent / "models" / "quantized"
GIB = 1 << 30
needs_product = pytest.mark.skipif(not has_int8_product(), reason="no exact int8 product here")


@pytest.mark.parametrize(
    ("kernels", "gib", "ranks", "chosen"),
    [
        ("hopper", 72, 1, None),
        ("hopper", 20, 1, "fp8"),  # 64 sequences of 1,024 tokens take 8 GiB beside 15
        ("hopper", 14, 1, "int4"),
        ("hopper", 6.5, 1, "int4"),  # with little room
        ("hopper", 12, 2, None),  # two such devices
        ("hopper", 7, 2, "int4"),
        ("cpu", 20, 1, "int8"),
        ("cpu", 72, 1, None),
        ("none", 20, 1, None),
        ("ampere", 20, 1, None),
        ("ada", 20, 1, None),
    ],
)
def test_weights_are_rounded_only_where_they_leave_too_little_room(
    kernels: WeightKernels, gib: float, ranks: int, chosen: str | None
) -> None:
    config = make_config(LLAMA_8B, tensor_parallel_size=ranks)
    model = read_model_config(LLAMA_8B)
    choice = choose_quantization(config, model, "bfloat16", int(gib * GIB), kernels)
    assert choice.quantization == chosen
    assert "bfloat16 takes " in choice.reason
    assert "room for 64 is wanted" in choice.reason
    is_short = kernels in ("none", "ampere", "ada")  # which have no kernels for projections
    assert ("the device would dequantize other forms" in choice.reason) == is_short


@pytest.mark.parametrize(
    ("kernels", "chosen"), [("hopper", "fp8"), ("ada", "fp8"), ("ampere", "int4"), ("none", None)]
)
def test_experts_stay_quantized_on_more_gpus(kernels: WeightKernels, chosen: str | None) -> None:
    directory = ROOT / "benchmarks/configs/qwen3-30b-a3b"
    config, model = make_config(directory), read_model_config(directory)
    total = 62 * GIB  # 57 GiB of weights in bfloat16
    assert choose_quantization(config, model, "bfloat16", total, kernels).quantization == chosen
    rounded = quantized_on_load(model, "fp8")
    text = describe_dequantized(rounded, "bfloat16", kernels, "fp8")
    lost = {"hopper": None, "ada": "projections"}.get(kernels, "projections and experts")
    assert text is None if lost is None else f"fp8 {lost} are dequantized" in (text or "")


@pytest.mark.parametrize(
    ("method", "kept", "lost", "copied"),
    [
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {
                    f"model.layers.{i}.{name}": {"quant_algo": "NVFP4" if "mlp" in name else "FP8"}
                    for i in range(32)
                    for name in ("self_attn", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
                },
            },
            ["qkv", "output"],
            "modelopt projections (some of them) are dequantized to bfloat16",
            ["up", "down"],
        ),
        (
            {
                "quant_method": "fp8",
                "modules_to_not_convert": [f"model.layers.{i}.self_attn.v_proj" for i in range(32)],
            },
            ["output", "up", "down"],  # queries, keys and values are one product
            None,
            [],
        ),
        (
            {
                "quant_method": "awq",
                "bits": 4,
                "group_size": 128,
                "modules_to_not_convert": ["q_proj", "k_proj", "v_proj", "o_proj"],
            },
            ["up", "down"],
            None,
            ["up", "down"],
        ),
    ],
)
def test_weights_and_copies_are_counted_as_each_projection_is_stored(
    method: dict[str, Any], kept: list[str], lost: str | None, copied: list[str], tmp_path: Path
) -> None:
    fields = json.loads((LLAMA_8B / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"quantization_config": method}))
    model = read_model_config(tmp_path)
    layer = model.layers[0]
    sizes = {
        "qkv": layer.attention.qkv.num_parameters,
        "output": layer.attention.output.num_parameters,
        "up": 2 * 14336 * 4096,
        "down": 14336 * 4096,
    }
    of_weight = 2 - (4.0 + 32 / 128) / 8 if method["quant_method"] == "awq" else 1
    saved = model.weight_bytes(2) - model.kept_by("hopper").least_weight_bytes(2)
    assert saved == 32 * of_weight * sum(sizes[name] for name in kept)
    text = describe_dequantized(model, "bfloat16", "hopper")
    assert text is None if lost is None else lost in (text or "")
    have = [
        (each.in_features, each.out_features)
        for each in model.with_copies().copyable[5]
        if isinstance(each, LinearConfig) and each.copy_bytes
    ]
    shapes = {"qkv": (4096, 6144), "output": (4096, 4096)}
    shapes |= {"up": (4096, 28672), "down": (14336, 4096)}
    assert have == [shapes[name] for name in copied]


def test_nothing_is_rounded_where_that_frees_little() -> None:
    """The encoder's input takes what there is."""
    directory = ROOT / "benchmarks/configs/t5-3b"
    config = make_config(directory, max_num_seqs=1024, max_num_batched_tokens=8192)
    model = read_model_config(directory)
    choice = choose_quantization(config, model, "bfloat16", 118 * GIB, "hopper")
    assert choice.quantization is None
    assert "int4 takes" in choice.reason


def test_few_or_short_sequences_need_less_room() -> None:
    model = read_model_config(LLAMA_8B)

    def chosen(**options: object) -> str | None:
        config = make_config(LLAMA_8B, **options)
        return choose_quantization(config, model, "bfloat16", 18 * GIB, "hopper").quantization

    assert chosen() == "fp8"
    assert chosen(max_num_seqs=8) is None
    assert chosen(kv_cache_dtype="fp8", max_num_seqs=16) is None
    assert chosen(num_blocks=100) is None, "no form leaves more"


def test_a_model_that_fits_in_no_form_is_refused() -> None:
    config, model = make_config(LLAMA_8B), read_model_config(LLAMA_8B)
    with pytest.raises(OutOfMemory, match=r"of 4\.00 GiB, .*int4 takes 5\.\d\d GiB and does not f"):
        choose_quantization(config, model, "bfloat16", 4 * GIB, "hopper")
    long = make_config(LLAMA_8B, max_model_len=8192)
    with pytest.raises(OutOfMemory, match="one sequence of max_model_len=8192 needs 512 KV blocks"):
        choose_quantization(long, model, "bfloat16", int(6.5 * GIB), "hopper")


def test_weights_that_the_loader_does_not_quantize_stay() -> None:
    for directory, reason in [
        (SAMPLES / "awq", r"quantized already (awq)"),
        (model_directory("gpt2"), "weights of gpt2 are not quantized"),
    ]:
        config, model = make_config(directory), read_model_config(directory)
        choice = choose_quantization(config, model, "float32", GIB, "hopper")
        assert choice.quantization is None
        assert reason in choice.reason


def test_a_form_whose_groups_divide_no_inputs_is_left_out(tmp_path: Path) -> None:
    """Instead of an error after the weights were read."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12}
    directory = write_model("llama3", tmp_path, **sizes, intermediate_size=144)
    model = read_model_config(directory)
    config = make_config(directory, max_num_batched_tokens=16, max_num_seqs=4)
    for kernels, chosen in [("hopper", "fp8"), ("ampere", None)]:
        choice = choose_quantization(config, model, "bfloat16", 500 << 10, kernels)
        assert choice.quantization == chosen
        assert (
            "groups of 32 do not divide their inputs, such as the hidden size 48" in choice.reason
        )
    with pytest.raises(ConfigError, match="quantized to int4: groups of 32 do not divide"):
        quantized_on_load(model, "int4")
    divided = {"hidden_size": 64, "intermediate_size": 144}
    partly = read_model_config(write_model("llama3", tmp_path / "partly", **divided))
    rounded = quantized_on_load(partly, "int4")
    saved = partly.weight_bytes(2) - rounded.least_weight_bytes(2)
    projections = sum(
        each.attention.qkv.num_parameters
        + each.attention.output.num_parameters
        + each.mlp.up.num_parameters
        for each in partly.layers
        if isinstance(each.mlp, MLPConfig)
    )
    assert saved == int((2 - 0.5 - 2 / 64) * projections), "in groups of 64; down projections stay"


def test_groups_must_divide_the_slices_of_ranks(tmp_path: Path) -> None:
    """Of 96 intermediate elements each of two ranks has 48."""
    sizes = {"hidden_size": 48, "intermediate_size": 96}
    directory = write_model("llama3", tmp_path, **sizes)
    reason = (
        "none of the weights can be quantized to int4: groups of 32 do not divide their inputs, "
        "such as the hidden size 48, or 24 of an attention's output on each of 2 ranks"
    )
    model = read_model_config(directory)
    assert any(quantized_on_load(model, "int4").quantized_parts)
    with pytest.raises(ConfigError, match=reason) as caught:
        LLM(directory, quantization="int4", tensor_parallel_size=2, load_format="dummy")
    assert caught.value.field == "quantization"
    config = make_config(directory, tensor_parallel_size=2)
    choice = choose_quantization(config, model, "bfloat16", 500 << 10, "ampere")
    assert choice.quantization is None
    assert reason in choice.reason


class SmallNeighbour(SingleRank):
    """Rank 0 of two, of which the other has less memory."""

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([x, x // 4])


def test_ranks_take_what_suits_the_smallest_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    model = read_model_config(LLAMA_8B)
    config = make_config(LLAMA_8B, quantization="auto")
    device = CpuDevice()
    monkeypatch.setattr(device, "weight_kernels", lambda dtype: "hopper")
    monkeypatch.setattr(device, "total_memory", lambda config: 72 * GIB)
    found = [
        worker._with_chosen(config, model, torch.bfloat16, device, communicator)
        for communicator in (SingleRank(), SmallNeighbour())
    ]
    assert [each.quantization for each, _ in found] == [None, "fp8"]
    assert found[0][1] == model.with_copies()  # beside 34 GB of KV
    assert found[1][1] == quantized_on_load(model, "fp8").with_copies(3)  # of 32 layers


@needs_product
def test_an_engine_chooses_before_it_loads(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = model_directory("llama3")
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 2, "max_model_len": 32}
    options = {"quantization": "auto", "swap_space": 0, **sizes}
    with LLM(str(directory), **options) as llm:
        assert llm.engine.config.quantization is None
        budget = llm.engine.executor.capacity.budget
    estimate = Estimate.of(
        llm.engine.config, llm.engine.model_config, "float32", budget.total, "cpu"
    )
    blocks = 2 * estimate.shape.blocks_for(32, 1)  # one of which is the null block
    small = estimate.fixed.total + blocks * estimate.budget.block_bytes
    monkeypatch.setattr("octavo.worker.device.cpu.host_memory", lambda: small)
    with caplog.at_level(logging.INFO), LLM(str(directory), **options) as llm:
        assert llm.engine.config.quantization == "int8"
        assert llm.engine.model_config.quantization is not None
    assert "quantization auto on this CPU: int8, because float32 takes" in caplog.text
    assert "weights were quantized; relative errors" in caplog.text


@pytest.mark.slow
def test_two_ranks_report_what_was_chosen() -> None:
    directory = model_directory("llama3")
    with LLM(str(directory), quantization="auto", tensor_parallel_size=2, num_blocks=40) as llm:
        assert llm.engine.config.quantization is None


@pytest.mark.parametrize(
    ("capability", "dtype", "kernels"),
    [
        ((8, 0), torch.bfloat16, "ampere"),
        ((8, 9), torch.bfloat16, "ada"),
        ((9, 0), torch.bfloat16, "hopper"),
        ((9, 0), torch.float32, "none"),
        ((10, 0), torch.float16, "ada"),
    ],
)
def test_kernels_of_gpus(
    capability: tuple[int, int],
    dtype: torch.dtype,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert CudaDevice(torch.device("cpu")).weight_kernels(dtype) == kernels


@pytest.mark.parametrize("name", ["fp8_block", "awq", "bitsandbytes_nf4", "int8"])
def test_dequantized_weights_are_mentioned_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with LLM(str(SAMPLES / name), num_blocks=40) as llm:
        kinds = {
            type(each._kernel)
            for each in llm.engine.executor._worker.runner._model.modules()  # type: ignore[attr-defined]
            if isinstance(each, QuantizedLinear)
        }
    lines = [each for each in caplog.messages if "projections are dequantized" in each]
    assert len(lines) == kinds.isdisjoint({Int8Linear, PackedInt8Linear})
    for line in lines:
        assert line.startswith("on this CPU ")
        assert "no kernels for them there; they take " in line
        assert ("KiB instead of " in line) == (name != "bitsandbytes_nf4")


@needs_product
def test_int8_with_zero_points_is_dequantized_on_a_cpu(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As compressed-tensors stores it where weights are not symmetric."""
    shutil.copytree(SAMPLES / "int8", tmp_path, dirs_exist_ok=True)
    fields = json.loads((tmp_path / "config.json").read_text())
    [group] = fields["quantization_config"]["config_groups"].values()
    group["weights"]["symmetric"] = False
    (tmp_path / "config.json").write_text(json.dumps(fields))
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        zeros = torch.full(tensors[name].shape, 3, dtype=torch.int8)
        tensors[name.replace("weight_scale", "weight_zero_point")] = zeros
    save_file(tensors, tmp_path / "model.safetensors")
    with LLM(tmp_path, num_blocks=40):
        assert "on this CPU compressed-tensors projections are dequantized" in caplog.text
    plain, symmetric = (
        read_model_config(each).kept_by("cpu").least_weight_bytes(4)
        for each in (tmp_path, SAMPLES / "int8")
    )
    assert plain > 2 * symmetric


def test_a_simulation_chooses_as_the_engine_does() -> None:
    fits, small = (
        SimulationConfig(str(LLAMA_8B), "h200", quantization="auto", memory_share=share).prepare()
        for share in (0.95, 0.16)
    )
    assert fits.model.quantization is None
    assert small.model.quantization is not None
    assert small.model.quantization.form == "float8"
    plain = SimulationConfig(str(LLAMA_8B), "a100-40gb").prepare()
    rounded = SimulationConfig(str(LLAMA_8B), "a100-40gb", quantization="fp8").prepare()
    assert rounded.capacity.budget.weights == plain.capacity.budget.weights


def test_the_option_is_checked() -> None:
    assert EngineConfig("demo", quantization="auto").quantization == "auto"
    with pytest.raises(ConfigError, match="'none' is not one of auto, fp8, int8, int4"):
        replace(EngineConfig("demo"), quantization="none")  # type: ignore[arg-type]
