"""Encoder inputs: their blocks, how they are found again, and when the encoder runs."""

from __future__ import annotations

import pytest

from core.worlds import BLOCK_SIZE, World, make_manager, make_sequence, preempt
from octavo.core.block_table import BlockTable
from octavo.core.decoding import BeamSearch
from octavo.core.invariants import check_manager
from octavo.core.kv.manager import KVCacheManager
from octavo.core.kv.specs import CrossAttention, FullAttention, SlidingWindow, group_layers
from octavo.core.policies import FairShare
from octavo.core.sequence import Request, Sequence
from octavo.core.step import SamplingSpec, StepPlan
from octavo.errors import RequestTooLong

SPECS = [FullAttention(), CrossAttention()]
INPUT = tuple(number % 7 for number in range(10))  # three blocks
START = [1]  # what decoders begin with


def manager(num_blocks: int = 20, **options: object) -> KVCacheManager:
    return make_manager(num_blocks, specs=SPECS, **options)


def sequence(
    seq_id: int,
    encoder_input: tuple[int, ...] = INPUT,
    token_ids: list[int] = START,
    cache_salt: str = "",
) -> Sequence:
    seq = make_sequence(seq_id, token_ids, cache_salt)
    seq.request.encoder_token_ids = encoder_input
    return seq


def table_of(seq: Sequence) -> BlockTable:
    assert seq.table is not None
    return seq.table


def admit(kv: KVCacheManager, seq: Sequence) -> None:
    """Compute all of a sequence, and its encoder's input, in one step."""
    changes = kv.allocate(seq, kv.lookup(seq), seq.num_tokens)
    assert changes is not None
    kv.release_sources(changes.held)
    seq.num_computed_tokens = seq.num_tokens
    kv.settle(seq, seq.num_tokens)


def world(num_blocks: int = 40, **options: object) -> World:
    return World(num_blocks, specs=SPECS, **options)


def add(
    world: World, name: str, encoder_input: tuple[int, ...] = INPUT, **fields: object
) -> Request:
    fields.setdefault("prompt", START)
    return world.add(name, encoder_token_ids=encoder_input, **fields)


def encoded(plan: StepPlan) -> list[int]:
    """The lengths of the inputs that a step runs the encoder for."""
    lengths = {row.seq_id: len(row.encoder_token_ids) for row in plan.opened}
    return [lengths[seq_id] for seq_id in plan.encoded]


# -------------------------------------------------------------------- blocks


def test_groups_of_cross_attention_come_last() -> None:
    twelve = [each for _ in range(12) for each in (CrossAttention(), FullAttention())]
    layout = group_layers(twelve)
    assert layout.specs == (FullAttention(), CrossAttention())
    assert [len(group.layer_ids) for group in layout.groups] == [12, 12]
    assert layout.groups[1].layer_ids == tuple(range(0, 24, 2))
    assert str(layout) == "12 x full attention, 12 x cross-attention"
    with pytest.raises(AssertionError, match="the encoder's groups come last"):
        KVCacheManager([CrossAttention(), FullAttention()], 4, 10)
    with pytest.raises(AssertionError, match="at least one group grows"):
        KVCacheManager([CrossAttention()], 4, 10)


def test_layers_of_many_kinds_form_few_groups() -> None:
    layout = group_layers(
        [FullAttention()] * 6 + [SlidingWindow(512)] * 18 + [CrossAttention()] * 24
    )
    assert len(layout.groups) <= 8
    assert layout.specs[-1] == CrossAttention()
    assert layout.relative_bytes() < 1.05


def test_an_encoder_input_takes_its_blocks_at_admission_and_no_more() -> None:
    kv, seq = manager(), sequence(0)
    admit(kv, seq)
    assert [len(ids) for ids in table_of(seq).by_group()] == [1, 3]
    before = list(table_of(seq).encoder_ids[0])
    for num_tokens in range(2, 3 * BLOCK_SIZE):
        assert kv.append([(seq, num_tokens)]) is not None
        seq.token_ids.append(2)
        seq.num_computed_tokens = num_tokens
        kv.settle(seq, num_tokens)
        check_manager(kv, [seq])
    assert table_of(seq).encoder_ids == [before]
    assert len(table_of(seq).block_ids[0]) == 3


