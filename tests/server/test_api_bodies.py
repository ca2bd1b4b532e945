"""Bodies, parameters and keys: what is accepted, and the words with which the rest is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import tokenizers
from pydantic import BaseModel
from starlette.requests import Request
from starlette.types import Message
from tokenizers import decoders, models, normalizers

from octavo.core.step import Grammar, TokenLogprobs
from octavo.engine.chat_template import ChatTemplate
from octavo.engine.tokenizer import Tokenizer
from octavo.errors import ConfigError, InvalidRequest, RequestTooLong
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.engine_process.client import EngineClient
from octavo.server.http import bodies, conversations
from octavo.server.http.bodies import Body, Refused, decode_body, read_body
from octavo.server.http.context import Context
from octavo.server.http.conversations import MAX_TEMPLATE, ChatMessage, conversation_prompt
from octavo.server.http.endpoints.batches import BatchBody
from octavo.server.http.endpoints.chat import ChatBody, chat_params
from octavo.server.http.endpoints.completions import CompletionBody, completion_params
from octavo.server.http.endpoints.forks import ForkBody
from octavo.server.http.endpoints.messages import MessagesBody
from octavo.server.http.endpoints.responses import ResponsesBody
from octavo.server.http.errors import ApiError, ClientGone, as_api_error
from octavo.server.http.keys import ApiKeys, Tenant, read_key_file
from octavo.server.http.prompts import truncated
from octavo.server.http.settings import Listening, ServerSettings
from octavo.server.http.token_texts import CompletionScores, TokenTexts, joined
from octavo.server.offload import HUGE_TEXT, Offload
from server.clients import run

OFFLOAD = Offload()

HI = [{"role": "user", "content": "hi"}]
CALL = {"function": {"name": "f", "arguments": '{"a": 1}'}}


def completion(**fields: Any) -> CompletionBody:
    return decode_body(msgspec.json.encode({"prompt": "a"} | fields), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return decode_body(msgspec.json.encode({"messages": HI} | fields), ChatBody)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"zzz": 1}, "zzz", "there is no such field"),
        ({"max_tokens": "5"}, "max_tokens", "should be a valid integer, not '5'"),
        ({"temperature": True}, "temperature", "should be a valid number, not True"),
        ({"prompt": None}, "prompt", "it is missing"),
        ({"prompt": [None]}, "prompt[0]", "should be a valid"),
        ({"prompt": [1.5]}, "prompt[0]", "should be a valid integer"),
        ({"stop": [1]}, "stop[0]", "should be a valid string, not 1"),
        ({"priority": 1 << 64}, "priority", "less than or equal to 9223372036854775807"),
        ({"priority": -(1 << 64)}, "priority", "greater than or equal to -9223372036854775808"),
        ({"suffix": "end"}, "suffix", "fill in the middle"),
        ({"best_of": 3}, "best_of", "use n"),
        ({"stream_options": {"usage": True}}, "stream_options.usage", "no such field"),
        ({"messages": HI}, "messages", "/v1/chat/completions"),
    ],
)
def test_a_bad_completion_is_refused_by_name(
    fields: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    detail = caught.value.reply.error
    assert (caught.value.status, detail.type, detail.param) == (400, "invalid_request_error", param)
    assert words in detail.message
    assert detail.message.startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"response_format": 5}, "response_format"),
        ({"messages": []}, "messages"),
        ({"max_completion_tokens": 1 << 64}, "max_completion_tokens"),
        ({"messages": [5]}, "messages[0]"),
        ({"messages": [{"role": 5}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [None]}]}, "messages[0].content[0]"),
        ({"stream_options": [True]}, "stream_options"),
    ],
)
def test_a_bad_chat_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.reply.error.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json": None}}, "structured_outputs"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": [1]}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": ["a"]}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": ["a", 1]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"ebnf": "a"}}, "structured_outputs.ebnf"),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
        ),
    ],
)
def test_a_form_that_cannot_be_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    for beams in ({}, {"beam_width": 2}):
        with pytest.raises((ApiError, InvalidRequest)) as caught:
            chat_params(chat(**fields, **beams), {})
        assert as_api_error(caught.value).reply.error.param == param


def test_forms_mean_grammars() -> None:
    schema = {"type": "object", "title": "ü"}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}},
        {"structured_outputs": {"json": schema, "regex": None, "of_a_later_version": None}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": schema, "name": None, "of_a_later_version": None},
                "of_a_later_version": None,
            }
        },
        {"structured_outputs": {"json": json.dumps(schema), "json_object": False}},
    ):
        params = chat_params(chat(**fields), {})
        grammar = params.to_spec([2]).grammar
        assert grammar == Grammar("json_schema", json.dumps(schema))
    assert chat_params(chat(response_format={"type": "text"}), {}).structured is None


class Echoing:
    """A tokenizer whose template shows the messages as JSON, and whose tokens are characters."""

    special_tokens: Mapping[str, str] = {}
    template_variables = frozenset({"messages"})

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()

    def render_chat(self, messages: list[dict[str, Any]], begins: bool) -> str:
        self.threads.add(threading.current_thread())
        return json.dumps(messages)


def echoing_context(tokenizer: Echoing, max_model_len: int = 100) -> Context:
    async def encode(texts: list[str], *_: object) -> list[list[int]]:
        return [list(map(ord, text)) for text in texts]

    client = SimpleNamespace(
        tokenizer=tokenizer,
        info=SimpleNamespace(max_model_len=max_model_len),
        model_config=SimpleNamespace(encoder=None),
        offload=OFFLOAD,
        encode=encode,
    )
    return Context(cast("EngineClient", client), ServerSettings(("m",)), TokenTexts(None))


def rendered(*messages: Any) -> Any:
    """What a chat template sees of these messages, sent as a body."""
    body = chat(messages=messages)
    token_ids = run(conversation_prompt(echoing_context(Echoing()), body.messages))
    return json.loads("".join(map(chr, token_ids)))


@pytest.mark.parametrize(
    ("message", "param", "words"),
    [
        ({"content": "hi"}, "role", "it is missing"),
        ({"role": None, "content": "hi"}, "role", "it is missing"),
        ({"role": "", "content": "hi"}, "role", "at least 1 character"),
        ({"role": "user"}, "content", "it is missing"),
        ({"role": "user", "content": None}, "content", "it is missing"),
        ({"role": "user", "content": []}, "content", "at least 1 item"),
        ({"role": "user", "content": [{"text": "a"}]}, "content[0].type", "it is missing"),
        ({"role": "user", "content": [{"type": "text"}]}, "content[0].text", "it is missing"),
        *[
            (
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]},
                "content[1].type",
                f"'{kind}' is not supported",
            )
            for kind in ("image_url", "input_audio", "file", "video_url", "x")
        ],
        ({"role": "tool", "content": "a"}, "tool_call_id", "it is missing"),
        ({"role": "tool", "content": "a", "tool_call_id": ""}, "tool_call_id", "it is missing"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "tool_call_id", "role tool"),
        ({"role": "user", "content": "a", "tool_calls": [CALL]}, "tool_calls", "assistant"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, "tool_calls[0].function", "missing"),
        (
            {"role": "assistant", "tool_calls": [CALL, CALL | {"type": "x"}]},
            "tool_calls[1].type",
            "'function'",
        ),
        *[
            (
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": bad}}],
                },
                "tool_calls[0].function.arguments",
                "JSON object",
            )
            for bad in ("{", "5", "[" * 10_000)
        ],
    ],
)
def test_a_bad_message_is_refused_by_name(message: Any, param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        rendered(*HI, message)
    detail = caught.value.reply.error
    assert (caught.value.status, detail.param) == (400, f"messages[1].{param}")
    assert words in detail.message


def test_the_messages_of_other_servers_can_be_sent_back() -> None:
    others = {
        "tool_calls": None,
        "function_call": None,
        "refusal": None,
        "annotations": [],
        "audio": None,
        "id": "chatcmpl-1",
        "reasoning_content": "hm",
        "thinking_blocks": [{"type": "thinking", "thinking": "hm"}],
        "provider_specific_fields": {"refusal": None},
        "cache_control": {"type": "ephemeral"},
    }
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert rendered(
        {"role": "user", "content": [part, part], "name": None},
        {"role": "assistant", "content": "hi"} | others,
        {"role": "assistant", "content": None, "reasoning_content": "hm"},
    ) == [
        {"role": "user", "content": "aa"},
        {"role": "assistant", "content": "hi", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "reasoning_content": "hm"},
    ]


def test_calls_and_their_answers_go_to_the_template_with_arguments_as_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    empty = {"id": "1", "type": None, "function": {"name": "f", "arguments": None}}
    assert rendered(
        {"role": "assistant", "tool_calls": [CALL, empty]},
        {"role": "tool", "tool_call_id": "1", "content": "{}"},
    ) == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
                call | {"function": {"name": "f", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "{}", "tool_call_id": "1"},
    ]


@pytest.mark.parametrize("given", [None, 1, -1, 3, 100])
@pytest.mark.parametrize("side", [None, "left", "right"])
def test_prompts_are_truncated(given: int | None, side: str | None) -> None:
    body = completion(truncate_prompt_tokens=given, truncation_side=side, max_tokens=6)
    prompts: list[Any] = [[1, 2, 3, 4, 5], {"prompt": [6], "decoder_input_ids": [7]}]
    if given is None and side is not None:
        with pytest.raises(ApiError, match="truncation_side: it needs"):
            truncated(prompts, body, 10, 6)
    elif given == 100:
        with pytest.raises(ApiError, match="truncate_prompt_tokens: 100 is more than the 10"):
            truncated(prompts, body, 10, 6)
    else:
        count = {None: 5, -1: 4}.get(given, given)  # type: ignore[call-overload]
        kept = [1, 2, 3, 4, 5][:count] if side == "right" else [1, 2, 3, 4, 5][-count:]
        assert truncated(prompts, body, 10, 6) == [kept, prompts[1]]


@pytest.mark.parametrize(("given", "max_tokens"), [(0, 1), (-1, 10)])
def test_truncation_that_leaves_nothing_is_refused(given: int, max_tokens: int) -> None:
    body = completion(truncate_prompt_tokens=given, max_tokens=max_tokens)
    with pytest.raises(ApiError, match="truncate_prompt_tokens: it leaves nothing"):
        truncated([[1]], body, 10, max_tokens)


def test_documents_go_to_templates_that_show_them() -> None:
    body = chat(documents=[{"title": "t", "text": "Cats purr."}])
    tokenizer = Echoing()
    with pytest.raises(ApiError, match="documents: the chat template does not show them"):
        run(
            conversation_prompt(echoing_context(tokenizer), body.messages, documents=body.documents)
        )
    source = "{% for d in documents %}{{ d.text }}{% endfor %}{{ messages[0].content }}"
    template = ChatTemplate(source, {})
    assert template.variables == {"documents", "messages"}
    tokenizer.template_variables = template.variables
    context = echoing_context(tokenizer)
    tokenizer.render_chat = lambda messages, begins, **variables: template.render(  # type: ignore[method-assign]
        messages, begins, variables
    )
    ids = run(conversation_prompt(context, body.messages, documents=body.documents))
    assert "".join(map(chr, ids)) == "Cats purr.hi"


def test_only_the_assistants_message_is_echoed() -> None:
    answered = [*HI, {"role": "assistant", "content": "Once"}]
    assert chat_params(chat(messages=answered, echo=True), {})
    with pytest.raises(ApiError, match="echo: the last message is not the assistant's"):
        chat_params(chat(echo=True), {})


def test_a_conversation_has_at_most_as_many_messages_as_the_context_has_tokens() -> None:
    tokenizer = Echoing()
    messages = chat(messages=HI * 101).messages
    with pytest.raises(RequestTooLong, match="messages: 101 messages do not fit"):
        run(conversation_prompt(echoing_context(tokenizer), messages))
    assert not tokenizer.threads, "it is refused before it is rendered"


def calling(arguments: dict[str, Any]) -> dict[str, Any]:
    call = {"function": {"name": "get", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


@pytest.mark.parametrize(
    ("messages", "is_long"),
    [
        (HI * 10, False),
        (HI * 1000, True),
        ([{"role": "user", "content": "a" * 10_000}], True),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}] * 200}], True),
        ([calling({"a": "b", "c": 1})], False),
        ([calling({"a": "b" * 10_000})], True),
        ([calling({"a": [{"b": "c"}] * 1000})], True),
    ],
)
def test_long_conversations_are_rendered_in_a_thread(messages: list[Any], is_long: bool) -> None:
    tokenizer = Echoing()
    body = chat(messages=messages)
    run(conversation_prompt(echoing_context(tokenizer, 1000), body.messages))
    assert (tokenizer.threads == {threading.current_thread()}) is not is_long


def test_long_arguments_of_calls_are_checked_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    monkeypatch.setattr(
        conversations,
        "check_num_nodes",
        lambda *_: threads.append(threading.current_thread()),
    )
    messages = chat(messages=[calling({"a": "b" * 10_000})]).messages
    run(conversation_prompt(echoing_context(Echoing()), messages))
    assert len(threads) == 1
    assert threading.current_thread() not in threads


def test_of_a_huge_conversation_only_a_part_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def cost(message: ChatMessage) -> int:
        measured.append(message)
        return len(str(message.content))

    monkeypatch.setattr("octavo.server.http.conversations._cost", cost)
    messages = chat(messages=[{"role": "user", "content": "a" * 100}] * 20_000).messages
    run(conversation_prompt(echoing_context(Echoing(), 100_000), messages))
    assert len(measured) == HUGE_TEXT // 100 + 1


def test_templates_of_requests_are_compiled_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set[threading.Thread]()

    def compiled(source: str, special_tokens: Mapping[str, str]) -> ChatTemplate:
        threads.add(threading.current_thread())
        return ChatTemplate(source, special_tokens)

    monkeypatch.setattr(conversations, "ChatTemplate", compiled)
    context = echoing_context(Echoing())
    trusting = replace(context.settings, trust_request_chat_template=True)
    context = replace(context, settings=trusting)
    messages = chat().messages
    run(conversation_prompt(context, messages, template="{{ messages }}"))
    assert threads
    assert threading.current_thread() not in threads
    too_long = "{{ messages }}" + " " * MAX_TEMPLATE
    with pytest.raises(ApiError, match="chat_template: 65550 characters are more than 65536"):
        run(conversation_prompt(context, messages, template=too_long))


@pytest.fixture(scope="module")
def word_pieces() -> Tokenizer:
    """As Llama 2's: the first word's mark is no space, and the others' are."""
    pieces = ["<unk>", "<s>", "\u2581", "a", "b", "\u2581a", "\u2581b"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    merges = [("\u2581", "a"), ("\u2581", "b")]
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True))
    backend.add_special_tokens(["<s>"])
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)])
    return Tokenizer(backend, {}, None)


