"""Send requests to an HTTP server on a schedule, and record when their tokens arrive.

Works with any server that has OpenAI's completions or chat endpoint. Needs aiohttp.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from octavo.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp

Endpoint = Literal["completions", "chat"]
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
REFUSALS = (429, 503)  # statuses of an overloaded server
WORDS = "the cat sat on a mat and saw one big red sun go up"
READ_BUFFER = 1 << 20  # bytes; also the longest event


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the parameters that all requests to it share."""

    url: str  # without /v1
    model: str
    api_key: str | None = None
    endpoint: Endpoint = "completions"
    n: int = 1
    temperature: float = 0.0
    ignore_eos: bool = True  # every output has the length that the trace gives
    timeout: float = 600.0  # seconds without a byte

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclass(frozen=True, slots=True)
class Query:
    """One request to send: a prompt and the length of its output."""

    prompt_token_ids: list[int]
    output_tokens: int


@dataclass(slots=True)
class Call:
    """The outcome of a request. Times in seconds of `time.perf_counter`."""

    outcome: Literal["completed", "refused", "failed"] = "failed"
    sent: float = 0.0
    first: float | None = None  # the first chunk with choices, even one without text
    last: float = 0.0  # the last chunk with choices, or the end of what failed
    gaps: list[float] = field(default_factory=list)  # between chunks with choices
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str | None = None
    retry_after: float | None = None  # seconds, from a refusal

    @property
    def seconds(self) -> float:
        """End to end: until the last chunk with choices."""
        return self.last - self.sent


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Chunk(msgspec.Struct):
    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Chunk).decode


def poisson_times(count: int, rate: float, seed: int) -> list[float]:
    """When to send each of `count` requests: seconds from the start, exponential gaps.

    `rate` is in requests per second; infinite: all at once.
    """
    if math.isinf(rate):
        return [0.0] * count
    draw = random.Random(seed)
    times, now = [], 0.0
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


async def send_all(
    target: Target,
    queries: Sequence[Query],
    times: Sequence[float],
    max_concurrency: int | None = None,
    finished: Callable[[Call], None] = lambda call: None,
) -> list[Call]:
    """Send each query at its time, whether or not earlier ones are done, and wait for all.

    With `max_concurrency`, one whose time has come waits until fewer are open; that wait is no
    part of its latency, but of the client's.
    """
    http = import_aiohttp()
    slots = asyncio.Semaphore(max_concurrency or len(queries) or 1)
    timeout = http.ClientTimeout(total=None, sock_read=target.timeout)
    connector = http.TCPConnector(limit=0)
    start = time.perf_counter()

    async def one(session: aiohttp.ClientSession, query: Query, at: float) -> Call:
        await asyncio.sleep(start + at - time.perf_counter())
        async with slots:
            call = await _send(session, target, query)
        finished(call)
        return call

    async with http.ClientSession(
        headers=target.headers,
        connector=connector,
        timeout=timeout,
        read_bufsize=READ_BUFFER,
    ) as session:
        return await asyncio.gather(
            *(one(session, query, at) for query, at in zip(queries, times, strict=True))
        )


async def served_model(url: str, api_key: str | None) -> str:
    """The first model that a server offers. Raises ConfigError if it cannot be asked."""
    aiohttp = import_aiohttp()
    headers = Target(url, "", api_key).headers
    try:
        async with (
            aiohttp.ClientSession(headers=headers) as session,
            session.get(url.rstrip("/") + "/v1/models") as response,
        ):
            if response.status != 200:
                raise ConfigError("url", f"{url}/v1/models answers {response.status}")
            return str((await response.json())["data"][0]["id"])
    except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError("url", f"{url} offers no models: {_reason(error)}") from error


def import_aiohttp() -> Any:
    """aiohttp, or a ConfigError that says how to get it."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError("bench serve", "it needs aiohttp: pip install aiohttp") from error
    return aiohttp


async def _send(session: aiohttp.ClientSession, target: Target, query: Query) -> Call:
    call = Call()
    call.sent = call.last = time.perf_counter()
    aiohttp = import_aiohttp()
    try:
        url = target.url.rstrip("/") + PATHS[target.endpoint]
        async with session.post(url, json=_body(target, query)) as response:
            if response.status == 200:
                await _read(response, call)
            else:
                await _refused(response, call)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        call.error = _reason(error)
        call.outcome = "failed"
    if call.outcome != "completed":
        call.last = time.perf_counter()
    return call


async def _read(response: aiohttp.ClientResponse, call: Call) -> None:
    num_chunks, is_done = 0, False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            is_done = True
            break
        chunk = _decode(data)
        if chunk.error is not None:
            call.error = str(chunk.error.get("message", chunk.error))
            return
        if chunk.choices:
            now = time.perf_counter()
            if call.first is None:
                call.first = now
            else:
                call.gaps.append(now - call.last)
            call.last = now
            num_chunks += 1
        if chunk.usage is not None:
            _note_usage(call, chunk.usage)
    if not is_done or call.first is None:
        call.error = "the stream ended early"
        return
    # Without a usage chunk, one token per chunk is the best estimate.
    call.num_output_tokens = call.num_output_tokens or num_chunks
    call.outcome = "completed"


def _note_usage(call: Call, usage: _Usage) -> None:
    call.num_prompt_tokens = usage.prompt_tokens
    call.num_output_tokens = usage.completion_tokens
    details = usage.prompt_tokens_details
    call.num_cached_tokens = (details.cached_tokens or 0) if details is not None else 0


async def _refused(response: aiohttp.ClientResponse, call: Call) -> None:
    text = await response.text()
    call.error = f"{response.status}: {text[:200]}"
    if response.status in REFUSALS:
        call.outcome = "refused"
        after = response.headers.get("Retry-After", "")
        call.retry_after = float(after) if after.isdecimal() else None


def _body(target: Target, query: Query) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": target.model,
        "max_tokens": query.output_tokens,
        "temperature": target.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.n > 1:
        body["n"] = target.n
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.endpoint == "completions":
        body["prompt"] = query.prompt_token_ids
    else:
        # A chat takes text only: about one token per word; the usage chunk has the true number.
        words = WORDS.split()
        text = " ".join(words[token_id % len(words)] for token_id in query.prompt_token_ids)
        body["messages"] = [{"role": "user", "content": text}]
    return body


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
