"""/v1/files and /v1/batches: uploads, answers, cancelling, restarts, and what is refused."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import time
from io import FileIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo.errors import ConfigError
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http import batch as batch_module
from octavo.server.http import batches as batches_module
from octavo.server.http.app import create_app
from octavo.server.http.batch import post
from octavo.server.http.batches import Batches
from octavo.server.http.errors import ApiError
from octavo.server.http.file_store import FileRecord, FileStore, Shelf
from octavo.server.http.keys import ANONYMOUS, ApiKeys, Tenant
from octavo.server.http.settings import ServerSettings
from server.clients import run, symbolic_client
from server.live_server import OPEN, LiveServer, live_server
from server.scripted import ScriptedClient

FINAL = {"completed", "failed", "cancelled", "expired"}


def line(number: int, url: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    fields = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": url, "body": fields}


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def storing(directory: Path) -> Any:
    options = ("--files-dir", str(directory), "--max-file", "1MiB", "--max-files", "30")
    options += ("--max-body", "64KiB")
    with live_server("--log-level", "warning", *options) as running:
        yield running


def test_a_batch_by_openai_s_client(storing: LiveServer) -> None:
    with openai.OpenAI(base_url=f"{storing.url}/v1", api_key="any", max_retries=0) as client:
        lines = [line(i) for i in range(3)] + [line(3, max_tokens=-1), line(4, url="/v1/models")]
        file = client.files.create(file=("a.jsonl", jsonl(*lines)), purpose="batch")
        assert (file.filename, file.bytes, file.purpose) == ("a.jsonl", len(jsonl(*lines)), "batch")
        assert client.files.content(file.id).content == jsonl(*lines)
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="24h",
            metadata={"who": "me"},
        )
        while batch.status not in FINAL:
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.metadata == {"who": "me"}
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
        assert batch.output_file_id is not None
        assert batch.error_file_id is not None
        answers = [
            json.loads(each) for each in client.files.content(batch.output_file_id).iter_lines()
        ]
        expected = storing.complete("Once upon a time", max_tokens=4)["choices"][0]["text"]
        assert {a["custom_id"] for a in answers} == {"c0", "c1", "c2"}
        texts = {a["response"]["body"]["choices"][0]["text"] for a in answers}
        assert texts == {expected}
        errors = client.files.content(batch.error_file_id).text.splitlines()
        statuses = {(e := json.loads(each))["custom_id"]: e["response"] for each in errors}
        assert statuses["c3"]["body"]["error"]["param"] == "max_tokens"
        assert "is not POST to /v1/completions" in statuses["c4"]["body"]["error"]["message"]
        assert [each.id for each in client.batches.list()] == [batch.id]
        listed = {each.id: each.purpose for each in client.files.list()}
        assert listed[batch.output_file_id] == "batch_output"
        with pytest.raises(openai.ConflictError, match="is completed"):
            client.batches.cancel(batch.id)
        assert client.files.delete(file.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(file.id)


def upload(server: LiveServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/files", **OPEN, **fields)


def remove(server: LiveServer, file_id: str) -> None:
    httpx.delete(f"{server.url}/v1/files/{file_id}", **OPEN).raise_for_status()


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"files": {"file": ("a", b"x")}}, 400, "purpose"),
        ({"files": {"a": ("a", b"x")}, "data": {"purpose": "batch"}}, 400, "a"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "assistants"}}, 400, "purpose"),
        ({"files": {"file": (None, b"x")}, "data": {"purpose": "batch"}}, 400, "file"),
        ({"files": {"file": ("a", b"x" * (2 << 20))}, "data": {"purpose": "batch"}}, 413, None),
        (
            {"files": {"file": ("a", b"x" * ((1 << 20) + 1))}, "data": {"purpose": "batch"}},
            413,
            None,
        ),
        ({"json": {"purpose": "batch"}}, 400, "Content-Type"),
        (
            {
                "content": b"--b\r\nx",
                "headers": {"content-type": "multipart/form-data; boundary=b"},
            },
            400,
            "body",
        ),
        (
            {"content": b"", "headers": {"content-type": "multipart/form-data; boundary=b"}},
            400,
            "body",
        ),
        (
            {
                "content": b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch',
                "headers": {"content-type": "multipart/form-data; boundary=b"},
            },
            400,
            "body",
        ),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": ["batch", "batch"]}}, 400, "purpose"),
        ({"files": {"file": ("a", b"x")}, "data": {"purpose": "b" * 257}}, 400, "purpose"),
        (
            {"files": [("file", ("a", b"x")), ("file", ("b", b"y"))], "data": {"purpose": "batch"}},
            400,
            "file",
        ),
        (
            {
                "content": b"--b\r\n\r\n--b" * 5000,
                "headers": {"content-type": "multipart/form-data; boundary=b"},
            },
            400,
            "body",
        ),
    ],
)
def test_bad_uploads_are_refused(
    storing: LiveServer, directory: Path, fields: dict[str, Any], status: int, param: str | None
) -> None:
    before = set(directory.rglob("*"))
    reply = upload(storing, **fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, param), reply.text
    assert set(directory.rglob("*")) == before


def test_pages_of_others_upload_nothing(storing: LiveServer) -> None:
    form = {"files": {"file": ("a", b"x\n")}, "data": {"purpose": "batch"}}
    reply = upload(storing, **form, headers={"origin": "https://elsewhere.example"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (403, "unknown_origin")
    assert upload(storing, **form, headers={"origin": storing.url}).status_code == 200


def test_a_file_of_any_bytes_comes_back(storing: LiveServer) -> None:
    data = bytes(range(256)) * 40 + b"\r\n--\r\n\r\n\n\r" * 3 + b"\r\n--edge\r\r\n--edg" * 9999
    file = upload(
        storing,
        files={"file": ("ä.jsonl", data)},
        data={"purpose": "batch"},
        headers={"content-type": 'multipart/form-data; boundary="edge of it"'},
    ).json()
    assert file["filename"] == "ä.jsonl"
    content = f"/v1/files/{file['id']}/content"
    assert storing.get(content).content == data
    for given, expected in (("bytes=3-9", data[3:10]), ("bytes=9-3", data), ("lines=1", data)):
        assert storing.get(content, Range=given).content == expected
    beyond = storing.get(content, Range=f"bytes={len(data)}-")
    assert beyond.headers["content-range"] == f"bytes */{len(data)}"
    assert (beyond.status_code, beyond.json()["error"]["param"]) == (416, "Range")
    empty = upload(storing, files={"file": ("a", b"")}, data={"purpose": "batch"}).json()
    assert storing.get(f"/v1/files/{empty['id']}/content").content == b""
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    for file_id, param in ((empty["id"], "input_file_id"), ("file-x", "input_file_id")):
        reply = storing.post("/v1/batches", body | {"input_file_id": file_id})
        assert reply.json()["error"]["param"] == param
    for fields, param in (
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"input_file_id": None}, "input_file_id"),
    ):
        reply = storing.post("/v1/batches", body | {"input_file_id": file["id"]} | fields)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x\n" * 50_001, "the file has more than 50000 requests; create several batches"),
        (
            b"x\n" + b"y" * 70_000,
            "line 2 of the file has 70000 bytes; at most 65536 are allowed",
        ),
    ],
)
def test_a_batch_that_is_too_large_is_refused_before_it_runs(
    storing: LiveServer, content: bytes, message: str
) -> None:
    form: dict[str, Any] = {"files": {"file": ("a", content)}, "data": {"purpose": "batch"}}
    file_id = upload(storing, **form).json()["id"]
    body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file_id}
    reply = storing.post("/v1/batches", body)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "input_file_id")
    assert error["message"] == f"input_file_id: {message}"
    remove(storing, file_id)


def test_there_are_only_so_many_files(storing: LiveServer) -> None:
    form: dict[str, Any] = {"files": {"file": ("a", b"x\n")}, "data": {"purpose": "batch"}}
    made = []
    while (reply := upload(storing, **form)).status_code == 200:
        made.append(reply.json()["id"])
    assert reply.json()["error"]["code"] == "too_many_files"
    listed = storing.get("/v1/files?limit=5").json()
    assert ([each["id"] for each in listed["data"]], listed["has_more"]) == (made[:-6:-1], True)
    error = storing.get("/v1/files?limit=0").json()["error"]
    assert error["message"] == "limit: input should be greater than or equal to 1, not '0'"
    assert error["param"] == "limit"
    assert storing.get("/v1/files?after=x").status_code == 404
    for file_id in made:
        remove(storing, file_id)


def test_the_endpoints_are_described_with_examples(storing: LiveServer) -> None:
    paths = storing.get("/openapi.json").json()["paths"]
    curl, python = (each["source"] for each in paths["/v1/files"]["post"]["x-codeSamples"])
    assert "-F purpose=batch -F file=@requests.jsonl" in curl
    assert "files={'file': open('requests.jsonl', \"rb\")}" in python
    assert "/v1/batches/{batch_id}/cancel" in paths


def test_without_a_directory_there_are_no_files(server: LiveServer) -> None:
    assert server.get("/v1/files").status_code == 404
    assert "/v1/files" not in server.get("/openapi.json").json()["paths"]


# ---------------------------------------------------------------- beside the engine


def token_line(number: int, num_tokens: int) -> dict[str, Any]:
    body = {"prompt": [1 + number], "max_tokens": num_tokens, "ignore_eos": True, "seed": 1}
    return {"custom_id": f"c{number}", "url": "/v1/completions", "body": body}


def add_file(app: Any, directory: Path, *lines: dict[str, Any]) -> Any:
    files = app.state.context.files
    part = files.new_part()
    part.write_bytes(jsonl(*lines))
    return files.add(part, "a.jsonl", "batch", ANONYMOUS)


async def ended(batches: Batches, record_id: str) -> Any:
    while not (record := batches.records.get(record_id, ANONYMOUS, "batch")).has_ended:
        await asyncio.sleep(0.01)
    return record


def answers_of(app: Any, file_id: str | None) -> dict[str, Any]:
    files = app.state.context.files
    text = files.path(files.records.get(file_id, ANONYMOUS, "f")).read_text()
    replies = map(json.loads, text.splitlines())
    return {each["custom_id"]: each["response"]["body"] for each in replies}


def test_a_batch_goes_on_after_a_restart(tmp_path: Path) -> None:
    settings = ServerSettings(("demo",), files_dir=str(tmp_path))

    async def test() -> None:
        async with symbolic_client("step=0.002", max_num_seqs=4) as client:
            app = create_app(client, settings)
            batches = app.state.context.batches
            batches.start(app)
            # Of these, 64 are open at once: the others wait for this process.
            file = add_file(app, tmp_path, *[token_line(i, 10) for i in range(120)])
            record = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            while record.completed < 10:
                await asyncio.sleep(0.01)
            await batches.stop()
            with pytest.raises(ConfigError, match="another server uses it"):
                FileStore(tmp_path, Shelf(1, 1))
            app.state.context.files.close()
            num_before = client.counters.num_output_tokens
            assert num_before < 1200

            app = create_app(client, settings)
            batches = app.state.context.batches
            batches.start(app)
            again = await ended(batches, record.id)
            assert (again.status, again.completed, again.failed) == ("completed", 120, 0)
            answers = answers_of(app, again.output_file_id)
            assert answers.keys() == {f"c{i}" for i in range(120)}
            assert client.counters.num_output_tokens - num_before < 1200, "the rest alone was asked"
            await batches.stop()
            app.state.context.files.close()

    run(test())


def test_a_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    async def test() -> None:
        async with symbolic_client("step=0.005", max_num_seqs=4) as client:
            app = create_app(client, ServerSettings(("demo",), files_dir=str(tmp_path)))
            batches = app.state.context.batches
            batches.start(app)
            file = add_file(app, tmp_path, *[token_line(i, 20) for i in range(150)])
            first = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            second = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            while not first.completed:
                await asyncio.sleep(0.01)
            for record in (first, second):
                status, _, _ = await post(app, f"/v1/batches/{record.id}/cancel", b"")
                assert status == 200
            record = await ended(batches, first.id)
            assert record.status == "cancelled"
            assert 0 < record.completed == len(answers_of(app, record.output_file_id)) < 150
            other = await ended(batches, second.id)
            assert (other.status, other.output_file_id) == ("cancelled", None)
            while client.open_requests:
                await asyncio.sleep(0.01)
            await batches.stop()
            app.state.context.files.close()

    run(test())


def test_a_batch_waits_where_there_is_no_room(tmp_path: Path) -> None:
    async def test() -> None:
        supervision = Supervision(max_waiting=2)
        async with symbolic_client("step=0.01", supervision=supervision, max_num_seqs=1) as client:
            app = create_app(client, ServerSettings(("demo",), files_dir=str(tmp_path)))
            batches = app.state.context.batches
            batches.start(app)
            file = add_file(app, tmp_path, *[token_line(i, 2) for i in range(12)])
            record = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            record = await ended(batches, record.id)
            assert (record.completed, record.failed) == (12, 0)
            await batches.stop()
            app.state.context.files.close()

    run(test())


def test_a_page_of_files_of_one_purpose_is_full(tmp_path: Path) -> None:
    async def test() -> None:
        scripted = ScriptedClient()
        app = create_app(scripted, ServerSettings(("demo",), files_dir=str(tmp_path)))
        files = app.state.context.files
        made = []
        for purpose in ("batch", "batch_output", "batch", "batch_output", "batch_output"):
            part = files.new_part()
            part.write_bytes(b"x")
            made.append(files.add(part, "a", purpose, ANONYMOUS).id)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1", api_key="any", http_client=http
        ) as client:
            found = [each.id async for each in client.files.list(purpose="batch", limit=1)]
            assert found == [made[2], made[0]]
            after = [each.id async for each in client.files.list(purpose="batch", after=made[3])]
            assert after == found
        files.close()
        await scripted.close()

    asyncio.run(test())


def test_uploads_at_the_same_time_are_no_more_than_there_is_room_for(tmp_path: Path) -> None:
    async def test() -> None:
        scripted = ScriptedClient()
        settings = ServerSettings(("demo",), files_dir=str(tmp_path), max_files=2)
        app = create_app(scripted, settings)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            form: dict[str, Any] = {"files": {"file": ("a", b"x\n")}, "data": {"purpose": "batch"}}
            replies = await asyncio.gather(*(client.post("/v1/files", **form) for _ in range(5)))
        assert sorted(each.status_code for each in replies) == [200, 200, 400, 400, 400]
        app.state.context.files.close()
        await scripted.close()

    asyncio.run(test())


def test_a_tenant_does_not_take_the_room_of_others(tmp_path: Path) -> None:
    """Also where they see each other's files: their keys have no salt."""

    async def test() -> None:
        scripted = ScriptedClient()
        keys = ApiKeys(["key-of-one", "key-of-two"])
        settings = ServerSettings(("demo",), api_keys=keys, files_dir=str(tmp_path), max_files=2)
        app = create_app(scripted, settings)
        transport = httpx.ASGITransport(app)
        statuses = []
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            form: dict[str, Any] = {"files": {"file": ("a", b"x\n")}, "data": {"purpose": "batch"}}
            for key in ("key-of-one",) * 3 + ("key-of-two",) * 3:
                headers = {"authorization": f"Bearer {key}"}
                sent = await client.post("/v1/files", headers=headers, **form)
                statuses.append(sent.status_code)
        assert statuses == [200, 200, 400] * 2
        app.state.context.files.close()
        await scripted.close()

    asyncio.run(test())


