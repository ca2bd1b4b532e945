"""Anthropic's client: messages, streams, counts and errors."""

from __future__ import annotations

import sys

import anthropic

MESSAGES = [{"role": "user", "content": "What is a cat?"}]


def main() -> None:
    client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    fields = {"model": "demo", "max_tokens": 12, "temperature": 0, "messages": MESSAGES}
    whole = client.messages.create(**fields)
    assert (whole.type, whole.role) == ("message", "assistant")
    text = whole.content[0].text
    assert text
    assert whole.usage.output_tokens <= 12
    with client.messages.stream(**fields) as stream:
        assert "".join(stream.text_stream) == text
        final = stream.get_final_message()
    assert [block.text for block in final.content] == [text]
    assert (final.stop_reason, final.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert final.usage.output_tokens == whole.usage.output_tokens
    events = [event.type for event in client.messages.create(**fields, stream=True)]
    assert events[0] == "message_start"
    assert events[-1] == "message_stop"

    blocks = [{"type": "text", "text": "What is a cat?", "cache_control": {"type": "ephemeral"}}]
    system = [{"type": "text", "text": "You are kind."}]
    said = [{"role": "user", "content": blocks}]
    asked = client.messages.create(**fields | {"messages": said}, system=system, top_k=5)
    assert asked.content[0].type == "text"
    word = text.split()[1]
    stopped = client.messages.create(**fields, stop_sequences=[word])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", word)
    assert word not in stopped.content[0].text
    begun = [*MESSAGES, {"role": "assistant", "content": text}]
    assert client.messages.create(**fields | {"messages": begun}).type == "message"
    count = client.messages.count_tokens(model="demo", messages=MESSAGES)
    prompt = whole.usage
    assert count.input_tokens == prompt.input_tokens + prompt.cache_read_input_tokens
    try:
        client.messages.create(**fields | {"model": "claude"})
    except anthropic.NotFoundError:
        pass
    else:
        raise AssertionError("a model that is not served was served")
    try:
        client.messages.create(**fields | {"max_tokens": 0})
    except anthropic.BadRequestError as error:
        message = str(error)
    else:
        raise AssertionError("no token was asked for, and something came")
    if "max_tokens" not in message:
        raise AssertionError(message)
    print("messages, streams, blocks, stop sequences, counts, errors")


if __name__ == "__main__":
    main()
