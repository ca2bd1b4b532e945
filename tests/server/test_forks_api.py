"""Forks of responses over HTTP: the tokens of children, and how they are joined and cancelled."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest

from octavo.outputs import SequenceDelta
from octavo.server.http.forks import Child
from server.live_server import OPEN, TIMEOUT, LiveServer, live_server
from server.test_api import error_of

STORY = "Once upon a time there was a"
GREEDY = {"temperature": 0, "return_token_ids": True}
SAMPLED = {"temperature": 0.9, "seed": 5, "return_token_ids": True}


def fork(server: LiveServer, parent: str, **fields: Any) -> dict[str, Any]:
    """A fork that must succeed."""
    response = server.post("/v1/forks", {"parent": parent, "return_token_ids": True, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def tokens_of(reply: dict[str, Any], index: int = 0) -> list[int]:
    """All tokens of a choice, those of its prompt included."""
    choice = reply["choices"][index]
    return [*choice["prompt_token_ids"], *choice["token_ids"]]


def encode(server: LiveServer, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    return server.post("/tokenize", body).json()["tokens"]


def outputs(reply: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in sorted(reply["choices"], key=lambda c: c["index"])]


@pytest.fixture(scope="module")
def parent(server: LiveServer) -> dict[str, Any]:
    return server.complete(STORY, max_tokens=29, n=2, ignore_eos=True, **SAMPLED)


def test_a_child_gets_what_the_same_tokens_get_alone(
    server: LiveServer, parent: dict[str, Any]
) -> None:
    """Greedy and sampled, from the end, the middle and the prompt, with and without a suffix."""
    whole = tokens_of(parent, 1)
    suffix = encode(server, " and so he")
    for position, own in [(None, []), (None, suffix), (17, []), (9, suffix), (1, []), (30, suffix)]:
        for fields in (GREEDY, {"n": 3, **SAMPLED}):
            asked = {"max_tokens": 12, **fields}
            reply = fork(
                server,
                parent["id"],
                choice=1,
                position=position,
                suffix=own or None,
                **asked,
            )
            prompt = [*whole[:position], *own]
            alone = server.post("/v1/completions", {"prompt": prompt, **asked}).json()
            assert reply["choices"] == alone["choices"]
            assert reply["id"].startswith("fork-")
            assert reply["object"] == "text_completion"
    as_text = fork(server, parent["id"], choice=1, suffix=" and so he", max_tokens=12, **GREEDY)
    as_ids = fork(server, parent["id"], choice=1, suffix=suffix, max_tokens=12, **GREEDY)
    assert as_text["choices"] == as_ids["choices"]


def test_an_answer_of_a_chat_is_forked_with_its_whole_conversation(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": STORY}], "max_tokens": 9, "temperature": 0}
    chat = server.post("/v1/chat/completions", {**body, "ignore_eos": True}).json()
    total = chat["usage"]["total_tokens"]
    reply = fork(server, chat["id"], position=total - 4, max_tokens=4, temperature=0)
    rest = server.post("/detokenize", {"tokens": outputs(reply)[0]}).json()["prompt"]
    assert chat["choices"][0]["message"]["content"].endswith(rest)
    assert reply["usage"]["prompt_tokens"] == total - 4


def test_children_have_suffixes_and_parameters_of_their_own(
    server: LiveServer, parent: dict[str, Any]
) -> None:
    children = [
        {"suffix": " The king", "max_tokens": 3},
        {"suffix": " The dog", "temperature": 1, "seed": 3},
        {},
    ]
    reply = fork(server, parent["id"], children=children, n=2, max_tokens=7, **SAMPLED)
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    whole = tokens_of(parent)
    for i, child in enumerate(children):
        own = encode(server, child["suffix"]) if "suffix" in child else []
        given = {k: v for k, v in child.items() if k != "suffix"}
        asked = {"max_tokens": 7, "n": 2, **SAMPLED, **given}
        alone = server.post("/v1/completions", {"prompt": [*whole, *own], **asked}).json()
        assert outputs(reply)[2 * i : 2 * i + 2] == outputs(alone)


def test_a_child_of_an_ended_response_computes_its_own_tokens_alone(server: LiveServer) -> None:
    """All that the parent has computed is found, its last block included, which is not full."""
    body = {"max_tokens": 21, "ignore_eos": True, "cache_salt": "alone", **GREEDY}
    parent = server.complete(STORY, **body)
    num_tokens = parent["usage"]["total_tokens"]
    assert (num_tokens - 1) % 16, "the last block must not be full"
    reply = fork(server, parent["id"], suffix=[5, 6, 7], max_tokens=1)
    usage = reply["usage"]
    assert usage["prompt_tokens"] == num_tokens + 3
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_tokens - 1


def test_a_fork_of_a_running_response_is_streamed_beside_it(server: LiveServer) -> None:
    body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "stream": True, **GREEDY}
    seen: list[int] = []
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, **OPEN) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            seen += chunk["choices"][0]["token_ids"]
            if len(seen) >= 40:
                break
        asked = {"max_tokens": 9, "suffix": [3, 4], "n": 2, **SAMPLED}
        answer = server.post(
            "/v1/forks", {"parent": chunk["id"], "position": 45, "stream": True, **asked}
        )
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.text.split("\n\n")
        assert lines[-2] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines if "{" in line]
    ids = {event["id"] for event in events}
    assert len(ids) == 1
    choices = [choice for event in events for choice in event["choices"]]
    prompt = next(c["prompt_token_ids"] for c in choices if "prompt_token_ids" in c)
    assert prompt[-2:] == [3, 4]
    assert prompt[:-2] == [*encode_with_start(server), *seen][:45]
    alone = server.complete(prompt, max_tokens=9, n=2, **SAMPLED)
    for index in range(2):
        got = [t for c in choices if c["index"] == index for t in c["token_ids"]]
        assert got == outputs(alone)[index]
    # The stream of a fork that has ended takes its id along; the parent was cancelled with it.
    error_of(server.get(f"/v1/forks/{ids.pop()}"), 404)


def encode_with_start(server: LiveServer) -> list[int]:
    return server.post("/tokenize", {"prompt": STORY}).json()["tokens"]


def test_children_in_the_background_are_joined_and_cancelled(
    server: LiveServer, parent: dict[str, Any]
) -> None:
    body = {"parent": parent["id"], "background": True, "ignore_eos": True, **SAMPLED}
    children = [{"suffix": [i], "max_tokens": length} for i, length in [(3, 6), (4, 450)]]
    started = server.post("/v1/forks", {**body, "children": children, "n": 2})
    assert started.status_code == 202, started.text
    fork_id = started.json()["id"]
    assert started.json()["num_children"] == 4
    cancelled = httpx.delete(f"{server.url}/v1/forks/{fork_id}/2", **OPEN).json()
    assert cancelled == {"id": fork_id, "object": "fork", "cancelled": 1}
    first = server.get(f"/v1/forks/{fork_id}/0").json()
    prompt = [*tokens_of(parent), 3]
    alone = server.complete(prompt, max_tokens=6, n=2, ignore_eos=True, **SAMPLED)
    assert [choice["index"] for choice in first["choices"]] == [0]
    assert outputs(first) == outputs(alone)[:1]
    whole = server.get(f"/v1/forks/{fork_id}").json()
    assert whole["id"] == first["id"] == fork_id
    reasons = [choice["finish_reason"] for choice in whole["choices"]]
    assert reasons == ["length", "length", "cancelled", "length"]
    short, long = outputs(whole)[2:]
    assert len(short) < len(long) == 450
    # Whoever joins later gets all of it, as a stream, too.
    events = server.get(f"/v1/forks/{fork_id}?stream=true").text.split("\n\n")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events if "{" in event]
    assert events[-2] == "data: [DONE]"
    for index in range(4):
        pieces = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert [t for piece in pieces for t in piece["token_ids"]] == outputs(whole)[index]
        assert pieces[-1]["finish_reason"] == reasons[index]
    # A child can be a parent, too.
    again = fork(server, fork_id, choice=1, max_tokens=4, **GREEDY)
    assert again["choices"][0]["prompt_token_ids"] == tokens_of(whole, 1)


def test_all_children_end_when_the_fork_is_cancelled(
    server: LiveServer, parent: dict[str, Any]
) -> None:
    body = {"parent": parent["id"], "background": True, "ignore_eos": True, "max_tokens": 450}
    fork_id = server.post("/v1/forks", {**body, "n": 8}).json()["id"]
    joined: list[dict[str, Any]] = []
    joining = threading.Thread(
        target=lambda: joined.append(server.get(f"/v1/forks/{fork_id}").json())
    )
    joining.start()
    time.sleep(0.05)
    deleted = httpx.delete(f"{server.url}/v1/forks/{fork_id}", **OPEN).json()
    assert deleted["cancelled"] == 8
    joining.join(TIMEOUT)
    assert [choice["finish_reason"] for choice in joined[0]["choices"]] == ["cancelled"] * 8
    again = httpx.delete(f"{server.url}/v1/forks/{fork_id}", **OPEN).json()
    assert again["cancelled"] == 0
    search = server.post("/v1/forks", {**body, "beam_width": 4, "n": 2}).json()["id"]
    error_of(server.get(f"/v1/forks/{search}/0"), 404)
    httpx.delete(f"{server.url}/v1/forks/{search}", **OPEN).raise_for_status()
    assert server.get(f"/v1/forks/{search}").json()["choices"] == []
    assert_idle(server)


def test_beams_are_forked_once_they_are_known(server: LiveServer) -> None:
    search = server.complete(STORY, max_tokens=12, beam_width=3, n=3, return_token_ids=True)
    for index in range(3):
        reply = fork(server, search["id"], choice=index, max_tokens=5, **GREEDY)
        alone = server.complete(tokens_of(search, index), max_tokens=5, **GREEDY)
        assert reply["choices"] == alone["choices"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"parent": "cmpl-nobody"}, 404, "parent"),
        ({"parent": ""}, 400, "parent"),
        ({"parent": 7}, 400, "parent"),
        ({"choice": 2}, 400, "choice"),
        ({"choice": -1}, 400, "choice"),
        ({"position": 0}, 400, "position"),
        ({"position": 100_000}, 400, "position"),
        ({"position": 1.5}, 400, "position"),
        ({"position": "3"}, 400, "position"),
        ({"n": 0}, 400, "n"),
        ({"n": 10_000}, 400, "n"),
        ({"suffix": ""}, 400, "suffix"),
        ({"suffix": [1] * 5000}, 400, "suffix"),
        ({"suffix": [10**9]}, 400, "suffix"),
        ({"suffix": "a", "children": [{}]}, 400, "suffix"),
        ({"children": []}, 400, "children"),
        ({"children": [{}] * 300}, 400, "children"),
        ({"children": [{}, {"temperature": 9}]}, 400, "children[1].temperature"),
        ({"children": [{}, {"suffix": "a " * 3000}]}, 400, "children[1].suffix"),
        ({"children": [{"n": 2}]}, 400, "children[0].n"),
        ({"children": [{}, {"max_tokens": 0}]}, 400, "children[1].max_tokens"),
        (
            {"children": [{"response_format": {"type": "xml"}}]},
            400,
            "children[0].response_format.type",
        ),
        ({"children": [{"allowed_token_ids": [10**9]}]}, 400, "children[0].allowed_token_ids"),
        (
            {"children": [{}, {"allowed_token_ids": [10**9]}]},
            400,
            "children[1].allowed_token_ids",
        ),
        (
            {"children": [{}, {"temperature": 1}], "allowed_token_ids": [10**9]},
            400,
            "allowed_token_ids",
        ),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"prompt": "a"}, 400, "prompt"),
        ({"cache_salt": "a"}, 400, "cache_salt"),
        ({"background": True, "stream": True}, 400, "background"),
        ({"whatever": 1}, 400, "whatever"),
    ],
)
def test_bad_forks_are_refused_by_name(
    server: LiveServer, parent: dict[str, Any], fields: dict[str, Any], status: int, param: str
) -> None:
    error = error_of(server.post("/v1/forks", {"parent": parent["id"], **fields}), status)
    assert error["param"] == param
    assert_idle(server)


def test_forks_that_are_not_there_cannot_be_joined_or_cancelled(
    server: LiveServer, parent: dict[str, Any]
) -> None:
    body = {"parent": parent["id"], "background": True, "max_tokens": 1}
    known = server.post("/v1/forks", body).json()["id"]
    for path in ("/v1/forks/nothing", f"/v1/forks/{known}/1", f"/v1/forks/{known}/-1"):
        error_of(server.get(path), 404)
        error_of(httpx.delete(f"{server.url}{path}", **OPEN), 404)
    error_of(server.get(f"/v1/forks/{known}/x"), 400)


def test_more_text_of_a_child_does_not_copy_what_it_has() -> None:
    class Counted(str):
        """Counts the characters that are copied when it is added to another text."""

        num_copied = 0

        def __radd__(self, other: str) -> str:
            Counted.num_copied += len(other)
            return str.__add__(other, self)

    child = Child()
    for number in range(100):
        child.add(SequenceDelta("r", 0, Counted("word "), [number], [], None, None))
    assert (len(child.token_ids), Counted.num_copied) == (100, 0)


def test_only_the_latest_responses_and_the_tenants_own_can_be_forked() -> None:
    options = ["--max-forkable", "2", "--api-key", "first-key:a", "--api-key", "second-key:b"]
    with live_server("--log-level", "warning", *options) as server:
        mine = {"authorization": "Bearer first-key"}
        ids = [
            server.post("/v1/completions", {"prompt": STORY, "max_tokens": 1}, **mine).json()["id"]
            for _ in range(3)
        ]
        body = {"max_tokens": 1, "background": True}
        for each, status in [(ids[0], 404), (ids[2], 202), (ids[2], 202)]:
            reply = server.post("/v1/forks", {"parent": each, **body}, **mine)
            assert reply.status_code == status, reply.text
        others = {"authorization": "Bearer second-key"}
        error_of(server.post("/v1/forks", {"parent": ids[2], **body}, **others), 404)
        error_of(server.get(f"/v1/forks/{reply.json()['id']}", **others), 404)
        url = f"{server.url}/v1/forks/{reply.json()['id']}"
        error_of(httpx.delete(url, headers=others, **OPEN), 404)


def assert_idle(server: LiveServer) -> None:
    """Nothing runs, and no block is held."""
    for _ in range(1000):
        metrics = server.get("/metrics").text
        values = {
            name: float(line.split()[-1])
            for line in metrics.splitlines()
            for name in ("octavo_num_requests_running", "octavo_num_requests_waiting")
            if line.startswith(name)
        }
        if values and not any(values.values()):
            return
        time.sleep(0.02)
    raise AssertionError(f"something still runs: {values}")
