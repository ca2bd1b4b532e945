"""What steps bring: tokens are appended, sequences fork and end (paper section 5.2)."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from octavo.core.beam_search import Search, rank
from octavo.core.draft import PlanDraft, RowChanges
from octavo.core.kv.manager import KVCacheManager
from octavo.core.sequence import Request, Sequence, Status
from octavo.core.step import Candidates, StepResult
from octavo.errors import RequestFailed


@dataclass(slots=True)
class Progress:
    """What a step brought: sequences with new tokens, and requests that are done."""

    advanced: list[Sequence] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)


class Outcomes:
    """Owns the ids of sequences, and what has become of the worker's rows since the last plan.

    Implements the verbs of decoding methods (`decoding.SequenceVerbs`); queues are the scheduler's.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        self.kv = kv
        self.rows = RowChanges()
        self.progress = Progress()  # of the step that is taken in
        self._next_seq_id = 0

    def new_sequence(self, request: Request, token_ids: list[int], index: int) -> Sequence:
        seq = Sequence(self._next_seq_id, request, token_ids, index)
        self._next_seq_id += 1
        return seq

    def take_in(self, draft: PlanDraft, result: StepResult) -> Progress:
        """Append, fork and free by the results of one step."""
        self.kv.release_sources(draft.held)
        for request in draft.undecided:
            request.num_undecided -= 1
        for seq, table, num_computed in draft.filled:
            if seq.table is table:  # else it was preempted since, and is recomputed
                self.kv.register(seq, num_computed)
        progress = self.progress = Progress()
        if result.errors:
            self._fail(draft, result.errors)
        for seq_id, scores in result.prompt_logprobs.items():
            request, start = draft.prompts[seq_id]
            # After a preemption the same positions are computed again.
            request.prompt_logprobs += scores[len(request.prompt_logprobs) - start :]
        scored = bool(result.draws or result.logprobs)
        for seq, token_id in zip(draft.drawn, result.token_ids, strict=True):
            if seq.num_pending:
                seq.num_pending -= 1
            if seq.finish_reason is not None:
                continue  # it ended while the step ran
            method = seq.request.method
            if scored and (seq.seq_id in result.draws or seq.seq_id in result.logprobs):
                self._take_draws(seq, token_id, result)
            elif method.wants == "token":
                progress.advanced.append(seq)
                reason = method.accept(seq, token_id)
                if reason is not None:
                    self.finish(seq, reason)
            elif method.wants == "kv":
                method.computed(seq, self)
        searches = [search for search in draft.searching if search.request.sequences]
        if searches:
            assert result.candidates is not None, "searches have asked for them"
            self._advance_searches(searches, result.candidates)
        return progress

    def _fail(self, draft: PlanDraft, errors: Mapping[int, RequestFailed]) -> None:
        """End requests of which a row went wrong, with all their sequences. What they have cached
        may be what is wrong, and must not be found by others."""
        owners = draft.owners()
        for seq_id, error in errors.items():
            request = owners.get(seq_id)  # None: a search that was aborted while the step ran
            for seq in [] if request is None else list(request.sequences):
                seq.request.error = error
                self.kv.forget(seq)
                self.finish(seq, "error")

    # ---------------------------------------------------------------- verbs of the methods

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        child = self.new_sequence(parent.request, list(parent.token_ids), sample_index)
        child.cumulative_logprob = parent.cumulative_logprob
        child.logprobs = list(parent.logprobs)
        self.kv.fork(parent, child)
        parent.request.sequences.append(child)
        self.rows.fork(parent, child)
        return child

    def append(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        self.rows.write_tokens(seqs, token_ids)
        for seq, token_id in zip(seqs, token_ids, strict=True):
            seq.token_ids.append(token_id)
        self.progress.advanced += seqs

    def free(self, seq: Sequence) -> None:
        if seq.table is not None and seq.request.status is Status.RUNNING:
            self.rows.close(seq)
        self.kv.free(seq)
        if seq in seq.request.sequences:
            seq.request.sequences.remove(seq)

    def finish(self, seq: Sequence, reason: str) -> None:
        seq.finish_reason = reason
        self.free(seq)
        request = seq.request
        request.finished.append(seq)
        if self.kv.forms_batches:
            return  # it keeps its place until the whole batch is done
        if not request.sequences and request not in self.progress.finished[-1:]:
            self.progress.finished.append(request)

    def pin(self, seq: Sequence, name: str) -> None:
        self.rows.close(seq)
        self.kv.pin(name, seq)
        request = seq.request
        request.sequences.remove(seq)
        seq.finish_reason = "pinned"
        request.finished.append(seq)
        self.progress.finished.append(request)

    def _advance_searches(self, searches: Seq[Search], candidates: Candidates) -> None:
        """Let all searches choose, and append what they chose at once: the device waits for it."""
        children: list[Sequence] = []
        token_ids: list[int] = []
        logprobs: list[float] = []
        for ranking in rank(searches, candidates):
            usual, others = ranking.split()
            best_logprobs, parents_of, best_ids = ranking.best(usual)
            for place, parents in zip(usual, parents_of, strict=True):
                children += self._branch(ranking.searches[place].request, parents)
            token_ids += best_ids
            logprobs += best_logprobs
            for place in others:
                request, method, _ = ranking.searches[place]
                chosen = method.advance(request, ranking.offered(place), self)
                if chosen is not None:
                    children += self._branch(request, chosen.parents)
                    token_ids += chosen.token_ids
                    logprobs += chosen.logprobs
        self.append(children, token_ids)
        for child, logprob in zip(children, logprobs, strict=True):
            child.cumulative_logprob = logprob

    def _branch(self, request: Request, parents: list[int]) -> list[Sequence]:
        """Children of the sequences at these places become the request's sequences.

        The first child of a sequence takes its place; others replace sequences that have no child,
        or are forked off.
        """
        sequences = request.sequences
        children = [sequences[place] for place in parents]
        if not len(set(parents)) == len(parents) == len(sequences):  # else each has a child
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

    def _replace(self, seq: Sequence, parent: Sequence) -> None:
        """Drop what a sequence was: it goes on like a fork of `parent`, of the same request."""
        seq.token_ids = parent.token_ids.copy()
        seq.sample_index = parent.sample_index
        seq.logprobs = parent.logprobs.copy()
        self.kv.replace(seq, parent)
        self.rows.fork(parent, seq)

    def _take_draws(self, seq: Sequence, token_id: int, result: StepResult) -> None:
        """Tokens that come with log-probabilities, or several at once."""
        method, request = seq.request.method, seq.request
        assert method.wants == "token", "only drawn tokens are sampled"
        draws = result.draws.get(seq.seq_id, [token_id])
        self.progress.advanced.append(seq)
        samples = [seq]
        if len(draws) > 1:
            method.start(seq, draws, self)
            everyone = {s.sample_index: s for s in request.sequences + request.finished}
            samples = [everyone[index] for index in range(len(draws))]
        scores = result.logprobs.get(seq.seq_id, [])
        for sample, score in zip(samples, scores, strict=False):
            sample.logprobs.append(score)
            sample.cumulative_logprob += score.logprob
        if len(draws) == 1:
            reason = method.accept(seq, token_id)
            if reason is not None:
                self.finish(seq, reason)
