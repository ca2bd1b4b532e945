"""What an engine reports about its requests, in token ids: plain values that can be sent.

A new kind of result is one more NamedTuple and one more column of `StepResults`; `OutputStream`
says what it means to a client. The values need no library, and msgspec encodes them as arrays: the
server's messages carry them as they are, except for tokens' log-probabilities, which it packs.
That form is the type parameter `Scores`: `TokenLogprobs` in what an engine reports.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from octavo import errors

Scores = TypeVar("Scores")  # a token's log-probabilities
# Request id, sample index, token ids, finish reason, stop reason, log-probabilities.
NewTokensRow = tuple[str, int, list[int], str | None, int | str | None, Sequence[Scores]]


class ErrorReport(NamedTuple):
    """An error of `octavo.errors` as a plain value, to be raised where the client is."""

    kind: str  # its class
    field: str | None
    message: str


class PromptScores(NamedTuple, Generic[Scores]):
    """Log-probabilities of a prompt: entry i is about token i + 1."""

    request_id: str
    scores: list[Scores]


class Embedding(NamedTuple):
    """The sum of hidden states of a prompt."""

    request_id: str
    values: bytes  # float64, in the machine's own order


class NewTokens(NamedTuple, Generic[Scores]):
    """What a step added to samples, as columns with one entry per sample: most of what is reported
    is this, and a column costs less than a value for each sample."""

    request_ids: list[str]
    sample_indices: list[int]
    token_ids: list[list[int]]
    finish_reasons: list[str | None]
    stop_reasons: list[int | str | None]
    logprobs: list[Sequence[Scores]]  # one per token, if they were asked for

    @classmethod
    def none(cls) -> NewTokens[Any]:
        return cls([], [], [], [], [], [])

    def rows(self) -> Iterator[NewTokensRow[Scores]]:
        """Sample by sample, the entries of all columns."""
        rows: Any = zip(*self, strict=True)
        found: Iterator[NewTokensRow[Scores]] = rows
        return found


class Beam(NamedTuple):
    """One beam at the end of its search, with all its output tokens."""

    sample_index: int
    token_ids: list[int]
    finish_reason: str
    cumulative_logprob: float
    score: float | None  # None if the search has failed


class Finished(NamedTuple):
    """A request is over; nothing more is reported about it."""

    request_id: str
    beams: Sequence[Beam] = ()  # of a beam search, best first
    error: ErrorReport | None = None  # why it could not be computed to its end


class StepResults(NamedTuple, Generic[Scores]):
    """What one step brought to all requests. Clients take in the columns in this order: a prompt's
    scores come before its first token, and the end of a request is the last that is reported."""

    prompt_scores: list[PromptScores[Scores]]
    tokens: NewTokens[Scores]
    finished: list[Finished]
    embeddings: Sequence[Embedding] = ()  # whose requests are among the finished

    @property
    def has_any(self) -> bool:
        return bool(self.prompt_scores or self.tokens.request_ids or self.finished)

    @classmethod
    def none(cls) -> StepResults[Any]:
        return cls([], NewTokens.none(), [])


def report_of(error: Exception) -> ErrorReport:
    """An error as a plain value."""
    kind = type(error).__name__
    if isinstance(error, errors.FieldError):
        return ErrorReport(kind, error.field, error.reason)
    return ErrorReport(kind, None, str(error))


def error_of(report: ErrorReport) -> errors.OctavoError:
    """The error of a report, as its own class if it is one of ours."""
    kind = getattr(errors, report.kind, None)
    if kind is None or not issubclass(kind, errors.OctavoError):
        return errors.EngineFailed(f"{report.kind}: {report.message}")
    fields = () if report.field is None else (report.field,)
    error: errors.OctavoError = kind(*fields, report.message)
    return error
