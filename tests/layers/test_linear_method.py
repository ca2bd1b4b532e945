"""What docs/extending.md says of linear methods: a class, chosen in `make_linear`, and no more."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import model_zoo
from octavo.layers import attention, mlp
from octavo.layers.linear import LinearMethod, PlainLinear
from octavo.models.loader import load_model
from octavo.models.registry import read_model_config
from octavo.ops.epilogue import Epilogue, apply_epilogue

NAMES = ("gpt2", "opt-350m", "llama", "phi3")
CPU = torch.device("cpu")


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


@pytest.mark.parametrize("name", NAMES)
def test_layers_take_another_method(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read_model_config(model_zoo.model_directory(name))
    plain = load_model(config, torch.float32, CPU)
    monkeypatch.setattr(attention, "make_linear", Int8Linear)
    monkeypatch.setattr(mlp, "make_linear", Int8Linear)
    model = load_model(config, torch.float32, CPU)
    replaced = [module for module in model.modules() if isinstance(module, Int8Linear)]
    assert len(replaced) == 4 * config.num_layers
    for path, module in model.named_modules():
        original = plain.get_submodule(path)
        if not isinstance(module, Int8Linear):
            continue
        assert isinstance(original, LinearMethod)
        x = torch.randn(3, module.rounded.shape[1])
        got, want = module.forward(x), original.forward(x)
        error = (got - want).norm() / want.norm()
        assert 0 < error < 0.02, path
