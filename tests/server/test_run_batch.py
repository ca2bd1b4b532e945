"""`octavo run-batch`: replies in OpenAI's format, and a batch that was cut short goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cli.click_harness import run as octavo
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


def test_a_broken_batch_is_refused_before_it_runs(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    for line, words in [
        ({"custom_id": "a"}, "line 2: it is no request"),
        (REQUESTS[0], "'first' stands in two lines"),
        (request("a", "/v1/embeddings"), "line 2: POST /v1/embeddings is not"),
        (request("a", CHAT, stream=True), "line 2: a batch has no streams"),
    ]:
        write(source, [REQUESTS[0], line])
        result = octavo("run-batch", "-i", str(source), "-o", str(target))
        assert result.exit_code == 1
        assert words in result.stderr
        assert not target.exists()
