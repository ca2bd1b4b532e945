"""`octavo run-batch`: a file of requests in, a file of replies out, in OpenAI's batch format.

The requests go through the same application as those of HTTP clients, so they are checked,
answered and refused in the same words. Replies are written as they come; a batch that was
interrupted goes on where it stood when it is run again with the same files.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec
from starlette.types import ASGIApp, Message

from octavo.errors import InvalidRequest

URLS = ("/v1/chat/completions", "/v1/completions")


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: dict[str, Any]
    method: str = "POST"


class BatchReply(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str
    response: dict[str, Any]  # status_code, request_id, body
    error: None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """What is to be done."""

    input_path: Path
    output_path: Path
    num_requests: int
    answered: frozenset[str]  # ids of requests that an earlier run has answered


@dataclass(slots=True)
class Tally:
    """How a batch stands."""

    num_requests: int = 0
    num_before: int = 0  # answered by an earlier run
    num_done: int = 0
    num_refused: int = 0  # a client's fault: the reply says which
    num_failed: int = 0  # the server's: another run asks again


def read_requests(path: Path) -> Iterator[BatchRequest]:
    """The requests in a file, one a line. Raises InvalidRequest with the number of a broken one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                request = msgspec.json.decode(line, type=BatchRequest)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise InvalidRequest(f"line {number}", f"it is no request ({error})") from error
            if request.method != "POST" or request.url not in URLS:
                raise InvalidRequest(
                    f"line {number}",
                    f"{request.method} {request.url} is not POST to {' or '.join(URLS)}",
                )
            if request.body.get("stream"):
                raise InvalidRequest(f"line {number}", "a batch has no streams")
            yield request


def prepare(input_path: Path, output_path: Path) -> Batch:
    """Read both files. Raises InvalidRequest before anything has run or is overwritten."""
    num_requests = _count_requests(input_path)
    try:
        with output_path.open("ab"):
            pass
        if output_path.samefile(input_path):
            raise InvalidRequest("output", f"{output_path} is the input, too")
        answered = _keep_answered(output_path)
    except OSError as error:
        raise InvalidRequest(
            "output", f"{output_path} cannot be written ({error.strerror})"
        ) from error
    return Batch(input_path, output_path, num_requests, answered)


def _count_requests(path: Path) -> int:
    seen: set[str] = set()
    for request in read_requests(path):
        if request.custom_id in seen:
            raise InvalidRequest("custom_id", f"{request.custom_id!r} stands in two lines")
        seen.add(request.custom_id)
    return len(seen)


def _keep_answered(path: Path) -> frozenset[str]:
    """The ids that an earlier run has answered; what it failed at or left half written goes.

    Raises InvalidRequest if something else is in the file, which stays as it is.
    """
    answered: set[str] = set()
    kept = path.with_name(f"{path.name}.part")
    with path.open("rb") as old, kept.open("wb") as new:
        for number, line in enumerate(old, start=1):
            try:
                reply = msgspec.json.decode(line, type=BatchReply)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                if line.endswith(b"\n"):
                    kept.unlink()
                    raise InvalidRequest(
                        "output", f"line {number} of {path} is no reply; choose another file"
                    ) from error
                continue
            if reply.response.get("status_code", 500) < 500:
                answered.add(reply.custom_id)
                new.write(line if line.endswith(b"\n") else line + b"\n")
    os.replace(kept, path)
    return frozenset(answered)


async def run_batch(
    app: ASGIApp, batch: Batch, max_inflight: int, show: Callable[[Tally], None]
) -> Tally:
    """Answer what is not answered yet, at most `max_inflight` requests at a time."""
    tally = Tally(num_requests=batch.num_requests)
    slots = asyncio.Semaphore(max_inflight)
    with batch.output_path.open("ab") as output:

        async def answer(request: BatchRequest) -> None:
            try:
                reply = await _answer(app, request)
                _write(output, reply)
                status = reply.response["status_code"]
                tally.num_done += 1
                tally.num_refused += 400 <= status < 500
                tally.num_failed += status >= 500
                show(tally)
            finally:
                slots.release()

        async with asyncio.TaskGroup() as group:
            for request in read_requests(batch.input_path):
                if request.custom_id in batch.answered:
                    tally.num_before += 1
                    continue
                await slots.acquire()
                group.create_task(answer(request))
    return tally


def _write(output: IO[bytes], reply: BatchReply) -> None:
    output.write(msgspec.json.encode(reply) + b"\n")
    output.flush()


async def _answer(app: ASGIApp, request: BatchRequest) -> BatchReply:
    body = msgspec.json.encode(request.body)
    status, request_id, data = await post(app, request.url, body)
    response = {
        "status_code": status,
        "request_id": request_id,
        "body": msgspec.json.decode(data),
    }
    return BatchReply(f"batch_req_{uuid.uuid4().hex}", request.custom_id, response)


async def post(app: ASGIApp, path: str, body: bytes) -> tuple[int, str, bytes]:
    """POST JSON to an application in this process: status, request id and body of its reply."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
    }
    incoming: list[Message] = [{"type": "http.request", "body": body}]
    outgoing: list[Message] = []

    async def receive() -> Message:
        if incoming:
            return incoming.pop()
        return await asyncio.Future()  # never gone

    async def send(message: Message) -> None:
        outgoing.append(message)

    await app(scope, receive, send)
    start = outgoing[0]
    headers = {name.decode(): value.decode() for name, value in start["headers"]}
    data = b"".join(message.get("body", b"") for message in outgoing[1:])
    return start["status"], headers.get("x-request-id", ""), data
