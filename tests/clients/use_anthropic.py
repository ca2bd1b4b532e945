"""Anthropic's client: messages, streams, tools, counts and errors."""

from __future__ import annotations

import sys

import anthropic
from anthropic import beta_tool
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "What is a cat?"}]
GREEDY = {"extra_body": {"temperature": 0}}  # the library's own models have no such field


class Cat(BaseModel):
    is_tame: bool


WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
    },
}


def use_tools(client: anthropic.Anthropic) -> None:
    asked = {"model": "demo", "max_tokens": 200, "messages": MESSAGES, **GREEDY}
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    called = {"tools": [WEATHER], "tool_choice": choice}
    whole = client.messages.create(**asked, **called)
    assert whole.stop_reason == "tool_use"
    [use] = [block for block in whole.content if block.type == "tool_use"]
    assert (use.name, set(use.input)) == ("weather", {"city"})
    with client.messages.stream(**asked, **called) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "input_json" in kinds  # which the library makes of the arguments' pieces
    assert [block.input for block in final.content if block.type == "tool_use"] == [use.input]
    assert final.stop_reason == "tool_use"
    parsed = client.messages.parse(**asked, output_format=Cat).parsed_output
    assert isinstance(parsed, Cat)
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "It is warm."}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(**asked | {"messages": messages}, tools=[WEATHER])
    assert answer.content
    without = client.messages.count_tokens(model="demo", messages=MESSAGES)
    count = client.messages.count_tokens(model="demo", messages=messages, tools=[WEATHER])
    assert count.input_tokens > without.input_tokens
    usage = answer.usage
    assert count.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

    cities: list[str] = []

    @beta_tool
    def forecast(city: str) -> str:
        """The weather of tomorrow."""
        cities.append(city)
        return "It will be warm."

    # The server holds no conversations of this API.
    runner = client.beta.messages.tool_runner(
        **asked, tools=[forecast], tool_choice={"type": "any"}, max_iterations=2, thread=False
    )
    assert [message.stop_reason for message in runner] == ["tool_use"] * 2
    assert len(cities) >= 2


def main() -> None:
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    fields = {"model": "demo", "max_tokens": 12, "messages": MESSAGES, **GREEDY}
    whole = client.messages.create(**fields)
    assert (whole.type, whole.role) == ("message", "assistant")
    text = whole.content[0].text
    assert text
    assert whole.usage.output_tokens <= 12
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [text]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event.type for event in client.messages.create(**fields, stream=True)]
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"

    blocks = [{"type": "text", "text": "What is a cat?", "cache_control": {"type": "ephemeral"}}]
    system = [{"type": "text", "text": "You are kind."}]
    said = [{"role": "user", "content": blocks}]
    asked = client.messages.create(**fields | {"messages": said}, system=system)
    assert asked.content[0].type == "text"
    word = text.split()[1]
    stopped = client.messages.create(**fields, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text
    begun = [*MESSAGES, {"role": "assistant", "content": text}]
    assert client.messages.create(**fields | {"messages": begun}).type == "message"
    count = client.messages.count_tokens(model="demo", messages=MESSAGES)
    prompt = whole.usage
    assert count.input_tokens == prompt.input_tokens + prompt.cache_read_input_tokens
    try:
        client.messages.create(**fields | {"model": "claude"})
    except anthropic.NotFoundError:
        pass
    else:
        raise AssertionError("a model that is not served was served")
    try:
        client.messages.create(**fields | {"max_tokens": 0})
    except anthropic.BadRequestError as error:
        message = str(error)
    else:
        raise AssertionError("no token was asked for, and something came")
    if "max_tokens" not in message:
        raise AssertionError(message)
    use_tools(client)
    print("messages, streams, blocks, stop sequences, tools, counts, errors")


if __name__ == "__main__":
    main()
