"""Kernels of quantized projections, against float32 products of what the weights stand for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Barrier, BrokenBarrierError
from typing import Any

import pytest
import torch
from gluon_emulator import Descriptor, Emulated, run
from test_quantized_forms import FORMS
from torch import Tensor

from daily_cases import checkered
from octavo.layers import linear as layers_linear
from octavo.layers import norm as layers_norm
from octavo.layers.base import WeightSlot
from octavo.layers.config import LinearConfig, MLPConfig, NormConfig
from octavo.layers.linear import QuantizedLinear
from octavo.layers.mlp import DenseMLP
from octavo.layers.norm import RMSNorm
from octavo.ops.cuda import (
    linear,
    linear_gemv_packed,
    linear_hopper,
    linear_hopper_packed,
    linear_quantized,
    linear_ring,
    quantized_tiles,
    stored_weights,
)
from octavo.ops.cuda import norm as cuda_norm
from octavo.ops.cuda.linear_gemv_packed import PackedPrograms, linear_packed
from octavo.ops.cuda.linear_hopper import linear_kernel
from octavo.ops.cuda.linear_hopper_packed import PackedTiles, linear_few_packed
from octavo.ops.cuda.linear_quantized import launch, make_kernel
from octavo.ops.cuda.linear_ring import Ring
from octavo.ops.cuda.quantize import round_inputs
from octavo.ops.cuda.quantized_tiles import (
    LIBRARY,
    SIZES,
    Product,
    Tiles,
    candidates,
    persistent_tiles,
)
from octavo.ops.cuda.stored_weights import INT4, INT8, StoredWeight
from octavo.ops.epilogue import Epilogue, apply_epilogue
from octavo.ops.norm import DeferredNorm
from octavo.ops.quantized import GroupedInt, QuantizedWeight, RoundedInputs, Rounding, ScaledFloat8
from octavo.ops.tuning import Tunable

pytestmark = pytest.mark.usefixtures("poisoned")
CPU = torch.device("cpu")
TOLERANCE = 8e-3  # of 16-bit inputs, dequantized weights, gates and results
SERVED = [name for name in FORMS if name != "mxfloat4"]
EPILOGUES = [Epilogue.NONE, Epilogue.SILU_MUL]


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device; a CPU in the place of a Hopper GPU."""
    if device.type == "cpu":
        workspace = torch.empty(1 << 20), torch.zeros(1 << 10, dtype=torch.int32)
        for module, kernel in (
            (linear_quantized, "quantized_linear_kernel"),
            (linear_gemv_packed, "_linear_packed_kernel"),
            (linear_hopper_packed, "linear_packed_kernel"),
            (linear_quantized, "persistent_linear_kernel"),
            (linear_hopper, "linear_kernel"),
            (linear_ring, "_linear_ring_kernel"),
        ):
            monkeypatch.setattr(module, kernel, Emulated(getattr(module, kernel)))
        for module in (linear_quantized, linear):
            monkeypatch.setattr(module, "split_workspace", lambda device: workspace)
        monkeypatch.setattr(linear_quantized, "is_hopper", lambda device: True)
        monkeypatch.setattr(linear_quantized, "_num_sms", lambda device: 132)
        monkeypatch.setattr(linear_ring, "num_sms", lambda device: 3)
    return device