def test_table_writes_name_the_groups_in_the_order_of_the_layout() -> None:
    kv, seq = manager(), sequence(0)
    changes = kv.allocate(seq, kv.lookup(seq), 1)
    assert changes is not None
    written = {write.group: (write.start, len(write.block_ids)) for write in changes.table_writes}
    assert written == {0: (0, 1), 1: (0, 3)}


def test_forks_share_the_encoder_input_and_never_copy_it() -> None:
    kv, first = manager(), sequence(0)
    admit(kv, first)
    second = Sequence(1, first.request, list(first.token_ids))
    first.request.sequences.append(second)
    kv.fork(first, second)
    [ids] = table_of(first).encoder_ids
    assert [kv.pool.ref_count(block_id) for block_id in ids] == [2, 2, 2]
    for seq in (first, second):
        changes = kv.append([(seq, 2)])
        assert changes is not None
        assert {write.group for write in changes.table_writes} <= {0}
        assert not {copy.source for copy in changes.copies} & set(ids)
        seq.token_ids.append(2)
        seq.num_computed_tokens = 2
    check_manager(kv, [first, second])
    kv.free(first)
    first.request.sequences.remove(first)
    assert [kv.pool.ref_count(block_id) for block_id in ids] == [1, 1, 1]
    kv.free(second)
    assert kv.pool.num_free == kv.pool.num_blocks


def test_swapping_moves_the_encoder_input_once_for_all_samples() -> None:
    kv, first = manager(num_swap_blocks=20), sequence(0)
    admit(kv, first)
    second = Sequence(1, first.request, list(first.token_ids))
    first.request.sequences.append(second)
    kv.fork(first, second)
    seqs = [first, second]
    pairs = kv.swap_out(seqs)
    assert pairs is not None
    assert len(pairs) == 1 + 3
    assert kv.num_swap_in_blocks(seqs) == 4
    back = kv.swap_in(seqs)
    assert back is not None
    pairs, changes = back
    assert len(pairs) == 4
    assert sum(write.group == 1 for write in changes.table_writes) == 2
    assert table_of(first).encoder_ids == table_of(second).encoder_ids
    check_manager(kv, seqs)


def test_a_request_s_worst_case_counts_its_encoder_input_once() -> None:
    kv = manager()
    alone = World().add("alone", prompt=START, num_output_tokens=7, n=3)
    request = add(world(), "same", num_output_tokens=7, n=3)
    num_encoder_blocks = kv.worst_case_blocks(request, 64) - kv.worst_case_blocks(alone, 64)
    assert num_encoder_blocks == kv.num_encoder_blocks(len(INPUT)) == 3
    assert kv.num_blocks_for(8, 64) == 2
    assert kv.longest_sequence(1000, 64) == 80
    assert kv.longest_sequence(1000, 64, len(INPUT)) == 68


def test_an_allocation_that_has_no_room_for_the_encoder_input_changes_nothing() -> None:
    kv, seq = manager(num_blocks=3), sequence(0)
    assert kv.allocate(seq, kv.lookup(seq), 1) is None
    assert seq.table is None
    assert kv.pool.num_free == 3
    assert kv.num_blocks_to_admit(kv.no_hit(seq), 1, 64) == 4


# -------------------------------------------------------------------- the prefix cache


def test_an_equal_encoder_input_is_found_and_shared_while_it_is_used() -> None:
    kv, first = manager(), sequence(0)
    admit(kv, first)
    second = sequence(1)
    hit = kv.lookup(second)
    assert (hit.num_encoder_tokens, hit.num_to_encode) == (10, 0)
    assert hit.encoder_ids == table_of(first).encoder_ids
    admit(kv, second)
    check_manager(kv, [first, second])
    assert [kv.pool.ref_count(b) for b in table_of(second).encoder_ids[0]] == [2, 2, 2]
    kv.free(first)
    kv.free(second)
    assert kv.lookup(sequence(2)).num_encoder_tokens == 10  # free, and still cached


