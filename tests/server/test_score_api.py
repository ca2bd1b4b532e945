"""POST /v1/score against the log-probabilities of completions."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.endpoints import score as score_module
from octavo.server.http.settings import ServerSettings
from octavo.server.offload import LARGE_REPLY
from server.clients import run, symbolic_client
from server.live_server import LiveServer, live_server

PROMPT = "Once upon a time there was a little girl who lived with her mother. One day she saw a"


def score(server: LiveServer, **body: Any) -> dict[str, Any]:
    reply = server.post("/v1/score", body)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.fixture(scope="module")
def exact() -> Any:
    """In float32, because in bfloat16 scores depend on what else is computed."""
    with live_server("--log-level", "warning", "--dtype", "float32") as running:
        yield running


def test_scores_are_those_of_an_echoed_prompt(exact: LiveServer) -> None:
    continuations = [" big cat.", " dog", "-", " small bird in the tree and was happy"]
    reply = score(exact, prompt=PROMPT, continuation=continuations)
    assert [each["index"] for each in reply["data"]] == [0, 1, 2, 3]
    num_prompt = len(exact.post("/tokenize", {"prompt": PROMPT}).json()["tokens"])
    for text, got in zip(continuations, reply["data"], strict=True):
        echoed = exact.complete(PROMPT + text, max_tokens=0, echo=True, logprobs=1)
        logprobs = echoed["choices"][0]["logprobs"]
        assert got["tokens"] == logprobs["tokens"][num_prompt:]
        assert got["token_logprobs"] == pytest.approx(
            logprobs["token_logprobs"][num_prompt:], abs=1e-4
        )
        assert got["score"] == pytest.approx(sum(got["token_logprobs"]))
        likeliest = [
            max(top, key=top.get) == token
            for top, token in zip(logprobs["top_logprobs"][num_prompt:], got["tokens"], strict=True)
        ]
        assert got["is_greedy"] == all(likeliest)
    again = score(exact, prompt=PROMPT, continuation=continuations)
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 4 * (num_prompt - 17), "the prompt's tokens are not computed again"
    assert [each["score"] for each in again["data"]] == pytest.approx(
        [each["score"] for each in reply["data"]], abs=1e-4
    )


def test_pairs_and_token_ids(exact: LiveServer) -> None:
    def ids(text: str, **fields: Any) -> list[int]:
        return exact.post("/tokenize", {"prompt": text} | fields).json()["tokens"]

    prompts, text = ["The cat", "The king"], " was old."
    tail = ids(text, add_special_tokens=False)
    expected = [each["score"] for each in score(exact, prompt=prompts, continuation=text)["data"]]
    for fields in (
        {"prompt": [ids(each) for each in prompts], "continuation": tail},
        {"prompt": prompts, "continuation": [tail, tail]},
        {"prompt": [ids(each) for each in prompts], "continuation": [text]},
    ):
        got = [each["score"] for each in score(exact, **fields)["data"]]
        assert got == pytest.approx(expected, abs=1e-4)
    named = score(exact, prompt="a", continuation=tail, return_tokens_as_token_ids=True)
    assert named["data"][0]["tokens"] == [f"token_id:{each}" for each in tail]


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": "a"}, "continuation", "it is missing"),
        ({"continuation": "a"}, "prompt", "it is missing"),
        ({"prompt": None, "continuation": "a"}, "prompt", "it is missing"),
        ({"prompt": ["a", "b"], "continuation": ["a"] * 3}, "prompt", "2 for 3 of the other"),
        ({"prompt": "a", "continuation": ["b"] * 10_000}, "continuation", "10000 are more than"),
        ({"prompt": "a " * 10_000, "continuation": ["b"] * 2_048}, "prompt", "40962048 characters"),
        ({"prompt": [5] * 10_000, "continuation": [[5]] * 2_048}, "prompt", "20482048 tokens"),
        ({"prompt": "a", "continuation": ""}, "continuation", "at least 1 character"),
        ({"prompt": "a", "continuation": [[10**9]]}, "continuation", "outside the vocabulary"),
        ({"prompt": [10**9], "continuation": "a"}, "prompt", "outside the vocabulary"),
        ({"prompt": [[1], [-1]], "continuation": "a"}, "prompt[1]", "outside the vocabulary"),
        ({"prompt": "a", "continuation": "x " * 2_000_000}, "continuation", "context"),
        (
            {"prompt": "a", "continuation": "b", "text_1": "a", "text_2": "b"},
            "text_1",
            "prompt and continuation",
        ),
        ({"text_1": "a", "text_2": "b"}, "text_1", "prompt and continuation"),
        ({"prompt": "a", "continuation": "b", "truncate_prompt_tokens": 1}, None, "another one"),
    ],
)
def test_bad_pairs_are_refused_by_name(
    server: LiveServer, fields: dict[str, Any], param: str | None, words: str
) -> None:
    reply = server.post("/v1/score", fields)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["param"] == (param or "truncate_prompt_tokens")
    assert words in error["message"]


@pytest.mark.parametrize("num_tokens", [2, LARGE_REPLY])
def test_long_scores_are_written_in_a_thread(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    for name in ("_score", "reply"):
        write = getattr(score_module, name)

        def writing(*args: Any, write: Any = write) -> Any:
            threads.append(threading.current_thread())
            return write(*args)

        monkeypatch.setattr(score_module, name, writing)

    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",)))
            body = {"prompt": [1, 2], "continuation": [3] * num_tokens}
            status, _, data = await post(app, "/v1/score", json.dumps(body).encode())
            assert status == 200, data
            [scored] = json.loads(data)["data"]
            assert len(scored["tokens"]) == len(scored["token_logprobs"]) == num_tokens

    run(test())
    assert len(threads) == 2
    is_large = num_tokens + 1 > LARGE_REPLY
    assert (threading.current_thread() in threads) is not is_large
