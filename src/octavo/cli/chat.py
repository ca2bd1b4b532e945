"""`octavo chat`: talk with a model in the terminal."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import click

from octavo.cli.options import SAMPLING_HELP, engine_options, sampling_options
from octavo.cli.session import dim, make_sampling_params, show_log
from octavo.config import make_config
from octavo.errors import InvalidRequest, OctavoError
from octavo.llm import LLM
from octavo.models.hub import resolve_model
from octavo.models.registry import read_model_config
from octavo.sampling_params import SamplingParams

HELP = """\
/help                 this page
/reset                forget the conversation
/system [TEXT]        set or clear the system message, and start again
/retry                answer the last message again
/params [NAME VALUE]  show or set sampling parameters, such as: /params temperature 0.7
/stats                speed, KV blocks and prefix cache
/exit                 leave (so does Ctrl-D)
A line that ends in a backslash continues on the next. Ctrl-C stops an answer."""


@click.command()
@click.option("--model", default="demo", show_default=True, help="A MODEL with a chat template.")
@click.option("--system", default="", help="The system message.")
@sampling_options(without=("n", "logprobs"), max_tokens=512)
@engine_options(without=("seed",))
def chat(model: str, system: str, sampling: dict[str, Any], engine: dict[str, Any]) -> None:
    """Talk with a model. Answers stream; /help lists the commands.

    Works in a plain terminal and with messages piped in, one per line.
    """
    show_log(quiet=True, verbose=False)
    config = make_config(model, **engine)
    # Before weights are loaded. The template is asked for afterwards: some tokenizers take seconds.
    if read_model_config(resolve_model(config.model), config.model_impl).encoder is not None:
        raise InvalidRequest(
            "model", f"{model} has an encoder and no conversations; see `octavo generate`"
        )
    with LLM(model, owns_process=True, **engine) as llm:
        if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
            raise InvalidRequest(
                "model", f"{model} has no chat template; `octavo generate` continues plain text"
            )
        conversation = Conversation(llm, make_sampling_params(llm, sampling), system)
        say(f"{model}, up to {llm.engine.max_model_len} tokens. /help lists the commands.")
        for message in read_messages():
            try:
                if message.startswith("/"):
                    if message.split()[0] in ("/exit", "/quit"):
                        break
                    conversation.command(message)
                elif message.strip():
                    conversation.ask(message)
            except OctavoError as error:  # it ends the message, not the conversation
                say(f"error: {error}")


class Conversation:
    """Owns the messages and the sampling parameters of the next answer."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._num_tokens = 0
        self._seconds = 0.0
        self._first_token_seconds = 0.0

    def command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help":
                say(HELP)
            case "/reset":
                self._messages.clear()
                say("The conversation is forgotten.")
            case "/system":
                self._system = rest
                self._messages.clear()
                note = "so instructed" if rest else "without instructions"
                say(f"A new conversation, {note}.")
            case "/retry":
                self._retry()
            case "/params":
                self._show_or_set_params(rest)
            case "/stats":
                say(self.stats())
            case _:
                raise InvalidRequest(name, "there is no such command; /help lists them")

    def ask(self, message: str) -> None:
        """Answer a message; on an error, the conversation stays as it was."""
        self._ask(message, self._messages)

    def _ask(self, message: str, earlier: list[dict[str, str]]) -> None:
        """The same, after the messages of a part of the conversation."""
        before = self._messages
        self._messages = [*earlier, {"role": "user", "content": message}]
        try:
            answer = self._answer(self._fitting_prompt())
        except OctavoError:
            self._messages = before
            raise
        self._messages.append({"role": "assistant", "content": answer})

    def stats(self) -> str:
        engine = self._llm.engine
        kv = engine.kv
        return (
            f"last answer: {self._num_tokens} tokens, "
            f"{self._num_tokens / max(self._seconds, 1e-9):.1f} tok/s, first after "
            f"{1e3 * self._first_token_seconds:.0f} ms\n"
            f"KV blocks: {kv.pool.num_free_cached} cached, {kv.pool.num_held} held, "
            f"{kv.pool.num_blocks} in all, {kv.block_size} tokens each\n"
            f"prefix cache: {kv.num_hit_tokens} of {kv.num_lookup_tokens} prompt tokens reused"
        )

    def _retry(self) -> None:
        if not self._messages:
            raise InvalidRequest("/retry", "there is no message to answer")
        *earlier, question, _ = self._messages
        self._ask(question["content"], earlier)

    def _show_or_set_params(self, rest: str) -> None:
        names = [f.name for f in fields(SamplingParams) if f.name in SAMPLING_HELP]
        if rest:
            name, _, text = rest.partition(" ")
            if name not in names or name in ("n", "logprobs"):
                raise InvalidRequest(name, "there is no such parameter; /params lists them")
            self._params = replace(self._params, **{name: parse_value(text)})
        shown = [name for name in names if name not in ("n", "logprobs")]
        say("\n".join(f"{name:<20} {getattr(self._params, name)}" for name in shown))

    def _fitting_prompt(self) -> list[int]:
        """The conversation's token ids, without its oldest messages if the context is full."""
        limit = self._llm.engine.max_model_len
        room = min(self._params.max_tokens or limit, limit // 4)
        num_dropped = 0
        while True:
            system = [{"role": "system", "content": self._system}] if self._system else []
            prompt = self._llm.chat_prompt([*system, *self._messages])
            if len(prompt) + room <= limit or len(self._messages) == 1:
                break
            del self._messages[:2]  # a question and its answer
            num_dropped += 2
        if num_dropped:
            say(f"(the oldest {num_dropped} messages no longer fit and are forgotten)")
        return prompt

    def _answer(self, prompt: list[int]) -> str:
        """Print an answer as it streams in. Ctrl-C ends it; what was generated is kept."""
        start = time.perf_counter()
        pieces: list[str] = []
        self._num_tokens = 0
        try:
            with contextlib.closing(self._llm.stream(prompt, self._params)) as deltas:
                for delta in deltas:
                    if not self._num_tokens:
                        self._first_token_seconds = time.perf_counter() - start
                    self._num_tokens += len(delta.token_ids)
                    pieces.append(delta.text)
                    click.echo(delta.text, nl=False)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            click.echo(dim(" (stopped)"), nl=False)
        self._seconds = time.perf_counter() - start
        click.echo()
        return "".join(pieces)


def parse_value(text: str) -> Any:
    """`0.7`, `true`, `null`, a list, or plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def read_messages() -> Iterator[str]:
    """Messages from stdin; a line that ends in a backslash continues on the next."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else ">>> ") if is_terminal else "")
        except EOFError:
            if lines:
                yield "\n".join(lines)
            return
        except KeyboardInterrupt:
            lines.clear()
            say("\n(Ctrl-D or /exit leaves)")
            continue
        except UnicodeDecodeError as error:
            raise click.UsageError(f"stdin: it is not UTF-8 text ({error})") from error
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        yield "\n".join([*lines, line])
        lines.clear()


def say(text: str) -> None:
    """octavo's own messages go to stderr, so that stdout holds only answers."""
    click.echo(dim(text), err=True)
