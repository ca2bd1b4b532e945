"""A request that cannot be computed, as HTTP clients and batches see it; others go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from octavo.server.http.app import create_app
from octavo.server.http.batch import Tally, post, prepare, run_batch
from octavo.server.http.settings import ServerSettings
from server.clients import complete, run, symbolic_client
from server.symbolic_engine import NOT_FINITE, NOT_QUEUED

SETTINGS = ServerSettings(("demo",))
URL = "/v1/completions"


def asked(prompt: Any, **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "max_tokens": 5, "ignore_eos": True} | fields).encode()


@pytest.mark.parametrize(
    ("token", "code", "words"),
    [
        (NOT_FINITE, "logits_not_finite", "they are not"),
        (NOT_QUEUED, "engine_failed", "could not queue the request"),
    ],
)
def test_it_is_an_error_500_or_an_event(token: int, code: str, words: str) -> None:
    async def test() -> None:
        async with symbolic_client("step=0.002") as client:
            app = create_app(client, SETTINGS)
            others = asyncio.gather(*[complete(client, [seed], 90, seed) for seed in range(8)])
            for prompt in ([1, token], [[1, 2], [token]]):
                status, _, data = await post(app, URL, asked(prompt))
                error = json.loads(data)["error"]
                assert (status, error["type"], error["code"]) == (500, "server_error", code)
                assert words in error["message"]
            beams = asked([token], beam_width=2)
            assert (await post(app, URL, beams))[0] == 500
            status, _, data = await post(app, URL, asked([1, token], stream=True, n=2))
            if token == NOT_FINITE:  # it was accepted, and its stream has begun
                assert status == 200
                *events, error_event, done = data.decode().strip().split("\n\n")
                assert done == "data: [DONE]"
                assert json.loads(error_event.removeprefix("data: "))["error"]["code"] == code
                assert events == []
            else:
                assert status == 500
            await others
            assert client.open_requests == {}
            assert client.info.num_restarts == 0

    run(test())


def test_in_a_batch_it_is_one_line(tmp_path: Path) -> None:
    input_path, output_path = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = {"fine": [1, 2], "wrong": [1, NOT_FINITE], "fine, too": [3]}
    input_path.write_bytes(
        b"\n".join(
            b'{"custom_id": "%b", "url": "%b", "body": %b}' % (name.encode(), URL.encode(), body)
            for name, body in ((name, asked(prompt)) for name, prompt in prompts.items())
        )
    )

    async def test() -> Tally:
        async with symbolic_client() as client:
            app = create_app(client, SETTINGS)
            return await run_batch(app, prepare(input_path, output_path), 3, lambda tally: None)

    tally = run(test())
    assert (tally.num_done, tally.num_failed) == (3, 1)
    replies = {
        line["custom_id"]: line for line in map(json.loads, output_path.read_text().splitlines())
    }
    assert {name: each["response"]["status_code"] for name, each in replies.items()} == {
        "fine": 200,
        "wrong": 500,
        "fine, too": 200,
    }
    error = replies["wrong"]["response"]["body"]["error"]
    assert (error["type"], error["code"]) == ("server_error", "logits_not_finite")
