"""Options that several commands share; each command receives a group of them as one dict.

An option that is not given is not in the dict, so that its default lives in one place: the
dataclass that holds its value, which also knows its type.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.errors import shown
from octavo.memory_budget import format_bytes
from octavo.registry import ATTENTION_BACKENDS, EXECUTORS, MEMORY_POLICIES, POLICIES
from octavo.sampling_params import SamplingParams

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]


def field_texts(*classes: type) -> dict[str, str]:
    """The docstrings below the classes' fields, on one line each."""
    texts: dict[str, str] = {}
    for kind in classes:
        [body] = ast.parse(inspect.getsource(kind)).body
        assert isinstance(body, ast.ClassDef)
        for statement, after in pairwise(body.body):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts[name] = " ".join(text.split()).replace("`", "")
    return texts


ENGINE_CLASSES = (EngineConfig, CacheConfig, SchedulerConfig)
NO_OPTIONS = {"model", "cache", "scheduler", "owns_process", "host_share", "has_usual_steps"}
ENGINE_HELP = {
    name: text for name, text in field_texts(*ENGINE_CLASSES).items() if name not in NO_OPTIONS
}
SAMPLING_TEXTS = field_texts(SamplingParams)
SAMPLING_HELP = {
    name: SAMPLING_TEXTS[name]
    for name in (
        *("n", "temperature", "top_k", "top_p", "min_p", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "min_tokens", "max_tokens", "stop"),
        *("ignore_eos", "seed", "logprobs"),
    )
}
SIZES = {"kv_cache_memory", "swap_space", "max_body_bytes", "max_file_bytes"}
FLAGS = {
    "max_body_bytes": "--max-body",
    "max_file_bytes": "--max-file",
}  # of options that are not called as their fields are
# Options whose values are names of implementations; plugins add to these.
NAMED = {
    "attention_backend": ("auto", *ATTENTION_BACKENDS.builtin),
    "executor": ("auto", *EXECUTORS.builtin),
    "memory_policy": MEMORY_POLICIES.builtin,
    "policy": POLICIES.builtin,
}

UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for suffix, base in (("ib", 1024), ("b", 1000), ("", 1024))
}

MAX_SIZE = 1 << 63  # bytes


def size(text: str) -> int:
    """A number of bytes: `4GiB`, `512MiB`, `20GB`, `1048576`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in UNITS:
        raise click.BadParameter(f"{text!r} is not a size such as 4GiB, 512MiB or 1048576")
    num_bytes = int(Fraction(found[1]) * UNITS[found[2]])  # exact, and of any length
    if num_bytes > MAX_SIZE:
        raise click.BadParameter(f"{shown(text)} is more than 8 EiB")
    return num_bytes


def integers(text: str) -> tuple[int, ...]:
    """Positive integers with commas between them: `512,2048`."""
    parts = text.replace(" ", "").split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{text!r} is not a list of positive integers such as 512,2048")
    return tuple(int(part) for part in parts)


def option_of(group: str, **defaults: Any) -> Callable[..., Decorator]:
    """A `click.option` whose value goes into a dict `group` that the command receives.

    Options that are not given leave the dict at its `defaults`.
    """

    def collect(context: click.Context, option: click.Parameter, value: Any) -> None:
        values = context.params.setdefault(group, dict(defaults))
        if value not in (None, ()):
            values[option.name] = value

    return functools.partial(click.option, expose_value=False, callback=collect)


def together(*options: Decorator) -> Decorator:
    """One decorator of several, as if they stood below each other."""
    return lambda command: functools.reduce(lambda made, add: add(made), reversed(options), command)


def engine_options(*names: str, without: tuple[str, ...] = ()) -> Decorator:
    """The options of an engine, or those named, as a dict `engine` for `make_config`."""
    wanted = [name for name in names or ENGINE_HELP if name not in without]
    return field_options("engine", ENGINE_CLASSES, {name: ENGINE_HELP[name] for name in wanted})


def sampling_options(*, without: tuple[str, ...] = (), **defaults: Any) -> Decorator:
    """The options of sampling, as a dict `sampling` for SamplingParams.

    `defaults` replace those of SamplingParams.
    """
    wanted = {name: text for name, text in SAMPLING_HELP.items() if name not in without}
    return field_options("sampling", (SamplingParams,), wanted, **defaults)


def field_options(
    group: str, classes: tuple[type, ...], help_texts: Mapping[str, str], **defaults: Any
) -> Decorator:
    """An option per help text, with the type of the dataclasses' field and its default, as a dict
    `group`; `defaults` replace those of the classes. Where a default is None, the text ends with
    what that means: "None: ..."."""
    hints = {name: hint for kind in classes for name, hint in get_type_hints(kind).items()}
    usual = {field.name: field.default for kind in classes for field in fields(kind)}
    option, options = option_of(group, **defaults), []
    for name, text in help_texts.items():
        text, _, meaning = text.partition(" None: ")
        flag = FLAGS.get(name, f"--{name.replace('_', '-')}")
        default = defaults.get(name, usual[name])
        if default is None:
            default = meaning.rstrip(".")
        # `int | None` means int here: an option that is not given has no value.
        hint = hints[name]
        kind = hint if get_origin(hint) is Literal else (get_args(hint) or [hint])[0]
        settings: dict[str, Any] = {"type": kind}
        if kind is bool:
            flag = flag.replace("--enable-", "--")
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
            default = {True: "on", False: "off"}.get(default, default)
        elif name in NAMED:
            settings["metavar"] = f"[{'|'.join(NAMED[name])}]"
        elif get_origin(kind) is Literal:
            settings["type"] = click.Choice(get_args(kind))
        elif name in SIZES:
            settings["type"] = size
            text += " A size such as 4GiB."
            default = format_bytes(default) if isinstance(default, int) else default
        elif name == "stop":
            settings["multiple"] = True
            text += " May be given several times."
        elif isinstance(default, float):
            default = f"{default:g}"
        if default not in ("", ()):
            text += f"  [default: {default}]"
        options.append(option(flag, name, default=None, help=text, **settings))
    return together(*options)
