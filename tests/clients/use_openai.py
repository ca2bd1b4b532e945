"""openai: tools, streamed calls put together by the library, answers parsed with pydantic,
responses, embeddings, files and batches."""

from __future__ import annotations

import json
import sys
import time
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


def use_responses(client: OpenAI) -> None:
    asked = {"model": "demo", "input": "Is it warm?", "temperature": 0, "max_output_tokens": 200}
    parsed = client.responses.parse(**asked, text_format=Weather).output_parsed
    assert isinstance(parsed, Weather)
    tool = {
        "type": "function",
        "name": "weather",
        "parameters": Weather.model_json_schema(),
        "strict": True,
    }
    tools = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    first = client.responses.create(**asked, **tools)
    [call] = [item for item in first.output if item.type == "function_call"]
    Weather.model_validate_json(call.arguments)
    with client.responses.stream(**asked, **tools) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()
    assert "response.function_call_arguments.done" in kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert [item.arguments for item in streamed.output] == [call.arguments]
    said = {"type": "function_call_output", "call_id": call.call_id, "output": "20 degrees"}
    follow = {"model": "demo", "temperature": 0, "max_output_tokens": 12}
    second = client.responses.create(**follow, input=[said], previous_response_id=first.id)
    assert second.output_text
    assert client.responses.retrieve(second.id).output_text == second.output_text
    alone = client.responses.create(**follow, input="Is it warm?")
    assert second.usage.input_tokens > alone.usage.input_tokens
    client.responses.delete(second.id)


def use_batches(client: OpenAI) -> None:
    body = {"model": "demo", "input": ["A cat.", "A dog."]}
    vectors = [each.embedding for each in client.embeddings.create(**body).data]
    plain = client.embeddings.create(**body, encoding_format="float").data
    assert all(
        abs(a - b) < 1e-6
        for vector, each in zip(vectors, plain, strict=True)
        for a, b in zip(vector, each.embedding, strict=True)
    )
    line = {"custom_id": "a", "method": "POST", "url": "/v1/embeddings", "body": body}
    content = json.dumps(line).encode() + b"\n"
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h"
    )
    while batch.status not in ("completed", "failed"):
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    answer = json.loads(client.files.content(batch.output_file_id).text)
    assert len(answer["response"]["body"]["data"]) == 2


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
    use_responses(client)
    use_batches(client)
    print("tools, parse with pydantic, responses, embeddings, batches, errors")


if __name__ == "__main__":
    main()
