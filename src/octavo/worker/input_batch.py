"""The persistent batch: one row per running sequence, updated by each plan's deltas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.step import Fork, OpenedRow, SamplingSpec, StepPlan, TableWrite, TokenWrites
from octavo.ops import AttentionBatch, EncodedInputs, Staging
from octavo.structured.constraint import Words
from octavo.worker.block_tables import BlockTables, TableUpdate, widen
from octavo.worker.logit_edits import EditedRow, TokenCounts, follows_text, has_edits, is_forced
from octavo.worker.mask_rules import (
    has_first_masks,
    has_mask,
    has_mask_at,
    mask_follows_text,
)
from octavo.worker.row_edits import RowEdits
from octavo.worker.row_masks import MaskedRows, PendingMasks, RowMasks
from octavo.worker.sampler import SamplingBatch

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

PENDING = -1  # a token that the device has drawn, or will draw, and the host does not know yet
# Bits of `flags`.
_EDITS, _LOGPROBS, _READ, _FIRST_MASKS, _TEXT, _MASK, _RECORD = 1, 2, 4, 8, 16, 32, 64

# A row's scalars are one record, so that a fork copies them all at once.
_ROW = np.dtype(
    [
        ("num_tokens", np.int64),
        ("num_computed", np.int64),
        ("num_prompt", np.int64),
        ("seed", np.int64),
        ("sample_index", np.int64),
        ("num_draws", np.int64),
        ("num_candidates", np.int64),
        ("num_encoder", np.int64),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("temperature", np.float32),
        ("min_p", np.float32),
        ("flags", np.uint8),
    ]
)


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's input to the model; `num_tokens` is the sum of all rows' scheduled tokens."""

    input_ids: Int64s  # [num_tokens]
    positions: Int64s  # [num_tokens]
    rows: Int32s  # [num_seqs]: the sequences' rows of the block tables
    attention: AttentionBatch  # shares the memory of positions and rows


@dataclass(frozen=True, slots=True)
class EncoderInput:
    """Whole encoder inputs, one after the other."""

    input_ids: Int64s  # [num_tokens]
    positions: Int64s  # [num_tokens]
    lens: list[int]  # of the inputs
    places: EncodedInputs  # where K and V go


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """Positions of a step whose hidden states are read."""

    seq_id: int
    start: int  # the first position's place in the step's tokens
    num_read: int
    # int64 [num_read]: the prompt tokens that follow, to be scored; None: the states are pooled.
    targets: Int64s | None
    num_top: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """Rows that a step draws a token for, and the positions of these tokens."""

    seq_ids: Sequence[int]
    rows: Int64s
    positions: Int64s


