"""Sums over ranks, by one rank beside others that have sent their parts already."""

from __future__ import annotations

import pytest
import torch

from octavo.ops.communicator import Reduction, ReductionSite
from octavo.ops.cuda.all_reduce import Exchange, PeerCommunicator
from octavo.ops.cuda.norm import norm
from octavo.ops.norm import Affine


class Neighbour(PeerCommunicator):
    """One rank, without a group."""

    def __init__(self, buffers: Exchange) -> None:
        self._exchange = buffers

    def exchange(self, site: ReductionSite, num_rows: int) -> Exchange | None:
        assert site == ReductionSite.MLP
        return self._exchange


EMPTY = {torch.int16: -(2**15), torch.int32: -(2**31)}


def test_sums_that_no_norm_follows(device: torch.device) -> None:
    """See layers.norm.sum_over_ranks."""
    rows, size = 2, 24
    own = torch.randn(2, rows, size, device=device)  # splits of a product
    other = torch.randn(rows, size, device=device)
    memory = torch.full((2, 1, rows, size), EMPTY[torch.int32], dtype=torch.int32, device=device)
    memory[0, 0] = other.view(torch.int32)
    addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
    exchange = Exchange(addresses, 0, 2, rows, torch.float32, two_shot=False)
    reduction = Reduction(Neighbour(exchange), ReductionSite.MLP)
    total = torch.zeros(rows, size, device=device)
    assert norm(own, None, 0.0, total, True, reduction=reduction) == []
    torch.testing.assert_close(total, own.sum(0) + other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 2), (1, 2), (1, 3)])
@pytest.mark.parametrize("splits", [1, 2])
def test_sums_what_all_ranks_have_sent(
    device: torch.device, dtype: torch.dtype, rank: int, ranks: int, splits: int
) -> None:
    torch.manual_seed(0)
    rows, max_rows, size = 3, 4, 40
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    parts = torch.randn(ranks, rows, size).to(dtype)
    parts[:, 0, 0] = -0.0  # never sent, because it marks an empty slot
    parts[:, 1, 1] = float("nan")
    others = [peer for peer in range(ranks) if peer != rank]
    memory = torch.full((ranks, ranks - 1, max_rows, size), EMPTY[bits], dtype=bits, device=device)
    for slot, peer in enumerate(others):  # + 0.0 makes minus zero zero, as the sender does
        memory[rank, slot, :rows] = (parts[peer] + 0.0).view(bits).to(device)
    addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
    exchange = Exchange(addresses, rank, ranks, max_rows, dtype, two_shot=False)
    reduction = Reduction(Neighbour(exchange), ReductionSite.MLP)
    own = parts[rank].to(device)
    if splits > 1:
        own = torch.stack([own.float() * 0.25, own.float() * 0.75])
    residual = torch.randn(rows, size).to(dtype).to(device)
    weight, bias = torch.randn(2, size, device=device).to(dtype)

    total = torch.zeros(rows, size)
    for part in parts:  # in the order of ranks
        total += part.float()
    total += residual.float().cpu()
    after = residual.clone()
    [normed] = norm(own, Affine(weight), 1e-5, after, True, reduction=reduction)

    sums = total.to(dtype)
    assert_sums(after, sums)
    expected = torch.nn.functional.rms_norm(sums.float(), (size,), None, 1e-5)
    expected *= weight.float().cpu()
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(
        normed.cpu().float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )
    assert (memory[rank] == EMPTY[bits]).all(), "what was read is empty again"
    for peer in others:
        sent = memory[peer, rank if rank < peer else rank - 1, :rows]
        assert (sent != EMPTY[bits]).all(), "every element was sent"
        torch.testing.assert_close(
            sent.view(dtype).cpu(), parts[rank], rtol=1e-2, atol=1e-2, equal_nan=True
        )
    assert (memory[:, :, rows:] == EMPTY[bits]).all()

    for slot, peer in enumerate(others):
        memory[rank, slot, :rows] = (parts[peer] + 0.0).view(bits).to(device)
    after = residual.clone()
    [normed] = norm(own, Affine(weight, bias), 1e-5, after, False, reduction=reduction)
    assert_sums(after, sums)
    expected = torch.nn.functional.layer_norm(
        sums.float(), (size,), weight.float().cpu(), bias.float().cpu(), 1e-5
    )
    torch.testing.assert_close(
        normed.cpu().float(), expected, rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 3), (2, 3), (1, 4)])
