"""Decode attention: split contexts, padding, and the new token's way into the cache."""

from __future__ import annotations

from itertools import product

import gluon_emulator
import numpy as np
import pytest
import torch
from paged_cases import BOUND, Paged, attend, distance, make_paged
from torch import Tensor

from octavo.ops import ScoreFunction
from octavo.ops.cuda import attention_decode_cluster
from octavo.ops.cuda.attention_decode import (
    EMPTY,
    DecodeConfig,
    Scratch,
    can_round,
    decode_attention,
    decode_config,
)
from octavo.ops.cuda.attention_decode_cluster import ClusterConfig, attend_in_clusters
from octavo.ops.cuda.attention_scores import KernelScores
from octavo.ops.cuda.attention_work_items import Sequences, decode_items
from octavo.ops.cuda.kv_write import HeadChanges
from octavo.ops.cuda.paged import tile_alignment
from octavo.ops.cuda.quantize import empty_inputs, round_inputs
from octavo.ops.cuda.tile_sizes import power_of_2
from octavo.ops.quantized import Rounding

pytestmark = pytest.mark.usefixtures("poisoned")

# block size, KV heads, group, head size, window
CASES = {
    "cpu": [(8, 1, 3, 16, None), (16, 2, 1, 20, 60)],
    "cuda": [
        (16, 8, 4, 128, None),
        (16, 40, 1, 128, None),
        (32, 2, 2, 64, 700),
        (8, 1, 16, 256, None),
        (1, 2, 4, 80, None),
        (48, 2, 7, 96, 100),
    ],
}
LENGTHS = {"cpu": [1, 0, 300, 33], "cuda": [1, 0, 4000, 33, 1500, 16, 17, 0, 2999]}
DTYPES = {"cpu": [torch.float32], "cuda": list(BOUND)}


def scratch(num_places: int, kv_heads: int, group: int, dim: int, device: torch.device) -> Scratch:
    rows = num_places * kv_heads * group
    return Scratch.of(rows, rows * dim, device)


def configs(device: torch.device, dtype: torch.dtype, group: int, dim: int) -> list[DecodeConfig]:
    if device.type == "cpu":
        return [
            DecodeConfig(16, 1, num_stages=1, num_programs=8, is_early=is_early)
            for is_early in (False, True)
        ]
    found = [decode_config(dtype, dim, group, num_pairs) for num_pairs in (1, 100, 1000)]
    return list(dict.fromkeys(found))


def test_decodes(device: torch.device) -> None:
    contexts = np.array(LENGTHS[device.type], np.int32)
    num_seqs = len(contexts)
    rows = np.random.default_rng(0).permutation(num_seqs).astype(np.int32)
    seqs = Sequences(np.arange(num_seqs, dtype=np.int32)[::-1], rows, contexts, contexts * 0 + 1)
    for block_size, kv_heads, group, dim, window in CASES[device.type]:
        for dtype in DTYPES[device.type]:
            cached = [max(0, int(contexts[list(rows).index(row)]) - 1) for row in range(num_seqs)]
            for config in configs(device, dtype, group, dim):
                paged = make_paged(
                    cached, max(contexts) + 40, block_size, kv_heads, dim, dtype, device
                )
                fused = torch.randn(num_seqs, kv_heads * (group + 2), dim).to(dtype).to(device)
                query, key, value = fused.split([kv_heads * group, kv_heads, kv_heads], dim=1)
                alignment = tile_alignment(config.tile, block_size)
                items = decode_items(seqs, window, config.tile, alignment, num_splits=40).items
                room = scratch(200, kv_heads, group, dim, device)
                output = query.new_empty(num_seqs, kv_heads * group * dim)
                decode_attention(
                    query,
                    key,
                    value,
                    paged.layer_cache,
                    paged.table,
                    torch.from_numpy(items.reshape(-1)).to(device),
                    room,
                    output,
                    HeadChanges(),
                    KernelScores.of(ScoreFunction(dim**-0.5), device),
                    window,
                    config,
                )
                assert window or (items[:, 6] > 1).any(), "no context is split"
                for each in (room.means, room.sizes):
                    assert (each == EMPTY.value).all(), "the next kernel finds no results"
                check_decodes(paged, seqs, query, key, value, output, window)