@pytest.mark.parametrize("is_special_shown", [False, True])
def test_offsets_of_tokens_are_places_in_the_text(
    word_pieces: Tokenizer, is_special_shown: bool
) -> None:
    texts = TokenTexts(word_pieces)
    prompt = [1, *word_pieces.encode("a b\u00e9b")]
    output = [*word_pieces.encode("a b")]
    echoed = word_pieces.decode(prompt, skip_special_tokens=not is_special_shown)
    echo = CompletionScores(texts, 0, texts.detokenizer((), not is_special_shown))
    detokenizer = texts.detokenizer(prompt, not is_special_shown)
    assert detokenizer is not None
    whole = echoed + "".join(map(detokenizer.add, output))
    scores = CompletionScores(
        texts, 0, texts.detokenizer(prompt, not is_special_shown), len(echoed)
    )
    entries = joined(
        echo.prompt(prompt, [None] * len(prompt)),
        scores.output(TokenLogprobs(token_id, 0.0, 1, ()) for token_id in output),
    )
    for token, offset in zip(entries.tokens, entries.text_offset, strict=True):
        is_whole = not token.startswith("bytes:") and token != "<s>"
        assert not is_whole or whole[offset:].startswith(token.lstrip() if not offset else token)
    assert echoed.endswith("a b\u00e9b")
    assert entries.text_offset[-2:] == [len(echoed), len(echoed) + 2]


