"""`octavo reproduce`: runs the command of octavo_paper, a distribution of its own."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import click

from octavo.errors import OctavoError


@click.command(add_help_option=False, context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def reproduce(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Draw the paper's figures, with a table of how far our numbers are from the paper's."""
    if find_spec("octavo_paper") is None:
        raise OctavoError(
            "the paper's figures are not installed: "
            "run `pip install ./demo ./paper` in a checkout of octavo"
        )
    command: click.Command = import_module("octavo_paper.command").reproduce
    with command.make_context(context.info_name, list(arguments), context.parent) as its_context:
        command.invoke(its_context)
