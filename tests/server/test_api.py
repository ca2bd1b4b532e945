"""The HTTP API against a real server process, through OpenAI's own client where it can say it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.demo import demo_model_path
from octavo.engine.tokenizer import Tokenizer
from octavo.llm import LLM
from octavo.sampling_params import BeamSearchParams, SamplingParams
from processes import engines
from server.live_server import OPEN, TIMEOUT, LiveServer

STORY = "Once upon a time there was a"


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", num_blocks=512, num_threads=1, swap_space=0) as llm:
        yield llm


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error in a reply, which must have the one shape that errors have."""
    assert response.status_code == status, response.text
    body = response.json()
    assert (body.keys(), body["type"]) == ({"type", "error"}, "error")
    assert body["error"].keys() == {"message", "type", "param", "code"}
    return body["error"]


def events_of(server: LiveServer, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [
        line.removeprefix("data: ") for line in response.text.split("\n\n") if line[:1] == "d"
    ]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(c["text"] for c in choices if c["index"] == index)


# ---------------------------------------------------------------- completions


def test_greedy_completion_equals_the_offline_engine(client: openai.OpenAI, llm: LLM) -> None:
    [expected] = llm.generate(STORY, SamplingParams(max_tokens=20, temperature=0), use_tqdm=False)
    completion = client.completions.create(model="demo", prompt=STORY, max_tokens=20, temperature=0)
    assert completion.choices[0].text == expected.outputs[0].text
    assert completion.choices[0].finish_reason == expected.outputs[0].finish_reason
    assert completion.usage is not None
    num_prompt = len(expected.prompt_token_ids)
    assert completion.usage.prompt_tokens == num_prompt
    assert completion.usage.completion_tokens == len(expected.outputs[0].token_ids)
    assert completion.usage.total_tokens == num_prompt + len(expected.outputs[0].token_ids)


def test_seeded_samples_equal_the_offline_engine(server: LiveServer, llm: LLM) -> None:
    params = SamplingParams(n=3, seed=7, max_tokens=12, temperature=0.9, top_k=20)
    [expected] = llm.generate(STORY, params, use_tqdm=False)
    reply = server.complete(STORY, n=3, seed=7, max_tokens=12, temperature=0.9, top_k=20)
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2]
    texts = {o.index: o.text for o in expected.outputs}
    assert {c["index"]: c["text"] for c in reply["choices"]} == texts


def test_token_ids_and_text_give_the_same(server: LiveServer) -> None:
    tokens = server.post("/tokenize", {"prompt": STORY}).json()["tokens"]
    as_text = server.complete(STORY, max_tokens=8)["choices"][0]["text"]
    as_ids = server.complete(tokens, max_tokens=8, return_token_ids=True)["choices"][0]
    assert as_ids["text"] == as_text
    assert as_ids["prompt_token_ids"] == tokens
    detokenized = server.post("/detokenize", {"tokens": as_ids["token_ids"]}).json()
    assert detokenized == {"prompt": as_text}


def test_prompts_of_a_batch_keep_their_order(server: LiveServer) -> None:
    prompts = ["The cat", "One morning", "The king"]
    alone = [server.complete(p, max_tokens=6)["choices"][0]["text"] for p in prompts]
    together = server.complete(prompts, max_tokens=6)
    assert [c["text"] for c in together["choices"]] == alone
    ids = [server.post("/tokenize", {"prompt": p}).json()["tokens"] for p in prompts]
    assert [c["text"] for c in server.complete(ids, max_tokens=6)["choices"]] == alone
    samples = server.complete(prompts, max_tokens=2, n=2, temperature=1, seed=1)["choices"]
    assert [c["index"] for c in samples] == list(range(6))


