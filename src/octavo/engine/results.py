"""What an engine reports of its requests, in token ids: plain values, for this process or another.

A new kind of result is one more struct in `Result`: messages carry it as it is, and
`OutputStream.take` says what it means to a client.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from octavo import errors
from octavo.core.step import TokenLogprobs

# Log-probabilities of twenty tokens are 2.5 KB as objects, and a tenth of that packed.
pack_logprobs: Callable[[TokenLogprobs], bytes] = msgspec.msgpack.Encoder().encode
unpack_logprobs: Callable[[bytes], TokenLogprobs] = msgspec.msgpack.Decoder(TokenLogprobs).decode


class ErrorReport(msgspec.Struct, frozen=True):
    """An error of `octavo.errors` as a plain value, to be raised where the client is."""

    kind: str  # its class
    field: str | None
    message: str


class NewTokens(msgspec.Struct, array_like=True, tag=True):
    """What a step added to one sample."""

    request_id: str
    index: int
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[bytes] = []  # packed, one per token, if they were asked for


class PromptScores(msgspec.Struct, array_like=True, tag=True):
    """Log-probabilities of a prompt: entry i is about token i + 1. Comes before the first token."""

    request_id: str
    scores: list[TokenLogprobs]


class Beam(msgspec.Struct, array_like=True):
    """One beam at the end of its search, with all its output tokens."""

    index: int
    token_ids: list[int]
    finish_reason: str
    cumulative_logprob: float
    score: float | None  # None if the search has failed


class Finished(msgspec.Struct, array_like=True, tag=True):
    """A request is over; nothing more comes of it."""

    request_id: str
    beams: list[Beam] = []  # of a beam search, best first
    error: ErrorReport | None = None  # why it could not be computed to its end


Result = NewTokens | PromptScores | Finished


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
