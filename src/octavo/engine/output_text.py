"""The text of one growing sequence, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from octavo.engine.tokenizer import Detokenizer
from octavo.sampling_params import SamplingParams


class OutputText:
    """Owns a sequence's text: what has been released to the client and what is held back.

    The last `max(len(stop)) - 1` characters may be the beginning of a stop string, so they are
    held back until more text or the end comes.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Seq[str], include_stop: bool) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._longest = max((len(stop) for stop in stops), default=0)
        self._num_released = 0
        self._num_searched = 0  # no stop string ends before this
        self.text = ""

    def add(self, token_id: int, search: bool) -> str | None:
        """Add a token's text. If `search`, returns the stop string that it completes, and cuts
        the text there; of several matches the one that ends first counts."""
        self.text += self._detokenizer.add(token_id)
        if not self._stops:
            return None
        if search:
            return self._find_stop()
        self._num_searched = len(self.text)
        return None

    def extend(
        self, token_ids: Seq[int], num_before: int, ended: str | None, params: SamplingParams
    ) -> tuple[int, str | None]:
        """Add what a step brought to a sample that had `num_before` output tokens.

        `ended` is its finish reason, if these tokens end it. Returns how many of them belong to the
        output, and the stop string that the last of these completes.
        """
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if ended == "stop" and i == last and not params.include_stop_str_in_output:
                break  # the token that ends a sequence is no part of its text
            stop = self.add(token_id, num_before + i + 1 >= params.min_tokens)
            if stop is not None:
                return i + 1, stop
        if ended is not None:
            self.finish()
        return len(token_ids), None

    def finish(self) -> None:
        """No more tokens come."""
        self.text += self._detokenizer.finish()

    def release(self, finished: bool) -> str:
        """The text that the client may see now and has not seen before."""
        end = len(self.text)
        if not finished and self._longest:
            end = max(self._num_released, end - self._longest + 1)
        released = self.text[self._num_released : end]
        self._num_released = max(self._num_released, end)
        return released

    def _find_stop(self) -> str | None:
        """Searches only where a match would end in new text."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            start = self.text.find(stop, max(0, self._num_searched - len(stop) + 1))
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), stop)
        self._num_searched = len(self.text)
        if best is None:
            return None
        end, stop = best
        self.text = self.text[: end if self._include_stop else end - len(stop)]
        return stop