@pytest.fixture
def rings(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device, whose rings take few rows, too."""
    monkeypatch.setattr(linear_ring, "_FEWEST_ROWS", 1)
    return hopper


def made(name: str, num_rows: int, size: int, device: torch.device) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(num_rows + size)
    dense = torch.randn(num_rows, size, generator=generator) * size**-0.5
    return FORMS[name](dense.bfloat16()).to(device)


def inputs(num_tokens: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens * size)
    return torch.randn(num_tokens, size, generator=generator).to(device, dtype)


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize(("num_rows", "size"), [(70, 256), (200, 384)])
def test_weights_are_dequantized_exactly(
    device: torch.device, name: str, num_rows: int, size: int
) -> None:
    form = made(name, num_rows, size, device)
    stored = StoredWeight.of(form)
    assert stored is not None
    out = torch.empty(num_rows, size, device=device)
    stored_weights.dequantize(stored, out)
    assert torch.equal(out, form.dequantize())


@pytest.mark.parametrize("size", [96, 100])
def test_integers_are_served_where_rows_of_inputs_are_whole_16_bytes(
    hopper: torch.device, size: int
) -> None:
    """TMA fetches no others: such weights are dequantized when they are loaded."""
    form = GroupedInt.quantize(torch.randn(24, size), 8, size).to(hopper)
    kernel = make_kernel(form, torch.bfloat16)
    if size % 8:
        assert kernel is None
        return
    assert kernel is not None
    x = inputs(2, size, torch.bfloat16, hopper)
    wanted = x.float() @ form.dequantize().t()
    assert relative(kernel.apply(x, None, Epilogue.NONE), wanted) < 1e-2


def test_rows_of_inputs_are_rounded_by_themselves(device: torch.device) -> None:
    x = inputs(4, 300, torch.bfloat16, device)
    x[1] *= 1000
    x[2, 7], x[3, 5] = torch.nan, torch.inf
    rounded, scales, _ = round_inputs(x, Rounding.TOKENS)
    values = rounded.float() * scales
    wanted = x[:2].float()
    assert torch.allclose(scales[:2], wanted.abs().amax(dim=1, keepdim=True) / 448)
    if device.type == "cuda":  # the interpreter rounds 126 to 64
        smallest = 2**-9 * scales[:2]
        assert ((values[:2] - wanted).abs() <= 2**-4 * wanted.abs() + smallest).all()
    assert values[2:].isnan().all()


CASES = [(100, 256, each) for each in (1, 3, 40, 130, 300)] + [(260, 1152, 20)]


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
@pytest.mark.parametrize(("num_rows", "size", "num_tokens"), CASES)
def test_any_number_of_tokens(
    hopper: torch.device,
    name: str,
    epilogue: Epilogue,
    num_rows: int,
    size: int,
    num_tokens: int,
) -> None:
    dtype = torch.bfloat16 if num_tokens % 2 else torch.float16
    form = made(name, num_rows, size, hopper)
    kernel = make_kernel(form, dtype)
    assert kernel is not None
    x, bias = inputs(num_tokens, size, dtype, hopper), inputs(1, num_rows, dtype, hopper)[0]
    y = x.float() @ form.dequantize().t() + bias.float()
    wanted = apply_epilogue(y, epilogue)
    assert relative(kernel.apply(x, bias, epilogue), wanted) < TOLERANCE
    if epilogue == Epilogue.NONE:
        parts = kernel.apply_partial(x, bias)
        assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, y) < TOLERANCE


@pytest.mark.parametrize(
    ("rows_of_block", "columns_of_block", "epilogue"),
    checkered([(1, 1168), (512, 1168), (128, 128), (64, 256)], EPILOGUES),
)
def test_one_token_times_float8_takes_no_tensor_cores(
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    rows_of_block: int,
    columns_of_block: int,
    epilogue: Epilogue,
) -> None:
    monkeypatch.delattr(linear_quantized, "launch")
    sizes = torch.logspace(-2, 0, 256, device=hopper)
    dense = torch.randn(256, 1168, device=hopper) * sizes[:, None] * 1168**-0.5
    form = ScaledFloat8.quantize(dense, (rows_of_block, columns_of_block))
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    x, bias = inputs(1, 1168, torch.bfloat16, hopper), dense[:, 0].bfloat16()
    y = x.float() @ form.dequantize().t() + bias.float()
    assert relative(kernel.apply(x, bias, epilogue), apply_epilogue(y, epilogue)) < TOLERANCE
    assert relative(kernel.apply_partial(x, bias), y) < TOLERANCE


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
@pytest.mark.parametrize("block", [(1, 1152), (512, 1152), (128, 128)])
@pytest.mark.parametrize("ring", [Ring(8, 8, 3, 150), Ring(4, 16, 2, 150)])
@pytest.mark.parametrize("adds", [False, True])
def test_one_token_times_float8_by_a_ring(
    rings: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    adds: bool,
    ring: Ring,
    block: tuple[int, int],
    epilogue: Epilogue,
) -> None:
    """More blocks than the ring has, and a last one that is not whole."""
    monkeypatch.setattr(linear_ring, "choose_ring", lambda *args, **options: ring)
    sizes = torch.logspace(-2, 0, 136, device=rings)
    dense = inputs(136, 1152, torch.float32, rings) * sizes[:, None] * 1152**-0.5
    form = ScaledFloat8.quantize(dense, block)
    kernel = make_kernel(form, torch.bfloat16, is_chained=True)
    assert kernel is not None
    x, residual, scale = inputs(3, 1152, torch.bfloat16, rings).unsqueeze(1)
    x *= 2.0 ** (torch.arange(1152, device=rings) // 128 % 5)  # pieces have scales of their own
    bias = dense[:, 0].bfloat16()
    stream = (x + residual if adds else x).float()
    if adds:
        assert kernel.norms_inputs(1, norms_branch=False)
        stream = torch.nn.functional.rms_norm(stream, (1152,), scale[0].float(), 1e-5)
    wanted = apply_epilogue(stream @ form.dequantize().t() + bias.float(), epilogue)
    if adds:
        given = DeferredNorm(x, scale[0], 1e-5, 0.0, residual, torch.empty_like(x))
        assert relative(kernel.apply_normed(given, bias, epilogue), wanted) < TOLERANCE
    else:
        assert relative(kernel.apply(x, bias, epilogue), wanted) < TOLERANCE


def test_a_norm_before_a_norm_of_float8_by_a_ring(rings: torch.device) -> None:
    form = ScaledFloat8.quantize(inputs(40, 1152, torch.float32, rings), (1, 1152))
    kernel = make_kernel(form, torch.bfloat16, is_chained=True)
    assert kernel is not None
    x, residual, branch, scale = inputs(4, 1152, torch.bfloat16, rings).unsqueeze(1)
    total = torch.empty_like(x)
    given = DeferredNorm(x * 300, scale[0], 1e-5, 1.0, residual, total, branch[0])
    actual = kernel.apply_normed(given, None, Epilogue.NONE)
    normed = torch.nn.functional.rms_norm(given.x.float(), (1152,), branch[0].float() + 1, 1e-5)
    stream = (normed + residual.float()).bfloat16()
    torch.testing.assert_close(total, stream, rtol=2**-7, atol=1e-3)
    normed = torch.nn.functional.rms_norm(stream.float(), (1152,), scale[0].float() + 1, 1e-5)
    assert relative(actual, normed @ form.dequantize().t()) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("has_groups", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "epilogue"),
    [
        (6144, 4096, Epilogue.NONE),  # Llama 3 8B
        (4096, 4096, Epilogue.NONE),
        (28672, 4096, Epilogue.SILU_MUL),
        (4096, 14336, Epilogue.NONE),
        (6144, 2560, Epilogue.NONE),  # Qwen3 4B
        (2560, 9728, Epilogue.NONE),
        (20480, 2560, Epilogue.GELU_TANH_MUL),  # Gemma 3 4B
    ],
)
def test_rings_of_models(num_rows: int, size: int, epilogue: Epilogue, has_groups: bool) -> None:
    device = torch.device("cuda")
    dense = inputs(num_rows, size, torch.float32, device) * size**-0.5
    form = ScaledFloat8.quantize(dense, (128, 128) if has_groups else (1, size))
    kernel = make_kernel(form, torch.bfloat16, is_chained=True)
    assert kernel is not None
    assert kernel.norms_inputs(1, norms_branch=True), "it is a ring"
    x = inputs(1, size, torch.bfloat16, device)
    wanted = apply_epilogue(x.double() @ form.dequantize().t().double(), epilogue)
    assert relative(kernel.apply(x, None, epilogue), wanted) < 3e-3  # of results in bfloat16


@pytest.mark.parametrize("chains", ["", "is_chained", "follows_experts"])
def test_layers_say_whether_projections_follow_each_other(
    rings: torch.device, monkeypatch: pytest.MonkeyPatch, chains: str
) -> None:
    monkeypatch.setattr(layers_linear, "make_quantized_kernel", make_kernel)
    projection = QuantizedLinear(LinearConfig(128, (9000,), method="quantized"))
    if chains:
        setattr(projection, chains, True)
    (slot,) = projection.places()
    assert isinstance(slot, WeightSlot)
    dense = inputs(9000, 128, torch.bfloat16, rings)
    slot.put(ScaledFloat8.quantize(dense, (1, 128)), torch.bfloat16)
    projection.finalize()
    norms_inputs = projection.norms_inputs(1, norms_branch=False)
    assert norms_inputs is bool(chains)  # not of so many rows else


@pytest.mark.parametrize("name", ["int4", "int4-asymmetric"])
@pytest.mark.parametrize(
    ("size", "programs", "epilogue"),
    [
        (1024, PackedPrograms(16, 4), Epilogue.SILU_MUL),  # all warps have as many blocks
        (1152, PackedPrograms(16, 2), Epilogue.NONE),
        (640, PackedPrograms(32, 4), Epilogue.SILU_MUL),
        (384, PackedPrograms(16, 8), Epilogue.GELU),  # some warps have none
        (1408, PackedPrograms(16, 2, splits=3), Epilogue.NONE),
    ],
)
def test_one_token_times_4_bits_with_any_programs(
    hopper: torch.device, name: str, size: int, programs: PackedPrograms, epilogue: Epilogue
) -> None:
    dtype = torch.float16 if size == 640 else torch.bfloat16
    form = made(name, 102, size, hopper)
    stored = StoredWeight.of(form)
    assert stored is not None
    x, bias = inputs(1, size, dtype, hopper), inputs(1, 102, dtype, hopper)[0]
    wanted = apply_epilogue(x.float() @ form.dequantize().t() + bias.float(), epilogue)
    out = torch.full_like(wanted, torch.nan, dtype=dtype)
    if programs.splits > 1:
        out = out.float().expand(programs.splits, -1, -1).contiguous()
    linear_packed(x, stored, bias, out, epilogue, programs)
    if programs.splits > 1:
        assert relative(out.sum(dim=0), wanted) < 1e-4  # of inputs as integers
    else:
        assert relative(out, wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "is_chained"),
    [("float8-row", False), ("float8-row", True), ("int4-asymmetric", False)],
)
@pytest.mark.parametrize("largest", [0.0, 1e-30, 1e-4, 1e5, 1e30, torch.nan])
def test_one_token_of_any_magnitude(
    rings: torch.device, name: str, is_chained: bool, largest: float
) -> None:
    """In bfloat16, and some inputs are 10**8 times as large as others."""
    form = made(name, 48, 1024, rings)
    kernel = make_kernel(form, torch.bfloat16, is_chained)
    assert kernel is not None
    sizes = torch.logspace(-8, 0, 1024, device=rings)
    x = inputs(1, 1024, torch.bfloat16, rings).clamp(-1, 1) * (sizes * largest).bfloat16()
    actual = kernel.apply(x, None, Epilogue.NONE)
    wanted = (x.double() @ form.dequantize().t().double()).to(x.dtype)
    if largest < torch.inf:
        torch.testing.assert_close(actual, wanted, rtol=2**-7, atol=2**-7 * largest)
        assert relative(actual, wanted) < TOLERANCE or not largest
    else:
        assert not actual.isfinite().any()


PACKED_TILES = [
    (1024, 5, PackedTiles(8, 1, 2), Epilogue.NONE),
    (1152, 8, PackedTiles(8, 2, 3, splits=2), Epilogue.GELU),  # whose last stage is half
    (1024, 13, PackedTiles(16, 2, 1), Epilogue.SILU_MUL),
    (640, 3, PackedTiles(8, 2, 2, splits=2), Epilogue.SILU_MUL),
    (1024, 25, PackedTiles(32, 1, 2, ways=2), Epilogue.RELU),
    (1408, 20, PackedTiles(16, 1, 2, ways=2, splits=3), Epilogue.NONE),  # as partial sums
]


@pytest.mark.parametrize(
    ("group", "has_zeros", "size", "num_tokens", "tiles", "epilogue"),
    checkered([(128, False), (128, True), (0, True)], PACKED_TILES),
)
def test_few_tokens_times_4_bits_with_any_tiles(
    hopper: torch.device,
    group: int,
    has_zeros: bool,
    size: int,
    num_tokens: int,
    tiles: PackedTiles,
    epilogue: Epilogue,
) -> None:
    """group: 0 for one of all inputs."""
    dtype = torch.float16 if size == 640 else torch.bfloat16
    num_rows = 256 if epilogue.is_gated else 144  # of gates whole chunks
    dense = inputs(num_rows, size, torch.bfloat16, hopper) * size**-0.5
    form = GroupedInt.quantize(dense, 4, group or size)
    if has_zeros:
        zeros = torch.arange(form.scales.numel(), device=hopper) % 16
        form = replace(form, zeros=zeros.view(form.scales.shape).to(torch.int16))
    stored = StoredWeight.of(form)
    assert stored is not None
    x, bias = inputs(num_tokens, size, dtype, hopper), inputs(1, num_rows, dtype, hopper)[0]
    wanted = apply_epilogue(x.double() @ form.dequantize().t().double() + bias, epilogue)
    is_partial = size == 1408
    shape = (tiles.splits,) * is_partial + wanted.shape
    out = torch.full(shape, torch.nan, dtype=torch.float32 if is_partial else dtype, device=hopper)
    rounded = round_inputs(x, Rounding.INTEGERS)
    workspace = linear.split_workspace(hopper)
    for _ in range(2):  # and the workspace is ready for the next product
        linear_few_packed(
            rounded, stored, bias, out.fill_(torch.nan), epilogue, tiles, is_partial, workspace
        )
        if is_partial:
            assert relative(out.sum(dim=0), wanted) < 1e-4  # of inputs as integers
        else:
            assert relative(out, wanted) < 3e-3  # of results in 16 bits


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [2, 8, 13, 32])
@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "epilogue"),
    [
        (6144, 4096, Epilogue.NONE),  # Llama 3 8B
        (4096, 4096, Epilogue.NONE),
        (28672, 4096, Epilogue.SILU_MUL),
        (4096, 14336, Epilogue.NONE),
        (10240, 8192, Epilogue.NONE),  # Llama 3 70B
        (19456, 2560, Epilogue.SILU_MUL),  # Qwen3 4B
        (2560, 9728, Epilogue.NONE),
    ],
)
def test_few_tokens_times_4_bits_of_models(
    num_rows: int, size: int, epilogue: Epilogue, has_zeros: bool, num_tokens: int
) -> None:
    """One token has outliers, and one is not finite."""
    device = torch.device("cuda")
    form = GroupedInt.quantize(inputs(num_rows, size, torch.bfloat16, device) * size**-0.5, 4, 128)
    if has_zeros:
        zeros = torch.arange(form.scales.numel(), device=device) % 16
        form = replace(form, zeros=zeros.view(form.scales.shape).to(torch.int16))
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    assert kernel.rounding(num_tokens) is Rounding.INTEGERS
    x = inputs(num_tokens + 2, size, torch.bfloat16, device)[2:]
    x[0, ::500] *= 30_000
    y = x.double() @ form.dequantize().t().double()
    wanted = apply_epilogue(y, epilogue)
    first, again = (kernel.apply(x, None, epilogue) for _ in range(2))
    assert torch.equal(first, again)
    for token, expected in zip(first, wanted, strict=True):
        assert relative(token, expected) < 3e-3  # of results in bfloat16
    if epilogue is Epilogue.NONE:
        parts = kernel.apply_partial(x, None)
        if parts.dim() == 3:
            assert relative(parts.sum(dim=0), y) < 2e-4
    x[1, 7] = torch.inf
    spoiled = kernel.apply(x, None, epilogue)
    assert not spoiled[1].isfinite().any()
    others = torch.arange(num_tokens, device=device) != 1
    assert torch.equal(spoiled[others], first[others])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("size", "num_tokens"), [(352, 1), (352, 20)])
def test_integers_of_gguf_files(
    hopper: torch.device, bits: int, size: int, num_tokens: int
) -> None:
    """Q8_0 and Q4_0: groups of 32 with scales in float16, in a model of bfloat16."""
    dense = inputs(100, size, torch.float16, CPU)
    form = GroupedInt.quantize(dense, bits, 32).to(hopper)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    x = inputs(num_tokens, size, torch.bfloat16, hopper)
    wanted = x.float() @ form.dequantize().t()
    assert relative(kernel.apply(x, None, Epilogue.NONE), wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "size", "num_tokens"),
    checkered(
        ["float8-row", "float8-block", "int4-asymmetric", "int4-small"], [(1152, 20), (1280, 5)]
    ),
)
def test_all_candidates_of_tiles_compute_the_same(
    hopper: torch.device, name: str, size: int, num_tokens: int
) -> None:
    form = made(name, 256, size, hopper)
    stored = StoredWeight.of(form)
    assert stored is not None
    x = inputs(num_tokens, size, torch.bfloat16, hopper)
    wanted = apply_epilogue(x.float() @ form.dequantize().t(), Epilogue.SILU_MUL)
    product = Product.of(num_tokens, stored, is_gated=True)
    assert product is not None
    found = [tiles for tiles in candidates(product) if isinstance(tiles, Tiles)]
    assert len(found) >= 2
    found.append(replace(found[0], splits=3, scales_weights=True))
    found.append(replace(found[0], by_warp=not found[0].by_warp))
    found.append(replace(found[0], by_warp=False, scales_weights=True))
    for tiles in found:
        out = x.new_empty(num_tokens, 128)
        launch(x, stored, None, out, Epilogue.SILU_MUL, tiles, is_partial=False)
        assert relative(out, wanted) < TOLERANCE, tiles


@pytest.mark.parametrize(
    ("is_gated", "num_tokens", "memory", "splits"),
    [(False, 5, 56_000, [3, 1]), (True, 5, 30_000, [2]), (False, 50, 70_000, [2])],
)
def test_scales_of_small_groups_find_room(
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    is_gated: bool,
    num_tokens: int,
    memory: int,
    splits: list[int],
) -> None:
    """Of many inputs, in larger programs or in more splits; here there is little memory instead.

    More than 32 tokens may be multiplied by persistent programs, which come first.
    """
    form = made("int4-small", 256, 2304, hopper)
    stored = StoredWeight.of(form)
    assert stored is not None
    product = Product.of(num_tokens, stored, is_gated)
    assert product is not None
    monkeypatch.setattr(quantized_tiles, "_NUM_SMS", 1)
    monkeypatch.setattr(quantized_tiles, "_SHARED_MEMORY", memory)
    found = candidates.__wrapped__(product)
    assert [tiles.splits for tiles in found if not tiles.x_stages] == splits
    assert bool(found[0].x_stages) == (num_tokens > 32)
    epilogue = Epilogue.SILU_MUL if is_gated else Epilogue.NONE
    x = inputs(num_tokens, 2304, torch.bfloat16, hopper)
    wanted = apply_epilogue(x.float() @ form.dequantize().t(), epilogue)
    for tiles in found:
        out = x.new_empty(num_tokens, product.num_rows)
        launch(x, stored, None, out, epilogue, tiles, is_partial=False)
        assert relative(out, wanted) < TOLERANCE, tiles


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize(
    ("num_rows", "size", "is_gated"),
    [(28672, 8192, True), (8192, 28672, False), (53248, 16384, True), (16384, 53248, False)],
)
def test_few_tokens_are_multiplied_by_integers_of_any_group(
    num_rows: int, size: int, is_gated: bool, group: int
) -> None:
    """In the MLPs of Llama 3 70B and 405B; dequantizing first would take longer than bfloat16."""
    for tokens in (1, 8, 16, 32, 64):
        for tiles in candidates(Product(tokens, num_rows, size, INT4, group, False, is_gated)):
            assert tiles != LIBRARY
            if isinstance(tiles, Tiles):
                in_tiles = 2 * num_rows if is_gated else num_rows
                partial = 4 * tiles.splits * in_tiles * max(tokens, 8)
                assert tiles.splits == 1 or partial < 46 << 20, "partial sums find room"


SHARED_TILES = [
    (100, 128, 7, True, Epilogue.SILU_MUL),  # a program has steps of several tiles
    (300, 128, 4, True, Epilogue.NONE),  # and a whole one
    (300, 192, 5, True, Epilogue.NONE),
    (300, 256, 132, True, Epilogue.SILU_MUL),  # a tile has many programs
    (300, 320, 2, False, Epilogue.SILU_MUL),
    (300, 64, 3, True, Epilogue.NONE),
]
# How tiles are shared does not depend on the form: by day each way has every third form, and each
# form every third way.
SHARED_CASES = [
    pytest.param(*case, name, marks=pytest.mark.slow if (i + j) % 3 else ())
    for i, case in enumerate(SHARED_TILES)
    for j, name in enumerate(SERVED)
]


@pytest.mark.parametrize(
    ("num_tokens", "in_tile", "num_sms", "is_shared", "epilogue", "name"), SHARED_CASES
)
def test_persistent_programs_share_tiles_in_any_way(
    hopper: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    num_tokens: int,
    in_tile: int,
    num_sms: int,
    is_shared: bool,
    epilogue: Epilogue,
    name: str,
) -> None:
    monkeypatch.setattr(linear_quantized, "_num_sms", lambda device: num_sms)
    dtype = torch.bfloat16 if num_sms == 7 else torch.float16
    num_rows = 260
    if epilogue.is_gated:  # whole chunks, or pieces
        num_rows = 384 if name.startswith("int4") else 272
    form = made(name, num_rows, 1152, hopper)
    stored = StoredWeight.of(form)
    assert stored is not None
    product = Product.of(num_tokens, stored, epilogue.is_gated)
    assert product is not None
    tiles = persistent_tiles(product, in_tile, is_shared=is_shared)
    x, bias = inputs(num_tokens, 1152, dtype, hopper), inputs(1, num_rows, dtype, hopper)[0]
    out = x.new_empty(num_tokens, num_rows // 2 if epilogue.is_gated else num_rows)
    for _ in range(2):  # and are ready for the next product
        launch(x, stored, bias, out.fill_(torch.nan), epilogue, tiles, is_partial=False)
        wanted = apply_epilogue(x.float() @ form.dequantize().t() + bias.float(), epilogue)
        assert relative(out, wanted) < TOLERANCE


@pytest.mark.parametrize("name", ["float8-row", "int4-asymmetric"])
def test_a_kernel_computes_by_the_answers_to_its_questions(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    form = made(name, 256, 1152, hopper)
    kernel = make_kernel(form, torch.bfloat16)
    assert isinstance(kernel, Tunable)
    assert kernel.questions(2048) == []  # it was not used yet
    x = inputs(150, 1152, torch.bfloat16, hopper)
    wanted = apply_epilogue(x.float() @ form.dequantize().t(), Epilogue.SILU_MUL)
    kernel.apply(x, None, Epilogue.SILU_MUL)
    asked = kernel.questions(150)
    one = [] if name == "float8-row" else [1]  # FP8 has one way
    assert [question.rows for question in asked] == [*one, 8, 16, 32, 64, 128, 192]
    options = asked[-1].options
    assert len(options) > 5
    launched: list[Tiles] = []

    def note(*args: Any, **options: Any) -> None:
        launched.append(next(each for each in args if isinstance(each, Tiles)))
        launch(*args, **options)

    monkeypatch.setattr(linear_quantized, "launch", note)
    for option in options:
        launched.clear()
        asked[-1].work(option, 1)()
        kernel.adopt({asked[-1].key: option})
        assert relative(kernel.apply(x, None, Epilogue.SILU_MUL), wanted) < TOLERANCE
        assert launched == [option, option]


@pytest.mark.parametrize("bits", [4, 8])
def test_small_groups_need_not_fill_the_last_block(hopper: torch.device, bits: int) -> None:
    """Kernels load what four groups of a block have, also where the last block has one of them."""
    form = GroupedInt.quantize(torch.randn(16, 160) * 160**-0.5, bits, 32)
    zeros = torch.full(form.scales.shape, 5, dtype=torch.int16)
    assert_multiplies(replace(form, zeros=zeros).to(hopper), torch.float16)


@pytest.mark.parametrize("bits", [8, 4])
def test_all_inputs_of_an_output_may_share_a_zero_point(hopper: torch.device, bits: int) -> None:
    """Beside one scale for them, as GPTQ has with a group size of -1. Persistent programs look for
    a zero point in each block of inputs."""
    form = GroupedInt.quantize(torch.randn(40, 384) * 384**-0.5, bits, 384)
    zeros = torch.arange(40, dtype=torch.int16).view(form.scales.shape) % (1 << bits)
    assert_multiplies(replace(form, zeros=zeros).to(hopper), torch.bfloat16)


def assert_multiplies(form: GroupedInt, dtype: torch.dtype) -> None:
    """The kernel's product is that of the dequantized weights, for more tokens than few."""
    kernel = make_kernel(form, dtype)
    assert kernel is not None
    x = inputs(65, form.shape[1], dtype, form.scales.device)
    wanted = x.float() @ form.dequantize().t()
    assert relative(kernel.apply(x, None, Epilogue.NONE), wanted) < TOLERANCE


def test_what_is_measured_in_one_dtype_says_nothing_of_another(hopper: torch.device) -> None:
    keys = []
    for dtype in (torch.bfloat16, torch.float16):
        kernel = make_kernel(made("int4", 256, 1152, hopper), dtype)
        assert isinstance(kernel, Tunable)
        kernel.apply(inputs(40, 1152, dtype, hopper), None, Epilogue.NONE)
        keys.append({repr(each.key) for each in kernel.questions(2048)})
    assert keys[0]
    assert keys[0].isdisjoint(keys[1])


@pytest.mark.parametrize(
    ("name", "epilogue"), [("int4-asymmetric", Epilogue.SILU_MUL), ("float8-row", Epilogue.NONE)]
)
def test_many_tokens_are_multiplied_by_a_dequantized_copy(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, name: str, epilogue: Epilogue
) -> None:
    form = made(name, 256, 1152, hopper)
    kernel = make_kernel(form, torch.bfloat16, dequantized_copy=True)
    assert kernel is not None
    assert kernel._copy is not None
    assert kernel._copy.dtype == torch.bfloat16
    assert relative(kernel._copy, form.dequantize()) < 4e-3  # the interpreter cuts off bits
    launched: list[int] = []

    def note(x: Tensor, *args: Any, **options: Any) -> None:
        launched.append(len(x))
        launch(x, *args, **options)

    monkeypatch.setattr(linear_quantized, "launch", note)
    # The copy alone is read from here on.
    monkeypatch.delattr(linear_quantized, "dequantize")
    for num_tokens in (40, 300, 2049):
        x = inputs(num_tokens, 1152, torch.bfloat16, hopper)
        y = x.float() @ form.dequantize().t()
        assert relative(kernel.apply(x, None, epilogue), apply_epilogue(y, epilogue)) < TOLERANCE
        parts = kernel.apply_partial(x, None)
        assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, y) < TOLERANCE
    assert set(launched) <= {40}
    asked = kernel.questions(300)[-1]
    assert asked.options[0] == LIBRARY
    assert len(asked.options) > 1
    for option in asked.options[:2]:
        asked.work(option, 1)()
    kernel.adopt({asked.key: asked.options[1]})
    kernel.apply(x[:300], None, epilogue)
    assert launched[-1] == 300


