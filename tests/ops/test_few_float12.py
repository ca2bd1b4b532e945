"""Few tokens times weights in 12 bits, against float64 products of what the weights stand for."""

from __future__ import annotations

import pytest
import torch
from gluon_emulator import Emulated
from torch import Tensor

from octavo.ops.cuda import linear_hopper_float12
from octavo.ops.cuda.float12 import pack_float12, unpack_float12
from octavo.ops.cuda.linear_hopper_float12 import (
    Float12Tiles,
    choose_float12_tiles,
    linear_few_float12,
)
from octavo.ops.epilogue import Epilogue, apply_epilogue

pytestmark = pytest.mark.usefixtures("poisoned")


@pytest.fixture
def hopper(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """The device; a CPU in the place of a Hopper GPU."""
    if device.type == "cpu":
        workspace = torch.empty(1 << 18), torch.zeros(1 << 10, dtype=torch.int32)
        kernel = Emulated(linear_hopper_float12.linear_float12_kernel)
        monkeypatch.setattr(linear_hopper_float12, "linear_float12_kernel", kernel)
        monkeypatch.setattr(linear_hopper_float12, "_workspace", lambda device: workspace)
    return device


def random(*shape: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(device, torch.bfloat16)


def relative(actual: Tensor, wanted: Tensor) -> float:
    return float((actual.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.SILU_MUL])
@pytest.mark.parametrize(
    ("num_rows", "size", "num_tokens", "tiles"),
    [
        (75, 320, 5, Float12Tiles(8, 1, 2)),
        (200, 320, 11, Float12Tiles(8, 2, 3, blocks=1, splits=3)),
        (296, 192, 3, Float12Tiles(16, 1, 2, height=2, per_sm=2, early=True)),
        (104, 704, 17, Float12Tiles(32, 1, 2, fold=2, splits=2)),
        (72, 320, 2, Float12Tiles(8, 2, 2, blocks=1, fold=4, height=2)),
        (520, 128, 40, Float12Tiles(64, 4, 2, blocks=1)),
    ],
)
def test_few_tokens(
    hopper: torch.device,
    num_rows: int,
    size: int,
    num_tokens: int,
    tiles: Float12Tiles,
    epilogue: Epilogue,
) -> None:
    """Sizes that no tile divides; results, and partial sums."""
    num_rows = num_rows // 8 * 16 if epilogue.is_gated else num_rows
    weight = pack_float12(random(num_rows, size, device=hopper))
    x, bias = (random(each, size, device=hopper) for each in (num_tokens, num_rows))
    bias = bias[:, 0].contiguous()
    y = x.double() @ unpack_float12(weight, torch.float64).t() + bias.double()
    wanted = apply_epilogue(y, epilogue)
    for is_partial in (False, True) if epilogue is Epilogue.NONE else (False,):
        shape = (tiles.splits, *wanted.shape) if is_partial else wanted.shape
        dtype = torch.float32 if is_partial else x.dtype
        out = torch.empty(shape, dtype=dtype, device=hopper)
        for _ in range(2):  # and the workspace is ready for the next product
            out.fill_(torch.nan)
            linear_few_float12(x, weight, bias, out, epilogue, tiles, is_partial)
            if is_partial:
                assert relative(out.sum(dim=0), wanted) < 1e-6
            else:
                assert relative(out, wanted) < 3e-3  # of results in bfloat16


SHAPES = [
    (5120, 2880, Epilogue.NONE),  # gpt-oss-20b
    (2880, 4096, Epilogue.NONE),
    (201088, 2880, Epilogue.NONE),
    (5120, 2048, Epilogue.NONE),  # Qwen3-30B-A3B
    (2048, 4096, Epilogue.NONE),
    (151936, 2048, Epilogue.NONE),
    (6144, 4096, Epilogue.NONE),  # Llama 3 8B
    (4096, 4096, Epilogue.NONE),
    (28672, 4096, Epilogue.SILU_MUL),
    (4096, 14336, Epilogue.NONE),
]


@pytest.mark.parametrize(("num_rows", "size", "epilogue"), [*SHAPES, (64, 64, Epilogue.NONE)])
def test_tiles_fit(num_rows: int, size: int, epilogue: Epilogue) -> None:
    results = num_rows // 2 if epilogue.is_gated else num_rows
    for num_tokens in (2, 8, 9, 32, 33, 64):
        tiles = choose_float12_tiles(num_tokens, results, size, epilogue)
        assert tiles is not None
        assert num_tokens <= tiles.tokens < 2 * max(num_tokens, 8)
        words = tiles.warpgroups * tiles.height * 8 * 768
        stage = tiles.blocks * (words + tiles.fold * tiles.tokens * 128)
        assert tiles.per_sm * tiles.stages * stage <= 227 << 10
    assert choose_float12_tiles(65, results, size, epilogue) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("num_tokens", [2, 8, 13, 32, 64])
@pytest.mark.parametrize(("num_rows", "size", "epilogue"), SHAPES)
def test_few_tokens_of_models(
    num_rows: int, size: int, epilogue: Epilogue, num_tokens: int
) -> None:
    device = torch.device("cuda")
    weight = pack_float12(random(num_rows, size, device=device) * size**-0.5)
    x = random(num_tokens, size, device=device)
    y = x.float() @ unpack_float12(weight, torch.float32).t()
    wanted = apply_epilogue(y, epilogue)
    tiles = choose_float12_tiles(num_tokens, wanted.shape[1], size, epilogue)
    assert tiles is not None
    outs = [torch.empty_like(wanted, dtype=x.dtype) for _ in range(2)]
    for out in outs:
        linear_few_float12(x, weight, None, out, epilogue, tiles, is_partial=False)
    assert torch.equal(*outs)
    assert relative(outs[0], wanted) < 3e-3  # of results in bfloat16
