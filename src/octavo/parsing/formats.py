# ruff: noqa: RUF001  (DeepSeek writes its delimiters with full-width bars)
"""The formats in which models answer: those that come with octavo, and the one of a model.

A format has a template, by which an answer is read, and what a grammar needs to know to keep an
answer to it. A model's own template, in tokenizer_config.json, goes before all others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import regex

from octavo.errors import ConfigError, ModelError
from octavo.parsing.parser import ResponseParser, call_paths
from octavo.parsing.template import (
    CALLS,
    CONTENT,
    CONTENT_KINDS,
    OWN_KINDS,
    REASONING,
    Delimiter,
    Region,
    ResponseTemplate,
    read_template,
)

Properties = Mapping[str, Mapping[str, Any]]
Notation = Literal["json", "python", "tags"]
Thinking = Literal["none", "possible", "open"]  # at the beginning of an answer

AUTO, NONE, OWN = "auto", "none", "model"
_NAME, _CALL_ID = "{name}", "{call_id}"
# Parts of delimiters. They have an end: what may become a delimiter is held back, and searched
# again whenever text comes.
_SPACES = r"\s{0,64}"
_LONG = "{1,256}"  # characters of a name


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written, so that a grammar can demand it.

    Calls are one of `before`, calls with `between` between them, and one of `after`; a call is
    `begin`, with its name for {name} and an id for {call_id}, its arguments and `end`.
    """

    begin: str
    end: str
    before: tuple[str, ...] = ("",)
    between: str = "\n"
    after: tuple[str, ...] = ("",)
    # What calls begin with after free text. "": they are all of the answer, or nothing of it, and
    # begin with `first`, with which a text then does not begin.
    trigger: str = ""
    first: str = ""
    notation: Notation = "json"
    argument: tuple[str, str] = ("", "")  # what stands around one that is written in tags
    call_id: str = ""  # a pattern of the ids that the model gives its calls. "": it gives none
    is_single: bool = False  # an answer has one call at most


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model answers.

    Attributes:
        name: of the format.
        template: by which answers are read.
        calls: how it writes calls. None: it has none, or they cannot be demanded.
        thinking: the delimiters of its reasoning. None: it has none.
        before_text: what it writes before the text of its answer, one of these.
        after_text: what it writes behind that, one of these.
        short_ids: the ids of its calls have nine characters.
        reads_prefix: the end of a prompt is read by its template, not by the delimiters of
            reasoning alone.
    """

    name: str
    template: ResponseTemplate
    calls: CallSyntax | None = None
    thinking: tuple[str, str] | None = None
    before_text: tuple[str, ...] = ("",)
    after_text: tuple[str, ...] = ("",)
    short_ids: bool = False
    reads_prefix: bool = False

    @property
    def has_calls(self) -> bool:
        """Whether it can write calls of tools at all."""
        return self.template.region(CALLS) is not None

    @property
    def delimiters(self) -> str:
        """The text of all delimiters, to find out which special tokens they have."""
        regions = self.template.regions
        both = [each for region in regions for each in (region.opening, region.closing) if each]
        return "\n".join(
            text
            for each in both
            for text in (each.literals or [re.sub(r"\\(.)", r"\1", each.pattern.pattern)])
        )

    def thinks(self, prompt: str) -> Thinking:
        """Whether an answer to a prompt begins with reasoning."""
        if self.thinking is None:
            return "none"
        opening, closing = self.thinking
        prefix = self.template.prefix(prompt)
        opened, closed = prefix.rfind(opening), prefix.rfind(closing)
        if opened > closed:
            return "open"
        return "none" if closed >= 0 else "possible"

    def parser(
        self,
        prompt: str,
        properties: Properties | None = None,
        with_calls: bool = True,
        names: Collection[str] | None = None,
    ) -> ResponseParser:
        """A parser of one answer to a prompt.

        Args:
            prompt: its text, of which the end may be the beginning of the answer.
            properties: of each tool's parameters, by the tool's name.
            with_calls: False: calls are text like any other.
            names: of the tools, where a grammar holds calls to them: a text of a form may look like
                a call, but for its name.
        """
        template = self.template
        if not with_calls:
            regions = tuple(each for each in template.regions if each.name != CALLS)
            template = replace(template, regions=regions)
        if self.reads_prefix:
            prefix = template.prefix(prompt)
        else:
            prefix = self.thinking[0] if self.thinking and self.thinks(prompt) == "open" else ""
        return ResponseParser(template, prefix, properties, names)


def _calls(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


_OBJECT = _calls("{content.name}", "{content.arguments}")
_BODY = _calls("{name}", "{content}")
_ENTRY = _calls("{name}", "{arguments}")


def _tags(opening: str, closing: str, key: str, end: str) -> dict[str, Any]:
    """A region of a call whose arguments are written in tags: `key` before one, `end` behind it."""
    pattern = rf"{key}(?P<value>.*?)(?:{end}|(?P<unclosed>\Z))"
    return {
        "open_pattern": opening,
        "close": closing,
        "content": "xml-inline",
        "content_args": {"tag_pattern": pattern},
        "transform": _BODY,
    }


_GLM_CALL = _tags(
    rf"<tool_call>{_SPACES}(?P<name>[^\s<{{]{_LONG}){_SPACES}(?=<)",
    "</tool_call>",
    rf"<arg_key>(?P<key>[^<]{_LONG})</arg_key>{_SPACES}<arg_value>",
    "</arg_value>",
)

_MISTRAL_CALL = {
    "open_pattern": (
        rf"\[TOOL_CALLS\](?P<name>[^\[{{\s]{_LONG})"
        rf"(?:\[CALL_ID\][^\[{{\s]{_LONG})?\[ARGS\]"
    ),
    "close_pattern": r"(?=\[TOOL_CALLS\])",
    "content": "json",
    "transform": _BODY,
}


def _in_json_list(opening: str) -> CallSyntax:
    """Calls that are a list in JSON behind a delimiter, and end with the list."""
    return CallSyntax(
        f'{{"name": "{_NAME}", "arguments": ',
        "}",
        before=(f"{opening}[", f"{opening} ["),
        between=", ",
        after=("]",),
        trigger=opening,
    )


_GRANITE_CALLS = {
    "open": ["<|tool_call|>", "<tool_call>"],
    "content": "json",
    "transform": _ENTRY,
    "transform_each": True,
}

# Regions of calls, as in a template's `fields`, and their syntax.
CALL_FORMATS: dict[str, tuple[dict[str, Any], CallSyntax]] = {
    # Hermes, Qwen 2.5 and 3
    "hermes": (
        {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "content": "json",
            "transform": _OBJECT,
        },
        CallSyntax(
            '<tool_call>\n{"name": "{name}", "arguments": ',
            "}\n</tool_call>",
            trigger="<tool_call>",
        ),
    ),
    # Qwen 3 Coder and 3.5
    "qwen-tags": (
        _tags(
            rf"(?:<tool_call>{_SPACES})?<function=(?P<name>[^>\s]{_LONG})>",
            "</function>",
            rf"<parameter=(?P<key>[^>\n]{_LONG})>\n?",
            r"\n?</parameter>",
        ),
        CallSyntax(
            "<tool_call>\n<function={name}>\n",
            "</function>\n</tool_call>",
            trigger="<tool_call>",
            notation="tags",
            argument=("<parameter={name}>\n", "\n</parameter>\n"),
        ),
    ),
    # Seed-OSS
    "seed": (
        _tags(
            rf"(?:<seed:tool_call>{_SPACES})?<function=(?P<name>[^>\s]{_LONG})>",
            "</function>",
            rf"<parameter=(?P<key>[^>\n]{_LONG})>",
            "</parameter>",
        ),
        CallSyntax(
            "<seed:tool_call>\n<function={name}>\n",
            "</function>\n</seed:tool_call>",
            trigger="<seed:tool_call>",
            notation="tags",
            argument=("<parameter={name}>", "</parameter>\n"),
        ),
    ),
    # GLM 4.5 and 4.6
    "glm": (
        _GLM_CALL,
        CallSyntax(
            "<tool_call>{name}\n",
            "</tool_call>",
            trigger="<tool_call>",
            notation="tags",
            argument=("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>\n"),
        ),
    ),
    # GLM 4.7
    "glm-v47": (
        _GLM_CALL,
        CallSyntax(
            "<tool_call>{name}",
            "</tool_call>",
            between="",
            trigger="<tool_call>",
            notation="tags",
            argument=("<arg_key>{name}</arg_key><arg_value>", "</arg_value>"),
        ),
    ),
    # Llama 3.1, 3.2 and 3.3
    "llama3-json": (
        {
            "open_pattern": (
                rf"\A{_SPACES}(?:<\|python_tag\|>{_SPACES})?"
                rf'(?=\{{{_SPACES}"(?:name|type)"{_SPACES}:)'
            ),
            "content": "json-sequence",
            "transform": _calls("{name}", "{parameters}"),
        },
        CallSyntax('{"name": "{name}", "parameters": ', "}", between="; ", first="{"),
    ),
    # Mistral, up to version 7 of its tokenizers
    "mistral": (
        {
            "open": "[TOOL_CALLS]",
            "content": "json",
            "transform": _ENTRY,
            "transform_each": True,
        },
        _in_json_list("[TOOL_CALLS]"),
    ),
    # Mistral, version 11, such as Small 3.2
    "mistral-call-id": (
        _MISTRAL_CALL,
        CallSyntax(
            "[TOOL_CALLS]{name}[CALL_ID]{call_id}[ARGS]",
            "",
            between="",
            trigger="[TOOL_CALLS]",
            call_id="[a-zA-Z0-9]{9}",
        ),
    ),
    # Mistral, from version 13
    "mistral-args": (
        _MISTRAL_CALL,
        CallSyntax("[TOOL_CALLS]{name}[ARGS]", "", between="", trigger="[TOOL_CALLS]"),
    ),
    # DeepSeek V3 and R1
    "deepseek": (
        {
            "open_pattern": (
                rf"(?:<｜tool▁calls▁begin｜>)?{_SPACES}<｜tool▁call▁begin｜>function<｜tool▁sep｜>"
                rf"(?P<name>[^\s<]{_LONG})\n```json\n"
            ),
            "close": "\n```<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _BODY,
        },
        CallSyntax(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            before=("<｜tool▁calls▁begin｜>",),
            after=("<｜tool▁calls▁end｜>",),
            trigger="<｜tool▁calls▁begin｜>",
        ),
    ),
    # DeepSeek V3.1
    "deepseek-v31": (
        {
            "open_pattern": (
                rf"(?:<｜tool▁calls▁begin｜>)?{_SPACES}<｜tool▁call▁begin｜>"
                rf"(?P<name>[^\s<]{_LONG})<｜tool▁sep｜>"
            ),
            "close": "<｜tool▁call▁end｜>",
            "content": "json",
            "transform": _BODY,
        },
        CallSyntax(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            before=("<｜tool▁calls▁begin｜>",),
            between="",
            after=("<｜tool▁calls▁end｜>",),
            trigger="<｜tool▁calls▁begin｜>",
        ),
    ),
    # Llama 4 and others
    "pythonic": (
        {
            "open_pattern": (
                rf"\A{_SPACES}(?:<\|python_start\|>{_SPACES})?"
                rf"(?=\[{_SPACES}\w[\w.:/-]{{0,255}}\()"
            ),
            "close_pattern": r"<\|python_end\|>",
            "content": "python-calls",
            "transform": _ENTRY,
            "transform_each": True,
        },
        CallSyntax(
            "{name}(", ")", ("[",), between=", ", after=("]",), first="[", notation="python"
        ),
    ),
    # OLMo 3
    "olmo3": (
        {
            "open": "<function_calls>",
            "close": "</function_calls>",
            "content": "python-calls",
            "transform": _ENTRY,
            "transform_each": True,
        },
        CallSyntax(
            "{name}(",
            ")",
            before=("<function_calls>", "<function_calls>\n"),
            after=("</function_calls>", "\n</function_calls>"),
            trigger="<function_calls>",
            notation="python",
        ),
    ),
    # Granite 3
    "granite": (
        _GRANITE_CALLS,
        _in_json_list("<|tool_call|>"),
    ),
    # Granite 3.1, where the chat template has another delimiter
    "granite-v31": (
        _GRANITE_CALLS,
        _in_json_list("<tool_call>"),
    ),
    # Phi-4-mini and FireFunction
    "functools": (
        {
            "open_pattern": r"functools(?=\[)",
            "content": "json",
            "transform": _ENTRY,
            "transform_each": True,
        },
        replace(_in_json_list("functools"), before=("functools[",), trigger="functools["),
    ),
    # Cohere's Command R7B and Command A: an answer is calls or a text
    "cohere": (
        {
            "open": "<|START_ACTION|>",
            "close": "<|END_ACTION|>",
            "content": "json",
            "transform": _calls("{tool_name}", "{parameters}"),
            "transform_each": True,
        },
        CallSyntax(
            '{"tool_call_id": "{call_id}", "tool_name": "{name}", "parameters": ',
            "}",
            before=("<|START_ACTION|>[\n    ", "<|START_ACTION|>["),
            between=",\n    ",
            after=("\n]<|END_ACTION|>", "]<|END_ACTION|>"),
            call_id="[0-9]{1,4}",
        ),
    ),
    # gpt-oss
    "harmony": (
        {
            "open_pattern": (
                r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))?"
                rf" to=functions\.(?P<name>[^\s<]{_LONG})(?:<\|channel\|>(?:commentary|analysis))?"
                rf"{_SPACES}(?:<\|constrain\|>{_SPACES})?(?:json)?<\|message\|>"
            ),
            "close_pattern": r"<\|call\|>",
            "content": "json",
            "transform": _BODY,
        },
        CallSyntax(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
            "",
            before=("", "<|start|>assistant"),
            is_single=True,
        ),
    ),
}

THINKING: dict[str, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "seed": ("<seed:think>", "</seed:think>"),
    "cohere": ("<|START_THINKING|>", "<|END_THINKING|>"),
}

# What may stand before the text of an answer and behind it, where a model delimits that.
_AROUND_TEXT = {
    "cohere": (("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")),
}

_HARMONY_FIELDS = {
    "reasoning_content": {
        "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
        "close_pattern": r"<\|end\|>",
    },
    "content": {
        "open_pattern": (
            rf"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary){_SPACES}<\|message\|>"
        ),
        "close_pattern": r"<\|(?:end|return)\|>",
    },
}
_HARMONY_THINKING = ("<|channel|>analysis<|message|>", "<|end|>")
_HARMONY_TEXT = tuple(f"{start}<|channel|>final<|message|>" for start in ("", "<|start|>assistant"))

# Granite 3.3 puts what follows its reasoning between marks that are no tokens: they are ones in
# their places alone, and end before calls.
_RESPONSE = Region(
    CONTENT,
    Delimiter(regex.compile(rf"(?<=</think>){_SPACES}<response>"), ()),
    Delimiter(
        regex.compile(
            rf"</response>{_SPACES}\Z|(?:</response>{_SPACES})?(?=<\|tool_call\|>|<tool_call>)"
        ),
        (),
    ),
)

# What may follow the last call, and means nothing.
_AFTER_CALLS = {
    "qwen-tags": ("</tool_call>",),
    "seed": ("</seed:tool_call>",),
    "deepseek": ("<｜tool▁calls▁end｜>",),
    "deepseek-v31": ("<｜tool▁calls▁end｜>",),
}

# What shows in a chat template that its model writes calls so: the first that fits.
_SIGNS: tuple[tuple[str, Callable[[str], bool]], ...] = (
    ("harmony", lambda text: "<|channel|>" in text and "<|constrain|>" in text),
    ("mistral-call-id", lambda text: "[TOOL_CALLS]" in text and "[CALL_ID]" in text),
    ("mistral-args", lambda text: "[TOOL_CALLS]" in text and "[ARGS]" in text),
    ("mistral", lambda text: "[TOOL_CALLS]" in text),
    ("deepseek", lambda text: "<｜tool▁call▁begin｜>" in text and "```json" in text),
    ("deepseek-v31", lambda text: "<｜tool▁call▁begin｜>" in text),
    ("seed", lambda text: "<seed:tool_call>" in text),
    ("qwen-tags", lambda text: "<function=" in text),
    ("glm-v47", lambda text: "</arg_key><arg_value>" in text),
    ("glm", lambda text: "<arg_key>" in text),
    ("functools", lambda text: "functools[" in text),
    ("granite", lambda text: "<|start_of_role|>" in text and "<|tool_call|>" in text),
    ("granite-v31", lambda text: "<tool_call> followed by a JSON list" in text),
    ("hermes", lambda text: "<tool_call>" in text),
    ("olmo3", lambda text: "<functions>" in text and "<function_calls>" in text),
    ("pythonic", lambda text: "<|python_start|>" in text or "[func_name1(" in text),
    ("cohere", lambda text: "<|START_ACTION|>" in text),
    (NONE, lambda text: '"tool_name"' in text),  # Cohere's older ones
    ("llama3-json", lambda text: "<|python_tag|>" in text or '"parameters": ' in text),
)

CALL_FORMAT_NAMES = (AUTO, NONE, OWN, *CALL_FORMATS)
REASONING_NAMES = (AUTO, NONE, *THINKING)


def find_format(
    chat_template: str | None,
    own_template: object = None,
    calls: str = AUTO,
    reasoning: str = AUTO,
    header: str = "",
) -> AnswerFormat:
    """How a model answers.

    Args:
        chat_template: its source.
        own_template: the model's own response_template, as JSON.
        calls: one of CALL_FORMAT_NAMES: "model" is its own one, "auto" that one, if there is one,
            or the format that the chat template shows.
        reasoning: one of REASONING_NAMES.
        header: what the chat template writes before an answer.

    Raises:
        ConfigError: there is no such format.
        ModelError: the model's own one is broken.
    """
    for option, name, known in (
        ("tool_call_parser", calls, CALL_FORMAT_NAMES),
        ("reasoning_parser", reasoning, REASONING_NAMES),
    ):
        if name not in known:
            raise ConfigError(option, f"{name!r} is not one of {', '.join(known)}")
    if calls == OWN and own_template is None:
        raise ConfigError("tool_call_parser", "the model has no response_template")
    if calls in (AUTO, OWN) and own_template is not None:
        return _own_format(own_template)
    text = chat_template or ""
    if calls == AUTO:
        calls = next((name for name, fits in _SIGNS if fits(text)), NONE)
    if calls == "harmony":
        return _harmony()
    if reasoning == AUTO:
        fits = (name for name, (_, closing) in THINKING.items() if closing in text)
        reasoning = next(fits, NONE)
    fields: dict[str, Any] = {"content": {}}
    thinking = THINKING.get(reasoning)
    if thinking is not None:
        fields["reasoning_content"] = {"open": thinking[0], "close": thinking[1]}
    syntax = None
    if calls != NONE:
        fields[CALLS], syntax = CALL_FORMATS[calls]
        opening = fields[CALLS].get("open_pattern", "")
        if thinking is not None and opening.startswith(r"\A"):  # or where the reasoning has ended
            begin = rf"(?:\A|(?<={re.escape(thinking[1])}))"
            opening = begin + opening.removeprefix(r"\A")
            fields[CALLS] = {**fields[CALLS], "open_pattern": opening}
    before_text, after_text = _AROUND_TEXT.get(calls, ((), ()))
    ignored = [*_AFTER_CALLS.get(calls, ()), *before_text, *after_text]
    if ignored:
        # A region that ends with the next character. (An optional end of a delimiter would depend
        # on how the text is cut.)
        fields["ignored"] = {"open": ignored, "close_pattern": "(?=.)"}
    template = _template(fields, header)
    if reasoning == "think" and "<response></response>" in text:
        template = replace(template, regions=(*template.regions, _RESPONSE))
    return AnswerFormat(
        calls,
        template,
        syntax,
        thinking,
        ("", *before_text),
        ("", *after_text),
        short_ids=calls.startswith("mistral"),
    )


def _harmony() -> AnswerFormat:
    region, syntax = CALL_FORMATS["harmony"]
    template = _template({**_HARMONY_FIELDS, CALLS: region}, "<|start|>assistant")
    return AnswerFormat("harmony", template, syntax, _HARMONY_THINKING, _HARMONY_TEXT)


def _template(fields: Mapping[str, Any], header: str) -> ResponseTemplate:
    template = read_template({"fields": dict(fields)}, (*CONTENT_KINDS, *OWN_KINDS))
    return replace(template, anchor=regex.compile(regex.escape(header)) if header else None)


def _own_format(value: object) -> AnswerFormat:
    template = read_template(value)
    if template.anchor is None:
        raise ModelError("response_template in tokenizer_config.json: start_anchor is missing")
    calls, thinking = template.region(CALLS), template.region(*REASONING)
    return AnswerFormat(
        OWN,
        template,
        None if calls is None else _syntax_of(calls),
        None if thinking is None else _literal_delimiters(thinking),
        reads_prefix=True,
    )


def _literal_delimiters(region: Region) -> tuple[str, str] | None:
    if region.opening is None or region.closing is None:
        return None
    if not region.opening.literals or not region.closing.literals:
        return None
    return region.opening.literals[0], region.closing.literals[0]


def _syntax_of(region: Region) -> CallSyntax | None:
    """The syntax of a region whose calls are JSON between literal delimiters; None for others."""
    paths, delimiters = call_paths(region), _literal_delimiters(region)
    if paths is None or delimiters is None or paths.layout == "sequence":
        return None
    if paths.name is None or len(paths.name) != 1 or len(paths.arguments) != 1:
        return None
    opening, closing = delimiters
    name, arguments = paths.name[0], paths.arguments[0]
    begin, end = f'{{"{name}": "{_NAME}", "{arguments}": ', "}"
    if paths.layout == "list":
        return CallSyntax(begin, end, (f"{opening}[",), ", ", (f"]{closing}",), opening)
    return CallSyntax(opening + begin, end + closing, trigger=opening)


def named(syntax: CallSyntax, name: str) -> list[str]:
    """What stands before the arguments of a call of this name: two texts with the call's id between
    them, or one text."""
    parts = syntax.begin.split(_CALL_ID) if syntax.call_id else [syntax.begin]
    return [each.replace(_NAME, name) for each in parts]


def around_argument(syntax: CallSyntax, name: str) -> tuple[str, str]:
    """What stands before and behind an argument of this name that is written in tags."""
    before, behind = syntax.argument
    return before.replace(_NAME, name), behind
