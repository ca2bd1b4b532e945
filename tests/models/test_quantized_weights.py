"""Checkpoints that real quantizers wrote (quantized/write_samples.py), and faulty ones."""

from __future__ import annotations

import json
import math
import re
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from model_zoo import model_directory, write_model
from octavo import LLM, SamplingParams
from octavo.errors import ModelError
from octavo.json_fields import Fields
from octavo.layers.base import WeightSlot
from octavo.layers.config import ExpertsConfig
from octavo.layers.experts import QuantizedExperts
from octavo.layers.linear import QuantizedLinear, warn_once
from octavo.models.dequantize import _grouped, _unpacked
from octavo.models.loader import build_model, load_weights, weight_targets
from octavo.models.quantization import Quantization
from octavo.models.quantization_config import read_quantization
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.quantized import GroupedInt, MxFloat4, ScaledFloat8
from octavo.parallel import Shard
from octavo.routing import RoutingConfig

SAMPLES = Path(__file__).parent / "quantized"
NAMES = sorted(path.name for path in SAMPLES.iterdir() if (path / "config.json").exists())
PROJECTIONS = 7
CPU = torch.device("cpu")
Change = Callable[[dict[str, Tensor]], object]
K_PROJ = "model.layers.0.self_attn.k_proj."


class OneOf(SingleRank):
    """A rank that needs no others."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard


def slots(directory: Path, shard: Shard | None = None) -> dict[str, WeightSlot]:
    """Where the projections' weights go, by the checkpoint's names, once they are loaded; one
    rank's slices."""
    shard = shard or Shard(0, 1)
    config = read_model_config(directory).sharded(shard)
    model = build_model(config, torch.float32, CPU, OneOf(shard))
    load_weights(model, config)
    found = {}
    for name, target in weight_targets(model, config).items():
        if name.endswith("proj.weight"):
            (part,) = target.slices
            assert isinstance(part.target, WeightSlot)
            found[name] = part.target
    return found


def loaded(directory: Path, shard: Shard | None = None) -> dict[str, Tensor]:
    """The projections' weights in float32, by the checkpoint's names; one rank's slices."""
    return {name: slot.dense() for name, slot in slots(directory, shard).items()}


def probe(size: int) -> Tensor:
    """As in write_samples.py."""
    return torch.randn(size, generator=torch.Generator().manual_seed(size))


def changed(
    directory: Path, name: str, change: Change | None = None, config: dict[str, Any] | None = None
) -> Path:
    """A copy of a sample with other tensors, or other fields in its quantization_config."""
    shutil.copytree(SAMPLES / name, directory, dirs_exist_ok=True)
    if change is not None:
        tensors = load_file(directory / "model.safetensors")
        change(tensors)
        save_file(tensors, directory / "model.safetensors")
    if config is not None:
        fields = json.loads((directory / "config.json").read_text())
        fields["quantization_config"] |= config
        (directory / "config.json").write_text(json.dumps(fields))
    return directory


def with_method(
    directory: Path, name: str, method: dict[str, Any], change: Change | None = None
) -> Path:
    """A copy of a sample whose config.json has another quantization_config."""
    fields = json.loads((changed(directory, name, change) / "config.json").read_text())
    fields["quantization_config"] = method
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_quantizer(name: str) -> None:
    expected = load_file(SAMPLES / name / "expected.safetensors")
    weights = loaded(SAMPLES / name)
    assert len(expected) == len(weights) == PROJECTIONS
    for key, product in expected.items():
        weight = weights[key.removeprefix("model.")]
        ours = weight @ probe(weight.shape[1])
        rounded = weight.to(torch.bfloat16).float() @ probe(weight.shape[1])
        # Some quantizers round the dequantized weights to 16 bits.
        error = min((ours - product).abs().max(), (rounded - product).abs().max())
        assert error <= 2e-3 * product.abs().max(), (key, error)


@pytest.mark.parametrize("name", NAMES)
def test_weights_stay_quantized(name: str) -> None:
    kinds = {type(slot.content) for slot in slots(SAMPLES / name).values()}
    if name in ("bitsandbytes_nf4", "bitsandbytes_fp4", "nvfp4", "modelopt_nvfp4"):
        expected: type = Tensor
    elif name == "mxfp4":
        expected = MxFloat4
    else:
        is_float = name == "torchao" or "fp8" in name
        expected = ScaledFloat8 if is_float else GroupedInt
    assert kinds == {expected}


@pytest.mark.parametrize(
    "name", ["awq", "gptq", "packed_int4_asymmetric", "packed_int8", "torchao_int4"]
)
def test_zero_points_of_groups_are_counted(name: str, tmp_path: Path) -> None:
    directory = changed(tmp_path / "sample", name)
    if name == "torchao_int4":  # whose values have a byte each, made asymmetric
        tensors = load_file(directory / "model.safetensors")
        for key in [key for key in tensors if key.endswith("zero_point")]:
            tensors[key] = torch.ones_like(tensors[key])
        save_file(tensors, directory / "model.safetensors")
        config = directory / "config.json"
        config.write_text(config.read_text().replace('"SYMMETRIC"', '"ASYMMETRIC"'))
    forms = [slot.content for slot in slots(directory).values()]
    taken = weights = 0
    for form in forms:
        assert isinstance(form, GroupedInt)
        zeros = 0 if form.zeros is None else form.zeros.nbytes
        taken += form.packed.nbytes + form.scales.nbytes + zeros
        weights += math.prod(form.shape)
    quantization = read_model_config(directory).quantization
    assert quantization is not None
    counted = quantization.weight_bytes()
    assert counted == pytest.approx(taken / weights)
    if name == "gptq":
        directory = changed(tmp_path, name, config={"sym": False})
        quantization = read_model_config(directory).quantization
        assert quantization is not None
        assert quantization.weight_bytes() == counted + 2 / 32


def test_static_scales_of_inputs_are_not_read(tmp_path: Path) -> None:
    """By either name; inputs are rounded with scales of their own."""

    def add(tensors: dict[str, Tensor]) -> None:
        for name in ("input_scale", "activation_scale"):
            tensors[f"{K_PROJ}{name}"] = torch.tensor(0.01)

    directory = changed(tmp_path, "fp8_transformers", add, {"activation_scheme": "static"})
    for key, weight in loaded(SAMPLES / "fp8_transformers").items():
        assert torch.equal(loaded(directory)[key], weight)


def test_fbgemm_fp8_has_a_scale_for_each_output(tmp_path: Path) -> None:
    """As transformers' FbgemmFp8Config writes the same values: with scales in float32."""

    def widen(tensors: dict[str, Tensor]) -> None:
        tensors |= {name: each.float() for name, each in tensors.items() if "scale" in name}

    method = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    method["modules_to_not_convert"] = ["lm_head"]
    directory = with_method(tmp_path, "fp8_channel", method, widen)
    for key, weight in loaded(SAMPLES / "fp8_channel").items():
        assert torch.equal(loaded(directory)[key], weight)
    quantization = read_model_config(directory).quantization
    assert quantization == read_quantization(Fields("config.json", method))
    assert quantization is not None
    assert quantization.kept_by("hopper") == (True, True)
    with_method(tmp_path, "fp8_channel", method | {"activation_scale_ub": "1200"})
    with pytest.raises(ModelError, match="activation_scale_ub is '1200'; it must be a positive"):
        read_model_config(tmp_path)
    with_method(tmp_path, "fp8_tensor", method)
    with pytest.raises(ModelError, match=r"weight_scale has shape .* outputs: one per output"):
        loaded(tmp_path)


MODELOPT_SAMPLES = [name for name in NAMES if name.startswith("modelopt")]


