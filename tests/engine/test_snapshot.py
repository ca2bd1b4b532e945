"""What a snapshot says of the blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from core.worlds import compute, make_manager, make_sequence
from octavo.core.kv.block_pool import BlockPool
from octavo.engine.engine import Engine
from octavo.engine.snapshot import take_snapshot


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
