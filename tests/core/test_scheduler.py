"""The scheduler's promises, each in the smallest world that shows it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import pytest

from core.symbolic import HARMFUL, Ask
from core.worlds import BLOCK_SIZE, World, make_sequence, preempt, sampling
from octavo.core.decoding import BeamSearch, PinPrefix, Sampling
from octavo.core.invariants import check_scheduler
from octavo.core.kv.manager import Changes, KVCacheManager
from octavo.core.kv.prefix_matcher import PrefixHit
from octavo.core.kv.specs import FullAttention, SlidingWindow
from octavo.core.plan_builder import PlanBuilder
from octavo.core.policies import SchedulingPolicy
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import SamplingSpec
from octavo.errors import LogitsNotFinite, NoTokenLeft, RequestTooLong


def test_prompts_are_computed_in_chunks_beside_decodes() -> None:
    world = World(num_blocks=40, max_num_batched_tokens=10)
    short, long = world.add("short", 4), world.add("long", 25)
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [4, 6]
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [1, 9]  # a decode and a chunk share the step
    assert plan.sampled == [short.sequences[0].seq_id]
    assert long.sequences[0].num_computed_tokens == 15


def test_a_chunk_of_two_tokens_may_fill_a_block() -> None:
    world = World(max_num_batched_tokens=3, max_num_seqs=3)
    prompt = world.add("r", 5).prompt_token_ids
    chunks = [world.step()[0].num_scheduled_tokens for _ in range(2)]
    assert chunks == [[3], [2]]
    assert world.kv.lookup(make_sequence(9, prompt)).num_tokens == BLOCK_SIZE


def test_decodes_never_starve() -> None:
    """An older request whose prompt fills every step leaves room for younger decodes."""
    world = World(num_blocks=100, max_num_batched_tokens=8, max_num_seqs=4)
    young = world.add("young", 2, 20)
    world.step()
    world.add("old", 100, 2, order=(-1.0, 0.0))
    for expected in range(2, 10):
        plan, _ = world.step()
        assert young.sequences[0].num_output_tokens == expected
        # Rows of one token go first, whatever the order of their requests.
        assert plan.num_scheduled_tokens == [1, 7]
        assert plan.seq_ids[0] == young.sequences[0].seq_id


@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_that_is_not_chunked_may_leave_the_running_out_of_its_step(depth: int) -> None:
    """Else it and those behind it would wait until enough of the running ones have ended. One
    that fits beside them leaves none of them out."""
    world = World(
        num_blocks=100, max_num_batched_tokens=12, max_num_seqs=8, depth=depth,
        enable_chunked_prefill=False, enable_prefix_caching=False,
    )  # fmt: skip
    for number in range(3):
        world.add(f"small{number}", 2, 30)
    world.step()
    for number, length in enumerate((9, 12, 10)):
        world.add(f"large{number}", length, 2)
    plans = []
    while {"large0", "large1", "large2"} & world.scheduler.requests.keys():
        plans.append(world.step()[0].num_scheduled_tokens)
        assert sum(plans[-1]) <= 12
    assert [plan for plan in plans if max(plan) > 1] == [[1, 1, 1, 9], [12], [10]]
    assert len(plans) < 12
    assert {"small0", "small1", "small2"} <= world.scheduler.requests.keys()
    world.run()


def test_no_request_is_displaced_because_a_step_is_too_short() -> None:
    """An urgent prompt that is not chunked has a step without the running requests, and takes of
    the less urgent ones the blocks that it lacks, also while others are as urgent as it is."""
    world = World(
        num_blocks=13, max_num_batched_tokens=16, policy="priority", max_num_seqs=8,
        enable_chunked_prefill=False, enable_prefix_caching=False, preemption_mode="recompute",
    )  # fmt: skip
    for number in range(3):
        world.add(f"slow{number}", 2, 12, priority=5)
        world.add(f"urgent{number}", 2, 12)
    for _ in range(4):
        world.step()
    urgent = world.add("large", 13, 2)
    assert world.kv.num_free_blocks == 1
    assert world.step()[0].num_scheduled_tokens == [13]
    assert urgent in world.scheduler.running
    assert world.names("waiting") == ["slow1", "slow2"]
    assert world.step()[0].num_scheduled_tokens == [1] * 5
    world.run()


def test_the_youngest_is_preempted_and_keeps_its_place() -> None:
    world = World(
        num_blocks=6, preemption_mode="recompute", enable_prefix_caching=False, max_passes=0
    )
    world.add("first", 8, 8)
    world.add("second", 8, 8)
    world.step()
    world.add("third", 4, 4)
    while not world.scheduler.num_preemptions["recompute"]:
        world.step()
    assert world.names("running") == ["first"]
    assert world.names("waiting") == ["second", "third"]
    third = world.scheduler.requests["third"]
    while world.scheduler.requests["second"].status is not Status.RUNNING:
        assert third.status is Status.WAITING
        world.step()


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_gang_is_preempted_whole_and_comes_back_whole(mode: str) -> None:
    world = World(
        num_blocks=9, num_swap_blocks=9, preemption_mode=mode, enable_prefix_caching=False
    )
    world.add("first", 12, 12)
    gang = world.add("gang", 6, 6, n=3)
    while gang.status is not (Status.SWAPPED if mode == "swap" else Status.WAITING) or (
        not gang.num_preemptions
    ):
        world.step()
    on_device = [s for s in gang.sequences if s.table is not None and s.table.on_device]
    assert len(gang.sequences) == 3
    assert on_device == []
    before = world.executor.num_computed
    world.run()
    assert [len(s.output_token_ids) for s in gang.finished] == [6, 6, 6]
    if mode == "swap":
        # Nothing is computed twice: what is left are the decodes of both requests.
        assert world.executor.num_computed - before < 6 * 4


@pytest.mark.parametrize("max_num_batched_tokens", [64, 16])
def test_recomputed_samples_share_their_prompt_again(max_num_batched_tokens: int) -> None:
    """Recomputed one by one, three samples of this prompt would not fit at all."""
    world = World(
        num_blocks=17,
        preemption_mode="recompute",
        enable_prefix_caching=False,
        max_num_seqs=4,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    gang = world.add("gang", 40, 8, n=3)
    while gang.sequences[0].num_output_tokens < 2:
        world.step()
    held = world.kv.pool.num_held
    preempt(world, gang, "recompute")
    before = world.executor.num_computed
    while gang.catching_up or gang.status is not Status.RUNNING:
        world.step()
    assert world.kv.pool.num_held <= held + 3
    # The prompt once, and of each sample what it had drawn.
    assert world.executor.num_computed - before <= 40 + 3 * 3
    world.run()
    assert gang.num_preemptions == 1


@pytest.mark.parametrize(("num_blocks", "comes_back"), [(22, False), (23, True)])
def test_samples_are_recomputed_when_there_is_room_for_all(
    num_blocks: int, comes_back: bool
) -> None:
    """Three samples of 16 tokens hold two blocks of their prompt, and each two of its own: eight
    besides the 15 of the other request."""
    world = World(num_blocks, preemption_mode="recompute", enable_prefix_caching=False)
    gang = world.add("gang", 8, 20, n=3)
    while gang.sequences[0].num_output_tokens < 8:
        world.step()
    world.add("other", 60, 4, order=(-1.0,))
    preempt(world, gang, "recompute")
    world.step()
    assert (gang.status is Status.RUNNING) == comes_back
    world.run()


def test_auto_preemption_takes_what_costs_less() -> None:
    for per_token, per_block, expected in [(1.0, 0.001, "swap"), (0.0001, 1.0, "recompute")]:
        world = World(num_blocks=6, num_swap_blocks=6, preemption_mode="auto")
        world.scheduler.costs.seconds_per_token = per_token
        world.scheduler.costs.seconds_per_block = per_block
        world.add("a", 8, 12)
        world.add("b", 8, 12)
        world.run()
        other = {"swap": "recompute", "recompute": "swap"}[expected]
        assert world.scheduler.num_preemptions[expected] > 0
        assert world.scheduler.num_preemptions[other] == 0


def test_a_full_swap_tier_falls_back_to_recompute() -> None:
    world = World(num_blocks=6, num_swap_blocks=1, preemption_mode="swap")
    world.add("a", 8, 12)
    world.add("b", 8, 12)
    world.run()
    assert world.scheduler.num_preemptions == {"swap": 0, "recompute": 1}


def test_a_swap_without_room_is_not_announced(caplog: pytest.LogCaptureFixture) -> None:
    world = World(num_blocks=6, num_swap_blocks=1, preemption_mode="auto")
    world.scheduler.costs.seconds_per_token = 1.0
    world.add("a", 8, 12)
    world.add("b", 8, 12)
    with caplog.at_level("INFO"):
        world.run()
    assert world.scheduler.num_preemptions == {"swap": 0, "recompute": 1}
    [message] = caplog.messages
    assert message.startswith("preempting b by recompute: ")


def test_swapped_requests_come_back_before_waiting_ones() -> None:
    world = World(num_blocks=7, num_swap_blocks=7, preemption_mode="swap")
    world.add("first", 8, 12)
    second = world.add("second", 8, 12)
    while second.status is not Status.SWAPPED:
        world.step()
    late = world.add("late", 2, 2)
    while second.status is Status.SWAPPED:
        world.step()
        assert late.status is Status.WAITING or second.status is Status.RUNNING
    world.run()


@pytest.mark.parametrize(
    ("num_blocks", "watermark", "comes_back"), [(5, 0.0, False), (6, 0.0, True), (6, 0.2, False)]
)
def test_a_swapped_request_comes_back_when_it_has_room_to_grow(
    num_blocks: int, watermark: float, comes_back: bool
) -> None:
    """In the next step `first` takes a third block. `second` needs its two, one more to grow, and
    the watermark's."""
    world = World(
        num_blocks, num_swap_blocks=num_blocks, watermark=watermark, enable_prefix_caching=False
    )
    world.add("first", 8, 4)
    second = world.add("second", 8, 4)
    world.step()
    preempt(world, second, "swap")
    world.step()
    assert (second.status is Status.RUNNING) == comes_back
    world.run()