def modelopt_file(directory: Path, **fields: Any) -> Path:
    """Of a sample's copy, the quantization that its hf_quant_config.json has, with other fields,
    in that file alone, as older versions of ModelOpt write it."""
    path = directory / "hf_quant_config.json"
    written = json.loads(path.read_text())
    written["quantization"] |= fields
    path.write_text(json.dumps(written))
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config", None)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", MODELOPT_SAMPLES)
def test_modelopt_may_describe_weights_in_a_file_of_its_own(name: str, tmp_path: Path) -> None:
    """Or in an object of its own in config.json."""
    written = json.loads((SAMPLES / name / "hf_quant_config.json").read_text())
    alone = modelopt_file(changed(tmp_path / "alone", name))
    nested = with_method(tmp_path / "nested", name, written | {"quant_method": "modelopt"})
    usual = read_model_config(SAMPLES / name).quantization
    for directory in (alone, nested):
        found = read_model_config(directory).quantization
        assert found is not None
        assert found == replace(usual, ignored=found.ignored)
        weights = loaded(directory)
        assert all(torch.equal(weights[key], each) for key, each in loaded(SAMPLES / name).items())
    modelopt_file(alone, exclude_modules=["lm_head", "model.*.self_attn.k*"])
    with pytest.raises(ModelError, match=r"config\.json says that \S+k_proj is not quantized"):
        loaded(alone)


def test_both_files_of_modelopt_say_the_same(tmp_path: Path) -> None:
    changed(tmp_path, "modelopt_fp8", config={"quant_algo": "NVFP4"})
    message = r"quantization_config: quant_algo is 'NVFP4'; but \S+hf_quant_config.* has 'FP8'"
    with pytest.raises(ModelError, match=message):
        read_model_config(tmp_path)
    (tmp_path / "hf_quant_config.json").write_text("[")
    with pytest.raises(ModelError, match=r"hf_quant_config\.json cannot be read"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'; octavo reads FP8, .*MIXED_PREC"),
        ({"quant_algo": ["FP8"]}, r"quant_algo is \['FP8'\]; octavo reads FP8"),
        (
            {"quant_algo": None, "kv_cache_quant_algo": None},
            " has no quant_algo",
        ),
        ({"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; it must be a list of str"),
        ({"quant_algo": "MIXED_PRECISION"}, " has no quantized_layers"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {}},
            r"quantized_layers is \{\}; there must be one or more",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "MXFP8"}}},
            "quantized_layers: a: quant_algo is 'MXFP8'; octavo reads FP8",
        ),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size is 32; octavo reads 16"),
        ({"quant_algo": "NVFP4", "group_size": "16"}, "group_size is '16'; octavo reads 16"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": "FP8"}},
            "quantized_layers: a is 'FP8'; it must be a JSON object",
        ),
    ],
)
def test_what_is_not_read_of_modelopt_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = modelopt_file(changed(tmp_path, "modelopt_fp8"), **fields)
    with pytest.raises(ModelError, match=rf"hf_quant_config\.json: .*{message}"):
        read_model_config(directory)


def test_modules_of_modelopt_differ(tmp_path: Path) -> None:
    """A module is named, or one that it is in, such as all experts of a layer."""
    other = load_file(SAMPLES / "modelopt_nvfp4" / "model.safetensors")
    down = "model.layers.0.mlp.down_proj"
    layers = {"model.layers.0.self_attn": "FP8", f"model.{GATE}": "FP8", down: "FP8"}
    layers |= {f"model.{UP}": "NVFP4"}
    directory = changed(
        tmp_path, "modelopt_fp8", lambda tensors: replace_module(tensors, other, f"model.{UP}.")
    )
    quantized = {name: {"quant_algo": algorithm} for name, algorithm in layers.items()}
    modelopt_file(directory, quant_algo="MIXED_PRECISION", quantized_layers=quantized)
    found = loaded(directory)
    for name, sample in {GATE: "modelopt_fp8", UP: "modelopt_nvfp4"}.items():
        assert torch.equal(found[f"{name}.weight"], loaded(SAMPLES / sample)[f"{name}.weight"])
    del quantized[down]
    modelopt_file(directory, quantized_layers=quantized)
    with pytest.raises(ModelError, match=rf"no group of modules in .* has {down}"):
        loaded(directory)


def test_merged_projections_of_different_forms_are_dequantized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def leave_out(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{K_PROJ}weight_scale"]
        tensors[f"{K_PROJ}weight"] = tensors[f"{K_PROJ}weight"].float()

    directory = changed(tmp_path, "fp8_channel", leave_out)
    config = read_model_config(directory)
    method = QuantizedLinear(config.layers[0].attention.qkv)
    names = [f"layers.0.self_attn.{each}_proj" for each in "qkv"]
    parts = [slots(directory)[f"{name}.weight"] for name in names]
    assert [type(each.content) for each in parts] == [ScaledFloat8, Tensor, ScaledFloat8]
    expected = torch.cat([each.dense() for each in parts])
    method._slots = parts
    warn_once.cache_clear()
    method.finalize()
    assert "merged projections are dequantized: some of them are not quantized" in caplog.text
    assert torch.allclose(method.forward(torch.eye(128)).t(), expected)


@pytest.mark.parametrize("name", ["fp8_block", "packed_int4_asymmetric", "awq", "gptq"])
def test_ranks_read_their_slices(name: str) -> None:
    whole = loaded(SAMPLES / name)
    parts = [loaded(SAMPLES / name, Shard(rank, 2)) for rank in range(2)]
    for key, weight in whole.items():
        dim = 1 if key.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat([part[key] for part in parts], dim), weight)


@pytest.mark.parametrize("name", ["fp8_channel", "awq", "bitsandbytes_nf4"])
def test_a_quantized_model_generates_what_the_dequantized_one_does(
    name: str, tmp_path: Path
) -> None:
    dense = changed(tmp_path, name)
    fields = json.loads((dense / "config.json").read_text())
    del fields["quantization_config"]
    (dense / "config.json").write_text(json.dumps(fields))
    tensors = load_file(dense / "model.safetensors")
    kept = {key: tensor for key, tensor in tensors.items() if "proj" not in key}
    weights = {
        f"model.{key}": weight.contiguous() for key, weight in loaded(SAMPLES / name).items()
    }
    save_file(kept | weights, dense / "model.safetensors")
    outputs = []
    for directory in (SAMPLES / name, dense):
        with LLM(directory, num_blocks=40, dtype="float32") as llm:
            params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
            [output] = llm.generate([5, 7, 11, 13], params, use_tqdm=False)
        outputs.append(output.outputs[0].token_ids)
    assert outputs[0] == outputs[1]


def test_a_quantized_head_does_not_share_the_table_of_the_embedding(tmp_path: Path) -> None:
    """Although config.json says so, of the model before it was quantized."""

    def add_head(tensors: dict[str, Tensor]) -> None:
        table = tensors["model.embed_tokens.weight"].float()
        scales = table.abs().amax(1, keepdim=True) / 448
        tensors["lm_head.weight"] = (-table / scales).to(torch.float8_e4m3fn)
        tensors["lm_head.weight_scale"] = scales

    directory = changed(tmp_path, "fp8_channel", add_head, {"ignore": []})
    config = read_model_config(directory)
    model = build_model(config, torch.float32, CPU, SingleRank())
    load_weights(model, config)
    (head,) = weight_targets(model, config)["lm_head.weight"].slices
    assert isinstance(head.target, WeightSlot)
    torch.testing.assert_close(head.target.dense(), -model.token_table, rtol=0.07, atol=1e-3)
    assert read_model_config(SAMPLES / "fp8_channel").tied_embeddings


