"""The text of one growing sequence, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from io import StringIO

from octavo.engine.tokenizer import Detokenizer


class OutputText:
    """Owns a sequence's text: what has been released to the client and what is held back.

    The last `max(len(stop)) - 1` characters may be the beginning of a stop string, so they are
    held back until more text or the end comes.
    """

    __slots__ = (
        "_detokenizer",
        "_held",
        "_include_stop",
        "_longest",
        "_min_tokens",
        "_released",
        "_stops",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Seq[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Begin with an empty text.

        Args:
            detokenizer: a new one, for this sequence alone.
            stops: texts that end the sequence.
            include_stop: keep the stop string, or the stop token, at the end of the text.
            min_tokens: a stop string that is complete before this many tokens ends nothing.
        """
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._longest = max((len(stop) for stop in stops), default=0)
        self._released = StringIO()  # to which text is added without copying it all
        self._held = ""  # what comes after it

    @property
    def text(self) -> str:
        """All of it."""
        return self._released.getvalue() + self._held

    def extend(
        self, token_ids: Seq[int], num_before: int, ended: str | None
    ) -> tuple[int, str | None]:
        """Add what a step has brought to a sequence that had `num_before` output tokens.

        `ended` is its finish reason, if these tokens end it. Returns how many of them belong to the
        output, and the stop string that the last of these completes.
        """
        last = len(token_ids) - 1
        for i, token_id in enumerate(token_ids):
            if ended == "stop" and i == last and not self._include_stop:
                break  # the token that ends a sequence is not part of its text
            start = len(self._held)
            self._held += self._detokenizer.add(token_id)
            if self._stops:
                stop = self._find_stop(start, num_before + i + 1)
                if stop is not None:
                    return i + 1, stop
        if ended is not None:
            self.finish()
        return len(token_ids), None

    def finish(self) -> None:
        """No more tokens come."""
        self._held += self._detokenizer.finish()

    def release(self, finished: bool) -> str:
        """The text that the client may see now and has not seen before."""
        end = len(self._held)
        if not finished and self._longest:
            end = max(0, end - self._longest + 1)
        released, self._held = self._held[:end], self._held[end:]
        self._released.write(released)
        return released

    def _find_stop(self, start: int, num_tokens: int) -> str | None:
        """Cut the text at the first stop string that its new part completes, which begins at
        `start` of what is held back.

        Of several matches the one that ends first counts; of those that end together, the longest,
        so that nothing of a stop string is left. Nothing is found while there are fewer than
        `min_tokens`; what comes before is not searched later, either.
        """
        if num_tokens < self._min_tokens:
            return None
        best: tuple[int, int, str] | None = None  # end, beginning
        for stop in self._stops:
            found = self._held.find(stop, max(0, start - len(stop) + 1))
            if found >= 0:
                match = (found + len(stop), found, stop)
                best = match if best is None else min(best, match)
        if best is None:
            return None
        end, begin, stop = best
        self._held = self._held[: end if self._include_stop else begin]
        return stop
