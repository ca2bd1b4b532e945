"""What searches are offered for their sequences, ranked for all of one shape at once.

While beams are decided the device waits, so the work is done by arrays, and a search is asked only
where something ends.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.core.decoding import Continuations, Searching
from octavo.core.sequence import Request
from octavo.core.step import Candidates


class Search(NamedTuple):
    """A search whose sequences have been offered candidates."""

    request: Request
    method: Searching
    first_row: int  # of the candidates; its sequences have one each, in their order


class Ranking(NamedTuple):
    """The best continuations of searches of one shape, best first: [num_searches, number] each."""

    searches: list[Search]
    width: int  # sequences that each may keep
    logprobs: NDArray[np.float64]
    parents: NDArray[np.int64]
    token_ids: NDArray[np.int64]

    def split(self) -> tuple[list[int], list[int]]:
        """The places of usual searches, which go on by their `width` best, and of the others."""
        usual: list[int] = []
        others: list[int] = []
        offers = zip(
            self.searches, self.token_ids.tolist(), self.logprobs[:, 0].tolist(), strict=True
        )
        for place, ((request, method, _), token_ids, logprob) in enumerate(offers):
            (usual if method.goes_on(request, token_ids, logprob) else others).append(place)
        return usual, others

    def best(self, places: Seq[int]) -> tuple[list[float], list[list[int]], list[int]]:
        """What usual searches choose: log-probabilities, parents by search, and token ids."""
        return (
            self.logprobs[places, : self.width].ravel().tolist(),
            self.parents[places, : self.width].tolist(),
            self.token_ids[places, : self.width].ravel().tolist(),
        )

    def offered(self, place: int) -> Continuations:
        return Continuations(
            self.logprobs[place].tolist(),
            self.parents[place].tolist(),
            self.token_ids[place].tolist(),
        )


def rank(searches: Seq[Search], candidates: Candidates) -> Iterator[Ranking]:
    """What searches are to look at; of equal continuations, the first offered come first."""
    # Those of one shape are ranked at once.
    groups: dict[tuple[int, int, int], list[Search]] = {}
    for search in searches:
        request, method, _ = search
        shape = len(request.sequences), method.num_candidates, method.max_sequences
        groups.setdefault(shape, []).append(search)
    for (num_seqs, number, width), group in groups.items():
        yield Ranking(group, width, *_ranked(group, num_seqs, number, candidates))


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
    # Places in the flat arrays.
    ranked = order + np.arange(0, logprobs.size, num_seqs * num_offered)[:, None]
    offers = order + first_rows * num_offered
    return logprobs.take(ranked), order // num_offered, candidates.token_ids.take(offers)