@pytest.mark.parametrize("has_copy", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 20])
def test_weights_that_were_just_dequantized_are_not_loaded_early(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, num_tokens: int, has_copy: bool
) -> None:
    """Our kernels load weights before the preceding ones have ended, of which one writes these."""
    monkeypatch.setattr(linear_quantized, "candidates", lambda product: (LIBRARY,))
    form = made("int4", 256, 1152, hopper)
    kernel = make_kernel(form, torch.bfloat16, dequantized_copy=has_copy)
    assert kernel is not None
    kernel._takes_integers = False
    read: list[Tensor] = []

    def note(x: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
        read.append(weight)
        return x @ weight.t()

    monkeypatch.setattr(linear, "_is_fast", lambda x, weight: True)
    monkeypatch.setattr(linear, "linear_one", note)
    monkeypatch.setattr(linear, "launch_dense", note)
    x = inputs(num_tokens, 1152, torch.bfloat16, hopper)
    kernel.apply(x, None, Epilogue.NONE)
    kernel.apply_partial(x, None)
    assert all(weight is kernel._copy for weight in read)
    assert len(read) == (2 if has_copy else 0)


def test_weights_of_another_model_leave_a_workspace_where_it_is(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured graphs have its address."""
    monkeypatch.setattr(linear_quantized, "_workspaces", {})
    first, second, third = (
        make_kernel(made("int4", num_rows, 256, hopper), torch.bfloat16)
        for num_rows in (128, 256, 512)
    )
    assert first is not None
    assert second is not None
    assert third is not None
    place = second._dense(torch.bfloat16).data_ptr()
    assert first._dense(torch.bfloat16).data_ptr() == place, "one for all weights of a model"
    larger = make_kernel(made("int4", 1024, 256, hopper), torch.bfloat16)
    assert larger is not None
    assert larger._dense(torch.bfloat16).data_ptr() != place
    assert first._dense(torch.bfloat16).data_ptr() == place


def test_weights_of_models_in_two_threads_are_multiplied_by_their_own_inputs(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are dequantized into one place; here the threads launch their kernels in turns, unless
    something keeps them from it."""
    monkeypatch.setattr(linear_quantized, "_workspaces", {})
    monkeypatch.setattr(linear_quantized, "candidates", lambda product: (LIBRARY,))
    kernels, dense = [], {}
    for num_rows in (128, 256):
        kernel = make_kernel(made("int4", num_rows, 256, hopper), torch.bfloat16)
        assert kernel is not None
        kernel._takes_integers = False
        kernels.append(kernel)
    for kernel in kernels:
        dense[kernel._stored.shape[0]] = kernel._dense(torch.bfloat16).clone()
    x = inputs(20, 256, torch.bfloat16, hopper)
    calls = [
        [partial(kernel.apply, x, None, Epilogue.NONE), partial(kernel.apply_partial, x, None)]
        for kernel in kernels
    ]
    expected = [[call() for call in part] for part in calls]
    turn = Barrier(2)

    def dequantize_in_turn(stored: StoredWeight, out: Tensor) -> None:
        out.copy_(dense[stored.shape[0]])  # the interpreter runs one kernel at a time
        with suppress(BrokenBarrierError):  # the other thread does not get here
            turn.wait(0.2)

    monkeypatch.setattr(linear_quantized, "dequantize", dequantize_in_turn)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda part: [call() for call in part], calls))
    for results, wanted in zip(found, expected, strict=True):
        for result, other in zip(results, wanted, strict=True):
            torch.testing.assert_close(result, other)