@pytest.mark.parametrize(
    "other", [INPUT[:-1], (*INPUT, 1), (9, *INPUT[1:]), (*INPUT[:-1], 0)], ids=str
)
def test_only_the_whole_encoder_input_is_found(other: tuple[int, ...]) -> None:
    kv = manager()
    admit(kv, sequence(0))
    hit = kv.lookup(sequence(1, other))
    assert (hit.num_encoder_tokens, hit.num_to_encode) == (0, len(other))
    assert hit.encoder_ids == [[]]
    assert hit.ended_by == "unknown"


def test_encoder_inputs_under_other_salts_are_not_found() -> None:
    kv = manager()
    admit(kv, sequence(0, cache_salt="one"))
    assert kv.lookup(sequence(1, cache_salt="two")).num_encoder_tokens == 0
    assert kv.lookup(sequence(2, cache_salt="one")).num_encoder_tokens == 10


def test_equal_decoder_prefixes_under_different_inputs_never_meet() -> None:
    kv, prefix = manager(num_blocks=40), [1, 2, 3, 4, 5, 6, 7, 8]
    admit(kv, sequence(0, INPUT, [*prefix, 9]))
    admit(kv, sequence(1, (5, 5), [3, 9]))
    same = kv.lookup(sequence(2, INPUT, [*prefix, 9, 9]))
    other = kv.lookup(sequence(3, (5, 5), [*prefix, 9, 9]))
    assert (same.num_encoder_tokens, same.num_tokens) == (10, 8)
    assert (other.num_encoder_tokens, other.num_tokens) == (2, 0)


def test_inputs_with_equal_digests_are_told_apart() -> None:
    kv = manager(digest=lambda content: b"x")
    admit(kv, sequence(0))
    assert kv.lookup(sequence(1, (7, 7))).num_encoder_tokens == 0
    admit(kv, sequence(2, (7, 7)))
    assert kv.lookup(sequence(3)).num_encoder_tokens == 10


def test_an_input_of_which_a_block_was_overwritten_is_gone_as_a_whole() -> None:
    kv, seq = manager(num_blocks=6), sequence(0)
    admit(kv, seq)
    kv.free(seq)
    assert kv.pool.num_free_cached == 3
    other = sequence(1, (4,), [2] * 12)  # three blocks and one: one cached block is overwritten
    admit(kv, other)
    assert len(table_of(other).held()) == 4
    assert kv.num_evicted_blocks == 3
    hit = kv.lookup(sequence(2))
    assert (hit.num_encoder_tokens, hit.ended_by) == (0, "evicted")
    check_manager(kv, [other])


def test_the_input_used_last_is_evicted_last() -> None:
    kv = manager(num_blocks=8)
    for seq_id, token in enumerate((1, 2)):
        seq = sequence(seq_id, (token,) * 8)
        admit(kv, seq)
        kv.free(seq)
    again = sequence(2, (1,) * 8)
    admit(kv, again)  # used later than the other
    kv.free(again)
    admit(kv, sequence(3, (3,) * 8, [1] * 9))
    assert kv.lookup(sequence(4, (1,) * 8)).num_encoder_tokens == 8
    assert kv.lookup(sequence(5, (2,) * 8)).num_encoder_tokens == 0


def test_what_was_swapped_back_in_can_be_found_again() -> None:
    kv, seq = manager(num_swap_blocks=20), sequence(0)
    admit(kv, seq)
    assert kv.swap_out([seq]) is not None
    kv.reset_prefix_cache()
    assert kv.swap_in([seq]) is not None
    assert kv.lookup(sequence(1)).num_encoder_tokens == 0
    kv.settle(seq, 1)
    assert kv.lookup(sequence(2)).num_encoder_tokens == 10
    check_manager(kv, [seq])