def test_a_stream_has_the_same_text_and_the_usage(client: openai.OpenAI) -> None:
    # Long enough to come in several pieces even where a slow reader gets many tokens in each,
    # and cached for nobody else.
    arguments: dict[str, Any] = {"model": "demo", "prompt": [STORY, "The dog"], "max_tokens": 96}
    arguments["extra_body"] = {"cache_salt": "pieces"}
    whole = client.completions.create(**arguments, temperature=0)
    stream = client.completions.create(
        **arguments, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    dumped = [chunk.model_dump() for chunk in chunks]
    for index, choice in enumerate(whole.choices):
        assert text_of(dumped, index) == choice.text
        reasons = [c["finish_reason"] for d in dumped for c in d["choices"] if c["index"] == index]
        assert len(reasons) > 1
        assert reasons[:-1] == [None] * (len(reasons) - 1)
        assert reasons[-1] == choice.finish_reason


def test_the_usage_so_far_comes_with_each_chunk_on_demand(server: LiveServer) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": STORY, "max_tokens": 5, "ignore_eos": True, "stream_options": options}
    chunks = events_of(server, "/v1/completions", body)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-2:] == [5, 5]


def test_a_stop_string_never_shows_not_even_in_part(server: LiveServer) -> None:
    text = server.complete(STORY, max_tokens=20)["choices"][0]["text"]
    stop = text[20:26]  # it begins and ends within tokens
    cut = text[: text.index(stop)]
    reply = server.complete(STORY, max_tokens=20, stop=["never", stop])["choices"][0]
    assert (reply["text"], reply["finish_reason"], reply["stop_reason"]) == (cut, "stop", stop)
    body = {"prompt": STORY, "temperature": 0, "max_tokens": 20, "stop": ["never", stop]}
    chunks = events_of(server, "/v1/completions", body)
    shown = ""
    for chunk in chunks:
        shown += chunk["choices"][0]["text"]
        assert cut.startswith(shown)
    assert shown == cut
    assert chunks[-1]["choices"][0]["stop_reason"] == stop
    kept = server.complete(STORY, max_tokens=20, stop=stop, include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == cut + stop


def test_stop_ids_and_min_tokens(server: LiveServer) -> None:
    first = server.complete(STORY, max_tokens=1, return_token_ids=True)["choices"][0]
    [stop_id] = first["token_ids"]
    stopped = server.complete(STORY, stop_token_ids=[stop_id])["choices"][0]
    assert (stopped["text"], stopped["stop_reason"]) == ("", stop_id)
    later = server.complete(STORY, stop_token_ids=[stop_id], min_tokens=3)["choices"][0]
    assert later["text"] != ""


def test_beams_equal_the_offline_engine(server: LiveServer, llm: LLM) -> None:
    params = BeamSearchParams(4, max_tokens=12, length_penalty=0.5, num_return_sequences=2)
    [expected] = llm.beam_search(STORY, params, use_tqdm=False)
    body = {"prompt": STORY, "beam_width": 4, "n": 2, "max_tokens": 12, "length_penalty": 0.5}
    reply = server.post("/v1/completions", body).json()
    assert [c["text"] for c in reply["choices"]] == [o.text for o in expected.outputs]
    assert [c["score"] for c in reply["choices"]] == pytest.approx(
        [o.score for o in expected.outputs]
    )
    chunks = events_of(server, "/v1/completions", body)
    assert [text_of(chunks, i) for i in range(2)] == [o.text for o in expected.outputs]
    answer = server.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "What is a cat?"}], "beam_width": 2}
        | {"max_tokens": 4},
    ).json()
    assert len(answer["choices"]) == 1


def test_logprobs_of_the_output(server: LiveServer) -> None:
    reply = server.complete(STORY, max_tokens=6, logprobs=3, return_token_ids=True)
    choice = reply["choices"][0]
    scores = choice["logprobs"]
    assert len(scores["tokens"]) == len(choice["token_ids"]) == 6
    assert "".join(scores["tokens"]) == choice["text"]
    for token, logprob, top, offset in zip(
        scores["tokens"],
        scores["token_logprobs"],
        scores["top_logprobs"],
        scores["text_offset"],
        strict=True,
    ):
        assert len(top) == 3
        assert top[token] == logprob == max(top.values())
        assert choice["text"][offset:].startswith(token)
    chunks = events_of(
        server,
        "/v1/completions",
        {"prompt": STORY, "max_tokens": 6, "temperature": 0, "logprobs": 3},
    )
    parts = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    for name in scores:
        assert [item for part in parts for item in part[name]] == scores[name]


