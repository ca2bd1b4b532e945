"""Creating, forking, extending and ending sequences (paper section 5.2: fork, append, free)."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.core.kv.manager import KVCacheManager
from octavo.core.plan_builder import RowChanges
from octavo.core.sequence import Request, Sequence, Status


class SequenceLifecycle:
    """Owns the ids of sequences, and records what every verb does to the worker's rows.

    Implements `SequenceVerbs` for decoding methods. Queues are the scheduler's business: a request
    whose last sequence ends is only noted in `ended`.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.ended: dict[Request, None] = {}  # without live sequences, and still in a queue
        # Sequences that got a token in the step that `update` processes, once for each token.
        self.advanced: list[Sequence] = []
        self._kv = kv
        self._rows = RowChanges()
        self._next_seq_id = 0

    def create(self, request: Request, token_ids: list[int], sample_index: int = 0) -> Sequence:
        """A new sequence, which the request does not have yet."""
        seq = Sequence(self._next_seq_id, request, token_ids, sample_index)
        self._next_seq_id += 1
        return seq

    def take_row_changes(self) -> RowChanges:
        """What has happened to rows since the last call."""
        rows, self._rows = self._rows, RowChanges()
        return rows

    def take_advanced(self) -> list[Sequence]:
        """What is in `advanced`, which is empty afterwards."""
        advanced, self.advanced = self.advanced, []
        return advanced

    def close_row(self, seq: Sequence) -> None:
        """A running sequence gives its row up, and lives on."""
        self._rows.close(seq)

    def take_back(self, seq: Sequence) -> None:
        """A running sequence computes its last token again, and forgets what comes after it."""
        self._rows.rewrite_last_token(seq)

    # ---------------------------------------------------------------- verbs

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        child = self.create(parent.request, list(parent.token_ids), sample_index)
        child.cumulative_logprob = parent.cumulative_logprob
        self._kv.fork(parent, child)
        parent.request.sequences.append(child)
        self._rows.fork(parent, child)
        return child

    def append(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        self._rows.write_tokens(seqs, token_ids)
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)
        self.advanced += seqs

    def free(self, seq: Sequence) -> None:
        if seq.table is not None and seq.request.status is Status.RUNNING:
            self._rows.close(seq)
        self._kv.free(seq)
        if seq in seq.request.sequences:
            seq.request.sequences.remove(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        if reason != "error":  # whose KV may be the cause
            self._kv.offer_tail(seq)
        self.free(seq)
        self._end(seq, reason)

    def pin(self, seq: Sequence, name: str) -> None:
        self._rows.close(seq)
        self._kv.pin(name, seq)
        seq.request.sequences.remove(seq)
        self._end(seq, "pinned")

    def branch(self, request: Request, parents: Seq[int]) -> list[Sequence]:
        """Replace a request's sequences by children of those at the indices `parents`.

        The first child of a sequence takes its place; further children replace sequences without
        children, or are forked.
        """
        sequences = request.sequences
        children = [sequences[place] for place in parents]
        if not len(set(parents)) == len(parents) == len(sequences):  # else each has one child
            childless = [seq for place, seq in enumerate(sequences) if place not in parents]
            for i, place in enumerate(parents):
                if parents.index(place) == i:
                    continue  # the first child
                parent = sequences[place]
                if childless:
                    children[i] = childless.pop()
                    self._replace(children[i], parent)
                else:
                    children[i] = self.fork(parent, parent.sample_index)
            for seq in childless:
                self.free(seq)
        request.sequences = children
        return children

    # ---------------------------------------------------------------- internals

    def _replace(self, seq: Sequence, parent: Sequence) -> None:
        """Make a sequence a copy of `parent`, a sequence of the same request."""
        seq.token_ids = parent.token_ids.copy()
        seq.sample_index = parent.sample_index
        self._kv.replace(seq, parent)
        self._rows.fork(parent, seq)

    def _end(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        request = seq.request
        request.finished.append(seq)
        if not request.sequences:
            self.ended[request] = None
