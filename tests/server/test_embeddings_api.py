"""POST /v1/embeddings, by OpenAI's client where it can say it."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from typing import Any

import numpy as np
import openai
import pytest

from octavo.errors import InvalidRequest
from octavo.llm import LLM
from octavo.sampling_params import PoolingParams
from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.settings import ServerSettings
from server.clients import run, symbolic_client
from server.live_server import LiveServer

TEXTS = ["A cat is a small animal.", "A dog is a small animal.", "The sun is warm."]


def test_embeddings_equal_the_offline_engines(server: LiveServer) -> None:
    with LLM("demo", num_blocks=512, num_threads=1, swap_space=0) as llm:
        params = PoolingParams(pooling="mean")
        expected = [each.embedding for each in llm.embed(TEXTS, params, use_tqdm=False)]
        num_tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)  # type: ignore[union-attr]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        reply = client.embeddings.create(
            model="demo", input=TEXTS, extra_body={"pooling": "mean"}
        )  # which asks for base64
        floats = client.embeddings.create(
            model="demo", input=TEXTS, encoding_format="float", extra_body={"pooling": "mean"}
        )
    assert [each.index for each in reply.data] == [0, 1, 2]
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == num_tokens
    for got, other, vector in zip(reply.data, floats.data, expected, strict=True):
        assert got.embedding == pytest.approx(vector, abs=5e-3)  # bfloat16, other batches
        assert got.embedding == pytest.approx(other.embedding, abs=5e-3)
        assert np.linalg.norm(got.embedding) == pytest.approx(1, abs=1e-5)


def test_inputs_of_all_kinds(server: LiveServer) -> None:
    ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in TEXTS]

    def vectors(given: Any, **fields: Any) -> list[list[float]]:
        reply = server.post("/v1/embeddings", {"input": given} | fields)
        assert reply.status_code == 200, reply.text
        return [each["embedding"] for each in reply.json()["data"]]

    whole = vectors(TEXTS)
    assert np.array(vectors(ids)) == pytest.approx(np.array(whole), abs=5e-3)
    assert np.array(vectors(ids[0])) == pytest.approx(np.array(whole[:1]), abs=5e-3)
    assert np.array(vectors(TEXTS[0])) == pytest.approx(np.array(whole[:1]), abs=5e-3)
    assert len(vectors("a", dimensions=7)[0]) == 7
    packed = vectors(TEXTS[0], encoding_format="base64")[0]
    assert np.frombuffer(base64.b64decode(packed), "<f4") == pytest.approx(  # type: ignore[arg-type]
        np.array(whole[0]), abs=5e-3
    )
    assert len(vectors("word " * 20_000, truncate_prompt_tokens=-1)) == 1


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({}, "input", "it is missing"),
        ({"input": None}, "input", "it is missing"),
        ({"input": ""}, "input", "at least 1 character"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [""]}, "input[0]", "at least 1 character"),
        ({"input": [[]]}, "input[0]", "at least 1 item"),
        ({"input": 5}, "input", "5"),
        ({"input": ["a", None]}, "input[1]", "valid string"),
        ({"input": [["a"]]}, "input[0][0]", "valid integer"),
        ({"input": ["a"] * 10_000}, "input", "10000 are more than 2048"),
        ({"input": [[10**9]]}, "input", "outside the vocabulary"),
        ({"input": [[1]] * 1000 + [[-1]]}, "input[1000]", "outside the vocabulary"),
        ({"input": "x " * 2_000_000}, "input", "context"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": 10**6}, "dimensions", "1000000 is more than the model's"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "pooling": "max"}, "pooling", "'mean', 'last' or 'cls'"),
        ({"input": "a", "inputs": "a"}, "inputs", "did you mean input?"),
        ({"messages": [{}], "input": "a"}, "messages", "/tokenize"),
        ({"input": "a", "priority": 1}, "priority", "--policy priority"),
    ],
)
def test_bad_inputs_are_refused_by_name(
    server: LiveServer, fields: dict[str, Any], param: str, words: str
) -> None:
    reply = server.post("/v1/embeddings", fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


async def ask(app: Any, **body: Any) -> tuple[int, Any]:
    status, _, data = await post(app, "/v1/embeddings", json.dumps(body).encode())
    return status, json.loads(data)


def test_many_inputs_go_in_parts_and_others_get_in_between() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",), max_prompts=64))
            prompts = [[1 + i % 500, 1 + i // 500] for i in range(2048)]
            many = asyncio.create_task(ask(app, input=prompts, pooling="mean", normalize=False))
            while not client.open_requests:
                await asyncio.sleep(0.001)
            assert len(client.open_requests) <= 64
            status, _, _ = await post(app, "/v1/completions", b'{"prompt": [1], "max_tokens": 1}')
            assert status == 200
            assert not many.done()
            status, reply = await many
            assert status == 200
            assert len({tuple(each["embedding"]) for each in reply["data"]}) > 2000
            assert client.open_requests == {}

    run(test())


def test_embeddings_outlive_the_engine_process() -> None:
    async def test() -> None:
        async with symbolic_client(
            "step=0.005", max_num_seqs=16, max_num_batched_tokens=16
        ) as client:
            app = create_app(client, ServerSettings(("demo",)))
            prompts = [list(range(1 + i, 200 + i)) for i in range(4)]
            fields = {"input": prompts, "pooling": "mean", "normalize": False}
            _, expected = await ask(app, **fields)
            again = asyncio.create_task(ask(app, **fields, cache_salt="other"))
            while client.gauges.step_seqs == 0 or not client.open_requests:
                await asyncio.sleep(0.001)
            os.kill(client.info.pid, signal.SIGKILL)
            status, reply = await again
            assert status == 200
            assert reply["data"] == expected["data"]
            assert client.info.num_restarts == 1

    run(test())


def test_what_cannot_be_pooled_is_refused_by_the_client_too() -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            with pytest.raises(InvalidRequest, match="dimensions"):
                await client.generate([1], PoolingParams(dimensions=10**6))

    run(test())
