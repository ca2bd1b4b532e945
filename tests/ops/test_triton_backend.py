"""The Triton backend against the reference: in Triton's interpreter, and on a GPU at real sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import gluon_emulator
import numpy as np
import pytest
import torch
from _pytest.mark import ParameterSet
from attention_cases import Bench, Case, check_that_nan_stays_alone, some_scores
from numpy.typing import NDArray
from torch import Tensor
from triton import knobs

from daily_cases import checkered
from octavo.ops import (
    AttentionBatch,
    HostStaging,
    KVScales,
    LayerPlace,
    LayerSpec,
    PaddedSizes,
    ScoreFunction,
    StagingPart,
    load_backend,
)
from octavo.ops.base import MOST_CONTINUED, AttentionBackend, CascadeSegments, Staging
from octavo.ops.cuda import (
    attention,
    attention_decode_cluster,
    attention_dequantized,
    attention_prefill_hopper,
)
from octavo.ops.cuda.attention import TritonBackend
from octavo.ops.cuda.attention_cascade import cascade_config
from octavo.ops.cuda.attention_decode import DecodeConfig, decode_config
from octavo.ops.cuda.attention_decode_cluster import (
    CONTEXT_LIMITS,
    ClusterConfig,
    cluster_config,
)
from octavo.ops.cuda.attention_dequantized import DequantizedBlocks, numbers_of_passes
from octavo.ops.cuda.attention_prefill import PrefillTimes, prefill_config
from octavo.ops.cuda.attention_work_items import Sequences
from octavo.ops.cuda.devices import is_hopper, num_sms
from octavo.ops.cuda.tile_sizes import power_of_2

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("few_programs")

GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

# Of an FP8 KV cache: a few values are beyond 448 times theirs.
SCALES = KVScales(0.02, 0.005)

# Decodes around tiles, a context that is split, a prompt, and a continued one.
SMALL = ((0, 1), (15, 1), (150, 1), (0, 20), (13, 19))
SMALL_CASES = [
    Case(SMALL, head_dim=16, group=2, num_kv_heads=2, rotary_dim=16),
    Case(SMALL, head_dim=20, group=3, num_kv_heads=1, block_size=8, window=30, head_norm=True),
    Case(SMALL[2:], head_dim=32, group=3, num_kv_heads=1, rotary_dim=24),
    Case(SMALL[2:], head_dim=17, group=2, num_kv_heads=1, rotary_dim=16, interleaved=True),
    Case(SMALL[3:], head_dim=16, num_kv_heads=1, rotary_dim=6, interleaved=True, head_norm=True),
    Case(SMALL[2:], head_dim=17, group=1, num_kv_heads=1, block_size=48, rotary_dim=8),
    Case(((3, 1), (40, 1)), head_dim=32, group=16, num_kv_heads=1, block_size=256, head_norm=True),
    Case(SMALL[3:], head_dim=16, group=4, num_kv_heads=1, block_size=1, window=1),
    Case(((3, 1), (2, 3)), head_dim=16, group=71, num_kv_heads=1, dtype=torch.float16),
    Case(SMALL, head_dim=16, group=2, num_kv_heads=2, rotary_dim=16, kv_scales=SCALES),
    Case(SMALL, 8, 1, 3, 20, window=30, head_norm=True, kv_scales=SCALES),
    Case(SMALL[2:], 48, 1, 1, 17, rotary_dim=8, kv_scales=SCALES),
    Case(SMALL[1:], 16, 2, 2, 16, dtype=torch.bfloat16, kv_scales=SCALES),
    Case(SMALL, head_dim=20, group=3, rotary_dim=20, head_norm=True, value_norm=True),
    Case(SMALL, 8, 1, 3, 16, head_norm=True, kv_scales=SCALES, value_norm=True),
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
        (16, 8, 3, 128, None, 96, False),
        (32, 1, 16, 256, None, 64, True),
        (256, 2, 7, 128, 300, 128, False),
        (128, 2, 5, 80, None, 80, False),
        (64, 1, 6, 96, 1, 96, False),
        (1, 2, 2, 64, None, 64, False),
        (48, 2, 4, 100, None, 20, False),
    )
]
LARGE_CASES += [  # of Gemma 4: heads of both kinds of layers
    Case(sequences, 16, 2, 4, dim, window, dtype, dim, True, value_norm=True)
    for sequences in LARGE
    for dtype in (torch.bfloat16, torch.float32)
    for dim, window in ((256, 512), (512, None))
]
# Without rotary embedding, whose roundings differ: cached elements would, too.
FP8_CASES = [
    replace(case, rotary_dim=None, head_norm=False, value_norm=False, kv_scales=SCALES)
    for case in LARGE_CASES
    if case.dtype != torch.float16
]


def describe(case: Case) -> str:
    name = f"{str(case.dtype)[6:]}-block{case.block_size}-dim{case.head_dim}-group{case.group}"
    fp8 = "-fp8" if case.kv_scales else ""
    return f"{name}-window{case.window}-seqs{len(case.sequences)}{fp8}"


def check(case: Case, device: str) -> None:
    bench, reference = Bench("triton", case, device=device), Bench("reference", case, device=device)
    tolerance = TOLERANCE[case.dtype]
    for got, expected in zip(bench.run(), reference.run(), strict=True):
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
    for seq, (cached, new) in enumerate(case.sequences):
        for token in {0, cached + new - 1}:
            for got, expected in zip(
                bench.read(seq, token), reference.read(seq, token), strict=True
            ):
                # A rotation that is contracted to FMAs may round to the neighbouring value.
                ulp = torch.finfo(case.dtype).eps
                torch.testing.assert_close(got.float(), expected.float(), rtol=ulp, atol=1e-5)


# Sequences of no cached key, of few, and of several for each warp.
FEW = ((0, 1), (15, 1), (150, 1))
CLUSTER_CASES = [
    Case(((210, 1),), 16, 1, 4, 128, rotary_dim=128, head_norm=True),
    Case(FEW, 8, 2, 7, 64, window=30, rotary_dim=24, interleaved=True),
    Case(FEW, 48, 1, 3, 128, rotary_dim=32, head_norm=True),
    Case(((170, 1), (40, 1)), 16, 2, 1, 128),
    Case(((210, 1), (0, 1)), 16, 2, 4, 128, rotary_dim=128, head_norm=True, value_norm=True),
    # A key that is rounded to bfloat16 in another way may be the next e4m3 number: unchanged ones.
    Case(((210, 1), (3, 1)), 16, 2, 4, 128, kv_scales=SCALES),
    Case(((90, 1), (0, 1)), 8, 1, 2, 256, window=70, kv_scales=SCALES),
]


@pytest.mark.skipif(GPU, reason="other tests run the kernel on the GPU")
@pytest.mark.parametrize(("case", "features"), checkered(CLUSTER_CASES, [((),), (("sinks",),)]))
def test_clusters(case: Case, features: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """attention_decode_cluster.py's kernel, carried out by the emulator."""
    launches: list[object] = []

    def launch(*args: Any, **options: Any) -> None:
        launches.append(args[1])
        gluon_emulator.launch_clusters(*args, **options)

    monkeypatch.setattr(TritonBackend, "_is_for_clusters", lambda self, shape, device: True)
    monkeypatch.setattr(attention_decode_cluster, "launch", launch)
    case = replace(case, dtype=torch.bfloat16)
    check(replace(case, scores=some_scores(case, *features)), "cpu")
    assert launches


