"""Writing of K and V: norms, rotation, slots, and what must stay untouched."""

from __future__ import annotations

import pytest
import torch
from attention_cases import assert_same_e4m3, e4m3_probes
from paged_cases import make_paged
from torch import Tensor

from octavo.ops import KVScales, RotaryTable
from octavo.ops.cuda.kv_write import HeadChanges, write_kv

pytestmark = pytest.mark.usefixtures("poisoned")

# heads, KV heads, head size, rotary size, norms, block size; with a rotary embedding, both pairings
CASES = {
    "cpu": [(3, 1, 20, 12, True, 4), (2, 2, 17, None, False, 3), (9, 2, 16, 16, False, 16)],
    "cuda": [
        (32, 8, 128, 128, False, 16),
        (40, 40, 128, None, False, 16),
        (16, 8, 128, 128, True, 16),
        (12, 3, 80, 32, False, 8),
        (16, 1, 256, 64, True, 256),
        (3, 3, 100, None, True, 1),
    ],
}
DTYPES = {"cpu": [torch.float32], "cuda": [torch.float32, torch.bfloat16, torch.float16]}
EPS = 1e-5


def assert_changed(
    got: Tensor, x: Tensor, weight: Tensor | None, rotary: RotaryTable | None, at: Tensor
) -> None:
    """That `got` is x [tokens, heads, head_dim], normalised and rotated, as exactly as the kernel
    promises: in fp32, rounded to x's type after the norm and after the rotation.

    The reference is computed in fp64 without rounding. A rounded norm may be either neighbour of
    its exact value, and the rotation adds two of them, which may cancel: so the bound is a share of
    what is added, not of the sum.
    """
    limits = torch.finfo(x.dtype)
    unit = limits.eps / 2  # of rounding to nearest
    fp32 = 32 * torch.finfo(torch.float32).eps / 2  # sums of squares, rsqrt, products
    exact = x.double()
    error = torch.zeros_like(exact)
    if weight is not None:
        mean = exact.square().mean(-1, keepdim=True)
        exact = exact * (mean + EPS).rsqrt() * weight.double()
        error = (unit + fp32) * exact.abs()
    if rotary is not None:
        cos, sin = (table.double()[at].unsqueeze(1) for table in (rotary.cos, rotary.sin))
        half = cos.shape[-1]
        error = error + fp32 * exact.abs()
        element = torch.arange(2 * half)
        firsts = element % 2 == 0 if rotary.interleaved else element < half
        (x1, x2), (e1, e2) = (
            (t[..., element[firsts]], t[..., element[~firsts]]) for t in (exact, error)
        )
        exact, error = exact.clone(), error.clone()
        exact[..., element[firsts]] = x1 * cos - x2 * sin
        exact[..., element[~firsts]] = x2 * cos + x1 * sin
        error[..., element[firsts]] = e1 * cos.abs() + e2 * sin.abs()
        error[..., element[~firsts]] = e2 * cos.abs() + e1 * sin.abs()
    error = error + unit * (exact.abs() + error) + unit * limits.smallest_normal
    worst = ((got.double() - exact).abs() / error).max()
    assert worst <= 1, f"{worst:.3f} times what rounding explains"


@pytest.mark.parametrize("interleaved", [False, True])
def test_write_kv(device: torch.device, interleaved: bool) -> None:
    places = [(1, 0), (1, 1), (0, -1), (0, 7), (2, 30), (1, 16)]  # table row, position
    tokens = torch.tensor(places, dtype=torch.int32, device=device)
    positions = tokens[:, 1].long().clamp(min=0)
    for heads, kv_heads, dim, rotary_dim, norms, block_size in CASES[device.type]:
        if interleaved and rotary_dim is None:
            continue
        for dtype in DTYPES[device.type]:
            paged = make_paged([0, 0, 0], 40, block_size, kv_heads, dim, dtype, device)
            fused = torch.randn(len(places), heads + 2 * kv_heads, dim, device=device).to(dtype)
            query, key, value = fused.split([heads, kv_heads, kv_heads], dim=1)
            rotary = None
            if rotary_dim is not None:
                angles = torch.rand(40, rotary_dim // 2, device=device) * 7
                rotary = RotaryTable(angles.cos(), angles.sin(), interleaved)
            weights = [torch.rand(dim, device=device).to(dtype) + 0.5 if norms else None] * 2
            ones = torch.ones(dim, device=device).to(dtype) if norms else None
            changes = HeadChanges(
                rotary,
                *(None if weight is None else (weight, EPS) for weight in weights),
                EPS if norms else None,
            )
            before = fused.clone()
            args = (tokens.flatten(), paged.table, paged.layer_cache, changes)
            got = write_kv(query, key, value, *args)
            assert torch.equal(fused, before), "the inputs stay unchanged"
            written = [position >= 0 for _, position in places]
            if changes.of_query:
                at = positions[written]
                assert_changed(got[written], query[written], weights[0], rotary, at)
            else:
                assert got is query
            for token, (row, position) in enumerate(places):
                if position < 0:
                    assert not changes.of_query or got[token].isnan().all()
                    continue
                slot = paged.slot(row, position)
                own = slice(token, token + 1)
                assert_changed(slot[None, :, 0], key[own], weights[1], rotary, positions[own])
                assert_changed(slot[None, :, 1], value[own], ones, None, positions[own])
            filled = (~paged.layer_cache.isnan()).sum()
            assert filled == sum(written) * kv_heads * 2 * dim, "only these slots are written"


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which is NumPy
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_written_as_the_nearest_e4m3(
    device: torch.device, scale: float, dtype: torch.dtype
) -> None:
    x, expected = (each.to(device) for each in e4m3_probes(scale, dtype))
    cache = torch.zeros(len(x) + 1, 1, 2, 1, 64).to(torch.float8_e4m3fn).to(device)
    table = torch.arange(1, len(x) + 1, dtype=torch.int32, device=device).view(1, -1)
    tokens = torch.stack((torch.zeros(len(x)), torch.arange(len(x))), 1).int().flatten().to(device)
    changes = HeadChanges()
    write_kv(x, x, x, tokens, table, cache, changes, KVScales(scale, scale))
    for side in range(2):
        assert_same_e4m3(cache[1:, :, side, 0], expected)
