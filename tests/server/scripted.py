"""An application whose model says what a test has written down."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI

from octavo.config import make_config
from octavo.engine.tokenizer import Tokenizer
from octavo.outputs import RequestOutput, SequenceDelta, SequenceOutput
from octavo.server.engine_process.client import EngineClient
from octavo.server.http.app import create_app
from octavo.server.http.settings import ServerSettings
from server.observed import engine_info, open_request

# Shows everything that a conversation can have.
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %}[{{ m.tool_call_id }}]{% endif %}\n{% endfor %}"
    "{% if tools %}tools: {{ tools | tojson }}\n{% endif %}"
    "{% if enable_thinking is defined and enable_thinking %}thinks\n{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CALLS = (
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x<y"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ANSWER = f"<think>\nhm, hm\n</think>\n\nLet me see.{CALLS}"


class ScriptedStream:
    """One output, in pieces, with a token for each character."""

    prompt_logprobs = output = None
    samples = ()  # none that could be forked
    num_entries = 1

    def __init__(self, prompt: list[int], pieces: list[str], reason: str, stop: str | None) -> None:
        self.prompt_token_ids, self.num_cached_tokens = prompt, 3
        self._pieces, self._reason, self._stop = pieces, reason, stop
        self.entry = open_request()

    async def __aiter__(self) -> AsyncIterator[Any]:
        for number, piece in enumerate(self._pieces, start=1):
            ends = number == len(self._pieces)
            reason, stop = (self._reason, self._stop) if ends else (None, None)
            yield SequenceDelta("r", 0, piece, [number] * len(piece), [], reason, stop)
        yield await self.unscored()

    async def unscored(self) -> RequestOutput:
        text = "".join(self._pieces)
        output = SequenceOutput(0, [1] * len(text), text, self._reason, self._stop)
        return RequestOutput("r", None, self.prompt_token_ids, [output])

    def scored(self, output: RequestOutput) -> RequestOutput:
        return output

    def abort(self) -> None:
        """It has nothing to end."""


class ScriptedClient(EngineClient):
    """Checks and tokenizes as ever, and has no engine."""

    def __init__(self) -> None:
        super().__init__(make_config("demo"))
        assert self.tokenizer is not None
        old = self.tokenizer
        self.tokenizer = Tokenizer(old._backend, old.special_tokens, TEMPLATE)
        self.text, self.reason, self.stop = ANSWER, "stop", None
        self.seed = 0  # of where the text is cut
        self.prompts: list[str] = []
        self.params: list[Any] = []

    @property
    def info(self) -> Any:
        return engine_info(max_model_len=2048, vocab_size=self.model_config.vocab_size)

    async def generate(self, prompt: Any, params: Any, **_: Any) -> Any:
        assert self.tokenizer is not None
        self.prompts.append(self.tokenizer.decode(prompt, skip_special_tokens=False))
        self.params.append(params)
        rng = random.Random(self.seed)
        count = min(len(self.text), rng.choice([0, 1, 5, 100]))
        cuts = sorted(rng.sample(range(len(self.text)), count)) if self.text else []
        ends = [*cuts, len(self.text)]
        pieces = [self.text[a:b] for a, b in zip([0, *cuts], ends, strict=True)]
        return ScriptedStream(prompt, pieces, self.reason, self.stop)


def scripted_app() -> tuple[FastAPI, ScriptedClient]:
    client = ScriptedClient()
    settings = ServerSettings(
        ("demo",),
        tool_call_parser="hermes",
        reasoning_parser="think",
        max_stored_responses=4,
    )
    return create_app(client, settings), client
