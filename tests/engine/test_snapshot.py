"""What a snapshot says of the blocks."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import cast

import pytest

from core.worlds import BLOCK_SIZE, compute, make_manager, make_sequence
from octavo.core.kv.block_pool import BlockPool
from octavo.engine.engine import Engine
from octavo.engine.snapshot import take_snapshot, unpack_ids
from octavo.server.engine_process.messages import Seen, decode_message, encode


def test_a_snapshot_copies_marks_of_all_blocks_and_looks_at_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There may be a million, and the next step waits. A block has more holders than a byte can
    count."""
    kv = make_manager(num_blocks=5)
    compute(kv, make_sequence(0, list(range(10))))
    for _ in range(299):
        kv.pool.share(2)
    scheduler = SimpleNamespace(running=[], swapped=[], waiting=[])
    engine = SimpleNamespace(scheduler=scheduler, kv=kv, clock=lambda: 0.0)
    assert kv.pool.cached_ids() == {1, 2}
    monkeypatch.delattr(BlockPool, "cached_ids")
    device = take_snapshot(cast("Engine", engine), 0).device
    assert device.is_cached == bytes([1, 1, 0, 0, 0])
    assert device.ref_counts == bytes([1, 255, 1, 0, 0])
    assert (device.num_held, device.num_free, device.num_free_cached) == (3, 2, 0)


def test_the_blocks_of_a_snapshot_are_not_read_one_by_one_where_it_is_received() -> None:
    """There may be a million, and a server's event loop does nothing else meanwhile."""
    num_blocks = 10_000
    tokens = [7] * (num_blocks * BLOCK_SIZE)
    kv = make_manager(num_blocks=num_blocks)
    seq = make_sequence(0, tokens)
    compute(kv, seq)
    assert seq.table is not None
    kv.pins["p"] = seq
    scheduler = SimpleNamespace(running=[], swapped=[], waiting=[])
    engine = SimpleNamespace(scheduler=scheduler, kv=kv, clock=lambda: 0.0)
    message = encode(Seen(1, take_snapshot(cast("Engine", engine), 0)))
    num_objects = sys.getallocatedblocks()
    seen = decode_message(message)
    assert sys.getallocatedblocks() - num_objects < 1000
    [pin] = seen.snapshot.pins
    assert [*map(unpack_ids, pin.tables)] == seq.table.by_group()
