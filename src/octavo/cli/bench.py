"""`octavo bench`: measure an engine on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import click

from octavo.bench.latency import Batch, run_latency
from octavo.bench.report import latency_table, throughput_tables, throughput_values
from octavo.bench.tables import show
from octavo.bench.throughput import Decoding, run_throughput, split_by_fit
from octavo.bench.traces import TraceRequest
from octavo.cli.bench_options import (
    COUNT,
    decoding_options,
    progress_bar,
    trace_options,
    trace_requests,
)
from octavo.cli.bench_serve import serve
from octavo.cli.options import engine_options
from octavo.cli.session import show_log
from octavo.llm import LLM

STRUCTURED_ROUNDS = 4  # of a run without a schema and one with it; the first is not counted


@click.group()
def bench() -> None:
    """Measure throughput, latency and memory waste.

    Prompts are random tokens and every output has its full length. With --load-format dummy a
    directory with only a config.json will do for a model.
    """


@bench.command()
@click.option("--model", default="demo", show_default=True, help="A MODEL.")
@trace_options
@click.option(
    "--hash-block-size",
    type=click.IntRange(1, 1 << 20),
    default=512,
    show_default=True,
    help="Tokens behind one of a trace's hash_ids.",
)
@click.option("--skip-long", is_flag=True, help="Leave out requests longer than max-model-len.")
@decoding_options
@click.option(
    "--structured",
    is_flag=True,
    help="Every output keeps to a JSON schema; measured in turns with runs without one.",
)
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
    decoding: dict[str, Any],
    structured: bool,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Queue all requests at once and time them until the last is done."""
    requests = trace_requests(trace, num_prompts, input_len, output_len)
    how = Decoding(**decoding, structured=structured)
    how.params(1, 0)  # refuses bad values before a model is loaded
    show_log(quiet=as_json, verbose=False)
    with LLM(model, owns_process=True, **engine) as llm:
        fitting, num_skipped = split_by_fit(llm.engine, requests, skip_long)
        # In turns, because the machine may become faster or slower, and the first is to warm up.
        runs = [replace(how, structured=False), how] * STRUCTURED_ROUNDS if structured else [how]
        with progress_bar(len(fitting) * len(runs), "requests") as bar:
            seed = engine.get("seed", 0)
            reports = [
                run_throughput(
                    llm.client, fitting, each, seed + i, hash_block_size, lambda _: bar.update()
                )
                for i, each in enumerate(runs)
            ]
    report = reports[-1]
    if structured:
        rates = [each.output_tokens_per_second for each in reports[2:]]
        shares = [own / plain for plain, own in zip(rates[::2], rates[1::2], strict=True)]
        report.share_of_unstructured = median(shares)
    report.skipped = num_skipped
    report.settings = {"model": model, "trace": trace and trace.name, **asdict(how), **engine}
    if as_json:
        click.echo(json.dumps(throughput_values(report)))
    else:
        show(*throughput_tables(report))


@bench.command()
@click.option("--model", default="demo", show_default=True, help="A MODEL.")
@click.option("--input-len", type=click.IntRange(1), default=32, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--batch-size", type=COUNT, default=8, show_default=True)
@decoding_options
@click.option("--num-warm-up", type=click.IntRange(0), default=3, show_default=True)
@click.option("--num-iterations", type=click.IntRange(1), default=10, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@engine_options()
def latency(
    model: str,
    input_len: int,
    output_len: int,
    batch_size: int,
    decoding: dict[str, Any],
    num_warm_up: int,
    num_iterations: int,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Time one batch from its arrival to its last token, several times over."""
    batch = Batch(batch_size, input_len, output_len, Decoding(**decoding))
    batch.decoding.params(1, 0)
    show_log(quiet=as_json, verbose=False)
    with LLM(model, owns_process=True, **engine) as llm:
        split_by_fit(llm.engine, [TraceRequest(input_len, output_len)], skip_long=False)
        with progress_bar(num_warm_up + num_iterations, "batches") as bar:
            report = run_latency(
                llm.client, batch, num_warm_up, num_iterations, engine.get("seed", 0), bar.update
            )
    report.settings = {
        "model": model,
        "input_len": input_len,
        "output_len": output_len,
        "batch_size": batch_size,
        **asdict(batch.decoding),
        **engine,
    }
    if as_json:
        click.echo(json.dumps(asdict(report)))
    else:
        show(latency_table(report))


bench.add_command(serve)
