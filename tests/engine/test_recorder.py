"""What is recorded of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Literal, cast

import pytest

from core.worlds import World, preempt
from octavo.engine.engine import Engine
from octavo.engine.recorder import Recorder


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_every_preemption_is_recorded_when_it_happens(
    mode: Literal["swap", "recompute"],
) -> None:
    """None is looked for later among all that wait. So it is recorded that a request was taken off
    twice, and then ended."""
    world = World(num_blocks=20, num_swap_blocks=20, max_num_seqs=1)
    scheduler = world.scheduler
    model = SimpleNamespace(mixtures=dict, last_routing=None)
    parts = SimpleNamespace(
        observers=[], kv=world.kv, scheduler=scheduler, model_config=model, clock=scheduler.clock
    )
    recorder = Recorder(cast("Engine", parts), lambda admitted: None)
    request = world.add("first", 6, 8)
    world.add("second")
    for _ in range(2):
        world.step()
        preempt(world, request, mode)
    scheduler.abort("first")
    assert [(each.request_id, each.mode) for each in recorder.preempted] == [("first", mode)] * 2
    sizes = [each.num_blocks if mode == "swap" else each.num_tokens for each in recorder.preempted]
    assert sizes == ([2, 2] if mode == "swap" else [7, 8])
