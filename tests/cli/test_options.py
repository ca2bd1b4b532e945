from __future__ import annotations

from dataclasses import fields

import click
import pytest

from octavo.cli.main import main
from octavo.cli.models import NOTES
from octavo.cli.options import ENGINE_CLASSES, ENGINE_HELP, integers, size
from octavo.models.registry import FAMILIES


def test_every_field_of_the_configuration_has_an_option() -> None:
    """And so a help text: a new field without one fails here."""
    names = {f.name for kind in ENGINE_CLASSES for f in fields(kind)}
    names -= {"owns_process", "has_usual_steps"}  # the commands' own business
    assert set(ENGINE_HELP) == names - {"model", "cache", "scheduler"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("20GB", 20 * 10**9), ("2g", 2 << 30), ("7", 7)],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4 gibs", "-1GiB", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        size(text)


def test_integers() -> None:
    assert integers("512, 2048") == (512, 2048)
    with pytest.raises(click.BadParameter):
        integers("512,,2048")


def test_every_family_has_a_note() -> None:
    assert set(NOTES) == set(FAMILIES)


def test_every_command_has_a_help_text() -> None:
    def walk(command: click.Command) -> None:
        assert command.help, command.name
        for child in getattr(command, "commands", {}).values():
            walk(child)

    walk(main)
    commands = "bench calibrate chat generate memory models plan reproduce run-batch serve simulate"
    assert set(main.commands) == set(commands.split())
