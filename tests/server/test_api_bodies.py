"""Bodies, parameters and keys: what is accepted, and the words with which the rest is refused."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from starlette.requests import Request
from starlette.types import Message

from octavo.errors import ConfigError, InvalidRequest
from octavo.sampling_params import BeamSearchParams, SamplingParams
from octavo.server.api.bodies import decode_body, read_body
from octavo.server.api.context import Context
from octavo.server.api.errors import ApiError, ClientGone
from octavo.server.api.keys import ApiKeys, Tenant, read_key_file
from octavo.server.api.params import chat_params, check_streaming, completion_params
from octavo.server.api.requests import ChatBody, CompletionBody
from octavo.server.api.token_texts import TokenTexts
from octavo.server.client import EngineClient
from octavo.server.settings import Listening, ServerSettings
from server.clients import run

HI = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return decode_body(msgspec.json.encode({"prompt": "a"} | fields), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    return decode_body(msgspec.json.encode({"messages": HI} | fields), ChatBody)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "did you mean temperature?"),
        ({"zzz": 1}, "zzz", "there is no such field"),
        ({"max_tokens": "5"}, "max_tokens", "expected `int | null`, got `str`"),
        ({"temperature": True}, "temperature", "expected `float | null`, got `bool`"),
        ({"prompt": None}, "prompt", "expected"),
        ({"prompt": [1.5]}, "prompt[0]", "expected"),
        ({"stop": [1]}, "stop[0]", "expected `str`"),
        ({"priority": 1 << 64}, "priority", "expected `int` <= 9223372036854775807"),
        ({"priority": -(1 << 64)}, "priority", "expected `int` >= -9223372036854775808"),
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
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "contnt": "hi"}]}, "messages[0].contnt"),
        ({"messages": [*HI, {"role": "tool", "tool_call_id": "1"}]}, "messages[1].tool_call_id"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
        ),
    ],
)
def test_a_bad_chat_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.reply.error.param == param


def test_fields_that_ask_for_nothing_are_let_pass() -> None:
    body = chat(
        tools=None,
        tool_choice="none",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        messages=[{"role": "assistant", "content": "hi", "tool_calls": None, "refusal": None}],
        top_p=0.5,
    )
    assert (body.top_p, body.messages[0].content) == (0.5, "hi")


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
        b'{"prompt": NaN}',
        b"[]",
        b'{"prompt":' + b"[" * 100_000,
    ],
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(data, CompletionBody)
    assert caught.value.status == 400


def request(*messages: Message, **headers: str) -> Request:
    """A POST whose body comes in pieces."""
    incoming = list(messages)
    named = headers | {"content-type": "application/json"}
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in named.items()]

    async def receive() -> Message:
        return incoming.pop(0)

    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def test_many_prompts_do_not_hold_up_the_event_loop() -> None:
    threads = set()

    class Recorder:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            threads.add(threading.current_thread())
            return [len(text)]

    client = SimpleNamespace(tokenizer=Recorder())
    context = Context(cast("EngineClient", client), ServerSettings(("m",)), TokenTexts(None))
    here = threading.current_thread()
    assert run(context.tokenize_all(["a", "bc"], "prompt", True)) == [[1], [2]]
    assert threads == {here}
    threads.clear()
    assert run(context.tokenize_all(["a" * 100] * 100, "prompt", True)) == [[100]] * 100
    assert here not in threads


def test_a_client_may_leave_while_it_sends() -> None:
    first = {"type": "http.request", "body": b'{"prompt":', "more_body": True}
    with pytest.raises(ClientGone):
        run(read_body(request(first, {"type": "http.disconnect"}), CompletionBody))


def test_compressed_bodies_are_refused_by_name() -> None:
    whole = {"type": "http.request", "body": b"\x1f\x8b"}
    with pytest.raises(ApiError, match="Content-Encoding: gzip: send the body as it is"):
        run(read_body(request(whole, content_encoding="gzip"), CompletionBody))


def test_one_point_nought_is_one() -> None:
    body = completion(max_tokens=5.0, prompt=[1.0, 2], temperature=1.0)
    assert (body.max_tokens, body.prompt, body.temperature) == (5, [1, 2], 1.0)
    with pytest.raises(ApiError, match="max_tokens: expected"):
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


def test_beam_search_takes_its_own_fields_and_refuses_those_of_drawing() -> None:
    fields = {"length_penalty": 0.5, "early_stopping": "never", "max_tokens": 9}
    params = completion_params(completion(beam_width=4, n=2, temperature=1, **fields), {"top_k": 5})
    assert params == BeamSearchParams(4, num_return_sequences=2, **fields)  # type: ignore[arg-type]
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
        check_streaming(completion(**fields))
    assert caught.value.reply.error.param == param


def test_keys_are_found_by_bearer_and_by_basic() -> None:
    keys = ApiKeys(["first-key-1", "second-key-2:acme"])
    assert keys.tenant("Bearer first-key-1") == Tenant("")
    assert keys.tenant("bearer second-key-2") == Tenant("acme")
    assert keys.tenant("Basic YW55Om5lOnNlY29uZC1rZXktMg==") is None  # any:ne:second-key-2
    assert keys.tenant("Basic YW55OnNlY29uZC1rZXktMg==") == Tenant("acme")  # any:second-key-2
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