def test_a_swapped_request_that_is_alone_needs_no_room_to_grow() -> None:
    world = World(num_blocks=2, num_swap_blocks=2)
    alone = world.add("alone", 4, 4)
    world.step()
    world.step()
    preempt(world, alone, "swap")
    world.step()
    assert alone.status is Status.RUNNING
    world.run()


def test_the_watermark_is_kept_free_while_others_run() -> None:
    """Of 10 blocks `running` takes a third one, and 2 are kept for it to grow into."""
    world = World(num_blocks=10, watermark=0.2, enable_prefix_caching=False)
    world.add("running", 8, 4)
    world.step()
    large = world.add("large", 24, 1)
    small = world.add("small", 20, 1)
    world.step()
    assert large.status is Status.WAITING
    assert small.is_finished
    world.scheduler.abort("running")
    world.step()
    assert large.is_finished


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """A preempted request finds its own blocks in the cache, which were not there before it."""
    world = World(num_blocks=20)
    first = world.add("first", 12, 4)
    world.step()
    second = world.add("second", prompt=[*first.prompt_token_ids[:8], 1, 1], num_output_tokens=4)
    world.step()
    for request in (first, second):
        preempt(world, request, "recompute")
    world.run()
    assert (first.num_preemptions, first.num_cached_tokens) == (1, 0)
    assert (second.num_preemptions, second.num_cached_tokens) == (1, 8)