class InputBatch:
    """Owns the rows of all running sequences: tokens, block tables and sampling parameters."""

    def __init__(
        self,
        tables: BlockTables,
        num_rows: int,
        staging: Staging,
        masks: RowMasks,
        edits: RowEdits,
        has_encoder: bool = False,
    ) -> None:
        """
        Args:
            tables: block tables of `num_rows` rows.
            num_rows: the most rows that may be open at once, plus row 0, which is for padding.
            staging: where attention stages its arrays.
            masks: of as many rows.
            edits: of the rows whose logits the device edits; the caller carries them out.
            has_encoder: whether rows have encoder inputs, which layers read.
        """
        self._has_encoder = has_encoder
        self._encoder_ids: list[tuple[int, ...]] = [()] * num_rows
        self._tables = tables
        self._staging = staging
        self._masks = masks
        self._edits = edits
        self._row_of: dict[int, int] = {}
        self._known_rows = list[int](), np.zeros(0, np.int64)  # see rows_of
        self._free_rows = list(range(num_rows - 1, 0, -1))
        self._rows = np.zeros(num_rows, _ROW)
        self._rows["num_computed"][0] = -1  # so that a padding token has a context of 0
        self._specs: list[SamplingSpec | None] = [None] * num_rows
        self._token_ids: Int32s = np.zeros((num_rows, 256), np.int32)
        # Of rows that the host edits by their texts, by row, as far as these were counted.
        self._counts: dict[int, TokenCounts] = {}

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's deltas to the rows, in the order that the scheduler relies on."""
        self._fork(plan.forks)
        for seq_id in plan.closed:
            self._close(seq_id)
        for opened in plan.opened:
            self._open(opened)
        self._write_tokens(plan.token_writes)
        self._write_tables(plan.table_writes)

    @staticmethod
    def changes_rows(plan: StepPlan) -> bool:
        """Whether `apply` does more than to give sequences new blocks."""
        return bool(plan.forks or plan.closed or plan.opened or plan.token_writes.seq_ids)

    def model_input(self, plan: StepPlan, num_padding: int = 0) -> ModelInput:
        """Tokens, positions, block tables and slots of the plan's step.

        `num_padding` sequences of one token each are appended, at position 0.
        """
        rows = self.rows_of(plan.seq_ids)
        query_lens = np.array(plan.num_scheduled_tokens, np.int64)
        if num_padding:
            rows = np.concatenate([rows, np.zeros(num_padding, np.int64)])
            query_lens = np.concatenate([query_lens, np.ones(num_padding, np.int64)])
        query_starts = np.zeros(len(rows) + 1, np.int64)
        query_lens.cumsum(out=query_starts[1:])
        num_computed = self._rows["num_computed"][rows]
        context_lens = num_computed + query_lens

        row_of_token = rows.repeat(query_lens)
        positions = np.arange(query_starts[-1])
        positions += (num_computed - query_starts[:-1]).repeat(query_lens)
        if num_padding:
            positions[-num_padding:] = 0
        encoder_lens = None
        if self._has_encoder:
            encoder_lens = self._rows["num_encoder"][rows].astype(np.int32)
        tables = self._tables.of_step(
            rows, query_lens, context_lens, row_of_token, positions, encoder_lens
        )
        token_ids = self._token_ids[row_of_token, positions].astype(np.int64)
        table_rows = rows.astype(np.int32)
        attention = AttentionBatch(
            query_lens=torch.from_numpy(query_lens.astype(np.int32)),
            context_lens=torch.from_numpy(context_lens.astype(np.int32)),
            query_starts=torch.from_numpy(query_starts.astype(np.int32)),
            positions=torch.from_numpy(positions),
            block_tables=tables.block_tables,
            slots=tables.slots,
            rows=torch.from_numpy(table_rows),
            staging=self._staging,
            cascade=tables.cascade,
            encoder_lens=None if encoder_lens is None else torch.from_numpy(encoder_lens),
        )
        return ModelInput(token_ids, positions, table_rows, attention)

    def encoder_input(self, seq_ids: Sequence[int]) -> EncoderInput:
        """The encoder inputs of these sequences."""
        rows = self.rows_of(seq_ids)
        return self._encoder_input(rows, [self._encoder_ids[row] for row in rows.tolist()])

    def encoder_padding(self, num_tokens: int) -> EncoderInput:
        """An input of so many tokens that no sequence has, whose K and V go to the null block."""
        return self._encoder_input(np.zeros(1, np.int64), [[0] * num_tokens])

    def _encoder_input(self, rows: Int64s, inputs: Sequence[Sequence[int]]) -> EncoderInput:
        lens = np.array(list(map(len, inputs)), np.int64)
        starts = np.zeros(len(lens) + 1, np.int64)
        lens.cumsum(out=starts[1:])
        positions = np.arange(starts[-1])
        positions -= starts[:-1].repeat(lens)
        tables = self._tables.of_encoded(rows.repeat(lens), positions)
        places = EncodedInputs(
            lens=torch.from_numpy(lens.astype(np.int32)),
            starts=torch.from_numpy(starts.astype(np.int32)),
            positions=torch.from_numpy(positions),
            slots=tables.slots,
            block_tables=tables.block_tables,
            rows=torch.from_numpy(rows.astype(np.int32)),
        )
        ids = np.fromiter(chain.from_iterable(inputs), np.int64, len(positions))
        return EncoderInput(ids, positions, lens.tolist(), places)

    def stage_tables(self) -> TableUpdate | None:
        """See BlockTables.stage."""
        return self._tables.stage(self._staging)

    def logits_indices(self, plan: StepPlan, seq_ids: Sequence[int]) -> Int64s:
        """[len(seq_ids)]: index of each sequence's last token among the step's tokens."""
        ends = np.zeros(len(self._rows), np.int64)
        ends[self.rows_of(plan.seq_ids)] = np.cumsum(plan.num_scheduled_tokens) - 1
        return ends[self.rows_of(seq_ids)]

    def sampling_batch(self, sampled: Sequence[int], expanded: Sequence[int]) -> SamplingBatch:
        """What the sampler needs to choose the next tokens of these sequences."""
        rows = self.rows_of([*sampled, *expanded])
        state = self._rows.take(rows)  # several times as fast as indexing, for records
        flags = state["flags"]
        at_prompt_end = state["num_tokens"] == state["num_prompt"]
        masked = self._masked_indices(rows, state)
        mask_places = None
        if len(masked):
            mask_places = np.full(len(rows), -1, np.int32)
            mask_places[masked] = np.arange(len(masked))
        return SamplingBatch(
            num_sampled=len(sampled),
            temperature=state["temperature"],
            top_k=state["top_k"],
            top_p=state["top_p"],
            min_p=state["min_p"],
            seeds=state["seed"],
            sample_indices=state["sample_index"],
            positions=state["num_tokens"],
            num_draws=np.where(at_prompt_end, state["num_draws"], 1),
            mask_places=mask_places,
            has_records=bool((flags[: len(sampled)] & _RECORD).any()),
            edited=self._edited_rows(rows, state),
            num_logprobs={
                index: self._spec(rows[index]).num_logprobs or 0
                for index in np.flatnonzero(flags & _LOGPROBS).tolist()
            },
            num_candidates=state["num_candidates"][len(sampled) :].tolist(),
            # Which is the model's: all its rows agree.
            renormalises=len(rows) > len(sampled) and self._spec(rows[-1]).renormalises,
        )

    def prompt_chunks(self, plan: StepPlan) -> list[PromptChunk]:
        """The plan's chunks of prompts that are read."""
        rows = self.rows_of(plan.seq_ids)
        starts = np.cumsum([0, *plan.num_scheduled_tokens]).tolist()
        chunks = []
        for index in np.flatnonzero(self._rows["flags"][rows] & _READ).tolist():
            row, state = rows[index], self._rows[rows[index]]
            spec, num_computed = self._spec(row), int(state["num_computed"])
            first = max(num_computed, spec.first_read)
            # No token of the prompt follows its last one, so nothing is scored there.
            num_prompt = int(state["num_prompt"]) - (not spec.pools_prompt)
            last = num_prompt if spec.end_read is None else spec.end_read
            end = min(num_computed + plan.num_scheduled_tokens[index], num_prompt, last)
            if first >= end:
                continue
            start = starts[index] + first - num_computed
            targets = None
            if not spec.pools_prompt:
                following = self._token_ids[row, first + 1 : end + 1]
                targets = following.astype(np.int64)
            num_top = spec.num_prompt_logprobs or 0
            chunks.append(PromptChunk(plan.seq_ids[index], start, end - first, targets, num_top))
        return chunks

    def are_plain(self, seq_ids: Sequence[int]) -> bool:
        """Whether the host has nothing to do before a token of each sequence is drawn again."""
        flags, allowed = self._rows["flags"][self.rows_of(seq_ids)], _RECORD | _LOGPROBS
        return bool((flags | allowed == allowed).all())

    def awaits_tokens(self, plan: StepPlan) -> bool:
        """Whether a token depends on the text so far, of which the host does not know all yet."""
        rows = self.rows_of(plan.sampled)
        follow_text = self._rows["flags"][rows] & _TEXT
        if not follow_text.any():
            return False
        rows = rows[follow_text > 0]
        return bool((self._token_ids[rows, self._rows["num_tokens"][rows] - 1] == PENDING).any())

    def masked_rows(self, seq_ids: Sequence[int]) -> MaskedRows:
        """Those of the sequences that need masks, in the order of SamplingBatch.mask_places."""
        rows = self.rows_of(seq_ids)
        state = self._rows.take(rows)
        indices = self._masked_indices(rows, state)
        of_rows = rows, state["num_tokens"], state["num_prompt"]
        return MaskedRows(indices, *(values[indices] for values in of_rows))

    def has_compiled(self, masked: MaskedRows) -> bool:
        """Whether `start_masks` has no grammars to wait for."""
        return self._masks.has_compiled(masked)

    def start_masks(self, masked: MaskedRows, words: Words) -> PendingMasks:
        """See RowMasks.start. The tokens before these are known."""
        return self._masks.start(masked, self._token_ids, words)

    def start_masks_ahead(self, seq_ids: Sequence[int]) -> None:
        """See RowMasks.start_ahead. All tokens of these sequences are known."""
        self._masks.start_ahead(self.masked_rows(seq_ids), self._token_ids)

    def waiting(self) -> frozenset[int]:
        """Sequences whose masks were late when a token was to be drawn, and still are."""
        rows = self._masks.waiting()
        if not rows:
            return frozenset()
        return frozenset(seq_id for seq_id, row in self._row_of.items() if row in rows)

    def shutdown(self) -> None:
        """End what runs beside the batch; it is not used any more."""
        self._masks.shutdown()

    def with_texts(self, seq_ids: Sequence[int], edited: Sequence[EditedRow]) -> list[EditedRow]:
        """The rows of `seq_ids` to be edited, with tokens that have become known since."""
        rows = self.rows_of([seq_ids[edit.index] for edit in edited])
        texts = []
        for row, edit in zip(rows.tolist(), edited, strict=True):
            text = self._token_ids[row, : len(edit.token_ids)]
            counts = self._counts.setdefault(row, TokenCounts())
            texts.append(replace(edit, token_ids=text, counts=counts))
        return texts

    def advance(self, plan: StepPlan) -> Drawn:
        """Count the step's tokens as computed, and append a pending token to each sampled row."""
        # A sequence occurs only once in a plan, so the indices do not repeat.
        num_scheduled = np.array(plan.num_scheduled_tokens, np.int64)
        self._rows["num_computed"][self.rows_of(plan.seq_ids)] += num_scheduled
        rows = self.rows_of(plan.sampled)
        ends = self._rows["num_tokens"][rows]
        self._reserve_tokens(int(ends.max(initial=0)) + 1)
        self._token_ids[rows, ends] = PENDING
        self._rows["num_tokens"][rows] += 1
        return Drawn(plan.sampled, rows, ends)

    def fill(self, drawn: Drawn, token_ids: Int64s) -> None:
        """Store drawn tokens, int64 [len(drawn.seq_ids)], of sequences that still have their rows.

        Rows for which sampling failed (a negative token) go on with token 0 until closed.
        """
        row_of = self._row_of
        owned = np.array([row_of.get(seq_id, 0) for seq_id in drawn.seq_ids]) == drawn.rows
        rows, positions = drawn.rows[owned], drawn.positions[owned]
        self._token_ids[rows, positions] = np.maximum(token_ids[owned], 0)

    def rows_of(self, seq_ids: Sequence[int]) -> Int64s:
        """The rows of these sequences; an array that no one may write to, because it is returned
        again when the same ones are asked for: a step's are, several times."""
        known_ids, rows = self._known_rows
        if known_ids != seq_ids:
            rows = np.fromiter(map(self._row_of.__getitem__, seq_ids), np.int64, len(seq_ids))
            rows.flags.writeable = False
            self._known_rows = list(seq_ids), rows
        return rows

    def _spec(self, row: int) -> SamplingSpec:
        spec = self._specs[row]
        assert spec is not None, f"row {row} is free"
        return spec

    def _edited_rows(self, rows: Int64s, state: NDArray[np.void]) -> list[EditedRow]:
        edited = []
        flags = state["flags"]
        for index in np.flatnonzero(flags & (_EDITS | _FIRST_MASKS)).tolist():
            num_tokens, num_prompt = self._lengths(state, index)
            spec = self._spec(rows[index])
            if not (flags[index] & _EDITS or is_forced(spec, num_tokens - num_prompt)):
                continue
            token_ids = self._token_ids[rows[index], :num_tokens]
            edited.append(EditedRow(index, self._spec(rows[index]), token_ids, num_prompt))
        return edited

    def _masked_indices(self, rows: Int64s, state: NDArray[np.void]) -> Int64s:
        """Which rows need masks for their next tokens."""
        flags = state["flags"]
        is_masked = (flags & _MASK) > 0
        for index in np.flatnonzero(flags & _FIRST_MASKS).tolist():
            num_tokens, num_prompt = self._lengths(state, index)
            if has_mask_at(self._spec(rows[index]), num_tokens - num_prompt):
                is_masked[index] = True
        return np.flatnonzero(is_masked)

    def _lengths(self, state: NDArray[np.void], index: int) -> tuple[int, int]:
        """How many tokens a row has, and how many of them are its prompt."""
        return int(state["num_tokens"][index]), int(state["num_prompt"][index])

    def _take_row(self, seq_id: int) -> int:
        assert seq_id not in self._row_of, f"sequence {seq_id} already has a row"
        assert self._free_rows, "a plan never opens more rows than the limits allow"
        row = self._free_rows.pop()
        self._row_of[seq_id] = row
        return row

    def _close(self, seq_id: int) -> None:
        row = self._row_of.pop(seq_id)
        self._known_rows = [], self._known_rows[1][:0]
        self._specs[row] = None
        self._encoder_ids[row] = ()
        self._counts.pop(row, None)
        self._edits.close(row)
        self._masks.close(row)
        self._free_rows.append(row)

    def _open(self, opened: OpenedRow) -> None:
        spec = opened.sampling
        num_tokens = len(opened.token_ids)
        row = self._take_row(opened.seq_id)
        self._reserve_tokens(num_tokens)
        self._token_ids[row, :num_tokens] = opened.token_ids
        self._tables.clear(row)
        self._specs[row] = spec
        self._encoder_ids[row] = opened.encoder_token_ids
        self._masks.open(row, spec)
        text = self._token_ids[row, :num_tokens]
        flags = _RECORD if self._edits.open(row, spec, text, opened.num_prompt_tokens) else 0
        flags |= _MASK if has_mask(spec) else 0
        flags |= _TEXT if mask_follows_text(spec) else 0
        flags |= 0 if flags & _RECORD else _host_flags(spec)
        flags |= _LOGPROBS if spec.num_logprobs is not None else 0
        flags |= _READ if spec.reads_prompt else 0
        flags |= _FIRST_MASKS if has_first_masks(spec) else 0
        # Any int is a seed: it is taken modulo 2 ** 64.
        seed = (opened.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self._rows[row] = (
            num_tokens,
            opened.num_computed_tokens,
            opened.num_prompt_tokens,
            seed,
            opened.sample_index,
            opened.num_draws,
            spec.num_candidates,
            len(opened.encoder_token_ids),
            spec.top_k,
            spec.top_p,
            spec.temperature,
            spec.min_p,
            flags,
        )

    def _fork(self, forks: Sequence[Fork]) -> None:
        """Copy rows in order, in runs: a child may be the parent of a later fork."""
        row_of = self._row_of
        run: dict[int, tuple[int, int]] = {}  # child row -> parent row, sample index
        for parent_id, child_id, sample_index in forks:
            parent = row_of[parent_id]
            if parent in run:
                self._copy_rows(run)
                run = {}
            child = row_of[child_id] if child_id in row_of else self._take_row(child_id)
            run[child] = parent, sample_index
        if run:
            self._copy_rows(run)

    def _copy_rows(self, run: dict[int, tuple[int, int]]) -> None:
        children = np.array(list(run), np.int64)
        parents, sample_indices = np.array(list(run.values()), np.int64).T
        state = self._rows.take(parents)
        state["sample_index"] = sample_indices
        self._rows.put(children, state)
        num_tokens = int(state["num_tokens"].max())
        self._token_ids[children, :num_tokens] = self._token_ids[parents, :num_tokens]
        self._tables.copy(children, parents)
        for child, (parent, _) in run.items():
            self._specs[child] = self._specs[parent]
            self._encoder_ids[child] = self._encoder_ids[parent]
            counts = self._counts.get(parent)
            self._counts.pop(child, None)
            if counts is not None:
                self._counts[child] = counts.copy()
            self._masks.copy(child, int(parent))
        for child in self._edits.copy(children.tolist(), parents.tolist()):
            self._edit_on_host(child)

    def _write_tokens(self, writes: TokenWrites) -> None:
        if not writes.seq_ids:
            return
        rows, positions = self.rows_of(writes.seq_ids), np.array(writes.positions, np.int64)
        self._reserve_tokens(int(positions.max()) + 1)
        is_new = self._token_ids[rows, positions] != writes.token_ids
        self._rewrite_records(rows, writes)
        # Where indices repeat, the last assignment wins: writes take effect in order.
        self._token_ids[rows, positions] = writes.token_ids
        self._rows["num_tokens"][rows] = positions + 1
        num_computed = self._rows["num_computed"]
        num_computed[rows] = np.minimum(num_computed[rows], positions)
        if self._counts:
            for row, position in zip(rows.tolist(), writes.positions, strict=True):
                counts = self._counts.get(row)
                if counts is not None and counts.num_counted > position:
                    del self._counts[row]
        flags = self._rows["flags"][rows]
        for i in np.flatnonzero(flags & _MASK).tolist():
            num_prompt = int(self._rows["num_prompt"][rows[i]])
            # A token that was there already may have been accepted.
            num_kept = int(positions[i]) - num_prompt + (not is_new[i])
            self._masks.rewind(int(rows[i]), num_kept)

    def _rewrite_records(self, rows: Int64s, writes: TokenWrites) -> None:
        """Write the tokens of rows that have records, which learn of them, one after the other."""
        state, lengths = self._rows.take(rows), self._rows["num_tokens"]
        for i in np.flatnonzero(state["flags"] & _RECORD).tolist():
            row, num_prompt = int(rows[i]), int(state["num_prompt"][i])
            position, token_id = writes.positions[i], writes.token_ids[i]
            old = self._token_ids[row, max(position, num_prompt) : lengths[row]]
            if not self._edits.rewrite(row, old, [token_id] if position >= num_prompt else []):
                self._edit_on_host(row)
            self._token_ids[row, position], lengths[row] = token_id, position + 1

    def _edit_on_host(self, row: int) -> None:
        """The host edits a row's logits from now on, which the device did."""
        flags = self._rows["flags"]
        flags[row] = flags[row] ^ _RECORD | _host_flags(self._spec(row))

    def _write_tables(self, writes: Sequence[TableWrite]) -> None:
        if not writes:
            return
        seq_ids, groups, starts, blocks = zip(*writes, strict=True)
        sizes = np.array(list(map(len, blocks)), np.int64)
        ends = sizes.cumsum()
        columns = np.arange(ends[-1]) + (np.array(starts) - ends + sizes).repeat(sizes)
        block_ids = np.fromiter(chain.from_iterable(blocks), np.int64, ends[-1])
        rows, which = self.rows_of(seq_ids).repeat(sizes), np.array(groups).repeat(sizes)
        self._tables.write(which, rows, columns, block_ids)

    def _reserve_tokens(self, num_tokens: int) -> None:
        self._token_ids = widen(self._token_ids, num_tokens)


def _host_flags(spec: SamplingSpec) -> int:
    """Flags of a row whose logits the host edits, if they are edited."""
    return (_EDITS if has_edits(spec) else 0) | (_TEXT if follows_text(spec) else 0)
