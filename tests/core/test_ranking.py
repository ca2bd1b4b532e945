"""What a search is shown: the best continuations of all its sequences, as many as it asked for."""

from __future__ import annotations

import numpy as np

from octavo.core.beam_search import Search, rank
from octavo.core.decoding import BeamSearch
from octavo.core.sequence import Request, Sequence
from octavo.core.step import Candidates, SamplingSpec


def test_a_search_is_offered_the_best_of_all_its_sequences() -> None:
    """Two beams are offered three tokens each; rows of others come before them."""
    method = BeamSearch(2, 10, frozenset())
    request = Request("r", [1], method, SamplingSpec())
    request.sequences = [Sequence(i, request, [1]) for i in range(2)]
    for seq, logprob in zip(request.sequences, (-1.0, -2.0), strict=True):
        seq.cumulative_logprob = logprob
    candidates = Candidates(
        np.array([[9, 9, 9], [10, 11, 12], [20, 21, 22]]),
        np.array([[0.0, 0.0, 0.0], [-1.0, -2.0, -4.0], [-0.5, -1.0, -2.5]]),
    )
    [ranking] = rank([Search(request, method, first_row=1)], candidates)
    best = ranking.offered(0)
    # The second token of each beam comes to -3: the first beam's goes first.
    assert best.logprobs == [-2.0, -2.5, -3.0, -3.0]
    assert best.token_ids == [10, 20, 11, 21]
    assert best.parents == [0, 1, 0, 1]
    assert ranking.split() == ([0], [])
    assert ranking.best([0]) == ([-2.0, -2.5], [[0, 1]], [10, 20])
