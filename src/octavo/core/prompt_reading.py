"""What is read of a prompt while it is computed: log-probabilities of its tokens, or an embedding.

The worker reads the hidden states of each chunk of a prompt as it computes them. A reading puts the
parts together. Chunks come in order; after a preemption some positions may be computed again.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core.step import SamplingSpec, TokenLogprobs


class PromptReading(Protocol):
    """Owns what is known so far."""

    def take(self, start: int, part: Any) -> None:
        """Take in what the worker has read of a chunk: from position `start` on, or from the first
        position that is read, if that comes later."""


class PromptScores:
    """Log-probabilities, one for each token after the first position that is read."""

    def __init__(self, first: int) -> None:
        self.entries: list[TokenLogprobs] = []
        self._first = first

    def take(self, start: int, part: list[TokenLogprobs]) -> None:
        known = self._first + len(self.entries)
        self.entries += part[known - max(start, self._first) :]


class PooledPrompt:
    """The sum of the hidden states that are read, in float64."""

    def __init__(self, first: int) -> None:
        self.total: NDArray[np.float64] | None = None
        self._first = first

    def take(self, start: int, part: NDArray[np.float32]) -> None:
        # A prompt that is computed again begins at the first position that is read, or before.
        if self.total is None or start <= self._first:
            self.total = np.zeros(len(part))
        self.total += part


def reading_of(sampling: SamplingSpec) -> PromptScores | PooledPrompt | None:
    """A new reading for a request's prompt; None if nothing of it is read."""
    if sampling.pools_prompt:
        return PooledPrompt(sampling.first_read)
    return None if sampling.num_prompt_logprobs is None else PromptScores(sampling.first_read)
