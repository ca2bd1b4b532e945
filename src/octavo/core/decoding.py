"""Decoding methods over fork, append and free (paper sections 4.4 and 5.2).

A method decides which sequences live on after each step. It never touches blocks: forking a
sequence shares its blocks, and the KV cache manager copies a block only when it is written. A new
method is a class that implements one of the protocols in `sequence.py`.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from octavo.core.sequence import Continuations, Request, Sequence, SequenceVerbs

EarlyStopping = bool | Literal["never"]


class Sampling:
    """Sample tokens one by one; `n` samples share the prompt, which is computed once."""

    wants: Literal["token"] = "token"

    def __init__(
        self, n: int, max_length: int, eos_ids: frozenset[int], stop_ids: frozenset[int]
    ) -> None:
        self.max_sequences = n
        self.num_draws = n
        self.max_length = max_length
        self._eos_ids = eos_ids
        self._ending_ids = eos_ids | stop_ids

    def accept(self, seq: Sequence, token_id: int) -> str | None:
        seq.token_ids.append(token_id)
        return self._ends(seq, token_id)

    def start(self, seq: Sequence, token_ids: Seq[int], verbs: SequenceVerbs) -> None:
        # Fork before anything is appended: the samples share the prompt alone.
        siblings = [verbs.fork(seq, index) for index in range(1, len(token_ids))]
        verbs.append(siblings, token_ids[1:])
        seq.token_ids.append(token_ids[0])  # as the worker has done
        for sample, token_id in zip([seq, *siblings], token_ids, strict=True):
            reason = self._ends(sample, token_id)
            if reason is not None:
                verbs.finish(sample, reason)

    def _ends(self, seq: Sequence, token_id: int) -> str | None:
        if token_id in self._ending_ids:
            if token_id not in self._eos_ids:
                seq.stop_reason = token_id
            return "stop"
        return "length" if len(seq.token_ids) >= self.max_length else None


@dataclass(slots=True)
class Hypothesis:
    """A finished beam."""

    score: float  # length-penalised
    logprob: float  # sum over its output tokens
    token_ids: list[int]
    reason: str


class BeamSearch:
    """Keep the `width` most likely sequences.

    Equal to transformers' `generate(num_beams=width)` for a width above 1: the same candidates, the
    same scores (log-probability over length ** length_penalty) and the same stopping rule. With a
    width of 1, where transformers decodes greedily, it is the same search. It ends
    when `width` beams are finished (`early_stopping` True), when the best running beam, at its
    present length, cannot beat the worst finished one (False), or when it could not even at full
    length ("never").
    """

    wants: Literal["candidates"] = "candidates"

    def __init__(
        self,
        width: int,
        max_length: int,
        eos_ids: frozenset[int],
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        num_return_sequences: int | None = None,
    ) -> None:
        self.max_sequences = width
        self.max_length = max_length
        # Enough that at least `width` of them do not end a beam.
        self.num_candidates = max(2, 1 + len(eos_ids)) * width
        self._eos_ids = eos_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_return = num_return_sequences  # None: all finished beams
        self._finished: list[Hypothesis] = []  # best first, at most `width`

    def goes_on(self, request: Request, token_ids: Seq[int], logprob: float) -> bool:
        length = len(request.sequences[0].token_ids) + 1
        return (
            length < self.max_length
            and self._eos_ids.isdisjoint(token_ids)
            and not self._is_done(logprob, length, request.num_prompt_tokens)
        )

    def advance(
        self, request: Request, best: Continuations, verbs: SequenceVerbs
    ) -> Continuations | None:
        beams = request.sequences
        length = len(beams[0].token_ids) + 1
        survivors = self._set_finished_aside(beams, best, length)
        if not survivors.logprobs or self._is_done(
            survivors.logprobs[0], length, request.num_prompt_tokens
        ):
            self._conclude(request, verbs)
            return None
        for column in survivors:
            del column[self.max_sequences :]
        return survivors

    def _set_finished_aside(
        self, beams: Seq[Sequence], best: Continuations, length: int
    ) -> Continuations:
        """The continuations that go on. Those that end become finished beams if they are among the
        `width` best."""
        survivors = Continuations([], [], [])
        for position, (logprob, parent, token_id) in enumerate(zip(*best, strict=True)):
            reason = self._ends(token_id, length)
            if reason is None:
                survivors.logprobs.append(logprob)
                survivors.parents.append(parent)
                survivors.token_ids.append(token_id)
            elif position < self.max_sequences:
                self._add_finished(beams[parent], token_id, logprob, reason)
        return survivors

    def _ends(self, token_id: int, length: int) -> str | None:
        if token_id in self._eos_ids:
            return "stop"
        return "length" if length >= self.max_length else None

    def _add_finished(self, beam: Sequence, token_id: int, logprob: float, reason: str) -> None:
        num_output_tokens = beam.num_output_tokens + 1
        score = logprob / num_output_tokens**self._length_penalty
        self._finished.append(Hypothesis(score, logprob, [*beam.token_ids, token_id], reason))
        self._finished.sort(key=lambda hypothesis: -hypothesis.score)
        del self._finished[self.max_sequences :]

    def _is_done(self, logprob: float, length: int, num_prompt_tokens: int) -> bool:
        """Whether no running beam can improve on the finished ones; `logprob` is that of the best
        running beam."""
        if len(self._finished) < self.max_sequences:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self.max_length
        attainable: float = logprob / (length - num_prompt_tokens) ** self._length_penalty
        return attainable <= self._finished[-1].score

    def _conclude(self, request: Request, verbs: SequenceVerbs) -> None:
        """The finished beams, best first, become the request's results."""
        for beam in list(request.sequences):
            verbs.free(beam)
        for index, hypothesis in enumerate(self._finished[: self._num_return]):
            result = Sequence(-1 - index, request, hypothesis.token_ids, index)
            result.cumulative_logprob = hypothesis.logprob
            result.score = hypothesis.score
            verbs.finish(result, hypothesis.reason)


class PinPrefix:
    """Compute a prompt and keep its blocks: the provider's shared prefix (paper section 4.4)."""

    wants: Literal["kv"] = "kv"
    max_sequences = 1
    keeps_blocks = True

    def __init__(self, name: str, num_tokens: int) -> None:
        self.max_length = num_tokens
        self.name = name

    def computed(self, seq: Sequence, verbs: SequenceVerbs) -> None:
        verbs.pin(seq, self.name)


class PromptReader:
    """Compute a prompt for what is read of it on the way (core/prompt_reading.py)."""

    wants: Literal["kv"] = "kv"
    max_sequences = 1
    keeps_blocks = False

    def __init__(self, num_tokens: int) -> None:
        self.max_length = num_tokens

    def computed(self, seq: Sequence, verbs: SequenceVerbs) -> None:
        verbs.finish(seq, "stop")
