"""One token times weights in 12 bits, by rings in shared memory, against float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from gluon_emulator import Emulated
from torch import Tensor

from octavo.ops.cuda import linear_ring_float12 as float12_ring
from octavo.ops.cuda.float12 import PIECE_ROWS, Float12Weight, pack_float12, unpack_float12
from octavo.ops.cuda.linear_ring_float12 import (
    Float12Ring,
    choose_float12_ring,
    linear_one_float12,
    linear_ring_float12,
)
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm

pytestmark = pytest.mark.usefixtures("poisoned")

TOLERANCE = 3e-3  # ||out - expected|| / ||expected||, as rounding results to bfloat16 makes
SHARED_MEMORY = 227 << 10  # bytes of a multiprocessor
SHAPES = [
    (5120, 2880, Epilogue.NONE),
    (2880, 4096, Epilogue.NONE),
    (6144, 4096, Epilogue.NONE),
    (28672, 4096, Epilogue.SILU_MUL),
    (4096, 14336, Epilogue.NONE),
    (20480, 2560, Epilogue.GELU_TANH_MUL),
    (2560, 10240, Epilogue.NONE),
]


@pytest.fixture
def ring_kernel(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        kernel = Emulated(float12_ring._linear_ring_float12_kernel)
        monkeypatch.setattr(float12_ring, "_linear_ring_float12_kernel", kernel)


def operands(num_rows: int, size: int, device: torch.device) -> tuple[Tensor, Float12Weight]:
    """x [1, size], and W whose rows have different sizes, and small weights among large ones."""
    make = torch.Generator(device).manual_seed(num_rows + size)
    x = torch.randn(1, size, generator=make, device=device).bfloat16()
    weight = torch.randn(num_rows, size, generator=make, device=device)
    weight *= torch.logspace(-6, 0, num_rows, device=device)[:, None] * size**-0.5
    weight[:, ::3] *= 2.0**-12
    return x, pack_float12(weight.bfloat16())


def expected(x: Tensor, stored: Float12Weight, bias: Tensor | None, epilogue: Epilogue) -> Tensor:
    weight = unpack_float12(stored, torch.float64)
    return apply_epilogue(F.linear(x.double(), weight, None if bias is None else bias), epilogue)


def assert_close(actual: Tensor, wanted: Tensor) -> None:
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < TOLERANCE, float(error)


@pytest.mark.usefixtures("ring_kernel")
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.RELU, Epilogue.GELU_TANH_MUL])
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize(("num_rows", "size"), [(6, 64), (70, 1152), (44, 2880)])
@pytest.mark.parametrize(
    "ring",
    [Float12Ring(8, 8, 3, 150), Float12Ring(8, 16, 2, 150), Float12Ring(4, 16, 2, 150)],
)
def test_one_token(
    device: torch.device,
    ring: Float12Ring,
    num_rows: int,
    size: int,
    has_bias: bool,
    epilogue: Epilogue,
) -> None:
    """More blocks than the ring has, programs that have no rows, and pieces that are not whole."""
    if epilogue.is_gated:
        num_rows = 2 * PIECE_ROWS * (num_rows // PIECE_ROWS // 2 + 1)
    x, stored = operands(num_rows, size, device)
    bias = None
    if has_bias:
        bias = torch.linspace(-1, 1, num_rows, dtype=torch.float64, device=device).bfloat16()
    actual = linear_ring_float12(x, stored, bias, epilogue, ring, num_programs=3)
    wanted = expected(x, stored, None if bias is None else bias.double(), epilogue)
    assert_close(actual, wanted)


@pytest.mark.usefixtures("ring_kernel")
@pytest.mark.parametrize("norms_branch", [False, True])
def test_norm_of_one_token(device: torch.device, norms_branch: bool) -> None:
    """It leaves the residual stream as it was: programs read it while one writes the total."""
    x, stored = operands(40, 1152, device)
    make = torch.Generator(device).manual_seed(0)
    residual, scale, branch = torch.randn(3, 1152, generator=make, device=device).bfloat16()
    before, total = residual.clone(), torch.empty_like(residual)[None]
    given = DeferredNorm(
        x, scale, 1e-5, 1.0, residual[None], total, branch if norms_branch else None
    )
    ring = Float12Ring(8, 8, 3, 150)
    actual = linear_ring_float12(given, stored, None, Epilogue.NONE, ring, num_programs=3)

    def normed(values: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(values.double(), (1152,), eps=1e-5) * (weight.double() + 1)

    added = normed(x, branch) if norms_branch else x.double()
    stream = added + residual.double()
    assert_close(total, stream)
    assert torch.equal(residual, before)
    inputs = normed(total, scale)
    wanted = expected(inputs, stored, None, Epilogue.NONE)
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < 2 * TOLERANCE, float(error)  # inputs are rounded, too


def test_rings_leave_room_for_each_other() -> None:
    def memory(rows: int, size: int, is_gated: bool = False) -> int:
        ring = choose_float12_ring(rows, size, is_gated, 132)
        units = rows / (1 + is_gated) / ring.rows / 132
        assert units / math.ceil(units) > 0.96
        blocks = ring.rows * ring.pieces * 96 * ring.stages * (1 + is_gated)
        assert blocks > 60 << 10
        return blocks + -(-size // 1024) * 2048 + 2048  # with barriers and CUDA's share

    attention = 36 << 10
    # Of Gemma 3 4B and of Llama 3 8B; two that follow each other share an SM.
    for hidden, heads, width, inner in ((2560, 2048, 4096, 10240), (4096, 4096, 6144, 14336)):
        qkv, output = memory(width, hidden), memory(hidden, heads)
        up, down = memory(2 * inner, hidden, is_gated=True), memory(hidden, inner)
        assert max(qkv + output, output + up) + attention < SHARED_MEMORY
        assert max(up + down, down + qkv) < SHARED_MEMORY


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnGpu:
    DEVICE = torch.device("cuda")

    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes_of_models(self, shape: tuple[int, int, Epilogue]) -> None:
        num_rows, size, epilogue = shape
        x, stored = operands(num_rows, size, self.DEVICE)
        actual = linear_one_float12(x, stored, None, epilogue)
        assert_close(actual, expected(x, stored, None, epilogue))
        for _ in range(5):
            assert torch.equal(linear_one_float12(x, stored, None, epilogue), actual)
