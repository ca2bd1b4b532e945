"""Quantized weights of models that transformers computes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fallback.shrunken import shrunken_config
from fallback.sweep import (
    GREEDY,
    Reference,
    prompts,
    reference_tokens,
    served_tokens,
    write_reference,
)
from model_zoo import write_model
from octavo import LLM
from octavo.errors import ConfigError
from octavo.layers.base import WeightSlot
from octavo.layers.experts import QuantizedExperts
from octavo.layers.linear import QuantizedLinear
from octavo.models.config import ModelConfig
from octavo.models.fallback.config import TransformersConfig
from octavo.models.loader import build_model, fill_with_noise, load_weights
from octavo.models.registry import quantized_on_load, read_model_config
from octavo.ops.communicator import SingleRank
from octavo.ops.quantized import GroupedInt, MxFloat4, QuantizedWeight, ScaledFloat8

SAMPLES = Path(__file__).parent.parent / "models" / "quantized"
CPU = torch.device("cpu")
FLOAT8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "all": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True},
        }
    },
}


def kinds(config: ModelConfig, is_dummy: bool = False) -> list[type]:
    """What the slots of all quantized layers hold before they are finalized."""
    model = build_model(config, torch.float32, CPU, SingleRank())
    if is_dummy:
        fill_with_noise(model, config, 0)
    else:
        load_weights(model, config)
    owners = [each for each in model.modules() if isinstance(each, QuantizedLinear)]
    places = [place for owner in owners for place in owner.places()]
    for experts in model.modules():
        if isinstance(experts, QuantizedExperts):
            if experts._merged is not None:
                places += [*experts._merged[0], experts._merged[1]]
            places += [place for each in experts._separate for place in each]
    found = []
    for place in places:
        assert isinstance(place, WeightSlot)
        found.append(type(place.content))
    return found


def generated(directory: Path, model_impl: str) -> list[list[int]]:
    with LLM(directory, dtype="float32", num_blocks=40, model_impl=model_impl) as llm:
        outputs = llm.generate([[5, 7, 11, 13], [3, 9] * 12], GREEDY, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in outputs]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("awq", GroupedInt),
        ("gptq", GroupedInt),
        ("packed_int4_asymmetric", GroupedInt),
        ("fp8_block", ScaledFloat8),
        ("fp8_transformers", ScaledFloat8),
        ("modelopt_fp8", ScaledFloat8),
        ("mxfp4", MxFloat4),
        ("bitsandbytes_nf4", Tensor),
    ],
)
def test_what_a_quantizer_wrote_is_read_as_for_a_family_of_octavo_s(name: str, kind: type) -> None:
    native = read_model_config(SAMPLES / name)
    config = read_model_config(SAMPLES / name, "transformers")
    assert kinds(config) == [kind] * 7
    assert config.quantized_parts == native.quantized_parts
    assert config.read_bytes(2) == native.read_bytes(2)
    assert generated(SAMPLES / name, "transformers") == generated(SAMPLES / name, "native")


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama3", "fp8"), ("llama3", "int4"), ("mixtral", "int4"), ("gpt_oss", "fp8")],
)
def test_weights_are_quantized_on_load_as_those_of_octavo_s_families(
    family: str, name: str, tmp_path: Path
) -> None:
    """Experts in tensors of their own, and all in one with inputs before outputs; no routers."""
    directory = write_model(family, tmp_path, hidden_size=64, intermediate_size=64)
    options = {"dtype": "float32", "quantization": name}
    tokens = served_tokens(directory, **options)
    assert tokens == served_tokens(directory, model_impl="native", **options)
    assert tokens != served_tokens(directory, dtype="float32"), "the sample cannot tell"
    native, config = (
        quantized_on_load(read_model_config(directory, impl), name)
        for impl in ("native", "transformers")
    )
    assert config.quantized_parts == native.quantized_parts
    assert config.least_weight_bytes(2) - config.weight_bytes(2) == (
        native.least_weight_bytes(2) - native.weight_bytes(2)
    )


def write_float8(reference: Reference, directory: Path) -> Path:
    """The same model with all projections in e4m3, and its own weights rounded so."""
    shutil.copytree(reference.directory, directory)
    tensors = load_file(directory / "model.safetensors")
    rounded = {}
    for name in [name for name in tensors if re.search(r"_proj(_with_mqa)?\.weight$", name)]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        values = (weight / scale).to(torch.float8_e4m3fn)
        tensors |= {name: values, f"{name}_scale": scale}
        rounded[name] = values.float() * scale
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FLOAT8}))
    state = load_file(reference.directory / "model.safetensors") | rounded
    save_file(state, reference.directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.parametrize("model_type", ["deepseek_v3", "ernie4_5_moe"])
def test_experts_that_octavo_has_no_family_for(model_type: str, tmp_path: Path) -> None:
    """One tensor for each expert, of which transformers' module has one for all."""
    reference = write_reference(model_type, tmp_path / "rounded")
    directory = write_float8(reference, tmp_path / "float8")
    config = read_model_config(directory)
    assert isinstance(config, TransformersConfig)
    found = kinds(config)
    assert set(found) - {Tensor} == {ScaledFloat8}
    assert found.count(Tensor) == (not config.tied_embeddings), "the head alone"
    auto_class = type(reference.model)
    model = auto_class.from_pretrained(reference.directory, attn_implementation="eager").eval()
    assert served_tokens(directory) == [reference_tokens(model, each) for each in prompts()]


def test_dummy_weights_are_quantized_too(tmp_path: Path) -> None:
    """All that the loader would quantize; experts are in one tensor where no file says more."""
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    config = quantized_on_load(read_model_config(tmp_path), "int8")
    found = kinds(config, is_dummy=True)
    assert set(found) == {GroupedInt}
    assert all(issubclass(each, QuantizedWeight) for each in found)


def test_modules_that_are_not_quantized_are_counted_by_any_of_their_names(tmp_path: Path) -> None:
    """config.json names them as some version of transformers does."""
    shrunken_config("ernie4_5_moe").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())

    def parts(*ignored: str) -> tuple[int, int]:
        quantized = FLOAT8 | {"ignore": list(ignored)}
        path.write_text(json.dumps(fields | {"quantization_config": quantized}))
        return read_model_config(tmp_path).quantized_parts

    projections, experts = parts()
    assert projections > 0 < experts
    for prefix in ("model.", "language_model.model.", ""):
        name = f"{prefix}layers.1.self_attn.o_proj"
        assert parts(name)[0] == parts(f"re:{re.escape(name)}")[0] == projections - 64 * 64
    assert parts(r"re:.*\.experts\..*") == (projections, 0)


def test_what_cannot_be_quantized_on_load_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"awq: the weights are quantized already \(awq\)"):
        LLM(SAMPLES / "awq", quantization="fp8", model_impl="transformers")
