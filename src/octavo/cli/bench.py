"""`octavo bench`: measure an engine on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from octavo.cli.bench_serve import serve
from octavo.cli.options import engine_options
from octavo.cli.session import show_log

if TYPE_CHECKING:
    from octavo.bench.traces import TraceRequest

DEFAULT_NUM_PROMPTS = 100
DEFAULT_INPUT_LEN = 128
DEFAULT_OUTPUT_LEN = 64


@click.group()
def bench() -> None:
    """Measure throughput, latency and memory waste.

    Prompts are random tokens and every output has its full length. With --load-format dummy a
    directory with only a config.json will do for a model.
    """


@bench.command()
@click.option("--model", default="demo", show_default=True, help="A MODEL.")
@click.option(
    "--trace",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Lengths of prompts and outputs: .csv or .jsonl, or with .gz.",
)
@click.option("--num-prompts", type=click.IntRange(1), help="Requests; of a trace, the first ones.")
@click.option("--input-len", type=click.IntRange(1), help="Tokens in a prompt, without a trace.")
@click.option("--output-len", type=click.IntRange(1), help="Tokens in an output, without a trace.")
@click.option(
    "--hash-block-size",
    type=click.IntRange(1, 1 << 20),
    default=512,
    show_default=True,
    help="Tokens behind one of a trace's hash_ids.",
)
@click.option("--skip-long", is_flag=True, help="Leave out requests longer than max-model-len.")
@click.option("--n", type=int, default=1, show_default=True, help="Samples per prompt.")
@click.option("--beam-width", type=int, help="Beam search with this many beams.")
@click.option("--temperature", type=float, help="[default: 0, or 1 if n is more than 1]")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@engine_options()
def throughput(
    model: str,
    trace: Path | None,
    num_prompts: int | None,
    input_len: int | None,
    output_len: int | None,
    hash_block_size: int,
    skip_long: bool,
    n: int,
    beam_width: int | None,
    temperature: float | None,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Queue all requests at once and time them until the last is done."""
    from octavo.bench.report import throughput_text, throughput_values
    from octavo.bench.throughput import Decoding, run_throughput, split_by_fit
    from octavo.llm import LLM

    if trace is not None and (input_len or output_len):
        raise click.UsageError("--trace brings lengths: leave out --input-len and --output-len")
    requests = trace_requests(trace, num_prompts, input_len, output_len)
    decoding = Decoding(n, temperature, beam_width)
    decoding.params(1, 0)  # refuses what cannot be, before a model is loaded
    show_log(quiet=as_json, verbose=False)
    with LLM(model, owns_process=True, **engine) as llm:
        fitting, num_skipped = split_by_fit(llm.engine, requests, skip_long)
        with progress_bar(len(fitting), "requests") as bar:
            seed = engine.get("seed", 0)
            report = run_throughput(
                llm.engine, fitting, decoding, seed, hash_block_size, lambda _: bar.update()
            )
    report.skipped = num_skipped
    report.settings = {
        "model": model,
        "trace": trace and trace.name,
        "n": n,
        "beam_width": beam_width,
        **engine,
    }
    click.echo(json.dumps(throughput_values(report)) if as_json else throughput_text(report))


@bench.command()
@click.option("--model", default="demo", show_default=True, help="A MODEL.")
@click.option("--input-len", type=click.IntRange(1), default=32, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--batch-size", type=click.IntRange(1), default=8, show_default=True)
@click.option("--n", type=int, default=1, show_default=True, help="Samples per prompt.")
@click.option("--beam-width", type=int, help="Beam search with this many beams.")
@click.option("--num-warm-up", type=click.IntRange(0), default=3, show_default=True)
@click.option("--num-iterations", type=click.IntRange(1), default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@engine_options()
def latency(
    model: str,
    input_len: int,
    output_len: int,
    batch_size: int,
    n: int,
    beam_width: int | None,
    num_warm_up: int,
    num_iterations: int,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Time one batch from its arrival to its last token, several times over."""
    from octavo.bench.latency import Batch, run_latency
    from octavo.bench.report import latency_text, latency_values
    from octavo.bench.throughput import Decoding, split_by_fit
    from octavo.bench.traces import TraceRequest
    from octavo.llm import LLM

    batch = Batch(batch_size, input_len, output_len, Decoding(n, None, beam_width))
    batch.decoding.params(1, 0)
    show_log(quiet=as_json, verbose=False)
    with LLM(model, owns_process=True, **engine) as llm:
        split_by_fit(llm.engine, [TraceRequest(input_len, output_len)], skip_long=False)
        with progress_bar(num_warm_up + num_iterations, "batches") as bar:
            report = run_latency(
                llm.engine, batch, num_warm_up, num_iterations, engine.get("seed", 0), bar.update
            )
    report.settings = {
        "model": model,
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        "n": n,
        "beam_width": beam_width,
        **engine,
    }
    click.echo(json.dumps(latency_values(report)) if as_json else latency_text(report))


def trace_requests(
    trace: Path | None, num_prompts: int | None, input_len: int | None, output_len: int | None
) -> list[TraceRequest]:
    """The first requests of a trace, or equal ones."""
    from octavo.bench.traces import TraceRequest, read_trace

    if trace is not None:
        return read_trace(trace, num_prompts)
    one = TraceRequest(input_len or DEFAULT_INPUT_LEN, output_len or DEFAULT_OUTPUT_LEN)
    return [one] * (num_prompts or DEFAULT_NUM_PROMPTS)


def progress_bar(total: int, unit: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, disable=not sys.stderr.isatty(), leave=False)


bench.add_command(serve)
