"""openai: tools, streamed calls put together by the library, answers parsed with pydantic."""

from __future__ import annotations

import json
import sys
from enum import Enum

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

URL = f"{sys.argv[1]}/v1"
MESSAGES = [{"role": "user", "content": "How is the weather in Paris?"}]


class Unit(Enum):
    CELSIUS = "C"
    FAHRENHEIT = "F"


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=12)
    days: int = Field(ge=1, le=9)
    unit: Unit


def main() -> None:
    client = OpenAI(base_url=URL, api_key="none")
    tool = openai.pydantic_function_tool(Weather, name="weather")
    arguments = {
        "model": "demo",
        "messages": MESSAGES,
        "tools": [tool],
        "temperature": 0,
        "max_tokens": 200,
    }
    named = {"type": "function", "function": {"name": "weather"}}
    one = {"tool_choice": named, "parallel_tool_calls": False}
    whole = client.chat.completions.create(**arguments, **one).choices[0]
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    expected = Weather.model_validate_json(call.function.arguments)

    # The library puts a stream's chunks together, and parses the arguments.
    with client.chat.completions.stream(**arguments, **one) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.parsed_arguments == expected
    parsed = client.chat.completions.parse(**arguments, **one).choices[0].message
    assert parsed.tool_calls[0].function.parsed_arguments == expected

    # What the tool says goes back, and the model answers.
    said = {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"degrees": 20})}
    messages = [*MESSAGES, whole.message, said]
    answer = client.chat.completions.create(**arguments | {"messages": messages}).choices[0]
    assert answer.finish_reason in ("stop", "length", "tool_calls")

    required = client.chat.completions.create(**arguments, tool_choice="required", seed=1)
    assert required.choices[0].message.tool_calls
    plain = client.chat.completions.create(**arguments, tool_choice="none").choices[0]
    assert plain.message.tool_calls is None
    form = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Weather, temperature=0, max_tokens=200
    )
    assert isinstance(form.choices[0].message.parsed, Weather)
    params = []
    try:
        client.chat.completions.create(**arguments | {"tools": [tool, tool]})
    except openai.BadRequestError as error:
        params.append(error.param)
    assert params == ["tools[0].function.name"]
    print("tools, streamed calls, parse with pydantic, what a tool says, errors")


if __name__ == "__main__":
    main()
