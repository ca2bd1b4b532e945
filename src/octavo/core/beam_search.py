"""Ranking the candidates of all beam searches of a step.

The device idles while beams are chosen, so searches of equal shape are ranked together by array
operations, and a search itself is consulted only where a beam or the search may end.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.sequence import Continuations, Request, Searching
from octavo.core.step import Candidates


class Search(NamedTuple):
    """A search whose sequences have received candidates."""

    request: Request
    method: Searching
    first_row: int  # its sequences have one row of candidates each, from this one on


class Ranking(NamedTuple):
    """The best continuations of searches of one shape, best first. Arrays: [num_searches, n].

    A continuation that a mask rules out has a log-probability of -inf, and is never kept.
    """

    searches: list[Search]
    width: int  # sequences that each may keep
    logprobs: NDArray[np.float64]
    parents: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    def split(self) -> tuple[list[int], list[int]]:
        """Indices of the searches that keep their `width` best continuations, as most do, and of
        those that must be consulted."""
        usual: list[int] = []
        others: list[int] = []
        offers = zip(
            self.searches,
            self.token_ids.tolist(),
            self.logprobs[:, 0].tolist(),
            self._has_enough.tolist(),
            strict=True,
        )
        for place, ((request, method, _), token_ids, logprob, has_enough) in enumerate(offers):
            goes_on = has_enough and method.goes_on(request, token_ids, logprob)
            (usual if goes_on else others).append(place)
        return usual, others

    def best(self, places: Seq[int]) -> tuple[list[float], list[list[int]], list[int]]:
        """What the searches at `places` keep: log-probabilities, parents by search, token ids."""
        return (
            self.logprobs[places, : self.width].ravel().tolist(),
            self.parents[places, : self.width].tolist(),
            self.token_ids[places, : self.width].ravel().tolist(),
        )

    def offered(self, place: int) -> Continuations:
        """The best continuations of the search at `place`, but for those that cannot be."""
        number = int((self.logprobs[place] > -np.inf).sum())
        return Continuations(
            self.logprobs[place, :number].tolist(),
            self.parents[place, :number].tolist(),
            self.token_ids[place, :number].tolist(),
        )

    @property
    def _has_enough(self) -> NDArray[np.bool_]:
        """Which searches have `width` continuations that can be."""
        last: NDArray[np.bool_] = self.logprobs[:, : self.width][:, -1] > -np.inf
        return last


def rank(searches: Seq[Search], candidates: Candidates) -> Iterator[Ranking]:
    """The best continuations of each search. Ties go to the earlier sequence, and then to the
    better token."""
    by_shape: dict[tuple[int, int, int], list[Search]] = {}
    for search in searches:
        request, method, _ = search
        shape = len(request.sequences), method.num_candidates, method.max_sequences
        by_shape.setdefault(shape, []).append(search)
    for (num_seqs, number, width), alike in by_shape.items():
        yield Ranking(alike, width, *_ranked(alike, num_seqs, number, candidates))


def _ranked(
    searches: Seq[Search], num_seqs: int, number: int, candidates: Candidates
) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """The `number` best continuations of each search; all have `num_seqs` sequences."""
    first_rows = np.array([search.first_row for search in searches])[:, None]
    before = np.array(
        [seq.cumulative_logprob for search in searches for seq in search.request.sequences]
    )
    logprobs = candidates.logprobs[first_rows + np.arange(num_seqs)]
    num_offered = logprobs.shape[2]
    logprobs = (logprobs + before.reshape(-1, num_seqs, 1)).reshape(len(searches), -1)
    order = (-logprobs).argsort(axis=1, kind="stable")[:, :number]
    # Indices into the flattened arrays.
    ranked = order + np.arange(0, logprobs.size, num_seqs * num_offered)[:, None]
    offers = order + first_rows * num_offered
    return logprobs.take(ranked), order // num_offered, candidates.token_ids.take(offers)
