"""Copies in 12 bits on a CPU: doubles of their kernels, and kernels that are made as on a GPU."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo import float12
from octavo.float12 import PIECE_ROWS
from octavo.layers import experts as layers_experts
from octavo.layers import linear as layers_linear
from octavo.ops.cuda.float12 import Float12Weight, pack_float12, takes_float12, unpack_float12
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.expert_kernels import SeparateExperts
from octavo.ops.experts import ExpertsKernel, ExpertWeights, Routed
from octavo.ops.linear import LinearKernel, TorchLinear
from octavo.worker.device.cpu import CpuDevice


class CopiedExperts(SeparateExperts):
    """Any number of tokens times experts as they are read from copies."""

    calls: list[int]

    def apply_partial(self, x: Tensor, routed: Routed) -> Tensor:
        self.calls.append(len(x))
        return super().apply_partial(x, routed)


class Hopper:
    """Makes projections as a Hopper GPU has them, with copies of weights of any size, which up to
    128 tokens are multiplied by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []  # numbers of tokens that were multiplied by a copy
        self.rounds = False  # no copies, but weights as they would be read from them
        package = "octavo.ops.cuda"
        kernel: Any = ModuleType(f"{package}.linear_hopper_float12")
        kernel.linear_float12 = self._multiply
        kernel.takes_gates = lambda num_rows: num_rows % (2 * PIECE_ROWS) == 0
        monkeypatch.setitem(sys.modules, kernel.__name__, kernel)
        name = f"{package}.linear_copied"
        monkeypatch.delitem(sys.modules, name, raising=False)
        module = import_module(name)
        monkeypatch.setitem(sys.modules, name, module)
        self.kernel: type = module.CopiedLinear
        limits = ("MANY_ROWS", "_LEAST_ROWS", "_LEAST_SIZE", "_LEAST_OF_ONE", "_LEAST_OF_EXPERTS")
        for limit in limits:
            monkeypatch.setattr(float12, limit, 1)
        monkeypatch.setattr(layers_experts, "make_experts_kernel", self._make_experts)
        monkeypatch.setattr(layers_linear, "make_linear_kernel", self._make)
        monkeypatch.setattr(layers_linear, "make_quantized_kernel", lambda *args, **options: None)
        monkeypatch.setattr(CpuDevice, "weight_kernels", lambda *args: "hopper")

    def _make(
        self, weight: Tensor, is_chained: bool = False, float12_copy: bool = False
    ) -> LinearKernel:
        if not (float12_copy and takes_float12(weight)):
            return TorchLinear(weight)
        if self.rounds:
            return TorchLinear(unpack_float12(pack_float12(weight)))
        kernel: LinearKernel = self.kernel(weight, is_chained)
        return kernel

    def _make_experts(
        self, weights: ExpertWeights, epilogue: Epilogue, float12_copies: bool = False
    ) -> ExpertsKernel:
        if not float12_copies:
            return SeparateExperts(weights, epilogue)
        up, down = (
            unpack_float12(pack_float12(each.flatten(0, 1))).view_as(each) for each in weights[:2]
        )
        read = CopiedExperts(weights._replace(up=up, down=down), epilogue)
        read.calls = self.calls
        return read

    def _multiply(
        self,
        x: Tensor,
        weight: Float12Weight,
        bias: Tensor | None,
        epilogue: Epilogue = Epilogue.NONE,
    ) -> Tensor:
        assert x.dtype == torch.bfloat16
        assert x.stride(0) % 8 == 0
        assert 1 <= len(x) <= float12.MOST_TOKENS
        self.calls.append(len(x))
        return apply_epilogue(F.linear(x, unpack_float12(weight), bias), epilogue)
