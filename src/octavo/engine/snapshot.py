"""A snapshot of the core: blocks, queues, block tables, as plain values that can be sent."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice

import numpy as np

from octavo.core.block_table import BlockTable
from octavo.core.kv.block_pool import BlockPool
from octavo.core.sequence import Request, Sequence
from octavo.engine.engine import Engine

MAX_WAITING = 100
ID_BYTES = 4  # of a block id, as it is sent
# Keyed by what a decoding method needs at the end of a sequence's tokens.
METHOD_NAMES = {"token": "sampling", "candidates": "beam_search", "kv": "pin_prefix"}


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier's blocks. Byte i of `ref_counts` and `is_cached` is about block i + 1 (block 0 is the
    null block)."""

    num_blocks: int
    num_free: int  # cached ones included
    num_free_cached: int
    ref_counts: bytes  # holders of each block; 255 stands for 255 or more
    is_cached: bytes  # 1: the prefix cache can find the block's contents

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free


@dataclass(frozen=True, slots=True)
class SequenceView:
    """A sequence and its block tables."""

    seq_id: int
    index: int  # which of the request's samples or beams it is
    num_tokens: int
    num_computed_tokens: int
    on_device: bool  # False: the block ids are of the swap tier
    # Per KV group, as `pack_ids` makes them; 0 is the null block; empty: it holds no blocks.
    tables: list[bytes]
    cumulative_logprob: float  # for beams, and for samples with log-probabilities
    output_token_ids: list[int] | None = None  # only if requested


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request. Times are seconds of `time.monotonic`, which all processes share."""

    request_id: str
    status: str  # "waiting", "running", "swapped" or "finished"
    method: str  # "sampling", "beam_search", "pin_prefix" or "reading"
    max_sequences: int  # n, or the beam width
    max_length: int  # tokens, prompt included
    priority: int
    num_prompt_tokens: int  # of the encoder's input, if there is an encoder
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_preemptions: int
    arrival_time: float
    sequences: list[SequenceView]  # those alive


@dataclass(frozen=True, slots=True)
class PinView:
    """A pinned prefix and its blocks."""

    name: str
    num_tokens: int
    tables: list[bytes]  # per KV group, as `pack_ids` makes them


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything at one moment. Lists of requests are in the order in which they run."""

    time: float  # of time.monotonic
    step: int  # steps taken since the engine process started
    block_size: int  # tokens
    device: TierView
    swap: TierView
    running: list[RequestView]
    swapped: list[RequestView]
    waiting: list[RequestView]  # the first MAX_WAITING of them
    num_waiting: int  # all of them
    pins: list[PinView]


def take_snapshot(engine: Engine, num_steps: int) -> Snapshot:
    """A snapshot of an engine between two steps."""
    scheduler, kv = engine.scheduler, engine.kv
    return Snapshot(
        engine.clock(),
        num_steps,
        kv.block_size,
        _view_tier(kv.pool),
        _view_tier(kv.swap_pool),
        [view_request(request) for request in scheduler.running],
        [view_request(request) for request in scheduler.swapped],
        [view_request(request) for request in islice(scheduler.waiting, MAX_WAITING)],
        len(scheduler.waiting),
        [PinView(name, seq.num_tokens, _packed_tables(seq.table)) for name, seq in kv.pins.items()],
    )


def view_request(request: Request, with_tokens: bool = False) -> RequestView:
    """One request; `with_tokens`: also what it has generated so far."""
    return RequestView(
        request.request_id,
        request.status.value,
        "reading" if request.sampling.pools_prompt else METHOD_NAMES[request.method.wants],
        request.method.max_sequences,
        request.method.max_length,
        request.priority,
        len(request.input_token_ids),
        request.num_cached_tokens,
        request.num_preemptions,
        request.arrival_time,
        [_view_sequence(seq, with_tokens) for seq in request.sequences],
    )


def _view_sequence(seq: Sequence, with_tokens: bool) -> SequenceView:
    table = seq.table
    return SequenceView(
        seq.seq_id,
        seq.sample_index,
        seq.num_tokens,
        seq.num_computed_tokens,
        table is None or table.on_device,
        _packed_tables(table),
        seq.cumulative_logprob,
        seq.output_token_ids if with_tokens else None,
    )


def pack_ids(ids: Collection[int]) -> bytes:
    """Block ids as the 32-bit integers of this machine. A million of them would take a tenth of a
    second to be sent as numbers, and that in one piece, in which the receiver does nothing else."""
    return array("i", ids).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The block ids that `pack_ids` was given."""
    return memoryview(packed).cast("i").tolist()


def _packed_tables(table: BlockTable | None) -> list[bytes]:
    return [] if table is None else [*map(pack_ids, table.by_group())]


def _view_tier(pool: BlockPool) -> TierView:
    counts = pool.ref_counts()
    try:
        ref_counts = bytes(counts)
    except ValueError:  # a block with more holders than a byte can count
        as_array = np.frombuffer(array("i", counts), np.int32)
        ref_counts = np.minimum(as_array, 255).astype(np.uint8).tobytes()
    return TierView(
        pool.num_blocks,
        pool.num_free,
        pool.num_free_cached,
        ref_counts,
        pool.cached_marks(),
    )
