"""What the benchmarks of an engine and of a server have in common: requests, and a progress bar."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from octavo.bench.traces import MAX_LENGTH, TraceRequest, read_trace
from octavo.cli.options import option_of, together

decoding_option = option_of("decoding")

DEFAULT_NUM_PROMPTS = 100
DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 64
COUNT = click.IntRange(1, MAX_LENGTH)  # of requests or tokens


class FiniteRange(click.FloatRange):
    """Numbers in a range, and neither nan, which click lets pass, nor infinity."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not finite.", param, ctx)
        return number


trace_options = together(
    click.option(
        "--trace",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Lengths of prompts and outputs: .csv or .jsonl, or with .gz.",
    ),
    click.option("--num-prompts", type=COUNT, help="Requests; of a trace, the first ones."),
    click.option("--input-len", type=COUNT, help="Tokens in a prompt, without a trace."),
    click.option("--output-len", type=COUNT, help="Tokens in an output, without a trace."),
)
# As a dict `decoding` for `Decoding`.
decoding_options = together(
    decoding_option("--n", type=int, default=1, show_default=True, help="Samples per prompt."),
    decoding_option("--beam-width", type=int, help="Beam search with this many beams."),
    decoding_option("--temperature", type=float, help="[default: 0, or 1 if n is more than 1]"),
)


def trace_requests(
    trace: Path | None, num_prompts: int | None, input_len: int | None, output_len: int | None
) -> list[TraceRequest]:
    """The first requests of a trace, or requests of equal lengths.

    Raises UsageError if both a trace and lengths are given, TraceError for a broken file.
    """
    if trace is None:
        one = TraceRequest(input_len or DEFAULT_INPUT_LEN, output_len or DEFAULT_OUTPUT_LEN)
        return [one] * (num_prompts or DEFAULT_NUM_PROMPTS)
    if input_len or output_len:
        raise click.UsageError("--trace brings lengths: leave out --input-len and --output-len")
    return read_trace(trace, num_prompts)


def progress_bar(total: int, unit: str) -> Any:
    """A progress bar, on a terminal alone; it is cleared when it ends."""
    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), leave=False)
