from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import pytest
from click_harness import Octavo

from model_zoo import model_directory, write_model
from octavo import LLM, SamplingParams
from octavo.cli.chat import Conversation
from octavo.errors import InvalidRequest, OctavoError

OPTIONS = ("--temperature", 0, "--max-tokens", 8)
PARAMS = SamplingParams(temperature=0, max_tokens=8)


def test_a_conversation_is_what_the_api_answers(octavo: Octavo, model: list[str]) -> None:
    result = octavo("chat", *model, *OPTIONS, stdin="hello\\\nworld\nagain\n")
    assert result.exit_code == 0, result.output
    messages = [{"role": "user", "content": "hello\nworld"}]
    with LLM(str(model_directory("llama")), num_blocks=200) as llm:
        [first] = llm.chat(messages, PARAMS, use_tqdm=False)
        messages.append({"role": "assistant", "content": first.outputs[0].text})
        messages.append({"role": "user", "content": "again"})
        [second] = llm.chat(messages, PARAMS, use_tqdm=False)
    # Answers alone go to stdout; what octavo says itself goes to stderr.
    assert result.stdout == f"{first.outputs[0].text}\n{second.outputs[0].text}\n"
    assert "/help lists the commands" in result.stderr


def test_slash_commands(octavo: Octavo, model: list[str]) -> None:
    lines = [
        "/help",
        "/retry",  # nothing to answer yet
        "hello",
        "/retry",
        "/stats",
        "/params temperature 3",
        "/params nonsense 1",
        "/params min_p " + "[" * 100_000,
        "/params top_k 7",
        "/system Be brief.",
        "hello",
        "/reset",
        "/nonsense",
        "hello",
        "/exit",
        "never read",
    ]
    result = octavo("chat", *model, *OPTIONS, stdin="\n".join(lines))
    assert result.exit_code == 0, result.output
    answers = result.stdout.splitlines()
    assert len(answers) >= 4
    assert answers[0] == answers[1]  # greedy: the second try says the same
    for text in (
        "forget the conversation",
        "error: /retry: there is no message to answer",
        "last answer: 8 tokens",
        "error: temperature: 3.0 is not between 0.0 and 2.0",
        "error: nonsense: there is no such parameter",
        "error: min_p: '[[[",
        "top_k                7",
        "so instructed",
        "error: /nonsense: there is no such command",
    ):
        assert text in result.stderr


def test_a_retry_that_fails_keeps_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(cast(LLM, None), SamplingParams(), "")
    monkeypatch.setattr(conversation, "_fitting_prompt", lambda: [1])
    answers: list[str | OctavoError] = ["first", InvalidRequest("prompt", "too long"), "second"]

    def answer(prompt: list[int]) -> str:
        given = answers.pop(0)
        if isinstance(given, OctavoError):
            raise given
        return given

    monkeypatch.setattr(conversation, "_answer", answer)
    question = {"role": "user", "content": "hello"}
    conversation.ask("hello")
    with pytest.raises(InvalidRequest, match="too long"):
        conversation.command("/retry")
    assert conversation._messages == [question, {"role": "assistant", "content": "first"}]
    conversation.command("/retry")
    assert conversation._messages == [question, {"role": "assistant", "content": "second"}]


def test_the_oldest_messages_go_when_the_context_is_full(octavo: Octavo, model: list[str]) -> None:
    small = ("--max-model-len", 128)
    result = octavo("chat", *model, *OPTIONS, *small, stdin="one two three four five\n" * 8)
    assert result.exit_code == 0
    assert "messages no longer fit and are forgotten" in result.stderr
    assert "error" not in result.stderr
    alone = octavo("chat", *model, *OPTIONS, *small, stdin="a block " * 100 + "\nshort\n")
    assert "error: prompt:" in alone.stderr  # it can never fit, and the conversation goes on
    assert len(alone.stdout.splitlines()) >= 1


def test_what_is_no_text_ends_the_conversation(octavo: Octavo, model: list[str]) -> None:
    result = octavo("chat", *model, *OPTIONS, stdin=b"\xff\n")
    assert result.exit_code == 2
    assert "Error: stdin: it is not UTF-8 text" in result.stderr


def test_a_model_without_a_chat_template(octavo: Octavo, tmp_path: Path) -> None:
    write_model("gpt2", tmp_path)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (tmp_path / name).unlink(missing_ok=True)
    result = octavo("chat", "--model", tmp_path, "--num-blocks", 50, stdin="hello\n")
    assert result.exit_code == 1
    assert f"error: model: {tmp_path} has no chat template" in result.stderr


def test_a_model_with_an_encoder(octavo: Octavo, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before its weights are loaded, not at each message."""
    monkeypatch.setattr("octavo.cli.chat.LLM", None)
    result = octavo("chat", "--model", model_directory("bart"), "--num-blocks", 100, stdin="hi\n")
    assert result.exit_code == 1
    assert result.output.count("has an encoder and no conversations; see `octavo generate`") == 1


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_in_a_terminal() -> None:
    """The first one ends a long answer, the next one, at the prompt, only the line."""
    terminal, other_end = pty.openpty()
    program = "from octavo.cli.main import main; main(prog_name='octavo')"
    args = ["chat", "--model", str(model_directory("llama")), "--num-blocks", "200"]
    args += ["--max-tokens", "400", "--ignore-eos", "--attention-backend", "reference"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *args], stdin=other_end, stdout=other_end, stderr=other_end
    )
    os.close(other_end)
    seen = read_until(terminal, ">>> ")
    os.write(terminal, b"hello\n")
    read_until(terminal, "\n")
    assert select.select([terminal], [], [], 30)[0], "no answer came"
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    seen = read_until(terminal, ">>> ")
    assert "(stopped)" in seen
    # A signal in the instant before readline waits is seen at the next one.
    while not select.select([terminal], [], [], 1)[0]:
        process.send_signal(signal.SIGINT)
    seen = read_until(terminal, ">>> ")
    assert "(Ctrl-D or /exit leaves)" in seen
    os.write(terminal, b"/stats\n")
    assert "last answer" in read_until(terminal, ">>> ")
    os.write(terminal, b"/exit\n")
    assert process.wait(timeout=30) == 0
    os.close(terminal)


def read_until(terminal: int, text: str, seconds: float = 60) -> str:
    """What the terminal shows until `text` comes."""
    shown = b""
    end = time.monotonic() + seconds
    while text.encode() not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end - time.monotonic()))
        assert ready, f"{text!r} did not come after {shown.decode(errors='replace')!r}"
        shown += os.read(terminal, 4096)
    return shown.decode(errors="replace")