def test_inputs_of_a_group_may_stand_anywhere(tmp_path: Path) -> None:
    def shuffle(tensors: dict[str, Tensor]) -> None:
        tensors[f"{K_PROJ}g_idx"] = tensors[f"{K_PROJ}g_idx"].flip(0)

    weight = loaded(SAMPLES / "gptq")["layers.0.self_attn.k_proj.weight"]
    shuffled = loaded(changed(tmp_path, "gptq", shuffle))["layers.0.self_attn.k_proj.weight"]
    tensors = load_file(SAMPLES / "gptq" / "model.safetensors")
    scales = tensors[f"{K_PROJ}scales"].float()[tensors[f"{K_PROJ}g_idx"].long()].t()
    assert torch.allclose(shuffled / scales.flip(1), weight / scales, atol=1e-4)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_inputs_of_any_number_of_bits_may_stand_anywhere(bits: int) -> None:
    generator = torch.Generator().manual_seed(bits)
    values = torch.randint(1 << bits, (3, 8), generator=generator, dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    groups = torch.tensor([0, 1, 1, 0, 1, 0, 0, 1], dtype=torch.int32)
    names, quantization = ("scales", "qzeros", "g_idx"), Quantization("gptq", num_bits=bits)
    found = _grouped(values, scales, None, quantization, groups, names)
    weight = found.dequantize() if isinstance(found, GroupedInt) else found
    assert torch.equal(weight, (values.float() - (1 << (bits - 1))) * scales[:, groups.long()])


def test_scales_of_inputs_are_left_out(tmp_path: Path) -> None:
    """As transformers' fp8 writes those of one number for all inputs: without dimensions."""

    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{K_PROJ}weight_scale_inv"
        tensors |= {name: tensors[name].view(()), f"{K_PROJ}activation_scale": torch.tensor(0.1)}

    config = {"activation_scheme": "static"}
    directory = changed(tmp_path, "fp8_transformers", change, config)
    name = "layers.0.self_attn.k_proj.weight"
    assert torch.equal(loaded(directory)[name], loaded(SAMPLES / "fp8_transformers")[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bytes_of_bitsandbytes_may_be_of_another_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        name = f"{K_PROJ}weight"
        tensors[name] = tensors[name].flatten().view(dtype).unsqueeze(1)

    found = loaded(changed(tmp_path, "bitsandbytes_nf4", change))
    name = "layers.0.self_attn.k_proj.weight"
    assert torch.equal(found[name], loaded(SAMPLES / "bitsandbytes_nf4")[name])


GATE, UP = (f"layers.0.mlp.{each}_proj" for each in ("gate", "up"))


def test_a_block_of_bitsandbytes_may_be_longer_than_the_weight(tmp_path: Path) -> None:
    """However long it is said to be."""
    state = b'{"shape": [64, 128], "blocksize": 1099511627776}'

    def change(tensors: dict[str, Tensor]) -> None:
        for name in ("absmax", "nested_absmax", "nested_quant_map"):
            del tensors[f"{K_PROJ}weight.{name}"]
        tensors[f"{K_PROJ}weight.absmax"] = torch.tensor([0.5])
        name = f"{K_PROJ}weight.quant_state.bitsandbytes__nf4"
        tensors[name] = torch.tensor(list(state), dtype=torch.uint8)

    directory = changed(tmp_path, "bitsandbytes_nf4", change)
    stored = load_file(directory / "model.safetensors")
    packed, table = stored[f"{K_PROJ}weight"].flatten(), stored[f"{K_PROJ}weight.quant_map"]
    indices = torch.stack((packed >> 4, packed & 15), dim=1).long()
    weight = loaded(directory)["layers.0.self_attn.k_proj.weight"]
    assert torch.equal(weight, (table[indices] * 0.5).view(64, 128))


def weights_of(bits: int, group: int | None) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "group_size": group, "symmetric": True}


def test_groups_of_config_groups_differ(tmp_path: Path) -> None:
    """Gates of 4 bits beside ups of 8, packed, in groups of 32 and of all inputs; and int8."""
    other, int8 = load_file(SAMPLES / "packed_int8" / "model.safetensors"), SAMPLES / "int8"

    def mix(tensors: dict[str, Tensor]) -> None:
        replace_module(tensors, other, f"model.{UP}.")
        replace_module(tensors, load_file(int8 / "model.safetensors"), K_PROJ)

    eight = json.loads((SAMPLES / "packed_int8" / "config.json").read_text())
    [group] = eight["quantization_config"]["config_groups"].values()
    fields = json.loads((SAMPLES / "packed_int4" / "config.json").read_text())
    [usual] = fields["quantization_config"]["config_groups"].values()
    groups = {
        "a": usual | {"targets": ["Linear"]},
        "b": group | {"targets": ["re:.*up_proj$"]},
        "c": {
            "targets": [K_PROJ[:-1]],
            "format": "int-quantized",
            "weights": weights_of(8, None),
        },
    }
    directory = changed(tmp_path, "packed_int4", mix, {"config_groups": groups})
    found = loaded(directory)
    for name, sample in {GATE: "packed_int4", UP: "packed_int8", K_PROJ[6:-1]: "int8"}.items():
        assert torch.equal(found[f"{name}.weight"], loaded(SAMPLES / sample)[f"{name}.weight"])
    with LLM(str(directory), dtype="float32", num_blocks=8) as llm:
        assert len(llm.generate([[5, 9]], use_tqdm=False)[0].outputs[0].token_ids) > 0
    lacking = changed(
        tmp_path, "packed_int4", mix, {"config_groups": {"b": groups["b"]} | {"c": groups["c"]}}
    )
    with pytest.raises(ModelError, match=r"no group of modules in config\.json has .*down_proj"):
        loaded(lacking)


def test_modules_of_gptq_differ(tmp_path: Path) -> None:
    other = load_file(SAMPLES / "gptq_int8" / "model.safetensors")
    directory = changed(
        tmp_path,
        "gptq",
        lambda tensors: replace_module(tensors, other, f"model.{UP}."),
        {"dynamic": {"-:.*gate_proj": {}, "+:.*up_proj": {"bits": 8}, ".*_proj": {"bits": 4}}},
    )
    found = loaded(directory)
    for name, sample in {GATE: "gptq", UP: "gptq_int8"}.items():
        assert torch.equal(found[f"{name}.weight"], loaded(SAMPLES / sample)[f"{name}.weight"])


@pytest.mark.parametrize(
    ("sample", "config"),
    [
        ("awq", {"packing_format": "auto_round:auto_awq", "sym": False}),
        ("gptq", {"packing_format": "auto_round:gptq"}),
        ("gptq", {"packing_format": None}),
    ],
)
def test_auto_round_has_the_formats_of_others(
    sample: str, config: dict[str, Any], tmp_path: Path
) -> None:
    directory = changed(tmp_path, sample, config={"quant_method": "auto-round", **config})
    found, expected = loaded(directory), loaded(SAMPLES / sample)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_modules_that_auto_round_leaves_alone(tmp_path: Path) -> None:
    """A name is one module's; what cannot be a name is a regular expression."""
    down, gate = "model.layers.0.mlp.down_proj", "model.layers.0.mlp.gate"
    config = {"extra_config": {down: {"bits": 16}, ".*k_proj.*": {"bits": 16}, gate: {"bits": 8}}}

    def leave_alone(tensors: dict[str, Tensor]) -> None:
        for module in (f"{down}.", K_PROJ):
            whole = loaded(SAMPLES / "auto_round")[f"{module.removeprefix('model.')}weight"]
            replace_module(tensors, {f"{module}weight": whole}, module)

    found = loaded(changed(tmp_path, "auto_round", leave_alone, config))
    expected = loaded(SAMPLES / "auto_round")
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_words_of_few_outputs_and_inputs() -> None:
    """Zero points of up to eight outputs, and weights of as many inputs, are one row of words."""
    values = torch.arange(8, dtype=torch.uint8)
    word = torch.tensor([0x76543210], dtype=torch.int32)
    for packed in (word.view(1, 1).expand(1, 3).t(), word.repeat(1, 3).t(), word.repeat(3, 1)):
        assert torch.equal(_unpacked(packed, 4), values.expand(3, 8))


@pytest.mark.parametrize("name", ["gptq", "gptq_int8"])
def test_zero_points_of_gptq_may_be_zero(name: str, tmp_path: Path) -> None:
    """Version 1 has what its words were before 1 was taken off each of their zero points."""
    bits = 8 if name.endswith("8") else 4
    shape = load_file(SAMPLES / name / "model.safetensors")[f"{K_PROJ}qzeros"].shape
    generator = torch.Generator().manual_seed(1)
    octets = torch.randint(256, (*shape[:-1], shape[-1] * 4), generator=generator)
    octets[0] = 0
    new = octets.to(torch.uint8).view(torch.int32)
    ones = 0x01010101 if bits == 8 else 0x11111111
    old = (new.long() - ones).to(torch.int32)
    found = [
        loaded(changed(tmp_path / version, name, replaced("qzeros", zeros), config))
        for version, zeros, config in [
            ("1", old, {"checkpoint_format": "gptq"}),
            ("2", new, {"checkpoint_format": "gptq_v2"}),
        ]
    ]
    key = "layers.0.self_attn.k_proj.weight"
    assert torch.equal(found[0][key], found[1][key])


def replace_module(tensors: dict[str, Tensor], other: dict[str, Tensor], module: str) -> None:
    """Put a module of another checkpoint into this one's place."""
    for name in [name for name in tensors if name.startswith(module)]:
        del tensors[name]
    tensors |= {name: each for name, each in other.items() if name.startswith(module)}


def test_int8_in_groups_of_inputs(tmp_path: Path) -> None:
    """As compressed-tensors stores 4 bits whose inputs are rounded."""
    scales = torch.rand(64, 4) + 0.1
    zeros = torch.randint(-8, 8, (64, 4), dtype=torch.int8)

    def change(tensors: dict[str, Tensor]) -> None:
        tensors |= {f"{K_PROJ}weight_scale": scales, f"{K_PROJ}weight_zero_point": zeros}

    directory = changed(tmp_path, "int8", change)
    weight = load_file(SAMPLES / "int8" / "model.safetensors")[f"{K_PROJ}weight"].float()
    expected = (weight - zeros.repeat_interleave(32, 1)) * scales.repeat_interleave(32, 1)
    assert torch.equal(loaded(directory)["layers.0.self_attn.k_proj.weight"], expected)

    def shuffle(tensors: dict[str, Tensor]) -> None:
        change(tensors)
        tensors[f"{K_PROJ}weight_g_idx"] = groups.int()

    groups = torch.arange(128) % 4
    expected = (weight - zeros[:, groups]) * scales[:, groups]
    found = loaded(changed(tmp_path, "int8", shuffle))["layers.0.self_attn.k_proj.weight"]
    assert torch.equal(found, expected)


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{K_PROJ}bias"] = torch.zeros(64)

    assert len(loaded(changed(tmp_path / "zero", "gptq", add))) == PROJECTIONS
    with pytest.raises(
        ModelError, match=r"does not have: model\.layers\.0\.self_attn\.k_proj\.bias"
    ):
        loaded(
            changed(tmp_path / "one", "gptq", lambda t: t.update({f"{K_PROJ}bias": torch.ones(64)}))
        )


def removed(name: str) -> Change:
    return lambda tensors: tensors.pop(K_PROJ + name)


def with_byte(byte: int, row: int, column: int) -> Tensor:
    """A weight in e4m3 with this byte there, and the largest numbers, 0x7E and 0xFE, elsewhere."""
    stored = torch.tensor([0x7E, 0xFE], dtype=torch.uint8).repeat(64, 64)
    stored[row, column] = byte
    return stored.view(torch.float8_e4m3fn)


def replaced(name: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({K_PROJ + name: tensor})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "fp8_channel",
            removed("weight_scale"),
            r"k_proj\.weight is torch\.float8_e4m3fn: .*scales",
        ),
        ("fp8_channel", removed("weight"), r"weight_scale is there, but not .*k_proj\.weight or "),
        (
            "fp8_channel",
            replaced("weight_scale", torch.ones(63, 1)),
            r"k_proj\.weight_scale has shape \[63, 1\] for 64 outputs",
        ),
        (
            "fp8_channel",
            replaced("weight_scale", torch.ones(1)),
            r"k_proj\.weight_scale has shape \[1\] for 64 outputs: one per output",
        ),
        (
            "fp8_tensor",
            replaced("weight_scale", torch.ones(64, 1)),
            r"k_proj\.weight_scale has shape \[64, 1\] for 64 outputs: one$",
        ),
        (
            "fp8_channel",
            replaced("weight", torch.ones(64, 128, dtype=torch.int8)),
            r"k_proj\.weight is torch\.int8 \[64, 128\]; FP8 weights are",
        ),
        (
            "torchao_int8",
            replaced("_weight_zero_point", torch.ones(1, dtype=torch.int8)),
            r"_weight_zero_point has shape \[1\] for 64 outputs: one per output",
        ),
        (
            "fp8_transformers",
            lambda tensors: tensors.update(
                {"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(1)}
            ),
            r"up_proj\.weight_scale_inv has shape \[1\], not \[2, 1\]: blocks are 128 x 128",
        ),
        (
            "fp8_channel",
            replaced("weight_scale", torch.full((64, 1), torch.nan)),
            r"k_proj\.weight_scale has nan at \[0, 0\]; scales are finite and positive",
        ),
        (
            "fp8_channel",
            replaced("weight", with_byte(0x7F, 3, 5)),
            r"model.safetensors: .*k_proj\.weight has NaN at \[3, 5\]",
        ),
        (
            "fp8_transformers",
            replaced("weight", with_byte(0xFF, 63, 127)),
            r"k_proj\.weight has NaN at \[63, 127\]",
        ),
        (
            "fp8_block",
            replaced("weight_scale", torch.ones(2, 2)),
            r"k_proj\.weight_scale has shape \[2, 2\], not \[1, 1\]",
        ),
        (
            "fp8_transformers",
            replaced("weight", torch.ones(64, 128)),
            r"k_proj\.weight is torch\.float32 \[64, 128\]; FP8",
        ),
        (
            "packed_int4",
            replaced("weight_scale", torch.ones(64, 5)),
            r"k_proj\.weight_scale has 5 groups, which do not divide 128 inputs",
        ),
        (
            "packed_int4",
            replaced("weight_shape", torch.tensor([64, 130])),
            r"weight_packed has shape \[64, 16\]; 4-bit weights \[64, 130\] take \[64, 17\]",
        ),
        (
            "packed_int4",
            replaced("weight_packed", torch.ones(64, 16)),
            r"weight_packed is torch.flo",
        ),
        (
            "packed_int8",  # which has been cut off before
            replaced("weight_packed", torch.ones(64, 33, dtype=torch.int32)),
            r"weight_packed has shape \[64, 33\]; 8-bit weights \[64, 128\] take \[64, 32\]",
        ),
        (
            "fp8_channel",
            replaced("weight_scale", torch.ones(8, 8)),
            r"k_proj\.weight_scale has shape \[8, 8\] for 64 outputs",
        ),
        (
            "fp8_channel",
            replaced("weight_zero_point", torch.tensor([0, 3, 0])),
            r"k_proj\.weight_zero_point is not 0 at \[1\]",
        ),
        (
            "awq",
            replaced("scales", torch.ones(4, 64).to(torch.float8_e4m3fn)),
            r"k_proj\.scales is torch\.float8_e4m3fn .*16 bits",
        ),
        (
            "gptq",
            replaced("g_idx", torch.zeros(128, dtype=torch.uint16)),
            r"k_proj\.g_idx is torch\.uint16 \[128\]; it must be integers",
        ),
        ("awq", removed("scales"), r"k_proj\.qweight is there, but not .*k_proj\.scales"),
        ("awq", replaced("scales", torch.ones(4, 63)), r"k_proj\.scales has shape \[4, 63\], not"),
        ("awq", replaced("qweight", torch.ones(4)), r"k_proj\.qweight is torch.float32 \[4\]; it"),
        (
            "gptq",
            replaced("g_idx", torch.full((128,), 4)),
            r"k_proj\.g_idx has group 4 at \[0\], and there are 4",
        ),
        (
            "gptq",
            replaced("qzeros", torch.ones(3, 8).int()),
            r"k_proj\.qzeros holds \[3, 64\] values",
        ),
        (
            "bitsandbytes_nf4",
            replaced("weight.quant_state.bitsandbytes__nf4", torch.zeros(3, dtype=torch.uint8)),
            r"quant_state\.bitsandbytes__nf4 cannot be read",
        ),
        (
            "bitsandbytes_nf4",
            replaced("weight", torch.zeros(5, 1, dtype=torch.uint8)),
            r"k_proj\.weight has 5 bytes for a weight of shape \[64, 128\]",
        ),
        (
            "bitsandbytes_int8",  # tiles of a GPU's kernels
            replaced("weight_format", torch.tensor(2, dtype=torch.uint8)),
            r"k_proj\.weight_format is \[2\]; octavo reads rows in their order \(0\)",
        ),
        (
            "modelopt_nvfp4",
            replaced("weight_scale", torch.ones(64, 4).to(torch.float8_e4m3fn)),
            r"k_proj\.weight_scale is torch\.float8_e4m3fn \[64, 4\]; blocks of 16 inputs of "
            r"\[64, 128\] have torch\.float8_e4m3fn \[64, 8\]",
        ),
        (
            "modelopt_nvfp4",
            replaced("weight", torch.zeros(64, 60, dtype=torch.uint8)),
            r"k_proj\.weight has 120 inputs, which blocks of 16 do not divide",
        ),
        (
            "modelopt_nvfp4",
            replaced("weight_scale_2", torch.ones(2)),
            r"k_proj\.weight_scale_2 has shape \[2\]; it must be one number",
        ),
        (
            "modelopt_fp8",
            replaced("weight_scale_2", torch.ones(1)),
            r"k_proj\.weight_scale_2 is there, but config\.json says nothing of NVFP4",
        ),
        (
            "nvfp4",
            replaced("weight_global_scale", torch.tensor([1e-40])),
            r"k_proj\.weight_scale has \S+ at .*; weights, which are scales times up to 6\S*e\+40",
        ),
        (
            "nvfp4",
            replaced("weight_zero_point", torch.ones(64, 8)),
            r"k_proj\.weight_zero_point is not 0 at \[0, 0\]",
        ),
        (
            "mxfp4",
            lambda tensors: tensors.update(
                {f"{K_PROJ}weight": tensors.pop(f"{K_PROJ}weight_packed")}
            ),
            r"k_proj\.weight_packed is not there, and 4-bit floats need it",
        ),
        (
            "nvfp4",
            replaced("weight_g_idx", torch.zeros(128).int()),
            r"k_proj\.weight_g_idx is there, and inputs of 4-bit floats are in their order",
        ),
        (
            "packed_int4",
            replaced("weight_global_scale", torch.ones(1)),
            r"k_proj\.weight_global_scale is there, but config\.json says nothing of NVFP4",
        ),
        (
            "mxfp4",
            replaced("weight_scale", torch.full((64, 4), 255, dtype=torch.uint8)),
            r"k_proj\.weight_scale has the exponent 255 at \[0, 0\]",
        ),
        (
            "bitsandbytes_int8",
            replaced("SCB", torch.ones(63)),
            r"k_proj\.SCB has shape \[63\] for",
        ),
    ],
)
def test_faulty_tensors_are_named(name: str, change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        loaded(changed(tmp_path, name, change))


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("nvfp4", "group_size", 32),
        ("nvfp4", "num_bits", 8),
        ("nvfp4", "symmetric", False),
        ("mxfp4", "group_size", 16),
    ],
)
def test_other_floats_of_4_bits_are_refused(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    fields = json.loads((changed(tmp_path, name) / "config.json").read_text())
    [group] = fields["quantization_config"]["config_groups"].values()
    group["weights"][field] = value
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ModelError, match=rf"weights: {field} is {value}; octavo reads .* {name}-p"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_nvfp4"])
def test_scales_of_blocks_may_be_zero(name: str, tmp_path: Path) -> None:
    """As versions of ModelOpt wrote those that e4m3 has no number for. A scale of inputs is left
    out."""

    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{K_PROJ}weight_scale"][3, 1] = 0.0
        tensors[f"{K_PROJ}input_global_scale"] = torch.ones(1)

    weight = loaded(SAMPLES / name)["layers.0.self_attn.k_proj.weight"]
    weight[3, 16:32] = 0
    directory = changed(tmp_path, name, change)
    assert torch.equal(loaded(directory)["layers.0.self_attn.k_proj.weight"], weight)


@pytest.mark.parametrize("name", ["nvfp4", "modelopt_nvfp4", "mxfp4"])
def test_experts_in_4_bits(name: str, tmp_path: Path) -> None:
    """Each of them in tensors of its own; projections stay as they are."""
    directory = write_model("qwen3_moe", tmp_path, hidden_size=128, moe_intermediate_size=128)
    sample = load_file(SAMPLES / name / "model.safetensors")
    module = "layers.0.self_attn.q_proj."
    values = loaded(SAMPLES / name)[f"{module}weight"]
    tensors, expected = load_file(directory / "model.safetensors"), {}
    for key in [key for key in tensors if "experts" in key]:
        assert tensors.pop(key).shape == values.shape
        prefix, expected[key.removeprefix("model.")] = key.removesuffix("weight"), values
        tensors |= {
            part.replace(f"model.{module}", prefix): each.clone()
            for part, each in sample.items()
            if part.startswith(f"model.{module}weight")
        }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    quantized = json.loads((SAMPLES / name / "config.json").read_text())
    fields["quantization_config"] = quantized["quantization_config"]
    (directory / "config.json").write_text(json.dumps(fields))
    found = slots(directory)
    assert len(expected) >= 8
    for key, weight in expected.items():
        assert isinstance(found[key].content, MxFloat4 if name == "mxfp4" else Tensor)
        assert torch.equal(found[key].dense(), weight)
    quantization = read_model_config(directory).quantization
    assert quantization is not None
    assert quantization.kept_by("hopper") == (False, name == "mxfp4")
    with LLM(directory, dtype="float32", num_blocks=8) as llm:
        assert len(llm.generate([[5, 9]], use_tqdm=False)[0].outputs[0].token_ids) > 0


def test_scales_that_are_powers_of_two_may_be_exponents(tmp_path: Path) -> None:
    def rounded(tensors: dict[str, Tensor]) -> None:
        scale = tensors[K_PROJ + "weight_scale"]
        tensors[K_PROJ + "weight_scale"] = scale.log2().ceil().exp2().to(torch.float8_e8m0fnu)

    weights = loaded(changed(tmp_path, "fp8_block", rounded))
    assert len(weights) == PROJECTIONS


def test_thousands_of_patterns_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the 512 that Python keeps."""
    names = [f"model.layers.{i}.mlp.experts.{j}.down_proj" for i in range(8) for j in range(128)]
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    method["dynamic"] = {f"+:{re.escape(name)}$": {"bits": 8} for name in names[:600]}
    method["modules_to_not_convert"] = [f"re:{re.escape(name)}$" for name in names[700:]]
    quantization = read_quantization(Fields("config.json", method))
    assert quantization is not None
    monkeypatch.setattr(re, "compile", None)
    monkeypatch.setattr(re, "_compile", None)
    own = [quantization.of_module(name) for name in names[::50]]
    assert [each.num_bits for each in own if each is not None] == [8] * 12 + [4] * 9
    is_ignored = [quantization.is_ignored(name) for name in names[::50]]
    assert is_ignored == [False] * 14 + [True] * 7


@pytest.mark.parametrize("name", ["awq", "gptq", "torchao"])
def test_a_weight_is_there_once(name: str, tmp_path: Path) -> None:
    """Not beside another one that is not quantized, and not in two files."""
    twice = replaced("weight", torch.ones(64, 128))
    with pytest.raises(ModelError, match=r"k_proj\.\w+ is there, and so is .*k_proj\.weight"):
        loaded(changed(tmp_path, name, twice))
    directory = changed(tmp_path, name)
    in_two_files(directory, lambda key: key.startswith(K_PROJ) and "scale" in key)
    with pytest.raises(ModelError, match=r"k_proj\.\w*scales? is also in model-1\.safetensors"):
        loaded(directory)


def test_weights_that_are_rounded_on_load_are_there_once(tmp_path: Path) -> None:
    shutil.copytree(model_directory("llama"), tmp_path, dirs_exist_ok=True)
    in_two_files(tmp_path, lambda key: key == f"{K_PROJ}weight")
    with pytest.raises(ModelError, match=r"model-2.*k_proj\.weight is also in another file"):
        LLM(str(tmp_path), quantization="int8", num_blocks=8)


class CopiedSizes(TorchDispatchMode):
    """Notes how many elements are copied at once to another dtype or device, at most."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.most = max(self.most, result.numel())
        return result


@pytest.mark.parametrize("name", ["gpt_oss", "granitemoe"])
def test_experts_in_one_tensor_are_rounded_one_after_the_other(name: str) -> None:
    """So that what is loaded of a layer with many experts takes little beside their final size."""
    config = quantized_on_load(read_model_config(model_directory(name)), "fp8")
    [experts] = {each.mlp for each in config.layers}
    assert isinstance(experts, ExpertsConfig)
    assert experts.routing.num_experts > 2
    model = build_model(config, torch.bfloat16, torch.device("cpu"), SingleRank())
    with CopiedSizes() as copied:
        load_weights(model, config)
    assert 0 < copied.most <= 2 * experts.hidden_size * experts.intermediate_size  # one's


class HeldBytes(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, for as long as they are there."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, list | tuple) else [result]:
            if isinstance(each, Tensor) and not each.is_meta:
                self._hold(each.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._sizes:
            self._sizes[key] = size
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


@pytest.mark.parametrize(
    ("name", "share"), [("granitemoe", 0.0), ("mixtral", 2 / 3), ("gpt_oss", 2 / 3)]
)
def test_experts_are_not_there_twice_when_they_are_put_together(
    name: str, share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates and ups of one layer are moved at once, at most; none where the file has them so."""
    monkeypatch.setattr(
        "octavo.layers.experts.make_quantized_experts_kernel", lambda form, *_: form
    )
    directory = write_model(name, tmp_path, hidden_size=128, num_local_experts=16)
    config = quantized_on_load(read_model_config(directory), "fp8")
    experts = config.layers[0].mlp
    assert isinstance(experts, ExpertsConfig)
    with HeldBytes() as held:
        model = build_model(config, torch.bfloat16, torch.device("cpu"), SingleRank())
        load_weights(model, config)
        model.checkpoint = None
        before = held.most = held.now
        for module in model.modules():
            if isinstance(module, QuantizedExperts):
                module.finalize()
    num_bytes = 3 * experts.routing.num_experts * experts.hidden_size * experts.intermediate_size
    assert held.now == before
    assert held.most - before <= 1.1 * share * num_bytes


@pytest.mark.parametrize(("block", "rows"), [((16, 8), 8), ((48, 16), 24), ((12, 16), 12)])
def test_no_block_has_gates_and_ups(block: tuple[int, int], rows: int) -> None:
    """Of experts in one tensor: a kernel takes one scale for a unit of gates, or of ups."""
    routing = RoutingConfig(num_experts=3, top_k=1)
    config = ExpertsConfig(hidden_size=16, intermediate_size=24, activation="silu", routing=routing)
    experts = QuantizedExperts(config)
    (ups,), down = experts.merged_places()
    stored = ScaledFloat8.quantize(torch.randn(ups.shape), block)
    assert isinstance(ups, WeightSlot)
    assert isinstance(down, WeightSlot)
    ups.put(stored, torch.float32)
    down.put(ScaledFloat8.quantize(torch.randn(down.shape), (16, 8)), torch.float32)
    taken, _ = experts._taken()
    assert isinstance(taken, ScaledFloat8)
    assert taken.block == (rows, block[1])
    assert torch.equal(taken.dequantize(), stored.dequantize())


def in_two_files(directory: Path, choose: Callable[[str], bool]) -> None:
    """The model's weights in one file, and the chosen ones, with other values, in another, too."""
    file = directory / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    again = {key: each * 2 for key, each in tensors.items() if choose(key)}
    save_file(tensors, directory / "model-1.safetensors")
    save_file(again, directory / "model-2.safetensors")
    weight_map = {key: "model-1.safetensors" for key in tensors}
    first = next(iter(again))
    index = {"weight_map": weight_map | {first: "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("zeros", "message"),
    [
        (
            torch.full((64, 1), 1.5),
            r"weight_zero_point is torch\.float32; zero points are integers",
        ),
        (torch.full((64, 1), torch.nan), r"weight_zero_point is torch\.float32; zero"),
        (torch.full((64, 1), 300), r"has 300 at \[0, 0\]; zero points are from -128 to 127"),
        (torch.full((64, 1), 1 << 40), r"has 1099511627776 at \[0, 0\]; zero points are from"),
    ],
)
def test_impossible_zero_points(zeros: Tensor, message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=message):
        loaded(changed(tmp_path, "int8", replaced("weight_zero_point", zeros)))


def corrupted(name: str, tensor: Tensor, is_integer: bool) -> Iterator[tuple[str, Tensor | None]]:
    """A tensor that holds a part of a weight, broken in ways that must all be noticed."""
    yield "removed", None
    if name == "weight_format":
        return
    yield "truncated", tensor[: len(tensor) // 2] if tensor.dim() else tensor.new_empty(0)
    yield "of another type", tensor.bool() if tensor.is_floating_point() else tensor.float()
    is_scale = "scale" in name or "absmax" in name or name == "SCB"
    if is_scale and tensor.is_floating_point():
        is_small = tensor.dtype == torch.float8_e4m3fn  # which has no infinity
        may_be = {
            "zero": "absmax" in name or name == "SCB" or is_small,
            "negative": is_integer,
            "infinite": is_small,
        }
        values = {"NaN": math.nan, "infinite": math.inf, "zero": 0.0, "negative": -1.0}
        for kind, value in values.items():
            if not may_be.get(kind, False):
                broken = tensor.clone()
                broken.view(-1)[-1] = value
                yield kind, broken
        # No scale in float16 or e4m3 is too large, and none that divides.
        is_any = tensor.dtype == torch.float16 or is_small or name == "weight_global_scale"
        if not is_any:
            huge = tensor.clone()
            huge.view(-1)[-1] = torch.finfo(tensor.dtype).max
            yield "huge", huge
    if name == "g_idx":
        for kind, value in [("beyond the groups", 4), ("negative", -1), ("too often", 0)]:
            broken = tensor.clone()
            broken[70] = value
            yield kind, broken


@pytest.mark.parametrize("name", NAMES)
def test_no_part_of_a_weight_can_be_broken(name: str, tmp_path: Path) -> None:
    """Every format: parts that lack, are too short, of another type, or hold impossible values."""
    directory = changed(tmp_path, name)
    whole = load_file(directory / "model.safetensors")
    is_integer = name.startswith(("auto_round", "awq", "gptq", "packed", "int8", "torchao_int"))
    unread = {f"{K_PROJ}input_scale", f"{K_PROJ}k_scale"}
    parts = {key: whole[key] for key in whole.keys() - unread if key.startswith(K_PROJ)}
    may_lack = {"g_idx", "weight_format"}  # the first without desc_act
    if name == "torchao_int8":
        may_lack.add("_weight_zero_point")
    for key, tensor in parts.items():
        part = key.removeprefix(K_PROJ)
        for kind, broken in corrupted(part, tensor, is_integer):
            others = {other: each for other, each in whole.items() if other != key}
            file = directory / "model.safetensors"
            save_file(others if broken is None else others | {key: broken.contiguous()}, file)
            if broken is None and part in may_lack:
                loaded(directory)
                continue
            with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.k_proj\.") as caught:
                loaded(directory)
            if kind in ("NaN", "infinite", "zero", "negative"):
                shown = {"NaN": "nan", "infinite": "inf", "zero": "0", "negative": "-1"}[kind]
                assert f"{key} has {'group ' * (part == 'g_idx')}{shown} at [" in str(caught.value)
            if kind == "huge":
                assert broken is not None
                assert f"{key} has {torch.finfo(broken.dtype).max:g} at [" in str(caught.value)
                assert "weights, which are scales times up to" in str(caught.value)


def test_scales_of_integers_may_be_negative(tmp_path: Path) -> None:
    """Some quantizers write them where a group's largest element is positive."""
    scales = load_file(SAMPLES / "gptq" / "model.safetensors")[f"{K_PROJ}scales"]
    weight = loaded(SAMPLES / "gptq")["layers.0.self_attn.k_proj.weight"]
    directory = changed(tmp_path, "gptq", replaced("scales", -scales))
    assert torch.equal(loaded(directory)["layers.0.self_attn.k_proj.weight"], -weight)


def test_asymmetric_int8_has_its_zero_points(tmp_path: Path) -> None:
    zeros = torch.arange(-64, 64, 2, dtype=torch.int8).unsqueeze(1)
    directory = changed(tmp_path, "int8", replaced("weight_zero_point", zeros))
    weight = loaded(SAMPLES / "int8")["layers.0.self_attn.k_proj.weight"]
    scales = load_file(SAMPLES / "int8" / "model.safetensors")[f"{K_PROJ}weight_scale"].float()
    expected = weight - zeros.float() * scales
    actual = loaded(directory)["layers.0.self_attn.k_proj.weight"]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("fp8_transformers", {"modules_to_not_convert": ["lm_head", "layers.0.self_attn.k_proj"]}),
        ("fp8_channel", {"ignore": [r"re:.*k_proj"]}),
        ("fp8_channel", {"ignore": [K_PROJ[:-1]]}),
        ("awq", {"modules_to_not_convert": ["k_proj"]}),
        ("bitsandbytes_nf4", {"llm_int8_skip_modules": ["self_attn.k_proj"]}),
    ],
)
def test_weights_that_config_json_says_are_dense_must_be(
    name: str, config: dict[str, Any], tmp_path: Path
) -> None:
    directory = changed(tmp_path, name, config=config)
    message = r"k_proj\..* is there, but config\.json says that .*k_proj is not quantized"
    with pytest.raises(ModelError, match=message):
        loaded(directory)
    # The names of others may end as theirs do.
    other = {key: ["proj", "attn.k_proj", "re:k_proj"] for key in config}
    assert len(loaded(changed(tmp_path, name, config=other))) == PROJECTIONS


def test_ends_of_names_skip_nothing_in_torchao(tmp_path: Path) -> None:
    """transformers compares them with names of parameters, quantizes the modules, and leaves the
    list in config.json."""
    names = {"modules_to_not_convert": ["k_proj", "self_attn.v_proj"]}
    weights = loaded(changed(tmp_path, "torchao", config=names))
    assert all(map(torch.equal, weights.values(), loaded(SAMPLES / "torchao").values()))
    names = {"modules_to_not_convert": ["model.layers.0.self_attn.k_proj"]}
    with pytest.raises(ModelError, match=r"config.json says that \S*k_proj is not quantized"):
        loaded(changed(tmp_path, "torchao", config=names))


def test_compressed_tensors_ignores_full_names_patterns_and_the_class(tmp_path: Path) -> None:
    """As its library does: the end of a name is the name of no module."""
    ends = ["k_proj", "self_attn.k_proj", "re:k_proj", "lm_head"]
    assert len(loaded(changed(tmp_path, "fp8_channel", config={"ignore": ends}))) == PROJECTIONS
    with pytest.raises(ModelError, match=r"config\.json says that .* is not quantized"):
        loaded(changed(tmp_path, "fp8_channel", config={"ignore": ["Linear"]}))


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("torchao", (1,), r"_weight_scale has shape \[1\] for 64 outputs: one per output"),
        ("torchao_int8", (1, 1), r"_weight_scale has shape \[1, 1\] for 64 outputs: one per out"),
        ("torchao_int4", (64, 2), r"has 2 groups for 128 inputs, .* says group_size 32"),
        ("torchao_int4", (64, 1), r"has 1 groups for 128 inputs, .* says group_size 32"),
    ],
)
def test_scales_of_torchao_are_as_its_granularity_says(
    name: str, shape: tuple[int, ...], message: str, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{K_PROJ}_weight_scale"] = torch.ones(shape)
        if name == "torchao_int4":
            tensors[f"{K_PROJ}_weight_zero_point"] = torch.zeros(shape, dtype=torch.int8)

    with pytest.raises(ModelError, match=message):
        loaded(changed(tmp_path, name, change))


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        ([{"_type": "PerTensor"}, {"_type": "PerRow", "_data": {"dim": 1}}], None),
        ({"_type": "PerAxis", "_data": {"axis": 0}}, None),
        ({"_type": "PerAxis", "_data": {"axis": 1}}, "_data: axis is 1; octavo reads 0"),
        ({"_type": "PerRow", "_data": {"dim": 0}}, "_data: dim is 0; octavo reads -1 and 1"),
        ({"_type": "PerBlock"}, "_type is 'PerBlock'; octavo reads PerTensor, PerRow, PerAxis, P"),
        ({"_type": "PerGroup", "_data": {"group_size": 0}}, "group_size is 0; it must be a pos"),
        ({"_type": "PerTensor"}, r"_weight_scale has shape \[\d+, 1\] for \d+ outputs: one$"),
        ([], "granularity is \\[\\]; it must be a JSON object"),
    ],
)
def test_granularities_of_torchao(granularity: Any, message: str | None, tmp_path: Path) -> None:
    kinds = {"_type": "Float8WeightOnlyConfig", "_data": {"granularity": granularity}}
    directory = changed(tmp_path, "torchao", config={"quant_type": {"default": kinds}})
    if message is None:
        assert len(loaded(directory)) == PROJECTIONS
        return
    with pytest.raises(ModelError, match=message):
        loaded(directory)


def bits_of_modules(groups: dict[str, Any], *names: str) -> list[int | None]:
    """How compressed-tensors' groups quantize modules of x."""
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    fields = Fields("config.json", method | {"config_groups": groups})
    quantization = read_quantization(fields)
    assert quantization is not None
    found = [quantization.of_module(f"x.{name}") for name in names]
    return [each.num_bits for each in found if each is not None]


def test_the_first_of_several_patterns_is_that_of_the_library() -> None:
    """It sorts them, whichever group they are in; names come before, and the class behind."""

    def group(bits: int, *targets: str) -> dict[str, Any]:
        return {"targets": list(targets), "weights": weights_of(bits, 32)}

    groups = {"a": group(8, "re:.*proj", "x.up_proj"), "b": group(4, "re:.*o_proj", "Linear")}
    assert bits_of_modules(groups, "o_proj", "k_proj", "up_proj", "fc") == [4, 8, 8, 4]


def test_the_last_group_with_a_target_is_that_of_the_library() -> None:
    """A name, a pattern or the class; what is no target of the last group stays in the first."""
    targets = ["Linear", "re:.*_proj", "x.fc"]
    groups = {
        "a": {"targets": [*targets, "x.own"], "weights": weights_of(8, 32)},
        "b": {"targets": targets, "weights": weights_of(4, 32)},
    }
    assert bits_of_modules(groups, "fc", "o_proj", "other", "own") == [4, 4, 4, 8]


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gptq", {"group_size": 64}, r"has 6 groups for 192 inputs, .* group_size 64"),
        ("awq", {"group_size": 48}, r"has 6 groups for 192 inputs, .* group_size 48"),
        # As many groups as there are, but of other inputs
        ("awq", {"group_size": 36}, r"scales has \d groups for .*, which .* 36 does not divide"),
        ("gptq", {"desc_act": True}, None),
        ("gptq", {"bits": 8}, r"qzeros holds \[6, 64\] values, and scales \[6, 128\]"),
    ],
)
def test_files_must_be_as_config_json_says(
    name: str, config: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    directory = changed(tmp_path, name, config=config)
    if message is None:
        loaded(directory)
        directory = changed(tmp_path, name, removed("g_idx"), config)
        message = r"k_proj\.qweight is there, but not .*k_proj\.g_idx"
    with pytest.raises(ModelError, match=message):
        loaded(directory)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("awq", {"quant_method": "hqq"}, "quant_method is 'hqq'; octavo reads fp8, compressed-te"),
        ("awq", {"quant_method": None}, "quantization_config has no quant_method"),
        ("awq", {"quant_method": 3}, "quant_method is 3; octavo reads"),
        ("awq", {"bits": 3}, "bits is 3; octavo reads 4"),
        ("awq", {"version": "gemv"}, "version is 'gemv'; octavo reads gemm"),
        ("gptq", {"bits": 3}, "bits is 3; octavo reads 2, 4, 8"),
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'; octavo knows gptq",
        ),
        (
            "gptq",
            {"checkpoint_format": None, "format": "marlin"},
            "quantization_config: format is 'marlin'; octavo knows gptq",
        ),
        ("awq", {"version": None, "format": "gemv"}, "config: format is 'gemv'; octavo reads gemm"),
        (
            "fp8_transformers",
            {"weight_block_size": [128]},
            "weight_block_size is .*; it must be a l",
        ),
        ("fp8_transformers", {"weight_block_size": [1.5, 128]}, "it must be two whole numbers"),
        (
            "fp8_transformers",
            {"activation_scheme": "odd"},
            "activation_scheme is 'odd'; octavo know",
        ),
        ("packed_int4", {"config_groups": []}, "config_groups is .*; it must be a JSON object"),
        (
            "packed_int4",
            {"transform_config": {"a": {}}},
            "transform_config is .* does not implement",
        ),
        ("bitsandbytes_nf4", {"load_in_4bit": False}, "load_in_4bit is False; it or load_in_8bit"),
        (
            "torchao",
            {"quant_type": {"default": {"_type": "Int4"}}},
            "_type is 'Int4'; octavo reads",
        ),
        ("auto_round", {"packing_format": "auto_round:mlx"}, "'auto_round:mlx'; octavo knows auto"),
        ("auto_round", {"data_type": "mx_fp"}, "data_type is 'mx_fp'; octavo reads int"),
        ("auto_round", {"bits": 3}, "bits is 3; octavo reads 2, 4, 8"),
        ("auto_round", {"rotation_config": {"a": 1}}, "rotation_config is .* does not rotate"),
        ("auto_round", {"extra_config": {"(_proj": {}}}, "'re:\\(_proj' is no regular expression"),
        ("auto_round", {"extra_config": {"q": 3}}, r"extra_config: q is 3; it must be a JSON obj"),
        ("auto_round", {"extra_config": {"q": {"bits": 3}}}, r"q: bits is 3; octavo reads 2, 4, 8"),
        ("fp8_transformers", {"fmt": "e5m2"}, "fmt is 'e5m2'; octavo knows e4m3"),
        ("fp8_channel", {"ignore": "lm_head"}, "ignore is 'lm_head'; it must be a list of strings"),
        ("fp8_channel", {"ignore": ["re:("]}, "'re:\\(' is no regular expression"),
        ("gptq", {"group_size": 0}, "group_size is 0; it must be a positive integer"),
        ("awq", {"zero_point": "yes"}, "zero_point is 'yes'; it must be true or false"),
    ],
)
def test_what_is_not_read_is_refused(
    name: str, config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        read_model_config(changed(tmp_path, name, config=config))


def test_sparsity_that_is_stored_densely_changes_nothing(tmp_path: Path) -> None:
    """As old versions of llm-compressor write it, with what they have counted."""
    config: dict[str, Any] = {
        "format": "dense",
        "global_sparsity": 0.146,
        "registry_requires_subclass": False,
        "sparsity_structure": "unstructured",
    }
    plain = read_model_config(SAMPLES / "int8").quantization
    directory = changed(tmp_path, "int8", config={"sparsity_config": config})
    assert read_model_config(directory).quantization == plain
    config["format"] = "sparse-24-bitmask"
    directory = changed(tmp_path, "int8", config={"sparsity_config": config})
    with pytest.raises(ModelError, match=r"sparsity_config is .* does not implement it"):
        read_model_config(directory)


def test_versions_of_gptq_have_two_names(tmp_path: Path) -> None:
    """GPTQModel calls it format; where both are there, the old name counts, as in transformers."""
    for config, offset in (
        ({"checkpoint_format": None, "format": "gptq_v2"}, 0),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, 1),
        ({"checkpoint_format": None, "format": None}, 1),
    ):
        quantization = read_model_config(changed(tmp_path, "gptq", config=config)).quantization
        assert quantization is not None
        assert quantization.zero_offset == offset


def test_other_formats_of_compressed_tensors_are_refused(tmp_path: Path) -> None:
    directory = changed(tmp_path, "packed_int4")
    text = (directory / "config.json").read_text()
    (directory / "config.json").write_text(text.replace("pack-quantized", "mxfp8-quantized"))
    with pytest.raises(ModelError, match="format is 'mxfp8-quantized'; octavo reads float-quan"):
        read_model_config(directory)
    (directory / "config.json").write_text(text.replace("pack-quantized", "nvfp4-pack-quantized"))
    with pytest.raises(ModelError, match="type is 'int'; octavo reads float in the format nvfp4-p"):
        read_model_config(directory)
    (directory / "config.json").write_text(text.replace('"num_bits": 4', '"num_bits": 3'))
    with pytest.raises(ModelError, match="num_bits is 3; octavo reads 2, 4, 8"):
        read_model_config(directory)
