"""`octavo run-batch`: a file of requests in, a file of replies out, in OpenAI's batch format.

The requests go through the same application as those of HTTP clients, so they are validated and
answered in the same way. Replies are written as they arrive; a batch that was interrupted continues
when it is run again with the same files. A line that is not a request gets its own error reply.
"""

from __future__ import annotations

import asyncio
import codecs
import hashlib
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.types import ASGIApp, Message

from octavo.errors import InvalidRequest
from octavo.server.http.errors import ApiError, refused
from octavo.server.http.gate import TENANT
from octavo.server.http.keys import Tenant

T = TypeVar("T")

URLS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/score"),
)
RETRY_SECONDS = 1.0  # until a patient batch asks again, where it is not told when
BUSY = (429, 503)
PAUSE_SECONDS = 0.05  # while a pipe is full
ID_PREFIX = "batch_req_"
MAX_SHOWN = 64  # characters of the input in an error message


class Unwritable(InvalidRequest):
    """The replies of a batch cannot be written: the disk is full, say."""


class BatchRequest(msgspec.Struct):
    """A line of the input."""

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class BatchReply(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str | None  # None: the line has none
    response: dict[str, Any]  # status_code, request_id, body
    error: None = None


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input that is not blank."""

    number: int
    data: bytes

    @property
    def digest(self) -> str:
        """Identifies a line, in the id of its reply: lines may share their custom_id."""
        return hashlib.blake2b(self.data, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch whose files have been checked."""

    input_path: Path
    output_path: Path
    num_requests: int
    answered: Counter[str]  # how many equal lines an earlier run has answered, by their digest


@dataclass(slots=True)
class Tally:
    """How far a batch has come."""

    num_requests: int = 0
    num_before: int = 0  # answered by an earlier run
    num_done: int = 0
    num_refused: int = 0  # replies of 4xx, which say what is wrong
    num_failed: int = 0  # replies of 5xx: another run asks again


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file, without the blank ones and a byte order mark."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            data = (line.removeprefix(codecs.BOM_UTF8) if number == 1 else line).strip()
            if data:
                yield Line(number, data)


def prepare(input_path: Path, output_path: Path) -> Batch:
    """Read both files. Raises InvalidRequest before anything has run or is overwritten."""
    try:
        if not input_path.is_file():
            raise InvalidRequest("input", f"{input_path} is no regular file: it is read twice")
        num_requests = sum(1 for _ in read_lines(input_path))
    except OSError as error:
        raise InvalidRequest("input", f"{input_path} cannot be read ({error.strerror})") from error
    try:
        if not output_path.is_fifo():  # its reader would take this for the end
            _open_output(output_path).close()
        if output_path.samefile(input_path):
            raise InvalidRequest("output", f"{output_path} is the input, too")
        answered = Counter[str]()
        if output_path.is_file():
            output_path = output_path.resolve()  # a link stays one when its file is replaced
            answered = _keep_answered(output_path)
    except OSError as error:
        raise _unwritable(output_path, error) from error
    return Batch(input_path, output_path, num_requests, answered)


def _open_output(path: Path) -> FileIO:
    """A file to append to. Without a buffer, so that closing does not try again to write a reply
    that could not be. Nothing waits for the reader of a named pipe, because signals would not be
    heard meanwhile: one without a reader is an error."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK
    return FileIO(os.open(path, flags, 0o666), "wb")


def _unwritable(path: Path, error: OSError) -> Unwritable:
    return Unwritable("output", f"{path} cannot be written ({error.strerror})")


def _keep_answered(path: Path) -> Counter[str]:
    """The lines that an earlier run has answered; failed and incomplete replies are removed.

    Raises InvalidRequest if something else is in the file, which stays as it is.
    """
    answered: Counter[str] = Counter()
    kept = path.with_name(f"{path.name}.part")
    try:
        with path.open("rb") as old, kept.open("wb") as new:
            for number, line in enumerate(old, start=1):
                try:
                    reply = msgspec.json.decode(line, type=BatchReply)
                except (msgspec.DecodeError, UnicodeDecodeError) as error:
                    if line.endswith(b"\n"):
                        raise InvalidRequest(
                            "output", f"line {number} of {path} is not a reply; choose another file"
                        ) from error
                    continue
                if reply.response.get("status_code", 500) < 500:
                    answered[_digest_in(reply.id)] += 1
                    new.write(line if line.endswith(b"\n") else line + b"\n")
        shutil.copymode(path, kept)
        os.replace(kept, path)
    finally:
        kept.unlink(missing_ok=True)
    return answered


def _reply_id(line: Line) -> str:
    return f"{ID_PREFIX}{line.digest}_{uuid.uuid4().hex[:8]}"


def _digest_in(reply_id: str) -> str:
    return reply_id.removeprefix(ID_PREFIX).partition("_")[0]


async def run_batch(
    app: ASGIApp,
    batch: Batch,
    max_inflight: int,
    show: Callable[[Tally], None],
    urls: Sequence[str] = URLS,
    tenant: Tenant | None = None,
    is_patient: bool = False,
) -> Tally:
    """Answer what is not answered yet.

    Args:
        max_inflight: requests at a time.
        show: is called with how far it has come.
        urls: the endpoints that requests may go to.
        tenant: in whose name they are sent; None: as the application says.
        is_patient: a request for which there is no room is sent again later.
    """
    tally = Tally(num_requests=batch.num_requests)
    slots = asyncio.Semaphore(max_inflight)
    writing = asyncio.Lock()  # one line after the other
    before = batch.answered.copy()
    try:
        output = _open_output(batch.output_path)
    except OSError as error:
        raise _unwritable(batch.output_path, error) from error
    with output:

        async def answer(line: Line) -> None:
            try:
                reply = await _answer(app, line, urls, tenant, is_patient)
                try:
                    async with writing:
                        await _write(output, reply)
                except OSError as error:
                    raise _unwritable(batch.output_path, error) from error
                status = reply.response["status_code"]
                tally.num_done += 1
                tally.num_refused += 400 <= status < 500
                tally.num_failed += status >= 500
                show(tally)
            finally:
                slots.release()

        try:
            async with asyncio.TaskGroup() as tasks:
                for line in read_lines(batch.input_path):
                    if before[line.digest]:
                        before[line.digest] -= 1
                        tally.num_before += 1
                        await asyncio.sleep(0)  # there may be many
                        continue
                    await slots.acquire()
                    tasks.create_task(answer(line))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None
    return tally


async def _write(output: FileIO, reply: BatchReply) -> None:
    data = memoryview(msgspec.json.encode(reply) + b"\n")
    while data := data[output.write(data) or 0 :]:
        await asyncio.sleep(PAUSE_SECONDS)


async def _answer(
    app: ASGIApp, line: Line, urls: Sequence[str], tenant: Tenant | None, is_patient: bool
) -> BatchReply:
    """The reply to a line; one that is not a request is refused like any bad request."""
    try:
        request = _request(line, urls)
        body = bytes(request.body)
        status, request_id, data = await post(app, request.url, body, tenant)
        while is_patient and status in BUSY:
            await asyncio.sleep(RETRY_SECONDS)
            status, request_id, data = await post(app, request.url, body, tenant)
    except ApiError as error:
        status, request_id, data = error.status, "", msgspec.json.encode(error.reply)
    response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(data)}
    return BatchReply(_reply_id(line), _custom_id(line), response)


def _request(line: Line, urls: Sequence[str]) -> BatchRequest:
    """Raises ApiError, which names the line."""
    where = f"line {line.number}"
    try:
        request = msgspec.json.decode(line.data, type=BatchRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(where, f"it is not a request ({error})") from error
    if request.method != "POST" or request.url not in urls:
        asked = f"{request.method[:MAX_SHOWN]} {request.url[:MAX_SHOWN]}"
        raise refused(where, f"{asked} is not POST to {' or '.join(urls)}")
    if _in(request.body, _Options, _Options()).stream is True:
        raise refused(where, "a batch has no streams")
    return request


class _Options(msgspec.Struct):
    """What a batch needs to know of a body; the application decodes the whole of it."""

    stream: Any = None


class _Name(msgspec.Struct):
    custom_id: str | None = None


def _custom_id(line: Line) -> str | None:
    """None if there is none, or if it cannot be found because the line is not a request."""
    return _in(line.data, _Name, _Name()).custom_id


def _in(data: bytes | msgspec.Raw, kind: type[T], default: T) -> T:
    """JSON as a `kind`, or `default` if it is none."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return default


async def post(
    app: ASGIApp, path: str, body: bytes, tenant: Tenant | None = None
) -> tuple[int, str, bytes]:
    """POST JSON to an application in this process: status, request id and body of its reply.

    `tenant`: in whose name, without a key; None: like any client.
    """
    scope: dict[str, Any] = {
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
    if tenant is not None:
        scope[TENANT] = tenant
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
