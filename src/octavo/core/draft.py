"""A step in the making: the plan's lists, and what `update` must remember about them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import compress

from octavo.core.beam_search import Search
from octavo.core.decoding import Searching
from octavo.core.kv.block_table import BlockTable
from octavo.core.kv.manager import Changes
from octavo.core.sequence import Request, Sequence
from octavo.core.step import BlockCopy, Fork, OpenedRow, StepPlan, TableWrite, TokenWrites

# Blocks of waiting requests that are named in one step: some 0.5 ms, in which running ones wait.
# A request with more of them goes on in the next steps.
MAX_NAMES = 512


class RowChanges:
    """What has become of the worker's rows since the last plan."""

    def __init__(self) -> None:
        self.forks: list[Fork] = []
        self.closed: list[int] = []
        self._token_writes = TokenWrites.none()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.forks.append(Fork(parent.seq_id, child.seq_id, child.sample_index))

    def close(self, seq: Sequence) -> None:
        self.closed.append(seq.seq_id)

    def write_tokens(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        """The token after each sequence's last one, which the worker has not drawn by itself."""
        writes = self._token_writes
        writes.seq_ids.extend([seq.seq_id for seq in seqs])
        writes.positions.extend([len(seq.token_ids) for seq in seqs])
        writes.token_ids.extend(token_ids)

    def token_writes(self) -> TokenWrites:
        """Those into rows that are still there."""
        if not self.closed:
            return self._token_writes
        closed = set(self.closed)
        is_there = [seq_id not in closed for seq_id in self._token_writes.seq_ids]
        return TokenWrites(*(list(compress(column, is_there)) for column in self._token_writes))


class PlanDraft:
    """Collects one step. `budget` is how many more tokens it may compute."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.max_names = MAX_NAMES  # how many more blocks may be named to look requests up
        self.seq_ids: list[int] = []
        self.num_scheduled_tokens: list[int] = []
        self.sampled: list[int] = []
        self.expanded: list[int] = []
        self.opened: dict[int, OpenedRow] = {}
        self.table_writes: list[TableWrite] = []
        self.swap_out: list[tuple[int, int]] = []
        self.swap_in: list[tuple[int, int]] = []
        self.copies: list[BlockCopy] = []
        # For the scheduler, while it plans.
        self.ran_out_of_blocks = False
        self.preempted: list[Request] = []
        self.started: list[Request] = []
        # For `update`, when the results are in.
        self.held: list[int] = []  # sources of copies
        self.drawn: list[Sequence] = []  # as `sampled`
        self.searching: list[Search] = []
        self.undecided: list[Request] = []
        self.filled: list[tuple[Sequence, BlockTable, int]] = []  # with the tokens then computed
        self.prompts: dict[int, tuple[Request, int]] = {}  # with the chunk's first token

    def decode(self, sequences: list[Sequence]) -> None:
        """Compute the next token of sequences that draw one by one and have room for it."""
        self.budget -= len(sequences)
        for seq in sequences:
            end = seq.num_computed_tokens + 1
            seq.num_computed_tokens = end
            seq.num_pending += 1
            self.seq_ids.append(seq.seq_id)
            self.num_scheduled_tokens.append(1)
            self.sampled.append(seq.seq_id)
            self.drawn.append(seq)
            table = seq.table
            if table is not None and end == table.writable_until:
                self.filled.append((seq, table, end))

    def search(self, request: Request, method: Searching, end: int) -> None:
        """Compute the next token of a search's sequences, which have room for it: until `end`."""
        sequences = request.sequences
        seq_ids = [seq.seq_id for seq in sequences]
        self.budget -= len(seq_ids)
        self.searching.append(Search(request, method, len(self.expanded)))
        self.seq_ids += seq_ids
        self.num_scheduled_tokens += [1] * len(seq_ids)
        self.expanded += seq_ids
        for seq in sequences:
            seq.num_computed_tokens = end
            table = seq.table
            if table is not None and end == table.writable_until:
                self.filled.append((seq, table, end))
        self._await_decision(request)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Compute a sequence's next `num_tokens`, for which it has room."""
        request = seq.request
        if request.sampling.num_prompt_logprobs is not None:
            self.prompts[seq.seq_id] = (request, seq.num_computed_tokens)
        seq.num_computed_tokens += num_tokens
        self.budget -= num_tokens
        self.seq_ids.append(seq.seq_id)
        self.num_scheduled_tokens.append(num_tokens)
        table, end = seq.table, seq.num_computed_tokens
        assert table is not None, "room was made for it"
        if num_tokens > 1 or end == table.writable_until:
            self.filled.append((seq, table, end))
        if seq.num_computed_tokens < seq.num_expected_tokens:
            return
        method = request.method
        if method.wants == "candidates":
            self.expanded.append(seq.seq_id)
            if self.searching and self.searching[-1].request is request:
                return
            self.searching.append(Search(request, method, len(self.expanded) - 1))
        else:
            # A token is drawn even where none is wanted: logits tell whether the KV is sound.
            self.sampled.append(seq.seq_id)
            self.drawn.append(seq)
            if method.wants == "token" and (method.num_draws == 1 or seq.num_output_tokens > 0):
                seq.num_pending += 1
                return
        self._await_decision(request)

    def _await_decision(self, request: Request) -> None:
        """The step's result decides which of a request's sequences live on."""
        request.num_undecided += 1
        self.undecided.append(request)

    def open(self, seq: Sequence) -> None:
        """Give a sequence that starts to run its row on the worker."""
        request, method = seq.request, seq.request.method
        num_draws = 1
        if method.wants == "token" and seq.num_output_tokens == 0:
            num_draws = method.num_draws
        self.opened[seq.seq_id] = OpenedRow(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.num_computed_tokens,
            sampling=request.sampling,
            seed=request.seed,
            sample_index=seq.sample_index,
            num_draws=num_draws,
        )

    def apply(self, changes: Changes) -> None:
        self.copies += changes.copies
        self.held += changes.held
        self.table_writes += changes.table_writes

    def owners(self) -> dict[int, Request]:
        """Whose rows draw a token, are expanded or have a prompt scored, by sequence id."""
        owners = {seq.seq_id: seq.request for seq in self.drawn}
        for search in self.searching:
            owners.update({seq.seq_id: search.request for seq in search.request.sequences})
        owners.update({seq_id: request for seq_id, (request, _) in self.prompts.items()})
        return owners

    def withdraw(self, seq_id: int) -> bool:
        """Forget a row that this very step was to open. False if there is none."""
        if self.opened.pop(seq_id, None) is None:
            return False
        self.table_writes = [w for w in self.table_writes if w.seq_id != seq_id]
        return True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing that the worker would have to do now."""
        return not (
            self.seq_ids
            or self.opened
            or self.table_writes
            or self.swap_out
            or self.swap_in
            or self.copies
        )

    def to_plan(self, step_id: int, rows: RowChanges) -> StepPlan:
        """The finished plan."""
        seq_ids, counts = self.seq_ids, self.num_scheduled_tokens
        if len(counts) < sum(counts):  # several tokens of a sequence: those of one token go first
            order = sorted(range(len(counts)), key=lambda i: counts[i] > 1)
            seq_ids, counts = [seq_ids[i] for i in order], [counts[i] for i in order]
        return StepPlan(
            step_id=step_id,
            seq_ids=seq_ids,
            num_scheduled_tokens=counts,
            sampled=self.sampled,
            expanded=self.expanded,
            forks=rows.forks,
            closed=rows.closed,
            opened=list(self.opened.values()),
            token_writes=rows.token_writes(),
            table_writes=self.table_writes,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
            copies=self.copies,
        )
