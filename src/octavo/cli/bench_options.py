"""What the benchmarks of an engine and of a server have in common: requests, and a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from octavo.bench.traces import TraceRequest

Command = TypeVar("Command", bound=Callable[..., Any])

DEFAULT_NUM_PROMPTS = 100
DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 64


def trace_options(command: Command) -> Command:
    """Adds --trace, --num-prompts, --input-len and --output-len."""
    for option in (
        click.option(
            "--output-len", type=click.IntRange(1), help="Output tokens, without a trace."
        ),
        click.option("--input-len", type=click.IntRange(1), help="Prompt tokens, without a trace."),
        click.option(
            "--num-prompts", type=click.IntRange(1), help="Requests; of a trace, the first ones."
        ),
        click.option(
            "--trace",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Lengths of prompts and outputs: .csv or .jsonl, or with .gz.",
        ),
    ):
        command = option(command)
    return command


def trace_requests(
    trace: Path | None, num_prompts: int | None, input_len: int | None, output_len: int | None
) -> list[TraceRequest]:
    """The first requests of a trace, or requests of equal lengths.

    Raises UsageError if both a trace and lengths are given, TraceError for a broken file.
    """
    from octavo.bench.traces import TraceRequest, read_trace

    if trace is None:
        one = TraceRequest(input_len or DEFAULT_INPUT_LEN, output_len or DEFAULT_OUTPUT_LEN)
        return [one] * (num_prompts or DEFAULT_NUM_PROMPTS)
    if input_len or output_len:
        raise click.UsageError("--trace brings lengths: leave out --input-len and --output-len")
    return read_trace(trace, num_prompts)


def progress_bar(total: int, unit: str) -> Any:
    """On a terminal, and cleared when it ends."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), leave=False)
