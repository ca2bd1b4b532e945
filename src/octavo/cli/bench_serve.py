"""`octavo bench serve`: load on a server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click

from octavo.bench.client_load import Call, Query, Target, served_model
from octavo.bench.serve import ServeReport, find_capacity, run_serve, serve_tables, serve_values
from octavo.bench.tables import show
from octavo.bench.traces import TraceRequest, make_prompts
from octavo.cli.bench_options import COUNT, FiniteRange, progress_bar, trace_options, trace_requests
from octavo.cli.options import option_of

LEAST_VOCABULARY = 1000  # token ids that every model has


target_option = option_of("target")


@click.command()
@target_option("--url", default="http://127.0.0.1:8000", show_default=True, help="Without /v1.")
@target_option("--model", help="[default: the first that the server offers]")
@target_option("--api-key", envvar="OCTAVO_API_KEY", help="Also read from OCTAVO_API_KEY.")
@target_option(
    "--endpoint",
    type=click.Choice(["completions", "chat"]),
    default="completions",
    show_default=True,
    help="Chat prompts are text, so their lengths are only about right.",
)
@trace_options
@click.option(
    "--scale",
    type=FiniteRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Shorten all prompts and outputs: a long trace on a small machine.",
)
@click.option(
    "--request-rate",
    "rates",
    default="inf",
    show_default=True,
    help="Requests per second (Poisson), inf for all at once; several: 1,2,4.",
)
@click.option(
    "--overload",
    type=FiniteRange(0, min_open=True),
    help="Find the server's capacity first, then send this many times as much.",
)
@click.option("--max-concurrency", type=click.IntRange(1), help="Open requests, at most.")
@target_option("--n", type=click.IntRange(1), default=1, show_default=True, help="Samples.")
@target_option("--temperature", type=float, help="[default: 0, or 1 if n is more than 1]")
@target_option(
    "--stop-at-eos",
    "ignore_eos",
    flag_value=False,
    default=True,
    help="Let outputs end early; else ignore_eos is sent.",
)
@click.option("--vocab-size", type=COUNT, default=LEAST_VOCABULARY, show_default=True)
@target_option("--timeout", type=FiniteRange(1), default=600.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Only the JSON line, which always is last.")
def serve(
    trace: Path | None,
    num_prompts: int | None,
    input_len: int | None,
    output_len: int | None,
    scale: float,
    rates: str,
    overload: float | None,
    max_concurrency: int | None,
    vocab_size: int,
    seed: int,
    as_json: bool,
    target: dict[str, Any],
) -> None:
    """Send requests to a server and time their tokens: TTFT, TPOT, ITL, end to end.

    Prompts are random token ids. Refusals (429, 503) are counted apart from failures.
    """
    if overload is not None and rates != "inf":
        raise click.UsageError("--overload finds the rate by itself: leave out --request-rate")
    wanted = _rates(rates)
    queries = make_queries(
        trace_requests(trace, num_prompts, input_len, output_len), vocab_size, seed, scale
    )
    target.setdefault("temperature", 0.0 if target["n"] == 1 else 1.0)
    if "model" not in target:
        target["model"] = asyncio.run(served_model(target["url"], target.get("api_key")))
    server = Target(**target)
    capacity = None
    if overload is not None:
        capacity = asyncio.run(find_capacity(server, queries, seed))
        wanted = [overload * capacity]
        if not as_json:
            click.echo(f"{'capacity':<24}{capacity:.2f} requests/s\n")
    values = []
    for rate in wanted:
        report = _run(server, queries, rate, seed, max_concurrency)
        values.append(serve_values(report))
        if not as_json:
            show(*serve_tables(report), "")
    settings = {
        "model": server.model,
        "endpoint": server.endpoint,
        "trace": trace and trace.name,
        "num_prompts": len(queries),
        "scale": scale,
        "n": server.n,
        "temperature": server.temperature,
        "max_concurrency": max_concurrency,
        "overload": overload,
        "capacity": capacity,
        "seed": seed,
    }
    click.echo(json.dumps({"settings": settings, "runs": values}))


def make_queries(requests: Any, vocab_size: int, seed: int, scale: float = 1.0) -> list[Query]:
    """Random prompts of the requests' lengths, which `scale` shortens."""
    scaled = [
        TraceRequest(
            max(1, round(scale * request.prompt_tokens)),
            max(1, round(scale * request.output_tokens)),
        )
        for request in requests
    ]
    prompts = make_prompts(scaled, vocab_size, seed)
    return [Query(prompt, each.output_tokens) for prompt, each in zip(prompts, scaled, strict=True)]


def _run(
    target: Target, queries: list[Query], rate: float, seed: int, max_concurrency: int | None
) -> ServeReport:
    with progress_bar(len(queries), "requests") as bar:

        def finished(call: Call) -> None:
            bar.update()

        return asyncio.run(run_serve(target, queries, rate, seed, max_concurrency, finished))


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(rate > 0 for rate in rates):
        raise click.UsageError(f"--request-rate: {text!r} is not a list of numbers above 0")
    return rates
