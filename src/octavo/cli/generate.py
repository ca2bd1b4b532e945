"""`octavo generate`: continue prompts."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, replace
from typing import IO, Any

import click

from octavo.bench.memory_use import MemoryUse
from octavo.bench.tables import columns, show
from octavo.cli.options import engine_options, sampling_options
from octavo.cli.session import dim, make_sampling_params, show_log, summary
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import RequestFailed
from octavo.llm import LLM
from octavo.outputs import RequestOutput, SequenceOutput
from octavo.sampling_params import BeamSearchParams, SamplingParams, beam_defaults

# Sampling options that beam search has, too.
BEAM_OPTIONS = ("min_tokens", "max_tokens", "ignore_eos", "repetition_penalty")


@click.command()
@click.argument("prompts", nargs=-1, metavar="[PROMPT]...")
@click.option("--model", default="demo", show_default=True, help="A MODEL.")
@click.option(
    "--file", type=click.File(encoding="utf-8-sig"), help="One prompt per line; - is stdin."
)
@sampling_options(max_tokens=64)
@click.option("--beam-width", type=int, help="Beam search with this many beams.")
@click.option("--length-penalty", type=float, help="Beam search: above 0 favours long outputs.")
@click.option(
    "--early-stopping",
    type=click.Choice(["true", "false", "never"]),
    help="Beam search: when to stop looking for better beams.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per request, on stdout.")
@click.option("--quiet", is_flag=True, help="Print the outputs and nothing else.")
@click.option("--verbose", is_flag=True, help="Also say why requests are preempted.")
@engine_options(without=("seed",))
def generate(
    prompts: tuple[str, ...],
    model: str,
    file: IO[str] | None,
    as_json: bool,
    quiet: bool,
    verbose: bool,
    sampling: dict[str, Any],
    engine: dict[str, Any],
    **beam: Any,
) -> None:
    """Continue each PROMPT; without any, the lines of --file or of stdin.

    Sampling options that are not given come from the model's generation_config.json.
    """
    beam_params = make_beam_params(beam, sampling)
    SamplingParams(**sampling)  # refuses bad values before a model is loaded
    texts = read_prompts(prompts, file)
    show_log(quiet, verbose)
    with LLM(model, owns_process=True, **engine) as llm:
        memory = MemoryUse.watch(llm.engine)
        start = time.perf_counter()
        progress = not quiet and sys.stderr.isatty()
        if beam_params is not None:
            defaults = beam_defaults(llm.engine.model_config.sampling_defaults)
            beam_params = replace(beam_params, **{**defaults, **sampling})
            outputs = llm.beam_search(texts, beam_params, use_tqdm=progress)
        else:
            params = make_sampling_params(llm, sampling)
            outputs = llm.generate(texts, params, use_tqdm=progress)
        seconds = time.perf_counter() - start
        continues = llm.engine.model_config.encoder is None
        for output in outputs:
            if as_json:
                click.echo(json.dumps(asdict(output), ensure_ascii=False))
            else:
                print_output(output, llm.tokenizer, continues)
        if not quiet:
            num_tokens = sum(len(o.token_ids) for output in outputs for o in output.outputs)
            click.echo(dim(summary(llm.engine, memory, num_tokens, seconds)), err=True)
    for number, output in enumerate(outputs, start=1):
        if output.error is not None:
            raise RequestFailed(f"prompt {number} of {len(outputs)} has failed: {output.error}")


def read_prompts(prompts: tuple[str, ...], file: IO[str] | None) -> list[str]:
    """The arguments, or the non-blank lines of a file or pipe."""
    if prompts and file is not None:
        raise click.UsageError("give either PROMPTs or --file, not both")
    if prompts:
        return list(prompts)
    if file is None:
        if sys.stdin.isatty():
            raise click.UsageError("give a PROMPT, or --file, or pipe lines in")
        file = sys.stdin
    try:
        lines = [line.rstrip("\r\n") for line in file]
    except (OSError, UnicodeDecodeError) as error:  # a directory, a binary file
        raise click.UsageError(f"{file.name}: it is not UTF-8 text ({error})") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise click.UsageError("there is no prompt: all lines are blank")
    return texts


def make_beam_params(beam: dict[str, Any], sampling: dict[str, Any]) -> BeamSearchParams | None:
    """None if no beam search option was given; sampling options beside one are refused."""
    given = {name: value for name, value in beam.items() if value is not None}
    if not given:
        return None
    if "beam_width" not in given:
        raise click.UsageError(f"--{next(iter(given)).replace('_', '-')} needs --beam-width")
    for name in sampling:
        if name not in BEAM_OPTIONS:
            raise click.UsageError(f"--{name.replace('_', '-')} is of no use with --beam-width")
    if "early_stopping" in given:
        values = {"true": True, "false": False, "never": "never"}
        given["early_stopping"] = values[given["early_stopping"]]
    return BeamSearchParams(**sampling, **given)


def print_output(output: RequestOutput, tokenizer: Tokenizer | None, continues: bool) -> None:
    """The prompt with its continuation, or a list of several. An output that does not continue its
    prompt (`continues`), because the prompt was an encoder's input, has a line of its own."""
    prompt = click.style(output.prompt or "", bold=True)
    if len(output.outputs) == 1:
        [only] = output.outputs
        click.echo(prompt, nl=not continues)
        click.echo(only.text)
        print_logprobs(only, tokenizer)
    else:
        click.echo(prompt)
        for each in output.outputs:
            score = "" if each.score is None else f" (score {each.score:.4f})"
            click.echo(f"  [{each.index}]{score} {each.text}")
            print_logprobs(each, tokenizer)
    click.echo()


def print_logprobs(output: SequenceOutput, tokenizer: Tokenizer | None) -> None:
    """If they were asked for: each token's log-probability and rank, and the likeliest tokens."""
    if output.logprobs is None:
        return

    def name(token_id: int) -> str:
        text = "" if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
        return repr(text) if text else str(token_id)

    table = columns("    token", "logprob", "rank", "likeliest")
    for each in output.logprobs:
        likeliest = "  ".join(f"{name(token)} {logprob:.2f}" for token, logprob in each.top)
        table.add_row(
            f"    {name(each.token_id)}", f"{each.logprob:.4f}", str(each.rank), likeliest
        )
    table.columns[-1].justify = "left"
    show(table)