def collections_in(schema: Any) -> Iterator[dict[str, Any]]:
    """The lists and dicts in a schema of pydantic's whose items may be wrong."""
    if isinstance(schema, Mapping):
        items = {"list": "items_schema", "dict": "values_schema"}.get(str(schema.get("type")))
        if items is not None and schema.get(items, {"type": "any"})["type"] != "any":
            yield dict(schema)
        for each in schema.values():
            yield from collections_in(each)
    elif isinstance(schema, list | tuple):
        for each in schema:
            yield from collections_in(each)


@pytest.mark.parametrize("kind", [ChatBody, ForkBody, ResponsesBody, MessagesBody, BatchBody])
def test_the_first_bad_item_ends_the_validation_of_many(kind: type[Body]) -> None:
    found = list(collections_in(kind.__pydantic_core_schema__))
    assert found
    for each in found:
        assert each.get("fail_fast"), each


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        (ChatBody, {"messages": HI, "documents": [{}, 1, 2, 3]}, "documents[1]"),
        (ForkBody, {"parent": "p", "children": [{}, 1, 2, 3]}, "children[1]"),
    ],
)
def test_of_many_bad_items_the_first_is_named(
    kind: type[Body], fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(msgspec.json.encode(fields), kind)
    assert caught.value.reply.error.param == param


def refused_fields(kind: type[BaseModel]) -> dict[str, Refused]:
    return {
        name: each
        for name, field in kind.model_fields.items()
        for each in field.metadata
        if isinstance(each, Refused)
    }


def test_fields_of_newer_clients_are_no_misspelling() -> None:
    assert "moderation" in refused_fields(ChatBody)
    newer = {"moderation", "context_management", "background_options"}
    assert newer <= refused_fields(ResponsesBody).keys()


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody, ChatMessage])
def test_refused_fields_are_refused_unless_they_ask_for_nothing(kind: type[BaseModel]) -> None:
    if kind is CompletionBody:
        send, path = completion, ""
    elif kind is ChatBody:
        send, path = chat, ""
    else:
        send, path = lambda **fields: chat(messages=[*HI, HI[0] | fields]), "messages[1]."  # type: ignore[assignment]
    found = refused_fields(kind)
    assert len(found) >= 4
    for name, refusal in found.items():
        for value in (None, *refusal.harmless):
            send(**{name: value})
        with pytest.raises(ApiError) as caught:
            send(**{name: "something"})
        detail = caught.value.reply.error
        assert (detail.param, detail.code) == (f"{path}{name}", "unsupported_field")
        assert detail.message == f"{path}{name}: {refusal.reason}"


