"""From the engine's streams to HTTP: opening, merging and closing them, and server-sent events."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from fastapi import Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from octavo.engine.validation import Params, Prompt
from octavo.errors import InvalidRequest
from octavo.outputs import RequestOutput
from octavo.server.engine_process.stream import RequestStream, StreamEvent
from octavo.server.http.context import context_of, encode, request_id_of, tenant_of
from octavo.server.http.errors import ApiError, ClientGone, refused
from octavo.server.http.generation import PromptBody
from octavo.server.http.responses import Parent

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
RETRY_SECONDS = 1.0


def event(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: %b\n\n" % encode(value)


async def open_streams(
    request: Request,
    body: PromptBody,
    prompts: Sequence[Prompt],
    params: Params | Sequence[Params],
    names: Mapping[str, str],
    parent: Parent | None = None,
    rewords: Sequence[Callable[[Exception], Exception]] = (),
) -> list[RequestStream]:
    """Queue one request for each prompt: all of them, or none if one is refused.

    `params`: for all prompts, or one for each. `names`: the engine's name of a field -> the
    client's, where that is another one. `parent`: what the prompts go on from, if they do.
    `rewords`: for each prompt, what makes an error name a field of this one, if prompts have fields
    of their own. The caller must `close` the streams.
    """
    context = context_of(request)
    if body.priority and context.client.info.policy != "priority":
        raise refused("priority", "it needs a server with --policy priority", "unsupported_field")
    tenant = tenant_of(request)
    request_ids = _engine_ids(request, len(prompts))
    context.opening.update(request_ids)
    each_params = params if isinstance(params, Sequence) else [params] * len(prompts)
    cache_salt = tenant.cache_salt(body.cache_salt) if parent is None else parent.cache_salt
    tasks = [
        asyncio.ensure_future(
            context.client.generate(
                prompt,
                own_params,
                request_id=request_id,
                priority=body.priority or 0,
                cache_salt=cache_salt,
                tenant=tenant.name,
                home=None if parent is None else parent.replica,
            )
        )
        for prompt, own_params, request_id in zip(prompts, each_params, request_ids, strict=True)
    ]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        close([task.result() for task in tasks if not task.cancelled() and not task.exception()])
        raise
    finally:
        context.opening.difference_update(request_ids)
    errors = [task.exception() for task in tasks]
    failed = [index for index, error in enumerate(errors) if error is not None]
    if not failed:
        return [task.result() for task in tasks]
    close([task.result() for task in tasks if task.exception() is None])
    index = failed[0]
    error = errors[index]
    assert error is not None
    error = _in_clients_words(error, names, index if len(prompts) > 1 else None)
    raise rewords[index](error) if rewords and isinstance(error, Exception) else error


def close(streams: Sequence[RequestStream]) -> None:
    """End what has not ended."""
    for stream in streams:
        stream.abort()


async def merged(streams: Sequence[RequestStream]) -> AsyncIterator[tuple[int, StreamEvent]]:
    """The events of all streams as they arrive, each with the index of its stream."""
    if len(streams) == 1:
        async for each in streams[0]:
            yield 0, each
        return
    waiting: dict[asyncio.Future[StreamEvent], int] = {}
    arrived = asyncio.Queue[asyncio.Future[StreamEvent]]()

    def ask(index: int) -> None:
        task = asyncio.ensure_future(anext(streams[index]))
        waiting[task] = index
        task.add_done_callback(arrived.put_nowait)

    try:
        for index in range(len(streams)):
            ask(index)
        while waiting:
            task = await arrived.get()
            index = waiting.pop(task)
            item = task.result()
            if not isinstance(item, RequestOutput):
                ask(index)
            yield index, item
    finally:
        for task in waiting:
            task.cancel()


async def results(streams: Sequence[RequestStream]) -> list[RequestOutput]:
    """The whole outputs, in the order of the streams, as `RequestStream.unscored` has them."""
    outputs = await asyncio.gather(*(each.unscored() for each in streams))
    for output in outputs:
        check_ended(output)
    return list(outputs)


def check_ended(output: RequestOutput) -> None:
    """ApiError 503 if the request was aborted: a partial answer must not look like a whole one."""
    if any(each.finish_reason == "abort" for each in output.outputs) or not output.outputs:
        raise aborted()


def aborted() -> ApiError:
    """The error of a request that the server ended before it was answered."""
    return ApiError(
        503, "the request was ended by the server", code="aborted", retry_after=RETRY_SECONDS
    )


class EventStream(EventSourceResponse):
    """Server-sent events, until the last one or until the client goes away.

    A comment is sent now and then, so that clients and proxies do not take a quiet stream for a
    dead one.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        ping_seconds: float,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            events: whole events, several at a time if they came so.
            ping_seconds: between two comments; 0: none.
            on_end: is called when the stream has ended, for whatever reason.
        """
        super().__init__(events, ping=ping_seconds, ping_message_factory=_ping)
        del self.headers["connection"]  # whether it is kept alive is for the server to say
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_end()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        # The library would open a cancel scope around each event, for a time limit that is not set
        # here (ConnectionLimits.unread_seconds is that limit): most of what an event costs it.
        await send(message)


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do `work`, unless the client goes away: then it is cancelled, and ClientGone raised."""
    done = await unless(_until_gone(receive), work)
    if done is None:
        raise ClientGone
    return done.result()


async def unless(end: Coroutine[Any, Any, object], work: Awaitable[T]) -> asyncio.Future[T] | None:
    """Do `work` unless `end` comes first: then it is cancelled, and None returned. Raises what
    `work` raises."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(end)
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            return None
        task.result()
        return task
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _engine_ids(request: Request, count: int) -> list[str]:
    """The engine's ids of a request's prompts; clients may use one request id twice at a time."""
    request_id = request_id_of(request)
    names = [request_id] if count == 1 else [f"{request_id}~{i}" for i in range(count)]
    context = context_of(request)
    if context.opening.isdisjoint(names) and context.client.open_requests.keys().isdisjoint(names):
        return names
    mark = uuid.uuid4().hex[:8]
    return [f"{name}~{mark}" for name in names]


def client_id_of(engine_id: str) -> str:
    """What a client calls the request that has this id in the engine. No client's id has a "~"."""
    return engine_id.partition("~")[0]


def _in_clients_words(
    error: BaseException, names: Mapping[str, str], index: int | None
) -> BaseException:
    """The same error about the field that the client knows; `index` is that of the prompt, if there
    are several."""
    if not isinstance(error, InvalidRequest):
        return error
    where = names.get(error.field, error.field)
    if error.field in ("prompt", "structured.begun") and index is not None:
        where += f"[{index}]"
    return type(error)(where, error.reason)
