"""The Triton backend against the reference: in Triton's interpreter, and on a GPU at real sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import Bench, Case

pytest.importorskip("triton")

GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# Decodes around tiles, a context that is split, a prompt, and a continued one.
SMALL = ((0, 1), (15, 1), (150, 1), (0, 20), (13, 19))
SMALL_CASES = [
    Case(SMALL, head_dim=16, group=2, num_kv_heads=2, rotary_dim=16),
    Case(SMALL, head_dim=20, group=3, num_kv_heads=1, block_size=8, window=30, head_norm=True),
    Case(SMALL[2:], head_dim=17, group=1, num_kv_heads=1, block_size=48, rotary_dim=8),
    Case(((3, 1), (40, 1)), head_dim=32, group=16, num_kv_heads=1, block_size=256, head_norm=True),
    Case(SMALL[3:], head_dim=16, group=4, num_kv_heads=1, block_size=1, window=1),
]

# Mixed batches, then pure ones.
LARGE = (
    ((0, 1), (5, 1), (0, 37), (40, 30), (100, 1), (127, 1), (64, 65), (15, 2), (0, 64), (1000, 1)),
    ((0, 600), (256, 257), (900, 1), (0, 1000), (1, 513)),
    tuple((cached, 1) for cached in range(1, 1000, 40)),
)
LARGE_CASES = [
    Case(sequences, block_size, num_kv_heads, group, head_dim, window, dtype, rotary_dim, norm)
    for sequences in LARGE
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for block_size, num_kv_heads, group, head_dim, window, rotary_dim, norm in (
        (16, 8, 4, 128, None, 128, False),
        (16, 4, 1, 128, None, None, False),
        (16, 2, 2, 128, None, 128, True),
        (8, 2, 3, 64, 50, 64, False),
        (32, 1, 16, 256, None, 64, True),
        (256, 2, 7, 128, 300, 128, False),
        (128, 2, 5, 80, None, 80, False),
        (64, 1, 6, 96, 1, 96, False),
        (1, 2, 2, 64, None, 64, False),
        (48, 2, 4, 100, None, 20, False),
    )
]


def describe(case: Case) -> str:
    name = f"{str(case.dtype)[6:]}-block{case.block_size}-dim{case.head_dim}-group{case.group}"
    return f"{name}-window{case.window}-seqs{len(case.sequences)}"


def check(case: Case, device: str) -> None:
    bench, judge = Bench("triton", case, device=device), Bench("reference", case, device=device)
    tolerance = TOLERANCE[case.dtype]
    for got, expected in zip(bench.run(), judge.run(), strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    for seq, (cached, new) in enumerate(case.sequences):
        for token in {0, cached + new - 1}:
            for got, expected in zip(bench.read(seq, token), judge.read(seq, token), strict=True):
                torch.testing.assert_close(got, expected)


@pytest.mark.skipif(GPU, reason="without the interpreter the same runs on the GPU")
@pytest.mark.parametrize("case", SMALL_CASES, ids=describe)
def test_interpreted(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("case", [*SMALL_CASES, *LARGE_CASES], ids=describe)
def test_on_gpu(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_batch_gives_the_same_bits(dtype: torch.dtype) -> None:
    case = replace(Case(LARGE[0] + LARGE[2], head_dim=128, group=4), dtype=dtype)
    first = torch.cat(Bench("triton", case, device="cuda").run())
    for _ in range(5):
        assert torch.equal(torch.cat(Bench("triton", case, device="cuda").run()), first)
