"""One token times weights in 12 bits, by rings in shared memory, against float64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from gluon_emulator import Emulated
from linear_cases import expected, relative_error
from torch import Tensor

from octavo import float12
from octavo.float12 import PIECE_INPUTS, PIECE_ROWS
from octavo.ops.cuda import linear as cuda_linear
from octavo.ops.cuda import linear_copied, linear_hopper_float12, linear_ring
from octavo.ops.cuda import linear_ring_float12 as float12_ring
from octavo.ops.cuda.float12 import pack_float12, unpack_float12
from octavo.ops.cuda.linear_copied import CopiedLinear
from octavo.ops.cuda.linear_ring_float12 import (
    Float12Ring,
    choose_float12_ring,
    linear_one_float12,
    linear_ring_float12,
)
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.epilogue import Epilogue
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
    (4096, 2560, Epilogue.NONE),
    (20480, 2560, Epilogue.GELU_TANH_MUL),
    (2560, 10240, Epilogue.NONE),
    (1536, 8960, Epilogue.NONE),
]
# Rows and pieces of a block, and blocks.
RINGS = [Float12Ring(*each, 150) for each in ((8, 16, 2), (8, 8, 3), (16, 8, 2), (8, 32, 2))]


@pytest.fixture
def ring_kernels(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if device.type == "cpu":
        for module, name in (
            (float12_ring, "_linear_ring_float12_kernel"),
            (linear_ring, "_linear_ring_kernel"),
        ):
            monkeypatch.setattr(module, name, Emulated(getattr(module, name)))
            monkeypatch.setattr(module, "num_sms", lambda device: 3)


def operands(num_rows: int, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """x [1, size], and W whose rows have different sizes, and small weights among large ones."""
    make = torch.Generator(device).manual_seed(num_rows + size)
    x = torch.randn(1, size, generator=make, device=device).bfloat16()
    weight = torch.randn(num_rows, size, generator=make, device=device)
    weight *= torch.logspace(-6, 0, num_rows, device=device)[:, None] * size**-0.5
    weight[:, ::3] *= 2.0**-12
    return x, weight.bfloat16()


def assert_close(actual: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    error = relative_error(actual, wanted)
    assert error < tolerance, error


@pytest.mark.usefixtures("ring_kernels")
@pytest.mark.parametrize(
    ("epilogue", "has_bias"),
    [(Epilogue.NONE, True), (Epilogue.RELU, False), (Epilogue.GELU_TANH_MUL, True)],
)
@pytest.mark.parametrize(("num_rows", "size"), [(6, 64), (70, 1152), (44, 2880), (21, 2560)])
@pytest.mark.parametrize("ring", RINGS)
def test_one_token(
    device: torch.device,
    ring: Float12Ring,
    num_rows: int,
    size: int,
    has_bias: bool,
    epilogue: Epilogue,
) -> None:
    """More blocks than the ring has, programs that have no rows, and blocks that are not whole."""
    if epilogue.is_gated:
        num_rows = 2 * PIECE_ROWS * (num_rows // PIECE_ROWS // 2 + 1)
    x, weight = operands(num_rows, size, device)
    bias = torch.linspace(-1, 1, num_rows, device=device).bfloat16() if has_bias else None
    stored = pack_float12(weight)
    actual = linear_ring_float12(x, stored, bias, epilogue, ring, num_programs=3)
    assert_close(actual, expected(x, unpack_float12(stored, torch.float32), bias, epilogue))
    assert_close(actual, expected(x, weight, bias, epilogue))


@pytest.mark.usefixtures("ring_kernels")
@pytest.mark.parametrize("ring", RINGS)
def test_what_lies_beside_the_inputs_is_not_read(device: torch.device, ring: Float12Ring) -> None:
    x, weight = operands(24, 320, device)
    stored = pack_float12(weight)
    beside = torch.full((3, 320), torch.nan, device=device).bfloat16()
    beside[1] = x[0]
    alone, among = (
        linear_ring_float12(each, stored, None, Epilogue.NONE, ring, num_programs=3)
        for each in (x, beside[1:2])
    )
    assert torch.equal(alone, among)
    x[0, 300] = torch.nan
    assert linear_ring_float12(x, stored, None, Epilogue.NONE, ring, 3).isnan().all()


def deferred(x: Tensor, adds: bool, norms_branch: bool) -> tuple[DeferredNorm, Tensor]:
    """A norm of x, and what it gives."""
    size = x.shape[1]
    make = torch.Generator(x.device).manual_seed(0)
    residual, scale, branch = torch.randn(3, size, generator=make, device=x.device).bfloat16()

    def normed(values: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(values.double(), (size,), eps=1e-5) * (weight.double() + 1)

    stream = normed(x, branch) if norms_branch else x.double()
    if not adds:
        return DeferredNorm(x, scale, 1e-5, 1.0), normed(stream, scale)
    total = torch.empty_like(x)
    given = DeferredNorm(
        x, scale, 1e-5, 1.0, residual[None], total, branch if norms_branch else None
    )
    return given, normed((stream + residual.double()).bfloat16(), scale)


@pytest.mark.usefixtures("ring_kernels")
@pytest.mark.parametrize(
    ("adds", "norms_branch", "epilogue"),
    [(False, False, Epilogue.NONE), (True, False, Epilogue.SILU_MUL), (True, True, Epilogue.NONE)],
)
def test_norm_of_one_token(
    device: torch.device, adds: bool, norms_branch: bool, epilogue: Epilogue
) -> None:
    """It leaves the residual stream as it was: programs read it while one writes the total."""
    x, weight = operands(48, 1152, device)
    given, inputs = deferred(x, adds, norms_branch)
    before = None if given.residual is None else given.residual.clone()
    stored = pack_float12(weight)
    actual = linear_ring_float12(given, stored, None, epilogue, RINGS[0], num_programs=3)
    # Inputs are rounded, too.
    assert_close(actual, expected(inputs, weight, None, epilogue), 2 * TOLERANCE)
    if before is not None:
        assert given.total is not None
        assert given.residual is not None
        assert torch.equal(given.residual, before)
        stream = F.rms_norm(given.total.double(), (1152,), eps=1e-5)
        assert_close(stream * (given.weight.double() + 1), inputs)


@pytest.mark.usefixtures("ring_kernels")
def test_a_chain_reads_the_copy_for_one_token(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def multiply(*args: object) -> Tensor:
        calls.append(args)
        return linear_one_float12(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(float12_ring, "linear_one_float12", multiply)
    monkeypatch.setattr(linear_ring, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(float12, "_LEAST_OF_NARROW", 1)
    monkeypatch.setattr(float12, "_ROWS_OF_TOKEN", 1)
    monkeypatch.setattr(cuda_linear, "_is_fast", lambda x, weight: True)
    monkeypatch.setattr(linear_copied, "linear_float12", lambda x, *args: x)
    x, weight = operands(48, 320, device)
    bias = torch.linspace(-1, 1, 48, device=device).bfloat16()
    kernel = CopiedLinear(weight, is_chained=True)
    assert_close(kernel.apply_partial(x, bias), expected(x, weight, bias, Epilogue.NONE))
    for epilogue in (Epilogue.NONE, Epilogue.SILU_MUL):
        assert_close(kernel.apply(x, bias, epilogue), expected(x, weight, bias, epilogue))
    assert kernel.norms_inputs(1, norms_branch=True)
    assert not kernel.norms_inputs(2, norms_branch=True)
    given, inputs = deferred(x, adds=True, norms_branch=True)
    actual = kernel.apply_normed(given, bias, Epilogue.NONE)
    assert_close(actual, expected(inputs, weight, bias, Epilogue.NONE), 2 * TOLERANCE)
    assert len(calls) == 4
    two = x.expand(2, -1).contiguous()
    assert kernel.apply(two, None, Epilogue.NONE) is two, "not by a ring"
    # Halves that are no whole pieces are those of the weight.
    halves, shift = CopiedLinear(weight[:24].contiguous(), is_chained=True), bias[:24]
    wanted = expected(x, weight[:24], shift, Epilogue.SILU_MUL)
    assert_close(halves.apply(x, shift, Epilogue.SILU_MUL), wanted)
    alone = CopiedLinear(weight).apply(x, None, Epilogue.NONE)
    # Of so few weights by a GEMV, whose results Triton's interpreter cuts off to bfloat16.
    assert_close(alone, expected(x, weight, None, Epilogue.NONE), 2 * TOLERANCE)
    monkeypatch.setattr(float12, "_LEAST_OF_ONE", 1)
    assert CopiedLinear(weight).apply(x, None, Epilogue.NONE) is x, "not in a chain"
    assert len(calls) == 4, "of others a GEMV is left to the weight"


@pytest.mark.parametrize(
    ("num_rows", "size", "is_gated", "tile"),
    [
        (6144, 4096, False, (8, 16)),  # Llama 3 8B
        (4096, 4096, False, (8, 16)),
        (28672, 4096, True, (8, 16)),
        (4096, 14336, False, (8, 16)),
        (5120, 2880, False, (8, 16)),  # gpt-oss-20b
        (2880, 4096, False, (8, 16)),
        (4096, 2560, False, (16, 8)),  # Gemma 3 4B: 40 pieces
        (20480, 2560, True, (16, 8)),
        (2560, 2048, False, (8, 16)),  # 320 times 8 rows
        (2560, 10240, False, (8, 16)),
    ],
)
def test_tiles_leave_neither_sms_nor_columns_idle(
    num_rows: int, size: int, is_gated: bool, tile: tuple[int, int]
) -> None:
    ring = choose_float12_ring(num_rows, size, is_gated, 132)
    assert ring is not None
    assert (ring.rows, ring.pieces) == tile


def test_rows_that_are_too_many_for_few_sms_have_no_ring() -> None:
    """As on a slice of a GPU: one token is multiplied by the weight."""
    assert choose_float12_ring(57_344, 8192, True, 132) is not None
    assert choose_float12_ring(57_344, 8192, True, 16) is None


@pytest.mark.usefixtures("ring_kernels")
def test_a_chain_without_a_ring_for_the_copy_reads_the_weight(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_ring, "_FEWEST_ROWS", 1)
    monkeypatch.setattr(float12, "_LEAST_OF_NARROW", 1)
    monkeypatch.setattr(cuda_linear, "_is_fast", lambda x, weight: True)
    monkeypatch.setattr(float12_ring, "choose_float12_ring", lambda *args: None)
    x, weight = operands(48, 320, device)
    kernel = CopiedLinear(weight, is_chained=True)
    actual = kernel.apply(x, None, Epilogue.NONE)
    assert_close(actual, expected(x, weight, None, Epilogue.NONE))


@pytest.mark.usefixtures("ring_kernels")
def test_rows_of_large_weights(device: torch.device) -> None:
    """Powers of two of rows, and those that are left out of inputs, are beyond float32 together."""
    weight = torch.full((16, 64), 2.0**80, device=device).bfloat16()
    x = torch.full((1, 64), 2.0**-40, device=device).bfloat16()
    actual = linear_ring_float12(x, pack_float12(weight), None, Epilogue.NONE, RINGS[1], 3)
    assert_close(actual, expected(x, weight, None, Epilogue.NONE))


def test_rings_leave_room_for_each_other() -> None:
    def memory(rows: int, size: int, is_gated: bool = False) -> int:
        ring = choose_float12_ring(rows, size, is_gated, 132)
        assert ring is not None
        units = rows / (1 + is_gated) / ring.rows / 132
        blocks = ring.rows * ring.pieces * 96 * ring.stages * (1 + is_gated)
        own_blocks = math.ceil(units) * math.ceil(size / (ring.pieces * PIECE_INPUTS))
        assert blocks >= 60 << 10 or ring.stages == own_blocks
        of_sums = 16 * ring.rows * (1 + is_gated) * power_of_2(math.ceil(units))
        return blocks + of_sums + -(-size // 1024) * 2048 + 1536  # with barriers and CUDA's share

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

    def test_weights_that_keep_few_bits(self) -> None:
        """Those far below the largest of their row, which has an input of zero."""
        x, weight = operands(256, 2048, self.DEVICE)
        weight *= 2.0**-16 / weight.abs().amax(1, keepdim=True)
        weight[:, 7], x[:, 7] = 1.0, 0.0
        stored = pack_float12(weight)
        wanted = x.double() @ unpack_float12(stored, torch.float64).t()
        assert wanted.abs().amax() > 0
        for tile in ((8, 16), (16, 8)):
            ring = Float12Ring(*tile, 3, 150)
            y = linear_ring_float12(x, stored, None, Epilogue.NONE, ring, 132)
            assert_close(y, wanted)
        assert_close(linear_hopper_float12.linear_float12(x, stored, None), wanted)

    @pytest.mark.parametrize("tile", [None, (8, 16), (8, 8), (16, 8)])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_shapes_of_models(
        self, shape: tuple[int, int, Epilogue], tile: tuple[int, int] | None
    ) -> None:
        num_rows, size, epilogue = shape
        x, weight = operands(num_rows, size, self.DEVICE)
        stored = pack_float12(weight)

        def multiply() -> Tensor:
            if tile is None:
                return linear_one_float12(x, stored, None, epilogue)
            return linear_ring_float12(x, stored, None, epilogue, Float12Ring(*tile, 3, 150), 132)

        actual = multiply()
        assert_close(actual, expected(x, weight, None, epilogue))
        for _ in range(5):
            assert torch.equal(multiply(), actual)
