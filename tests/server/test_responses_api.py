"""/v1/responses: events in OpenAI's order, tools, and what is kept between requests."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from octavo.engine.tokenizer import Tokenizer
from octavo.errors import InvalidRequest
from octavo.sampling_params import BeamSearchParams
from octavo.server.engine_process.client import EngineClient
from octavo.server.http import answers
from octavo.server.http.endpoints.chat import ChatWriter
from octavo.server.http.endpoints.responses import InputItem, input_messages
from octavo.server.http.errors import ApiError
from octavo.server.http.keys import ANONYMOUS, Tenant
from octavo.server.http.response_store import MAX_CHARACTERS, ResponseStore
from octavo.structured.output import StructuredOutput
from server.live_server import LiveServer
from server.scripted import ANSWER, CALLS, ScriptedClient, scripted_app

TOOLS = [
    {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {"a": {}}}},
    {"type": "function", "name": "now", "description": "The time", "strict": False},
]


def asked(test: Callable[[openai.AsyncOpenAI, ScriptedClient], Any]) -> None:
    """Run a test with OpenAI's client of an application that says what it is told to."""

    async def connected() -> None:
        app, scripted = scripted_app()
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="any", max_retries=0, http_client=http
        ) as client:
            await test(client, scripted)
        await scripted.close()

    asyncio.run(connected())


def without_times(response: Any) -> dict[str, Any]:
    plain = response.model_dump()
    for name in ("created_at", "completed_at", "id"):
        del plain[name]
    text = json.dumps(plain)
    for item in plain["output"]:
        text = text.replace(item["id"], item["type"])
        if item["type"] == "function_call":
            text = text.replace(item["call_id"], "call")
    return json.loads(text)


def test_streams_have_the_events_of_openai_s_api() -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        whole = await client.responses.create(model="demo", input="hi", tools=TOOLS)  # type: ignore[arg-type]
        assert whole.output_text == "Let me see."
        kinds = [item.type for item in whole.output]
        assert kinds == ["reasoning", "message", "function_call", "function_call"]
        for seed in range(12):
            scripted.seed = seed
            stream = await client.responses.create(
                model="demo",
                input="hi",
                tools=TOOLS,
                stream=True,  # type: ignore[arg-type]
            )
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            names = [event.type.removeprefix("response.") for event in events]
            order = [n for i, n in enumerate(names) if i == 0 or names[i - 1] != n]
            assert order == [
                *("created", "in_progress"),
                *("output_item.added", "content_part.added", "reasoning_text.delta"),
                *("reasoning_text.done", "content_part.done", "output_item.done"),
                *("output_item.added", "content_part.added", "output_text.delta"),
                *("output_text.done", "content_part.done", "output_item.done"),
                *("output_item.added", "function_call_arguments.delta"),
                *("function_call_arguments.done", "output_item.done"),
                *("output_item.added", "function_call_arguments.delta"),
                *("function_call_arguments.done", "output_item.done"),
                "completed",
            ]
            texts: dict[int, str] = {}
            for event in events:
                if event.type.endswith(".delta"):
                    index = event.output_index  # type: ignore[union-attr]
                    texts[index] = texts.get(index, "") + event.delta  # type: ignore[union-attr]
                if event.type.endswith("text.done"):
                    assert event.text == texts[event.output_index]  # type: ignore[union-attr]
                if event.type == "response.function_call_arguments.done":
                    assert event.arguments == texts[event.output_index]
                    json.loads(event.arguments)
            assert texts[1] == "Let me see."
            assert json.loads(texts[2]) == {"a": 1, "b": "x<y"}
            final = events[-1].response  # type: ignore[union-attr]
            expected = without_times(whole) | {"usage": final.usage.model_dump()}
            assert without_times(final) == expected

    asked(test)


