"""Batches of a server's clients, over the engine of `octavo run-batch`.

One batch runs at a time, and only so many of its requests are open at once, beside those of clients
that wait. Tenants take turns, each with the oldest of its batches. What a batch has answered is on
disk: after a restart it goes on with the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from starlette.types import ASGIApp

from octavo.server.http.batch import URLS, Tally, Unwritable, prepare, read_lines, run_batch
from octavo.server.http.errors import ApiError, refused
from octavo.server.http.file_store import FileRecord, FileStore, Record, Records
from octavo.server.http.keys import Tenant

Status = Literal["in_progress", "finalizing", "completed", "cancelled", "expired", "failed"]

OUTPUT_PURPOSE = "batch_output"  # no upload has it
MAX_OPEN = 64  # requests of a batch at once
NUM_FILES = 2  # that a batch writes at most: its answers, and its errors
MAX_BATCHES = 1_000  # of a tenant
MAX_REQUESTS = 50_000  # of a batch, as in OpenAI's API
STORAGE_SECONDS = 60.0  # until a batch goes on whose answers could not be written
WINDOW_SECONDS = 86_400  # "24h", the only window that OpenAI's API has

# What keeps a batch from writing its answers and its record.
STORAGE_ERRORS = (Unwritable, ApiError, OSError)

logger = logging.getLogger(__name__)


class BatchRecord(Record, kw_only=True):
    """A batch."""

    endpoint: str
    input_file_id: str
    status: Status = "in_progress"
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    error: str | None = None  # why it has failed
    total: int = 0
    completed: int = 0
    failed: int = 0
    # Seconds since 1970; None: that has not happened.
    begun_at: int | None = None
    cancelled_at: int | None = None  # when that was asked for
    ended_at: int | None = None

    @property
    def expires_at(self) -> int:
        """When requests that are not answered by then are given up."""
        return self.created_at + WINDOW_SECONDS

    @property
    def has_ended(self) -> bool:
        """Whether nothing of it will change any more."""
        return self.ended_at is not None


class _Reply(msgspec.Struct):
    response: _Status


class _Status(msgspec.Struct):
    status_code: int


class Batches:
    """Owns the batches and the task that answers them."""

    def __init__(self, files: FileStore, directory: Path, max_body_bytes: int) -> None:
        """Raises ConfigError if the directory cannot be used.

        max_body_bytes: of a line, too, since the event loop decodes it as a whole.
        """
        self._max_line_bytes = max_body_bytes
        self.records = Records(directory / "batches", BatchRecord, "batch")
        self._files = files
        self._is_due = asyncio.Event()
        # One file at a time: a line may be as long as a file, and others wait for the threads, too.
        self._checking = asyncio.Lock()
        self._files_of_new: list[str] = []  # ids of the files of batches that are being made
        self._runner: asyncio.Task[None] | None = None
        self._running: tuple[BatchRecord, asyncio.Task[Tally]] | None = None
        self._turns: dict[str, int] = {}  # tenant -> when a batch of theirs began; none: 0
        # A process that was killed may have left those of batches that had ended.
        open_work = {self._work_path(each) for each in self.records if not each.has_ended}
        for path in self.records.directory.glob("*.jsonl"):
            if path not in open_work:
                path.unlink()

    def start(self, app: ASGIApp) -> None:
        """Begin to answer what is to be answered, by `app`'s endpoints."""
        self._is_due.set()
        self._runner = asyncio.create_task(self._run_all(app))

    async def stop(self) -> None:
        """Stop; what is unanswered is for the next start."""
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])

    async def create(
        self, tenant: Tenant, file: FileRecord, endpoint: str, metadata: dict[str, str] | None
    ) -> BatchRecord:
        """Queue a batch. Raises ApiError if it cannot be one."""
        if endpoint not in URLS:
            raise refused("endpoint", f"{endpoint[:64]!r} is none of {', '.join(URLS)}")
        if file.purpose != "batch":
            raise refused("input_file_id", f"its purpose is {file.purpose!r}, not 'batch'")
        self.check_room(tenant, NUM_FILES, "input_file_id")
        self._files_of_new.append(file.id)
        try:
            async with self._checking:
                total = await asyncio.to_thread(
                    _num_requests, self._files.path(file), self._max_line_bytes
                )
        finally:
            self._files_of_new.remove(file.id)
        self.check_room(tenant, NUM_FILES, "input_file_id")  # others may have come meanwhile
        own = [each for each in self.records if each.tenant == tenant.name]
        is_full = len(own) >= MAX_BATCHES
        oldest = next((each for each in own if each.has_ended), None)
        if is_full and oldest is None:
            raise ApiError(
                429,
                f"{MAX_BATCHES} of your batches wait already",
                code="overloaded",
                retry_after=60,
            )
        record = BatchRecord(
            **self.records.head("batch", tenant),
            endpoint=endpoint,
            input_file_id=file.id,
            metadata=metadata,
            total=total,
        )
        self.records.put(record)
        if is_full and oldest is not None:
            self.records.remove(oldest)
        self._is_due.set()
        return record

    def check_room(self, tenant: Tenant, num_new: int, param: str) -> None:
        """ApiError 400 about `param` if a tenant may not have so many new files. Those that its
        batches will write have their room already, so that no answer is without."""
        num_open = sum(not each.has_ended for each in self.records if each.tenant == tenant.name)
        self._files.check_room(tenant, num_new, NUM_FILES * num_open, param)

    def cancel(self, record: BatchRecord) -> None:
        """Give up what is not answered yet.

        Raises:
            ApiError: 409 if the batch has ended; 507 if that cannot be recorded: then it goes on.
        """
        if record.has_ended:
            raise ApiError(409, f"the batch is {record.status}", "batch_id", "already_ended")
        before, record.cancelled_at = record.cancelled_at, int(time.time())
        try:
            self.records.put(record)
        except ApiError:  # the batch goes on, as its record says
            record.cancelled_at = before
            raise
        if self._running is not None and self._running[0] is record:
            self._running[1].cancel()
        self._is_due.set()

    def uses(self, file: FileRecord) -> bool:
        """Whether a batch that has not ended reads this file."""
        return file.id in self._files_of_new or any(
            not each.has_ended and each.input_file_id == file.id for each in self.records
        )

    async def _run_all(self, app: ASGIApp) -> None:
        while True:
            await self._is_due.wait()
            self._is_due.clear()
            while (record := self._next()) is not None:
                self._turns[record.tenant] = max(self._turns.values(), default=0) + 1
                try:
                    await self._run_or_fail(app, record)
                except STORAGE_ERRORS as error:  # what is answered stays so
                    logger.error("batch %s goes on later: %s", record.id, error)
                    await asyncio.sleep(STORAGE_SECONDS)

    async def _run_or_fail(self, app: ASGIApp, record: BatchRecord) -> None:
        """Answer one batch, or fail it. Raises one of STORAGE_ERRORS if it is to go on later."""
        try:
            await self._run(app, record)
        except STORAGE_ERRORS:
            raise
        except Exception as error:
            logger.exception("batch %s failed", record.id)
            self._end(record, "failed", str(error) or type(error).__name__)

    def _next(self) -> BatchRecord | None:
        """The oldest batch of the tenant who has waited longest for a turn."""
        waiting = [each for each in self.records if not each.has_ended]
        return min(waiting, key=lambda each: self._turns.get(each.tenant, 0), default=None)

    async def _run(self, app: ASGIApp, record: BatchRecord) -> None:
        """Answer one batch, or what is left of it."""
        file = next((f for f in self._files.records if f.id == record.input_file_id), None)
        if file is None:
            self._end(record, "failed", "its input file is gone")
            return
        work = self._work_path(record)
        record.begun_at = record.begun_at or int(time.time())
        batch = await asyncio.to_thread(prepare, self._files.path(file), work)
        if record.cancelled_at is not None:
            await self._finish(record, "cancelled")
            return
        known_failed = record.failed

        def show(tally: Tally) -> None:
            record.failed = min(record.total, known_failed + tally.num_refused + tally.num_failed)
            record.completed = tally.num_before + tally.num_done - record.failed

        tenant = Tenant(record.salt, record.tenant)
        task = asyncio.create_task(
            run_batch(app, batch, MAX_OPEN, show, (record.endpoint,), tenant, is_patient=True)
        )
        self._running = record, task
        status: Status = "completed"
        try:
            done, _ = await asyncio.wait([task], timeout=max(0, record.expires_at - time.time()))
            if not done:
                status = "expired"
            elif task.cancelled():
                status = "cancelled"
            else:
                task.result()
        finally:
            self._running = None
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
        record.status = "finalizing"
        await self._finish(record, status)

    async def _finish(self, record: BatchRecord, status: Status) -> None:
        """End a batch with what has been answered."""
        names = [f"{record.id}_{kind}.jsonl" for kind in ("output", "error")]
        for file in self._files.records:  # of a process that was killed before the batch had ended
            if file.purpose == OUTPUT_PURPOSE and file.filename in names:
                self._files.remove(file)
        parts = [self._files.new_part() for _ in names]
        ids: list[str | None] = [None, None]
        try:
            counts = await asyncio.to_thread(_divide, self._work_path(record), parts)
            tenant = Tenant(record.salt, record.tenant)
            for kind, (part, name) in enumerate(zip(parts, names, strict=True)):
                if counts[kind]:
                    ids[kind] = self._files.add(part, name, OUTPUT_PURPOSE, tenant).id
        finally:
            record.output_file_id, record.error_file_id = ids
            for part in parts:
                part.unlink(missing_ok=True)
        record.completed, record.failed = counts
        self._end(record, status)

    def _end(self, record: BatchRecord, status: Status, error: str | None = None) -> None:
        """Raises ApiError 507 if that cannot be recorded: then it has not ended."""
        before = record.status, record.error, record.ended_at
        record.status, record.error, record.ended_at = status, error, int(time.time())
        try:
            self.records.put(record)
        except ApiError:
            record.status, record.error, record.ended_at = before
            raise
        self._work_path(record).unlink(missing_ok=True)

    def _work_path(self, record: BatchRecord) -> Path:
        return self.records.directory / f"{record.id}.jsonl"


def _num_requests(path: Path, max_line_bytes: int) -> int:
    """Raises ApiError if there are none or too many, or one is too large."""
    total = 0
    for total, line in enumerate(read_lines(path), start=1):
        if len(line.data) > max_line_bytes:
            raise refused(
                "input_file_id",
                f"line {line.number} of the file has {len(line.data)} bytes; at most "
                f"{max_line_bytes} are allowed",
            )
        if total > MAX_REQUESTS:
            raise refused(
                "input_file_id",
                f"the file has more than {MAX_REQUESTS} requests; create several batches",
            )
    if not total:
        raise refused("input_file_id", "the file has no requests")
    return total


def _divide(work: Path, paths: Sequence[Path]) -> list[int]:
    """Write replies into two files, those that are answers and those that are errors. Returns how
    many there are of both."""
    counts = [0, 0]
    with contextlib.ExitStack() as stack:
        outputs = [stack.enter_context(path.open("wb")) for path in paths]
        for line in _lines(work):
            is_error = msgspec.json.decode(line, type=_Reply).response.status_code != 200
            outputs[is_error].write(line)
            counts[is_error] += 1
    return counts


def _lines(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, if there is one."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield line