@pytest.mark.skipif(GPU, reason="other tests run the kernels on the GPU")
@pytest.mark.usefixtures("emulated_prefill")
@pytest.mark.parametrize(
    ("case", "room", "num_fills"),  # of the cached tokens' step, and of the new ones'
    [
        (Case(((0, 20), (13, 150), (3, 1)), 16, 2, 4, 64), 60_000, 1 + 2),
        (Case(((130, 70), (0, 9)), 8, 1, 2, 128, 300, torch.float16), 1 << 20, 1 + 1),
        # Two of four heads, twice.
        (Case(((200, 40), (0, 3), (90, 30)), 32, 4, 1, 256, 70), 990_000, 2 + 2),
    ],
)
def test_prompts_over_an_fp8_cache_on_hopper_gpus(
    case: Case, room: int, num_fills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their blocks are converted first, a part of the heads at a time where room is short. The
    kernels are carried out by the emulator."""
    dtype = torch.bfloat16 if case.dtype == torch.float32 else case.dtype
    case = replace(case, dtype=dtype, kv_scales=SCALES, scores=some_scores(case, "sinks"))
    monkeypatch.setattr(attention_decode_cluster, "launch", gluon_emulator.launch_clusters)
    filled: list[Tensor] = []
    fill = DequantizedBlocks.fill

    def note(blocks: DequantizedBlocks, cache: Tensor, table: Tensor, spans: Tensor) -> Any:
        filled.append(spans)
        return fill(blocks, cache, table, spans)

    monkeypatch.setattr(attention, "is_on_hopper", lambda _: True)
    monkeypatch.setattr(attention_dequantized, "_LEAST_ROWS", 1)
    monkeypatch.setattr(attention_dequantized, "_LEAST_WORK", 1)
    monkeypatch.setattr(attention, "prefill_times", lambda *_: PrefillTimes(split=1.0, whole=0.0))
    monkeypatch.setattr(DequantizedBlocks, "fill", note)
    monkeypatch.setattr(attention, "DequantizedBlocks", partial(DequantizedBlocks, room=room))
    check(case, "cpu")
    assert len(filled) == num_fills


@pytest.mark.skipif(GPU, reason="it is run on the GPU by each backend")
@pytest.mark.usefixtures("emulated_prefill")
def test_what_compiles_kernels_of_converted_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """With each number of passes, and each tile that a step of such prompts may have."""
    launched: list[tuple[int, int]] = []
    attend = attention_prefill_hopper.attend_on_hopper

    def note(query: Tensor, cache: Tensor, *args: Any) -> None:
        launched.append((cache.shape[1], args[7]))
        attend(query, cache, *args)

    monkeypatch.setattr(attention, "is_on_hopper", lambda _: True)
    monkeypatch.setattr(attention_prefill_hopper, "attend_on_hopper", note)
    case = Case(((3, 2),), 16, 4, 1, 128, None, torch.bfloat16, kv_scales=SCALES)
    backend = Bench("triton", case, capacity=32).backend
    assert isinstance(backend, TritonBackend)
    backend._compile_passes(torch.device("cpu"))
    assert sorted(launched) == [(1, 128)] * 4 + [(2, 128)] * 2 + [(4, 64), (4, 128)]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU or not is_hopper(torch.device("cuda")), reason="needs a Hopper GPU")
@pytest.mark.parametrize("cached", [200, 9000])
def test_kernels_of_prompts_over_an_fp8_cache_are_compiled_before_any_step(
    cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is compiled later keeps all requests waiting."""
    case = Case(((cached, 400), (0, 3)), 16, 4, 4, 128, None, torch.bfloat16, kv_scales=SCALES)
    kernels = (
        attention_prefill_hopper.prefill_hopper_kernel,
        attention_dequantized._dequantize_kernel,
    )
    names, compiled = {kernel.fn.__qualname__ for kernel in kernels}, list[str]()
    for kernel in kernels:
        kernel.device_caches.clear()
    hook = "jit_post_compile_hook"
    monkeypatch.setattr(knobs.runtime, hook, lambda **told: compiled.append(told["fn"].name))
    monkeypatch.setattr(attention, "DequantizedBlocks", partial(DequantizedBlocks, room=10 << 20))
    bench = Bench("triton", case, capacity=10_000, device="cuda")
    assert set(compiled) >= names
    compiled.clear()
    bench.run()
    assert not set(compiled) & names


def test_numbers_of_passes_are_few() -> None:
    assert numbers_of_passes(1) == [1]
    assert numbers_of_passes(8) == [1, 2, 4, 8]
    assert numbers_of_passes(40) == [1, 2, 4, 8, 40]


def test_few_tokens_of_long_contexts_are_not_converted() -> None:
    # 100 blocks of four KV heads of 32 find room.
    blocks = DequantizedBlocks(torch.bfloat16, torch.device("cpu"), room=100 << 13)

    def passes(*sequences: tuple[int, int], window: int | None = None) -> int | None:
        lens, contexts = (np.array(each, np.int32) for each in zip(*sequences, strict=True))
        seqs = Sequences(lens.cumsum() - lens, np.arange(len(lens)), contexts, lens)
        return blocks.num_passes(seqs, 4, 32, 16, 4, window)

    assert passes((64, 1600)) == 1, "256 rows"
    assert not passes((63, 1600))
    assert passes((128, 256)) == 1, "2^17 rows and keys"
    assert not passes((127, 256))
    assert passes((800, 1601)) == 2, "more blocks than there is room for at once"
    assert passes((800, 800), (800, 800)) == 1, "all of the room"
    assert passes((800, 800), (800, 801)) == 2
    assert passes((100, 1500), (1, 20)) == 1
    assert not passes((100, 100), (1, 1000))
    assert passes((800, 9000), window=700) == 1, "a window's blocks find room"
    assert passes((800, 9000), window=900) == 2
    assert passes((800, 3200)) == 2, "two heads at a time"
    assert passes((800, 3201)) == passes((800, 6400)) == 4, "one head at a time"
    assert not passes((800, 6401)), "not even one"


@pytest.mark.parametrize("is_fp8", [False, True])
def test_steps_with_long_prompts_are_not_captured(
    is_fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As measured on an H200. On other GPUs they are, since there is one kernel for all."""
    monkeypatch.setattr(attention, "num_sms", num_sms)

    def captures(
        *sequences: tuple[int, int], windows: Sequence[int | None] = (None,), hopper: bool = True
    ) -> bool:
        """sequences: new tokens and contexts. windows: of layers that take turns."""
        monkeypatch.setattr(attention, "is_on_hopper", lambda _: hopper)
        scales = SCALES if is_fp8 else None
        layers = [
            LayerSpec(
                i, 32, 8, 128, ScoreFunction(0.1), windows[i % len(windows)], kv_scales=scales
            )
            for i in range(6)
        ]
        dtype = torch.float8_e4m3fn if is_fp8 else torch.bfloat16
        cache = torch.empty((1, 1, 8, 2, 16, 128), dtype=dtype)
        places = [LayerPlace(0, 0)] * len(layers)
        backend = TritonBackend(layers, places, cache, 16, torch.bfloat16)
        lens, contexts = (torch.tensor(each).int() for each in zip(*sequences, strict=True))
        starts = torch.cat([torch.zeros(1), lens.cumsum(0)]).int()
        return backend.captures(
            AttentionBatch(lens, contexts, starts, torch.zeros(0).long(), [], [])
        )

    assert captures((2048, 2048))
    assert captures((300, 4096), (1, 30_000)), "keys of a decode"
    assert not captures((2048, 65_536))
    assert not captures((2048, 65_536), (1, 30), (64, 64)), "beside innocent others"
    assert captures((2048, 65_536), hopper=False)
    assert captures((16, 131_072)), "keys of few tokens are split"
    assert captures((1, 500_000), (1, 3)), "decodes"
    assert captures((2048, 65_536), windows=[1024])
    assert not captures((2048, 131_072), windows=[1024, 1024, None])
    assert captures((1024, 8192)) != is_fp8


def interpreted(case: Case) -> ParameterSet:
    """Over an FP8 cache, one case is enough: others take the interpreter up to a minute."""
    is_long = case.kv_scales is not None and case.dtype != torch.bfloat16
    return pytest.param(case, marks=pytest.mark.slow if is_long else (), id=describe(case))


@pytest.mark.skipif(GPU, reason="without the interpreter the same runs on the GPU")
@pytest.mark.parametrize("case", [*map(interpreted, SMALL_CASES)])
def test_interpreted(case: Case) -> None:
    check(case, "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("case", [*SMALL_CASES, *LARGE_CASES, *FP8_CASES], ids=describe)
def test_on_gpu(case: Case) -> None:
    check(case, "cuda")


@pytest.mark.parametrize("device", ["cuda" if GPU else "cpu"])
def test_keys_and_values_may_be_strided_differently(device: str) -> None:
    """A norm over all key heads makes dense keys beside values of the fused projection."""
    case = Case(((5, 1), (0, 7)), head_dim=16, num_kv_heads=2, group=2)
    bench = Bench("triton", case, device=device)
    forward = bench.backend.forward
    bench.backend.forward = (  # type: ignore[method-assign]
        lambda layer_id, query, key, value, *others: forward(
            layer_id, query, key.contiguous(), value, *others
        )
    )
    for got, expected in zip(bench.run(), Bench("reference", case).run(), strict=True):
        torch.testing.assert_close(got.cpu(), expected, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 192, 256, 512])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_tiles_find_room_in_an_h200_s_shared_memory(dtype: torch.dtype, head_dim: int) -> None:
    """A program holds its queries and, as far as they are loaded ahead, tiles of K and V."""
    padded = max(16, power_of_2(head_dim))
    for group in (1, 2, 3, 7, 8, 16, 32):
        rows = max(16, power_of_2(group))
        sizes = [
            (rows, decode.tile, decode.num_stages)
            for pairs, is_fp8 in product((8, 256, 2048), (False, True))
            for decode in [decode_config(dtype, head_dim, group, pairs, is_fp8=is_fp8)]
        ]
        for tiles in (
            prefill_config(dtype, head_dim, group),
            cascade_config(dtype, head_dim, group),
        ):
            if tiles is not None:
                sizes.append((tiles.rows, tiles.tile, tiles.num_stages))
        for rows, tile, stages in sizes:
            assert (rows + 2 * tile * stages) * padded * dtype.itemsize <= 227 << 10


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_same_batch_gives_the_same_bits(dtype: torch.dtype) -> None:
    case = replace(Case(LARGE[0] + LARGE[2], head_dim=128, group=4), dtype=dtype)
    first = torch.cat(Bench("triton", case, device="cuda").run())
    for _ in range(5):
        assert torch.equal(torch.cat(Bench("triton", case, device="cuda").run()), first)


@pytest.mark.skipif(GPU, reason="without the interpreter the same runs on the GPU")
@pytest.mark.filterwarnings("ignore:invalid value")  # of the interpreter, which is NumPy
@pytest.mark.parametrize(
    ("features", "changes"),
    [
        ((), {}),
        ((), {"window": 5, "dtype": torch.float16, "rotary_dim": 16, "head_norm": True}),
        (("sinks",), {"kv_scales": SCALES}),
        (("softcap", "alibi_slopes", "relative_bias"), {"window": 33}),
    ],
)
def test_a_sequence_of_nan_stays_alone_in_the_interpreter(
    features: tuple[str, ...], changes: dict[str, Any]
) -> None:
    case = replace(Case(((15, 1), (40, 1), (3, 4)), 8, 1, 2, head_dim=16), **changes)
    check_that_nan_stays_alone("triton", replace(case, scores=some_scores(case, *features)))


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("block_size", [8, 16])
def test_a_sequence_of_nan_stays_alone(
    block_size: int, window: int | None, dtype: torch.dtype
) -> None:
    sequences = ((20, 1), (0, 9), (100, 4), (120, 1), (70, 1), (5, 1))
    case = Case(sequences, block_size, 2, 4, window=window, dtype=dtype)
    check_that_nan_stays_alone("triton", case, "cuda")


class FixedStaging:
    """A place for each name, for good, as captured graphs need it."""

    max_num_seqs, max_num_tokens = 8, 64

    def __init__(self, device: str) -> None:
        self._device = device
        self._places: dict[str, Tensor] = {}
        self.lengths: dict[str, int] = {}

    def put(
        self, name: str, values: NDArray[np.int32], capacity: int, part: StagingPart = "sequences"
    ) -> Tensor:
        place = self._places.setdefault(
            name, torch.zeros(capacity, dtype=torch.int32, device=self._device)
        )
        self.lengths[name] = values.size
        return place[: values.size].copy_(torch.from_numpy(values))


def decodes(contexts: list[int], table: Tensor, staging: Staging) -> AttentionBatch:
    """One new token each; 0: padding."""
    n = len(contexts)
    lens = torch.tensor(contexts, dtype=torch.int32)
    return AttentionBatch(
        query_lens=torch.ones(n, dtype=torch.int32),
        context_lens=lens,
        query_starts=torch.arange(n + 1, dtype=torch.int32),
        positions=(lens - 1).clamp(min=0).long(),
        block_tables=[table],
        slots=[],
        rows=torch.where(lens > 0, torch.arange(n), 0).int(),
        staging=staging,
    )


def backend_over(device: str, num_seqs: int, max_blocks: int) -> tuple[AttentionBackend, Tensor]:
    """(a backend over random K and V, a scrambled table)."""
    torch.manual_seed(0)
    kind = load_backend("triton")
    num_blocks = num_seqs * max_blocks
    cache = torch.randn(num_blocks + 1, 1, *kind.kv_block_shape(16, 2, 64), device=device)
    backend = kind(
        [LayerSpec(0, 8, 2, 64, ScoreFunction(0.125))],
        [LayerPlace(0, 0)],
        cache.bfloat16(),
        16,
        torch.bfloat16,
    )
    table = torch.randperm(num_blocks).view(num_seqs, max_blocks) + 1
    return backend, table.int().to(device)


def test_what_a_decode_stages_depends_on_the_number_of_sequences_alone() -> None:
    backend, table = backend_over("cpu", num_seqs=4, max_blocks=300)
    staging = FixedStaging("cpu")
    seen = []
    for contexts in ([1, 2, 3, 4], [4800, 0, 0, 0], [700, 1, 4000, 0], [4800] * 4):
        backend.plan(decodes(contexts, table, staging))
        seen.append(dict(staging.lengths))
    assert len(seen[0]) == 1
    assert all(lengths == seen[0] for lengths in seen)


@pytest.mark.parametrize("num_heads", [2, 32])
@pytest.mark.parametrize("num_tokens", [16, FixedStaging.max_num_tokens])
def test_a_captured_step_of_prompts_finds_room(num_tokens: int, num_heads: int) -> None:
    """What it stages depends on its size alone, and fits even where an item takes one token."""
    kind = load_backend("triton")
    cache = torch.zeros(9, 1, *kind.kv_block_shape(16, 2, 16))
    backend = kind(
        [LayerSpec(0, num_heads, 2, 16, ScoreFunction(0.25))],
        [LayerPlace(0, 0)],
        cache,
        16,
        torch.float32,
    )
    staging = FixedStaging("cpu")
    seen = []
    for lens in ([num_tokens], [1, 1, 2], [3] * (num_tokens // 3), [num_tokens - 1, 1]):
        chunks = torch.tensor(lens, dtype=torch.int32)
        starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
        starts[1:] = chunks.cumsum(0)
        batch = AttentionBatch(
            query_lens=chunks,
            context_lens=chunks,
            query_starts=starts,
            positions=torch.cat([torch.arange(n) for n in lens]),
            block_tables=[torch.ones(len(lens), 8, dtype=torch.int32)],
            slots=[],
            rows=torch.arange(len(lens), dtype=torch.int32),
            staging=staging,
            padded=PaddedSizes(num_tokens, 8, 21),
        )
        backend.plan(batch)
        seen.append(dict(staging.lengths))
    assert all(lengths == seen[0] for lengths in seen)


def test_few_decodes_of_short_contexts_have_clusters_on_hopper_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "is_on_hopper", lambda _: True)
    backend, table = backend_over("cpu", num_seqs=5, max_blocks=400)
    staging = HostStaging()
    few = decodes([1, 4096, 700, 0], table, staging)
    assert backend.plan(few) == ((ClusterConfig(),), False)
    others = [
        replace(few, longest=4097),
        replace(few, cascade=[CascadeSegments.empty()]),
        decodes([1, 4097, 700, 0], table, staging),
        decodes([9] * 5, table, staging),
    ]
    names = [backend.plan(each) for each in others]
    assert not any(isinstance(config, ClusterConfig) for configs, _ in names for config in configs)
    assert names[0] == names[2] != names[1]


def test_beside_a_cascade_one_program_combines_the_results_of_a_sequence() -> None:
    """The splits of the cascade kernel have no program in this one that could combine results."""
    backend, table = backend_over("cpu", num_seqs=2, max_blocks=40)
    alone = decodes([300, 400], table, HostStaging())
    shared = replace(alone, cascade=[CascadeSegments.empty()])
    collecting = []
    for batch in (alone, shared):
        [config], _ = backend.plan(batch)
        assert isinstance(config, DecodeConfig)
        assert config.is_early, "the results of few are combined by several programs"
        collecting.append((config.most_collecting, config.collecting(4, 64).heads))
    assert collecting == [(8, 2), (1, 4)]


def test_programs_of_clusters_have_more_warps_for_longer_contexts_of_fewer_heads() -> None:
    one, few, wide = ClusterConfig(is_one_tile=True), ClusterConfig(), ClusterConfig(8)
    chosen = [
        (128, 8, 4, [one, wide, wide, wide, None]),
        (128, 4, 8, [few, few, few, None, None]),
        (128, 1, 4, [one, few, few, None, None]),  # too few columns for the threads of eight warps
        (64, 8, 4, [one, few, few, None, None]),
        (256, 2, 4, [one, None, None, None, None]),
        (256, 8, 1, [None] * 5),  # more than fits in shared memory
        (256, 2, 5, [None] * 5),
        (128, 4, 9, [None] * 5),
        (96, 4, 1, [None] * 5),
        (128, 9, 1, [None] * 5),
    ]
    for head_dim, group, pairs, expected in chosen:
        of_shape = partial(cluster_config, torch.bfloat16, head_dim, group, pairs)
        assert [of_shape(longest) for longest in (1010, 1011, 4096, 8192, 8193)] == expected
    assert cluster_config(torch.float32, 128, 8, 1, 1) is None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_continued_steps_keep_to_the_keys_of_one_tile(head_dim: int) -> None:
    """16 programs of 64 keys; windows count the new token, too."""
    one = ClusterConfig(is_one_tile=True)
    of_shape = partial(cluster_config, torch.bfloat16, head_dim, 2, 4)
    longest = max(each for each in range(2000) if of_shape(each) == one)
    assert longest == 16 * 64 + 1 - MOST_CONTINUED == CONTEXT_LIMITS[0]
    assert of_shape(9000, 1025) == one != of_shape(9000, 1026)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("longest", "lengths"),
    [
        (4800, [(700, 1, 4000, 0), (4800, 0, 0, 0), (16, 17, 4799, 4800)]),
        (0, [(700, 1, 4096, 0), (0, 65, 64, 0), (16, 1025, 2047, 4096)]),
    ],
    ids=["long", "short"],
)
def test_a_captured_decode_serves_other_lengths(
    longest: int, lengths: list[tuple[int, ...]]
) -> None:
    backend, table = backend_over("cuda", num_seqs=4, max_blocks=300)
    staging = FixedStaging("cuda")
    inputs = torch.randn(4, 12, 64, device="cuda").bfloat16()
    query, key, value = inputs.split([8, 2, 2], dim=1)
    name = backend.plan(replace(decodes([1, 2, 3, 4], table, staging), longest=longest))
    backend.forward(0, query, key, value)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = backend.forward(0, query, key, value)
    for contexts in map(list, lengths):
        inputs.copy_(torch.randn(4, 12, 64))
        batch = replace(decodes(contexts, table, staging), longest=longest)
        assert backend.plan(batch) == name
        expected = backend.forward(0, query, key, value).clone()
        output.fill_(float("nan"))
        graph.replay()
        assert torch.equal(output, expected)
        assert not output[[context == 0 for context in contexts]].any()