def test_a_conversation_goes_on_with_calls_and_their_outputs() -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        first = await client.responses.create(
            model="demo",
            input="hi",
            tools=TOOLS,
            instructions="Be brief.",  # type: ignore[arg-type]
        )
        calls = [item for item in first.output if item.type == "function_call"]
        scripted.text = "Two."
        second = await client.responses.create(
            model="demo",
            previous_response_id=first.id,
            instructions="Be long.",
            input=[
                {"type": "function_call_output", "call_id": calls[0].call_id, "output": "2"},
                {
                    "type": "function_call_output",
                    "call_id": calls[1].call_id,
                    "output": [{"type": "input_text", "text": "noon"}],
                },
            ],
        )
        assert second.output_text == "Two."
        prompt = scripted.prompts[-1]
        assert "Be brief" not in prompt
        assert prompt.startswith("<|system|>Be long.<|user|>hi<|assistant|><think>hm, hm</think>")
        assert f"<|tool|>2[{calls[0].call_id}]<|tool|>noon[{calls[1].call_id}]" in prompt
        # The same conversation, sent whole.
        items: list[Any] = [{"role": "user", "content": "hi"}]
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items += [
            {"type": "function_call_output", "call_id": call.call_id, "output": output}
            for call, output in zip(calls, ("2", "noon"), strict=True)
        ]
        await client.responses.create(
            model="demo", store=False, instructions="Be long.", input=items
        )
        assert scripted.prompts[-1] == prompt
        assert (await client.responses.retrieve(second.id)).output_text == "Two."
        await client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(second.id)

    asked(test)


def test_only_so_many_responses_are_kept() -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = "yes"
        made = [await client.responses.create(model="demo", input="a") for _ in range(6)]
        off = await client.responses.create(model="demo", input="a", store=False)
        for gone in (made[0], made[1], off):
            with pytest.raises(openai.NotFoundError, match="the last 4 are"):
                await client.responses.create(model="demo", input="b", previous_response_id=gone.id)
        kept = await client.responses.create(
            model="demo", input="b", previous_response_id=made[2].id
        )
        assert kept.previous_response_id == made[2].id
        assert scripted.prompts[-1].count("<|user|>") == 2

    asked(test)