def test_which_products_read_a_dequantized_copy() -> None:
    """Those of Llama 3 8B that took less time with bfloat16 on an H200 than with int4; most of them
    are within a few percent at 1,024 tokens."""
    many = {1024, 1536, 2048}
    for num_rows, size, is_gated, by_copy in (
        (6144, 4096, False, {192, 256, 320, 384, 512, 768, *many}),
        (4096, 4096, False, {192, 256, 320, 384, 512, 768, *many}),
        (14336, 4096, True, {320, 384, *many}),
        (4096, 14336, False, {320, 384, 512, *many}),
    ):
        for tokens in SIZES:
            product = Product(tokens, num_rows, size, INT4, 128, False, is_gated)
            assert candidates(product)[0] != LIBRARY
            has_copy = tokens >= 192
            first = candidates(replace(product, has_copy=has_copy))[0]
            assert (first == LIBRARY) == (tokens in by_copy), (num_rows, size, tokens)


def test_gates_that_are_not_whole_pieces_have_other_tiles() -> None:
    for tokens in SIZES:
        product = Product(tokens, 1001, 4096, INT8, 128, False, is_gated=True)
        with_copy = candidates(replace(product, has_copy=tokens >= 192))
        for found in (candidates(product), with_copy):
            assert not any(isinstance(tiles, Tiles) and tiles.x_stages for tiles in found)
            assert tokens <= 512 or found == (LIBRARY,)
        assert (LIBRARY in with_copy) == (tokens >= 192)