def test_batches_have_room_for_what_they_will_write(tmp_path: Path) -> None:
    """Where there is none, they are refused, rather than their answers lost."""

    async def test() -> None:
        scripted = ScriptedClient()
        settings = ServerSettings(("demo",), files_dir=str(tmp_path), max_files=6)
        app = create_app(scripted, settings)
        batches, files = app.state.context.batches, app.state.context.files
        url = "/v1/chat/completions"
        good = {
            "custom_id": "a",
            "url": url,
            "body": {"messages": [{"role": "user", "content": "hi"}]},
        }
        file = add_file(app, tmp_path, good, {**good, "method": "GET"})
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        async with http as client:

            async def create() -> httpx.Response:
                fields = {"input_file_id": file.id, "endpoint": url, "completion_window": "24h"}
                return await client.post("/v1/batches", json=fields)

            async def upload() -> int:
                form: dict[str, Any] = {
                    "files": {"file": ("a", b"x")},
                    "data": {"purpose": "batch"},
                }
                return (await client.post("/v1/files", **form)).status_code

            created = [await create() for _ in range(3)]
            assert [each.status_code for each in created] == [200, 200, 400]
            error = created[2].json()["error"]
            assert (error["param"], error["code"]) == ("input_file_id", "too_many_files")
            assert "you have 1 files, your batches may write 4, and 6 are" in error["message"]
            assert [await upload(), await upload()] == [200, 400]
            batches.start(app)
            for each in created[:2]:
                record = await ended(batches, each.json()["id"])
                assert record.status == "completed"
                assert len(answers_of(app, record.output_file_id)) == 1
                assert len(answers_of(app, record.error_file_id)) == 1
            assert len(files.records) == 6
            assert [(await create()).status_code, await upload()] == [400, 400]
            files.remove(files.records.get(record.error_file_id, ANONYMOUS, "file_id"))
            assert await upload() == 200
        await batches.stop()
        files.close()
        await scripted.close()

    asyncio.run(test())


