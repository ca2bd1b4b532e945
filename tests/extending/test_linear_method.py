"""docs/extending.md, "A linear method"."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from toys import Register

import model_zoo
from octavo import LLM, SamplingParams
from octavo.errors import ConfigError
from octavo.json_fields import Fields
from octavo.layers.config import LinearConfig
from octavo.layers.linear import PlainLinear, make_linear
from octavo.models.config import ModelDescription
from octavo.models.families.common import read_rotary_decoder
from octavo.models.registry import FAMILIES
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.registry import LINEAR_METHODS

PROMPT = model_zoo.random_token_ids(40)


class Int8Linear(PlainLinear):
    """Rounds weights to 8 bits with a scale per output, once they are loaded."""

    def finalize(self) -> None:
        assert self.weight is not None
        self.scales = self.weight.abs().amax(dim=1, keepdim=True) / 127
        self.rounded = (self.weight / self.scales).round().to(torch.int8)
        self.weight = None

    def forward(self, x: Tensor, epilogue: Epilogue = Epilogue.NONE) -> Tensor:
        return apply_epilogue(self.forward_partial(x), epilogue)

    def forward_partial(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded * self.scales, self.bias)


def read(config: Fields) -> ModelDescription:
    """Llama with 8-bit projections."""
    description = read_rotary_decoder(config)
    layers = tuple(
        replace(
            layer,
            attention=replace(layer.attention, linear_method="int8"),
            mlp=replace(layer.mlp, linear_method="int8"),
        )
        for layer in description.layers
    )
    return replace(description, layers=layers)


def copy_of_llama(directory: Path, model_type: str, rounds: bool) -> Path:
    """The zoo's Llama under another name, and with its projections rounded by this test."""
    llama = model_zoo.model_directory("llama")
    fields = json.loads((llama / "config.json").read_text()) | {"model_type": model_type}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(fields))
    tensors = load_file(llama / "model.safetensors")
    for name, weight in tensors.items():
        if rounds and "_proj" in name:
            scales = weight.abs().amax(dim=1, keepdim=True) / 127
            tensors[name] = (weight / scales).round() * scales
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_a_family_chooses_a_method_of_one_s_own(tmp_path: Path, register: Register) -> None:
    register(LINEAR_METHODS, "int8", Int8Linear)
    family = replace(FAMILIES["llama"], model_type="llama-int8", read=read)
    register(FAMILIES, "llama-int8", family)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=0)
    outputs = []
    for model_type, rounds in (("llama-int8", False), ("llama", True), ("llama", False)):
        directory = copy_of_llama(tmp_path / f"{model_type}-{rounds}", model_type, rounds)
        with LLM(directory, num_blocks=40, dtype="float32") as llm:
            [output] = llm.generate(PROMPT, params, use_tqdm=False)
        outputs.append(output.outputs[0])
    ours, rounded, exact = outputs
    assert ours.token_ids == rounded.token_ids
    assert ours.cumulative_logprob == pytest.approx(rounded.cumulative_logprob, abs=1e-3)
    assert ours.cumulative_logprob != pytest.approx(exact.cumulative_logprob, abs=1e-3)


def test_a_method_that_nobody_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="linear_method: 'int4' is not one of plain, quantized"):
        make_linear(LinearConfig(8, (8,), method="int4"))