def test_the_store_is_bounded_and_divided() -> None:
    store = ResponseStore(10)
    for i in range(20):
        store.put(ANONYMOUS, str(i), i, [], MAX_CHARACTERS // 4)
    assert len(store) <= 4
    assert store.get(ANONYMOUS, "19", "x").response == 19
    store.put(ANONYMOUS, "big", 1, [], MAX_CHARACTERS + 1)
    with pytest.raises(ApiError):
        store.get(ANONYMOUS, "big", "x")
    with pytest.raises(ApiError):
        store.get(Tenant("other"), "19", "x")


def test_what_a_response_repeats_counts_as_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools that are not shown to the model, for example, may be as long as a body."""
    monkeypatch.setattr("octavo.server.http.response_store.MAX_CHARACTERS", 20_000)

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        tools: Any = [{**TOOLS[1], "description": "a" * 8_000}]
        made = [
            await client.responses.create(
                model="demo", input="hi", tools=tools, tool_choice="none", instructions="Be short."
            )
            for _ in range(3)
        ]
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made[0].id)
        assert await client.responses.retrieve(made[2].id) == made[2]

    asked(test)


def test_a_tenant_takes_nothing_of_what_others_have_stored() -> None:
    """Also where they see each other's responses: their keys have no salt."""
    store = ResponseStore(3)
    one, two, three = Tenant("", "key 1"), Tenant("", "key 2"), Tenant("x", "salt x")
    for tenant in (two, three):
        store.put(tenant, f"of {tenant.name}", 0, [], 1)
    for i in range(5):  # too many
        store.put(one, str(i), i, [], 1)
    for i in range(5, 8):  # too long
        store.put(one, str(i), i, [], MAX_CHARACTERS // 2)
    assert store.get(one, "7", "x").response == 7
    with pytest.raises(ApiError):
        store.get(one, "6", "x")
    for tenant in (two, three):
        assert store.get(tenant, f"of {tenant.name}", "x").response == 0
    assert store.get(one, "of key 2", "x").response == 0
    store.remove(one, "7")
    assert len(store) == 2


def test_an_output_that_is_cut_is_incomplete() -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text, scripted.reason = "Let me", "length"
        whole = await client.responses.create(model="demo", input="hi", max_output_tokens=9)
        assert (whole.status, whole.incomplete_details.reason) == (  # type: ignore[union-attr]
            "incomplete",
            "max_output_tokens",
        )
        assert scripted.params[-1].max_tokens == 9
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "response.incomplete"
        assert [item.status for item in events[-1].response.output] == ["incomplete"]  # type: ignore[union-attr]
        scripted.text = ANSWER  # which ends with a call that is whole
        stream = await client.responses.create(model="demo", input="hi", tools=TOOLS, stream=True)  # type: ignore[arg-type]
        events = [event async for event in stream]
        items = [event.item for event in events if event.type == "response.output_item.done"]
        assert items == events[-1].response.output  # type: ignore[union-attr]
        assert [item.status for item in items] == ["completed"] * 4
        scripted.text = CALLS[: CALLS.index("{", 20)]  # before the first argument
        cut = await client.responses.create(model="demo", input="hi", tools=TOOLS)  # type: ignore[arg-type]
        assert [(each.status, each.arguments) for each in cut.output] == [("incomplete", "")]  # type: ignore[union-attr]
        stream = await client.responses.create(model="demo", input="hi", tools=TOOLS, stream=True)  # type: ignore[arg-type]
        events = [event async for event in stream]
        texts = [each.arguments for each in events if each.type.endswith("arguments.done")]  # type: ignore[union-attr]
        assert texts == [""]
        scripted.text, scripted.reason = "", "stop"
        empty = await client.responses.create(model="demo", input="hi")
        assert [item.type for item in empty.output] == ["message"]
        # It can be sent back, as any output can.
        sent = [each.to_dict() for each in empty.output]
        await client.responses.create(
            model="demo",
            input=[*sent, {"role": "user", "content": "go on"}],  # type: ignore[list-item]
        )

    asked(test)


CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [CALL | {"call_id": None}]}, "input[0].call_id"),
        ({"input": [CALL | {"call_id": ""}]}, "input[0].call_id"),
        ({"input": [CALL | {"name": ""}]}, "input[0].name"),
        ({"input": [CALL | {"arguments": "{"}]}, "input[0].arguments"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]},
            "input[0].call_id",
        ),
        ({"input": [CALL, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
        ({"input": [{"role": "system", "content": "a"}]}, "input"),
        ({"input": "a " * 5000}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[0].name"),
        ({"tools": [TOOLS[0] | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": TOOLS}, "tool_choice.name"),
        (
            {
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "function", "name": name} for name in ("now", "x")],
                },
                "tools": TOOLS,
            },
            "tool_choice.tools[1].name",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"include": ["x"]}, "include"),
        ({"metadata": {"a": 5}}, "metadata"),
        ({"instruction": "a"}, "instruction"),
        ({"input": [{"type": None, "role": "user", "content": None}]}, "input[0].content"),
        ({"max_tokens": 5}, "max_tokens"),
    ],
)
def test_bad_responses_are_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.post("/responses", body={"input": "a"} | fields, cast_to=object)
        assert caught.value.status_code in (400, 404)
        assert caught.value.body["param"] == param, caught.value.body  # type: ignore[index]
        assert not scripted.prompts

    asked(test)


def test_long_reasoning_is_counted_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    encode = Tokenizer.encode

    def recording(tokenizer: Tokenizer, text: str, *args: Any, **more: Any) -> list[int]:
        if text.startswith("hm"):
            threads.append(threading.current_thread())
        return encode(tokenizer, text, *args, **more)

    monkeypatch.setattr(Tokenizer, "encode", recording)

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = f"<think>{'hm ' * 4000}</think>Yes."
        whole = await client.responses.create(model="demo", input="hi")
        stream = await client.responses.create(model="demo", input="hi", stream=True)
        *_, last = [event async for event in stream]
        for usage in (whole.usage, last.response.usage):  # type: ignore[union-attr]
            assert usage is not None
            assert usage.output_tokens_details.reasoning_tokens >= 4000
        assert len(threads) == 2
        assert threading.current_thread() not in threads

    asked(test)


def test_chats_count_their_reasoning_as_responses_do() -> None:
    """At the end, and not at all where there is none."""

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        async def counts() -> list[int | None]:
            fields: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
            whole = await client.chat.completions.create(**fields)
            fields |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
            stream = await client.chat.completions.create(**fields, stream=True)
            *others, last = [chunk.usage async for chunk in stream]
            assert all(each.completion_tokens_details is None for each in others)
            details = [usage.completion_tokens_details for usage in (whole.usage, last)]
            return [None if each is None else each.reasoning_tokens for each in details]

        scripted.text = "<think>hm, hm</think>Yes."
        response = await client.responses.create(model="demo", input="hi")
        expected = response.usage.output_tokens_details.reasoning_tokens  # type: ignore[union-attr]
        assert expected > 0
        assert await counts() == [expected, expected]
        scripted.text = "Yes."
        assert await counts() == [None, None]

    asked(test)


def test_beams_think_before_their_form_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they have the special tokens with which their reasoning is marked."""
    monkeypatch.setattr(answers, "_delimiter_tokens", lambda context, format_: [5])

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = "<think>hm</think>{}"
        for beams in ({}, {"beam_width": 2}):
            reply = await client.chat.completions.create(
                model="demo",
                messages=[{"role": "user", "content": "hi"}],
                response_format={"type": "json_object"},
                extra_body=beams,
            )
            assert reply.choices[0].message.content == "{}"
        sampled, searched = scripted.params
        assert isinstance(searched, BeamSearchParams)
        assert searched.structured.parts == sampled.structured.parts
        assert searched.kept_special_tokens == sampled.kept_special_tokens == (5,)

    asked(test)


def test_known_forms_do_not_wait_for_grammars_that_take_long() -> None:
    async def test(_: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        good = StructuredOutput(choice=["a"])
        bad = StructuredOutput(regex="(?=a)", field="form")

        async def check() -> None:
            await scripted.check_structured(good)
            with pytest.raises(InvalidRequest, match=r"form: .*look-around"):
                await scripted.check_structured(bad)

        await check()
        done = threading.Event()
        busy = [asyncio.ensure_future(scripted.offload.grammar(done.wait)) for _ in range(4)]
        try:
            await asyncio.wait_for(check(), 120)
        finally:
            done.set()
            await asyncio.gather(*busy)

    asked(test)


async def usages(client: openai.AsyncOpenAI) -> list[dict[str, Any]]:
    """Of a chat and of a response, each whole and as a stream."""
    chat: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
    chats = [await client.chat.completions.create(**chat)]
    chat |= {"stream": True, "stream_options": {"include_usage": True}}
    chats += [chunk async for chunk in await client.chat.completions.create(**chat)][-1:]
    responses = [await client.responses.create(model="demo", input="hi")]
    stream = await client.responses.create(model="demo", input="hi", stream=True)
    responses += [event.response async for event in stream if event.type == "response.completed"]
    return [each.usage.model_dump() for each in (*chats, *responses)]


def test_no_more_tokens_are_reasoning_than_there_are() -> None:
    """Text may have more tokens than it was written with: here three for each character."""

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = f"<think>{chr(0xFFFD) * 100}</think>Yes."
        size = len(scripted.text)
        assert scripted.tokenizer is not None
        assert len(scripted.tokenizer.encode(chr(0xFFFD) * 100)) > size
        *chats, whole, stream = await usages(client)
        for usage in chats:
            assert usage["completion_tokens"] == size
            assert usage["completion_tokens_details"]["reasoning_tokens"] == size
        for usage in (whole, stream):
            assert usage["output_tokens"] == size
            assert usage["output_tokens_details"]["reasoning_tokens"] == size

    asked(test)


@pytest.mark.parametrize("error", [InvalidRequest("output", "hm"), asyncio.CancelledError()])
def test_reasoning_that_cannot_be_counted_costs_no_reply(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its text may be none that the tokenizer knows, or the server ends and drops the work."""
    encode = EngineClient.encode

    async def encoding(
        client: EngineClient, texts: Any, field: str, *args: Any, **more: Any
    ) -> Any:
        if field == "output":
            raise error
        return await encode(client, texts, field, *args, **more)

    monkeypatch.setattr(EngineClient, "encode", encoding)

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = "<think>hm, hm</think>Yes."
        *chats, whole, stream = await usages(client)
        for usage in chats:
            assert usage["completion_tokens"] == len(scripted.text)
            assert usage["completion_tokens_details"] is None
        for usage in (whole, stream):
            assert usage["output_tokens"] == len(scripted.text)
            assert usage["output_tokens_details"]["reasoning_tokens"] == 0

    asked(test)
    logged = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(logged) == 4
    for line in logged:
        assert "cannot be counted" in line
        assert type(error).__name__ in line
        assert "hm" not in line.partition("\n")[0]


def test_reasoning_is_counted_for_those_who_see_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not ask a stream for its usage does not wait for that, nor is the text kept; and the
    log has no such count: it is complete before."""
    counted: list[list[str]] = []
    logs: list[dict[str, Any]] = []
    writers: list[ChatWriter] = []
    make = ChatWriter.__init__
    encode, count = EngineClient.encode, ChatWriter.count

    async def encoding(
        client: EngineClient, texts: list[str], field: str, *args: Any, **more: Any
    ) -> list[list[int]]:
        if field == "output":
            counted.append(list(texts))
        return await encode(client, texts, field, *args, **more)

    async def counting(writer: ChatWriter) -> None:
        logs.append(dict(writer.request.state.log))
        await count(writer)

    def making(writer: ChatWriter, *args: Any) -> None:
        writers.append(writer)
        make(writer, *args)

    monkeypatch.setattr(EngineClient, "encode", encoding)
    monkeypatch.setattr(ChatWriter, "count", counting)
    monkeypatch.setattr(ChatWriter, "__init__", making)

    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = "<think>hm, hm</think>Yes."
        fields: Any = {"model": "demo", "messages": [{"role": "user", "content": "hi"}]}
        async for _ in await client.chat.completions.create(**fields, stream=True):
            pass
        assert counted == logs == []
        assert not writers[0]._thoughts
        options = {"include_usage": True}
        stream = await client.chat.completions.create(**fields, stream=True, stream_options=options)
        *_, last = [chunk.usage async for chunk in stream]
        whole = await client.chat.completions.create(**fields)
        assert counted == [["hm, hm"]] * 2
        for usage, log in zip((last, whole.usage), logs, strict=True):
            assert log["output_tokens"] == usage.completion_tokens

    asked(test)


def test_items_are_joined_in_time_that_is_linear_in_their_text() -> None:
    class Counted(str):
        """Counts the characters that are copied when it is added to another text."""

        num_copied = 0

        def __radd__(self, other: str) -> str:
            Counted.num_copied += len(other)
            return str(other) + str(self)

    items = [InputItem(role="assistant", content="y" * 100) for _ in range(1000)]
    for item in items:
        item.content = Counted(item.content)
    [message] = input_messages(items)
    assert message.content == "y" * 100_000
    assert Counted.num_copied <= 100_000


def test_forms_and_defaults_arrive() -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        scripted.text = "{}"
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        format_: Any = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
        reply = await client.responses.create(
            model="demo",
            input="a",
            text={"format": format_},
            temperature=0.5,
            extra_body={"seed": 3, "include": [], "prompt_cache_key": "k"},
        )
        params = scripted.params[-1]
        assert (params.temperature, params.seed) == (0.5, 3)
        assert json.dumps(schema) in str(params.structured)
        assert reply.text.format.schema_ == schema  # type: ignore[union-attr]

    asked(test)


def test_some_of_the_tools_may_be_allowed() -> None:
    async def test(client: openai.AsyncOpenAI, scripted: ScriptedClient) -> None:
        for mode in ("auto", "required"):
            tools = [{"type": "function", "name": "now"}]
            choice = {"type": "allowed_tools", "mode": mode, "tools": tools}
            response = await client.responses.create(
                model="demo",
                input="hi",
                tools=TOOLS,
                tool_choice=choice,  # type: ignore[arg-type]
            )
            assert response.tool_choice.model_dump() == choice  # type: ignore[union-attr]
            assert '"add"' in scripted.prompts[-1], "all tools are shown"
            parts = json.dumps(scripted.params[-1].structured.parts)
            assert "now" in parts
            assert "add" not in parts.replace("additionalProperties", "")

    asked(test)


def test_a_response_of_a_real_model(server: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        fields: dict[str, Any] = {"model": "demo", "max_output_tokens": 200, "temperature": 0}
        chat = client.chat.completions.create(
            model="demo",
            max_tokens=200,
            temperature=0,
            messages=[{"role": "user", "content": "What is a cat?"}],
        )
        whole = client.responses.create(input="What is a cat?", **fields)
        assert whole.output_text == chat.choices[0].message.content
        with client.responses.stream(input="What is a cat?", **fields) as stream:
            for _ in stream:
                pass
            final = stream.get_final_response()
        assert final.output_text == whole.output_text
        for response in (whole, final):  # its fields are those that the client expects
            type(response).model_validate_json(response.to_json(), strict=True)
        assert final.usage is not None
        assert final.usage.output_tokens == chat.usage.completion_tokens  # type: ignore[union-attr]
        more = client.responses.create(input="And a dog?", previous_response_id=whole.id, **fields)
        assert more.usage is not None
        assert more.usage.input_tokens > final.usage.input_tokens