@pytest.mark.parametrize("name", SERVED)
def test_rows_that_are_not_finite_spoil_no_others(hopper: torch.device, name: str) -> None:
    form = made(name, 128, 256, hopper)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    for num_tokens in (5, 64, 300):
        x = inputs(num_tokens, 256, torch.bfloat16, hopper)
        clean = kernel.apply(x, None, Epilogue.NONE)
        x[3] = torch.nan
        spoiled = kernel.apply(x, None, Epilogue.NONE)
        assert spoiled[3].isnan().all()
        others = torch.arange(num_tokens, device=hopper) != 3
        assert torch.equal(spoiled[others], clean[others])


@pytest.mark.parametrize("has_copy", [False, True])
def test_inputs_may_stand_in_another_order(hopper: torch.device, has_copy: bool) -> None:
    weight = torch.randn(128, 256, device=hopper)
    permutation = torch.randperm(256, device=hopper)
    plain = GroupedInt.quantize(weight, 4, 128)
    form = GroupedInt.from_values(plain.values(), plain.scales, None, 4, permutation)
    dtype = torch.float16 if has_copy else torch.bfloat16
    kernel = make_kernel(form, dtype, dequantized_copy=has_copy)
    assert kernel is not None
    for num_tokens in (300,) if has_copy else (1, 20, 300):
        x = inputs(num_tokens, 256, dtype, hopper)
        wanted = x.float() @ form.dequantize().t()
        assert relative(kernel.apply(x, None, Epilogue.NONE), wanted) < TOLERANCE
        parts = kernel.apply_partial(x, None)
        assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, wanted) < TOLERANCE