def loglikelihood(server: LiveServer, context: str, continuation: str, **fields: Any) -> Any:
    """As lm-eval asks: the sum of the continuation's logprobs, and whether it is greedy."""
    tokens = [
        server.post("/tokenize", {"prompt": text}).json()["tokens"]
        for text in (context, context + continuation)
    ]
    num_context, num_all = map(len, tokens)
    reply = server.complete([tokens[1]], echo=True, logprobs=1, seed=1234, **fields)
    scores = reply["choices"][0]["logprobs"]
    assert scores["token_logprobs"][0] is None
    logprobs = scores["token_logprobs"][num_context:num_all]
    top = scores["top_logprobs"][num_context:num_all]
    return (
        reply,
        sum(logprobs),
        all(logprob == max(each.values()) for logprob, each in zip(logprobs, top, strict=True)),
    )


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_loglikelihood(server: LiveServer, llm: LLM, max_tokens: int) -> None:
    greedy = server.complete(STORY, max_tokens=6)["choices"][0]["text"]
    reply, total, is_greedy = loglikelihood(server, STORY, greedy, max_tokens=max_tokens)
    assert is_greedy
    assert reply["choices"][0]["text"].startswith(STORY + greedy)
    assert (reply["choices"][0]["text"] == STORY + greedy) == (max_tokens == 0)
    assert reply["usage"]["completion_tokens"] == max_tokens
    _, other, is_greedy = loglikelihood(server, STORY, " zebra fish", max_tokens=max_tokens)
    assert not is_greedy
    assert other < total
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [expected] = llm.generate(STORY + greedy, params, use_tqdm=False)
    assert expected.prompt_logprobs is not None
    scores = [s.logprob for s in expected.prompt_logprobs if s is not None]
    assert math.isclose(total, sum(scores[-6:]), abs_tol=0.05)


def test_echo_streams_the_prompt_first(server: LiveServer) -> None:
    body = {"prompt": STORY, "echo": True, "logprobs": 1, "max_tokens": 4, "temperature": 0}
    whole = server.complete(STORY, echo=True, logprobs=1, max_tokens=4)["choices"][0]
    chunks = events_of(server, "/v1/completions", body)
    assert chunks[0]["choices"][0]["text"].startswith(STORY)
    assert text_of(chunks) == whole["text"]
    parts = [c["logprobs"]["tokens"] for chunk in chunks for c in chunk["choices"]]
    assert [token for part in parts for token in part] == whole["logprobs"]["tokens"]


