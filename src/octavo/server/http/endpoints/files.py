"""/v1/files: what batches read and write. Only where the server has a directory for them."""

from __future__ import annotations

import asyncio
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from fastapi import APIRouter, Query, Request, Response
from msgspec import Meta
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, MalformedRangeHeader, RangeNotSatisfiable

from octavo.server.http.context import context_of, reply, tenant_of
from octavo.server.http.errors import ApiError, ClientGone, refused
from octavo.server.http.file_store import FileRecord, unwritable
from octavo.server.http.schema import documented
from octavo.server.http.uploads import Upload

router = APIRouter(prefix="/v1/files", tags=["Files and batches"])

PURPOSE = "batch"
FORM = {"purpose": PURPOSE, "file": "@requests.jsonl"}

Limit = Annotated[int, Query(ge=1, le=10_000)]
BatchLimit = Annotated[int, Query(ge=1, le=100)]


class FileObject(msgspec.Struct, kw_only=True):
    """A file that the server keeps."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: Annotated[str, Meta(description="batch: uploaded; batch_output: of a batch.")]
    status: Literal["processed"] = "processed"


class FileList(msgspec.Struct, kw_only=True):
    """A page of the files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(msgspec.Struct, kw_only=True):
    """A file has been deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class _Content(FileResponse):
    """A file, or the part of it that the header Range asks for. One that makes no sense is ignored
    (RFC 9110, section 14.2), and a part that is not there is refused as everything else is."""

    @classmethod
    def _parse_range_header(cls, http_range: str, file_size: int) -> list[tuple[int, int]]:
        try:
            return super()._parse_range_header(http_range, file_size)
        except MalformedRangeHeader:
            return []  # the whole file
        except RangeNotSatisfiable as error:
            raise ApiError(
                416,
                f"Range: none of it is in the {file_size} bytes of the file",
                "Range",
                "range_not_satisfiable",
                headers={"content-range": f"bytes */{file_size}"},
            ) from error


@router.post("", **documented(None, FileObject, form=FORM))
async def upload_file(request: Request) -> Response:
    """Upload a file of requests, as a form with the fields purpose (batch) and file."""
    _check_origin(request)
    context, tenant = context_of(request), tenant_of(request)
    files = context.files
    context.batches.check_room(tenant, 1, "file")
    part = files.new_part()
    content_type = request.headers.get("content-type", "")
    upload = Upload(content_type, part, files.shelf.max_bytes, {"purpose"})
    try:
        await _receive(request, upload)
        context.batches.check_room(tenant, 1, "file")  # others may have come meanwhile
        record = files.add(part, upload.filename, PURPOSE, tenant)
    finally:
        part.unlink(missing_ok=True)
    return reply(_shown(record))


@router.get("", **documented(None, FileList))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Limit = 10_000,
    after: str | None = None,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The files of the holder of this key."""
    found, has_more = context_of(request).files.records.listed(
        tenant_of(request),
        limit,
        after,
        order == "desc",
        lambda each: purpose in (None, each.purpose),
    )
    data = [_shown(each) for each in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return reply(FileList(data=data, first_id=first, last_id=last, has_more=has_more))


@router.get("/{file_id}", **documented(None, FileObject))
async def get_file(request: Request, file_id: str) -> Response:
    """What is known of a file."""
    return reply(_shown(_found(request, file_id)))


@router.get("/{file_id}/content", **documented(None, bytes))
async def get_file_content(request: Request, file_id: str) -> Response:
    """A file's bytes."""
    record = _found(request, file_id)
    path = context_of(request).files.path(record)
    return _Content(path, media_type="application/octet-stream", filename=record.filename)


@router.delete("/{file_id}", **documented(None, FileDeleted))
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file. ApiError 409 while a batch reads it."""
    context = context_of(request)
    record = _found(request, file_id)
    if context.batches.uses(record):
        raise ApiError(409, "file_id: a batch reads this file", "file_id", "file_in_use")
    context.files.remove(record)
    return reply(FileDeleted(id=record.id))


def _check_origin(request: Request) -> None:
    """A web page can send forms to any address without asking, and must not fill the disk."""
    origin = request.headers.get("origin")
    allowed = context_of(request).settings.cors_origins
    if origin is None or origin in allowed or "*" in allowed:
        return
    if urlsplit(origin).netloc != request.headers.get("host"):
        raise ApiError(403, f"pages of {origin[:128]} may not upload files", code="unknown_origin")


async def _receive(request: Request, upload: Upload) -> None:
    """Read a form to its end. ApiError: it is wrong or too large, or cannot be written."""
    try:
        with upload:
            async for chunk in request.stream():
                await asyncio.to_thread(upload.feed, chunk)
            upload.finish()
    except ClientDisconnect:
        raise ClientGone from None
    except OSError as error:
        raise unwritable(error) from error
    purpose = upload.values["purpose"]
    if purpose != PURPOSE:
        raise refused("purpose", f"{purpose[:64]!r} is not supported, only {PURPOSE!r}")


def _found(request: Request, file_id: str) -> FileRecord:
    files, tenant = context_of(request).files, tenant_of(request)
    record: FileRecord = files.records.get(file_id, tenant, "file_id")
    return record


def _shown(record: FileRecord) -> FileObject:
    return FileObject(
        id=record.id,
        bytes=record.bytes,
        created_at=record.created_at,
        filename=record.filename,
        purpose=record.purpose,
    )
