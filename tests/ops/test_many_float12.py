"""Many tokens times weights in 12 bits: W dequantized, and a persistent GEMM."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import Emulated
from torch import Tensor

from octavo.ops.cuda import linear_persistent
from octavo.ops.cuda.float12 import pack_float12, unpack_float12
from octavo.ops.cuda.linear_many_float12 import (
    choose_tiles,
    dequantize_float12,
    launch,
    linear_many_float12,
    most_tokens,
    tiles_of,
)
from octavo.ops.epilogue import Epilogue, apply_epilogue

pytestmark = pytest.mark.usefixtures("poisoned")
TOLERANCE = 8e-3  # of 16-bit results; gates, too


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device; a CPU in the place of a Hopper GPU."""
    if device.type == "cpu":
        workspace = torch.empty(1 << 20), torch.zeros(1 << 10, dtype=torch.int32)
        kernel = Emulated(linear_persistent.persistent_linear_kernel)
        monkeypatch.setattr(linear_persistent, "persistent_linear_kernel", kernel)
        monkeypatch.setattr(linear_persistent, "_workspace", lambda device: workspace)
    return device


def made(num_rows: int, size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows + size)
    weight = torch.randn(num_rows, size, generator=generator) * size**-0.5
    return (weight * torch.logspace(-3, 1, num_rows)[:, None]).bfloat16().to(device)


def inputs(num_tokens: int, size: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens * size)
    return torch.randn(num_tokens, size, generator=generator).bfloat16().to(device)


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("num_rows", "size"), [(8, 64), (70, 320), (200, 1152)])
def test_weights_are_dequantized_exactly(device: torch.device, num_rows: int, size: int) -> None:
    weight = made(num_rows, size, device)
    weight[1] *= 1e-30
    weight[2, 1:] *= 1e-6  # most of them have fewer bits
    stored = pack_float12(weight)
    out = torch.empty(num_rows, size, dtype=torch.bfloat16, device=device)
    dequantize_float12(stored, out)
    assert torch.equal(out.view(torch.int16), unpack_float12(stored).view(torch.int16))


@pytest.mark.parametrize(
    ("num_tokens", "shape", "num_sms", "is_shared", "epilogue"),
    [
        (100, (128, 128), 7, True, Epilogue.SILU_MUL),  # a program has steps of several tiles
        (300, (128, 256), 4, True, Epilogue.NONE),  # and a whole one
        (300, (192, 128), 5, True, Epilogue.GELU_TANH_MUL),
        (300, (256, 128), 132, True, Epilogue.NONE),  # a tile has many programs
        (300, (128, 256), 2, False, Epilogue.SILU_MUL),
    ],
)
@pytest.mark.parametrize("size", [1088, 640])
def test_persistent_programs_share_tiles_in_any_way(
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    shape: tuple[int, int],
    num_sms: int,
    is_shared: bool,
    epilogue: Epilogue,
    size: int,
) -> None:
    monkeypatch.setattr(linear_persistent, "_num_sms", lambda device: num_sms)
    num_rows = 304 if epilogue.is_gated else 260
    weight = made(num_rows, size, hopper)
    stored = pack_float12(weight)
    x, bias = inputs(num_tokens, size, hopper), inputs(1, num_rows, hopper)[0]
    out = x.new_empty(num_tokens, num_rows // 2 if epilogue.is_gated else num_rows)
    tiles = tiles_of(*shape, is_shared=is_shared)
    sums = x.double() @ unpack_float12(stored, torch.float32).double().t() + bias.double()
    wanted = apply_epilogue(sums, epilogue)
    for _ in range(2):  # and are ready for the next product
        launch(x, stored, bias, out.fill_(torch.nan), epilogue, tiles)
        assert relative(out, wanted) < TOLERANCE


def test_tiles_follow_from_the_shape(hopper: torch.device) -> None:
    """Few tokens have tiles of 128; many rows are tiles as a whole, few are shared."""
    assert choose_tiles(100, 2880, 4096).tokens == 128
    assert choose_tiles(256, 2880, 4096).is_shared
    assert choose_tiles(1024, 28672, 4096).tokens == 256
    assert most_tokens(2880, 4096) >= 256
    weight = made(48, 64, hopper)
    x, out = inputs(70, 64, hopper), torch.empty(70, 48, dtype=torch.bfloat16, device=hopper)
    linear_many_float12(x, pack_float12(weight), None, out, Epilogue.NONE)
    assert relative(out, x.double() @ weight.double().t()) < TOLERANCE
