"""A step's plan while it is being made, and what `update` needs to know about it later."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import compress

from octavo.core.beam_search import Search
from octavo.core.block_table import BlockTable
from octavo.core.kv.manager import Changes
from octavo.core.sequence import Request, Searching, Sequence
from octavo.core.step import BlockCopy, Fork, OpenedRow, StepPlan, TableWrite, TokenWrites

# How many blocks of waiting requests one step hashes at most, or REUSED_PER_HASH times as many if a
# recent prompt already has their hashes. With the admission this takes about 1 ms, which running
# requests wait for unless the device is computing. A request with more blocks continues in the next
# steps.
# The limit also bounds how many requests with a long cached prefix start together: a step admits
# 43 of those that share 1,024 tokens.
MAX_HASHES = 1024


class RowChanges:
    """Changes to the worker's rows since the last plan."""

    def __init__(self) -> None:
        self.forks: list[Fork] = []
        self.closed: list[int] = []
        self._token_writes = TokenWrites.none()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        self.forks.append(Fork(parent.seq_id, child.seq_id, child.sample_index))

    def close(self, seq: Sequence) -> None:
        self.closed.append(seq.seq_id)

    def write_tokens(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        """The next token of each sequence, which the worker has not appended itself."""
        writes = self._token_writes
        writes.seq_ids.extend([seq.seq_id for seq in seqs])
        writes.positions.extend([len(seq.token_ids) for seq in seqs])
        writes.token_ids.extend(token_ids)

    def rewrite_last_token(self, seq: Sequence) -> None:
        """Take the worker's row back to the sequence's own last token."""
        writes = self._token_writes
        writes.seq_ids.append(seq.seq_id)
        writes.positions.append(len(seq.token_ids) - 1)
        writes.token_ids.append(seq.token_ids[-1])

    def token_writes(self) -> TokenWrites:
        """The writes into rows that still exist."""
        if not self.closed:
            return self._token_writes
        closed = set(self.closed)
        is_open = [seq_id not in closed for seq_id in self._token_writes.seq_ids]
        return TokenWrites(*(list(compress(column, is_open)) for column in self._token_writes))


class StepInFlight:
    """What `update` must know about a step when its results arrive."""

    __slots__ = ("drawn", "filled", "held", "prompts", "searching", "undecided")

    def __init__(self) -> None:
        self.held: list[int] = []  # sources of block copies
        self.drawn: list[Sequence] = []  # sequences of StepPlan.sampled
        self.searching: list[Search] = []
        self.undecided: list[Request] = []  # requests whose results decide on their sequences
        # Sequences that fill a block, or whose windows leave one behind, with their table and the
        # number of tokens computed then.
        self.filled: list[tuple[Sequence, BlockTable, int]] = []
        # Requests whose prompt is read, with the first position of the chunk, by sequence id.
        self.prompts: dict[int, tuple[Request, int]] = {}

    def owners(self) -> dict[int, Request]:
        """Requests by sequence id, for all rows whose logits are read."""
        owners = {seq.seq_id: seq.request for seq in self.drawn}
        for search in self.searching:
            owners.update({seq.seq_id: search.request for seq in search.request.sequences})
        owners.update({seq_id: request for seq_id, (request, _) in self.prompts.items()})
        return owners


class PlanBuilder:
    """Collects one step. `budget` is how many more tokens it may compute."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_hashes_left = MAX_HASHES  # blocks that lookups may still hash
        # Decisions of this step.
        self.ran_out_of_blocks = False
        self.preempted: list[Request] = []
        self.started: list[Request] = []
        self.in_flight = step = StepInFlight()
        self._drawn = step.drawn
        self._seq_ids: list[int] = []
        self._num_scheduled_tokens: list[int] = []
        self._sampled: list[int] = []
        self._expanded: list[int] = []
        self._encoded: list[int] = []
        self._opened: dict[int, OpenedRow] = {}
        self._table_writes: list[TableWrite] = []
        self._swap_out: list[tuple[int, int]] = []
        self._swap_in: list[tuple[int, int]] = []
        self._copies: list[BlockCopy] = []

    @property
    def num_rows(self) -> int:
        """Sequences that compute something."""
        return len(self._seq_ids)

    @property
    def is_empty(self) -> bool:
        """Whether the worker would have nothing to do now."""
        return not (
            self._seq_ids
            or self._opened
            or self._table_writes
            or self._swap_out
            or self._swap_in
            or self._copies
        )

    # ---------------------------------------------------------------- what is computed

    def decode(self, sequences: list[Sequence]) -> None:
        """Compute the next token of sequences that sample one token each and have room for it."""
        self.budget -= len(sequences)
        for seq in sequences:
            seq_id, end = seq.seq_id, seq.num_computed_tokens + 1
            seq.num_computed_tokens = end
            seq.num_pending += 1
            self._seq_ids.append(seq_id)
            self._num_scheduled_tokens.append(1)
            self._sampled.append(seq_id)
            self._drawn.append(seq)
            table = seq.table
            if table is not None and end >= table.settle_at:
                self.in_flight.filled.append((seq, table, end))

    def search(self, request: Request, method: Searching, end: int) -> None:
        """Compute the next token of a search's sequences, up to `end`; they have room for it."""
        sequences = request.sequences
        seq_ids = [seq.seq_id for seq in sequences]
        self.budget -= len(seq_ids)
        step = self.in_flight
        step.searching.append(Search(request, method, len(self._expanded)))
        self._seq_ids += seq_ids
        self._num_scheduled_tokens += [1] * len(seq_ids)
        self._expanded += seq_ids
        for seq in sequences:
            seq.num_computed_tokens = end
            table = seq.table
            if table is not None and end >= table.settle_at:
                step.filled.append((seq, table, end))
        self._await_decision(request)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        """Compute a sequence's next `num_tokens`; it has room for them."""
        request, step = seq.request, self.in_flight
        if request.reading is not None:
            step.prompts[seq.seq_id] = (request, seq.num_computed_tokens)
        seq.num_computed_tokens += num_tokens
        self.budget -= num_tokens
        self._seq_ids.append(seq.seq_id)
        self._num_scheduled_tokens.append(num_tokens)
        table, end = seq.table, seq.num_computed_tokens
        assert table is not None, "room was made for it"
        if num_tokens > 1 or end >= table.settle_at:
            step.filled.append((seq, table, end))
        if seq.num_computed_tokens < seq.num_expected_tokens:
            return
        method = request.method
        if method.wants == "candidates":
            self._expanded.append(seq.seq_id)
            if step.searching and step.searching[-1].request is request:
                return
            step.searching.append(Search(request, method, len(self._expanded) - 1))
        else:
            # A token is sampled even where none is wanted: the logits tell whether the KV is sound.
            self._sampled.append(seq.seq_id)
            self._drawn.append(seq)
            if method.wants == "token" and (method.num_draws == 1 or seq.num_output_tokens > 0):
                seq.num_pending += 1
                return
        self._await_decision(request)

    def _await_decision(self, request: Request) -> None:
        """The step's result decides which of a request's sequences live on."""
        request.num_undecided += 1
        self.in_flight.undecided.append(request)

    # ---------------------------------------------------------------- rows and blocks

    def open(self, seq: Sequence, table_writes: Seq[TableWrite] = ()) -> None:
        """Give a sequence that starts to run its row on the worker."""
        request, method = seq.request, seq.request.method
        num_draws = 1
        if method.wants == "token" and seq.num_output_tokens == 0:
            num_draws = method.num_draws
        self._opened[seq.seq_id] = OpenedRow(
            seq_id=seq.seq_id,
            token_ids=tuple(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            num_computed_tokens=seq.num_computed_tokens,
            sampling=request.sampling,
            seed=request.seed,
            sample_index=seq.sample_index,
            num_draws=num_draws,
            encoder_token_ids=request.encoder_token_ids,
        )
        self._table_writes += table_writes

    def encode(self, seq: Sequence, num_tokens: int) -> None:
        """Run the encoder for a sequence that this step opens; its input has `num_tokens`."""
        self.budget -= num_tokens
        self._encoded.append(seq.seq_id)

    def withdraw(self, seq_id: int) -> bool:
        """Forget a row that this step was to open. False if there is none."""
        if self._opened.pop(seq_id, None) is None:
            return False
        self._table_writes = [w for w in self._table_writes if w.seq_id != seq_id]
        return True

    def apply(self, changes: Changes) -> None:
        """Add the changes that the KV cache manager needs before the tokens are computed."""
        self._copies += changes.copies
        self.in_flight.held += changes.held
        self._table_writes += changes.table_writes

    def swap_out(self, pairs: Seq[tuple[int, int]]) -> None:
        self._swap_out += pairs

    def swap_in(self, pairs: Seq[tuple[int, int]]) -> None:
        self._swap_in += pairs

    def build(self, step_id: int, rows: RowChanges) -> StepPlan:
        """The finished plan."""
        seq_ids, counts = self._seq_ids, self._num_scheduled_tokens
        if len(counts) < sum(counts):  # rows of a single token go first
            order = sorted(range(len(counts)), key=lambda i: counts[i] > 1)
            seq_ids, counts = [seq_ids[i] for i in order], [counts[i] for i in order]
        return StepPlan(
            step_id=step_id,
            seq_ids=seq_ids,
            num_scheduled_tokens=counts,
            sampled=self._sampled,
            expanded=self._expanded,
            encoded=self._encoded,
            forks=rows.forks,
            closed=rows.closed,
            opened=list(self._opened.values()),
            token_writes=rows.token_writes(),
            table_writes=self._table_writes,
            swap_out=self._swap_out,
            swap_in=self._swap_in,
            copies=self._copies,
        )
