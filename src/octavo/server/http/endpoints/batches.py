"""/v1/batches: files of requests, answered when there is room for them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import Meta

from octavo.server.http.batches import (
    BatchRecord,
    Status,
)
from octavo.server.http.bodies import Body, Metadata
from octavo.server.http.context import context_of, reply, tenant_of
from octavo.server.http.endpoints.files import BatchLimit
from octavo.server.http.schema import documented

router = APIRouter(prefix="/v1/batches", tags=["Files and batches"])

EXAMPLE = {
    "input_file_id": "file-ID",
    "endpoint": "/v1/chat/completions",
    "completion_window": "24h",
}


class BatchBody(Body):
    """POST /v1/batches"""

    input_file_id: str
    """A file with the purpose batch: a request per line (custom_id, method, url, body)."""
    endpoint: str
    """The endpoint that all requests of the batch go to."""
    completion_window: Literal["24h"]
    """What is not answered by then is given up."""
    metadata: Metadata | None = None
    """Notes of your own: at most 16."""


class BatchCounts(msgspec.Struct):
    """How many lines of a batch's input there are, and what has become of them."""

    total: int
    completed: int
    failed: int


class BatchError(msgspec.Struct):
    """Why a batch as a whole has failed."""

    code: str
    message: str
    param: None = None
    line: None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """All errors of a batch as a whole."""

    object: Literal["list"] = "list"
    data: list[BatchError]


class BatchObject(msgspec.Struct, kw_only=True):
    """A batch of requests: its files, and how far it has come."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: str
    output_file_id: Annotated[str | None, Meta(description="Of the answers.")]
    error_file_id: Annotated[str | None, Meta(description="Of what was refused or has failed.")]
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchCounts
    metadata: dict[str, str] | None


class BatchList(msgspec.Struct, kw_only=True):
    """A page of the batches."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


@router.post("", **documented(BatchBody, BatchObject, example=EXAMPLE))
async def create_batch(request: Request) -> Response:
    """Have the requests of a file answered."""
    context, tenant = context_of(request), tenant_of(request)
    body = await context.body(request, BatchBody)
    file = context.files.records.get(body.input_file_id, tenant, "input_file_id")
    record = await context.batches.create(tenant, file, body.endpoint, body.metadata)
    return reply(_shown(record))


@router.get("", **documented(None, BatchList))
async def list_batches(
    request: Request, limit: BatchLimit = 20, after: str | None = None
) -> Response:
    """The batches of the holder of this key, the newest first."""
    records = context_of(request).batches.records
    found, has_more = records.listed(tenant_of(request), limit, after)
    data = [_shown(each) for each in found]
    first, last = (data[0].id, data[-1].id) if data else (None, None)
    return reply(BatchList(data=data, first_id=first, last_id=last, has_more=has_more))


@router.get("/{batch_id}", **documented(None, BatchObject))
async def get_batch(request: Request, batch_id: str) -> Response:
    """How far a batch has come."""
    return reply(_shown(_found(request, batch_id)))


@router.post("/{batch_id}/cancel", **documented(None, BatchObject))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Give up what is not answered yet; what is answered can be read."""
    record = _found(request, batch_id)
    context_of(request).batches.cancel(record)
    return reply(_shown(record))


def _found(request: Request, batch_id: str) -> BatchRecord:
    records = context_of(request).batches.records
    record: BatchRecord = records.get(batch_id, tenant_of(request), "batch_id")
    return record


def _shown(record: BatchRecord) -> BatchObject:
    status: Status | Literal["validating", "cancelling"] = record.status
    if not record.has_ended and record.cancelled_at is not None:
        status = "cancelling"
    elif not record.has_ended and record.begun_at is None:
        status = "validating"  # OpenAI's word for a batch that waits
    ended: dict[str, Any] = {
        f"{name}_at": record.ended_at if record.status == name else None
        for name in ("completed", "failed", "expired", "cancelled")
    }
    errors = None
    if record.error is not None:
        errors = BatchErrors(data=[BatchError("batch_failed", record.error)])
    return BatchObject(
        id=record.id,
        endpoint=record.endpoint,
        errors=errors,
        input_file_id=record.input_file_id,
        status=status,
        output_file_id=record.output_file_id,
        error_file_id=record.error_file_id,
        created_at=record.created_at,
        in_progress_at=record.begun_at,
        expires_at=record.expires_at,
        finalizing_at=record.ended_at,
        cancelling_at=record.cancelled_at,
        request_counts=BatchCounts(record.total, record.completed, record.failed),
        metadata=record.metadata,
        **ended,
    )