def test_a_forgotten_sequence_takes_its_encoder_input_with_it() -> None:
    kv, seq = manager(), sequence(0)
    admit(kv, seq)
    kv.forget(seq)
    assert kv.lookup(sequence(1)).num_encoder_tokens == 0
    kv.free(seq)
    assert kv.pool.num_free_cached == 0


def test_without_prefix_caching_every_request_runs_the_encoder() -> None:
    kv = manager(enable_prefix_caching=False)
    admit(kv, sequence(0))
    assert kv.lookup(sequence(1)).num_to_encode == 10


# -------------------------------------------------------------------- the scheduler


def test_the_first_step_runs_the_encoder_and_only_that_one() -> None:
    here = world()
    request = add(here, "a", num_output_tokens=5)
    plan, _ = here.step()
    assert encoded(plan) == [10]
    assert (plan.num_tokens, plan.num_encoder_tokens, plan.only_decodes) == (1, 10, False)
    while here.scheduler.has_unfinished:
        plan, _ = here.step()
        assert plan.encoded == []
        assert plan.only_decodes
    assert request.num_cached_tokens == 0
    assert (here.kv.num_lookup_tokens, here.kv.num_hit_tokens) == (11, 0)


def test_a_request_whose_input_is_cached_does_not_run_the_encoder() -> None:
    here = world()
    add(here, "first")
    here.run()
    again = add(here, "again")
    plan, _ = here.step()
    assert plan.encoded == []
    assert plan.opened[0].encoder_token_ids == INPUT
    assert again.num_cached_tokens == 10
    here.run()
    assert here.executor.num_encoded == 1


def test_equal_inputs_that_arrive_together_are_encoded_once() -> None:
    here = world()
    for name in "abcd":
        add(here, name)
    plan, _ = here.step()
    assert encoded(plan) == [10]
    assert here.names("running") == ["a"]
    here.step()
    assert here.names("running") == ["a", "b", "c", "d"]
    here.run()
    assert here.executor.num_encoded == 1


def test_those_that_wait_for_an_input_go_on_if_its_request_is_aborted() -> None:
    here = world(depth=1)
    add(here, "a")
    add(here, "b")
    assert here.scheduler.schedule() is not None
    here.scheduler.abort("a")
    plan = here.scheduler.schedule()
    assert plan is not None
    assert encoded(plan) == [10]


def test_the_encoder_s_tokens_count_against_the_budget() -> None:
    here = world(max_num_batched_tokens=25)
    for name in "abc":  # 11 tokens each, with the decoder's first one
        add(here, name, (ord(name), *INPUT[1:]), num_output_tokens=8)
    for names in (["a", "b"], ["a", "b", "c"]):
        plan, _ = here.step()
        assert plan.num_tokens + plan.num_encoder_tokens <= 25
        assert here.names("running") == names


@pytest.mark.parametrize("depth", [1, 2])
def test_an_input_that_leaves_the_running_no_room_has_a_step_of_its_own(depth: int) -> None:
    """Requests behind it would wait until enough of the running ones have ended. Between two such
    inputs the running ones go on, and they are not left out for an input that is cached."""
    here = world(max_num_batched_tokens=13, num_blocks=200, max_num_seqs=8, depth=depth)
    for number in range(3):
        add(here, f"small{number}", (number,), num_output_tokens=30)
    here.step()
    for number, token in enumerate((1, 2, 2)):
        add(here, f"large{number}", (token,) * 12, num_output_tokens=2)
    add(here, "behind", (6,), num_output_tokens=2)
    plans = []
    while "behind" in here.scheduler.requests:
        plans.append(here.step()[0])
        assert plans[-1].num_tokens + plans[-1].num_encoder_tokens <= 13
    assert [encoded(plan) for plan in plans if 12 in encoded(plan)] == [[12], [12]]
    assert {len(plan.seq_ids) for plan in plans if 12 in encoded(plan)} == {1}
    assert len(plans) < 12
    assert {"small0", "small1", "small2"} <= here.scheduler.requests.keys()
    here.run()