def test_prompt_logprobs(server: LiveServer) -> None:
    choice = server.complete(STORY, prompt_logprobs=1, max_tokens=1)["choices"][0]
    tokens = server.post("/tokenize", {"prompt": STORY}).json()["tokens"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token_id, scores in zip(tokens[1:], others, strict=True):
        assert 1 in [score["rank"] for score in scores.values()]
        assert scores[str(token_id)]["logprob"] <= 0


def test_bias_allowed_tokens_and_penalties_arrive(server: LiveServer) -> None:
    [token] = server.post("/tokenize", {"prompt": " castle"}).json()["tokens"]
    biased = server.complete(STORY, max_tokens=3, logit_bias={str(token): 100})["choices"][0]
    assert biased["text"] == " castle" * 3
    allowed = server.complete(STORY, max_tokens=3, allowed_token_ids=[token])["choices"][0]
    assert allowed["text"] == " castle" * 3
    penalized = server.complete(
        STORY, max_tokens=3, logit_bias={str(token): 10}, repetition_penalty=100.0
    )
    assert penalized["choices"][0]["text"] != " castle" * 3


# ---------------------------------------------------------------- chat


def test_chat_whole_and_streamed(client: openai.OpenAI) -> None:
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is a cat?"}]}],
        "temperature": 0,
        "max_completion_tokens": 12,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**arguments)
    message = whole.choices[0].message
    assert message.role == "assistant"
    assert message.content
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None
    assert (
        bytes(byte for each in content for byte in each.bytes or [])
        .decode()
        .startswith(message.content)
    )
    assert all(len(each.top_logprobs) == 2 for each in content)
    chunks = list(client.chat.completions.create(**arguments, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas[1:]] == [None] * (len(deltas) - 1)
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason


def test_what_other_servers_clients_rely_on(server: LiveServer, client: openai.OpenAI) -> None:
    whole = client.completions.create(
        model="demo",
        prompt=STORY,
        max_tokens=4,
        temperature=0,
        logprobs=2,
        extra_body={"return_tokens_as_token_ids": True, "request_id": "mine"},
    )
    assert whole.id == "cmpl-mine"
    assert whole.system_fingerprint
    choice = whole.choices[0]
    assert choice.model_extra is not None
    assert choice.model_extra["prompt_logprobs"] is None
    assert choice.logprobs is not None
    tokens = choice.logprobs.tokens or []
    ids = [int(token.removeprefix("token_id:")) for token in tokens]
    assert server.post("/detokenize", {"tokens": ids}).json() == {"prompt": choice.text}
    tops = choice.logprobs.top_logprobs or []
    assert all(len(top) == 2 for top in tops), "no two tokens look alike"
    reply = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "request_id": "b:1"})
    assert reply.headers["x-request-id"] == "b:1"

    kept = server.complete(STORY, max_tokens=4, truncate_prompt_tokens=3, return_token_ids=True)
    all_ids = server.post("/tokenize", {"prompt": STORY}).json()["tokens"]
    assert kept["choices"][0]["prompt_token_ids"] == all_ids[-3:]
    echoed = server.complete(STORY, max_tokens=0, truncate_prompt_tokens=3, echo=True)
    assert STORY.endswith(echoed["choices"][0]["text"])
    long = server.complete("word " * 30_000, max_tokens=4, truncate_prompt_tokens=-1)
    context = client.models.retrieve("demo").model_extra["max_model_len"]  # type: ignore[index]
    assert long["usage"]["prompt_tokens"] == context - 4


def test_tokens_are_written_as_the_vocabulary_writes_them(server: LiveServer) -> None:
    reply = server.post("/tokenize", {"prompt": "Once upon é", "return_token_strs": True}).json()
    tokenizer = Tokenizer.from_directory(demo_model_path())
    assert reply["token_strs"] == [tokenizer.piece(token) for token in reply["tokens"]]
    assert any("Ġ" in piece for piece in reply["token_strs"])
    assert server.get("/tokenizer_info").json()["tokenizer_class"] == tokenizer.class_name


def test_a_chat_can_echo_what_it_continues(server: LiveServer) -> None:
    body = {
        "messages": [
            {"role": "user", "content": "What is a cat?"},
            {"role": "assistant", "content": "A cat is"},
        ],
        "continue_final_message": True,
        "max_tokens": 6,
        "temperature": 0,
    }
    plain = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    echoed = server.post("/v1/chat/completions", body | {"echo": True}).json()
    assert echoed["choices"][0]["message"]["content"] == f"A cat is{plain}"
    chunks = events_of(server, "/v1/chat/completions", body | {"echo": True})
    deltas = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(deltas) == f"A cat is{plain}"
    special = server.post("/v1/chat/completions", body | {"add_special_tokens": True})
    assert special.status_code == 200


