"""Options that several commands share, made from the dataclasses that hold their values.

An option that is not given is not passed on, so that a default lives in one place: the dataclass.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import click

from octavo.config import CacheConfig, EngineConfig, SchedulerConfig
from octavo.memory_budget import format_bytes
from octavo.sampling_params import SamplingParams

Command = TypeVar("Command", bound=Callable[..., Any])

ENGINE_HELP = {
    "dtype": "Type of weights, activations and KV cache.",
    "load_format": "dummy: random weights, made from config.json alone.",
    "max_model_len": "Longest sequence in tokens, prompt and output.",
    "device": "Where the model runs; auto takes a GPU if there is one.",
    "cuda_graphs": "Capture steps on a GPU at the start, and replay them.",
    "attention_backend": "Which attention implementation; auto takes the fast one.",
    "seed": "Of requests that bring none, and of dummy weights.",
    "max_logprobs": "Most log-probabilities that a request may ask for.",
    "num_threads": "CPU threads of the worker.",
    "overlap": "Plan the next step while the device computes this one.  [default: on a GPU]",
    "block_size": "Tokens in a KV block.",
    "num_blocks": "KV blocks in the pool, instead of as many as the memory allows.",
    "kv_cache_memory": "Memory for the KV pool, such as 4GiB.",
    "gpu_memory_utilization": "Share of a GPU's memory that may be taken.",
    "swap_space": "Host memory for swapped-out blocks, such as 4GiB.",
    "enable_prefix_caching": "Reuse the KV of equal prefixes.",
    "memory_policy": "Who gets KV blocks: paged takes them on demand, the others reserve ahead.",
    "max_num_seqs": "Sequences that run at once.",
    "max_num_batched_tokens": "Tokens computed in one step. Without this and --max-num-seqs, a GPU "
    "of 70 GB or more computes up to 8192, of 1024 sequences.",
    "policy": "Who runs first.",
    "aging_seconds": "Priority policy: waiting this long raises a request one level.",
    "preemption_mode": "How blocks are freed when they run out; auto takes the cheaper way.",
    "enable_chunked_prefill": "Compute long prompts in pieces, beside running decodes.",
    "max_passes": "Requests that may overtake one that does not fit.",
    "watermark": "Share of the pool kept free when a request is admitted.",
}
SAMPLING_HELP = {
    "n": "Samples per prompt; they share the prompt's KV blocks.",
    "temperature": "0 is greedy.",
    "top_k": "Draw from the k most likely tokens; 0: from all.",
    "top_p": "Draw from the most likely tokens that have this probability together.",
    "min_p": "Draw from tokens at least this likely, relative to the likeliest.",
    "presence_penalty": "Against tokens that the output has already.",
    "frequency_penalty": "The same, once for each time.",
    "repetition_penalty": "Divides the scores of tokens seen in prompt and output.",
    "min_tokens": "No end before this many tokens.",
    "max_tokens": "Longest output.",
    "stop": "End at this text; may be given several times.",
    "ignore_eos": "Go on after the end-of-sequence token.",
    "seed": "Makes draws repeatable.",
    "logprobs": "Report log-probabilities: the token's and those of the k likeliest.",
}
ENGINE_CLASSES = (EngineConfig, CacheConfig, SchedulerConfig)
SIZES = {"kv_cache_memory", "swap_space"}


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


def engine_options(*names: str, without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Adds the options of an engine, or those named; the command gets a dict `engine`."""
    by_name = {f.name: (kind, f) for kind in ENGINE_CLASSES for f in fields(kind)}
    wanted = [name for name in names or ENGINE_HELP if name not in without]
    return _collect("engine", {name: by_name[name] for name in wanted}, ENGINE_HELP, {})


def sampling_options(
    *names: str, without: tuple[str, ...] = (), **defaults: Any
) -> Callable[[Command], Command]:
    """Adds the options of sampling, or those named; the command gets a dict `sampling`.

    `defaults` replace those of SamplingParams.
    """
    by_name = {f.name: (SamplingParams, f) for f in fields(SamplingParams)}
    wanted = [name for name in names or SAMPLING_HELP if name not in without]
    return _collect("sampling", {name: by_name[name] for name in wanted}, SAMPLING_HELP, defaults)


def _collect(
    argument: str,
    wanted: Mapping[str, tuple[type, Field[Any]]],
    help_texts: Mapping[str, str],
    defaults: Mapping[str, Any],
) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def collect(**values: Any) -> Any:
            given = {name: values.pop(f"{argument}_{name}") for name in wanted}
            given = {name: value for name, value in given.items() if value not in (None, ())}
            return command(**values, **{argument: {**defaults, **given}})

        collected: Callable[..., Any] = collect
        for name, (kind, field) in reversed(list(wanted.items())):
            default = defaults.get(name, field.default)
            add = _option(f"{argument}_{name}", kind, field, default, help_texts[name])
            collected = add(collected)
        return collected  # type: ignore[return-value]

    return decorate


def _option(
    destination: str, kind: type, field: Field[Any], default: Any, help_text: str
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """One option; its type comes from the field, and `default` is shown in its help."""
    flag = field.name.replace("_", "-")
    value_type = _without_none(get_type_hints(kind)[field.name])
    settings: dict[str, Any] = {"default": None, "help": help_text}
    if value_type is bool:
        flag = flag.removeprefix("enable-")
        state = "on" if default else "off"
        settings["help"] = f"{help_text}  [default: {state}]"
        return click.option(f"--{flag}/--no-{flag}", destination, **settings)
    if default not in (None, ()):
        shown = format_bytes(default) if field.name in SIZES else default
        settings["help"] = f"{help_text}  [default: {shown}]"
    if field.name == "stop":
        settings |= {"multiple": True, "type": str}
    elif field.name in SIZES:
        settings["type"] = size
    elif get_origin(value_type) is Literal:
        settings["type"] = click.Choice(get_args(value_type))
    else:
        settings["type"] = value_type
    return click.option(f"--{flag}", destination, **settings)


def _without_none(hint: Any) -> Any:
    """`int | None` -> `int`."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and get_origin(hint) is not Literal else hint
