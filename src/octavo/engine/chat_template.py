"""Chat templates: the Jinja programs that turn a conversation into a model's prompt.

Templates come with the model and are run in a sandbox. They may use what transformers
provides: `messages`, the special tokens, `raise_exception`, `strftime_now`, `tojson`,
loop controls, and the block tag `generation`, which marks the assistant's text for training.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from octavo.errors import InvalidRequest, ModelError


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
