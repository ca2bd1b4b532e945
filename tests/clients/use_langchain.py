"""langchain-openai: invoke, stream with usage, batch, async, completions, log-probabilities, tools,
answers of a form in each way, and an agent."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL = f"{sys.argv[1]}/v1"
QUESTION = "What is a cat?"


class Cat(BaseModel):
    """A cat."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=30)
    model_config = ConfigDict(extra="forbid")


class Anything(BaseModel):
    """Any object."""


@tool
def weather(
    city: Annotated[str, Field(max_length=12)], days: Annotated[int, Field(ge=1, le=9)]
) -> str:
    """The weather of a city."""
    return f"warm for {days} days"


def use_tools(chat: ChatOpenAI) -> None:
    bound = chat.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    answer = bound.invoke(QUESTION)
    [call] = answer.tool_calls
    assert call["name"] == "weather"
    assert isinstance(call["args"]["days"], int)
    assert answer.response_metadata["finish_reason"] == "tool_calls"
    chunks = list(bound.stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.tool_calls[0]["args"] == call["args"]
    said = weather.invoke(call)
    assert isinstance(said, ToolMessage)
    chat.bind_tools([weather]).invoke([HumanMessage(QUESTION), answer, said])
    for method in ("function_calling", "json_schema"):
        structured = chat.with_structured_output(Cat, method=method, strict=True)
        assert isinstance(structured.invoke(QUESTION), Cat), method
    # Any JSON object.
    structured = chat.with_structured_output(Anything, method="json_mode")
    assert isinstance(structured.invoke(QUESTION), Anything)


def use_agent(chat: ChatOpenAI) -> None:
    """An agent calls its tool as often as the model does, so its answer has a form: a tool of the
    library's that ends the loop, or the response format."""
    for strategy in (ToolStrategy(Cat), ProviderStrategy(Cat)):
        tools = [weather] if isinstance(strategy, ToolStrategy) else []
        agent = create_agent(chat, tools, system_prompt="Be kind.", response_format=strategy)
        state = agent.invoke({"messages": [HumanMessage(QUESTION)]}, {"recursion_limit": 60})
        assert isinstance(state["structured_response"], Cat), strategy
    parts = list(agent.stream({"messages": [HumanMessage(QUESTION)]}, stream_mode="messages"))
    assert parts


def main() -> None:
    chat = ChatOpenAI(
        base_url=URL,
        api_key="none",
        model="demo",
        temperature=0,
        max_completion_tokens=16,
        stream_usage=True,
    )
    answer = chat.invoke([("system", "Be kind."), ("user", QUESTION)])
    assert answer.content
    assert answer.usage_metadata["output_tokens"] <= 16
    answer = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    assert "".join(chunk.content for chunk in chunks) == answer.content
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.usage_metadata["total_tokens"] == answer.usage_metadata["total_tokens"]
    assert whole.response_metadata["finish_reason"] == answer.response_metadata["finish_reason"]
    both = chat.batch([QUESTION, "What is a dog?"])
    assert both[0].content == answer.content
    assert asyncio.run(chat.ainvoke(QUESTION)).content == answer.content
    scored = chat.bind(logprobs=True, top_logprobs=2, stop=["."]).invoke(QUESTION)
    assert "." not in scored.content
    assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2
    use_tools(chat.model_copy(update={"max_tokens": 200, "stream_usage": False}))
    use_agent(chat.model_copy(update={"max_tokens": 200}))
    completion = OpenAI(base_url=URL, api_key="none", model="demo", temperature=0, max_tokens=8)
    text = completion.invoke("Once upon a time")
    assert "".join(completion.stream("Once upon a time")) == text
    print("invoke, stream, batch, async, logprobs, completions, tools, structured output, agents")


if __name__ == "__main__":
    main()
