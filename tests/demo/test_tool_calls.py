"""What the demo model does with tools that a chat offers it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from octavo import SamplingParams
from octavo.demo import demo_model_path
from octavo_demo.evaluate import OctavoEngine, tool_items, tool_scores


def tool(name: str, description: str, **properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


TEXT = {"type": "string"}
TOOLS = [
    tool("get_weather", "Get the current weather in a city.", city=TEXT),
    tool("calculate", "Evaluates an expression.", expression=TEXT),
    tool("get_population", "The population of a city.", place=TEXT),
    tool("send_message", "Sends a message to a person.", to=TEXT, text=TEXT),
]
# Question, call, result, answer
CHATS = (
    (
        "What is the weather like in Paris?",
        ("get_weather", {"city": "Paris"}),
        "rainy",
        "It is rainy in Paris.",
    ),
    (
        "how is the weather in Oslo?",
        ("get_weather", {"city": "Oslo"}),
        '{"weather": "sunny", "temperature": 21}',
        "It is sunny and 21 degrees in Oslo.",
    ),
    (
        "What is 17 plus 25?",
        ("calculate", {"expression": "17 + 25"}),
        "42",
        "17 + 25 is 42.",
    ),
    (
        "What is the population of Lima?",
        ("get_population", {"place": "Lima"}),
        '{"population": 9674}',
        "The population of Lima is 9674.",
    ),
    (
        "Send a message to Anna: The dog sleeps.",
        ("send_message", {"to": "Anna", "text": "The dog sleeps."}),
        "sent",
        "I have sent your message to Anna.",
    ),
)


@pytest.fixture(scope="module")
def engine() -> Iterator[OctavoEngine]:
    engine = OctavoEngine(demo_model_path(), num_blocks=1024)
    with engine.llm:
        yield engine


@pytest.mark.parametrize(("question", "call", "result", "answer"), CHATS)
def test_a_tool_is_called_and_its_result_told(
    engine: OctavoEngine, question: str, call: tuple[str, dict[str, str]], result: str, answer: str
) -> None:
    """As the model itself draws its tokens: with its own temperature, from eight seeds each."""
    defaults = engine.llm.engine.model_config.sampling_defaults
    params = SamplingParams(n=8, max_tokens=100, seed=0, **defaults)
    function = {"name": call[0], "arguments": call[1]}
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    [output] = engine.llm.chat(messages, params, use_tqdm=False, tools=TOOLS)
    expected = f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
    assert {each.text for each in output.outputs} == {expected}
    messages += [
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": result},
    ]
    [output] = engine.llm.chat(messages, params, use_tqdm=False, tools=TOOLS)
    assert {each.text for each in output.outputs} == {answer}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("Translate to German: The dog sleeps.", "Der Hund schläft."),
        ("Where does Anna live?", "I am a very small model and do not know that."),
        (
            "Anna lives in Oslo. Ben lives in Rome. Mia is 12 years old.\nWhere does Anna live?",
            "Oslo.",
        ),
        ("hello", "Hello! Shall I tell you a story"),
    ],
)
def test_what_no_tool_is_for_is_answered_without(
    engine: OctavoEngine, text: str, answer: str
) -> None:
    params = SamplingParams(temperature=0, max_tokens=60)
    messages = [{"role": "user", "content": text}]
    [output] = engine.llm.chat(messages, params, use_tqdm=False, tools=TOOLS)
    assert output.outputs[0].text.startswith(answer)


def test_held_out_tools_are_called(engine: OctavoEngine) -> None:
    assert min(tool_scores(engine, tool_items(12)).values()) >= 0.8
