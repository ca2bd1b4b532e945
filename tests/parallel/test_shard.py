"""How counts are divided among ranks, and which cannot be."""

from __future__ import annotations

import pytest

from octavo.errors import ConfigError
from octavo.parallel import Shard


def test_the_default_is_the_whole() -> None:
    whole = Shard()
    assert whole.divide(7, "heads") == 7
    assert whole.of_kv_heads(3) == whole
    assert whole.padded(7) == 7


def test_counts_are_divided_evenly() -> None:
    assert [Shard(rank, 3).divide(12, "the number of heads") for rank in range(3)] == [4, 4, 4]
    message = r"^tensor_parallel_size: the number of heads \(12\) cannot be divided .* 5 ranks$"
    with pytest.raises(ConfigError, match=message):
        Shard(0, 5).divide(12, "the number of heads")
    with pytest.raises(ConfigError, match="cannot be divided"):
        Shard(0, 24).divide(12, "the number of heads")


def test_few_kv_heads_are_replicated() -> None:
    """Query heads are divided in order; each rank holds the KV head that its queries read."""
    for num_heads, num_kv_heads, size in [(8, 2, 4), (8, 1, 4), (6, 1, 3), (32, 4, 8), (8, 4, 4)]:
        for rank in range(size):
            shard = Shard(rank, size)
            num_local = shard.divide(num_heads, "the number of heads")
            queries = range(rank * num_local, (rank + 1) * num_local)
            needed = {query // (num_heads // num_kv_heads) for query in queries}
            part = shard.of_kv_heads(num_kv_heads)
            width = num_kv_heads // part.size
            assert needed == set(range(part.rank * width, (part.rank + 1) * width))


def test_kv_heads_that_do_not_divide() -> None:
    with pytest.raises(ConfigError, match=r"the number of KV heads \(3\) cannot .* among 2 ranks"):
        Shard(0, 2).of_kv_heads(3)
    with pytest.raises(ConfigError, match=r"the number of KV heads \(2\) neither divides 3 ranks"):
        Shard(0, 3).of_kv_heads(2)


def test_tables_are_padded() -> None:
    assert Shard(1, 2).padded(50257) == 25129
    assert Shard(2, 3).padded(320) == 107
    with pytest.raises(ConfigError, match="4 ranks are too many for a vocabulary of 5 tokens"):
        Shard(0, 4).padded(5)


def test_what_is_no_shard() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size: 0 is less than 1"):
        Shard(0, 0)
    with pytest.raises(AssertionError):
        Shard(2, 2)
