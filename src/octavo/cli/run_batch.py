"""`octavo run-batch`: a file of requests in, a file of replies out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from octavo.cli.options import engine_options
from octavo.cli.session import dim
from octavo.config import make_config
from octavo.errors import EngineFailed
from octavo.server.http.batch import Tally, prepare
from octavo.server.http.settings import ServerSettings
from octavo.server.run import run_batch_file

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("run-batch")
@click.option(
    "-i",
    "--input",
    "input_path",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="Requests, one JSON object per line: custom_id, method, url, body.",
)
@click.option("-o", "--output", "output_path", type=FILE, required=True, help="Where replies go.")
@click.option("--model", default="demo", show_default=True, help="A MODEL.")
@click.option(
    "--served-model-name", "model_names", multiple=True, help="What the requests call the model."
)
@click.option(
    "--max-inflight",
    type=click.IntRange(min=1),
    default=256,
    show_default=True,
    help="Requests in the engine at once.",
)
@click.option("--ignore-unknown-fields", is_flag=True, help="As in octavo serve.")
@click.option("--quiet", is_flag=True, help="No progress, no summary.")
@engine_options()
def run_batch(
    input_path: Path,
    output_path: Path,
    model: str,
    model_names: tuple[str, ...],
    max_inflight: int,
    ignore_unknown_fields: bool,
    quiet: bool,
    engine: dict[str, Any],
) -> None:
    """Answer a file of requests in OpenAI's batch format.

    Replies are written as they come. After an interruption, run it again with the same files:
    requests that have a reply are skipped.
    """
    batch = prepare(input_path, output_path)
    settings = ServerSettings(model_names or (model,), ignore_unknown_fields=ignore_unknown_fields)
    with tqdm(
        total=batch.num_requests, unit="req", disable=quiet or not sys.stderr.isatty()
    ) as progress:

        def show(tally: Tally) -> None:
            progress.update(tally.num_before + tally.num_done - progress.n)

        tally = run_batch_file(make_config(model, **engine), settings, batch, max_inflight, show)
    num_answered = tally.num_done - tally.num_refused - tally.num_failed
    if not quiet:
        click.echo(
            dim(
                f"{tally.num_requests} requests: {tally.num_before} answered before, "
                f"{num_answered} answered now, {tally.num_refused} refused, "
                f"{tally.num_failed} failed"
            ),
            err=True,
        )
    if tally.num_failed:
        raise EngineFailed(f"{tally.num_failed} requests failed; run the batch again")
