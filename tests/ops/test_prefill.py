"""Prefill attention: new tokens over cached and new keys, with windows."""

from __future__ import annotations

import math
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from paged_cases import BOUND, attend, distance, make_paged
from torch import Tensor

from octavo.ops import ScoreFunction
from octavo.ops.cuda import attention_prefill, attention_prefill_hopper
from octavo.ops.cuda.attention_prefill import (
    HopperPrefillConfig,
    PrefillConfig,
    PrefillSplits,
    prefill_attention,
    prefill_config,
    prefill_times,
)
from octavo.ops.cuda.attention_scores import KernelScores
from octavo.ops.cuda.attention_work_items import (
    Sequences,
    Splitting,
    num_places,
    prefill_items,
)
from octavo.ops.cuda.devices import num_sms
from octavo.ops.cuda.paged import tile_alignment
from octavo.ops.cuda.tile_sizes import MUCH_SHARED_MEMORY

pytestmark = pytest.mark.usefixtures("poisoned")

# block size, KV heads, group, head size, window
CASES = {
    "cpu": [(8, 1, 3, 16, None), (16, 2, 1, 20, 11)],
    "cuda": [
        (16, 8, 4, 128, None),
        (16, 40, 1, 128, None),
        (32, 2, 2, 64, 100),
        (8, 1, 16, 256, None),
        (1, 2, 4, 80, None),
        (48, 2, 7, 96, 33),
    ],
}
# The same, with tiles of so many keys
HOPPER_CASES = {
    "cpu": [
        (16, 2, 3, 64, None, 64),
        (16, 1, 2, 256, 40, 64),
        (8, 1, 4, 64, 100, 64),
        (64, 2, 1, 64, None, 128),
    ],
    "cuda": [
        (block_size, kv_heads, group, dim, window, tile)
        for block_size, kv_heads, group, dim, window in (
            (16, 8, 4, 128, None),
            (16, 40, 1, 128, None),
            (16, 4, 8, 64, 128),
            (8, 3, 7, 64, 300),
            (128, 2, 5, 128, None),
            (512, 5, 128, 128, 1),
            (16, 4, 2, 256, None),
            (8, 2, 5, 256, 100),
        )
        for tile in (64, 128)
        if tile * dim <= 16_384
    ],
}
# cached, new
SEQUENCES = {"cpu": [(0, 18), (21, 9)], "cuda": [(0, 1), (0, 700), (500, 513), (33, 2), (1000, 64)]}
DTYPES = {"cpu": [torch.float32], "cuda": list(BOUND)}


