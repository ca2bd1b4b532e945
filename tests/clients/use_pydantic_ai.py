"""pydantic-ai: outputs of a type by a tool and by a schema, whole and streamed, and own tools."""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, RunContext, ToolDefinition, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = f"{sys.argv[1]}/v1"


class Cat(BaseModel):
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=30)


async def stream(agent: Agent[None, Cat]) -> Cat:
    async with agent.run_stream("Describe a cat.") as result:
        return await result.get_output()


def main() -> None:
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=URL, api_key="none"))
    settings = {"temperature": 0.0, "max_tokens": 300, "parallel_tool_calls": False}
    for output in (ToolOutput(Cat), NativeOutput(Cat)):
        agent = Agent(model, output_type=output, model_settings=settings, retries=0)
        whole = agent.run_sync("Describe a cat.").output
        assert isinstance(whole, Cat)
        assert asyncio.run(stream(agent)) == whole

    # An agent with an own tool, which is offered until it was called: the demo model would call it
    # again and again.
    agent = Agent(model, output_type=ToolOutput(Cat), model_settings=settings, retries=3)
    ages: list[str] = []

    async def once(_: RunContext[None], definition: ToolDefinition) -> ToolDefinition | None:
        return None if ages else definition

    @agent.tool_plain(prepare=once)
    def find_cat(name: str) -> int:
        """The age of a cat."""
        ages.append(name[:12])
        return len(ages)

    assert isinstance(agent.run_sync("How old is the cat?").output, Cat)
    assert len(ages) == 1
    print("ToolOutput and NativeOutput, whole and streamed, own tools")


if __name__ == "__main__":
    main()
