"""llama-index: chats, streams, calls of functions, and answers as pydantic models."""

from __future__ import annotations

import asyncio
import sys

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel, ConfigDict, Field

QUESTION = [ChatMessage(role="user", content="Is it warm in Paris?")]


class Cat(BaseModel):
    """A cat."""

    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=30)


class City(BaseModel):
    city: str = Field(max_length=12)


def weather(city: str) -> str:
    """The weather of a city."""
    return "It is warm."


def use_tools(llm: OpenAILike) -> None:
    tool = FunctionTool.from_defaults(weather, fn_schema=City)
    asked = {"tools": [tool], "chat_history": QUESTION, "tool_required": True}
    answer = llm.chat_with_tools(**asked)
    [call] = llm.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    assert set(call.tool_kwargs) == {"city"}
    *_, last = llm.stream_chat_with_tools(**asked)
    [again] = llm.get_tool_calls_from_response(last)
    assert again.tool_kwargs == call.tool_kwargs
    said = ChatMessage(
        role="tool",
        content=str(tool.call(**call.tool_kwargs)),
        additional_kwargs={"tool_call_id": call.tool_id},
    )
    assert llm.chat([*QUESTION, answer.message, said]).message.role == "assistant"
    # A model of pydantic's is asked for as a tool.
    structured = llm.as_structured_llm(Cat)
    assert isinstance(structured.chat(QUESTION).raw, Cat)


def main() -> None:
    options = {"model": "demo", "api_base": f"{sys.argv[1]}/v1", "api_key": "none"}
    chatting = {**options, "is_chat_model": True, "is_function_calling_model": True}
    llm = OpenAILike(**chatting, temperature=0, max_tokens=16)
    text = llm.chat(QUESTION).message.content
    assert text
    assert "".join(piece.delta or "" for piece in llm.stream_chat(QUESTION)) == text
    assert asyncio.run(llm.achat(QUESTION)).message.content == text
    plain = OpenAILike(**options, temperature=0, max_tokens=8)
    story = plain.complete("Once upon a time").text
    assert (
        "".join(piece.delta or "" for piece in plain.stream_complete("Once upon a time")) == story
    )
    use_tools(OpenAILike(**chatting, temperature=0, max_tokens=200))
    print("chats, streams, async, completions, tools, what a tool says, pydantic models")


if __name__ == "__main__":
    main()