def test_cached_tokens_stay_those_of_the_first_admission_when_a_leading_sample_ends() -> None:
    """The others are recomputed then, which is no preemption, and find blocks of their own."""
    world = World(num_blocks=40, max_num_batched_tokens=8)
    gang = Request("gang", [1] * 20, sampling(3, 28), SamplingSpec())
    world.scheduler.resume(gang, {0: [2, 3], 1: [2, 4], 2: [5, 6]})
    for _ in range(3):
        world.step()
    assert gang.catching_up
    num_looked_up = world.kv.num_lookup_tokens
    world.scheduler.finish_by_stop_string(gang.sequences[0], "stop")
    world.run()
    assert (gang.num_preemptions, gang.num_cached_tokens) == (0, 0)
    assert world.kv.num_lookup_tokens == num_looked_up


def test_a_late_step_says_nothing_about_the_blocks_of_a_prompt_that_began_again() -> None:
    """A step has computed a block of the prompt, which is preempted and given other blocks before
    the step's results are in. Of those, two tokens are computed by then."""
    world = World(max_num_batched_tokens=4, max_num_seqs=4)
    victim = world.add("victim", 8)
    late = world.scheduler.schedule()
    assert late is not None
    result = world.executor.execute(late)
    world.add("other", 2, order=(-1.0,))
    preempt(world, victim, "recompute")
    plan = world.scheduler.schedule()
    assert plan is not None
    assert plan.num_scheduled_tokens == [2, 2]
    world.scheduler.update(late, result)
    assert world.kv.lookup(make_sequence(9, victim.prompt_token_ids)).num_tokens == 0
    world.scheduler.update(plan, world.executor.execute(plan))
    world.run()


def test_a_head_that_does_not_fit_is_passed_a_bounded_number_of_times() -> None:
    world = World(num_blocks=12, max_passes=2, max_num_seqs=2, enable_prefix_caching=False)
    world.add("running", 16, 12)
    world.step()
    head = world.add("head", 36, 4)
    for i in range(6):
        world.add(f"small{i}", 4, 2)
    while head.status is Status.WAITING:
        world.step()
    assert head.num_passes == 2
    assert world.names("waiting")[0] == "small3"  # small2 came in beside the head
    world.run()


def test_no_more_sequences_run_than_allowed() -> None:
    world = World(num_blocks=100, max_num_seqs=4)
    for name in "abcdef":
        world.add(name, 4, 4, n=3 if name == "b" else 1)
    while world.scheduler.has_unfinished:
        world.step()
        assert sum(len(r.sequences) for r in world.scheduler.running) <= 4


def test_samples_share_one_prefill() -> None:
    world = World(num_blocks=40)
    world.add("samples", 20, 3, n=4)
    world.run()
    # The prompt once, then two more tokens for each sample: the last is drawn, not computed.
    assert world.executor.num_computed == 20 + 4 * 2


