"""langchain-openai: invoke, stream with usage, batch, async, completions, log-probabilities."""

from __future__ import annotations

import asyncio
import sys

from langchain_openai import ChatOpenAI, OpenAI

URL = f"{sys.argv[1]}/v1"
QUESTION = "What is a cat?"


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
    completion = OpenAI(base_url=URL, api_key="none", model="demo", temperature=0, max_tokens=8)
    text = completion.invoke("Once upon a time")
    assert "".join(completion.stream("Once upon a time")) == text
    print("invoke, stream, batch, async, logprobs, completions")


if __name__ == "__main__":
    main()
