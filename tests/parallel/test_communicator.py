"""Exchanges between ranks: what every rank gets, bit for bit."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory
from numpy.typing import NDArray
from ranks import Ranks
from torch import Tensor

from octavo.ops.communicator import Communicator, GroupCommunicator, ReductionSite, SingleRank
from octavo.ops.cuda.all_reduce import PeerCommunicator

RanksOf = Callable[[int], Ranks]
SIZES = (2, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def part_of(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank contributes: numbers of very different sizes."""
    generator = torch.Generator().manual_seed(rank)
    values = torch.randn(shape, generator=generator)
    return (values * 10.0 ** (3 * rank)).to(dtype)


def exchange(
    communicator: Communicator, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(sum, gathered, this rank's part afterwards)."""
    x = part_of(communicator.shard.rank, shape, dtype)
    return communicator.all_reduce(x), communicator.all_gather(x), x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_exchanges(size: int, dtype: torch.dtype, ranks: RanksOf) -> None:
    for shape in [(4, 6), (1, 7), (0, 6), (3, 2, 5), (5,)]:
        parts = [part_of(rank, shape, dtype) for rank in range(size)]
        total = torch.zeros(shape)
        for part in parts:
            total += part.float()
        results = ranks(size).call(exchange, shape, dtype)
        for rank, (reduced, gathered, own) in enumerate(results):
            assert reduced.dtype == gathered.dtype == dtype
            assert torch.equal(reduced, total.to(dtype))
            assert torch.equal(gathered, torch.stack(parts))
            assert torch.equal(own, parts[rank])


def exchange_all(communicator: Communicator, dtype: torch.dtype, width: int) -> Tensor:
    shard = communicator.shard
    return communicator.all_to_all(part_of(shard.rank, (shard.size, width, 3), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_all_to_all(size: int, dtype: torch.dtype, ranks: RanksOf) -> None:
    for width in (4, 1, 0):
        parts = [part_of(rank, (size, width, 3), dtype) for rank in range(size)]
        for rank, received in enumerate(ranks(size).call(exchange_all, dtype, width)):
            assert torch.equal(received, torch.stack([part[rank] for part in parts]))


def decide(communicator: Communicator) -> NDArray[np.bool_]:
    return communicator.broadcast(np.arange(5) % 3 == communicator.shard.rank)


@pytest.mark.parametrize("size", SIZES)
def test_the_first_rank_decides(size: int, ranks: RanksOf) -> None:
    for values in ranks(size).call(decide):
        assert values.tolist() == [True, False, False, True, False]


def exchange_strided(communicator: Communicator) -> tuple[Tensor, Tensor]:
    x = part_of(communicator.shard.rank, (6, 4), torch.bfloat16).t()
    return communicator.all_reduce(x), communicator.all_gather(x)


@pytest.mark.parametrize("size", SIZES)
def test_strided_tensors(size: int, ranks: RanksOf) -> None:
    parts = [part_of(rank, (6, 4), torch.bfloat16).t() for rank in range(size)]
    for reduced, gathered in ranks(size).call(exchange_strided):
        assert torch.equal(gathered, torch.stack(parts))
        assert reduced.shape == (4, 6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_do_not_depend_on_the_batch(dtype: torch.dtype, ranks: RanksOf) -> None:
    [(whole, *_), *_] = ranks(3).call(exchange, (64, 48), dtype)
    parts = [part_of(rank, (64, 48), dtype) for rank in range(3)]
    for row in (0, 17, 63):
        [reduced, *_] = ranks(3).call(reduce_row, parts, row)
        assert torch.equal(reduced, whole[row : row + 1])


def reduce_row(communicator: Communicator, parts: list[Tensor], row: int) -> Tensor:
    return communicator.all_reduce(parts[communicator.shard.rank][row : row + 1])


def fail_on_one(communicator: Communicator) -> None:
    if communicator.shard.rank == 1:
        raise ValueError("only here")
    communicator.all_gather(torch.ones(3))


class FakeSymmetricMemory:
    """Memory of this process alone; one of two ranks fails in one of the two steps."""

    def __init__(self, rank: int, failing: tuple[int, str]) -> None:
        self.rank, self.failing = rank, failing

    def empty(self, *shape: object, **options: Any) -> Tensor:
        self._step("empty")
        return torch.empty(*shape, **options)

    def rendezvous(self, memory: Tensor, name: str) -> SimpleNamespace:
        """As the real one, it waits for the other rank."""
        dist.barrier()
        self._step("rendezvous")
        return SimpleNamespace(buffer_ptrs=[memory.data_ptr()] * 2)

    def _step(self, step: str) -> None:
        if self.failing == (self.rank, step):
            raise RuntimeError("no memory is left")


def reserve(communicator: GroupCommunicator, failing: tuple[int, str]) -> bool:
    """Whether a rank uses the memory of its peers."""
    name = "torch.distributed._symmetric_memory"
    before = sys.modules[name]
    fake: Any = FakeSymmetricMemory(communicator.shard.rank, failing)
    torch.distributed._symmetric_memory = sys.modules[name] = fake
    peers = PeerCommunicator(communicator.group)
    try:
        peers.reserve(8, 64, torch.float16, torch.device("cpu"))
    finally:
        torch.distributed._symmetric_memory = sys.modules[name] = before
    return peers.exchange(ReductionSite.MLP, 1) is not None


@pytest.mark.parametrize("failing", [(1, "empty"), (0, "rendezvous")])
def test_peers_memory_is_used_by_all_ranks_or_none(
    failing: tuple[int, str], ranks: RanksOf
) -> None:
    """A rank that had none would be waited for by the others."""
    assert ranks(2).call(reserve, (-1, "")) == [True, True]
    assert ranks(2).call(reserve, failing) == [False, False]


def test_a_rank_that_fails_does_not_hang_the_tests(ranks: RanksOf) -> None:
    with pytest.raises(ValueError, match="only here"):
        ranks(2).call(fail_on_one)
    assert len(ranks(2).call(exchange, (2,), torch.float32)) == 2


def test_a_single_rank_exchanges_nothing() -> None:
    communicator: Communicator = SingleRank()
    x = torch.randn(3, 4)
    assert communicator.all_reduce(x) is x
    assert torch.equal(communicator.all_gather(x), x.unsqueeze(0))
    assert torch.equal(communicator.all_to_all(x[:1]), x[:1])
    communicator.close()
    communicator.close()
