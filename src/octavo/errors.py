"""Errors that a user can cause. Each message names the field, the value and the limit.

An `assert` in octavo guards against its own bugs; what a user can cause raises one of these errors.
"""

from __future__ import annotations

import reprlib
import traceback
from collections.abc import Iterable
from typing import Any


class OctavoError(Exception):
    """Base of all errors that octavo raises for a user's mistake or a user's machine."""

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, unpickling calls __init__ with the message alone, which is not its signature.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[OctavoError], arguments: tuple[Any, ...], state: dict[str, Any]
) -> OctavoError:
    """An error that comes from another process."""
    error = kind.__new__(kind, *arguments)
    error.__dict__.update(state)
    return error


class FieldError(OctavoError, ValueError):
    """Something is wrong with the value of `field`; `reason` says what."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class InvalidRequest(FieldError):
    """A request that cannot be served; `field` names the offending argument."""


class RequestTooLong(InvalidRequest):
    """A request that can never fit into the model's context or into the KV cache."""


class ConfigError(FieldError):
    """An engine option with a value that cannot work; `field` names the option."""


class ModelError(OctavoError):
    """A model directory that cannot be served; the message says why."""


class UnservedOption(ModelError):
    """An option of a model that octavo's own family does not implement."""


class OutOfMemory(OctavoError):
    """Too little memory for the settings; the message names settings that would fit."""


class EngineFailed(OctavoError):
    """The executor broke down in the middle of a step; the engine cannot go on."""


class ProcessKilled(EngineFailed):
    """A process of the engine was ended by SIGKILL from outside, perhaps by the system for want of
    memory."""


class EngineClosed(OctavoError):
    """The engine was used after `close()` had given its memory back."""


class RequestFailed(OctavoError):
    """A request that cannot be computed, though others can; for instance, one that was running each
    time the engine process died. It is not tried again."""


class LogitsNotFinite(RequestFailed):
    """A request for which the model's logits hold NaN or infinity: nothing can be chosen."""


class NoTokenLeft(RequestFailed):
    """A request whose grammar and other settings leave no token to draw."""


class Overloaded(OctavoError):
    """Too many requests wait already; `retry_after` is an estimate in seconds."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class Unavailable(OctavoError):
    """The server is shutting down, or has no engine; `retry_after` seconds may help, or None."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class TraceError(OctavoError, ValueError):
    """A request trace with a broken line; the message names the file and the line."""


class _Shortened(reprlib.Repr):
    """Representations that fit into a line, even where repr() fails (integers of 5,000 digits)."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 80
        self.maxdict = self.maxlist = self.maxtuple = 4

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > 128:  # Python refuses to convert very long ones
            sign = "-" if x < 0 else ""
            return f"about {sign}2**{x.bit_length() - 1}"
        return repr(x)


def shown(value: object) -> str:
    """A value for an error message: its repr, shortened if it is long. Never raises."""
    return _SHORTENED.repr(value).replace("\n", " ")


def without_values(error: BaseException) -> str:
    """An error for the log of a server, which holds nothing of a prompt or an output.

    Messages of octavo's own errors are written for it, and those of a device or the system have
    sizes and states (torch raises RuntimeErrors). Any other message may quote what a request has:
    of such an error the type is said alone.
    """
    kind = type(error).__name__
    is_plain = isinstance(error, OctavoError | RuntimeError | OSError | MemoryError)
    return f"{kind}: {error}" if is_plain else kind


def lines_of_code(error: BaseException) -> str:
    """Where an error was raised: its traceback without the message."""
    return "".join(traceback.format_tb(error.__traceback__))


def few(names: Iterable[str]) -> str:
    """The first three of some names for an error message, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(shown(name)[1:-1] for name in names[:3]) + more


_SHORTENED = _Shortened()