def check_decodes(
    paged: Paged,
    seqs: Sequences,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    window: int | None,
    cap: float | None = None,
) -> None:
    """Each token attends to what is cached and to itself, and is cached; padding is zero."""
    for token, row, context in zip(*seqs[:3], strict=True):
        if context == 0:
            assert (output[token] == 0).all()
            assert paged.slot(row, 0).isnan().all(), "nothing is written for padding"
            continue
        keys, values = paged.keys[row][:context], paged.values[row][:context]
        keys[-1], values[-1] = key[token], value[token]
        expected = attend(query[token][None], keys, values, context - 1, window, cap)
        assert distance(output[token], expected[0]) < BOUND[query.dtype]
        written = paged.slot(row, context - 1)
        assert torch.equal(written, torch.stack((key[token], value[token]), 1))
        assert paged.slot(row, context).isnan().all()


# The same, of heads that clusters take
CLUSTER_CASES = {
    "cpu": [(16, 1, 4, 128, None), (48, 1, 7, 64, 900), (16, 1, 2, 256, None)],
    "cuda": [
        (16, 1, 4, 128, None),
        (16, 2, 8, 128, 3000),
        (48, 2, 7, 64, 1500),
        (8, 1, 1, 128, None),
        (1, 1, 3, 128, None),
        (256, 2, 5, 128, 100),
        (16, 1, 2, 64, None),
        (16, 2, 2, 256, None),
        (8, 1, 4, 256, 1000),
    ],
}


CLUSTER_DTYPES = {"cpu": [torch.bfloat16], "cuda": [torch.bfloat16, torch.float16]}


