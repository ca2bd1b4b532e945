"""Rows against a naive model in plain Python, under random plans."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from octavo.core.step import (
    Fork,
    Grammar,
    LogitBias,
    OpenedRow,
    SamplingSpec,
    StepPlan,
    TableWrite,
    TokenWrites,
)
from octavo.ops import HostStaging
from octavo.structured.constraint import num_words, words_of
from octavo.worker.block_tables import BlockTables
from octavo.worker.input_batch import InputBatch
from octavo.worker.row_edits import RowEdits
from worker.fake_constraints import no_grammars, rising_masks

VOCAB_SIZE = 100
BLOCK_SIZE = 4
NUM_ROWS = 256
SPECS = [
    SamplingSpec(),
    SamplingSpec(temperature=0.0),
    SamplingSpec(temperature=0.5, top_k=3, top_p=0.5, min_p=0.25, num_logprobs=2),
    SamplingSpec(presence_penalty=1.0, num_prompt_logprobs=1),
    SamplingSpec(num_prompt_logprobs=0, first_read=3),
    SamplingSpec(pools_prompt=True),
    SamplingSpec(pools_prompt=True, first_read=2),
    SamplingSpec(pools_prompt=True, end_read=1),
    SamplingSpec(min_tokens=3, end_token_ids=(1,)),
    SamplingSpec(num_candidates=4),
]


@dataclass
class Row:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    spec: SamplingSpec
    seed: int
    sample_index: int
    num_draws: int
    tables: list[dict[int, int]] = field(default_factory=list)

    def copy(self, sample_index: int) -> Row:
        tables = [dict(table) for table in self.tables]
        return replace(self, tokens=list(self.tokens), tables=tables, sample_index=sample_index)


class NaiveRows:
    """What the rows must hold, one dictionary entry at a time."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.rows: dict[int, Row] = {}

    def apply(self, plan: StepPlan) -> None:
        for fork in plan.forks:
            self.rows[fork.child_id] = self.rows[fork.parent_id].copy(fork.sample_index)
        for seq_id in plan.closed:
            del self.rows[seq_id]
        for o in plan.opened:
            self.rows[o.seq_id] = Row(
                list(o.token_ids),
                o.num_prompt_tokens,
                o.num_computed_tokens,
                o.sampling,
                o.seed,
                o.sample_index,
                o.num_draws,
                [{} for _ in range(self.num_groups)],
            )
        for seq_id, position, token_id in zip(*plan.token_writes, strict=True):
            self.rows[seq_id].tokens[position:] = [token_id]
        for table_write in plan.table_writes:
            table = self.rows[table_write.seq_id].tables[table_write.group]
            for index, block_id in enumerate(table_write.block_ids, table_write.start):
                table[index] = block_id

    def advance(self, plan: StepPlan, drawn: list[int]) -> None:
        for seq_id, n in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
            self.rows[seq_id].num_computed += n
        for seq_id, token_id in zip(plan.sampled, drawn, strict=True):
            self.rows[seq_id].tokens.append(token_id)


