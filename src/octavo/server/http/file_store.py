"""What clients have uploaded, and what batches have written, on disk: it survives a restart.

A directory holds for each file its bytes, and a record of it as JSON. Records are replaced as a
whole, so that a file is there with its record or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from octavo.errors import ConfigError
from octavo.server.http.errors import ApiError, refused
from octavo.server.http.keys import Tenant

R = TypeVar("R", bound="Record")

PREFIX = "file"  # begins the ids of files, which are their names on disk
PART = ".part"  # ends the names of files that are being written


class Record(msgspec.Struct, kw_only=True):
    """What is known of a file or of a batch."""

    id: str
    created_at: int  # seconds since 1970
    salt: str  # the tenant's, who alone sees it
    tenant: str  # whose share of the service it counts against
    number: int  # by which they are listed: the newest has the highest


class FileRecord(Record, kw_only=True):
    """A file."""

    filename: str
    purpose: str
    bytes: int


class Shelf(msgspec.Struct):
    """What a directory can hold."""

    max_bytes: int  # of an uploaded file
    max_files: int  # of a tenant, so that none takes the room of others


class Records:
    """Owns the records of one kind, in memory and on disk."""

    def __init__(self, directory: Path, kind: type[R], noun: str) -> None:
        """`noun`: what clients call them. Raises ConfigError if the directory cannot be used."""
        self.directory = directory
        self._noun = noun
        self._by_id: dict[str, Any] = {}
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in directory.glob(f"*{PART}"):
                path.unlink()
            found = [
                msgspec.json.decode(path.read_bytes(), type=kind)
                for path in directory.glob("*.json")
            ]
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError("files_dir", f"{directory} cannot be used ({error})") from error
        for record in sorted(found, key=lambda each: each.number):
            self._by_id[record.id] = record

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Any]:
        """Oldest first."""
        return iter(list(self._by_id.values()))

    def head(self, prefix: str, tenant: Tenant) -> dict[str, Any]:
        """The fields of a new record that all of them have."""
        number = max((record.number for record in self._by_id.values()), default=0) + 1
        return {
            "id": f"{prefix}-{uuid.uuid4().hex}",
            "created_at": int(time.time()),
            "salt": tenant.salt,
            "tenant": tenant.name,
            "number": number,
        }

    def get(self, record_id: str, tenant: Tenant, param: str) -> Any:
        """One of a tenant's records; ApiError 404 if it has none of this id."""
        record = self._by_id.get(record_id)
        if record is None or record.salt != tenant.salt:
            raise ApiError(
                404, f"{param}: there is no {self._noun} {record_id[:64]!r}", param, "not_found"
            )
        return record

    def listed(
        self,
        tenant: Tenant,
        limit: int,
        after: str | None,
        newest_first: bool = True,
        is_wanted: Callable[[Any], bool] = lambda _: True,
    ) -> tuple[list[Any], bool]:
        """A tenant's records behind the one called `after` that are wanted, at most `limit`; and
        whether there are more. ApiError if there is no such record."""
        own = [record for record in self._by_id.values() if record.salt == tenant.salt]
        if newest_first:
            own.reverse()
        if after is not None:
            own = own[own.index(self.get(after, tenant, "after")) + 1 :]
        own = list(filter(is_wanted, own))
        return own[:limit], len(own) > limit

    def put(self, record: Record) -> None:
        """Write a record, new or changed. ApiError 507 if it cannot be."""
        path = self.directory / f"{record.id}.json"
        part = path.with_suffix(PART)
        try:
            part.write_bytes(msgspec.json.encode(record))
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise unwritable(error) from error
        self._by_id[record.id] = record

    def remove(self, record: Record) -> None:
        self._by_id.pop(record.id, None)
        (self.directory / f"{record.id}.json").unlink(missing_ok=True)


class FileStore:
    """Owns a directory of files, which no other process may use."""

    def __init__(self, directory: Path, shelf: Shelf) -> None:
        """Raises ConfigError if the directory cannot be used."""
        self.shelf = shelf
        with contextlib.ExitStack() as stack:
            self._lock = self._locked(directory, stack)
            self.records = Records(directory / "files", FileRecord, "file")
            stack.pop_all()
        # Those of files that were being added or removed when the process was killed.
        known = {record.id for record in self.records}
        for path in self.records.directory.glob(f"{PREFIX}-*"):
            if path.stem not in known:
                path.unlink()

    @staticmethod
    def _locked(directory: Path, stack: contextlib.ExitStack) -> IO[bytes]:
        """An open file that no other process has locked; `stack` closes it."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context((directory / "lock").open("wb"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(
                "files_dir", f"{directory} cannot be used, or another server uses it ({error})"
            ) from error
        return lock

    def close(self) -> None:
        """Let another process use the directory."""
        self._lock.close()

    def path(self, record: FileRecord) -> Path:
        """Where its bytes are."""
        return self.records.directory / record.id

    def check_room(self, tenant: Tenant, num_new: int, num_to_come: int, param: str) -> None:
        """ApiError 400 about `param` if a tenant may not have so many new files beside those that
        it has, and those that its batches will write."""
        limit = self.shelf.max_files
        num_files = sum(record.tenant == tenant.name for record in self.records)
        if num_files + num_to_come + num_new > limit:
            raise refused(
                param,
                f"there is no room for {num_new} more: you have {num_files} files, your batches "
                f"may write {num_to_come}, and {limit} are allowed (max_files); delete some",
                "too_many_files",
            )

    def new_part(self) -> Path:
        """Where a file can be written before it is added."""
        return self.records.directory / f"{uuid.uuid4().hex}{PART}"

    def add(self, part: Path, filename: str, purpose: str, tenant: Tenant) -> FileRecord:
        """Add a file that was written to `part`. ApiError 507 if it cannot be."""
        try:
            record = FileRecord(
                **self.records.head(PREFIX, tenant),
                filename=filename,
                purpose=purpose,
                bytes=part.stat().st_size,
            )
            os.replace(part, self.path(record))
        except OSError as error:
            raise unwritable(error) from error
        try:
            self.records.put(record)
        except ApiError:
            self.path(record).unlink()
            raise
        return record

    def remove(self, record: FileRecord) -> None:
        """Forget a file."""
        self.records.remove(record)
        self.path(record).unlink(missing_ok=True)


def unwritable(error: OSError) -> ApiError:
    """The disk is full, say."""
    return ApiError(507, f"the file cannot be written ({error.strerror})", code="storage_failed")