def test_one_file_is_checked_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may be as long as a file, and many at once would not fit into memory."""
    count = batches_module._num_requests
    num_checking: list[int] = []
    most = 0

    def checking(*args: Any) -> int:
        nonlocal most
        num_checking.append(1)
        most = max(most, len(num_checking))
        time.sleep(0.01)
        num_checking.pop()
        return count(*args)

    monkeypatch.setattr(batches_module, "_num_requests", checking)

    async def test() -> None:
        scripted = ScriptedClient()
        app = create_app(scripted, ServerSettings(("demo",), files_dir=str(tmp_path)))
        batches = app.state.context.batches
        file = add_file(app, tmp_path, line(0))
        create = (batches.create(ANONYMOUS, file, "/v1/completions", None) for _ in range(4))
        created = asyncio.gather(*create)
        await asyncio.sleep(0)
        assert batches.uses(file), "who deleted it now would take it from a batch"
        assert len({record.id for record in await created}) == 4
        assert batches.uses(file)
        app.state.context.files.close()
        await scripted.close()

    asyncio.run(test())
    assert most == 1


def test_bytes_without_a_record_do_not_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FileStore(tmp_path, Shelf(1, 10))

    def added() -> FileRecord:
        part = files.new_part()
        part.write_bytes(b"x")
        return files.add(part, "a", "batch", ANONYMOUS)

    kept = added()

    def full(source: Path, target: Path) -> None:
        if target.suffix == ".json":
            raise OSError(errno.ENOSPC, "no space left")
        source.rename(target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(ApiError, match="no space left"):
            added()
    names = {path.name for path in files.records.directory.iterdir()}
    assert names == {kept.id, f"{kept.id}.json"}
    # The process was killed between the two.
    lost = added()
    (files.records.directory / f"{lost.id}.json").unlink()
    files.close()
    files = FileStore(tmp_path, Shelf(1, 10))
    assert [each.id for each in files.records] == [kept.id]
    assert files.path(kept).exists()
    assert not files.path(lost).exists()
    files.close()


def test_tenants_see_their_own_files_alone(tmp_path: Path) -> None:
    keys = ApiKeys(["key-of-one:one", "key-of-two:two"])

    async def test() -> None:
        async with symbolic_client() as client:
            settings = ServerSettings(("demo",), api_keys=keys, files_dir=str(tmp_path))
            app = create_app(client, settings)
            batches = app.state.context.batches
            batches.start(app)
            transport = httpx.ASGITransport(app)
            url = "http://localhost"
            one, two = (
                httpx.AsyncClient(
                    transport=transport, base_url=url, headers={"authorization": f"Bearer {key}"}
                )
                for key in ("key-of-one", "key-of-two")
            )
            data = jsonl(token_line(0, 3))
            form: dict[str, Any] = {"files": {"file": ("a", data)}, "data": {"purpose": "batch"}}
            file = (await one.post("/v1/files", **form)).json()
            body = {
                "input_file_id": file["id"],
                "endpoint": "/v1/completions",
                "completion_window": "24h",
            }
            assert (await two.post("/v1/batches", json=body)).status_code == 404
            batch = (await one.post("/v1/batches", json=body)).json()
            while batch["status"] not in FINAL:
                await asyncio.sleep(0.01)
                batch = (await one.get(f"/v1/batches/{batch['id']}")).json()
            assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
            assert len((await one.get("/v1/files")).json()["data"]) == 2
            assert (await two.get("/v1/files")).json()["data"] == []
            assert (await two.get("/v1/batches")).json()["data"] == []
            for path in (f"/v1/files/{file['id']}", f"/v1/batches/{batch['id']}"):
                assert (await two.get(path)).status_code == 404
            await batches.stop()
            app.state.context.files.close()

    run(test())


def test_a_batch_goes_on_if_its_cancelling_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",), files_dir=str(tmp_path)))
            batches, files = app.state.context.batches, app.state.context.files
            file = add_file(app, tmp_path, token_line(0, 2))
            record = await batches.create(ANONYMOUS, file, "/v1/completions", None)

            def full(source: Path, target: Path) -> None:
                raise OSError(errno.ENOSPC, "no space left")

            with monkeypatch.context() as patch:
                patch.setattr(os, "replace", full)
                status, _, _ = await post(app, f"/v1/batches/{record.id}/cancel", b"")
            assert status == 507
            batches.start(app)
            record = await ended(batches, record.id)
            assert (record.status, record.cancelled_at) == ("completed", None)
            assert answers_of(app, record.output_file_id).keys() == {"c0"}
            await batches.stop()
            files.close()

    run(test())


def test_a_batch_that_cannot_be_recorded_takes_no_other_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "MAX_BATCHES", 1)

    async def test() -> None:
        scripted = ScriptedClient()
        app = create_app(scripted, ServerSettings(("demo",), files_dir=str(tmp_path)))
        batches = app.state.context.batches
        file = add_file(app, tmp_path, line(0, "/v1/models"))
        batches.start(app)
        first = await batches.create(ANONYMOUS, file, "/v1/completions", None)
        await ended(batches, first.id)

        def full(source: Path, target: Path) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            with pytest.raises(ApiError, match="no space left"):
                await batches.create(ANONYMOUS, file, "/v1/completions", None)
        assert list(batches.records) == [first]
        second = await batches.create(ANONYMOUS, file, "/v1/completions", None)
        assert list(batches.records) == [second]
        await batches.stop()
        app.state.context.files.close()
        await scripted.close()

    asyncio.run(test())


@pytest.mark.parametrize("num_added", [0, 1])
def test_a_batch_that_fails_at_its_end_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_added: int
) -> None:
    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",), files_dir=str(tmp_path)))
            batches, files = app.state.context.batches, app.state.context.files
            file = add_file(app, tmp_path, token_line(0, 2), token_line(1, -1))
            add, added = files.add, list[FileRecord]()

            def add_until_it_fails(*arguments: Any) -> FileRecord:
                if len(added) == num_added:
                    raise RuntimeError("a bug")
                added.append(add(*arguments))
                return added[-1]

            monkeypatch.setattr(files, "add", add_until_it_fails)
            batches.start(app)
            record = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            record = await ended(batches, record.id)
            assert (record.status, record.error) == ("failed", "a bug")
            assert record.output_file_id == (added[0].id if added else None)
            kept = {file.id, *(each.id for each in added)}
            names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
            records = {f"{each}.json" for each in (*kept, record.id)}
            assert names == {"lock", *kept, *records}
            await batches.stop()
            files.close()

    run(test())


@pytest.mark.parametrize(("room", "is_of_bytes"), [(0, True), (700, True), (2, False), (5, False)])
def test_a_batch_goes_on_when_the_disk_is_full_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int, is_of_bytes: bool
) -> None:
    """It is full while answers are written, or when files and the record are at the end."""
    monkeypatch.setattr(batches_module, "STORAGE_SECONDS", 0.01)
    num_left, num_refused, replace = room, 0, os.replace

    def has_room(size: int) -> None:
        nonlocal num_left, num_refused
        if size > num_left and num_refused < 2:
            num_refused += 1
            raise OSError(errno.ENOSPC, "no space left")
        num_left -= size

    def replace_if_room(source: Path, target: Path) -> None:
        has_room(1)
        replace(source, target)

    class Disk(FileIO):
        def write(self, data: Any) -> int:
            has_room(len(data))
            return super().write(data)

    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",), files_dir=str(tmp_path)))
            batches, files = app.state.context.batches, app.state.context.files
            file = add_file(app, tmp_path, *[token_line(i, 2) for i in range(3)], token_line(3, -1))
            record = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            if is_of_bytes:
                monkeypatch.setattr(batch_module, "FileIO", Disk)
            else:
                monkeypatch.setattr(os, "replace", replace_if_room)
            batches.start(app)
            record = await ended(batches, record.id)
            assert (record.status, record.completed, record.failed) == ("completed", 3, 1)
            assert num_refused == 2
            assert answers_of(app, record.output_file_id).keys() == {"c0", "c1", "c2"}
            kept = {file.id, record.output_file_id, record.error_file_id}
            names = {path.name for path in tmp_path.rglob("*") if path.is_file()}
            assert names == {"lock", *kept, *(f"{each}.json" for each in (*kept, record.id))}
            await batches.stop()
            files.close()

    run(test())


def test_a_batch_that_was_killed_at_its_end_has_one_file_of_answers(tmp_path: Path) -> None:
    settings = ServerSettings(("demo",), files_dir=str(tmp_path))

    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, settings)
            batches, files = app.state.context.batches, app.state.context.files
            file = add_file(app, tmp_path, token_line(0, 2))
            record = await batches.create(ANONYMOUS, file, "/v1/completions", None)
            # The process was killed before it had recorded the end of this batch, ...
            part = files.new_part()
            part.write_bytes(b"{}\n")
            files.add(part, f"{record.id}_output.jsonl", "batch_output", ANONYMOUS)
            # ... and, earlier, after it had recorded that of another.
            left = batches.records.directory / "batch-0.jsonl"
            left.write_bytes(b"{}\n")
            files.close()

            app = create_app(client, settings)
            batches, files = app.state.context.batches, app.state.context.files
            assert not left.exists()
            batches.start(app)
            record = await ended(batches, record.id)
            assert answers_of(app, record.output_file_id).keys() == {"c0"}
            assert [each.id for each in files.records] == [file.id, record.output_file_id]
            await batches.stop()
            files.close()

    run(test())


def test_tenants_have_their_own_batches_and_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.server.http.batches.MAX_BATCHES", 3)
    one, two = Tenant("one", "salt one"), Tenant("two", "salt two")

    async def test() -> None:
        async with symbolic_client() as client:
            app = create_app(client, ServerSettings(("demo",), files_dir=str(tmp_path)))
            batches = app.state.context.batches
            file = add_file(app, tmp_path, token_line(0, 2))
            made = [
                await batches.create(tenant, file, "/v1/completions", None)
                for tenant in (one, one, one, two, two)
            ]
            with pytest.raises(ApiError, match="3 of your batches wait already"):
                await batches.create(one, file, "/v1/completions", None)
            order: list[str] = []
            put = batches.records.put

            def note(record: Any) -> None:
                put(record)
                order.append(record.id)

            monkeypatch.setattr(batches.records, "put", note)
            batches.start(app)
            while not all(each.has_ended for each in made):
                await asyncio.sleep(0.01)
            assert order == [made[i].id for i in (0, 3, 1, 4, 2)]
            await batches.create(one, file, "/v1/completions", None)
            listed = [batches.records.listed(tenant, 10, None)[0] for tenant in (one, two)]
            assert [len(each) for each in listed] == [3, 2]
            assert made[0] not in listed[0]
            await batches.stop()
            app.state.context.files.close()

    run(test())
