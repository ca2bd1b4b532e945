"""Which of several ways to compute the same is fastest: measured once for each card, and kept.

A kernel that has several ways (tiles, or another library) is `Tunable`: it asks `Question`s, and
computes by the answers. `TuningFile.answer` takes them from a file, and measures what is not there.
Answers change the order in which sums are added up, so the same file gives the same results.
"""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

MAX_SECONDS = (
    60.0  # for measuring, before a server is ready; the rest is measured at the next start
)
CHUNK = 24  # questions whose options are compiled together
# Another option must take at most so much of the first one's time: what does not matter stays.
_MARGIN = 0.99

Answers = Mapping[Hashable, Any]
Work = Callable[[], object]


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """Which of the options is fastest."""

    key: Hashable
    """What the answer depends on; its `repr` names it in the file."""
    options: tuple[Hashable, ...]
    """The first one is taken where nothing is measured; their `repr`s are the answers in the
    file."""
    rows: int
    """Rows of the inputs. Questions about few rows, as most steps have them, are answered first."""
    work: Callable[[Any, int], Work]
    """The i-th call that computes once by this option, with weights of its own."""
    num_works: int
    """How many such calls read more than a device's caches hold."""


@runtime_checkable
class Tunable(Protocol):
    """A kernel that has several ways to compute the same."""

    def questions(self, max_tokens: int) -> Sequence[Question]:
        """What it would know for steps of up to so many tokens, of the uses that there have been so
        far."""

    def adopt(self, answers: Answers) -> None:
        """Compute by these answers, by their questions' keys, from now on."""


class Meter(Protocol):
    """Compiles and measures on a device."""

    def compile(self, works: Sequence[Work]) -> list[bool]:
        """Carry out each once, which compiles what it launches; False where that fails."""

    def measure(self, works: Sequence[Work]) -> float:
        """Seconds, or another measure of time, that one of them takes; infinity if they fail."""


def distinct(questions: Iterable[Question]) -> list[Question]:
    """One question for each key, for layers of equal shapes ask the same; few rows first."""
    found: dict[Hashable, Question] = {}
    for question in questions:
        found.setdefault(question.key, question)
    return sorted(found.values(), key=lambda question: question.rows)


class TuningFile:
    """A file with answers, as JSON: the texts of keys and of what was fastest.

    Processes share it: one measures while others wait for it. If it cannot be written, what was
    measured serves this process alone.

    Example:
        >>> file = TuningFile(tuning_path(device))
        >>> kernel.adopt(file.answer(distinct(kernel.questions(2048)), CudaMeter(device)))
    """

    def __init__(
        self,
        path: Path,
        max_seconds: float = MAX_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_seconds: how long `answer` may measure, or wait for a process that does."""
        self.path = path
        self._max_seconds = max_seconds
        self._clock = clock

    def answer(self, questions: Sequence[Question], meter: Meter) -> dict[Hashable, Any]:
        """The fastest option for each key: from the file, or else measured now and kept there.

        A question is left out if there was no time for it, or nothing to choose.
        """
        questions = [each for each in questions if len(each.options) > 1]
        answers = self._read(questions)
        if len(answers) == len(questions):
            return answers
        lock = FileLock(f"{self.path}.lock")
        is_locked = False
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=2 * self._max_seconds)
            is_locked = True
            answers = self._read(questions)  # another process may have measured meanwhile
        except Timeout:
            logger.warning("another process has been writing %s for too long", self.path)
        except OSError as error:
            logger.warning("kernels are measured, but not for later starts: %s", error)
        try:
            missing = [each for each in questions if each.key not in answers]
            if missing:
                measured = self._measure(missing, meter)
                answers |= measured
                if is_locked:
                    self._write(measured)
        finally:
            if is_locked:
                lock.release()
        return answers

    def _measure(self, questions: Sequence[Question], meter: Meter) -> dict[Hashable, Any]:
        started = self._clock()
        logger.info(
            "measuring %d products to choose their kernels, for up to %.0f s; the results are kept "
            "in %s (--tune-kernels off computes without)",
            len(questions),
            self._max_seconds,
            self.path,
        )
        found: dict[Hashable, Any] = {}
        gains: list[float] = []
        for begin in range(0, len(questions), CHUNK):
            if self._clock() - started >= self._max_seconds:
                break
            chunk = questions[begin : begin + CHUNK]
            # Nothing is compiled while something is measured.
            asked = [(each, option) for each in chunk for option in each.options]
            compiled = meter.compile([question.work(option, 0) for question, option in asked])
            served = {
                (question.key, option)
                for (question, option), is_compiled in zip(asked, compiled, strict=True)
                if is_compiled
            }
            for question in chunk:
                if self._clock() - started >= self._max_seconds:
                    break
                times: dict[Hashable, float] = {}
                for option in question.options:
                    if (question.key, option) in served:
                        works = [question.work(option, i) for i in range(question.num_works)]
                        spent = meter.measure(works)
                        if math.isfinite(spent):
                            times[option] = spent
                if times:
                    found[question.key] = fastest = _fastest(question.options[0], times)
                    if question.options[0] in times:
                        gains.append(times[fastest] / times[question.options[0]])
        logger.info(
            "measured %d of %d products in %.1f s (what is missing, at a later start): %d take "
            "less time than by rule; all together, on average %.0f%% less",
            len(found),
            len(questions),
            self._clock() - started,
            sum(gain < 1 for gain in gains),
            100 * (1 - sum(gains) / len(gains)) if gains else 0,
        )
        return found

    def _read(self, questions: Sequence[Question]) -> dict[Hashable, Any]:
        """What the file says; an option that there is no longer counts as nothing."""
        texts = self._texts()
        found: dict[Hashable, Any] = {}
        for question in questions:
            options = {repr(option): option for option in question.options}
            text = texts.get(repr(question.key))
            if text in options:
                found[question.key] = options[text]
        return found

    def _texts(self) -> dict[str, str]:
        try:
            texts = json.loads(self.path.read_bytes())
            if not isinstance(texts, dict) or not all(isinstance(v, str) for v in texts.values()):
                raise ValueError("it is no mapping of texts")
            return texts
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("%s cannot be read, and is measured again: %s", self.path, error)
            return {}

    def _write(self, measured: Answers) -> None:
        """Add to the file; called with the lock."""
        texts = self._texts() | {repr(key): repr(option) for key, option in measured.items()}
        try:
            handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f"{self.path.name}.")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump(texts, file, indent=1, sort_keys=True)
                os.replace(name, self.path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as error:
            logger.warning("what was measured of kernels is not kept for later starts: %s", error)


def _fastest(usual: Hashable, times: Mapping[Any, float]) -> Any:
    """The option that takes least time; the usual one, unless another is faster by a margin."""
    best = min(times, key=lambda option: times[option])
    if usual in times and times[best] > _MARGIN * times[usual]:
        return usual
    return best