@pytest.mark.parametrize("norms_branch", [False, True])
def test_two_shots_give_what_one_gives(
    device: torch.device, dtype: torch.dtype, rank: int, ranks: int, norms_branch: bool
) -> None:
    """The ranks compute one after the other what each adds up, then one of them receives it."""
    torch.manual_seed(0)
    rows, max_rows, size = 7, 9, 40
    bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    slot_rows = -(-max_rows // ranks)
    parts = torch.randn(ranks, rows, size).to(dtype).to(device)
    parts[:, 1, 1] = float("nan")
    parts[:, 2, 0] = -0.0
    residual = torch.randn(rows, size).to(dtype).to(device)
    residual[2, 0] = -0.0
    weight = torch.randn(size, device=device).to(dtype)
    branch = Affine(weight) if norms_branch else None

    def compute(peer: int, memory: torch.Tensor, two_shot: bool, slot: int) -> list[torch.Tensor]:
        addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
        exchange = Exchange(addresses, peer, ranks, slot, dtype, two_shot)
        reduction = Reduction(Neighbour(exchange), ReductionSite.MLP)
        after = residual.clone()
        [normed] = norm(
            parts[peer], Affine(weight), 1e-5, after, True, branch=branch, reduction=reduction
        )
        return [after, normed]

    def sent(peer: int) -> torch.Tensor:
        return (parts[peer] + 0.0).view(bits)

    def empty(num_rows: int) -> torch.Tensor:
        return torch.full((ranks, num_rows, size), EMPTY[bits], dtype=bits, device=device)

    memory = empty((ranks - 1) * max_rows)
    for slot, peer in enumerate(each for each in range(ranks) if each != rank):
        memory[rank, slot * max_rows :][:rows] = sent(peer)
    expected = compute(rank, memory, False, max_rows)

    memory = empty((ranks - 1) * slot_rows + max_rows)
    own = [row for row in range(rows) if row % ranks == rank]
    others = [row for row in range(rows) if row % ranks != rank]
    for row in own:
        for slot, peer in enumerate(each for each in range(ranks) if each != rank):
            memory[rank, slot * slot_rows + row // ranks] = sent(peer)[row]
    complete = (ranks - 1) * slot_rows
    for row in others:
        memory[rank, complete + row] = (expected[0][row] + 0.0).view(bits)
    got = compute(rank, memory, True, slot_rows)

    for one, two in zip(expected, got, strict=True):
        torch.testing.assert_close(two, one, rtol=0, atol=0, equal_nan=True)
    assert (memory[rank] == EMPTY[bits]).all(), "what was read is empty again"
    for peer in range(ranks):
        if peer == rank:
            continue
        filled = torch.zeros(len(memory[peer]), dtype=torch.bool)
        for row in own:  # complete rows go to all
            filled[complete + row] = True
            total = memory[peer, complete + row].view(dtype)
            torch.testing.assert_close(total, expected[0][row], rtol=0, atol=0, equal_nan=True)
        for row in others:  # parts go to the owner alone
            if row % ranks == peer:
                place = (rank if rank < peer else rank - 1) * slot_rows + row // ranks
                filled[place] = True
                part = memory[peer, place].view(dtype)
                torch.testing.assert_close(part, parts[rank][row], equal_nan=True)
        assert ((memory[peer] != EMPTY[bits]).any(dim=1).cpu() == filled).all()


def assert_sums(sums: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bits, but for the interpreter, which does not round to bfloat16 to the nearest."""
    exact = sums.dtype == torch.float32 or sums.device.type == "cuda"
    tolerance = 0.0 if exact else 1e-2
    torch.testing.assert_close(sums.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)
