"""Few tokens times weights in 12 bits, against float64 products of what the weights stand for."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import Emulated
from linear_cases import relative_error
from torch import Tensor

from octavo.float12 import has_use, most_tokens
from octavo.ops.cuda import linear_hopper_float12
from octavo.ops.cuda.float12 import pack_float12, unpack_float12
from octavo.ops.cuda.linear_hopper_float12 import (
    Float12Tiles,
    choose_float12_tiles,
    linear_float12,
)
from octavo.ops.epilogue import Epilogue, apply_epilogue

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device; a CPU in the place of a Hopper GPU."""
    if device.type == "cpu":
        kernel = Emulated(linear_hopper_float12.linear_float12_kernel)
        monkeypatch.setattr(linear_hopper_float12, "linear_float12_kernel", kernel)
    return device


TWO_TILES = Float12Tiles(128, warpgroups=2, blocks=1, height=2, per_sm=1)


def random(*shape: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("num_rows", "size", "num_tokens", "tiles"),
    [
        (75, 320, 1, Float12Tiles(8)),
        (200, 320, 11, Float12Tiles(16, height=2)),
        (104, 704, 13, Float12Tiles(16, fold=2)),
        (43, 320, 2, Float12Tiles(8, fold=4, warpgroups=2, blocks=1)),
        (296, 192, 40, Float12Tiles(64, warpgroups=2)),
        (520, 128, 70, Float12Tiles(128, warpgroups=2, height=2, blocks=1, per_sm=1)),
    ],
)
def test_few_tokens(
    hopper: torch.device,
    num_rows: int,
    size: int,
    num_tokens: int,
    tiles: Float12Tiles,
    has_bias: bool,
) -> None:
    """Sizes that no tile divides."""
    weight = pack_float12(random(num_rows, size, device=hopper))
    x, bias = (random(each, size, device=hopper) for each in (num_tokens, num_rows))
    shift = bias[:, 0].contiguous() if has_bias else None
    wanted = x.double() @ unpack_float12(weight, torch.float64).t()
    if shift is not None:
        wanted += shift.double()
    y = linear_float12(x, weight, shift, tiles=tiles)
    assert y.shape == wanted.shape
    assert relative_error(y, wanted) < 3e-3  # of results in bfloat16


@pytest.mark.parametrize(
    ("num_rows", "size", "num_tokens", "tiles", "epilogue"),
    [
        (208, 320, 3, Float12Tiles(8), Epilogue.SILU_MUL),
        (176, 704, 13, Float12Tiles(16, fold=2), Epilogue.GELU_TANH_MUL),
        (48, 320, 2, Float12Tiles(8, fold=4, blocks=1), Epilogue.SILU_MUL),
        (304, 192, 40, Float12Tiles(64, warpgroups=2), Epilogue.SILU_MUL),
        (416, 192, 70, TWO_TILES, Epilogue.SILU_MUL),
        (200, 320, 11, Float12Tiles(16, height=2), Epilogue.RELU),
    ],
)
def test_epilogues(
    hopper: torch.device,
    num_rows: int,
    size: int,
    num_tokens: int,
    tiles: Float12Tiles,
    epilogue: Epilogue,
) -> None:
    """Gates and ups that no tile divides; other epilogues."""
    weight = pack_float12(random(num_rows, size, device=hopper) * size**-0.5)
    x, bias = (random(each, size, device=hopper) for each in (num_tokens, num_rows))
    shift = bias[:, 0].contiguous()
    sums = x.double() @ unpack_float12(weight, torch.float64).t() + shift.double()
    wanted = apply_epilogue(sums, epilogue)
    y = linear_float12(x, weight, shift, epilogue, tiles)
    assert y.shape == wanted.shape
    assert relative_error(y, wanted) < 4e-3  # of results in bfloat16


def test_a_token_s_result_does_not_depend_on_the_others(hopper: torch.device) -> None:
    """Not even on NaN."""
    weight = pack_float12(random(128, 192, device=hopper))
    x = random(5, 192, device=hopper)
    tiles = Float12Tiles(8, fold=4)
    alone = linear_float12(x, weight, None, tiles=tiles)
    x[1:] = torch.nan
    beside = linear_float12(x, weight, None, tiles=tiles)
    assert torch.equal(alone[0], beside[0])
    assert beside[1:].isnan().all()


MODELS = [
    (201088, 2880),  # gpt-oss-20b: head, projections of attention
    (5120, 2880),
    (2880, 4096),
    (151936, 2048),  # Qwen3-30B-A3B
    (5120, 2048),
    (2048, 4096),
    (128256, 4096),  # Llama 3 8B
    (262208, 2560),  # Gemma 3 4B
    (50257, 768),  # no tile divides it
    (28672, 4096),  # a layer of Llama 3 8B
    (6144, 4096),
    (4096, 14336),
    (20480, 2560),  # of Gemma 3 4B
    (2560, 10240),
    (9216, 9216),  # of a rank of four of OPT-66B
]


@pytest.mark.parametrize(("num_rows", "size"), [*MODELS, (1024, 64), (33000, 14336)])
def test_tiles_fit(num_rows: int, size: int) -> None:
    for num_tokens in range(1, 129):
        if num_tokens > most_tokens(num_rows):
            break
        tiles = choose_float12_tiles(num_tokens, num_rows, size, 132)
        assert num_tokens <= tiles.tokens < 2 * max(num_tokens, 8)
        assert tiles.per_sm * tiles.stages(size) * tiles.stage_bytes <= 227 << 10


def test_which_products_pay() -> None:
    limits = {128256: 128, 33792: 128, 28672: 64, 9216: 32, 5120: 16, 2560: 8, 1024: 4}
    assert {num_rows: most_tokens(num_rows) for num_rows in limits} == limits
    assert has_use(2048, 4096)
    assert not any(has_use(*each) for each in ((512, 1 << 20), (2048, 1024), (4096, 4100)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
@pytest.mark.parametrize("num_tokens", [1, 2, 8, 13, 32, 64, 100])
@pytest.mark.parametrize(("num_rows", "size"), MODELS)
def test_projections_of_models(
    num_rows: int, size: int, num_tokens: int, epilogue: Epilogue
) -> None:
    if num_tokens > most_tokens(num_rows) or (epilogue.is_gated and num_rows % 16):
        pytest.skip("not computed by the copy")
    device = torch.device("cuda")
    weight = pack_float12(random(num_rows, size, device=device) * size**-0.5)
    x = random(num_tokens, size, device=device)
    wanted = apply_epilogue(x.float() @ unpack_float12(weight, torch.float32).t(), epilogue)
    y = linear_float12(x, weight, None, epilogue)
    assert torch.equal(y, linear_float12(x, weight, None, epilogue))
    assert relative_error(y, wanted) < 4e-3  # of results in bfloat16