def test_many_clients_at_once(server: LiveServer) -> None:
    """Async streams in one batch say what each says alone."""
    questions = ["What is a cat?", "What is a dog?", "What is a king?", "What is snow?"]

    async def ask(client: openai.AsyncOpenAI, question: str) -> str:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=16,
            stream=True,
        )
        return "".join([c.choices[0].delta.content or "" async for c in stream])

    async def ask_all(together: bool) -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            if together:
                return list(await asyncio.gather(*(ask(client, each) for each in questions)))
            return [await ask(client, each) for each in questions]

    assert asyncio.run(ask_all(together=True)) == asyncio.run(ask_all(together=False))


def test_an_answer_can_be_begun_for_the_assistant(server: LiveServer) -> None:
    messages = [
        {"role": "user", "content": "What is a cat?"},
        {"role": "assistant", "content": "A cat is"},
    ]
    body = {"messages": messages, "continue_final_message": True}
    tokens = server.post("/tokenize", body).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    assert text.endswith("A cat is")
    answer = server.post("/v1/chat/completions", body | {"max_tokens": 4})
    assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
    error = error_of(
        server.post("/v1/chat/completions", body | {"add_generation_prompt": True}), 400
    )
    assert error["param"] == "add_generation_prompt"
    for name in ("self", "messages"):
        variables = {"messages": messages, "chat_template_kwargs": {name: 1}}
        error = error_of(server.post("/v1/chat/completions", variables), 400)
        assert error["param"] == f"chat_template_kwargs.{name}"


# ---------------------------------------------------------------- the cache


def test_cached_tokens_are_reported_and_salts_keep_them_apart(server: LiveServer) -> None:
    prompt = "The old wizard of the tower had a blue hat. " * 6

    def num_cached(**fields: Any) -> int:
        usage = server.complete(prompt, max_tokens=1, **fields)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    # Other tests may have cached a prompt that begins alike, but not under these salts.
    for salt in ("one", "two"):
        assert [num_cached(cache_salt=salt), num_cached(cache_salt=salt) > 0] == [0, True]


def test_pinned_prefixes(server: LiveServer) -> None:
    prefix = "English => German\nThe cat is small. => Die Katze ist klein.\n" * 4
    made = server.post("/v1/prefixes", {"prefix": prefix, "name": "german"})
    assert made.status_code == 201, made.text
    pin = made.json()
    assert pin["name"] == "german"
    assert pin["num_tokens"] == 16 * pin["num_blocks"] > 0
    assert server.get("/v1/prefixes").json()["data"] == [pin]
    usage = server.complete(f"{prefix}The dog is old. =>", max_tokens=1)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= pin["num_tokens"]
    assert (
        "name"
        in error_of(server.post("/v1/prefixes", {"prefix": prefix, "name": "german"}), 400)[
            "message"
        ]
    )
    for useless in ("short", [9] * 2048):
        error = error_of(server.post("/v1/prefixes", {"prefix": useless}), 400)
        assert error["param"] == "prefix"
    deleted = httpx.delete(f"{server.url}/v1/prefixes/german", **OPEN)
    assert deleted.json() == {"name": "german", "object": "prefix", "deleted": True}
    error_of(httpx.delete(f"{server.url}/v1/prefixes/german", **OPEN), 404)
    assert server.get("/v1/prefixes").json()["data"] == []


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": STORY, "temperature": 3}, "temperature"),
        ({"prompt": STORY, "n": 0}, "n"),
        ({"prompt": STORY, "top_p": 0}, "top_p"),
        ({"prompt": STORY, "logprobs": 21}, "logprobs"),
        ({"prompt": STORY, "stop": [""]}, "stop[0]"),
        ({"prompt": STORY, "priority": 1}, "priority"),
        ({"prompt": STORY, "top_k": 1 << 64}, "top_k"),
        ({"prompt": STORY, "n": 257}, "n"),
        ({"prompt": STORY, "beam_width": 257}, "beam_width"),
        ({"prompt": STORY, "beam_width": 2, "n": 0}, "n"),
        ({"prompt": STORY, "beam_width": 2, "length_penalty": 1e300}, "length_penalty"),
        ({"prompt": [1, 2, 1_000_000]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a", [1]]}, "prompt[1]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [1] * 3000}, "prompt"),
        ({"prompt": ["a", "b " * 3000]}, "prompt[1]"),
        ({"prompt": STORY, "cache_salt": "x" * 129}, "cache_salt"),
    ],
)
def test_errors_name_the_field(server: LiveServer, body: dict[str, Any], param: str) -> None:
    error = error_of(server.post("/v1/completions", body), 400)
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_errors_of_chats_name_the_chat_s_own_field(
    server: LiveServer, fields: dict[str, Any], param: str
) -> None:
    body = {"messages": [{"role": "user", "content": "a"}]} | fields
    error = error_of(server.post("/v1/chat/completions", body), 400)
    assert (error["param"], error["code"]) == (param, "invalid_value")
    assert error["message"].startswith(param)


