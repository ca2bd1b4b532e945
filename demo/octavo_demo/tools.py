"""Tools as a chat offers them, and exchanges in which one is called, or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from octavo_demo.tool_kinds import (
    KINDS,
    Scalar,
    ToolKind,
    Use,
    Value,
    attribute_kind,
    coined,
    is_name_held_out,
    is_question_held_out,
)

Definition = dict[str, Any]

NOT_FOUND = "I could not find that out."
_FAILURES: tuple[Value, ...] = (
    "not found",
    "error",
    "unknown",
    "error: not found",
    "nothing found",
    {"error": "not found"},
    {"error": "unknown"},
)
# Arguments that a tool may take beside its own, and that nobody asks for.
_OPTIONS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("language", {"type": "string", "description": "The language of the answer."}),
    ("limit", {"type": "integer"}),
    ("format", {"type": "string", "enum": ["short", "long"]}),
    ("verbose", {"type": "boolean", "default": False}),
)


@dataclass(frozen=True, slots=True)
class Offer:
    """A tool of a chat: what it is, and how this chat defines it."""

    kind: ToolKind
    definition: Definition
    arguments: tuple[str, ...]  # their names, in the order of `Use.values`

    @property
    def name(self) -> str:
        name: str = self.definition["function"]["name"]
        return name


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool, and the text that it gives."""

    name: str
    arguments: dict[str, Scalar]
    result: str


@dataclass(frozen=True, slots=True)
class Exchange:
    """A question, the call that it needs, and the answer once its result is known."""

    question: str
    call: Call
    answer: str


def _name(rng: Random, kind: ToolKind, held_out: bool) -> tuple[str, bool]:
    """The name of a function, and whether it says what the function does.

    No name that is held out is used for training.
    """
    while True:
        name, is_telling = rng.choice(kind.names), True
        roll = rng.random()
        if roll < 0.15:
            first, *others = name.split("_")
            name = first + "".join(word.capitalize() for word in others)
        elif roll < 0.22:
            name, is_telling = rng.choice((coined(rng), f"tool_{rng.randrange(100)}")), False
        if is_name_held_out(name) == held_out:
            return name, is_telling


def offer(rng: Random, kind: ToolKind, held_out_name: bool = False) -> Offer:
    """One of the many ways to define a tool of this kind."""
    name, is_telling = _name(rng, kind, held_out_name)
    arguments: list[str] = []
    properties: dict[str, Any] = {}
    for parameter in kind.parameters:
        argument = rng.choice([each for each in parameter.names if each not in arguments])
        arguments.append(argument)
        properties[argument] = dict(parameter.schema)
        if rng.random() < 0.5:
            properties[argument]["description"] = rng.choice(parameter.descriptions)
    if rng.random() < 0.15:
        option, schema = rng.choice(_OPTIONS)
        properties.setdefault(option, dict(schema))
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.8:
        parameters["required"] = list(arguments)
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if not is_telling or rng.random() < 0.9:
        function["description"] = rng.choice(kind.descriptions)
    function["parameters"] = parameters
    return Offer(kind, {"type": "function", "function": function}, tuple(arguments))


def choose_kinds(rng: Random, count: int) -> list[ToolKind]:
    """Kinds of tools that do different things, in any order."""
    kinds: list[ToolKind] = []
    while len(kinds) < count:
        kind = attribute_kind(rng) if rng.random() < 0.4 else rng.choice(KINDS)
        if not any(set(kind.covers) & set(other.covers) for other in kinds):
            kinds.append(kind)
    return kinds


def offers(rng: Random, count: int) -> list[Offer]:
    """Tools of different kinds and names."""
    found: dict[str, Offer] = {}
    for kind in choose_kinds(rng, count):
        made = offer(rng, kind)
        found.setdefault(made.name, made)
    return list(found.values())


def _use(rng: Random, choose: Callable[[], ToolKind], held_out: bool) -> tuple[ToolKind, Use]:
    """A use of one of the kinds that are chosen; its question is held out if `held_out`.

    Of the few questions for tools without arguments, none is held out.
    """
    while True:
        kind = choose()
        use = kind.use(rng)
        if not kind.parameters or is_question_held_out(use.question) == held_out:
            if rng.random() < 0.08:
                use = replace(use, question=use.question.removesuffix("?"))
            return kind, use


def exchange(rng: Random, offered: list[Offer], held_out: bool) -> Exchange:
    """A question that one of the tools can answer."""
    kind, use = _use(rng, lambda: rng.choice(offered).kind, held_out)
    called = next(each for each in offered if each.kind is kind)
    arguments = dict(zip(called.arguments, use.values, strict=True))
    if rng.random() < 0.04:
        return Exchange(
            use.question,
            Call(called.name, arguments, result_text(rng.choice(_FAILURES))),
            NOT_FOUND,
        )
    value = use.value
    if not isinstance(value, Mapping) and rng.random() < 0.5:
        key = rng.choice(kind.keys)
        value = {key: value} if rng.random() < 0.6 else arguments | {key: value}
    return Exchange(use.question, Call(called.name, arguments, result_text(value)), use.answer)


def unanswerable(rng: Random, offered: list[Offer], held_out: bool) -> str:
    """A question that none of the tools can answer; some other could."""
    covered = {ability for each in offered for ability in each.kind.covers} | {"dictionary"}

    def choose() -> ToolKind:
        while True:
            [kind] = choose_kinds(rng, 1)
            if covered.isdisjoint(kind.covers):
                return kind

    return _use(rng, choose, held_out)[1].question


def result_text(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping) else str(value)


def definitions_text(definitions: Iterable[Definition]) -> str:
    """The system's turn that shows the tools, as the chat template writes it."""
    return "".join(_definition_text(**each["function"]) for each in definitions)


def _definition_text(name: str, parameters: Mapping[str, Any], description: str = "") -> str:
    words = name.replace("_", " ")
    json_ = json.dumps({"name": name, "parameters": parameters}, ensure_ascii=False)
    return f"{words}{description and ': '}{description}\n{json_}\n"


def call_parts(call: Call) -> tuple[str, str]:
    """A call as the chat template writes it: up to the end of its name, and from there."""
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return (
        f'<tool_call>\n{{"name": "{call.name}',
        f'", "arguments": {arguments}}}\n</tool_call>',
    )


def call_text(call: Call) -> str:
    return "".join(call_parts(call))
