"""The option `quantization`: weights are quantized while they are loaded."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model_zoo import model_directory, write_model
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError, ModelError
from octavo.ops.cpu.int8 import has_int8_product
from octavo.ops.linear import make_linear_kernel
from octavo.ops.quantized import GroupedInt, QuantizedWeight, ScaledFloat8

SAMPLES = Path(__file__).parent / "quantized"
PROMPTS = [[5, 9, 2, 7], [11, 3] * 9]
GRANITES_EXPERTS = "model.layers.0.block_sparse_moe"  # of each projection, in one tensor


def form_of(name: str, weight: Tensor) -> QuantizedWeight:
    """What the option makes of a projection's weight."""
    size = weight.shape[1]
    if name == "fp8":
        return ScaledFloat8.quantize(weight, (1, size))
    if name == "int8":
        return GroupedInt.quantize(weight, 8, size)
    return GroupedInt.quantize(weight, 4, 64 if size == 192 else 128)


def test_little_is_in_float32_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A few outputs at a time, which changes no value; and freed memory is returned on the way."""
    sizes = {"hidden_size": 128, "intermediate_size": 192}
    directory = write_model("llama3", tmp_path, **sizes)

    def tokens_and_errors(name: str) -> tuple[list[list[int]], list[str]]:
        caplog.clear()
        loader = "octavo.models.loader"
        with caplog.at_level(logging.DEBUG, logger=loader):
            tokens = generated(directory, quantization=name)
        return tokens, [each.getMessage() for each in caplog.records if each.name == loader]

    expected = [tokens_and_errors(name) for name in ("fp8", "int8", "int4")]
    returned: list[None] = []
    monkeypatch.setattr("octavo.ops.quantized.CHUNK_ELEMENTS", 3 * 128)
    monkeypatch.setattr("octavo.models.loader.PASSED_ELEMENTS", 2 * 128 * 192)
    monkeypatch.setattr("octavo.models.loader.return_freed_memory", lambda: returned.append(None))
    assert [tokens_and_errors(name) for name in ("fp8", "int8", "int4")] == expected
    assert len(returned) > 3 * 7


def generated(directory: Path, **options: object) -> list[list[int]]:
    with LLM(str(directory), dtype="float32", num_blocks=60, **options) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=20, temperature=0), use_tqdm=0)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("name", ["fp8", "int8", "int4"])
def test_tokens_are_those_of_the_rounded_weights(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged projections too, and groups that must be smaller than 128 inputs."""
    sizes = {"hidden_size": 128, "intermediate_size": 192, "tie_word_embeddings": False}
    directory = write_model("llama3", tmp_path / "dense", **sizes)
    rounded = write_model("llama3", tmp_path / "rounded", **sizes)
    tensors = load_file(rounded / "model.safetensors")
    projections = [key for key in tensors if key.endswith("proj.weight")]
    for key in projections:
        tensors[key] = form_of(name, tensors[key].float()).dequantize()
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})

    # Inputs stay as they are; what rounding them changes is tested with the kernels that do.
    monkeypatch.setattr("octavo.layers.linear.make_quantized_kernel", lambda *args, **options: None)
    monkeypatch.setattr("octavo.layers.linear.make_rounding_kernel", make_linear_kernel)
    expected = generated(rounded)
    with caplog.at_level(logging.INFO, logger="octavo.models.loader"):
        assert generated(directory, quantization=name) == expected
    assert f"{len(projections)} weights were quantized; relative errors: median" in caplog.text
    before = [load_file(directory / "model.safetensors")[key].float() for key in projections]
    after = [load_file(rounded / "model.safetensors")[key].float() for key in projections]
    errors = []
    for layer in range(3):
        pairs = [
            pair
            for key, *pair in zip(projections, before, after, strict=True)
            if f"layers.{layer}." in key
        ]
        lost, size = (
            sum(float(x.square().sum()) for x in each)
            for each in ([b - a for b, a in pairs], [b for b, _ in pairs])
        )
        errors.append(f"{100 * (lost / size) ** 0.5:.2f}")
    assert f"relative errors of the layers, in %: {', '.join(errors)}\n" in caplog.text
    assert generated(directory) != expected, "the samples cannot tell"


