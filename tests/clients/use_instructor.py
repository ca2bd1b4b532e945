"""instructor: answers as pydantic models in its modes TOOLS and JSON_SCHEMA, and partly."""

from __future__ import annotations

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field

URL = f"{sys.argv[1]}/v1"


class Cat(BaseModel):
    model_config = ConfigDict(extra="forbid")  # or the demo model goes on

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=30)
    is_tame: bool


def main() -> None:
    ask = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Describe a cat."}],
        "temperature": 0,
        "max_tokens": 300,
        "max_retries": 0,
    }
    # Not JSON, which asks for any JSON object: the schema is in the prompt alone, and the demo
    # model does not follow it.
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        client = instructor.from_openai(OpenAI(base_url=URL, api_key="none"), mode=mode)
        assert isinstance(client.chat.completions.create(**ask, response_model=Cat), Cat), mode
        if mode is instructor.Mode.TOOLS:
            *_, last = client.chat.completions.create_partial(**ask, response_model=Cat)
            assert None not in last.model_dump().values()
    print("TOOLS, JSON_SCHEMA, partial models from a stream")


if __name__ == "__main__":
    main()