def run(
    case: tuple[int, int, int, int, int | None],
    config: PrefillConfig | HopperPrefillConfig,
    dtype: torch.dtype,
    device: torch.device,
    sequences: list[tuple[int, int]],
    sinks: Tensor | None = None,
    num_padded: int = 0,
    is_causal: bool = True,
    gap: int = 0,
    size: float = 1.0,
    cap: float | None = None,
    splitting: Splitting | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Each sequence's results and what is expected of them, without sinks.

    sequences: cached and new tokens. num_padded: items without tokens. gap: elements between the
    tokens of the fused projection. size: of scores, whose variance is its square.
    splitting: see `prefill_items`.
    """
    block_size, kv_heads, group, dim, window = case
    cached, lens = (np.array(x, np.int32) for x in zip(*sequences, strict=True))
    starts = (lens.cumsum() - lens).astype(np.int32)
    contexts = (cached + lens).tolist()
    seqs = Sequences(starts, np.arange(len(lens), dtype=np.int32), cached + lens, lens)
    paged = make_paged(contexts, max(contexts) + 70, block_size, kv_heads, dim, dtype, device)
    fused = size * torch.randn(int(lens.sum()), kv_heads * (group + 2) * dim + gap)
    fused = fused.to(dtype).to(device)
    query = fused[:, : kv_heads * group * dim].unflatten(1, (kv_heads * group, dim))
    tile, alignment = config.tile, tile_alignment(config.tile, block_size)
    num_tokens = config.rows // group
    items = prefill_items(seqs, window, tile, alignment, num_tokens, is_causal, splitting)
    splits = None
    if splitting is not None:
        places = kv_heads * num_places(splitting.at_once)
        assert window is not None or (items[:, 9] > 1).any(), "an item is split"
        assert (items[:, 8:] < [places] * 3).all()
        splits = PrefillSplits.of(places, config.rows, dim, device)
    items = np.concatenate([items, np.zeros((num_padded, items.shape[1]), np.int32)])
    output = torch.full((len(query), kv_heads * group * dim), torch.nan, dtype=dtype, device=device)
    weights = None if sinks is None else SimpleNamespace(weight=sinks)
    scores = KernelScores.of(ScoreFunction(dim**-0.5, softcap=cap, sinks=weights), device)
    staged = torch.from_numpy(items.reshape(-1)).to(device)
    # A second launch finds its counters as the first one did.
    for _ in range(2 if isinstance(config, HopperPrefillConfig) or splitting else 1):
        prefill_attention(
            query,
            paged.layer_cache,
            paged.table,
            staged,
            output,
            scores,
            window,
            config,
            is_causal,
            splits=splits,
        )
    results = []
    for seq, (start, count) in enumerate(zip(starts, lens, strict=True)):
        keys, values = (x[seq][: contexts[seq]] for x in (paged.keys, paged.values))
        part = slice(start, start + count)
        first = int(cached[seq]) if is_causal else contexts[seq]  # behind the end, all is seen
        results.append((output[part], attend(query[part], keys, values, first, window, cap)))
    return results


def run_on_hopper(
    case: tuple[int, int, int, int, int | None, int], *args: Any, **options: Any
) -> Any:
    """`run`, with tiles of as many keys as the case's last number says."""
    return run(case[:5], HopperPrefillConfig(case[5]), *args, **options)


@pytest.mark.parametrize("most_items", [None, 2])
def test_prefills(
    device: torch.device, most_items: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All at once, or a few in each launch."""
    if most_items is not None:
        monkeypatch.setattr(attention_prefill, "_MAX_ITEMS", most_items)
    for case in CASES[device.type]:
        for dtype in DTYPES[device.type]:
            config = PrefillConfig(rows=16, tile=16, num_warps=1, num_stages=1)
            if device.type == "cuda":
                config = prefill_config(dtype, case[3], case[2])
            for got, expected in run(case, config, dtype, device, SEQUENCES[device.type]):
                assert distance(got, expected) < BOUND[dtype]


def test_few_tokens_of_long_contexts(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their keys are split, in the middle of a window and of what all rows see, too."""
    monkeypatch.setattr(attention_prefill, "_MAX_ITEMS", 5)
    sequences = {"cpu": [(150, 9), (3, 7), (300, 2)], "cuda": [(9000, 70), (30, 7), (0, 500)]}
    # Each kernel takes seconds to compile for a GPU: the dtypes take turns.
    for case, dtype in zip(CASES[device.type], cycle(DTYPES[device.type]), strict=False):
        config = PrefillConfig(rows=16, tile=16, num_warps=1, num_stages=1)
        if device.type == "cuda":
            config = prefill_config(dtype, case[3], case[2])
        splitting = Splitting(9 if device.type == "cpu" else 160, added_keys=1)
        of_device = partial(run, case, config, dtype, device, sequences[device.type])
        for options in ({}, {"is_causal": False, "size": 3.0}, {"num_padded": 3, "cap": 1.5}):
            if case[4] is not None and not options.get("is_causal", True):
                continue
            # Scores that are larger are rounded more coarsely, and so are their exponents.
            bound = BOUND[dtype] * options.get("size", 1.0)
            for got, expected in of_device(splitting=splitting, **options):
                assert distance(got, expected) < bound


def test_a_sink_counts_once_in_split_items(device: torch.device) -> None:
    """One that has as much weight as 200 keys, all of which have the same."""
    dtype = DTYPES[device.type][0]
    config = PrefillConfig(rows=16, tile=16, num_warps=1, num_stages=1)
    case, sequences = (8, 1, 2, 16, None), [(195, 5)]
    sinks = torch.full((2,), math.log(200), device=device)
    [(got, without)] = run(
        case, config, dtype, device, sequences, sinks, size=0.0, splitting=Splitting(7, 1)
    )
    num_keys = torch.arange(196, 201, device=device)[:, None]
    assert distance(got, without * num_keys / (num_keys + 200)) < BOUND[dtype]


@pytest.mark.parametrize("shared_memory", [99 << 10, MUCH_SHARED_MEMORY])
@pytest.mark.parametrize("dtype", list(BOUND))
def test_a_tile_holds_a_token_of_any_group(dtype: torch.dtype, shared_memory: int) -> None:
    for dim in (64, 100, 128, 256):
        for group in (1, 3, 8, 33, 64, 65, 71, 128):
            assert prefill_config(dtype, dim, group, shared_memory).rows >= group


@pytest.mark.parametrize("group", [1, 8, 128])
def test_heads_of_256_take_less_where_shared_memory_is_scarce(group: int) -> None:
    """Compiled for sm_89, the usual tiles take 104 KB, and these 68 to 84 of 99."""
    much, little = (
        prefill_config(torch.bfloat16, 256, group, size) for size in (MUCH_SHARED_MEMORY, 99 << 10)
    )
    assert little.rows * little.tile < much.rows * much.tile


@pytest.fixture
def hopper(device: torch.device, request: pytest.FixtureRequest) -> torch.device:
    """A Hopper GPU, or three emulated SMs."""
    if device.type == "cpu":
        request.getfixturevalue("emulated_prefill")
    elif torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")
    return device


def test_prefills_on_hopper(hopper: torch.device) -> None:
    sequences = {"cpu": [(0, 18), (21, 9), (150, 70)], "cuda": SEQUENCES["cuda"]}[hopper.type]
    for case in HOPPER_CASES[hopper.type]:
        block_size, _, group, dim, _, _ = case
        for dtype in (torch.bfloat16, torch.float16):
            assert attention_prefill_hopper.takes(dtype, dim, group, block_size, None)
            for got, expected in run_on_hopper(case, dtype, hopper, sequences):
                assert distance(got, expected) < BOUND[dtype]


def test_tokens_that_are_not_aligned_on_hopper(hopper: torch.device) -> None:
    case = (16, 1, 2, 64, None, 64)
    for got, expected in run_on_hopper(case, torch.bfloat16, hopper, [(0, 9)], gap=3):
        assert distance(got, expected) < BOUND[torch.bfloat16]


def test_an_encoder_s_keys_on_hopper(hopper: torch.device) -> None:
    """Which all queries see."""
    case = (16, 2, 5, 64, None, 64)
    sequences = [(61, 3), (100, 28), (1, 200)]
    for got, expected in run_on_hopper(case, torch.bfloat16, hopper, sequences, is_causal=False):
        assert distance(got, expected) < BOUND[torch.bfloat16]


@pytest.mark.parametrize("size", [0.01, 4.0, 30.0])
def test_scores_that_grow_on_hopper(hopper: torch.device, size: float) -> None:
    """From tile to tile, by less than weights may exceed 1, and by more."""
    for dtype in (torch.bfloat16, torch.float16):
        for case in ((16, 1, 3, 64, None, 64), (16, 1, 2, 256, 90, 64), (16, 1, 1, 128, None, 128)):
            sequences = [(0, 150), (300, 7)]
            for got, expected in run_on_hopper(case, dtype, hopper, sequences, size=size):
                assert distance(got, expected) < BOUND[dtype]


def test_capped_scores_on_hopper(hopper: torch.device) -> None:
    for case in ((16, 2, 2, 128, None, 64), (16, 1, 2, 256, 50, 64)):
        for cap in (0.5, 8.0):
            results = run_on_hopper(case, torch.bfloat16, hopper, [(30, 140)], size=6.0, cap=cap)
            for got, expected in results:
                assert distance(got, expected) < BOUND[torch.bfloat16]


def test_sinks_and_empty_items_on_hopper(hopper: torch.device) -> None:
    """A sink of -inf changes nothing; one far above all scores leaves nothing of the values."""
    case = (16, 2, 2, 64, 128, 64)
    sinks = torch.tensor([-torch.inf, -torch.inf, 200.0, -torch.inf], device=hopper)
    for got, expected in run_on_hopper(case, torch.bfloat16, hopper, [(0, 3), (99, 80)], sinks, 9):
        results, others = (x.view(len(x), 4, 64) for x in (got, expected))
        assert (results[:, 2] == 0).all()
        kept = [0, 1, 3]
        assert distance(results[:, kept], others[:, kept]) < BOUND[torch.bfloat16]


def test_empty_items_of_heads_that_follow_each_other_on_hopper(hopper: torch.device) -> None:
    """Each time, units without tokens come before those of the next heads."""
    case = (16, 10, 1, 64, None, 64)
    for got, expected in run_on_hopper(case, torch.bfloat16, hopper, [(0, 130), (5, 2)], None, 5):
        assert distance(got, expected) < BOUND[torch.bfloat16]


def test_a_step_without_prompts_on_hopper(hopper: torch.device) -> None:
    query = torch.full((3, 4, 64), torch.nan, dtype=torch.bfloat16, device=hopper)
    cache = torch.empty((2, 2, 2, 16, 64), dtype=torch.bfloat16, device=hopper)
    none = torch.empty((0, 8), dtype=torch.int32, device=hopper)
    output = torch.zeros_like(query.flatten(1))
    attention_prefill_hopper.attend_on_hopper(
        query, cache, none, none.flatten(), output, 1.0, None, None, None, 64, True
    )
    assert (output == 0).all()


@pytest.mark.parametrize(
    ("new", "context", "group", "heads", "dim", "window", "of_16_bits", "of_8_bits"),
    [
        (16, 2048, 4, 8, 128, None, True, True),
        (128, 2048, 4, 8, 128, None, True, True),
        (512, 2048, 4, 8, 128, None, False, False),
        (256, 8192, 4, 8, 128, None, True, False),
        (512, 8192, 4, 8, 128, None, False, False),
        (16, 8192, 1, 40, 128, None, True, True),
        (512, 8192, 1, 40, 128, None, False, False),
        (512, 8192, 2, 4, 256, None, True, True),
        (2048, 8192, 2, 4, 256, 1024, False, False),
        (128, 32_768, 4, 8, 128, 4096, True, True),
        (8192, 8192, 4, 8, 128, None, False, False),
    ],
)
def test_few_tokens_of_long_contexts_are_not_for_hopper(
    new: int,
    context: int,
    group: int,
    heads: int,
    dim: int,
    window: int | None,
    of_16_bits: bool,
    of_8_bits: bool,
) -> None:
    """As measured on an H200."""
    lens, contexts = np.array([new], np.int32), np.array([context], np.int32)
    seqs = Sequences(lens * 0, lens * 0, contexts, lens)
    arguments = seqs, window, group, heads, num_sms(torch.device("cpu"))
    for is_fp8, expected in ((False, of_16_bits), (True, of_8_bits)):
        config = prefill_config(torch.bfloat16, dim, group, is_fp8=is_fp8)
        times = prefill_times(*arguments, config, is_fp8)
        assert (times.split < times.whole) == expected


@pytest.mark.parametrize(
    ("new", "context", "num_passes", "expected"),
    [
        (128, 131_072, 2, True),
        (256, 131_072, 2, True),
        (512, 131_072, 2, False),
        (2048, 131_072, 2, False),
        (512, 262_144, 4, True),
    ],
)
def test_several_passes_of_few_tokens_are_not_for_hopper(
    new: int, context: int, num_passes: int, expected: bool
) -> None:
    """As measured on an H200, with an FP8 cache of 8 KV heads."""
    config, lens = prefill_config(torch.bfloat16, 128, 4), np.array([new], np.int32)
    seqs = Sequences(lens * 0, lens * 0, np.array([context], np.int32), lens)
    times = prefill_times(seqs, None, 4, 8, num_sms(torch.device("cpu")), config, True, num_passes)
    assert (times.split < times.whole) == expected


def test_prompts_may_be_longer_than_what_they_read_of_an_encoder() -> None:
    lens = np.array([300, 200], np.int32)
    seqs = Sequences(lens * 0, lens * 0, np.array([5, 1], np.int32), lens)
    config = prefill_config(torch.bfloat16, 64, 1)
    times = prefill_times(seqs, None, 1, 8, num_sms(torch.device("cpu")), config, is_fp8=False)
    assert min(times) > 0


def test_what_is_for_hopper() -> None:
    takes = attention_prefill_hopper.takes
    assert takes(torch.float16, 128, 128, 8, None)
    assert takes(torch.bfloat16, 128, 4, 16, 128)
    assert not takes(torch.bfloat16, 64, 8, 16, 128), "the window holds few elements"
    assert not takes(torch.float32, 128, 1, 16, None)
    assert not takes(torch.bfloat16, 128, 129, 16, None), "more heads than an item has rows"
    for dim in (32, 80, 96, 192, 512):
        assert not takes(torch.bfloat16, dim, 1, 16, None)
    for block_size in (1, 4, 24, 48):
        assert not takes(torch.bfloat16, 128, 1, block_size, None)


def test_long_sequences_have_larger_tiles() -> None:
    assert HopperPrefillConfig.of([500] * 100, None, 128).tile == 64
    assert HopperPrefillConfig.of([2048] * 4, None, 128).tile == 128
    assert HopperPrefillConfig.of([100] * 100 + [30_000], None, 128).tile == 128, (
        "as most of the work has"
    )
    assert HopperPrefillConfig.of([30_000], 512, 128).tile == 64
    assert HopperPrefillConfig.of([30_000], None, 256).tile == 64