def test_a_hundred_requests_compute_their_shared_prefix_once() -> None:
    world = World(num_blocks=600, max_num_seqs=100, max_num_batched_tokens=300)
    prefix = [i % 7 for i in range(1000)]
    for i in range(100):
        world.add(f"r{i}", prompt=[*prefix, i // 7 % 7, i % 7, 6], num_output_tokens=1)
    world.run()
    # 1,000 tokens once; each request computes its own three, and shares those where it can.
    assert 1000 < world.executor.num_computed <= 1000 + 3 * 100


def test_equal_prompts_of_one_step_are_computed_once() -> None:
    world = World(num_blocks=40)
    for name in ("a", "b", "c"):
        world.add(name, prompt=[1] * 16, num_output_tokens=1)
    world.run()
    assert world.executor.num_computed == 16 + 1 + 1
    assert world.kv.pool.num_free == 40


def test_a_prompt_that_waits_for_an_equal_one_does_not_hold_up_others() -> None:
    world = World(num_blocks=40)
    for name in ("a", "b"):
        world.add(name, prompt=[1] * 16)
    world.add("c", prompt=[2] * 16)
    world.step()
    assert world.names("running") == ["a", "c"]
    assert world.names("waiting") == ["b"]
    world.run()


class TestPriority:
    def world(self, **options: object) -> World:
        return World(num_blocks=6, policy="priority", preemption_mode="recompute", **options)

    def test_an_urgent_request_displaces_a_running_one(self) -> None:
        world = self.world(enable_prefix_caching=False)
        low = world.add("low", 16, 8, priority=5)
        world.step()
        urgent = world.add("urgent", 8, 4, priority=0)
        world.step()
        assert (low.status, urgent.status) == (Status.WAITING, Status.RUNNING)
        assert urgent.sequences[0].num_output_tokens == 1  # it ran in the very same step
        assert [r.request_id for r in world.run()] == ["urgent", "low"]

    def test_an_equal_one_waits(self) -> None:
        world = self.world()
        running = world.add("running", 16, 8, priority=1)
        world.step()
        world.add("equal", 8, 4, priority=1)
        world.step()
        assert running.status is Status.RUNNING
        assert world.scheduler.num_preemptions["recompute"] == 0

    def test_nobody_is_displaced_in_vain(self) -> None:
        """Preempting the only less urgent request would not make room enough."""
        world = self.world(enable_prefix_caching=False)
        world.add("important", 12, 4, priority=0)
        low = world.add("low", 4, 4, priority=5)
        world.step()
        world.add("urgent", 16, 4, priority=1)
        world.step()
        assert low.status is Status.RUNNING

    @pytest.mark.parametrize("lacking", ["blocks", "slots"])
    def test_blocks_of_victims_are_not_counted_where_they_are_too_few(
        self, monkeypatch: pytest.MonkeyPatch, lacking: str
    ) -> None:
        """While an urgent request waits, each step would count all that the victims hold."""
        counted: list[int] = []
        original = KVCacheManager.num_releasable_blocks

        def count(self: KVCacheManager, seqs: Seq[Sequence], wanted: PrefixHit) -> int:
            counted.append(len(seqs))
            return original(self, seqs, wanted)

        monkeypatch.setattr(KVCacheManager, "num_releasable_blocks", count)
        world = World(20, max_num_seqs=3, policy="priority", enable_prefix_caching=False)
        world.add("equal", num_prompt_tokens=40, num_output_tokens=8)
        world.add("later", num_prompt_tokens=20, num_output_tokens=8, priority=1)
        world.step()
        size = 60 if lacking == "blocks" else 4
        urgent = world.add("urgent", num_prompt_tokens=size, n=1 if lacking == "blocks" else 3)
        for _ in range(3):
            world.step()
        assert urgent.status is Status.WAITING
        assert not counted
        world.run()

    def test_who_displaces_the_last_one_gets_its_room_at_once(self) -> None:
        """In this very step the important one takes a block more: one less for the urgent."""
        world = self.world(enable_prefix_caching=False)
        important = world.add("important", 8, 4, priority=0)
        low = world.add("low", 12, 4, priority=5)
        world.step()
        urgent = world.add("urgent", 16, 4, priority=1)
        world.step()
        assert (low.status, urgent.status) == (Status.WAITING, Status.RUNNING)
        assert important.num_preemptions == 1
        world.run()

    def test_a_swapped_request_comes_back_before_a_less_urgent_one_displaces(self) -> None:
        world = World(num_blocks=10, num_swap_blocks=10, policy="priority")
        low = world.add("low", 16, 20, priority=5)
        top = world.add("top", 12, 20, priority=0)
        world.step()
        preempt(world, top, "swap")
        assert world.names("swapped") == ["top"]
        world.add("middle", 16, 8, priority=1)
        world.scheduler._displace_running(PlanBuilder(64), may_pause=True)
        assert low.status is Status.RUNNING
        world.run()

    @pytest.mark.parametrize("mode", ["swap", "recompute"])
    def test_urgent_requests_do_not_starve_a_displaced_one(self, mode: str) -> None:
        """There is always one that would fit; the displaced one has waited for several levels."""
        world = World(
            num_blocks=8,
            num_swap_blocks=8,
            policy="priority",
            aging_seconds=10.0,
            preemption_mode=mode,
            enable_prefix_caching=False,
        )
        low = world.add("low", 16, 12, priority=5)
        world.step()
        for number in range(60):
            world.add(f"urgent {number}", 8, 8)
            for _ in range(3):
                world.step()
        assert low.num_preemptions > 0
        assert low.is_finished
        world.run()

    def test_who_displaces_may_have_a_step_without_the_running_ones(self) -> None:
        """Without chunks, 19 tokens need all but one of the step's 20. The second prompt waits for
        the step after next, and only then displaces."""
        world = World(
            num_blocks=100,
            max_num_seqs=4,
            max_num_batched_tokens=20,
            enable_chunked_prefill=False,
            enable_prefix_caching=False,
            policy="priority",
        )
        for name in "abcd":
            world.add(name, 4, 15, priority=5 if name in "cd" else 0)
        world.step()
        for number in range(2):
            world.add(f"urgent{number}", 19, 5, priority=1)
        plans = []
        for names in (["urgent1", "d"], ["urgent1", "d"], ["c", "d"]):
            plans.append(world.step()[0].num_scheduled_tokens)
            assert world.names("waiting") == names
        assert plans == [[19], [1] * 4, [19]]
        world.run()

    def test_decodes_do_not_starve_beside_one_that_displaces(self) -> None:
        world = World(num_blocks=100, max_num_seqs=4, max_num_batched_tokens=4, policy="priority")
        first = world.add("first", 4, 30, priority=0).sequences[0]
        world.add("second", 4, 30, priority=0)
        lows = [world.add(name, 4, 30, priority=5) for name in ("low", "lower")]
        while not lows[1].sequences[0].num_output_tokens:
            world.step()
        while first.num_computed_tokens % BLOCK_SIZE:  # the next token needs a new block
            world.step()
        before = first.num_tokens
        world.add("urgent", 8, 4, priority=1)
        world.step()
        assert lows[1].status is Status.WAITING
        assert first.num_tokens == before + 1

    def test_waiting_makes_urgent(self) -> None:
        world = self.world(aging_seconds=3.0)
        world.add("patient", 16, 4, priority=2)
        patient = world.scheduler.requests["patient"]
        world.now = 20.0  # it is left behind for a while
        fresh = world.add("fresh", 16, 4, priority=1)
        world.step()
        assert (patient.status, fresh.status) == (Status.RUNNING, Status.WAITING)
        assert patient.level < 1


def test_a_refused_request_is_looked_at_again_when_it_is_alone() -> None:
    """The last other request is aborted in the swap tier: no block comes free by that."""
    world = World(num_blocks=10, num_swap_blocks=10, policy="priority", watermark=0.2)
    swapped = world.add("swapped", 16, 8, priority=5)
    world.step()
    preempt(world, swapped, "swap")
    refused = world.add("refused", 36, 4, priority=0)
    refused.refused_at = world.kv.pool.num_free, None
    world.scheduler.abort("swapped")
    world.step()
    assert refused.status is Status.RUNNING
    world.run()


@pytest.mark.parametrize("kind", ["waiting", "chunk", "running", "beam", "swapped", "catching up"])
def test_an_abort_returns_every_block(kind: str) -> None:
    swap = "swap" if kind == "swapped" else "recompute"
    world = World(
        num_blocks=12,
        num_swap_blocks=12,
        max_num_batched_tokens=8,
        preemption_mode=swap,
        enable_prefix_caching=False,
    )
    if kind == "beam":
        method = BeamSearch(3, 16, frozenset())
        spec = SamplingSpec(num_candidates=method.num_candidates)
        victim = world.add("victim", 6, method=method, sampling=spec)
    else:
        victim = world.add("victim", 12 if kind == "chunk" else 6, 9, n=2)
    if kind != "waiting":
        for _ in range(1 if kind == "chunk" else 4):
            world.step()
    if kind in ("swapped", "catching up"):
        preempt(world, victim, swap)
        if kind == "catching up":
            world.step()
            assert victim.catching_up
    world.scheduler.abort("victim")
    assert world.kv.pool.num_free == 12
    assert world.kv.swap_pool.num_free == 12
    # The next plan closes the worker's rows.
    world.add("next", 1, 1)
    world.step()
    assert len(world.executor.rows) == 1
    assert victim.status is Status.FINISHED
    assert {seq.finish_reason for seq in victim.finished} == {"abort"}


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_stop_string_may_end_a_sample_while_its_request_is_recomputed(
    index: int, swapped: bool
) -> None:
    """The engine's client finds stop strings late. The first sample leads the others."""
    world = World(
        num_blocks=40,
        num_swap_blocks=40,
        preemption_mode="recompute",
        max_num_batched_tokens=8,
        enable_prefix_caching=False,
    )
    gang = world.add("gang", 20, 8, n=3)
    for _ in range(6):
        world.step()
    preempt(world, gang, "recompute")
    world.step()
    assert gang.catching_up
    if swapped:
        preempt(world, gang, "swap")
    world.scheduler.finish_by_stop_string(gang.sequences[index], "stop")
    world.run()
    lengths = [seq.num_output_tokens for seq in gang.finished]
    assert [length == 8 for length in lengths] == [i != index for i in range(3)]


def test_what_can_never_fit_is_refused_at_once() -> None:
    world = World(num_blocks=6, max_num_seqs=3)
    with pytest.raises(RequestTooLong, match=r"max_tokens: 1 sequence.* of up to 28 tokens need 7"):
        world.add("long", 4, 24)
    with pytest.raises(RequestTooLong, match=r"3 sequence.* need 13 KV blocks .* the pool has 6"):
        world.add("wide", 4, 16, n=3)
    with pytest.raises(RequestTooLong, match="n: 4 sequences exceed max_num_seqs"):
        world.add("wider", 4, 1, n=4)
    assert not world.scheduler.has_unfinished
    world.add("fits", 4, 20)
    world.run()


def test_a_pinned_prefix_is_a_request_that_draws_nothing() -> None:
    world = World(num_blocks=10)
    world.add("pin", prompt=[1] * 8, method=PinPrefix("system", 8))
    world.run()
    assert world.kv.num_pinned_blocks == 2
    user = world.add("user", prompt=[1] * 8 + [2, 3], num_output_tokens=2)
    world.run()
    assert user.num_cached_tokens == 8


def test_a_prefix_that_is_aborted_while_its_step_runs_is_not_pinned() -> None:
    world = World(num_blocks=10)
    world.add("pin", prompt=[1] * 8, method=PinPrefix("system", 8))
    plan = world.scheduler.schedule()
    assert plan is not None
    world.scheduler.abort("pin")
    world.scheduler.update(plan, world.executor.execute(plan))
    assert not world.kv.pins
    assert world.kv.pool.num_free == 10


def test_prefixes_that_are_being_computed_are_counted_as_pinned() -> None:
    """Of 10 blocks a pin is about to take 4, so what needs more than 6 could never run."""
    world = World(num_blocks=10)
    world.add("pin", prompt=[1] * 16, method=PinPrefix("system", 16))
    with pytest.raises(RequestTooLong, match=r"need 7 KV blocks .* but the pool has 6"):
        world.add("long", 4, 24)
    world.add("open", 4, 16)
    with pytest.raises(RequestTooLong, match=r"prefix: pinning 8 tokens would leave 4 .* need 5"):
        world.add("second", prompt=[2] * 8, method=PinPrefix("second", 8))
    world.scheduler.abort("open")
    world.add("second", prompt=[2] * 8, method=PinPrefix("second", 8))
    world.scheduler.abort("second")
    world.add("other", 4, 20)
    world.run()
    assert world.kv.num_pinned_blocks == 4


def test_beams_that_are_recomputed_find_the_same_hypotheses() -> None:
    ask = Ask("beam", tuple([1, 2, 3] * 3), "beam", 3, 8, seed=0)
    results = []
    for blocks in (100, 14):
        world = World(num_blocks=blocks, preemption_mode="recompute", enable_prefix_caching=False)
        world.scheduler.add(ask.request(0.0))
        beam = world.scheduler.requests["beam"]
        world.now += 1
        world.step()
        if blocks == 14:
            world.add("other", 8, 30, order=(-1.0,))
        world.run()
        results.append([(s.token_ids, s.score) for s in beam.finished])
    assert results[0] == results[1]


def beam_search(world: World, width: int, max_length: int) -> Request:
    """A beam search that nothing ends but its length; its prompt fills a block."""
    method = BeamSearch(width, max_length, frozenset())
    spec = SamplingSpec(num_candidates=method.num_candidates)
    return world.add("beam", BLOCK_SIZE, method=method, sampling=spec)


def test_a_block_that_beams_have_filled_can_be_found_at_once() -> None:
    world = World(num_blocks=40)
    beam = beam_search(world, 2, 12)
    while beam.sequences[0].num_computed_tokens < 2 * BLOCK_SIZE:
        world.step()
    filled = beam.sequences[0].token_ids[: 2 * BLOCK_SIZE]
    assert world.kv.lookup(make_sequence(99, [*filled, 0])).num_tokens == 2 * BLOCK_SIZE


@pytest.mark.parametrize("kind", ["sample", "beam"])
def test_a_decode_into_a_block_of_its_own_needs_no_help(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 12 tokens, the first is drawn with the prompt and the last is not computed."""
    world = World(num_blocks=40)
    if kind == "beam":
        beam_search(world, 1, BLOCK_SIZE + 12)
    else:
        world.add("sample", BLOCK_SIZE, 12)
    world.step()
    asked: list[int] = []
    original = world.kv.append

    def append(targets: list[tuple[Sequence, int]]) -> Changes | None:
        asked.extend(num_tokens for _, num_tokens in targets)
        return original(targets)

    monkeypatch.setattr(world.kv, "append", append)
    world.run()
    assert asked == [BLOCK_SIZE + 1, 2 * BLOCK_SIZE + 1, 3 * BLOCK_SIZE + 1]


def test_hypotheses_are_sequences_of_their_own() -> None:
    """They never had a row. Beams are no samples: every row of theirs is that of sample 0."""
    world = World(num_blocks=40)
    beam = beam_search(world, 3, 12)
    rows, samples = {beam.sequences[0].seq_id}, set()
    while world.scheduler.has_unfinished:
        plan, _ = world.step()
        rows.update(fork.child_id for fork in plan.forks)
        samples.update(fork.sample_index for fork in plan.forks)
    assert samples == {0}
    assert [seq.finish_reason for seq in beam.finished] == ["length"] * 3
    results = {seq.seq_id for seq in beam.finished}
    assert len(results) == 3
    assert not results & rows


def test_an_overlapped_step_is_planned_before_the_last_one_is_known() -> None:
    """A decode goes on by the token to come; samples and beams first want to know it."""
    world = World(num_blocks=40, depth=2)
    world.add("plain", 4, 4)
    world.add("samples", 4, 4, n=2)
    beams = BeamSearch(2, 8, frozenset())
    spec = SamplingSpec(num_candidates=beams.num_candidates)
    world.add("beams", 4, method=beams, sampling=spec)
    first, _ = world.step()
    [second] = [plan for plan, _ in world.under_way]
    assert len(first.seq_ids) == 3
    assert second.seq_ids == first.seq_ids[:1]
    world.run()


def test_samples_run_ahead_from_their_second_token_on() -> None:
    """That one is written into a new block, which is not the common case."""
    world = World(num_blocks=40, depth=2)
    world.add("samples", BLOCK_SIZE, 6, n=2)
    world.step()
    assert not world.under_way
    world.step()
    assert len(world.under_way) == 1
    world.run()


def test_samples_are_awaited_when_a_prompt_ends_with_a_single_token() -> None:
    """It looks like a decode, and is followed by a draw for each sample."""
    world = World(num_blocks=40, depth=2, max_num_batched_tokens=6, max_num_seqs=4)
    world.add("samples", 7, 4, n=2)
    world.step()
    assert [plan.num_scheduled_tokens for plan, _ in world.under_way] == [[1]]
    world.step()
    assert not world.under_way
    world.run()


def test_a_sequence_that_has_ended_is_computed_once_too_often_at_most() -> None:
    def num_computed(depth: int, method: Sampling) -> int:
        world = World(depth=depth)
        world.add("r", 3, method=method)
        world.run()
        return world.executor.num_computed

    by_length = sampling(1, 9)
    assert num_computed(2, by_length) == num_computed(1, by_length) == 8
    at_once = Sampling(1, 9, frozenset(range(7)), frozenset())
    assert num_computed(2, at_once) == num_computed(1, at_once) + 1


def test_few_prompts_share_a_step_up_to_a_limit() -> None:
    """The first of two long prompts does not wait for the second; a crowd starts at once."""
    world = World(num_blocks=2000, max_num_batched_tokens=8192, enable_prefix_caching=False)
    quota = SchedulingPolicy.quota_of_few
    for name, length in (("a", 900), ("b", quota - 901), ("c", 2), ("d", 3000)):
        world.add(name, length, 4)
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [900, quota - 901]
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [1, 1, 2]  # the step has a prompt: the longest waits
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [1, 1, 1, 3000]  # beside decodes it starts, long as it is
    world.run()
    crowd = SchedulingPolicy.few_waiting + 1
    for i in range(crowd):
        world.add(f"e{i}", 1000, 1)
    plan, _ = world.step()
    assert plan.num_scheduled_tokens == [1000] * crowd


def test_a_request_that_cannot_be_computed_leaves_nothing_in_the_cache() -> None:
    """Its followers go on, and a pinned prefix stays."""
    world = World(num_blocks=30, max_num_batched_tokens=8)
    world.add("pin", prompt=[1] * 8, method=PinPrefix("system", 8))
    world.run()
    wrong = world.add("wrong", prompt=[1] * 8 + [2] * 8 + [HARMFUL], n=2)
    world.step()
    world.step()
    fine = world.add("fine", prompt=[1] * 8 + [2] * 8 + [3])
    world.run()
    assert isinstance(wrong.error, LogitsNotFinite)
    assert [seq.finish_reason for seq in wrong.finished] == ["error"]
    assert fine.error is None
    late = world.add("late", prompt=[1] * 8 + [HARMFUL] + [2] * 7)
    world.run()
    again = world.add("again", prompt=[1] * 8 + [2] * 9)
    world.run()
    assert (late.num_cached_tokens, again.num_cached_tokens) == (8, 16)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["samples", "beams", "pin", "read"])
def test_what_a_prompt_has_spoilt_before_it_fails_is_computed_again(kind: str, depth: int) -> None:
    """The first block of a long prompt is in the cache before its logits are known."""
    world = World(num_blocks=40, max_num_batched_tokens=8, depth=depth)
    wrong = world.add("wrong", prompt=[1] * 4 + [HARMFUL] + [2] * 30)
    for _ in range(2):
        world.step()
    method = {
        "samples": sampling(3, 12),
        "beams": BeamSearch(2, 12, frozenset()),
        "pin": PinPrefix("system", 8),
        "read": sampling(1, 12),
    }[kind]
    spec = {
        "beams": SamplingSpec(num_candidates=4),
        "read": SamplingSpec(num_prompt_logprobs=0, first_read=4),
    }.get(kind, SamplingSpec())
    fine = world.add("fine", prompt=[1] * 4 + [3] * 4, method=method, sampling=spec)
    world.run()
    assert isinstance(wrong.error, LogitsNotFinite)
    assert (fine.error, fine.avoids_cache, fine.num_cached_tokens) == (None, True, 0)
    if kind == "read":
        assert len(fine.reading.entries) == 3  # type: ignore[union-attr]
    assert world.kv.pool.num_held == (2 if kind == "pin" else 0)
    late = world.add("late", prompt=[1] * 4 + [3] * 5)
    world.run()
    assert (late.error, late.num_cached_tokens) == (None, 8), "what is cached now is sound"


def test_a_spoilt_block_that_prompts_copy_in_part_fails_only_the_first_of_them() -> None:
    """A prompt that was aborted before its logits were known has left it behind."""
    world = World(num_blocks=40, max_num_batched_tokens=8)
    world.add("wrong", prompt=[1] * 6 + [HARMFUL] + [2] * 20)
    world.step()
    world.scheduler.abort("wrong")
    # In the order of tokens, the block of the aborted prompt is the neighbour of each next one.
    requests = []
    for token in (30, 20, 10):
        requests.append(world.add(f"r{token}", prompt=[1] * 6 + [token, 2, 2]))
        world.run()
    assert [request.error for request in requests] == [None] * 3
    assert [request.avoids_cache for request in requests] == [True, False, False]
    assert [request.num_cached_tokens for request in requests] == [0, 6, 6]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", ["sample", "samples", "beams"])
def test_what_is_spoilt_while_a_request_is_preempted_costs_it_nothing(
    kind: str, depth: int
) -> None:
    """It has tokens, and is recomputed after another prompt that begins alike and goes wrong."""

    def outputs(harms: bool) -> tuple[Request, list[list[int]]]:
        world = World(num_blocks=40, max_num_batched_tokens=16, depth=depth, max_num_seqs=4)
        method, spec = sampling(1, 20), SamplingSpec()
        if kind == "samples":
            method = sampling(3, 20)
        elif kind == "beams":
            method, spec = BeamSearch(2, 20, frozenset()), SamplingSpec(num_candidates=4)
        world.now = 9.0
        fine = world.add("fine", prompt=[1] * 10, method=method, sampling=spec)
        for _ in range(4):
            world.step()
        while world.under_way:
            world.scheduler.update(*world.under_way.popleft())
        preempt(world, fine, "recompute")
        world.kv.reset_prefix_cache()
        if harms:
            world.now = 1.0
            world.add("wrong", prompt=[1] * 8 + [HARMFUL] + [2] * 35)
        world.run()
        assert world.kv.pool.num_held == 0
        return fine, [seq.token_ids for seq in fine.finished]

    fine, tokens = outputs(harms=True)
    assert (fine.error, fine.avoids_cache) == (None, True)
    assert tokens == outputs(harms=False)[1]


def test_a_resumed_request_does_not_fail_because_of_what_it_finds() -> None:
    world = World(num_blocks=40, max_num_batched_tokens=8)
    world.add("wrong", prompt=[1] * 4 + [HARMFUL] + [2] * 30)
    for _ in range(2):
        world.step()
    world.scheduler.abort("wrong")
    fine = Request("fine", [1] * 6, sampling(1, 12), SamplingSpec())
    world.scheduler.resume(fine, {0: [2, 4]})
    world.run()
    assert (fine.error, fine.avoids_cache) == (None, True)


def test_what_was_found_is_sound_once_a_token_is_drawn() -> None:
    """What fails then is not computed again."""
    world = World(num_blocks=40)
    world.add("before", prompt=[1] * 12)
    world.run()
    wrong = world.add("wrong", prompt=[1] * 12)
    world.step()
    plan = world.scheduler.schedule()
    assert plan is not None
    result = world.executor.execute(plan)
    result.errors = {plan.seq_ids[0]: LogitsNotFinite("they are not")}
    world.scheduler.update(plan, result)
    assert (wrong.is_finished, wrong.avoids_cache, wrong.num_cached_tokens) == (True, False, 11)


def test_what_a_window_needs_beside_pinned_blocks_may_be_spoilt() -> None:
    """A pin does not hold what its windows have left behind, and a request that found it has left
    it behind, too, when it fails."""
    specs = [FullAttention(), SlidingWindow(6)]
    world = World(num_blocks=40, max_num_batched_tokens=9, max_num_seqs=4, specs=specs)
    world.add("pin", prompt=[1] * 12, method=PinPrefix("system", 12))
    world.run()
    world.kv.reset_prefix_cache()
    world.add("wrong", prompt=[1] * 4 + [HARMFUL] + [2] * 30)
    for _ in range(2):
        world.step()
    world.scheduler.abort("wrong")
    fine = world.add("fine", prompt=[1] * 8 + [3] * 3)
    world.run()
    assert (fine.error, fine.avoids_cache) == (None, True)


def test_a_pin_holds_what_it_has_computed_itself() -> None:
    """The last token of another prompt's block was computed with what went wrong; the pin finds the
    tokens before it."""
    world = World(num_blocks=40, max_num_batched_tokens=7, max_num_seqs=4)
    world.add("wrong", prompt=[1] * 8 + [HARMFUL] + [2] * 30)
    for _ in range(2):
        world.step()
    world.scheduler.abort("wrong")
    pin = world.add("pin", prompt=[1] * 8, method=PinPrefix("system", 8))
    world.run()
    assert (pin.error, pin.num_cached_tokens) == (None, 7)
    after = world.add("after", prompt=[1] * 11)
    world.run()
    assert (after.error, after.num_cached_tokens) == (None, 8)
    assert world.kv.num_pinned_blocks == world.kv.pool.num_held == 2


def test_a_request_whose_grammar_fails_leaves_the_cache_as_it_is() -> None:
    world = World(num_blocks=40)
    world.add("before", prompt=[1] * 12)
    world.run()
    wrong = world.add("wrong", prompt=[1] * 9)
    plan = world.scheduler.schedule()
    assert plan is not None
    result = world.executor.execute(plan)
    result.errors = {plan.seq_ids[0]: NoTokenLeft("there is none")}
    world.scheduler.update(plan, result)
    assert isinstance(wrong.error, NoTokenLeft)
    after = world.add("after", prompt=[1] * 12)
    world.run()
    assert (wrong.num_cached_tokens, after.num_cached_tokens) == (8, 11)


def test_a_pin_that_cannot_be_computed_pins_nothing() -> None:
    world = World(num_blocks=10)
    pin = world.add("pin", prompt=[1] * 4 + [HARMFUL] * 4, method=PinPrefix("system", 8))
    world.run()
    assert isinstance(pin.error, LogitsNotFinite)
    assert world.kv.pins == {}
    assert world.kv.pool.num_held == 0
    assert len(world.kv.prefix_cache) == 0


def test_a_request_that_cannot_be_ranked_leaves_nothing_behind() -> None:
    world = World(num_blocks=10, policy="priority")
    request = Request("r", [1] * 8, PinPrefix("system", 8), SamplingSpec(), priority=None)  # type: ignore[arg-type]
    available = world.scheduler.limits.num_available_blocks
    with pytest.raises(TypeError):
        world.scheduler.add(request)
    assert not world.scheduler.has_unfinished
    assert world.scheduler.limits.num_available_blocks == available
    check_scheduler(world.scheduler)