def test_other_errors_have_the_same_shape(server: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-0", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "word " * 3000}]
        )
    assert (long.value.param, long.value.code) == ("messages", "context_length_exceeded")
    error_of(server.get("/v1/nothing"), 404)
    error_of(server.get("/v1/completions"), 405)
    refused = httpx.patch(f"{server.url}/v1/responses/resp_1", **OPEN)
    error_of(refused, 405)
    assert refused.headers["Allow"] == "DELETE, GET, HEAD"
    error_of(server.post("/v1/models", {}), 405)
    url = f"{server.url}/v1/completions"
    headers = {"content-type": "text/plain"}
    as_text = httpx.post(url, content='{"prompt": "a"}', headers=headers, **OPEN)
    assert error_of(as_text, 400)["param"] == "Content-Type"
    error_of(server.post("/v1/completions", {"prompt": "a" * (5 << 20)}), 413)

    def pieces() -> Iterator[bytes]:  # no Content-Length, so the size is found on the way
        yield b'{"prompt": "'
        for _ in range(5):
            yield b"a" * (1 << 20)

    headers = {"content-type": "application/json"}
    error_of(httpx.post(url, content=pieces(), headers=headers, **OPEN), 413)
    error = error_of(
        server.post(
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "chat_template": "{{ messages }}"},
        ),
        400,
    )
    assert error["param"] == "chat_template"
    assert server.complete(STORY, max_tokens=1)["choices"]


