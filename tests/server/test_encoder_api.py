"""A server with a model that has an encoder, and what it refuses by name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from server.live_server import OPEN, LiveServer, live_server

INPUT = [5, 6, 7, 8, 9, 1] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, T5ForConditionalGeneration]:
    torch.manual_seed(0)
    made = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
        )
    ).eval()
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    directory = tmp_path_factory.mktemp("t5")
    made.save_pretrained(directory)
    return directory, made


@pytest.fixture(scope="module")
def t5(model: tuple[Path, T5ForConditionalGeneration]) -> Iterator[LiveServer]:
    options = (str(model[0]), "--log-level", "warning", "--block-size", "8")
    with live_server(
        *options, "--max-num-batched-tokens", "100", "--max-num-seqs", "16"
    ) as running:
        yield running


def reference(model: tuple[Path, Any], decoder_input_ids: list[int]) -> list[int]:
    """The greedy tokens that transformers adds."""
    begun = torch.tensor([decoder_input_ids])
    out = model[1].generate(
        torch.tensor([INPUT]), decoder_input_ids=begun, max_new_tokens=8, do_sample=False
    )
    tokens: list[int] = out[0, len(decoder_input_ids) :].tolist()
    return tokens


def test_completions_equal_transformers(t5: LiveServer, model: tuple[Path, Any]) -> None:
    fields = {"max_tokens": 8, "return_token_ids": True}
    first, again = (t5.complete(INPUT, **fields) for _ in range(2))
    for reply in (first, again):
        [choice] = reply["choices"]
        assert choice["token_ids"] == reference(model, [0])
        assert choice["prompt_token_ids"] == INPUT
        assert reply["usage"]["prompt_tokens"] == len(INPUT)
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (first, again)]
    assert cached == [0, len(INPUT)]


def test_the_decoder_begins_with_decoder_input_ids(t5: LiveServer, model: tuple[Path, Any]) -> None:
    fields = {"max_tokens": 8, "return_token_ids": True, "decoder_input_ids": [4, 9]}
    both = t5.complete([INPUT, INPUT], **fields)["choices"]
    assert [choice["token_ids"] for choice in both] == [reference(model, [0, 4, 9])] * 2


def test_a_decoder_s_cached_tokens_are_none_of_the_prompt_s(t5: LiveServer) -> None:
    prompt, given = [*range(3, 11)], [*range(2, 42)]
    for num_cached in (0, len(prompt)):
        usage = t5.complete(prompt, max_tokens=2, decoder_input_ids=given)["usage"]
        assert usage["prompt_tokens"] == len(prompt)
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached


def test_both_lengths_are_told_and_hold(t5: LiveServer) -> None:
    """The encoder's is what a step computes, less a token of the decoder's."""
    [card] = t5.get("/v1/models").json()["data"]
    assert card == t5.get(f"/v1/models/{card['id']}").json()
    longest = card["max_encoder_len"]
    assert longest == 99
    assert card["max_model_len"] > 1_000
    assert t5.complete([5] * longest, max_tokens=1)["usage"]["prompt_tokens"] == longest
    response = t5.post("/v1/completions", {"prompt": [5] * (longest + 1), "max_tokens": 1})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


@pytest.mark.parametrize(("given", "kept"), [(3, 3), (99, 99), (-1, 99)])
def test_the_input_of_an_encoder_is_truncated_to_its_own_length(
    t5: LiveServer, given: int, kept: int
) -> None:
    fields = {"max_tokens": 2, "return_token_ids": True, "truncate_prompt_tokens": given}
    prompt = [*range(64)] * 100
    [choice] = t5.complete(prompt, **fields)["choices"]
    assert choice["prompt_token_ids"] == prompt[-kept:]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"truncate_prompt_tokens": 100}, "truncate_prompt_tokens", "more than the 99 tokens"),
        ({"echo": True}, "echo", "does not continue the input of an encoder"),
        ({"prompt_logprobs": 1}, "prompt_logprobs", "an encoder does not predict its input"),
        ({"decoder_input_ids": []}, "decoder_input_ids", "at least 1"),
        ({"decoder_input_ids": "x"}, "decoder_input_ids", "valid array"),
        ({"decoder_input_ids": [64]}, "decoder_input_ids", "outside the vocabulary of 64"),
        ({"decoder_input_ids": [4] * 10_000}, "decoder_input_ids", "leave no room for output"),
        ({"prompt": [4] * 1_000_000}, "prompt", "1000000 tokens"),
    ],
    ids=lambda each: each if isinstance(each, str) else None,
)
def test_what_has_no_meaning_with_an_encoder_is_refused(
    t5: LiveServer, fields: dict[str, Any], param: str, message: str
) -> None:
    response = t5.post("/v1/completions", {"prompt": INPUT, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_there_are_no_conversations_and_no_prefixes_to_pin(t5: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    for path, body, param in (
        ("/v1/chat/completions", {"messages": messages}, "messages"),
        ("/v1/prefixes", {"prefix": INPUT}, "prefix"),
    ):
        response = t5.post(path, body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param
        assert "encoder" in response.json()["error"]["message"]


def test_the_dashboard_names_both_block_tables(t5: LiveServer) -> None:
    with httpx.stream("GET", f"{t5.url}/dashboard/feed", **OPEN) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: hello"
        about = json.loads(next(lines).removeprefix("data: "))
    assert about["kv_group_names"] == ["full attention", "cross-attention"]


def test_a_decoder_alone_has_no_length_of_an_encoder(server: LiveServer) -> None:
    [card] = server.get("/v1/models").json()["data"]
    assert card["max_encoder_len"] is None
    assert server.get("/tokenizer_info").json()["model_max_length"] == card["max_model_len"]


def test_decoder_input_ids_are_refused_without_an_encoder(server: LiveServer) -> None:
    response = server.post("/v1/completions", {"prompt": "Once", "decoder_input_ids": [1]})
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("decoder_input_ids", "invalid_value")
