"""docs/extending.md, "An experts method"."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import Register

import model_zoo
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.json_fields import Fields
from octavo.layers.config import ExpertsConfig
from octavo.layers.experts import PlainExperts, make_experts
from octavo.models.config import ModelDescription
from octavo.models.families import mixtral
from octavo.models.registry import FAMILIES, read_model_config
from octavo.ops.epilogue import Epilogue
from octavo.ops.experts import ExpertWeights, Routed, mix
from octavo.registry import EXPERTS_METHODS

PROMPT = model_zoo.random_token_ids(20)


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers and a scale for each output."""
    scales = weight.abs().amax(dim=-1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


class Int8Experts(PlainExperts):
    """Rounds weights to 8 bits once they are loaded."""

    def finalize(self) -> None:
        self.rounded = [rounded(weight) for weight in (self.up, self.down)]
        del self.up, self.down

    def forward_partial(self, hidden: Tensor, routed: Routed) -> Tensor:
        up, down = (values * scales for values, scales in self.rounded)
        return mix(hidden, routed, ExpertWeights(up, down), Epilogue.SILU_MUL)


def read(config: Fields) -> ModelDescription:
    """Mixtral with 8-bit experts."""
    description = mixtral.read(config)
    layers = []
    for layer in description.layers:
        assert isinstance(layer.mlp, ExpertsConfig)
        layers.append(replace(layer, mlp=replace(layer.mlp, method="int8")))
    return replace(description, layers=tuple(layers))


def copy_of_mixtral(directory: Path, model_type: str, rounds: bool) -> Path:
    """The zoo's Mixtral under another name, and with its experts rounded by this test."""
    source = model_zoo.model_directory("mixtral")
    fields = json.loads((source / "config.json").read_text()) | {"model_type": model_type}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = load_file(source / "model.safetensors")
    for name, weight in tensors.items():
        if rounds and "experts" in name:
            values, scales = rounded(weight)
            tensors[name] = values * scales
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_family_chooses_a_method_of_one_s_own(tmp_path: Path, register: Register) -> None:
    register(EXPERTS_METHODS, "int8", Int8Experts)
    register(
        FAMILIES, "mixtral-int8", replace(mixtral.FAMILY, model_type="mixtral-int8", read=read)
    )
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=0)
    outputs = []
    for model_type, rounds in (("mixtral-int8", False), ("mixtral", True), ("mixtral", False)):
        directory = copy_of_mixtral(tmp_path / f"{model_type}-{rounds}", model_type, rounds)
        with LLM(directory, num_blocks=40, dtype="float32") as llm:
            [output] = llm.generate(PROMPT, params, use_tqdm=False)
        outputs.append(output.outputs[0])
    ours, expected, exact = outputs
    assert ours.token_ids == expected.token_ids
    assert ours.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    assert ours.cumulative_logprob != pytest.approx(exact.cumulative_logprob, abs=1e-3)


def test_a_method_that_nobody_has_is_refused() -> None:
    layer = read_model_config(model_zoo.model_directory("mixtral")).layers[0]
    assert isinstance(layer.mlp, ExpertsConfig)
    with pytest.raises(ConfigError, match="experts_method: 'int4' is not one of plain"):
        make_experts(replace(layer.mlp, method="int4"))
