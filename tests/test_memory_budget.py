"""The budget's numbers, and the messages when something does not fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from octavo.config import GIB, CacheConfig
from octavo.core.kv.specs import CrossAttention, FullAttention, SlidingWindow, group_layers
from octavo.errors import OutOfMemory
from octavo.memory_budget import (
    FixedMemory,
    KVShape,
    MemoryBudget,
    activation_bytes,
    check_model_len,
    format_bytes,
    plan_memory,
)

# OPT-13B, the paper's example: 40 layers, hidden 5120, fp16: 800 KB a token (section 3).
OPT_13B = KVShape(group_layers([FullAttention()] * 40), 16, 2 * 40 * 128 * 2)
SMALL = KVShape(group_layers([FullAttention()] * 2), 4, 2 * 2 * 8 * 4)  # 1 KiB a block
NOTHING = FixedMemory(0, 0)


def budget(
    cache: CacheConfig, shape: KVShape = SMALL, fixed: FixedMemory = NOTHING, total: int = 100 << 10
) -> MemoryBudget:
    return plan_memory(cache, shape, fixed, total, default_kv_cache=total // 2)


def test_kv_bytes_per_token_are_the_papers() -> None:
    assert OPT_13B.bytes_per_token == 2 * 5120 * 40 * 2 == 819_200
    assert OPT_13B.block_bytes == 16 * 819_200


def test_mixed_layers_share_blocks() -> None:
    # 2 full and 10 sliding layers: 1 + 5 groups of 2 layers.
    layout = group_layers([FullAttention()] * 2 + [SlidingWindow(64)] * 10)
    shape = KVShape(layout, 16, 2 * 4 * 64 * 2)
    assert shape.block_bytes == 2 * (2 * 16 * 4 * 64 * 2)
    assert shape.bytes_per_token == 12 * (2 * 4 * 64 * 2)
    # 1000 tokens: 63 full blocks, and 5 windows of 63 + 16 tokens that straddle 6 blocks.
    assert shape.blocks_for(1000, chunk=16) == 63 + 5 * 6


def test_blocks_follow_from_the_memory_asked_for_rounded_down() -> None:
    got = budget(CacheConfig(block_size=4, kv_cache_memory=(10 << 10) + 1023, swap_space=0))
    assert (got.num_blocks, got.kv_cache) == (9, 10 << 10)  # one block is the null block
    assert (got.swap, got.num_swap_blocks) == (0, 0)


def test_blocks_asked_for_are_taken_as_they_are() -> None:
    got = budget(CacheConfig(block_size=4, num_blocks=20, swap_space=5 << 10))
    assert (got.num_blocks, got.kv_cache, got.num_swap_blocks) == (20, 21 << 10, 5)
    assert got.unused == 79 << 10


def test_the_default_share_is_limited_by_what_is_left() -> None:
    fixed = FixedMemory(weights=70 << 10, activations=10 << 10, graphs=1 << 10)
    assert budget(CacheConfig(block_size=4), fixed=fixed).num_blocks == 18
    assert budget(CacheConfig(block_size=4)).num_blocks == 49


def test_the_swap_tier_has_no_more_blocks_than_the_device() -> None:
    assert budget(CacheConfig(block_size=4, num_blocks=7, swap_space=GIB)).num_swap_blocks == 7


def test_on_a_cpu_the_swap_tier_takes_what_the_cache_leaves() -> None:
    got = budget(CacheConfig(block_size=4, num_blocks=60, swap_space=GIB))
    assert got.num_swap_blocks == 39
    elsewhere = plan_memory(
        CacheConfig(block_size=4, num_blocks=60, swap_space=GIB), SMALL, NOTHING, 100 << 10, 0, GIB
    )
    assert elsewhere.num_swap_blocks == 60


@pytest.mark.parametrize(
    ("cache", "asked"),
    [
        (CacheConfig(block_size=4, num_blocks=100), "num_blocks=100"),
        (CacheConfig(block_size=4, kv_cache_memory=200 << 10), "kv_cache_memory=204800"),
        (CacheConfig(block_size=4, kv_cache_memory=2047), "kv_cache_memory=2047"),
    ],
)
def test_a_cache_that_does_not_fit_names_what_would(cache: CacheConfig, asked: str) -> None:
    with pytest.raises(OutOfMemory) as raised:
        budget(cache)
    message = str(raised.value)
    assert message.startswith(f"{asked} does not fit")
    assert "num_blocks from 1 to 99, or kv_cache_memory from 2048 to 102400" in message
    # The advice holds.
    for feasible in (CacheConfig(num_blocks=99), CacheConfig(kv_cache_memory=2048)):
        assert budget(feasible).num_blocks >= 1


def test_without_room_for_one_block_the_message_says_how_much_is_missing() -> None:
    fixed = FixedMemory(weights=90 << 10, activations=9 << 10)
    with pytest.raises(OutOfMemory, match=re.escape("free 1.00 KiB")) as raised:
        budget(CacheConfig(block_size=4), fixed=fixed)
    assert "weights take 90.00 KiB, activations 9.00 KiB" in str(raised.value)
    more = plan_memory(CacheConfig(block_size=4), SMALL, fixed, 101 << 10, 101 << 10)
    assert more.num_blocks == 1


def test_a_sequence_that_cannot_fit_names_the_longest_that_does() -> None:
    got = budget(CacheConfig(block_size=4, num_blocks=10))
    check_model_len(got, SMALL, 40, chunk=16)
    with pytest.raises(OutOfMemory) as raised:
        check_model_len(got, SMALL, 41, chunk=16)
    message = str(raised.value)
    assert "max_model_len=41 needs 11 KV blocks, but there are 10" in message
    assert "Give kv_cache_memory=12288, or set max_model_len to 40 or less" in message
    assert budget(CacheConfig(kv_cache_memory=12288)).num_blocks == 11


def test_advice_that_would_not_help_is_not_given() -> None:
    """No length fits beside the longest input of an encoder; a shorter input would."""
    layout = group_layers([FullAttention(), CrossAttention()])
    shape = replace(SMALL, layout=layout, encoder_len=44)
    with pytest.raises(OutOfMemory, match="beside 44 tokens of encoder input needs 13") as raised:
        check_model_len(budget(CacheConfig(block_size=4, num_blocks=10)), shape, 8, chunk=16)
    assert str(raised.value).endswith("or lower max_num_batched_tokens, which limits that input")


def test_a_window_makes_long_sequences_fit() -> None:
    layout = group_layers([SlidingWindow(8)] * 2)
    shape = KVShape(layout, 4, 2 * 2 * 8 * 4)
    assert shape.longest_sequence(num_blocks=4, chunk=1, limit=1_000_000) == 1_000_000
    assert shape.longest_sequence(num_blocks=2, chunk=1, limit=1_000_000) == 8


def test_activations_grow_with_tokens_and_logits() -> None:
    assert activation_bytes(10, 0, 100, 1000, 2) == 2_000
    assert activation_bytes(0, 3, 100, 1000, 2) == 18_000


def test_the_budget_prints_each_part() -> None:
    fixed = FixedMemory(weights=30 << 10, activations=2 << 10)
    text = str(budget(CacheConfig(block_size=4, num_blocks=9, swap_space=3 << 10), fixed=fixed))
    assert [line.split()[0] for line in text.splitlines()] == [
        "total", "weights", "activations", "graphs", "KV", "unused", "swap",
    ]  # fmt: skip
    assert "10.00 KiB  9 blocks of 4 tokens (1.00 KiB)" in text
    assert "3.00 KiB  host, 3 blocks of 4 tokens (1.00 KiB)" in text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.50 KiB"),
        (5 * GIB, "5.00 GiB"),
        (1 << 42, "4.00 TiB"),
    ],
)
def test_format_bytes(size: int, text: str) -> None:
    assert format_bytes(size) == text
