"""Score functions: every backend against the reference, at random shapes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations, product
from types import SimpleNamespace

import pytest
import torch
from _pytest.mark import ParameterSet
from attention_cases import FEATURES, Bench, Case, check_that_nan_stays_alone, some_scores

from octavo.ops import CROSS_ATTENTION, FP8_KV_CACHE, ScoreFunction, load_backend

pytestmark = pytest.mark.usefixtures("few_programs")

GPU = torch.cuda.is_available()
BACKENDS = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param(
        "triton",
        "cpu",
        id="interpreted",
        marks=pytest.mark.skipif(GPU, reason="without the interpreter the same runs on the GPU"),
    ),
    pytest.param(
        "triton",
        "cuda",
        id="gpu",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="needs a CUDA device")],
    ),
]
DTYPES = {"fp32": torch.float32, "16-bit": torch.bfloat16}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SETS = [names for count in range(1, len(FEATURES) + 1) for names in combinations(FEATURES, count)]


def random_case(
    seed: int, dtype: torch.dtype, features: tuple[str, ...], interpreted: bool
) -> Case:
    """Decodes, prompts and chunks; few tokens where each takes milliseconds."""
    rng = random.Random(seed)
    longest = 40 if interpreted else 300
    head_dim = (64, 80, 96, 128, 256)[seed % 5]
    shapes = [(rng.randrange(1, longest), 1) for _ in range(2)]
    shapes += [(0, rng.randrange(2, longest)), (rng.randrange(longest), rng.randrange(2, 20))]
    rng.shuffle(shapes)
    case = Case(
        tuple(shapes),
        block_size=rng.choice([8, 16, 32, 48]),
        num_kv_heads=rng.randrange(1, 2 if interpreted else 4),
        group=1 + seed % 8,
        head_dim=head_dim,
        window=rng.choice([None, rng.randrange(1, longest)]),
        dtype=dtype,
        rotary_dim=rng.choice([None, head_dim, head_dim // 2]),
        head_norm=rng.random() < 0.3,
        interleaved=rng.random() < 0.5,
        seed=seed,
    )
    return replace(case, scores=some_scores(case, *features))


def runs() -> Iterator[ParameterSet]:
    """Every backend, set of features and dtype; by day, each set has one dtype on a CPU. The
    interpreter never has more, and has pairs by night: by day those are within sets of three."""
    for backend, features, name in product(BACKENDS, SETS, DTYPES):
        is_interpreted = backend.id == "interpreted"
        is_by_day = (name == "fp32") == len(features) % 2
        if not is_interpreted or is_by_day:
            values = (*backend.values, features, DTYPES[name])
            names = (backend.id, *features, name)
            marks = [*backend.marks]
            if not is_by_day or (is_interpreted and len(features) == 2):
                marks.append(pytest.mark.slow)
            yield pytest.param(*values, marks=marks, id="-".join(map(str, names)))


@pytest.mark.parametrize(("backend", "device", "features", "dtype"), [*runs()])
def test_scores_at_random_shapes(
    backend: str, device: str, features: tuple[str, ...], dtype: torch.dtype
) -> None:
    interpreted = backend == "triton" and device == "cpu"
    if interpreted and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter does not compute in bf16
    count = 1 if interpreted else 4
    first = count * (SETS.index(features) + len(SETS) * (dtype != torch.float32))
    for seed in range(first, first + count):
        case = random_case(seed, dtype, features, interpreted)
        got, expected = (
            torch.cat([output.cpu() for output in Bench(kind, case, device=where).run()])
            for kind, where in ((backend, device), ("reference", "cpu"))
        )
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance, msg=str(case))
        plain = torch.cat(Bench("reference", replace(case, scores=None)).run())
        assert case.window == 1 or not torch.allclose(got, plain, atol=0.1), "no feature has effect"


@pytest.mark.parametrize("features", [*SETS[: len(FEATURES)], SETS[-1]], ids="-".join)
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_chunks_and_decodes_continue_each_other(
    backend: str, device: str, features: tuple[str, ...]
) -> None:
    case = Case(((0, 60),), group=3, num_kv_heads=1, head_dim=64, rotary_dim=64, window=45)
    case = replace(case, scores=some_scores(case, *features))
    (expected,) = Bench("reference", case).run()
    bench = Bench(backend, case, device=device)
    got = [bench.step([(0, count)])[0].cpu() for count in (20, 1, 1, 33, 5)]
    torch.testing.assert_close(torch.cat(got), expected, atol=5e-6, rtol=5e-6)


def test_every_backend_computes_every_feature() -> None:
    names = {each.name for each in fields(ScoreFunction)} - {"scale"}
    assert names == set(FEATURES)
    for backend in ("reference", "cpu", "triton"):
        assert load_backend(backend).score_features == names | {CROSS_ATTENTION, FP8_KV_CACHE}


@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_a_cap_far_above_the_scores_changes_nothing(backend: str, device: str) -> None:
    """1 - exp(-2 |x|) alone would leave no digit of a score."""
    case = Case(((30, 1), (0, 17)), group=2, num_kv_heads=1, head_dim=64)
    capped = replace(case, scores=ScoreFunction(64**-0.5, softcap=1e6))
    for got, expected in zip(
        Bench(backend, capped, device=device).run(), Bench("reference", case).run(), strict=True
    ):
        torch.testing.assert_close(got.cpu(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("window", [None, 50])
def test_cpu_result_depends_on_the_sequence_alone(dtype: torch.dtype, window: int | None) -> None:
    """To the bit: whatever else is in the batch, however the prompt is cut, whatever the blocks."""
    case = Case(((0, 200), (150, 1), (90, 70)), dtype=dtype, window=window, rotary_dim=64)
    case = replace(case, scores=some_scores(case, *FEATURES), interleaved=True)
    crowd = Bench("cpu", case).run()
    for index, expected in enumerate(crowd):
        for block_size in (8, 64):
            alone = replace(case.alone(index), block_size=block_size)
            assert torch.equal(Bench("cpu", alone).run()[0], expected), (index, block_size)
    for sizes in ((1,) * 200, (64, 128, 8)):
        bench = Bench("cpu", case.alone(0))
        pieces = torch.cat([bench.step([(0, size)])[0] for size in sizes])
        assert torch.equal(pieces, crowd[0]), sizes


@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which is NumPy
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_a_sequence_of_nan_stays_alone(backend: str, device: str) -> None:
    case = Case(((15, 1), (40, 1), (3, 4)), 8, 1, 2, head_dim=16)
    case = replace(case, scores=some_scores(case, *FEATURES))
    check_that_nan_stays_alone(backend, case, device)


@pytest.mark.parametrize("sink", [-math.inf, -1e30, 1e4])
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_sinks_of_any_size(backend: str, device: str, sink: float) -> None:
    """One that takes all the weight leaves 0, and one that takes none changes nothing."""
    case = Case(((30, 1), (0, 17), (0, 1)), group=2, num_kv_heads=1, head_dim=64)
    weight = torch.full((2,), sink)
    scored = replace(case, scores=ScoreFunction(64**-0.5, sinks=SimpleNamespace(weight=weight)))
    for got, plain in zip(
        Bench(backend, scored, device=device).run(), Bench("reference", case).run(), strict=True
    ):
        expected = plain if sink < 0 else torch.zeros_like(plain)
        torch.testing.assert_close(got.cpu(), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
@pytest.mark.parametrize(("backend", "device"), BACKENDS)
def test_soft_caps_hold_for_huge_scores(backend: str, device: str, cap: float) -> None:
    """Scores of both signs, a thousand times beyond the cap: the weights are two values."""
    case = Case(((30, 1), (0, 17)), group=2, num_kv_heads=1, head_dim=64)
    case = replace(case, scores=ScoreFunction(1000.0, softcap=cap))
    bench, reference = Bench(backend, case, device=device), Bench("reference", case)
    for got, expected in zip(bench.run(), reference.run(), strict=True):
        torch.testing.assert_close(got.cpu(), expected, atol=5e-6, rtol=5e-6)