@pytest.mark.parametrize(
    ("num_tokens", "size", "epilogue"),
    checkered([(2, 272), (8, 2304), (13, 720), (40, 272)], EPILOGUES),
)
def test_inputs_of_few_tokens_are_two_numbers_each(
    hopper: torch.device, num_tokens: int, size: int, epilogue: Epilogue
) -> None:
    """Which a kernel makes of them, or a norm; of any magnitude in each token."""
    form = ScaledFloat8.quantize(inputs(140, size, torch.float32, hopper), (1, size))
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    x, bias = (
        inputs(num_tokens, size, torch.bfloat16, hopper),
        inputs(1, 140, torch.bfloat16, hopper)[0],
    )
    x[:, ::7] *= 1000
    x[1] *= 1e-9
    y = x.float() @ form.dequantize().t() + bias.float()
    rounding = kernel.rounding(num_tokens)
    assert rounding is Rounding.IN_TWO
    rounded = round_inputs(x, rounding)
    for actual in (kernel.apply(x, bias, epilogue), kernel.apply_rounded(rounded, bias, epilogue)):
        for token, wanted in zip(actual, apply_epilogue(y, epilogue), strict=True):
            assert relative(token, wanted) < TOLERANCE
    parts = kernel.apply_partial(x, None)
    assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, y - bias.float()) < TOLERANCE
    x[1, 200] = torch.inf
    spoiled = kernel.apply(x, bias, epilogue)
    assert spoiled[1].isnan().all()
    assert spoiled.isnan().any(dim=1).sum() == 1