@pytest.mark.parametrize(("family", "name"), [("mixtral", "int4"), ("gpt_oss", "fp8")])
def test_experts_are_rounded_as_projections_are(family: str, name: str, tmp_path: Path) -> None:
    """In a tensor each, and all in one that has inputs before outputs."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    directory = write_model(family, tmp_path / "dense", **sizes)
    rounded = write_model(family, tmp_path / "rounded", **sizes)
    tensors = load_file(rounded / "model.safetensors")
    for key, tensor in tensors.items():
        if key.endswith("gate.weight") or not ("proj" in key or "expert" in key):
            continue
        if tensor.dim() == 3:
            forms = [form_of(name, each.mT.float()) for each in tensor]
            tensors[key] = torch.stack([each.dequantize().mT for each in forms])
        elif tensor.dim() == 2 and key.endswith(".weight"):
            tensors[key] = rounded_weight(name, tensor)
    save_file(tensors, rounded / "model.safetensors", {"format": "pt"})
    expected = generated(rounded)
    assert generated(directory, quantization=name) == expected
    assert generated(directory) != expected, "the samples cannot tell"


def rounded_weight(name: str, weight: Tensor) -> Tensor:
    size = weight.shape[1]
    form = (
        form_of(name, weight) if name != "int4" else GroupedInt.quantize(weight, 4, min(size, 128))
    )
    return form.dequantize()


def test_what_cannot_be_quantized_is_refused(tmp_path: Path) -> None:
    for directory, options, message in [
        (SAMPLES / "awq", {"quantization": "fp8"}, r"awq: the weights are quantized already \(awq"),
        (model_directory("gpt2"), {"quantization": "int4"}, "weights of gpt2 are not quantized"),
        (
            model_directory("llama3"),
            {"quantization": "fp4"},
            "'fp4' is not one of auto, fp8, int8, int4",
        ),
        (model_directory("llama3"), {"quantization": 8}, "8 is not one of auto, fp8, int8, int4"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            LLM(str(directory), **options)
        assert caught.value.field == "quantization"


def test_weights_that_cannot_be_quantized_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of 32 divide 64 inputs, and not 80; nor 48."""
    some = write_model("llama3", tmp_path / "some", hidden_size=64, intermediate_size=80)
    with LLM(str(some), quantization="int4", num_blocks=8):
        assert "3 weights are not quantized: layers.0.mlp.down_proj.weight, " in caplog.text
    none = write_model("llama3", tmp_path / "none", hidden_size=48, intermediate_size=80)
    message = "none of the weights can be quantized to int4: groups of 32 do not divide .* size 48"
    with pytest.raises(ConfigError, match=message):
        LLM(str(none), quantization="int4", num_blocks=8)


@pytest.mark.parametrize(
    ("family", "tensor", "name", "value"),
    [
        ("llama3", "model.layers.1.mlp.up_proj.weight", "fp8", torch.nan),
        ("llama3", "model.layers.1.mlp.up_proj.weight", "int8", torch.inf),
        ("llama3", "model.layers.1.mlp.up_proj.weight", "int4", -torch.inf),
        ("llama3", "model.embed_tokens.weight", "fp8", torch.nan),
        ("llama3", "model.norm.weight", "fp8", torch.nan),
        ("olmoe", "lm_head.weight", "int8", torch.nan),
        ("olmoe", "model.layers.0.mlp.gate.weight", "fp8", torch.inf),
        ("granitemoe", f"{GRANITES_EXPERTS}.input_linear.weight", "int4", torch.nan),
        ("granitemoe", f"{GRANITES_EXPERTS}.output_linear.weight", "int4", torch.nan),
    ],
)
def test_weights_that_are_not_finite_are_refused(
    family: str, tensor: str, name: str, value: float, tmp_path: Path
) -> None:
    """Those that stay as they are, too; the error names the file, the tensor and the value."""
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    if family == "granitemoe":
        # Groups of int4 divide the inputs of attention's output, and not of gates and ups.
        sizes |= {"hidden_size": 48, "head_dim": 16}
    directory = write_model(family, tmp_path, **sizes)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors[tensor].view(-1)[-1] = value
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError) as caught:
        LLM(str(directory), quantization=name, num_blocks=8)
    assert f"{file}: {tensor} has {value:g} as torch." in str(caught.value)


@pytest.mark.skipif(not has_int8_product(), reason="no exact int8 product here")
def test_int8_on_a_cpu_rounds_inputs_and_serves_them_alike() -> None:
    """Neither the batch, chunks of prompts, preemption nor cached prefixes change tokens."""
    generator = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(3, 250, (size,), generator=generator).tolist() for size in (5, 70, 33, 90, 64)
    ]
    prompts.append([*prompts[1], 9, 8])
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)

    def tokens(one_by_one: bool = False, **options: object) -> list[list[int]]:
        directory = str(model_directory("llama3"))
        common: dict[str, object] = {"dtype": "float32", "block_size": 16, "num_blocks": 200}
        with LLM(directory, **(common | {"quantization": "int8"} | options)) as llm:
            batches = [[each] for each in prompts] if one_by_one else [prompts]
            outputs = [
                output for batch in batches for output in llm.generate(batch, params, use_tqdm=0)
            ]
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = tokens(one_by_one=True, enable_prefix_caching=False)
    variants: list[dict[str, object]] = [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 16},
        {"num_blocks": 20, "swap_space": 0},  # too few for all
        {"one_by_one": True, "enable_prefix_caching": True},
    ]
    for options in variants:
        assert tokens(**options) == expected, options  # type: ignore[arg-type]
    assert tokens(quantization=None) != expected, "the samples cannot tell"
