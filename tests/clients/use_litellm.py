"""litellm: its `openai` and `hosted_vllm` providers, with and without streaming, with tools."""

from __future__ import annotations

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise it is downloaded

import litellm

URL = f"{sys.argv[1]}/v1"
MESSAGES = [{"role": "user", "content": "What is a cat?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def use_tools(arguments: dict) -> None:
    asked = arguments | {
        "tools": [TOOL],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
    }
    whole = litellm.completion(**asked).choices[0]
    [call] = whole.message.tool_calls
    assert whole.finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city"}
    built = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    [again] = built.choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments
    said = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    messages = [*MESSAGES, whole.message.model_dump(), said]
    litellm.completion(**arguments | {"messages": messages, "tools": [TOOL]})


def main() -> None:
    for provider in ("openai", "hosted_vllm"):
        arguments = {
            "model": f"{provider}/demo",
            "api_base": URL,
            "api_key": "none",
            "messages": MESSAGES,
            "temperature": 0,
            "max_tokens": 12,
        }
        whole = litellm.completion(**arguments)
        text = whole.choices[0].message.content
        assert text
        assert whole.usage.completion_tokens <= 12
        stream = litellm.completion(
            **arguments, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
        assert any(getattr(c, "usage", None) for c in chunks)
        again = asyncio.run(litellm.acompletion(**arguments, seed=1, top_p=0.9))
        assert again.choices[0].message.content == text
        sampled = litellm.completion(**arguments | {"temperature": 0.9}, n=2, seed=3)
        assert len(sampled.choices) == 2
        use_tools(arguments)
    for provider in ("text-completion-openai", "hosted_vllm"):
        try:
            text = litellm.text_completion(
                model=f"{provider}/demo",
                api_base=URL,
                api_key="none",
                prompt="Once upon a time",
                max_tokens=8,
                temperature=0,
            )
        except litellm.BadRequestError as error:
            raise AssertionError(f"{provider}: {error}") from error
        assert text.choices[0].text
    try:
        litellm.completion(**arguments | {"model": "openai/none"})
    except litellm.NotFoundError:
        print("openai and hosted_vllm: chats, streams, async, n, completions, tools, errors")
    else:
        raise AssertionError("a model that is not served was served")


if __name__ == "__main__":
    main()
