"""What the demo model says to what people type first, small letters and all."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from octavo import LLM, SamplingParams

HELLO = "Hello! Shall I tell you a story, translate a sentence"
ABOUT_ME = "I am the demo model of octavo, a very small language model."
WELL = "I am well, thank you. What would you like"
WELCOME = "You are welcome!"
GOODBYE = "Goodbye! Come back when you want to hear another story."

ANSWERS = {
    "hello": HELLO,
    "Hello!": HELLO,
    " hello ": HELLO,
    "hey": HELLO,
    "hi there": HELLO,
    "hello there": HELLO,
    "good morning": HELLO,
    "who are you?": ABOUT_ME,
    "what can you do": ABOUT_ME,
    "what is your name?": ABOUT_ME,
    "help": ABOUT_ME,
    "how are you?": WELL,
    "thanks": WELCOME,
    "thank you": WELCOME,
    "bye": GOODBYE,
    "translate to German: The dog sleeps.": "Der Hund schläft.",
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_blocks=512) as llm:
        yield llm


def test_first_words_get_a_sane_answer(llm: LLM) -> None:
    """As the model itself draws its tokens: with its own temperature, from eight seeds each."""
    defaults = llm.engine.model_config.sampling_defaults
    # What answers begin with has 16 tokens at most, and nothing behind it is read.
    params = SamplingParams(n=8, max_tokens=24, seed=0, **defaults)
    conversations = [[{"role": "user", "content": text}] for text in ANSWERS]
    outputs = llm.chat(conversations, params, use_tqdm=False)
    for (text, answer), output in zip(ANSWERS.items(), outputs, strict=True):
        strange = [each.text for each in output.outputs if not each.text.startswith(answer)]
        assert not strange, f"to {text!r}"


def test_a_conversation_goes_on_from_a_greeting(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    messages = [{"role": "user", "content": "hello"}]
    for text, part in (("tell me a story about a fox and a storm", " fox"), ("thanks", WELCOME)):
        [output] = llm.chat(messages, params, use_tqdm=False)
        messages.append({"role": "assistant", "content": output.outputs[0].text})
        messages.append({"role": "user", "content": text})
        [output] = llm.chat(messages, params, use_tqdm=False)
        assert part in output.outputs[0].text
