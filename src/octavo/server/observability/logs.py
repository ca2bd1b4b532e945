"""Log lines: plain for people, or one JSON object per line for programs.

No line holds a prompt, an output or a key. Records carry numbers and names in the fields listed
here; anything else that a caller attaches to a record is left out.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from datetime import UTC, datetime
from typing import Any, Literal

from octavo.outputs import RequestOutput
from octavo.server.engine_process.journal import OpenRequest
from octavo.server.engine_process.listening import Listener
from octavo.server.engine_process.messages import StepReport

Format = Literal["text", "json"]

FIELDS = (
    *("request_id", "method", "path", "status", "seconds", "user"),
    *("prompt_tokens", "cached_tokens", "output_tokens", "num_sequences", "finish_reason"),
    *("queue_seconds", "first_token_seconds", "preemptions", "replays"),
    *("mode", "blocks", "tokens", "cost_seconds"),
)

logger = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """One object per line: time, level, logger, message, and the fields of the record."""

    def format(self, record: logging.LogRecord) -> str:
        values: dict[str, Any] = {
            "time": _time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        values |= _fields(record)
        if record.exc_info and record.exc_info[1] is not None:
            values["error"] = type(record.exc_info[1]).__name__
            # Lines of code, but not the error's message, which may contain parts of a prompt.
            values["traceback"] = "".join(traceback.format_tb(record.exc_info[2]))
        return json.dumps(values, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """One line of plain text per record, with the same contents."""

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_quoted(value)}" for name, value in _fields(record).items())
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        line = f"{_time(record.created)} {level}{record.getMessage()} {fields}".rstrip()
        if record.exc_info and record.exc_info[1] is not None:
            lines = "".join(traceback.format_tb(record.exc_info[2]))
            line += f"\n{type(record.exc_info[1]).__name__}\n{lines}".rstrip()
        return line


def set_up_logs(kind: Format, level: int = logging.INFO) -> None:
    """Send the log of octavo and of the HTTP server to stderr in one format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if kind == "json" else TextFormatter())
    for name in ("octavo", "uvicorn"):
        log = logging.getLogger(name)
        log.handlers[:] = [handler]
        log.setLevel(level)
        log.propagate = False
    # The gate writes a line for each request, with more in it.
    logging.getLogger("uvicorn.access").disabled = True


class RequestLog(Listener):
    """Writes a line for each request that ends, and one for each preemption."""

    def request_finished(self, request: OpenRequest, output: RequestOutput) -> None:
        if not logger.isEnabledFor(logging.INFO):
            return
        logger.info(
            "finished",
            extra={
                "request_id": request.request_id,
                "prompt_tokens": request.num_prompt_tokens,
                "cached_tokens": request.num_cached_tokens,
                "output_tokens": sum(len(each.token_ids) for each in output.outputs),
                "num_sequences": len(output.outputs),
                "finish_reason": output.finish_reason,
                "seconds": _since(request.arrival_time, output.finish_time),
                "queue_seconds": _since(request.arrival_time, request.admitted_time),
                "first_token_seconds": _since(request.arrival_time, request.first_token_time),
                "preemptions": output.num_preemptions,
                "replays": request.num_replays,
            },
        )

    def request_failed(self, request: OpenRequest, error: Exception) -> None:
        logger.warning(
            "failed: %s",
            type(error).__name__,
            extra={"request_id": request.request_id, "replays": request.num_replays},
        )

    def stepped(self, report: StepReport) -> None:
        for event in report.preempted:
            logger.info(
                "preempted",
                extra={
                    "request_id": event.request_id,
                    "mode": event.mode,
                    "blocks": event.num_blocks,
                    "tokens": event.num_tokens,
                    "cost_seconds": round(event.cost_seconds, 6),
                },
            )


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    values = record.__dict__
    return {name: values[name] for name in FIELDS if values.get(name) is not None}


def _quoted(value: object) -> object:
    """What a client sent (a user's name, a path) must not look like fields or lines of the log."""
    is_plain = not isinstance(value, str) or (value.isprintable() and " " not in value)
    return value if is_plain else json.dumps(value)


def _time(seconds: float) -> str:
    """ISO 8601, UTC, milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _since(start: float, end: float | None) -> float | None:
    return None if end is None else round(end - start, 6)