def test_decodes_in_clusters(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of several tiles for each program, and beside padding."""
    if device.type == "cpu":
        monkeypatch.setattr(attention_decode_cluster, "launch", gluon_emulator.launch_clusters)
    lengths = {"cpu": [1, 0, 1300], "cuda": [1, 0, 9000, 33]}[device.type]
    contexts = np.array(lengths, np.int32)
    num_seqs = len(contexts)
    rows = np.random.default_rng(0).permutation(num_seqs).astype(np.int32)
    seqs = Sequences(np.arange(num_seqs, dtype=np.int32)[::-1], rows, contexts, contexts * 0 + 1)
    cached = [max(0, int(contexts[list(rows).index(row)]) - 1) for row in range(num_seqs)]
    configs = ClusterConfig(), ClusterConfig(is_one_tile=True), ClusterConfig(8)
    # The emulator takes half a minute for all of them.
    pairs = zip if device.type == "cpu" else product
    for config, (block_size, kv_heads, group, dim, window) in pairs(
        configs, CLUSTER_CASES[device.type]
    ):
        if config.is_one_tile:
            window = min(window or 1025, 1025)  # 16 tiles of 64 cached keys, and the new one
        tile = config.tile
        for dtype in CLUSTER_DTYPES[device.type]:
            if not config.takes(dtype, dim, group):
                assert config.num_warps == 8
                continue
            cap = None if window is None else 2.0
            paged = make_paged(cached, max(contexts) + 40, block_size, kv_heads, dim, dtype, device)
            fused = torch.randn(num_seqs, kv_heads * (group + 2), dim).to(dtype).to(device)
            query, key, value = fused.split([kv_heads * group, kv_heads, kv_heads], dim=1)
            items = decode_items(seqs, window, tile, 1, None, 5).items
            assert len(items) == 5
            output = query.new_full((num_seqs, kv_heads * group * dim), torch.nan)
            attend_in_clusters(
                query,
                key,
                value,
                paged.layer_cache,
                paged.table,
                torch.from_numpy(items.reshape(-1)).to(device),
                output,
                HeadChanges(),
                KernelScores.of(ScoreFunction(dim**-0.5, cap), device),
                config,
            )
            check_decodes(paged, seqs, query, key, value, output, window, cap)


@pytest.mark.parametrize(
    ("rounding", "group"),
    [(Rounding.IN_TWO, 4), (Rounding.SPANS, 8), (Rounding.GROUPS, 3), (Rounding.INTEGERS, 2)],
)
@pytest.mark.parametrize("is_early", [False, True])
def test_results_are_rounded_as_a_kernel_of_its_own_does(
    device: torch.device, rounding: Rounding, group: int, is_early: bool
) -> None:
    """Of one split and of several, and of padding."""
    kv_heads, dim, contexts = 2, 128, np.array(LENGTHS[device.type], np.int32)
    num_seqs = len(contexts)
    rows = np.arange(num_seqs, dtype=np.int32)
    seqs = Sequences(rows, rows, contexts, contexts * 0 + 1)
    # With so many warps, a program combines all heads.
    config = DecodeConfig(64, power_of_2(4 * group) if is_early else 2, 1, 8, is_early=is_early)
    assert can_round(rounding, config, group, dim)
    cached = [max(0, int(context) - 1) for context in contexts]
    paged = make_paged(cached, max(contexts) + 40, 16, kv_heads, dim, torch.bfloat16, device)
    fused = torch.randn(num_seqs, kv_heads * (group + 2), dim).bfloat16().to(device)
    query, key, value = fused.split([kv_heads * group, kv_heads, kv_heads], dim=1)
    items = decode_items(seqs, None, 64, tile_alignment(64, 16), num_splits=4).items
    assert (items[:, 6] > 1).any()
    room = scratch(200, kv_heads, group, dim, device)
    size = kv_heads * group * dim
    plain = query.new_empty(num_seqs, size)
    rounded = empty_inputs(num_seqs, size, rounding, device)
    for output, how in ((plain, Rounding.NONE), (rounded, rounding)):
        decode_attention(
            query,
            key,
            value,
            paged.layer_cache,
            paged.table,
            torch.from_numpy(items.reshape(-1)).to(device),
            room,
            output,
            HeadChanges(),
            KernelScores.of(ScoreFunction(dim**-0.5), device),
            None,
            config,
            rounding=how,
        )
    wanted = round_inputs(plain, rounding)
    assert torch.equal(rounded.values.view(torch.uint8), wanted.values.view(torch.uint8))
    assert torch.equal(rounded.scales[..., :num_seqs], wanted.scales[..., :num_seqs])


def test_what_no_program_has_all_of_is_not_rounded() -> None:
    many = decode_config(torch.bfloat16, 128, 4, 512)
    assert can_round(Rounding.IN_TWO, many, 4, 128)
    assert can_round(Rounding.IN_TWO, decode_config(torch.bfloat16, 64, 8, 512), 8, 64)
    assert not can_round(Rounding.IN_TWO, many, 7, 128)
    assert can_round(Rounding.INTEGERS, many, 7, 128)
    assert not can_round(Rounding.INTEGERS, many, 4, 80)
    assert not can_round(Rounding.TOKENS, many, 4, 128)
    few = decode_config(torch.bfloat16, 128, 4, 8)  # of which programs combine a head each
    assert not can_round(Rounding.IN_TWO, few, 4, 128)
    assert can_round(Rounding.INTEGERS, few, 4, 128)


@pytest.mark.parametrize(("head_dim", "group"), [(128, 8), (128, 4), (128, 1), (64, 8), (256, 2)])
def test_few_pairs_have_one_program_on_each_sm(head_dim: int, group: int) -> None:
    """As many sequences as leave some SMs without a program never have other programs."""
    found = {decode_config(torch.bfloat16, head_dim, group, n) for n in range(9, 64)}
    assert [config.num_programs for config in found] == [132]


def test_a_sequence_is_combined_in_two_rounds_where_each_program_has_an_sm() -> None:
    def splits(num_seqs: int, kv_heads: int, group: int, dim: int) -> int:
        config = decode_config(torch.bfloat16, dim, group, num_seqs * kv_heads)
        return config.splits_of_each(num_seqs, kv_heads, group, dim)

    assert splits(1, 4, 8, 128) == 32  # Qwen3-30B-A3B: 128 programs
    assert splits(2, 4, 8, 128) == 16
    assert splits(1, 8, 4, 128) == 32  # Llama 3 8B: as many as are combined at once
    assert splits(1, 8, 8, 64) == 32  # gpt-oss-20b, the same
    assert splits(1, 4, 2, 256) == 32  # Gemma 3 4B, the same
    assert decode_config(torch.bfloat16, 128, 8, 4).collecting(8, 128).splits == 16
    assert decode_config(torch.bfloat16, 64, 8, 8).collecting(8, 64).splits == 32  # in one round


def test_configurations_for_little_shared_memory_take_less() -> None:
    """The second one is for much shared memory: 138 KB, and many GPUs have 99."""
    for dim in (64, 128, 256):
        much = decode_config(torch.bfloat16, dim, 4, 32)
        little = decode_config(torch.bfloat16, dim, 4, 32, shared_memory=99 << 10)
        assert much.num_programs < little.num_programs
        keys_and_values = 2 * 2 * dim * little.tile * little.num_stages
        assert keys_and_values < 99 << 10
