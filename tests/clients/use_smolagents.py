"""smolagents: an agent that calls tools until its steps are used up or it has an answer."""

from __future__ import annotations

import sys
from typing import ClassVar

from smolagents import OpenAIServerModel, Tool, ToolCallingAgent
from smolagents.agents import (
    FinalAnswerPromptTemplate,
    ManagedAgentPromptTemplate,
    PlanningPromptTemplate,
    PromptTemplates,
)
from smolagents.memory import ActionStep
from smolagents.models import ChatMessage, MessageRole

URL = f"{sys.argv[1]}/v1"
# Its own prompts are longer than the demo model's context.
PROMPTS = PromptTemplates(
    system_prompt="You answer by calls of tools.",
    planning=PlanningPromptTemplate(
        initial_plan="", update_plan_pre_messages="", update_plan_post_messages=""
    ),
    managed_agent=ManagedAgentPromptTemplate(task="", report=""),
    final_answer=FinalAnswerPromptTemplate(
        pre_messages="Answer the question.", post_messages="{{task}}"
    ),
)


class Weather(Tool):
    name = "weather"
    description = "The weather of a city."
    inputs: ClassVar = {
        "city": {"type": "string", "description": "The city", "enum": ["Paris", "Rome"]}
    }
    output_type = "string"

    def forward(self, city: str) -> str:
        return f"It is warm in {city}."


def main() -> None:
    model = OpenAIServerModel("demo", api_base=URL, api_key="none", temperature=0, max_tokens=120)
    said = [ChatMessage(role=MessageRole.USER, content="What is a cat?")]
    text = model.generate(said).content
    assert text
    assert "".join(piece.content or "" for piece in model.generate_stream(said)) == text
    for streams in (False, True):
        agent = ToolCallingAgent(
            [Weather()], model, PROMPTS, max_steps=2, stream_outputs=streams, verbosity_level=0
        )
        assert agent.run("Is it warm in Paris?") is not None
        steps = [step for step in agent.memory.steps if isinstance(step, ActionStep)]
        calls = [call for step in steps for call in step.tool_calls or []]
        assert calls
        assert {call.name for call in calls} <= {"weather", "final_answer"}
        assert all(step.error is None for step in steps if step.tool_calls), steps
    print("generate, streams, an agent with a tool")


if __name__ == "__main__":
    main()
