"""`octavo models`: what is supported."""

from __future__ import annotations

import json
from typing import get_args

import click

from octavo.bench.tables import columns, show

# What each family's reader takes of its variants.
NOTES = {
    "gpt2": "GPT-2, DistilGPT2 and kin; learned positions",
    "opt": "OPT 125m to 66b and 350m (its projections and late norms)",
    "llama": "Llama 1, 2, 3.x, TinyLlama, SmolLM; rope default, linear, dynamic, llama3, yarn",
    "mistral": "Mistral 7B; sliding window",
    "qwen2": "Qwen2, Qwen2.5; full attention, or sliding windows in some layers",
    "qwen3": "Qwen3 (dense); query and key norms",
}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def models(as_json: bool) -> None:
    """List the model families and the options that octavo knows."""
    from octavo.config import DTypeName, LoadFormat, PolicyName, PreemptionMode
    from octavo.models.families import FAMILIES
    from octavo.models.registry import MODELS

    if as_json:
        families = {
            name: {"architecture": family.architecture, "note": NOTES.get(name, "")}
            for name, family in FAMILIES.items()
        }
        click.echo(json.dumps(families))
        return
    table = columns("model_type", "architecture", "code", "")
    for column in table.columns:
        column.justify = "left"
    for name, family in FAMILIES.items():
        code = MODELS[family.architecture]
        table.add_row(name, family.architecture, code, NOTES.get(name, ""))
    show(table)
    click.echo(
        "\nWeights: safetensors, whole or sharded, tied or untied embeddings. Tokenizer: "
        "tokenizer.json.\n"
        f"dtype: {', '.join(get_args(DTypeName))} (float16 not on CPUs). "
        f"load-format: {', '.join(get_args(LoadFormat))}.\n"
        f"policy: {', '.join(get_args(PolicyName))}. "
        f"preemption-mode: {', '.join(get_args(PreemptionMode))}."
    )