class PlanMaker:
    """Random plans that a scheduler could make, and some that it would not."""

    def __init__(self, naive: NaiveRows, rng: random.Random) -> None:
        self.naive, self.rng = naive, rng
        self.next_id = 0
        self.step_id = 0
        self.held: dict[int, int] = {}  # entries of a sequence's tables

    def new_id(self) -> int:
        self.next_id += self.rng.randint(1, 3)
        return self.next_id

    def make(self) -> StepPlan:
        rng, rows = self.rng, self.naive.rows
        plan = StepPlan(self.step_id, [], [], [], [])
        self.step_id += 1
        lengths = {seq_id: len(row.tokens) for seq_id, row in rows.items()}
        computed = {seq_id: row.num_computed for seq_id, row in rows.items()}
        for parent_id in rng.sample(list(lengths), min(len(lengths), rng.choice([0, 0, 1, 3]))):
            family = [parent_id]
            for _ in range(rng.randint(1, 3)):  # children of children, too
                parent, child = rng.choice(family), self.new_id()
                plan.forks.append(Fork(parent, child, rng.randint(0, 9)))
                lengths[child], computed[child] = lengths[parent], computed[parent]
                self.held[child] = self.held[parent]
                family.append(child)
        for child in rng.sample(list(lengths), min(len(lengths), rng.choice([0, 0, 1, 3]))):
            parent = rng.choice(list(lengths))  # in place of what the child was, or of itself
            plan.forks.append(Fork(parent, child, rng.randint(0, 9)))
            lengths[child], computed[child] = lengths[parent], computed[parent]
            self.held[child] = self.held[parent]
        for seq_id in rng.sample(list(lengths), min(len(lengths), rng.choice([0, 1, 2]))):
            plan.closed.append(seq_id)
            del lengths[seq_id], computed[seq_id]
        for _ in range(rng.choice([0, 0, 1, 2, 5])):
            # A sequence that was just closed may come back.
            back = [seq_id for seq_id in plan.closed if seq_id not in lengths]
            seq_id = rng.choice(back) if back and rng.random() < 0.5 else self.new_id()
            length = rng.choice([1, 3, 4, 5, 17, 70])
            done = rng.randint(0, length - 1)
            tokens = tuple(rng.randrange(1000) for _ in range(length))
            plan.opened.append(
                OpenedRow(
                    seq_id,
                    tokens,
                    rng.randint(1, length),
                    done,
                    rng.choice(SPECS),
                    rng.randrange(-(1 << 63), 1 << 63),
                    rng.randint(0, 5),
                    rng.choice([1, 1, 4]),
                )
            )
            lengths[seq_id], computed[seq_id] = length, done
            self.held[seq_id] = 0
        for seq_id in list(lengths):
            for _ in range(rng.choice([0, 0, 1, 2])):
                position = rng.choice([lengths[seq_id], max(lengths[seq_id] - 1, computed[seq_id])])
                write = (seq_id, position, rng.randrange(1000))
                for column, value in zip(plan.token_writes, write, strict=True):
                    column.append(value)
                lengths[seq_id] = position + 1
        self._schedule(plan, lengths, computed)
        return plan

    def _schedule(self, plan: StepPlan, lengths: dict[int, int], computed: dict[int, int]) -> None:
        rng = self.rng
        for seq_id, length in lengths.items():
            for group in range(self.naive.num_groups):
                num_blocks = -(-length // BLOCK_SIZE)
                # New entries at the end, or the whole table; then copy-on-write of single entries.
                start = min(self.held[seq_id], num_blocks) if rng.random() < 0.8 else 0
                ids = tuple(rng.randint(1, 99) for _ in range(start, num_blocks))
                if ids:
                    plan.table_writes.append(TableWrite(seq_id, group, start, ids))
                for _ in range(rng.choice([0, 0, 0, 1, 3])):
                    index = rng.randrange(num_blocks)
                    plan.table_writes.append(
                        TableWrite(seq_id, group, index, (rng.randint(1, 99),))
                    )
            self.held[seq_id] = max(self.held[seq_id], num_blocks)
        for seq_id in rng.sample(list(lengths), rng.randint(0, len(lengths))):
            room = lengths[seq_id] - computed[seq_id]
            if room == 0:
                continue
            n = rng.randint(1, room)
            plan.seq_ids.append(seq_id)
            plan.num_scheduled_tokens.append(n)
            if n == room:
                (plan.sampled if rng.random() < 0.7 else plan.expanded).append(seq_id)


def make_batch(num_groups: int = 1) -> InputBatch:
    tables = BlockTables([BLOCK_SIZE] * num_groups, NUM_ROWS)
    return InputBatch(
        tables, NUM_ROWS, HostStaging(), no_grammars(NUM_ROWS, VOCAB_SIZE), RowEdits(None)
    )


def check(batch: InputBatch, naive: NaiveRows, plan: StepPlan) -> None:
    inputs = batch.model_input(plan)
    attention = inputs.attention
    start = 0
    assert attention.query_starts.tolist()[0] == 0
    assert attention.query_lens.tolist() == plan.num_scheduled_tokens
    for i, (seq_id, n) in enumerate(zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True)):
        row = naive.rows[seq_id]
        positions = list(range(row.num_computed, row.num_computed + n))
        assert attention.context_lens[i] == row.num_computed + n
        assert attention.query_starts[i + 1] == start + n
        assert attention.positions[start : start + n].tolist() == positions
        assert inputs.input_ids[start : start + n].tolist() == [row.tokens[p] for p in positions]
        for group, table in enumerate(row.tables):
            num_blocks = -(-(row.num_computed + n) // BLOCK_SIZE)
            entries = attention.block_tables[group][i].tolist()
            assert entries[:num_blocks] == [table[index] for index in range(num_blocks)]
            slots = [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in positions]
            assert attention.slots[group][start : start + n].tolist() == slots
        start += n
    assert len(inputs.input_ids) == start
    ends = dict(zip(plan.seq_ids, (attention.query_starts[1:] - 1).tolist(), strict=True))
    ending = [*plan.sampled, *plan.expanded]
    assert batch.logits_indices(plan, ending).tolist() == [ends[seq_id] for seq_id in ending]


def check_sampling(batch: InputBatch, naive: NaiveRows, plan: StepPlan) -> None:
    sampling = batch.sampling_batch(plan.sampled, plan.expanded)
    ending = [*plan.sampled, *plan.expanded]
    rows = [naive.rows[seq_id] for seq_id in ending]
    assert sampling.num_sampled == len(plan.sampled)
    assert sampling.seeds.tolist() == [row.seed for row in rows]
    assert sampling.sample_indices.tolist() == [row.sample_index for row in rows]
    assert sampling.positions.tolist() == [len(row.tokens) for row in rows]
    assert sampling.num_draws.tolist() == [
        row.num_draws if len(row.tokens) == row.num_prompt else 1 for row in rows
    ]
    for name in ("temperature", "top_k", "top_p", "min_p"):
        assert getattr(sampling, name).tolist() == [getattr(row.spec, name) for row in rows]
    assert sampling.num_logprobs == {
        i: row.spec.num_logprobs for i, row in enumerate(rows) if row.spec.num_logprobs is not None
    }
    assert sampling.num_candidates == [
        naive.rows[seq_id].spec.num_candidates for seq_id in plan.expanded
    ]
    edited = {i: row for i, row in enumerate(rows) if row.spec.presence_penalty}
    early = [
        i for i, row in enumerate(rows) if row.spec.min_tokens > len(row.tokens) - row.num_prompt
    ]
    places = [-1] * len(rows) if sampling.mask_places is None else sampling.mask_places.tolist()
    assert [i for i, place in enumerate(places) if place >= 0] == early
    masked = batch.masked_rows(ending)
    assert masked.logits_rows.tolist() == early
    room = np.empty((len(masked), num_words(VOCAB_SIZE)), np.int32)
    masks = batch.start_masks(masked, room).result()
    assert not masks.errors
    assert masked.num_tokens.tolist() == [len(rows[i].tokens) for i in early]
    assert masked.num_prompt_tokens.tolist() == [rows[i].num_prompt for i in early]
    for row, words in zip((rows[i] for i in early), masks.words, strict=True):
        left = [i for i in range(VOCAB_SIZE) if i not in row.spec.end_token_ids]
        assert words.tolist() == words_of(left, VOCAB_SIZE).tolist()
    assert [entry.index for entry in sampling.edited] == sorted(edited)
    for entry in sampling.edited:
        assert entry.token_ids.tolist() == edited[entry.index].tokens
        assert entry.num_prompt_tokens == edited[entry.index].num_prompt
    for seq_id, counts in counted(batch, ending).items():
        row = naive.rows[seq_id]
        output = row.tokens[row.num_prompt :]
        assert counts == {token_id: output.count(token_id) for token_id in row.tokens}


def counted(batch: InputBatch, ending: list[int]) -> dict[int, dict[int, int]]:
    """How often the tokens of rows occur in their outputs, by sequence id; of edited rows."""
    found = {}
    for entry in batch.with_texts(ending, batch.sampling_batch(ending, []).edited):
        entry.counts.take(entry.token_ids, entry.num_prompt_tokens)
        token_ids, counts = entry.counts.pairs(outputs_only=False)
        found[ending[entry.index]] = dict(zip(token_ids.tolist(), counts.tolist(), strict=True))
    return found


def check_prompt_chunks(batch: InputBatch, naive: NaiveRows, plan: StepPlan) -> None:
    expected = {}
    start = 0
    for seq_id, n in zip(plan.seq_ids, plan.num_scheduled_tokens, strict=True):
        row = naive.rows[seq_id]
        spec, end = row.spec, min(row.num_computed + n, row.num_prompt)
        read = range(max(row.num_computed, spec.first_read), end)
        if spec.pools_prompt:
            read = [i for i in read if spec.end_read is None or i < spec.end_read]
        else:
            read = [i for i in read if i + 1 < row.num_prompt]
        if spec.reads_prompt and read:
            targets = None if spec.pools_prompt else [row.tokens[i + 1] for i in read]
            expected[seq_id] = (start + read[0] - row.num_computed, len(read), targets)
        start += n
    chunks = batch.prompt_chunks(plan)
    assert {
        c.seq_id: (c.start, c.num_read, None if c.targets is None else c.targets.tolist())
        for c in chunks
    } == expected


@pytest.mark.parametrize("seed", range(40))
def test_random_plans_leave_the_rows_as_a_naive_model_has_them(seed: int) -> None:
    rng = random.Random(seed)
    num_groups = rng.choice([1, 2])
    batch = make_batch(num_groups)
    naive = NaiveRows(num_groups)
    maker = PlanMaker(naive, rng)
    for _ in range(30):
        plan = maker.make()
        batch.apply(plan)
        naive.apply(plan)
        check(batch, naive, plan)
        check_sampling(batch, naive, plan)
        check_prompt_chunks(batch, naive, plan)
        drawn = [rng.randrange(1000) for _ in plan.sampled]
        batch.fill(batch.advance(plan), np.array(drawn, np.int64))
        naive.advance(plan, drawn)


def opened(seq_id: int, length: int, spec: SamplingSpec = SPECS[0]) -> OpenedRow:
    return OpenedRow(seq_id, tuple(range(length)), length, 0, spec, seed=0, sample_index=0)


class CountedList(list[int]):
    """A list that counts the elements of its slices."""

    num_copied = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.num_copied += len(found)
        return found


def test_prompts_that_are_read_are_found_without_adding_up_those_before_each() -> None:
    batch, num_rows = make_batch(), 200
    seq_ids, spec = list(range(num_rows)), SamplingSpec(pools_prompt=True)
    counts = CountedList([3] * num_rows)
    plan = StepPlan(0, seq_ids, counts, [], [], opened=[opened(i, 3, spec) for i in seq_ids])
    batch.apply(plan)
    assert [chunk.start for chunk in batch.prompt_chunks(plan)] == list(range(0, 600, 3))
    assert counts.num_copied == 0


def test_tokens_are_counted_again_where_one_was_rewritten() -> None:
    batch = make_batch()
    plan = StepPlan(
        0, [1], [3], [1], [], opened=[opened(1, 3, SamplingSpec(frequency_penalty=1.0))]
    )
    batch.apply(plan)
    batch.fill(batch.advance(plan), np.array([7]))
    assert counted(batch, [1]) == {1: {0: 0, 1: 0, 2: 0, 7: 1}}
    batch.apply(StepPlan(1, [], [], [], [], token_writes=TokenWrites([1], [3], [2])))
    assert counted(batch, [1]) == {1: {0: 0, 1: 0, 2: 1}}


def test_a_fork_does_not_count_again_what_its_parent_has_counted() -> None:
    batch = make_batch()
    spec = SamplingSpec(repetition_penalty=1.1)
    plan = StepPlan(0, [1], [3], [1], [], opened=[opened(1, 3, spec)])
    batch.apply(plan)
    assert counted(batch, [1]) == {1: {0: 0, 1: 0, 2: 0}}
    batch.fill(batch.advance(plan), np.array([7]))
    writes = TokenWrites([2], [3], [2])
    batch.apply(StepPlan(1, [], [], [], [], forks=[Fork(1, 2, 0)], token_writes=writes))
    [entry] = batch.with_texts([2], batch.sampling_batch([2], []).edited)
    assert entry.counts.num_counted == 3
    assert counted(batch, [1, 2]) == {1: {0: 0, 1: 0, 2: 0, 7: 1}, 2: {0: 0, 1: 0, 2: 1}}


def test_a_row_that_is_opened_again_has_an_empty_table() -> None:
    batch = make_batch()
    write = TableWrite(1, 0, 0, (7, 8, 9))
    batch.apply(StepPlan(0, [], [], [], [], opened=[opened(1, 12)], table_writes=[write]))
    batch.apply(StepPlan(1, [], [], [], [], closed=[1]))
    plan = StepPlan(
        2, [2, 3], [4, 12], [], [], opened=[opened(2, 4), opened(3, 12)],
        table_writes=[TableWrite(2, 0, 0, (4,)), TableWrite(3, 0, 0, (1, 2, 3))],
    )  # fmt: skip
    batch.apply(plan)
    # Padding is the null block.
    assert batch.model_input(plan).attention.block_tables[0].tolist() == [[4, 0, 0], [1, 2, 3]]


def test_any_integer_is_a_seed() -> None:
    batch = make_batch()
    seeds = [0, -1, (1 << 63) - 1, 1 << 63, -(1 << 63), (1 << 64) + 5]
    rows = [opened(i, 1)._replace(seed=seed) for i, seed in enumerate(seeds)]
    batch.apply(StepPlan(0, [], [], [], [], opened=rows))
    got = batch.sampling_batch(range(len(seeds)), []).seeds.tolist()
    assert got == [0, -1, (1 << 63) - 1, -(1 << 63), -(1 << 63), 5]


def test_arrays_have_the_types_that_models_and_backends_rely_on() -> None:
    batch = make_batch()
    plan = StepPlan(0, [1], [3], [1], [], opened=[opened(1, 3)])
    batch.apply(plan)
    inputs = batch.model_input(plan)
    attention = inputs.attention
    dtypes = {
        "int64": [attention.positions, *attention.slots],
        "int32": [
            attention.query_lens,
            attention.context_lens,
            attention.query_starts,
            *attention.block_tables,
        ],
    }
    for name, tensors in dtypes.items():
        for tensor in tensors:
            assert str(tensor.dtype) == f"torch.{name}"
            assert tensor.is_contiguous()
    arrays = {"int64": [inputs.input_ids, inputs.positions], "int32": [inputs.rows]}
    for name, each in arrays.items():
        for array in each:
            assert array.dtype == name
            assert array.flags.c_contiguous


@pytest.mark.parametrize(
    ("spec", "needs"),
    [
        (SamplingSpec(top_k=3, min_tokens=3, end_token_ids=(1,)), False),
        (SamplingSpec(logit_bias=LogitBias.of({3: 1.0}), allowed_token_ids=(3, 4)), False),
        (SamplingSpec(logit_bias=LogitBias.of({3: 1.0}), bad_words=((3, 4),)), True),
        (SamplingSpec(frequency_penalty=0.5), True),
        (SamplingSpec(grammar=Grammar("lark", "rising"), end_token_ids=(0,)), True),
    ],
)
def test_only_draws_that_follow_from_the_text_wait_for_it(spec: SamplingSpec, needs: bool) -> None:
    tables = BlockTables([BLOCK_SIZE], NUM_ROWS)
    batch = InputBatch(
        tables, NUM_ROWS, HostStaging(), rising_masks(NUM_ROWS, VOCAB_SIZE), RowEdits(None)
    )
    opened = OpenedRow(7, (1, 2), 2, 0, spec, 0, 0)
    plan = StepPlan(0, [7], [2], [7], [], opened=[opened], table_writes=[TableWrite(7, 0, 0, (1,))])
    batch.apply(plan)
    assert not batch.awaits_tokens(plan)  # the host knows the prompt
    drawn = batch.advance(plan)
    later = StepPlan(1, [7], [1], [7], [])
    assert batch.awaits_tokens(later) == needs
    batch.fill(drawn, np.array([5]))
    assert not batch.awaits_tokens(later)


def test_rows_are_found_again_after_they_were_given_to_others() -> None:
    batch = make_batch()
    batch.apply(StepPlan(0, [], [], [], [], opened=[opened(1, 3), opened(2, 3)]))
    first = batch.rows_of([1, 2])
    assert batch.rows_of([1, 2]) is first
    assert batch.rows_of((2, 1)).tolist() == first[::-1].tolist()
    assert batch.rows_of([1]).tolist() == first[:1].tolist()
    again = [opened(2, 3), opened(1, 3)]
    batch.apply(StepPlan(1, [], [], [], [], closed=[1, 2], opened=again))
    assert batch.rows_of([1, 2]).tolist() == [batch.rows_of([1])[0], batch.rows_of([2])[0]]
    with pytest.raises(ValueError, match="read-only"):
        batch.rows_of([1, 2])[0] = 5
    batch.apply(StepPlan(2, [], [], [], [], closed=[1]))
    with pytest.raises(KeyError):
        batch.rows_of([1, 2])
