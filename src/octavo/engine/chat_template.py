"""Chat templates: the Jinja programs that turn a conversation into a model's prompt.

Templates come with the model and are run in a sandbox. They may use what transformers
provides: `messages`, the special tokens, `raise_exception`, `strftime_now`, `tojson`,
loop controls, and the block tag `generation`, which marks the assistant's text for training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequest, ModelError
from octavo.json_fields import Fields


class ChatTemplate:
    """Owns one compiled template and the special tokens that it may use."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelError if `source` is not a template."""
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            # Names that it takes from outside: what is not among them is not shown.
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"the chat template is broken at line {error.lineno}: {error}"
            ) from error
        except (ValueError, RecursionError, OverflowError, MemoryError) as error:
            raise ModelError(f"the chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt; raises InvalidRequest with the template's message if it refuses the input."""
        values = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                values, messages=messages, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise InvalidRequest("messages", f"the chat template refused them: {error}") from error


def find_template(directory: Path, config: Fields) -> str | None:
    """chat_template.jinja, else chat_template in tokenizer_config.json, else None.

    The field may hold several named templates; the one called "default" is used.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"{file} cannot be read: {error}") from error
    template = config.get("chat_template", None)
    if isinstance(template, list):
        entries = [entry for entry in template if isinstance(entry, dict)]
        defaults = [entry for entry in entries if entry.get("name") == "default"]
        template = defaults[-1].get("template") if defaults else None
    if template is not None and not isinstance(template, str):
        raise config.error("chat_template", "it must be a template or a list of named templates")
    return template


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` renders to its contents."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML, which would put \u0026 into prompts.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)