@pytest.mark.parametrize("epilogue", [Epilogue.GELU, Epilogue.SILU_MUL])
@pytest.mark.parametrize("num_tokens", [2, 13])
def test_tiles_make_two_numbers_of_results_for_the_next_product(
    hopper: torch.device, num_tokens: int, epilogue: Epilogue
) -> None:
    """Of which those of a tile's rows share a scale, whose products are scaled by themselves."""
    middle, size = 592, 272
    up, down = (
        ScaledFloat8.quantize(inputs(*shape, torch.float32, hopper), (1, shape[1]))
        for shape in ((middle * (2 if epilogue.is_gated else 1), size), (140, middle))
    )
    first, second = (make_kernel(form, torch.bfloat16) for form in (up, down))
    assert first is not None
    assert second is not None
    x = inputs(num_tokens, size, torch.bfloat16, hopper)
    x[1] *= 1e-9
    bias = inputs(1, up.shape[0], torch.bfloat16, hopper)[0] * 1e-3
    rounding = second.part_rounding(num_tokens)
    assert rounding is Rounding.IN_TWO
    assert first.rounds_results(num_tokens, epilogue, rounding)
    given = round_inputs(x, rounding)
    plain = first.apply_rounded(given, bias, epilogue)
    rounded = first.apply_and_round(given, bias, epilogue, rounding)
    assert rounded.group == 64
    assert rounded.values.shape == (num_tokens, 2, middle)
    scales = rounded.scales[:, :num_tokens].t().repeat_interleave(64, dim=1)[:, :middle]
    assert relative(rounded.values.float().sum(dim=1) * scales, plain) < 1e-4
    exact = plain.double() @ down.dequantize().double().t()
    parts = second.apply_rounded_partial(rounded, None)
    assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, exact) < TOLERANCE
    assert relative(second.apply_rounded(rounded, None, Epilogue.NONE), exact) < TOLERANCE
    x[1, 200] = torch.inf
    rounded = first.apply_and_round(round_inputs(x, rounding), None, epilogue, rounding)
    spoiled = second.apply_rounded(rounded, None, Epilogue.NONE)
    assert spoiled[1].isnan().all()
    assert spoiled.isnan().any(dim=1).sum() == 1


@pytest.mark.parametrize("num_tokens", [33, 64])
@pytest.mark.parametrize("size", [272, 1360])
def test_what_knows_parts_of_tokens_rounds_512_inputs_at_once(
    hopper: torch.device, num_tokens: int, size: int
) -> None:
    dense = torch.randn(144, size, device=hopper)
    form = ScaledFloat8.quantize(dense, (1, size), quantizes_inputs=True)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    assert kernel.rounding(num_tokens) is Rounding.TOKENS
    rounding = kernel.part_rounding(num_tokens)
    assert rounding is Rounding.SPANS
    assert not kernel.rounds_results(num_tokens, Epilogue.NONE, rounding)
    x, bias = inputs(num_tokens, size, torch.bfloat16, hopper), dense[:, 0].bfloat16()
    x[:, :512] *= 1000  # which would leave others no bits if a token had one scale
    rounded = round_inputs(x, rounding)
    scales = rounded.scales[:, :num_tokens].t().repeat_interleave(512, dim=1)[:, :size]
    y = (rounded.values.float() * scales) @ form.dequantize().t() + bias.float()
    assert relative(kernel.apply_rounded(rounded, bias, Epilogue.NONE), y) < TOLERANCE
    parts = kernel.apply_rounded_partial(rounded, bias)
    assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, y) < TOLERANCE


def test_which_inputs_are_rounded_in_parts() -> None:
    few, many = 16, 65
    dense = torch.randn(256, 512)
    for form, of_few, of_many in (
        (ScaledFloat8.quantize(dense, (1, 512), True), Rounding.IN_TWO, Rounding.NONE),
        (ScaledFloat8.quantize(dense, (128, 128), True), Rounding.NONE, Rounding.GROUPS),
        (GroupedInt.quantize(dense, 4, 128), Rounding.INTEGERS, Rounding.NONE),
    ):
        stored = StoredWeight.of(form)
        assert stored is not None
        kernel = linear_quantized.QuantizedCudaLinear(stored, None, torch.bfloat16)
        assert kernel.part_rounding(few) is of_few
        assert kernel.part_rounding(many) is of_many
        assert kernel.rounds_results(few, Epilogue.NONE, of_few) is (of_few is Rounding.IN_TWO)


def test_rounded_inputs_have_no_use_for_a_copy(hopper: torch.device) -> None:
    form = ScaledFloat8.quantize(torch.randn(64, 256, device=hopper), (1, 256), True)
    for dtype, has_copy in ((torch.bfloat16, False), (torch.float16, True)):
        kernel = make_kernel(form, dtype, dequantized_copy=True)
        assert kernel is not None
        assert (kernel._copy is not None) == has_copy


