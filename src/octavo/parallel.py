"""Tensor parallelism: which part of a model one of its ranks holds. Imports no torch.

Projections are split as in Megatron-LM (arXiv:1909.08053). Those that open a block (Q, K and V,
gate and up) are column-parallel: each rank computes some of the heads, or of the intermediate
elements. Those that close it (the attention's output, down) are row-parallel: each rank computes a
partial sum of the result from its own heads or elements. The head is divided by rows of the
vocabulary, and so is the embedding of octavo's own families. Everything else is the same on all
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import ConfigError

OPTION = "tensor_parallel_size"  # the field that errors name


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `rank` of `size` equal parts; by default the whole.

    Raises:
        ConfigError: there are fewer than one part.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(OPTION, f"{self.size} is less than 1")
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"

    def divide(self, count: int, what: str) -> int:
        """This rank's share of `count` things that cannot be cut.

        Raises:
            ConfigError: they do not divide; names them as `what`.
        """
        if count % self.size:
            raise ConfigError(
                OPTION, f"{what} ({count}) cannot be divided evenly among {self.size} ranks"
            )
        return count // self.size

    def of_kv_heads(self, num_kv_heads: int) -> Shard:
        """Which part of the KV heads the rank holds: where there are fewer than ranks, one head,
        which several ranks hold.

        Raises:
            ConfigError: neither number divides the other.
        """
        if num_kv_heads >= self.size:
            self.divide(num_kv_heads, "the number of KV heads")
            return self
        if self.size % num_kv_heads:
            raise ConfigError(
                OPTION,
                f"the number of KV heads ({num_kv_heads}) neither divides {self.size} ranks nor is "
                "a multiple of them",
            )
        return Shard(self.rank * num_kv_heads // self.size, num_kv_heads)

    def padded(self, num_rows: int) -> int:
        """Rows that each rank holds of a table of `num_rows`, padded to a multiple of `size`.

        Raises:
            ConfigError: the last rank would have nothing but padding.
        """
        rows = -(-num_rows // self.size)
        if rows * (self.size - 1) >= num_rows:
            raise ConfigError(
                OPTION, f"{self.size} ranks are too many for a vocabulary of {num_rows} tokens"
            )
        return rows


WHOLE = Shard()
