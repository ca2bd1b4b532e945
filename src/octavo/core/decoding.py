"""Decoding methods over fork, append and free (paper sections 4.4 and 5.2).

A method decides which chains of tokens live on after each step. It never touches blocks: forking
a sequence shares its blocks, and the KV cache manager copies one only when it is written.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from octavo.core.sequence import Request, Sequence

EarlyStopping = bool | Literal["never"]


class SequenceVerbs(Protocol):
    """What a decoding method can do to sequences; the scheduler implements it."""

    def fork(self, parent: Sequence, sample_index: int) -> Sequence:
        """A new sequence with the parent's tokens, sharing all of its blocks."""

    def append(self, seqs: Seq[Sequence], token_ids: Seq[int]) -> None:
        """Add to each sequence a token that the worker has not drawn for it by itself."""

    def free(self, seq: Sequence) -> None:
        """Drop a sequence; nothing of it is returned to the client."""

    def finish(self, seq: Sequence, reason: str) -> None:
        """End a sequence and give its blocks back; its tokens are part of the result."""

    def pin(self, seq: Sequence, name: str) -> None:
        """End a sequence and keep its blocks as the pinned prefix `name`."""


# A method is one of three kinds, by what it wants to know at the end of a sequence's tokens.
# Extend here: one class of the kind that fits.


class Drawing(Protocol):
    """Wants a token, drawn by the worker."""

    wants: Literal["token"]
    max_sequences: int  # that run at once, at most
    max_length: int  # tokens, prompt included
    num_draws: int  # tokens drawn at the end of the prompt

    def accept(self, seq: Sequence, token_id: int) -> str | None:
        """Append a drawn token; returns the reason if it ends the sequence."""

    def start(self, seq: Sequence, token_ids: Seq[int], verbs: SequenceVerbs) -> None:
        """The first tokens were drawn, `num_draws` > 1 of them, at the end of the prompt."""


class Continuations(NamedTuple):
    """The best ways to go on for a request's sequences by one token, best first."""

    logprobs: list[float]  # of the sequence and the token together
    parents: list[int]  # which of the request's sequences
    token_ids: list[int]


class Searching(Protocol):
    """Wants the best candidates for the next token of its sequences."""

    wants: Literal["candidates"]
    max_sequences: int
    max_length: int
    num_candidates: int  # that it asks for of each sequence, and looks at in a step

    def goes_on(self, request: Request, token_ids: Seq[int], logprob: float) -> bool:
        """Whether a step is like most: none of the best continuations, of which these are all
        tokens and the first one's log-probability, ends a sequence, nor do they end the search.
        Then the `max_sequences` best live on, and `advance` is not asked."""

    def advance(
        self, request: Request, best: Continuations, verbs: SequenceVerbs
    ) -> Continuations | None:
        """Choose those that live on, of the `num_candidates` best of all that the sequences were
        offered: forks, appends and frees follow from that. None if the request has ended."""


class Computing(Protocol):
    """Wants no token, only that the KV of its sequence be computed."""

    wants: Literal["kv"]
    max_sequences: int
    max_length: int

    def computed(self, seq: Sequence, verbs: SequenceVerbs) -> None:
        """All tokens have been computed."""


DecodingMethod = Drawing | Searching | Computing


class Sampling:
    """Draw tokens one by one; `n` samples share the prompt, which is computed once."""

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
        # Fork before anything is appended: what the samples share is the prompt.
        siblings = [verbs.fork(seq, index) for index in range(1, len(token_ids))]
        verbs.append(siblings, token_ids[1:])
        seq.token_ids.append(token_ids[0])  # the worker has done so, too
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
    logprob: float  # of all its output tokens together
    token_ids: list[int]
    reason: str


class BeamSearch:
    """Keep the `width` most likely chains of tokens, inside one batch.

    Equal to transformers' `generate(num_beams=width)`: the same candidates, the same scores
    (log-probability over length ** length_penalty) and the same ends. `early_stopping` True ends
    the search when `width` beams are finished; False when the best running beam, at its present
    length, cannot beat the worst finished one; "never" when it could not even at full length.
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
        # Enough that `width` of them do not end a beam.
        self.num_candidates = max(2, 1 + len(eos_ids)) * width
        self._eos_ids = eos_ids
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._num_return = num_return_sequences  # None: all that are finished
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
        """Those that go on; of the others, what stands among the `width` best is finished."""
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
        """`logprob`: of the best beam that goes on."""
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

    def __init__(self, name: str, num_tokens: int) -> None:
        self.max_length = num_tokens
        self._name = name

    def computed(self, seq: Sequence, verbs: SequenceVerbs) -> None:
        verbs.pin(seq, self._name)