def test_fields_that_ask_for_nothing_are_let_pass() -> None:
    body = chat(
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        top_p=0.5,
        include_reasoning=True,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        prompt_cache_key="a hint",
        prompt_cache_options={"mode": "explicit", "ttl": "30m"},
        prompt_cache_retention="24h",
        safety_identifier="somebody",
        of_a_later_version=None,
    )
    assert (body.top_p, body.end_user) == (0.5, "somebody")
    with pytest.raises(ApiError, match="messages: it is missing"):
        decode_body(b'{"of_a_later_version": null}', ChatBody)
    with pytest.raises(ApiError, match="best_of"):
        completion(best_of=True)  # which Python takes for 1


def test_nulls_in_mappings_are_not_given() -> None:
    body = completion(logit_bias={"5": 1, "7": None, "of a later version": None})
    assert completion_params(body, {}).logit_bias == {5: 1}
    responses = decode_body(b'{"input": "a", "metadata": {"a": "b", "c": null}}', ResponsesBody)
    assert responses.metadata == {"a": "b"}


def test_a_prompt_in_a_chat_is_told_rather_than_the_missing_messages() -> None:
    with pytest.raises(ApiError, match="prompt: prompts go to /v1/completions"):
        decode_body(b'{"prompt": "a"}', ChatBody)
    with pytest.raises(ApiError, match="messages: it is missing"):
        decode_body(b'{"max_completion_tokens": 0}', ChatBody)