def test_what_is_no_good_http_is_refused_in_the_same_shape(server: LiveServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    upgrade = b"Content-Type: application/json\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
    get = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"
    for request, status, words in [
        (get + b"Host: localhost\r\n\r\n", 400, "2 Host headers"),
        (b"GET /v1/models HTTP/1.1\r\n\r\n", 400, "0 Host headers"),
        (get.replace(b"/", b"http://evil.example:80/", 1) + b"\r\n", 403, "'evil.example'"),
        (get.replace(b"/", b"http://[fe80::1]/", 1) + b"\r\n", 403, "'[fe80::1]'"),
        (get + b"a: b\r\n" * 128 + b"\r\n", 431, "more than 128 headers"),
        (get + b"a" * 70_000 + b": b\r\n\r\n", 431, "larger than 65536 bytes"),
        (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", 431, "request line is longer"),
        (b"\x16\x03\x01 TLS\r\n\r\n", 400, "no HTTP/1.1 request"),
        (head + b"X-Long: ", 431, "larger than 65536 bytes"),
        (head + b"Content-Length: 2\r\n" + upgrade + b"\r\n{}", 400, "speaks HTTP/1.1 alone"),
    ]:
        with socket.create_connection(("127.0.0.1", httpx.URL(server.url).port)) as connection:
            connection.settimeout(TIMEOUT)
            connection.sendall(request)
            while not select.select([connection], [], [], 0.02 if status == 431 else TIMEOUT)[0]:
                connection.sendall(b"a" * 10_000)
            reply = b""
            while not reply.endswith(b"}}"):
                reply += connection.recv(1 << 16)
        first, _, rest = reply.partition(b"\r\n")
        assert int(first.split()[1]) == status
        body = json.loads(rest.partition(b"\r\n\r\n")[2])
        assert words in body["error"]["message"]


def test_request_ids(server: LiveServer) -> None:
    body = {"prompt": STORY, "max_tokens": 1}
    named = server.post("/v1/completions", body, **{"X-Request-Id": "my-id.1"})
    assert named.headers["x-request-id"] == "my-id.1"
    assert named.json()["id"] == "cmpl-my-id.1"
    bad = server.post("/v1/completions", body, **{"X-Request-Id": "no spaces"})
    assert len(bad.headers["x-request-id"]) == 32
    assert server.get("/v1/nothing", **{"X-Request-Id": "x"}).headers["x-request-id"] == "x"

    async def ask_twice() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=TIMEOUT, headers={"X-Request-Id": "twin"}) as client:
            url = f"{server.url}/v1/completions"
            return await asyncio.gather(*(client.post(url, json=body) for _ in range(4)))

    twins = asyncio.run(ask_twice())
    assert [reply.status_code for reply in twins] == [200] * 4, "one id may be used twice at once"


def test_models_health_version_and_description(server: LiveServer, client: openai.OpenAI) -> None:
    [model] = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo").id == "demo"
    replicas = {"alive": 1, "starting": 0, "draining": 0, "stopped": 0, "failed": 0}
    assert server.get("/health").json() == {"status": "ok", "replicas": replicas}
    assert server.get("/version").json().keys() == {"version"}
    info = server.get("/tokenizer_info").json()
    assert info["eos_token"]
    assert "messages" in info["chat_template"]
    described = server.get("/openapi.json").json()
    assert "/v1/completions" in described["paths"]
    codes = {c for p in described["paths"].values() for o in p.values() for c in o["responses"]}
    assert "422" not in codes
    assert "<script>" in server.get("/docs").text


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/pool",
        "/docs",
        "/health",
        "/version",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/models/demo",
        "/v1/prefixes",
        "/tokenizer_info",
        "/debug/kv",
        "/dashboard/feed",
    ],
)
def test_head_asks_what_get_does(server: LiveServer, path: str) -> None:
    reply = httpx.head(f"{server.url}{path}", **OPEN)
    assert (reply.status_code, reply.content) == (200, b"")


@pytest.mark.parametrize(("path", "status"), [("/v1/nothing", 404), ("/v1/completions", 405)])
def test_head_asks_for_nothing_else(server: LiveServer, path: str, status: int) -> None:
    assert httpx.head(f"{server.url}{path}", **OPEN).status_code == status


def test_a_stream_outlives_the_engine_process(server: LiveServer) -> None:
    body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "temperature": 0.8, "seed": 3}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, **OPEN) as reply:
        lines = reply.iter_lines()
        text = next(lines)
        [engine] = engines(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        events = [line.removeprefix("data: ") for line in (text, *lines) if line[:1] == "d"]
    assert events.pop() == "[DONE]"
    assert text_of([json.loads(event) for event in events]) == whole
    assert server.get("/health").status_code == 200


def test_the_api_process_has_no_torch(server: LiveServer) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps")
    if not maps.exists():
        pytest.skip("this system does not show what a process has loaded")
    loaded = maps.read_text()
    assert "/tokenizers/" in loaded
    assert "/torch/" not in loaded


def test_a_client_that_goes_away_leaves_nothing_running(server: LiveServer) -> None:
    body = {"prompt": STORY, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, **OPEN) as reply:
        next(reply.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json=body | {"stream": False}, timeout=0.2)
    # Afterwards a request runs in a batch of its own: its blocks are the only ones held.
    for _ in range(200):
        held = server.get("/debug/kv").json()
        if not held["requests"]:
            return
        server.complete(STORY, max_tokens=1)
    pytest.fail(f"still running: {held}")
