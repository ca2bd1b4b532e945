"""`octavo models`: what is supported."""

from __future__ import annotations

import json
from typing import get_args

import click

from octavo.bench.tables import columns, show
from octavo.config import DTypeName, LoadFormat, ModelImpl, PreemptionMode
from octavo.models.fallback.tested import read_tested
from octavo.models.gguf import ARCHITECTURES
from octavo.models.registry import FAMILIES
from octavo.registry import POLICIES


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def models(as_json: bool) -> None:
    """List the model families and the options that octavo knows."""
    if as_json:
        families = {
            name: {"architecture": family.architecture, "note": family.note}
            for name, family in FAMILIES.items()
        }
        tested = read_tested()
        through = {"version": tested.transformers, "tested": tested.served}
        values = {"native": families, "transformers": through, "gguf": list(ARCHITECTURES)}
        click.echo(json.dumps(values))
        return
    table = columns("model_type", "architecture", "description", "")
    for column in table.columns:
        column.justify = "left"
    for name, family in FAMILIES.items():
        table.add_row(name, family.architecture, family.read.__module__, family.note)
    show(table)
    tested = read_tested()
    click.echo(
        f"\nThrough transformers (--model-impl), tested with version {tested.transformers}: "
        f"{', '.join(tested.served)}.",
    )
    click.echo(
        "\nWeights: safetensors, whole or sharded, tied or untied embeddings. Tokenizer: "
        "tokenizer.json; of T5, mT5 and Marian also SentencePiece's files.\n"
        "Encoder-decoder models have two limits: --max-model-len is the decoder's; a step takes "
        "all of an encoder's input, which may have one token less than --max-num-batched-tokens.\n"
        f"GGUF files, with their tokenizers, of the architectures {', '.join(ARCHITECTURES)}.\n"
        f"dtype: {', '.join(get_args(DTypeName))} (float16 not on CPUs). "
        f"load-format: {', '.join(get_args(LoadFormat))}. "
        f"model-impl: {', '.join(get_args(ModelImpl))}.\n"
        f"policy: {', '.join(POLICIES)}. "
        f"preemption-mode: {', '.join(get_args(PreemptionMode))}."
    )