def test_unknown_fields_cost_no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every body is decoded once, whatever else there is in it."""
    decoded = []
    whole = ChatBody.model_validate_json

    def recording(data: bytes, **options: Any) -> ChatBody:
        decoded.append(data)
        return whole(data, **options)

    monkeypatch.setattr(ChatBody, "model_validate_json", recording)
    messages = [{"role": "user", "content": "hi", "zzz": [0.5]}] * 100
    body = chat(
        messages=messages,
        parallel_tool_calls=True,
        temperature=1.0,
        chat_template_kwargs={"scale": 1.0},
    )
    assert body.chat_template_kwargs is not None
    assert type(body.chat_template_kwargs["scale"]) is float
    with pytest.raises(ApiError, match="zzz"):
        chat(messages=messages, zzz=1)
    assert len(decoded) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": HI} | {f"z{i}": i for i in range(60_000)},
        {"messages": [5] * 500_000},
        {"messages": HI, "stop": [5] * 500_000},
        {"messages": HI, "stop_token_ids": ["a"] * 500_000},
        {"messages": HI, "logit_bias": {str(i): "x" for i in range(60_000)}},
        {"messages": [{"role": "user", "content": [5] * 500_000}]},
    ],
)
def test_only_the_first_of_many_errors_is_looked_for(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    whole = bodies._api_error
    monkeypatch.setattr(
        bodies, "_api_error", lambda kind, errors: counts.append(len(errors)) or whole(kind, errors)
    )
    with pytest.raises((ApiError, InvalidRequest)):
        chat_params(chat(**fields), {})
    assert max(counts, default=1) <= 3


def test_unknown_fields_are_ignored_on_demand_but_unsupported_ones_are_not() -> None:
    data = b'{"prompt": "a", "zzz": 1, "stream_options": {"zzz": 1}, "stream": true}'
    assert decode_body(data, CompletionBody, ignore_unknown=True).stream
    with pytest.raises(ApiError, match="suffix"):
        decode_body(b'{"prompt": "a", "suffix": "b"}', CompletionBody, ignore_unknown=True)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b'{"zzz": 1, "prompt":' + b"[" * 900 + b"]" * 900 + b"}",
        b'{"prompt": "\xff"}',
        b'{"prompt": "a", "n": {"\xff": 1}}',
        b'{"prompt": "a", "stop": ["a", "\xff"]}',
        b'{"prompt": "a", "suffix": "\xff"}',
        b'{"prompt": NaN}',
        b"[]",
        b'{"prompt":' + b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(data, CompletionBody)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    "piece", [b"[],", b'{"a":1},', b'"[[[",[],', rb'"[\\",[],', rb'"\"[",[],', b'"a":']
)
def test_a_body_has_a_bounded_number_of_parts(piece: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(b'{"prompt": "a", "zzz": [' + piece * 70_000, CompletionBody)
    assert (caught.value.status, caught.value.reply.error.code) == (400, "body_too_complex")


def test_arguments_in_texts_have_a_bounded_number_of_parts() -> None:
    arguments = '{"a": [' + "[]," * 40_000 + "[]]}"
    call = {"function": {"name": "f", "arguments": arguments}}
    for calls, code in ([call], None), ([call, call], "body_too_complex"):
        try:
            rendered({"role": "assistant", "tool_calls": calls})
            found = None
        except ApiError as error:
            found = error.reply.error.code
        assert found == code


def test_text_may_have_any_number_of_brackets() -> None:
    text = '{"[:' * 100_000 + "\\"
    assert completion(prompt=[text, text]).prompt == [text, text]


def request(*messages: Message, **headers: str) -> Request:
    """A POST whose body comes in pieces."""
    incoming = list(messages)
    named = headers | {"content-type": "application/json"}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]

    async def receive() -> Message:
        return incoming.pop(0)

    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def test_large_bodies_are_decoded_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []

    def recording(data: bytes, *arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return decode_body(data, *arguments)

    monkeypatch.setattr(bodies, "decode_body", recording)
    for num_bytes in (10, 100_000):
        data = msgspec.json.encode({"prompt": "a" * num_bytes})
        whole = {"type": "http.request", "body": data}
        assert run(read_body(request(whole), CompletionBody, OFFLOAD)).prompt == "a" * num_bytes
    here = threading.current_thread()
    assert [thread is here for thread in threads] == [True, False]


def test_a_client_may_leave_while_it_sends() -> None:
    first = {"type": "http.request", "body": b'{"prompt":', "more_body": True}
    with pytest.raises(ClientGone):
        run(read_body(request(first, {"type": "http.disconnect"}), CompletionBody, OFFLOAD))


def test_compressed_bodies_are_refused_by_name() -> None:
    whole = {"type": "http.request", "body": b"\x1f\x8b"}
    with pytest.raises(ApiError, match="Content-Encoding: gzip: send the body as it is"):
        run(read_body(request(whole, content_encoding="gzip"), CompletionBody, OFFLOAD))


def test_one_point_nought_is_one() -> None:
    body = completion(max_tokens=5.0, prompt=[1.0, 2], temperature=1.0)
    assert (body.max_tokens, body.prompt, body.temperature) == (5, [1, 2], 1.0)
    with pytest.raises(ApiError, match=r"max_tokens: input should be a valid integer, not 5\.5"):
        completion(max_tokens=5.5)


def test_completions_have_16_tokens_and_the_model_s_own_defaults() -> None:
    params = completion_params(completion(top_p=0.5), {"temperature": 0.3, "top_p": 0.9})
    assert params == SamplingParams(temperature=0.3, top_p=0.5, max_tokens=16)


def test_every_field_of_drawing_arrives() -> None:
    fields: dict[str, Any] = {
        "n": 2,
        "min_tokens": 1,
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "seed": 4,
        "stop": ["x", "y"],
        "stop_token_ids": [9],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "prompt_logprobs": 2,
        "logprobs": 3,
    }
    params = completion_params(completion(**fields, logit_bias={"5": -1.5}), {})
    assert params == SamplingParams(**fields, logit_bias={5: -1.5})


def test_echo_scores_the_prompt_and_no_output_costs_a_token() -> None:
    params = completion_params(completion(echo=True, logprobs=2, max_tokens=0), {})
    assert params == SamplingParams(max_tokens=1, logprobs=2, prompt_logprobs=2)
    with pytest.raises(ApiError, match="max_tokens"):
        completion_params(completion(max_tokens=0), {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1, "echo": True}, "max_tokens"),
        ({"max_tokens": -1, "beam_width": 2}, "max_tokens"),
        ({"echo": True, "logprobs": 1, "prompt_logprobs": -1}, "prompt_logprobs"),
        ({"echo": True, "logprobs": -1, "prompt_logprobs": 1}, "logprobs"),
        ({"beam_width": 2, "logprobs": 0}, "logprobs"),
        ({"beam_width": 0}, "beam_width"),
    ],
)
def test_no_bad_number_hides_behind_another(fields: dict[str, Any], param: str) -> None:
    with pytest.raises((ApiError, InvalidRequest)) as caught:
        completion_params(completion(**fields), {})
    assert str(caught.value).startswith(f"{param}: ")


def test_beam_search_takes_its_own_fields_and_refuses_those_of_drawing() -> None:
    fields = {"length_penalty": 0.5, "early_stopping": "never", "min_tokens": 3, "max_tokens": 9}
    defaults = {"top_k": 5, "repetition_penalty": 1.3}  # the model's
    body = completion(beam_width=4, n=2, temperature=1, **fields)
    expected = BeamSearchParams(4, num_return_sequences=2, **fields)  # type: ignore[arg-type]
    assert completion_params(body, {"top_k": 5}) == expected
    assert completion_params(body, defaults) == replace(expected, repetition_penalty=1.3)
    body = completion(beam_width=4, n=2, repetition_penalty=1, **fields)
    assert completion_params(body, defaults) == expected
    for name, value in {"temperature": 0.5, "stop": ["a"], "logprobs": 1, "seed": 1}.items():
        with pytest.raises(ApiError) as caught:
            completion_params(completion(beam_width=4, **{name: value}), {})
        assert caught.value.reply.error.param == name
    with pytest.raises(InvalidRequest, match="more than beam_width"):
        completion_params(completion(beam_width=2, n=3), {})
    with pytest.raises(ApiError, match="needs beam_width"):
        completion_params(completion(length_penalty=1.0), {})


def test_chats_may_fill_the_context() -> None:
    assert chat_params(chat(), {}).max_tokens is None
    assert chat_params(chat(max_tokens=5), {}).max_tokens == 5
    assert chat_params(chat(max_completion_tokens=6), {}).max_tokens == 6
    with pytest.raises(ApiError, match="contradicts"):
        chat_params(chat(max_tokens=5, max_completion_tokens=6), {})


def test_chat_logprobs() -> None:
    def count(**fields: Any) -> int | None:
        params = chat_params(chat(**fields), {})
        assert isinstance(params, SamplingParams)
        return params.logprobs

    assert count() is None
    assert count(logprobs=True) == 0
    assert count(logprobs=True, top_logprobs=3) == 3
    with pytest.raises(ApiError, match="top_logprobs"):
        count(top_logprobs=3)


@pytest.mark.parametrize("key", ["x", "-1", "1.5", "9" * 5000])
def test_logit_bias_keys_are_token_ids(key: str) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias"):
        completion_params(completion(logit_bias={key: 1}), {})


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "stream_options.continuous_usage_stats",
        ),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    ],
)
def test_what_contradicts_streaming(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion_params(completion(**fields), {})
    assert caught.value.reply.error.param == param


def test_keys_are_found_by_bearer_and_by_basic() -> None:
    keys = ApiKeys(["first-key-1", "second-key-2:acme"])
    acme = Tenant("acme", "salt acme")
    assert keys.tenant("Bearer first-key-1") == Tenant("", "key 1")
    assert keys.tenant("bearer second-key-2") == acme
    assert keys.tenant("Basic YW55Om5lOnNlY29uZC1rZXktMg==") is None  # any:ne:second-key-2
    assert keys.tenant("Basic YW55OnNlY29uZC1rZXktMg==") == acme  # any:second-key-2
    for wrong in (None, "", "Bearer", "Bearer first-key-", "first-key-1", "Bearer é"):
        assert keys.tenant(wrong) is None
    for wrong in ("Basic !", "Basic é", "Basic /w==", "Basic"):
        assert keys.tenant(wrong) is None
    assert ApiKeys().tenant(None) == Tenant("")


def test_no_two_tenants_share_a_salt() -> None:
    salts = [
        Tenant(own).cache_salt(requested)
        for own in ("", "a", "a:b", "1")
        for requested in (None, "a", "1:a:", ":", "b", "1:a:b")
    ]
    assert len(set(salts)) == len(salts)
    assert Tenant("").cache_salt(None) == ""


def test_names_belong_to_their_tenant() -> None:
    assert Tenant("a").unscoped(Tenant("a").scoped("x")) == "x"
    assert Tenant("ab").unscoped(Tenant("a").scoped("x")) is None
    assert Tenant("").unscoped(Tenant("a").scoped("x")) is None
    assert Tenant("").unscoped("x") == "x"


def test_a_bad_key_is_refused_without_being_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="key 1 is not") as caught:
        ApiKeys(["short"])
    assert "short" not in str(caught.value)
    file = tmp_path / "keys"
    file.write_text("# ours\n\nfirst-key-1\n second-key-2:acme \n")
    assert read_key_file(file) == ["first-key-1", "second-key-2:acme"]
    with pytest.raises(ConfigError, match="api_key_file"):
        read_key_file(tmp_path / "none")
    file.write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        read_key_file(file)


@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_drain_takes_a_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="drain_seconds"):
        Listening(drain_seconds=seconds)
