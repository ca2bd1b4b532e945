"""Doubles of the kernels for weights in 12 bits, which run on Hopper GPUs alone: in plain torch."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.ops.cuda.float12 import Float12Weight, unpack_float12
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm


class Exact(NamedTuple):
    """Stands for a Float12Weight that has lost nothing."""

    dense: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.dense.shape


class Tiles(NamedTuple):
    splits: int


class Doubles:
    """Notes which kernels are called with how many tokens."""

    few = 64  # tokens, up to which there are tiles
    many = 512  # tokens, up to which W is not unpacked
    splits = 1

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []

    def linear_one_float12(
        self,
        x: Tensor | DeferredNorm,
        weight: Float12Weight,
        bias: Tensor | None,
        epilogue: Epilogue,
    ) -> Tensor:
        name = "one"
        if isinstance(x, DeferredNorm):
            name, stream = "one, normed", x.x.float()
            assert x.branch_weight is None
            if x.residual is not None:
                assert x.total is not None
                stream = (stream + x.residual.float()).to(x.residual.dtype).float()
                x.total.copy_(stream)
            scale = x.weight.float() + x.offset
            x = F.rms_norm(stream, stream.shape[-1:], scale, x.eps).bfloat16()
        self.calls.append((name, len(x)))
        assert len(x) == 1
        return _product(x, weight, bias, epilogue).to(x.dtype)

    def choose_float12_tiles(
        self, num_tokens: int, num_rows: int, size: int, epilogue: Epilogue
    ) -> Tiles | None:
        assert 2 <= num_tokens <= 64
        return Tiles(self.splits) if num_tokens <= self.few else None

    def linear_few_float12(
        self,
        x: Tensor,
        weight: Float12Weight,
        bias: Tensor | None,
        out: Tensor,
        epilogue: Epilogue,
        tiles: Tiles,
        is_partial: bool,
    ) -> None:
        self.calls.append(("few", len(x)))
        assert is_aligned(x)
        if not is_partial:
            out.copy_(_product(x, weight, bias, epilogue))
            return
        assert out.dtype == torch.float32
        assert epilogue is Epilogue.NONE
        assert out.shape == (tiles.splits, len(x), weight.shape[0])
        out.copy_(_product(x, weight, bias, epilogue) / tiles.splits)

    def linear_many_float12(
        self,
        x: Tensor,
        weight: Float12Weight,
        bias: Tensor | None,
        out: Tensor,
        epilogue: Epilogue,
    ) -> None:
        self.calls.append(("many", len(x)))
        assert is_aligned(x)
        out.copy_(_product(x, weight, bias, epilogue))

    def dequantize_float12(self, weight: Float12Weight, out: Tensor) -> None:
        self.calls.append(("unpack", weight.shape[0]))
        assert out.is_contiguous()
        out.copy_(unpack_float12(weight))

    def most_tokens(self, num_rows: int, size: int) -> int:
        return self.many


MODULES = {
    "linear_ring_float12": ("linear_one_float12",),
    "linear_hopper_float12": ("choose_float12_tiles", "linear_few_float12"),
    "linear_many_float12": ("dequantize_float12", "linear_many_float12", "most_tokens"),
}


def install(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Doubles]:
    """octavo.ops.cuda.linear_float12 with doubles of the kernels, and the doubles."""
    doubles, package = Doubles(), "octavo.ops.cuda"
    for name, functions in MODULES.items():
        module: Any = ModuleType(f"{package}.{name}")
        module.Float12Tiles = Tiles
        for function in functions:
            setattr(module, function, getattr(doubles, function))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    name = f"{package}.linear_float12"
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = import_module(name)
    monkeypatch.setitem(sys.modules, name, module)
    return module, doubles


def is_aligned(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


def unpacked(weight: Float12Weight) -> Tensor:
    return unpack_float12(weight, torch.float32)


def _product(x: Tensor, weight: Float12Weight, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    dense = weight.dense.float() if isinstance(weight, Exact) else unpacked(weight)
    return apply_epilogue(
        F.linear(x.float(), dense, None if bias is None else bias.float()), epilogue
    )
