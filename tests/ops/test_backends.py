"""Every backend against the reference, over scrambled block tables in a cache full of NaN."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    Bench,
    Case,
    assert_same_e4m3,
    check_that_nan_stays_alone,
    e4m3_probes,
)
from torch import Tensor

from daily_cases import checkered
from octavo.errors import ConfigError
from octavo.ops import KVScales, LayerPlace, LayerSpec, ScoreFunction, load_backend
from octavo.ops.base import AttentionBackend
from octavo.ops.cpu import threads as cpu_threads
from octavo.registry import ATTENTION_BACKENDS

# (cached tokens, new tokens): fresh and continued prompts, decodes, at and around tiles of 16 and
# spans of 64 tokens.
MIXED = ((0, 1), (5, 1), (0, 37), (40, 30), (100, 1), (127, 1), (64, 65), (15, 2), (0, 64))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SCALES = KVScales(0.02, 0.005)  # a few values are beyond 448 times theirs
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}

CASES = [
    Case(MIXED),
    Case(MIXED, block_size=1, head_dim=16, group=1, num_kv_heads=3),
    Case(MIXED, block_size=8, head_dim=80, group=4, rotary_dim=80),
    Case(MIXED, block_size=32, head_dim=128, group=3, rotary_dim=128),
    Case(MIXED, block_size=16, head_dim=128, group=3, rotary_dim=96),
    Case(MIXED, block_size=16, head_dim=80, group=2, rotary_dim=32, interleaved=True),
    Case(MIXED, block_size=256, head_dim=256, group=16, num_kv_heads=1),
    Case(MIXED, block_size=16, head_dim=100, group=7, window=33, rotary_dim=40),
    Case(MIXED, block_size=8, head_dim=64, group=1, window=20, num_kv_heads=5),
    Case(MIXED, block_size=16, head_dim=17, group=4, window=1),
    Case(MIXED, block_size=16, head_dim=40, rotary_dim=40, head_norm=True, value_norm=True),
    Case(((0, 300), (200, 100), (290, 1)), block_size=16, group=2, window=70),
    Case(((0, 300), (256, 257), (1000, 1)), block_size=48, group=8, rotary_dim=64),
]


@pytest.fixture(params=[1, 2], ids=["1-thread", "2-threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("case", "dtype"), checkered(CASES, DTYPES.values()))
def test_cpu_agrees_with_the_reference(case: Case, dtype: torch.dtype) -> None:
    case = replace(case, dtype=dtype)
    bench, reference = Bench("cpu", case), Bench("reference", case)
    for got, expected in zip(bench.run(), reference.run(), strict=True):
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for seq, (cached, new) in enumerate(case.sequences):
        for token in (0, cached + new - 1):
            for got, expected in zip(
                bench.read(seq, token), reference.read(seq, token), strict=True
            ):
                torch.testing.assert_close(got, expected)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("case", "dtype"), checkered(CASES[1:10:2], DTYPES.values()))
def test_cpu_agrees_with_the_reference_over_an_fp8_cache(case: Case, dtype: torch.dtype) -> None:
    """Where heads are not rotated, what is cached is the same to the bit: rotated ones may have
    been rounded to the other side of a step of e4m3 before."""
    test_cpu_agrees_with_the_reference(replace(case, rotary_dim=None, kv_scales=SCALES), dtype)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("window", "kv_scales", "dtype"),
    checkered([(None, None), (50, None), (50, SCALES)], DTYPES.values()),
)
def test_cpu_result_depends_on_the_sequence_alone(
    dtype: torch.dtype, window: int | None, kv_scales: KVScales | None
) -> None:
    """To the bit: whatever else is in the batch, however the prompt is cut, whatever the blocks."""
    sequences = ((0, 200), (150, 1), (90, 70))
    case = Case(sequences, dtype=dtype, window=window, rotary_dim=64, kv_scales=kv_scales)
    crowd = Bench("cpu", case).run()
    for index, expected in enumerate(crowd):
        for block_size in (8, 16, 64):
            alone = replace(case.alone(index), block_size=block_size)
            assert torch.equal(Bench("cpu", alone).run()[0], expected), (index, block_size)
    for sizes in ((1,) * 200, (7,) * 28 + (4,), (64, 128, 8), (199, 1)):
        bench = Bench("cpu", case.alone(0))
        pieces = torch.cat([bench.step([(0, size)])[0] for size in sizes])
        assert torch.equal(pieces, crowd[0]), sizes


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("block_size", [5, 8, 16])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_scales", [None, SCALES], ids=["plain", "fp8"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sequence_of_nan_stays_alone(
    backend: str,
    kv_scales: KVScales | None,
    window: int | None,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    sequences = ((20, 1), (0, 9), (3, 4), (12, 1), (70, 1), (5, 1))
    case = Case(sequences, block_size, head_dim=20, window=window, dtype=dtype, kv_scales=kv_scales)
    check_that_nan_stays_alone(backend, case)


@pytest.mark.parametrize("scale", [1.0, 0.37])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_number_is_cached_as_the_nearest_e4m3(scale: float, dtype: torch.dtype) -> None:
    x, expected = e4m3_probes(scale, dtype)
    scaled = (x.float() * np.float32(1 / scale)).double().clamp(-448, 448)
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    nearest = (scaled[..., None] - numbers[~numbers.isnan()]).abs().min(-1).values
    is_nan = x.isnan()
    assert torch.equal((expected.double() - scaled).abs()[~is_nan], nearest[~is_nan])
    assert expected[is_nan].float().isnan().all()

    scales = KVScales(scale, scale)
    bench = Bench("cpu", Case(((0, len(x)),), 16, 1, 1, 64, dtype=dtype, kv_scales=scales))
    bench._tokens = lambda *_: x.expand(-1, 3, -1)  # type: ignore[method-assign]
    bench.run()
    for token, wanted in enumerate(expected):
        for got in bench.read(0, token):
            assert_same_e4m3(got, wanted)


def test_cpu_without_a_bf16_dot_product_is_as_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo.ops.cpu import attention as cpu
    from octavo.ops.cpu import attention_kernel as cpu_kernel

    monkeypatch.setattr(cpu_kernel, "host_has", lambda feature: False)
    monkeypatch.setattr(cpu, "_layer_runner", cpu._layer_runner.__wrapped__)
    case = Case(MIXED, dtype=torch.bfloat16)
    for got, expected in zip(Bench("cpu", case).run(), Bench("reference", case).run(), strict=True):
        torch.testing.assert_close(got, expected, atol=2e-2, rtol=2e-2)


def test_cpu_without_torchs_openmp_uses_threads_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_threads, "_openmp_parallel", lambda: None)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    case = Case(MIXED)
    results, expected = Bench("cpu", case).run(), Bench("reference", case).run()
    torch.set_num_threads(before)
    for got, right in zip(results, expected, strict=True):
        torch.testing.assert_close(got, right, atol=3e-6, rtol=3e-6)


def attend_once(kind: type[AttentionBackend], inputs: Tensor) -> Tensor:
    """Two groups of layers in one cache: layer 1 has a window and tables of its own."""
    layers = [
        LayerSpec(0, num_heads=2, num_kv_heads=2, head_dim=16, scores=ScoreFunction(0.25)),
        LayerSpec(
            1, num_heads=2, num_kv_heads=2, head_dim=16, scores=ScoreFunction(0.25), window=3
        ),
    ]
    cache = torch.zeros(20, 1, *kind.kv_block_shape(4, 2, 16))
    backend = kind(layers, [LayerPlace(0, 0), LayerPlace(1, 0)], cache, 4, torch.float32)
    from octavo.ops import AttentionBatch

    tables = [torch.tensor([[3, 9, 4]]), torch.tensor([[12, 7, 15]])]
    positions = torch.arange(10)
    batch = AttentionBatch(
        query_lens=torch.tensor([10], dtype=torch.int32),
        context_lens=torch.tensor([10], dtype=torch.int32),
        query_starts=torch.tensor([0, 10], dtype=torch.int32),
        positions=positions,
        block_tables=[table.int() for table in tables],
        slots=[table[0, positions // 4] * 4 + positions % 4 for table in tables],
    )
    backend.plan(batch)
    return torch.stack([backend.forward(i, *inputs.unbind(1)) for i in (0, 1)])


def test_groups_of_layers_have_their_own_blocks() -> None:
    inputs = torch.randn(10, 3, 2, 16)
    got = attend_once(load_backend("cpu"), inputs)
    torch.testing.assert_close(got, attend_once(load_backend("reference"), inputs))
    assert not torch.allclose(got[0], got[1])


def test_reference_is_softmax_attention() -> None:
    """The reference itself, against torch's own attention on a prompt in order."""
    case = Case(((0, 50),), head_dim=64, group=3)
    bench = Bench("reference", case)
    fused = bench._tokens(0, 0, 50).transpose(0, 1)
    query, key, value = fused.split([6, 2, 2])
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(bench.run()[0], expected.transpose(0, 1).flatten(1))


