from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.cli.main import main
from octavo.cli.options import (
    ENGINE_HELP,
    SAMPLING_HELP,
    SIZES,
    engine_options,
    integers,
    sampling_options,
    size,
)
from octavo.cli.serve import serve
from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.models.registry import FAMILIES
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http.settings import ConnectionLimits, Listening, ServerSettings

SERVE_CLASSES = (ConnectionLimits, Listening, ServerSettings, Supervision)


def test_every_field_of_the_configuration_has_an_option() -> None:
    """And so a help text: a new field without one fails here."""
    classes = (EngineConfig, CacheConfig, SchedulerConfig)
    names = {f.name for kind in classes for f in fields(kind)}
    names -= {"owns_process", "host_share", "has_usual_steps"}  # the commands' own business
    assert set(ENGINE_HELP) == names - {"model", "cache", "scheduler"}


@click.command()
@engine_options()
@sampling_options(without=("seed",), max_tokens=64)
def both(engine: dict[str, Any], sampling: dict[str, Any]) -> None:
    click.echo(json.dumps([engine, sampling]))


def values_of(*args: str) -> tuple[dict[str, Any], dict[str, Any]]:
    engine, sampling = json.loads(CliRunner().invoke(both, args, catch_exceptions=False).stdout)
    return engine, sampling


def test_only_what_is_given_is_passed_on() -> None:
    assert values_of() == ({}, {"max_tokens": 64})
    engine = {
        "kv_cache_memory": 4 << 30,
        "enable_prefix_caching": False,
        "overlap": True,
        "preemption_mode": "swap",
        "watermark": 0.0,
    }
    flags = ("--kv-cache-memory=4GiB", "--no-prefix-caching", "--overlap", "--watermark=0")
    assert values_of(*flags, "--preemption-mode=swap")[0] == engine
    sampling = {"max_tokens": 7, "stop": ["a", "b"], "ignore_eos": True}
    assert values_of("--max-tokens=7", "--stop=a", "--stop=b", "--ignore-eos")[1] == sampling


def test_every_option_has_the_type_of_its_field() -> None:
    by_name = {parameter.name: parameter for parameter in both.params}
    assert by_name.keys() == ENGINE_HELP.keys() | SAMPLING_HELP.keys()
    for name, kind in (("temperature", click.FLOAT), ("top_k", click.INT), ("device", None)):
        option = by_name[name]
        assert isinstance(option.type, click.Choice) if kind is None else option.type is kind


@pytest.mark.parametrize(
    ("option", "default"),
    [
        ("kv_cache_memory", None),
        ("swap_space", "1.00 GiB"),
        ("block_size", "16"),
        ("enable_prefix_caching", "on"),
        ("ignore_eos", "off"),
        ("overlap", "on a GPU"),
        ("max_tokens", "64"),
    ],
)
def test_help_shows_defaults(option: str, default: str | None) -> None:
    [text] = [each.help for each in both.params if each.name == option]  # type: ignore[attr-defined]
    assert re.findall(r"\[default: (.*?)\]", text) == ([] if default is None else [default])


def test_the_help_of_serve_shows_the_defaults_of_its_settings() -> None:
    defaults = {f.name: f.default for kind in SERVE_CLASSES for f in fields(kind)}
    shown = {}
    for parameter in serve.params:
        found = re.search(r"\[default: ([\w.: ]+)", getattr(parameter, "help", None) or "")
        default = defaults.get(parameter.name)
        if found and isinstance(default, int | float | str) and not isinstance(default, bool):
            shown[parameter.name] = found[1]
    for name in SIZES & shown.keys():
        shown[name] = str(size(shown[name]))
    for name, text in shown.items():
        assert type(defaults[name])(text) == defaults[name], name
    assert len(shown) == 20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *(("4GiB", 4 << 30), ("1.5 MiB", 3 << 19), ("20GB", 20 * 10**9), ("2g", 2 << 30)),
        *(("7", 7), (str((1 << 63) - 1), (1 << 63) - 1)),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "4 gibs", "-1GiB", "1e9", "9EiB", "9000000TiB"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        size(text)


def test_integers() -> None:
    assert integers("512, 2048") == (512, 2048)
    with pytest.raises(click.BadParameter):
        integers("512,,2048")


def test_every_family_has_a_note() -> None:
    assert all(family.note for family in FAMILIES.values())


def test_every_command_has_a_help_text() -> None:
    def walk(command: click.Command) -> None:
        assert command.help, command.name
        for child in getattr(command, "commands", {}).values():
            walk(child)

    walk(main)
    overview = CliRunner().invoke(main, ["--help"]).stdout
    assert all(re.search(rf"^  {name} +\S", overview, re.MULTILINE) for name in main.commands)
    commands = "bench calibrate chat generate memory models plan reproduce run-batch serve simulate"
    assert set(main.commands) == set(commands.split())
