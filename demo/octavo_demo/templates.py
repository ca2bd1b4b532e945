"""A template language for stories: `[this|that]` picks one, `{hero}` fills a slot; both nest."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from random import Random

# A template is a sequence of text, slots and choices; a choice is a tuple of templates.
Part = str | tuple["Template", ...]
Template = tuple[Part, ...]


@cache
def parse(text: str) -> Template:
    template, end = _parse(text, 0, "")
    assert end == len(text), f"unbalanced brackets in {text!r}"
    return template


def _parse(text: str, at: int, stop: str) -> tuple[Template, int]:
    parts: list[Part] = []
    start = at
    while at < len(text) and text[at] not in stop:
        if text[at] != "[":
            at += 1
            continue
        parts.append(text[start:at])
        choices: list[Template] = []
        while text[at] != "]":
            choice, at = _parse(text, at + 1, "|]")
            choices.append(choice)
        parts.append(tuple(choices))
        at += 1
        start = at
    parts.append(text[start:at])
    return tuple(part for part in parts if part != ""), at


def _expand(rng: Random, template: Template, out: list[str]) -> None:
    for part in template:
        if isinstance(part, str):
            out.append(part)
        else:
            _expand(rng, part[int(rng.random() * len(part))], out)


def fill(rng: Random, text: str, slots: Mapping[str, str]) -> str:
    """One of the many texts that a template stands for."""
    out: list[str] = []
    _expand(rng, parse(text), out)
    filled = "".join(out)
    while "{" in filled:  # a slot's value may hold further slots
        filled = filled.format_map(slots)
    return filled