def test_reference_computes_each_part_of_a_score_function() -> None:
    """One query, written out in float64."""
    case = Case(((20, 1),), head_dim=16, group=2, num_kv_heads=1)
    sinks = SimpleNamespace(weight=torch.tensor([0.3, -1.0]))
    function = ScoreFunction(0.8, softcap=1.5, alibi_slopes=(0.25, 0.5), sinks=sinks)
    fused = Bench("reference", case)._tokens(0, 0, 21).double()
    query, key, value = fused[20, :2], fused[:, 2], fused[:, 3]
    scores = 1.5 * torch.tanh(query @ key.T * 0.8 / 1.5)
    scores += torch.tensor([[0.25], [0.5]]) * (torch.arange(21) - 20)
    weights = scores.exp() / (scores.exp().sum(1) + sinks.weight.exp()).unsqueeze(1)
    (got,) = Bench("reference", replace(case, scores=function)).run()
    torch.testing.assert_close(got, (weights @ value).float().view(1, -1))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"scale": math.nan}, "scale must be positive and finite, not nan"),
        ({"scale": 0.0}, "scale must be positive and finite, not 0.0"),
        ({"scale": -0.5}, "scale must be positive and finite, not -0.5"),
        ({"softcap": 0.0}, "softcap must be positive and finite, not 0.0"),
        ({"softcap": math.inf}, "softcap must be positive and finite, not inf"),
        ({"alibi_slopes": (0.5, math.inf)}, "alibi_slopes must be finite"),
        ({"alibi_slopes": (0.5,)}, "layer 7: 1 alibi_slopes for 2 query heads"),
        ({"sinks": SimpleNamespace(weight=torch.zeros(3))}, "layer 7: 3 sinks for 2 query heads"),
    ],
)
def test_impossible_score_functions_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LayerSpec(7, 2, 1, 16, ScoreFunction(**({"scale": 1.0} | wrong)))


def test_half_precision_is_for_the_reference_only() -> None:
    case = Case(((3, 2), (0, 9)), dtype=torch.float16)
    assert all(torch.isfinite(output).all() for output in Bench("reference", case).run())
    with pytest.raises(ValueError, match=r"no kernels for torch\.float16"):
        Bench("cpu", case)


def test_unknown_backend_is_named_with_the_known() -> None:
    with pytest.raises(ValueError, match=f"'flash'.*{', '.join(sorted(ATTENTION_BACKENDS))}"):
        load_backend("flash")


def test_missing_numba_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in [name for name in sys.modules if name.startswith("octavo.ops.cpu.attention")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ConfigError, match=r"pip install numba.*reference"):
        load_backend("cpu")


@pytest.mark.parametrize(
    "wrong", [{"num_heads": 5}, {"head_dim": 0}, {"window": 0}], ids=["heads", "dim", "window"]
)
def test_impossible_layers_are_refused(wrong: dict[str, int]) -> None:
    scores = ScoreFunction(0.1)
    right = {"layer_id": 0, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64, "scores": scores}
    with pytest.raises(ValueError, match="layer 0"):
        LayerSpec(**(right | wrong))