@pytest.mark.parametrize(
    ("chunked", "num_tokens", "message"),
    [
        (True, 15, None),
        (True, 16, "16 tokens of encoder input and 1 of the decoder's exceed the 16"),
        (False, 11, None),
        (False, 12, "12 tokens of encoder input and 5 of the decoder's exceed the 16"),
    ],
)
def test_an_input_that_no_step_can_take_is_refused_at_once(
    chunked: bool, num_tokens: int, message: str | None
) -> None:
    here = world(max_num_batched_tokens=16, enable_chunked_prefill=chunked)
    if message is None:
        add(here, "fits", (1,) * num_tokens)
        assert len(here.run()) == 1
        return
    with pytest.raises(RequestTooLong, match=message) as caught:
        add(here, "long", (1,) * num_tokens)
    assert caught.value.field == "prompt"
    assert not here.scheduler.has_unfinished


def test_an_input_that_the_pool_cannot_hold_is_refused() -> None:
    here = world(num_blocks=5)
    add(here, "fits", INPUT, num_output_tokens=7)
    with pytest.raises(RequestTooLong, match="beside an encoder input of 13 tokens need 6 KV"):
        add(here, "large", (1,) * 13, num_output_tokens=7)


@pytest.mark.parametrize("keeps_the_input", [True, False])
def test_recomputation_runs_the_encoder_again_unless_its_blocks_are_found(
    keeps_the_input: bool,
) -> None:
    here = world(preemption_mode="recompute", enable_prefix_caching=keeps_the_input)
    request = add(here, "a", num_output_tokens=6)
    here.step()
    here.step()
    preempt(here, request, "recompute")
    plan, _ = here.step()
    assert encoded(plan) == ([] if keeps_the_input else [10])
    here.run()
    assert here.executor.num_encoded == (1 if keeps_the_input else 2)
    assert (here.scheduler.num_preemptions["recompute"], request.num_preemptions) == (1, 1)


def test_swapping_brings_the_input_back_without_running_the_encoder() -> None:
    here = world(num_swap_blocks=40, preemption_mode="swap", enable_prefix_caching=False)
    request = add(here, "a", num_output_tokens=6)
    here.step()
    here.step()
    preempt(here, request, "swap")
    here.run()
    assert here.executor.num_encoded == 1
    assert here.scheduler.num_preemptions["swap"] == 1


def test_a_tenant_s_share_counts_the_encoder_s_tokens() -> None:
    here = world(policy="fair")
    add(here, "a", tenant="one")
    here.step()
    policy = here.scheduler.policy
    assert isinstance(policy, FairShare)
    assert policy.counters()["one"] == len(INPUT) + len(START) + 2  # an output token counts twice


def test_four_beams_hold_the_encoder_s_blocks_once() -> None:
    here = world(num_blocks=60)
    method = BeamSearch(4, 1 + 12, frozenset())
    add(here, "beams", method=method, sampling=SamplingSpec(num_candidates=8))
    num_wide = 0
    while here.scheduler.has_unfinished:
        here.step()
        for request in here.scheduler.running:
            if len(request.sequences) < 4:
                continue
            num_wide += 1
            tables = [table_of(seq) for seq in request.sequences]
            [[ids]] = [table.encoder_ids for table in tables[:1]]
            assert len(ids) == len(set(ids)) == 3
            assert all(table.encoder_ids == [ids] for table in tables)
            assert [here.kv.pool.ref_count(block_id) for block_id in ids] == [4, 4, 4]
            own = {block_id for table in tables for block_id in table.block_ids[0]}
            assert here.kv.pool.num_held == len(own) + 3
    assert num_wide > 5
    assert here.executor.num_encoded == 1
