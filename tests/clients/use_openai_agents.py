"""openai-agents: an agent that calls a tool once and answers, over chat completions."""

from __future__ import annotations

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

URL = f"{sys.argv[1]}/v1"
cities: list[str] = []


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    cities.append(city)
    return "It is warm."


def agent(**settings: object) -> Agent:
    client = AsyncOpenAI(base_url=URL, api_key="none")
    return Agent(
        name="octavo",
        instructions="Be kind.",
        model=OpenAIChatCompletionsModel(model="demo", openai_client=client),
        model_settings=ModelSettings(
            temperature=0, max_tokens=300, parallel_tool_calls=False, **settings
        ),
        tools=[weather],
    )


async def main() -> None:
    set_tracing_disabled(True)
    # After the call, the library asks for an answer in text.
    result = await Runner.run(agent(tool_choice="required"), "Is it warm in Paris?")
    assert len(cities) == 1
    assert isinstance(result.final_output, str)
    streamed = Runner.run_streamed(agent(tool_choice="weather"), "Is it warm in Paris?")
    kinds = {event.type async for event in streamed.stream_events()}
    assert {"raw_response_event", "run_item_stream_event"} <= kinds
    assert cities[1] == cities[0]
    print("a tool called once, whole and streamed")


if __name__ == "__main__":
    asyncio.run(main())
