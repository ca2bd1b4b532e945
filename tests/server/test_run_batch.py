"""`octavo run-batch`: replies in OpenAI's format, and a batch that was cut short goes on."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import select
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from cli.click_harness import run as octavo
from octavo.errors import InvalidRequest
from octavo.server.http.batch import prepare, run_batch
from server.live_server import OPTIONS

CHAT = "/v1/chat/completions"


def request(name: str, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": {"max_tokens": 3, **body}}


REQUESTS = [
    request("first", "/v1/completions", prompt="Once upon a time", temperature=0),
    request("second", CHAT, messages=[{"role": "user", "content": "What is a cat?"}]),
    request("wrong", "/v1/completions", prompt="Once", temperature=7),
]


def write(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> dict[str, dict[str, Any]]:
    replies = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({reply["custom_id"] for reply in replies}) == len(replies)
    return {reply["custom_id"]: reply["response"] for reply in replies}


def test_a_batch_and_its_resumption(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, REQUESTS)
    command = ["run-batch", "-i", str(source), "-o", str(target), *OPTIONS]
    first = octavo(*command)
    assert first.exit_code == 0, first.output
    assert "3 requests: 0 answered before, 2 answered now, 1 refused" in first.stderr
    replies = read(target)
    assert {name: reply["status_code"] for name, reply in replies.items()} == {
        "first": 200,
        "second": 200,
        "wrong": 400,
    }
    assert replies["first"]["body"]["usage"]["completion_tokens"] == 3
    assert replies["second"]["body"]["choices"][0]["message"]["role"] == "assistant"
    assert replies["wrong"]["body"]["error"]["param"] == "temperature"

    lines = target.read_text().splitlines()
    failed = json.loads(lines[1])
    failed["response"]["status_code"] = 503
    target.write_text("\n".join([lines[0], json.dumps(failed), lines[2][:40]]))
    kept = json.loads(lines[0])
    again = octavo(*command)
    assert again.exit_code == 0, again.output
    assert "3 requests: 1 answered before" in again.stderr
    resumed = read(target)
    assert resumed.keys() == replies.keys()
    assert resumed[kept["custom_id"]] == kept["response"]


def test_no_file_but_replies_is_overwritten(tmp_path: Path) -> None:
    source, notes = tmp_path / "in.jsonl", tmp_path / "notes.txt"
    write(source, REQUESTS)
    notes.write_text("what I wrote down\n")
    for target, words in [
        (source, "is the input, too"),
        (notes, "line 1 of"),
        (tmp_path / "nowhere" / "out.jsonl", "cannot be written (No such file or directory)"),
    ]:
        result = octavo("run-batch", "-i", str(source), "-o", str(target))
        assert result.exit_code == 1
        assert result.stderr.startswith("error: output: ")
        assert words in result.stderr
    assert source.read_text() == "".join(json.dumps(each) + "\n" for each in REQUESTS)
    assert notes.read_text() == "what I wrote down\n"
    assert sorted(tmp_path.iterdir()) == [source, notes]


def test_a_link_stays_a_link_to_a_file_of_the_same_mode(tmp_path: Path) -> None:
    source, target, link = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "link"))
    write(source, REQUESTS[:1])
    target.touch(mode=0o600)
    link.symlink_to(target.name)
    command = ["run-batch", "-i", str(source), "-o", str(link), *OPTIONS]
    assert octavo(*command).exit_code == 0
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o600
    assert read(target).keys() == {"first"}


def test_a_pipe_is_refused_because_it_cannot_be_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    result = octavo("run-batch", "-i", str(pipe), "-o", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 1
    assert result.stderr == f"error: input: {pipe} is no regular file: it is read twice\n"


def answered(path: Path) -> list[tuple[str | None, int, str | None]]:
    """Of each reply: custom_id, status, and the message if it is an error."""
    return [
        (
            reply["custom_id"],
            reply["response"]["status_code"],
            reply["response"]["body"].get("error", {}).get("message"),
        )
        for reply in map(json.loads, path.read_text().splitlines())
    ]


def test_a_bad_line_gets_an_error_reply_of_its_own(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [
        b"\xef\xbb\xbf" + json.dumps(REQUESTS[0]).encode(),
        b"",
        b"{",
        b'{"custom_id": "\xff"}',
        b'{"custom_id": "deep", "url": "/v1/completions", "body": ' + b"[" * 100_000,
        json.dumps({"custom_id": "half", "url": 5}).encode(),
        json.dumps(request("other", "/v1/models")).encode(),
        json.dumps(request("stream", CHAT, stream=True)).encode(),
        json.dumps(request("list", CHAT) | {"body": [1]}).encode(),
    ]
    source.write_bytes(b"\n".join(lines))
    command = ["run-batch", "-i", str(source), "-o", str(target), *OPTIONS]
    result = octavo(*command)
    assert result.exit_code == 0, result.output
    assert "8 requests: 0 answered before, 1 answered now, 7 refused" in result.stderr
    replies = answered(target)
    assert [reply for reply in replies if reply[1] == 200] == [("first", 200, None)]
    errors = sorted((message or "", name) for name, status, message in replies if status == 400)
    for (message, name), (start, expected_name) in zip(
        errors,
        [
            ("line 3: it is not a request (", None),
            ("line 4: it is not a request (", None),
            ("line 5: it is not a request (", None),
            ("line 6: it is not a request (", "half"),
            ("line 7: POST /v1/models is not POST to", "other"),
            ("line 8: a batch has no streams", "stream"),
            ("the body: input should be an object", "list"),
        ],
        strict=True,
    ):
        assert (message.startswith(start), name) == (True, expected_name), message
    again = octavo(*command)
    assert "8 requests: 8 answered before, 0 answered now, 0 refused" in again.stderr
    assert answered(target) == replies


@pytest.mark.slow
def test_requests_may_share_an_id(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    prompts = ["Once", "The dog", "Once"]
    write(source, [request("same", "/v1/completions", prompt=p, echo=True) for p in prompts])
    command = ["run-batch", "-i", str(source), "-o", str(target), *OPTIONS]
    assert octavo(*command).exit_code == 0

    def begun() -> list[str]:
        bodies = [json.loads(line)["response"]["body"] for line in target.read_text().splitlines()]
        texts = [body["choices"][0]["text"] for body in bodies]
        return sorted(p for text in texts for p in set(prompts) if text.startswith(p))

    assert begun() == sorted(prompts)
    target.write_text("".join(target.read_text().splitlines(keepends=True)[1:]))
    again = octavo(*command)
    assert "3 requests: 2 answered before, 1 answered now" in again.stderr
    assert begun() == sorted(prompts), "the one that was missing is asked again"


def test_a_full_disk_is_an_error_and_no_traceback(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    write(source, REQUESTS)
    result = octavo("run-batch", "-i", str(source), "-o", "/dev/full", *OPTIONS)
    assert result.exit_code == 1
    last = result.stderr.splitlines()[-1]
    assert last == "error: output: /dev/full cannot be written (No space left on device)"
    assert "Traceback" not in result.output


@pytest.mark.timeout(300)  # what waits for a reader hangs, and hears no signals
def test_a_named_pipe_gets_all_replies_and_may_have_no_reader(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    write(source, REQUESTS)
    os.mkfifo(pipe)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("{}")(scope, receive, send)

    def run() -> None:
        asyncio.run(run_batch(answer, batch, 1, lambda tally: None))

    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    hung_up = select.poll()
    hung_up.register(reader, 0)
    batch = prepare(source, pipe)
    assert not hung_up.poll(0), "the reader must not see an end yet"
    run()
    assert os.read(reader, 1 << 16).count(b"\n") == len(REQUESTS)
    os.close(reader)
    with pytest.raises(InvalidRequest, match=r"pipe cannot be written \(No such device"):
        run()


def test_a_pipe_that_is_full_stops_nothing_else(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    write(source, REQUESTS)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(reader, True)
    body = json.dumps("x" * fcntl.fcntl(reader, fcntl.F_GETPIPE_SZ))
    go_on = threading.Event()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(body)(scope, receive, send)

    def read_when_told() -> tuple[bool, list[bytes]]:
        was_told = go_on.wait(60)  # a loop that waits for the pipe cannot tell
        with os.fdopen(reader, "rb") as file:
            return was_told, file.readlines()

    async def run() -> tuple[bool, list[bytes]]:
        batch = prepare(source, pipe)
        reading = asyncio.create_task(asyncio.to_thread(read_when_told))
        asyncio.get_running_loop().call_later(0.1, go_on.set)
        await run_batch(answer, batch, 3, lambda tally: None)
        return await reading

    was_told, lines = asyncio.run(run())
    assert was_told
    bodies = [json.dumps(json.loads(line)["response"]["body"]) for line in lines]
    assert bodies == [body] * len(REQUESTS)