@pytest.mark.parametrize(("num_tokens", "epilogue"), checkered([40, 65, 150, 700], EPILOGUES))
def test_inputs_are_rounded_if_the_model_was_made_for_it(
    hopper: torch.device, num_tokens: int, epilogue: Epilogue
) -> None:
    if hopper.type == "cpu" and num_tokens == 700:
        pytest.skip("needs torch's FP8 product")
    dense = torch.randn(256, 512, device=hopper)
    form = ScaledFloat8.quantize(dense, (1, 512), quantizes_inputs=True)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    x, bias = inputs(num_tokens, 512, torch.bfloat16, hopper), dense[:, 0].bfloat16()
    rounded, scales, _ = round_inputs(x, Rounding.TOKENS)
    y = (rounded.float() * scales) @ form.dequantize().t() + bias.float()
    assert relative(kernel.apply(x, bias, epilogue), apply_epilogue(y, epilogue)) < TOLERANCE
    parts = kernel.apply_partial(x, bias)
    assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, y) < TOLERANCE


@pytest.mark.parametrize(
    ("num_tokens", "epilogue"),
    [
        *checkered([100, 40], EPILOGUES),
        *(pytest.param(700, each, marks=pytest.mark.slow) for each in EPILOGUES),
    ],
)
def test_inputs_are_rounded_in_groups_if_weights_have_blocks(
    hopper: torch.device, num_tokens: int, epilogue: Epilogue
) -> None:
    dense = torch.randn(320, 1152, device=hopper)
    form = ScaledFloat8.quantize(dense, (128, 128), quantizes_inputs=True)
    kernel = make_kernel(form, torch.bfloat16)
    assert kernel is not None
    x, bias = inputs(num_tokens, 1152, torch.bfloat16, hopper), dense[:, 0].bfloat16()
    x[:, :128] *= 1000  # which would leave others no bits if a token had one scale
    rounded, padded, _ = round_inputs(x, Rounding.GROUPS)
    scales = padded[:, :num_tokens].t()
    groups = x.float().view(num_tokens, -1, 128)
    assert torch.allclose(scales, groups.abs().amax(dim=-1) / 448)
    values = rounded.float().view(groups.shape) * scales.unsqueeze(-1)
    if hopper.type == "cuda":  # the interpreter rounds 126 to 64
        assert (values - groups).norm() < 0.04 * groups.norm()
    y = values.flatten(1) @ form.dequantize().t() + bias.float()
    assert relative(kernel.apply(x, bias, epilogue), apply_epilogue(y, epilogue)) < TOLERANCE
    parts = kernel.apply_partial(x, bias)
    assert relative(parts.sum(dim=0) if parts.dim() == 3 else parts, y) < TOLERANCE
    x[3, 200] = torch.inf
    spoiled = kernel.apply(x, bias, epilogue)
    assert spoiled[3].isnan().all()
    assert spoiled.isnan().any(dim=1).sum() == 1


@pytest.mark.parametrize("rounding", [Rounding.TOKENS, Rounding.GROUPS, Rounding.INTEGERS])
def test_a_norm_rounds_for_projections_that_would_round_its_result(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch, rounding: Rounding
) -> None:
    monkeypatch.setattr(layers_linear, "make_quantized_kernel", make_kernel)
    monkeypatch.setattr(layers_norm, "_norm_on", lambda x: cuda_norm.norm)
    sizes: list[int] = []

    def noted(x: Tensor, rounding: Rounding) -> RoundedInputs:
        sizes.append(x.shape[1])
        return round_inputs(x, rounding)

    monkeypatch.setattr(linear_quantized, "round_inputs", noted)
    config = MLPConfig(
        kind="gated",
        hidden_size=256,
        intermediate_size=384,
        activation="silu",
        linear_method="quantized",
    )
    mlp = DenseMLP(config)
    for projection in (mlp.up, mlp.down):
        assert isinstance(projection, QuantizedLinear)
        for slot in projection.places():
            assert isinstance(slot, WeightSlot)
            num_rows, size = slot.shape
            dense = inputs(num_rows, size, torch.bfloat16, hopper) * size**-0.5
            block = (1, size) if rounding is Rounding.TOKENS else (128, 128)
            form: QuantizedWeight = ScaledFloat8.quantize(dense, block, quantizes_inputs=True)
            if rounding is Rounding.INTEGERS:
                form = GroupedInt.quantize(dense, 4, 128)
            slot.put(form, torch.bfloat16)
        projection.finalize()
    norm = RMSNorm(NormConfig("rms", 256, 1e-5))
    scale = inputs(1, 256, torch.bfloat16, hopper)[0]
    norm.weight = torch.nn.Parameter(scale, requires_grad=False)
    few = Rounding.IN_TWO if rounding is Rounding.TOKENS else Rounding.NONE
    roundings = (few, rounding)  # of 16 tokens, and of 40
    if rounding is Rounding.INTEGERS:
        roundings = (rounding, Rounding.NONE)
    for num_tokens, expected in zip((16, 40), roundings, strict=True):
        assert mlp.entry.rounding(num_tokens) is expected
        # Two numbers for the second projection are made by the tiles of the first one.
        sizes_in_mlp = [] if expected in (Rounding.NONE, Rounding.IN_TWO) else [384]
        x, residual = inputs(2 * num_tokens, 256, torch.bfloat16, hopper).view(2, -1, 256)
        normed, total = norm.forward(x, residual.clone())
        wanted = mlp.forward(normed)
        sizes.clear()
        given, same_total = norm.forward_for(mlp, x, residual.clone())
        assert torch.equal(mlp.forward(given), wanted)
        assert torch.equal(total, same_total)
        assert sizes == sizes_in_mlp


def test_the_emulator_carries_out_a_kernel_that_gpus_have_run() -> None:
    x, weight = inputs(5, 256, torch.bfloat16, CPU), inputs(100, 256, torch.bfloat16, CPU)
    bias, out = inputs(1, 100, torch.bfloat16, CPU)[0], torch.empty(5, 100, dtype=x.dtype)
    sums, arrivals = torch.empty(1 << 16), torch.zeros(8, dtype=torch.int32)
    operands = Descriptor(x, 16, 64), Descriptor(weight, 64, 64), None, None
    constants = {"SPLITS": 2, "PARTIAL": False, "SWAP": False, "EPILOGUE": 0, "GATED": False}
    constants |= {"HAS_BIAS": True, "EARLY": False, "PDL": False, "STAGES": 2, "num_warps": 4}
    constants |= {"HAS_SCALES": False, "NUMBERS": 1, "GROUP": 0, "ROUNDS": False}
    sizes = (5, 100, 256, 2, 0, 0, 1)
    run(
        linear_kernel,
        (1, 2, 2),
        *operands,
        None,
        None,
        bias,
        out,
        None,
        sums,
        arrivals,
        *sizes,
        **constants,
    )
    assert relative(out, x.float() @ weight.float().t() + bias.float()) < TOLERANCE
    assert not arrivals.any()
