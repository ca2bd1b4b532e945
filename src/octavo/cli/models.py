"""`octavo models`: what is supported."""

from __future__ import annotations

import json
from typing import get_args

import click


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def models(as_json: bool) -> None:
    """List the model families and the options that octavo knows."""
    from octavo.config import DTypeName, LoadFormat, PolicyName, PreemptionMode
    from octavo.models.registry import FAMILIES

    if as_json:
        families = {
            name: {"architecture": family.architecture, "note": family.note}
            for name, family in FAMILIES.items()
        }
        click.echo(json.dumps(families))
        return
    click.echo(f"{'model_type':<12}{'architecture':<22}{'description':<32}")
    for name, family in FAMILIES.items():
        description = family.read.__module__
        click.echo(f"{name:<12}{family.architecture:<22}{description:<32}{family.note}")
    click.echo(
        "\nWeights: safetensors, whole or sharded, tied or untied embeddings. Tokenizer: "
        "tokenizer.json.\n"
        f"dtype: {', '.join(get_args(DTypeName))} (float16 not on CPUs). "
        f"load-format: {', '.join(get_args(LoadFormat))}.\n"
        f"policy: {', '.join(get_args(PolicyName))}. "
        f"preemption-mode: {', '.join(get_args(PreemptionMode))}."
    )
