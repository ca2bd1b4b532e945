"""Sums over the ranks of a tensor-parallel group, inside the kernel that needs them.

Each rank writes its partial sums into the memory of all others (symmetric memory over NVLink), and
reads theirs from its own. A slot that nothing has been written to yet holds EMPTY, a bit pattern
that is never sent, so the data announces itself: there are no flags, no barriers and no second
kernel. A row of partial sums is exchanged by one program, which waits for nothing but the same row
of the other ranks. Programs start in the order of their index, and each writes before it waits, so
rows cannot wait for each other in a circle.

Few rows go in one shot: every rank sends its part of a row to all others, which takes one hop, and
(size - 1) times the bytes of the rows. Many rows go in two: all send their part to the row's owner,
rank row % size, which adds them up, adds the row of the residual stream and sends the new one to
all; 2 (size - 1) / size times the bytes. Two ranks send equally much either way, so they never take
the second. Both give the same bits: what the owner sends is what every rank would have rounded.

The reader makes a slot EMPTY again as soon as it has read it. That is safe because each call site
(`ReductionSite`) has a buffer of its own: a rank writes to a slot again only in a later call at the
same site, and it has got there through a call at another site, for which it has waited for what the
reader sent after this one (in two shots, for the reader's parts of the rows that it owns). So
consecutive calls must have different sites, and all ranks must make the same calls.

One kernel serves all sizes: up to 64 MB on two H200s, and up to 32 MB on four, it takes less time,
norm included, than NCCL's all-reduce alone (docs/performance.md).

Partial sums travel in the model's dtype, and are added in float32 in the order of ranks, with each
rank taking its own as rounded as it sent it: sums have the same bits on all ranks, whatever else is
in the batch. The technique is that of the one-shot and two-shot "Lamport" kernels of TensorRT-LLM.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from octavo.ops.communicator import GroupCommunicator, Reduction, ReductionSite

logger = logging.getLogger(__name__)
SITES = len(ReductionSite)
HOP_BYTES = 6e5  # what an H200's links send in the time that a second hop takes
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


class Exchange(NamedTuple):
    """One call site's buffers, as a kernel takes them.

    They have a slot for the parts of each other rank, one behind the other, and in two shots the
    complete rows behind those.
    """

    peers: Tensor  # int64 [size]: addresses of the site's buffer on each rank
    rank: int
    size: int
    slot_rows: int
    dtype: torch.dtype  # of what is sent
    two_shot: bool


def one_shot_rows(size: int, row_bytes: int) -> int | None:
    """Up to how many rows go in one shot over `size` ranks; None: all.

    The second hop must save at least as many sent bytes as the links carry meanwhile.
    """
    saved = row_bytes * (size - 1) * (size - 2) / size
    return max(size, round(HOP_BYTES / saved)) if saved else None


class PeerBuffers:
    """Owns memory for what other ranks send: symmetric, [SITES, rows, row_size]."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        max_rows: int,
        row_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """The buffers of one of the ranks of `group`, all of which make one with the same sizes.
        All `take` the memory, and then all `meet`, before anything is sent."""
        self.max_rows = max_rows
        self._group, self._row_size, self._dtype, self._device = group, row_size, dtype, device
        limit = one_shot_rows(group.size(), row_size * dtype.itemsize)
        self.one_shot_rows = max_rows if limit is None else min(limit, max_rows)
        self._owned_rows = -(-max_rows // group.size())

    def take(self) -> None:
        """Take this rank's memory. Raises RuntimeError: there is none that others could reach."""
        import torch.distributed._symmetric_memory as symmetric_memory

        size, bits = self._group.size(), _BITS[self._dtype]
        num_rows = (size - 1) * self.one_shot_rows
        if self.one_shot_rows < self.max_rows:
            num_rows = max(num_rows, (size - 1) * self._owned_rows + self.max_rows)
        shape = (SITES, num_rows, self._row_size)
        self.memory = symmetric_memory.empty(shape, dtype=bits, device=self._device)
        self.memory.fill_(torch.iinfo(bits).min)
        if self.memory.is_cuda:
            torch.cuda.synchronize(self._device)

    def meet(self) -> None:
        """Find the other ranks' memory. Raises RuntimeError: it is out of reach."""
        import torch.distributed._symmetric_memory as symmetric_memory

        size, rank = self._group.size(), self._group.rank()
        handle: Any = symmetric_memory.rendezvous(self.memory, self._group.group_name)
        self._handle = handle
        site_bytes = self.memory.stride(0) * self.memory.element_size()
        addresses = torch.tensor(list(handle.buffer_ptrs), dtype=torch.int64)
        ways = ((False, self.one_shot_rows), (True, self._owned_rows))
        self._exchanges = [
            [
                Exchange(
                    (addresses + site * site_bytes).to(self._device),
                    rank,
                    size,
                    rows,
                    self._dtype,
                    two_shot,
                )
                for two_shot, rows in ways
            ]
            for site in range(SITES)
        ]

    def exchange(self, site: ReductionSite, num_rows: int) -> Exchange:
        """The buffers of a call with `num_rows` rows, at most max_rows."""
        return self._exchanges[site][num_rows > self.one_shot_rows]


class PeerCommunicator(GroupCommunicator):
    """GPUs of one host that write to each other's memory where they add up rows."""

    _buffers: PeerBuffers | None = None

    def reserve(
        self, max_rows: int, row_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """See Communicator.reserve. If one of the GPUs is out of the others' reach, or has too
        little memory left, all use NCCL."""
        buffers = PeerBuffers(self.group, max_rows, row_size, dtype, device)
        if self._all_can(buffers.take) and self._all_can(buffers.meet):
            self._buffers = buffers

    def _all_can(self, step: Callable[[], None]) -> bool:
        """Take a step that all ranks take. False if it fails on one of them, for which the others
        would wait in the next step."""
        can = 1
        try:
            step()
        except RuntimeError as error:
            can = 0
            logger.warning("reductions take NCCL, because peers' memory is out of reach: %s", error)
        all_can = torch.tensor(can)
        dist.all_reduce(all_can, dist.ReduceOp.MIN, group=self._hosts)
        return bool(all_can)

    def exchange(self, site: ReductionSite, num_rows: int) -> Exchange | None:
        """The buffers of a call with `num_rows` rows; None if there are none for so many."""
        if self._buffers is None or num_rows > self._buffers.max_rows:
            return None
        return self._buffers.exchange(site, num_rows)

    def close(self) -> None:
        """See Communicator.close."""
        self._buffers = None
        super().close()


def exchange_for(reduction: Reduction, num_rows: int) -> Exchange | None:
    """How a kernel adds up `num_rows` rows over the ranks; None if NCCL has to."""
    communicator = reduction.communicator
    if not isinstance(communicator, PeerCommunicator):
        return None
    return communicator.exchange(reduction.site, num_rows)


@triton.jit
def sum_over_ranks(
    values,
    peers,
    row,
    columns,
    inside,
    size,
    slot_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """values float32 [BLOCK], this rank's part of a row -> the sum of all ranks' parts.

    No element may be held by two threads: one would empty a slot that the other still reads. So a
    program has at most as many threads as BLOCK has elements.
    """
    sent = _as_sent(values, DTYPE)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            slot = RANK if peer > RANK else RANK - 1
            place = (slot * slot_rows + row) * size + columns
            _send(sent, peers, peer, place, inside)
    tl.debug_barrier()  # written before anything is waited for
    return _sum_of_parts(sent, peers, row, columns, inside, size, slot_rows, RANK, RANKS, DTYPE)


@triton.jit
def is_owner(row, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Whether this rank adds up the row in two shots."""
    return row % RANKS == RANK


@triton.jit
def sum_of_own_row(
    values,
    peers,
    row,
    columns,
    inside,
    size,
    slot_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """As `sum_over_ranks`, by the row's owner: the first shot of two has brought all parts here."""
    sent = _as_sent(values, DTYPE)
    return _sum_of_parts(
        sent, peers, row // RANKS, columns, inside, size, slot_rows, RANK, RANKS, DTYPE
    )


@triton.jit
def send_complete_row(
    total,
    peers,
    row,
    columns,
    inside,
    size,
    slot_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
):
    """total [BLOCK], as it is sent: the second shot, from the row's owner."""
    place = ((RANKS - 1) * slot_rows + row) * size + columns
    sent = _as_sent(total, total.dtype)
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            _send(sent, peers, peer, place, inside)
    return sent.to(total.dtype, bitcast=True)


@triton.jit
def complete_row(
    values,
    peers,
    row,
    columns,
    inside,
    size,
    slot_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """values float32 [BLOCK], this rank's part -> what the row's owner makes of all of them."""
    owner = (row % RANKS).to(tl.int32)
    slot = tl.where(owner > RANK, RANK, RANK - 1)
    place = (slot * slot_rows + row // RANKS) * size + columns
    _send(_as_sent(values, DTYPE), peers, owner, place, inside)
    tl.debug_barrier()  # written before anything is waited for
    place = ((RANKS - 1) * slot_rows + row) * size + columns
    return _received(peers, place, inside, RANK, DTYPE).to(DTYPE, bitcast=True)


@triton.jit
def _sum_of_parts(
    sent,
    peers,
    slot_row,
    columns,
    inside,
    size,
    slot_rows,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    total = tl.zeros(sent.shape, tl.float32)
    for peer in tl.static_range(RANKS):
        if peer == RANK:
            part = sent
        else:
            slot = peer if peer < RANK else peer - 1
            place = (slot * slot_rows + slot_row) * size + columns
            part = _received(peers, place, inside, RANK, DTYPE)
        total += part.to(DTYPE, bitcast=True).to(tl.float32)
    return total


@triton.jit
def _as_sent(values, DTYPE: tl.constexpr):
    """The bits of values; zero instead of minus zero, which is EMPTY."""
    BITS: tl.constexpr = tl.int32 if DTYPE.primitive_bitwidth == 32 else tl.int16
    EMPTY: tl.constexpr = -2147483648 if DTYPE.primitive_bitwidth == 32 else -32768
    bits = values.to(DTYPE).to(BITS, bitcast=True)
    return tl.where(bits == EMPTY, tl.zeros_like(bits), bits)


@triton.jit
def _send(bits, peers, peer, place, inside):
    tl.store(_buffer(peers, peer, bits.dtype) + place, bits, mask=inside)


@triton.jit
def _received(peers, place, inside, RANK: tl.constexpr, DTYPE: tl.constexpr):
    """Waits for bits from another rank, and leaves their slot EMPTY."""
    BITS: tl.constexpr = tl.int32 if DTYPE.primitive_bitwidth == 32 else tl.int16
    EMPTY: tl.constexpr = -2147483648 if DTYPE.primitive_bitwidth == 32 else -32768
    source = _buffer(peers, RANK, BITS) + place
    bits = tl.load(source, mask=inside, other=0, volatile=True)
    while tl.sum((bits == EMPTY).to(tl.int32), 0) > 0:
        bits = tl.load(source, mask=inside, other=0, volatile=True)
    tl.store(source, tl.full(bits.shape, EMPTY, BITS), mask=inside)
    return bits


@triton.jit
def _buffer(peers, rank, BITS: tl.constexpr):
    """A site's buffer on a rank.

    It is as aligned as rows are, which the address alone does not say: without the hint, each
    element would be sent, and looked for, by itself.
    """
    return tl.multiple_of(tl.load(peers + rank).to(tl.pointer_type(BITS)), 16)
