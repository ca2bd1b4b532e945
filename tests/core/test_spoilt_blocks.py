"""Long prompts that go wrong spoil blocks which others find before that is known: no one else may
fail by that, whatever happens in between."""

from __future__ import annotations

import random

import pytest

from core.symbolic import HARMFUL, Ask, expected_beams, expected_samples
from core.worlds import BLOCK_SIZE, World
from octavo.core.kv.specs import FullAttention, SlidingWindow
from octavo.core.sequence import Request
from octavo.errors import RequestTooLong


class SpoiltWorld:
    """A small world in which many requests begin alike, and some go wrong behind that."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        specs = [FullAttention(), SlidingWindow(6)] if rng.random() < 0.3 else [FullAttention()]
        self.world = World(
            num_blocks=rng.choice([20, 28, 40]),
            num_swap_blocks=rng.choice([0, 12, 20]),
            depth=rng.choice([1, 2]),
            specs=specs,
            max_num_batched_tokens=rng.choice([5, 7, 9, 16]),
            max_num_seqs=5,
            policy=rng.choice(["fcfs", "priority", "fair"]),
            preemption_mode=rng.choice(["swap", "recompute", "auto"]),
        )
        self.world.kv.max_tails = rng.choice([0, 4])
        self.heads = [[token] * rng.choice([4, 8, 10]) for token in (0, 1)]
        self.innocent: list[tuple[Ask, Request]] = []

    def run(self, num_steps: int = 120) -> None:
        """Serve requests that come at random, and check those that do no harm."""
        rng, world = self.rng, self.world
        for number in range(num_steps):
            if rng.random() < 0.35 and len(world.scheduler.requests) < 8:
                self.add(number)
            if rng.random() < 0.05 and world.scheduler.requests:
                world.scheduler.abort(rng.choice(list(world.scheduler.requests)))
            if rng.random() < 0.03:
                world.kv.reset_prefix_cache()
            if world.kv.pins and rng.random() < 0.02:
                world.kv.unpin(next(iter(world.kv.pins)))
            if world.scheduler.requests:
                world.step()
        world.run()
        while world.under_way:  # of requests that have ended
            world.step()
        for name in list(world.kv.pins):
            world.kv.unpin(name)
        assert world.kv.pool.num_held == 0
        for ask, request in self.innocent:
            self.check(ask, request)

    def add(self, number: int) -> None:
        """Queue a request that fits: a new one, or one that has begun in another engine."""
        rng, world = self.rng, self.world
        kind = rng.choice(["sample", "sample", "sample", "beam", "pin", *["harmful"] * 3])
        prompt = rng.choice(self.heads)[: rng.choice([4, 6, 8, 10])]
        if kind == "harmful":
            prompt = [*prompt, HARMFUL, *(rng.randrange(3) for _ in range(rng.randrange(30)))]
        else:
            prompt = [*prompt, *(rng.randrange(3) for _ in range(rng.randrange(4)))]
        if kind == "pin":
            if world.kv.pins:
                return
            prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
        ask = Ask(
            f"{kind}{number}",
            tuple(prompt),
            "sample" if kind == "harmful" else kind,
            width=1 if kind == "pin" else rng.choice([1, 1, 2, 3]),
            max_tokens=rng.randrange(1, 14),
            seed=number,
            priority=rng.randrange(3),
            tenant=rng.choice("ab"),
        )
        request = ask.request(world.now)
        outputs: dict[int, list[int]] = {}
        if kind == "sample" and rng.random() < 0.3:
            length = rng.randrange(1, ask.max_tokens + 1)
            samples = enumerate(expected_samples(ask))
            outputs = {i: each[:length] for i, each in samples if len(each) > length}
            if not outputs:
                return
        try:
            world.scheduler.limits.check(request, leave=12 if kind == "pin" else 0)
        except RequestTooLong:
            return
        world.scheduler.resume(request, outputs)
        if kind != "harmful":
            self.innocent.append((ask, request))

    def check(self, ask: Ask, request: Request) -> None:
        """It has what it would have alone, unless it was aborted."""
        if any(seq.finish_reason == "abort" for seq in request.finished):
            return
        assert request.error is None, ask
        if ask.kind == "beam":
            assert [seq.output_token_ids for seq in request.finished] == expected_beams(ask)
        if ask.kind == "sample":
            expected = expected_samples(ask)
            for seq in request.finished:
                assert seq.output_token_ids == expected[seq.sample_index]


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.slow)]
)
def test_innocent_requests_never_fail(seeds: range) -> None:
    for seed in seeds:
        SpoiltWorld(seed).run()
