"""Options that several commands share; each command receives a group of them as one dict.

An option that is not given is not in the dict, so that its default lives in one place: the
dataclass that holds its value, which also knows its type.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.memory_budget import format_bytes
from octavo.registry import ATTENTION_BACKENDS, EXECUTORS, MEMORY_POLICIES, POLICIES
from octavo.sampling_params import SamplingParams

Command = Callable[..., Any]
Decorator = Callable[[Command], Command]

ENGINE_HELP = {
    "dtype": "Type of weights, activations and KV cache.",
    "load_format": "dummy: random weights, made from config.json alone.",
    "max_model_len": "Longest sequence in tokens, prompt and output.",
    "device": "Where the model runs; auto takes a GPU if there is one.",
    "cuda_graphs": "Capture steps on a GPU at the start, and replay them.",
    "attention_backend": "Which attention implementation; auto takes the fast one.",
    "executor": "What computes the steps; local: one device, in the engine's process; sharded: a "
    "process for each of several; auto: by --tensor-parallel-size.",
    "tensor_parallel_size": "GPUs that share every layer of the model.",
    "rank_timeout": "Seconds that a step on several GPUs may take until it counts as hanging.",
    "seed": "Seed of requests that bring none, and of dummy weights.",
    "max_logprobs": "Largest number of log-probabilities that a request may ask for.",
    "num_threads": "CPU threads of the worker.",
    "overlap": "Plan the next step while the device computes this one.  [default: on a GPU]",
    "block_size": "Tokens in a KV block.",
    "num_blocks": "KV blocks in the pool, instead of as many as the memory allows.",
    "kv_cache_memory": "Memory for the KV pool on each device, such as 4GiB.",
    "gpu_memory_utilization": "Fraction of a GPU's memory that octavo may use.",
    "swap_space": "Host memory for swapped-out blocks, such as 4GiB.",
    "enable_prefix_caching": "Reuse the KV of equal prefixes.",
    "memory_policy": "Who gets KV blocks: paged takes them on demand, the others reserve ahead.",
    "max_num_seqs": "Sequences that run at once.",
    "max_num_batched_tokens": "Tokens computed in one step. Without this and --max-num-seqs, a GPU "
    "of 70 GB or more computes up to 8192 tokens of up to 1024 sequences.",
    "policy": "Which requests run first; fair: those of the tenant that was served least.",
    "aging_seconds": "Priority policy: waiting this long raises a request one level.",
    "preemption_mode": "How blocks are freed when they run out; auto takes the cheaper way.",
    "enable_chunked_prefill": "Compute long prompts in chunks, beside running decodes.",
    "max_passes": "Requests that may overtake one that does not fit.",
    "watermark": "Fraction of the pool kept free when a request is admitted.",
}
SAMPLING_HELP = {
    "n": "Samples per prompt; they share the prompt's KV blocks.",
    "temperature": "0 is greedy.",
    "top_k": "Draw from the k most likely tokens; 0: from all.",
    "top_p": "Draw from the most likely tokens that have this probability together.",
    "min_p": "Draw from tokens at least this likely, relative to the likeliest.",
    "presence_penalty": "Penalizes tokens that the output already has.",
    "frequency_penalty": "The same, once per occurrence.",
    "repetition_penalty": "Divides the scores of tokens that prompt or output have.",
    "min_tokens": "Shortest output.",
    "max_tokens": "Longest output.",
    "stop": "End at this text; may be given several times.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "seed": "Makes draws repeatable.",
    "logprobs": "Report log-probabilities: the token's and those of the k likeliest.",
}
SIZES = {"kv_cache_memory", "swap_space"}
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


def size(text: str) -> int:
    """A number of bytes: `4GiB`, `512MiB`, `20GB`, `1048576`."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in UNITS:
        raise click.BadParameter(f"{text!r} is not a size such as 4GiB, 512MiB or 1048576")
    return int(float(found[1]) * UNITS[found[2]])


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
    classes = (EngineConfig, CacheConfig, SchedulerConfig)
    wanted = [name for name in names or ENGINE_HELP if name not in without]
    return together(*_field_options("engine", classes, {n: ENGINE_HELP[n] for n in wanted}, {}))


def sampling_options(*, without: tuple[str, ...] = (), **defaults: Any) -> Decorator:
    """The options of sampling, as a dict `sampling` for SamplingParams.

    `defaults` replace those of SamplingParams.
    """
    wanted = {name: text for name, text in SAMPLING_HELP.items() if name not in without}
    return together(*_field_options("sampling", (SamplingParams,), wanted, defaults))


def _field_options(
    group: str,
    classes: tuple[type, ...],
    help_texts: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> Iterator[Decorator]:
    """An option per help text, with the type of the dataclasses' field, and its default."""
    hints = {name: hint for kind in classes for name, hint in get_type_hints(kind).items()}
    usual = {field.name: field.default for kind in classes for field in fields(kind)}
    option = option_of(group, **defaults)
    for name, text in help_texts.items():
        flag = f"--{name.replace('_', '-')}"
        default = defaults.get(name, usual[name])
        # `int | None` means int here: an option that is not given has no value.
        [kind, *_] = get_args(hints[name]) or [hints[name]]
        settings: dict[str, Any] = {"type": kind}
        if kind is bool:
            flag = flag.replace("--enable-", "--")
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
            default = {True: "on", False: "off"}.get(default)
        elif name in NAMED:
            settings["metavar"] = f"[{'|'.join(NAMED[name])}]"
        elif get_origin(hints[name]) is Literal:
            settings["type"] = click.Choice(get_args(hints[name]))
        elif name in SIZES:
            settings["type"] = size
            default = default and format_bytes(default)
        elif name == "stop":
            settings["multiple"] = True
        if default not in (None, ()):
            text += f"  [default: {default}]"
        yield option(flag, name, default=None, help=text, **settings)
