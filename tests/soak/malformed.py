"""Requests that no client should send: none may be answered with 5xx, and none may hang."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from processes import engines
from server.live_server import LiveServer, live_server
from soak.kills import check_blocks
from soak.report import Memory, Report

CONCURRENCY = 16
TIMEOUT = 60.0  # for one answer
PATIENCE = 0.3  # seconds until the client of an incomplete request ends its side
CHECK_EVERY = 1000  # requests between two checks by a valid request and a memory sample
MAX_GROWTH_MIB = 48.0  # of each process
# A short context bounds the work of requests that turn out to be well-formed.
OPTIONS = ("--max-model-len", "96", "--max-num-seqs", "32")
MAX_BODY = 200_000  # bytes

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

HI = {"role": "user", "content": "What is a cat?"}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}),
    ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "seed": 1, "stop": ["a"]}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": "The", "beam_width": 3, "max_tokens": 4, "n": 2}),
    ("/v1/completions", {"prompt": "A", "max_tokens": 2, "logit_bias": {"5": 1}, "bad_words": []}),
    ("/v1/chat/completions", {"messages": [HI], "max_tokens": 4, "logprobs": True}),
    (
        "/v1/chat/completions",
        {
            "messages": [HI, {"role": "user", "content": [{"type": "text", "text": "a"}]}],
            "max_tokens": 2,
            "stream": True,
            "stream_options": {"include_usage": True},
            "chat_template_kwargs": {"x": 1},
        },
    ),
    ("/tokenize", {"prompt": "Once upon a time", "return_token_strs": True}),
    ("/tokenize", {"messages": [HI], "add_generation_prompt": True}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    ("/v1/prefixes", {"prefix": "Once upon a time", "name": "x"}),
    ("/pool/play", {"operations": [{"op": "new"}, {"op": "fork", "sequence": "A", "times": 2}]}),
]
PATHS = [path for path, _ in BODIES] + [
    *("/", "/pool", "/docs", "/health", "/version", "/metrics", "/openapi.json", "/v1/models"),
    *("/v1/models/demo", "/v1/prefixes", "/v1/prefixes/x", "/debug/kv", "/debug/kv/x"),
    *("/tokenizer_info", "/pool/textbook"),
]
METHODS = [
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "PATCH",
    "TRACE",
    "CONNECT",
    "get",
    "",
]
SCALARS = [
    *("null", "true", "false", "0", "-1", "1", "0.5", "1.0", "1e400", "-1e400", "1e-400", "NaN"),
    *("Infinity", "01", "1" + "0" * 400, str(1 << 63), str(1 << 64), str(-(1 << 63) - 1), '""'),
    *('"x"', '"\\ud800"', '"\\u0000"', '"\\ud83d\\ude00"', "[]", "{}", "[null]", '{"": null}'),
    *('"never"', '"text"', "tru", "'x'", "[1,]", '{"a":1,}', "/**/"),
]
FIELDS = [
    *sorted({name for _, body in BODIES for name in body}),
    *("model", "echo", "suffix", "tools", "response_format", "top_k", "top_p", "min_p", "user"),
    *("cache_salt", "priority", "prompt_logprobs", "repetition_penalty", "presence_penalty"),
    *("allowed_token_ids", "ignore_eos", "length_penalty", "early_stopping", "zzz", "role"),
    *("content", "name", "type", "text", "op", "times", "sequence", "top_logprobs", "best_of"),
]
HEADERS = [
    *("Content-Type: text/plain", "Content-Type: application/json; charset=utf-16"),
    *("Content-Encoding: gzip", "Transfer-Encoding: gzip", "Expect: 100-continue"),
    *("Connection: Upgrade\r\nUpgrade: websocket", "Host: elsewhere", "Origin: null"),
    *("Authorization: Basic !", "X-Request-Id: " + "x" * 500, "X-Request-Id: ü", "Accept: \x01"),
    *("Range: bytes=0-1", "Cookie: " + "a" * 5000, "Content-Length: -1", "Content-Length: 1e3"),
    *("Content-Length: 99999999999999999999", "No colon", ": no name", "A: b\r\n folded"),
]


def scalar(rng: random.Random) -> str:
    if rng.random() < 0.8:
        return rng.choice(SCALARS)
    kind = rng.randrange(4)
    depth = rng.choice((3, 100, 1000, 100_000))
    if kind == 0:
        return "[" * depth + "]" * (depth if rng.random() < 0.5 else 0)
    if kind == 1:
        return '{"a":' * min(depth, MAX_BODY // 6) + "1" + "}" * min(depth, MAX_BODY // 6)
    if kind == 2:
        return json.dumps(rng.choice(("a ", "\u00e9", "[", '"', "\U0001f600")) * min(depth, 20_000))
    return "[" + ",".join([rng.choice(SCALARS)] * min(depth, 20_000)) + "]"


def changed(value: Any, rng: random.Random) -> str:
    """JSON of a value with random changes, which may make it invalid."""
    if rng.random() < 0.15:
        return scalar(rng)
    if isinstance(value, dict) and value:
        members = [
            (name, changed(v, rng) if rng.random() < 0.3 else json.dumps(v))
            for name, v in value.items()
        ]
        while rng.random() < 0.4:
            members.append((rng.choice(FIELDS), scalar(rng)))
        if rng.random() < 0.2:
            del members[rng.randrange(len(members))]
        return "{" + ",".join(f"{json.dumps(name)}:{each}" for name, each in members) + "}"
    if isinstance(value, list) and value:
        return "[" + ",".join(changed(each, rng) for each in value) + "]"
    return scalar(rng) if rng.random() < 0.5 else json.dumps(value)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """The same bytes, truncated, with bits flipped, or in another encoding."""
    kind = rng.randrange(8)
    place = rng.randrange(len(data) + 1)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + rng.randbytes(rng.randrange(1, 9)) + data[place:]
    if kind == 2 and data:
        flipped = bytearray(data)
        for _ in range(rng.randrange(1, 5)):
            flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(flipped)
    if kind == 3:
        return b"\xef\xbb\xbf" + data
    if kind == 4:
        return data.decode(errors="replace").encode("utf-16")
    if kind == 5:
        return data + data[place:]
    if kind == 6:
        return data.replace(b'"', b"'")
    return rng.randbytes(rng.randrange(200))


def with_wrong_body(rng: random.Random) -> bytes:
    path, body = rng.choice(BODIES)
    data = changed(body, rng).encode(errors="surrogatepass")[:MAX_BODY]
    if rng.random() < 0.3:
        data = damaged(data, rng)
    return framed("POST", path, ["Content-Type: application/json"], data)


def with_wrong_head(rng: random.Random) -> bytes:
    path, body = rng.choice(BODIES)
    method = "POST"
    if rng.random() < 0.6:
        method, path = rng.choice(METHODS), rng.choice(PATHS)
    kind = rng.randrange(6)
    if kind == 0:
        path += rng.choice(
            ("?a=b", "/", "/..", "%00", "%ff", "#x", "/" + "x" * 9000, "//", "\u00e9")
        )
    elif kind == 1:
        path = rng.choice(("*", "http://localhost" + path, "http://elsewhere/", "", "x", "/../etc"))
    headers = ["Content-Type: application/json"]
    headers += rng.sample(HEADERS, rng.randrange(3))
    rng.shuffle(headers)
    data = framed(method, path, headers, json.dumps(body).encode())
    if kind == 2:
        data = data.replace(
            b"HTTP/1.1", rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/9", b"", b"X"))
        )
    elif kind == 3:
        data = data.replace(b"\r\n", rng.choice((b"\n", b"\r", b"\r\n\r\n")), rng.randrange(1, 4))
    return data


def with_wrong_framing(rng: random.Random) -> bytes:
    """Lengths and chunks that do not match the data; the client then stops sending."""
    path, body = rng.choice(BODIES)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    kind = rng.randrange(4)
    if kind == 0:
        length = max(0, len(data) + rng.choice((-5, -1, 1, 1000)))
        return f"{head}Content-Length: {length}\r\n\r\n".encode() + data
    if kind == 1:
        size = rng.choice(("zz", "-1", "fffffffffffffffff", "5", "1000", f"{len(data):x};x=y", ""))
        ending = rng.choice((b"\r\n0\r\n\r\n", b"", b"\r\n", b"0"))
        start = f"{head}Transfer-Encoding: chunked\r\n\r\n{size}\r\n"
        return start.encode() + data + ending
    if kind == 2:
        both = f"{head}Content-Length: {len(data)}\r\nTransfer-Encoding: chunked\r\n\r\n"
        return both.encode() + data
    whole = framed("POST", path, ["Content-Type: application/json"], data)
    return whole[: rng.randrange(len(whole))]


def not_http(rng: random.Random) -> bytes:
    return damaged(with_wrong_head(rng)[:2000], rng)


def framed(method: str, path: str, headers: list[str], data: bytes) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    head = "\r\n".join([*lines, f"Content-Length: {len(data)}"])
    return head.encode(errors="surrogatepass") + b"\r\n\r\n" + data


KINDS: list[tuple[Callable[[random.Random], bytes], float]] = [
    (with_wrong_body, 0.7),
    (with_wrong_head, 0.15),
    (with_wrong_framing, 0.1),
    (not_http, 0.05),
]


async def send(port: int, data: bytes, is_whole: bool) -> bytes:
    """The whole reply.

    If the request may be incomplete, the client ends its side after a while; the server takes that
    as the end of the connection, and may close it without a reply.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        await writer.drain()
        answer = asyncio.ensure_future(reader.read())
        done, _ = await asyncio.wait({answer}, timeout=TIMEOUT if is_whole else PATIENCE)
        if not done:
            writer.write_eof()
        return await asyncio.wait_for(answer, TIMEOUT)
    finally:
        writer.close()


async def soak(server: LiveServer, seed: int, count: int, report: Report) -> None:
    port = urlsplit(server.url).port
    assert port is not None
    [engine] = engines(server.process.pid)
    memories = [
        Memory(server.process.pid, MAX_GROWTH_MIB),
        Memory(engine, MAX_GROWTH_MIB, "engine_"),
    ]
    numbers = iter(range(count))

    def sample() -> None:
        if engines(server.process.pid) != [engine]:
            report.violate("the engine process has died")
            return
        for memory in memories:
            memory.sample()

    async def client() -> None:
        for number in numbers:
            if report.is_late:
                return
            rng = random.Random(f"{seed}-{number}")
            [make] = rng.choices([k for k, _ in KINDS], [w for _, w in KINDS])
            data = make(rng)
            try:
                reply = await send(port, data, is_whole=make is with_wrong_body)
            except TimeoutError:
                report.violate(f"request {number} ({make.__name__}) hangs: {data[:300]!r}")
                continue
            except ConnectionError:  # refused before it was read completely
                reply = b""
            report.count("malformed_requests")
            reply = reply.removeprefix(CONTINUE)
            status = reply[9:12].decode("latin-1")
            report.count(f"status_{status}" if status.isdecimal() else "no_reply")
            if not reply and make is with_wrong_body:
                report.violate(f"request {number} has no reply: {data[:300]!r}")
            if reply.startswith(b"HTTP/") and status.startswith("5"):
                report.violate(
                    f"request {number} ({make.__name__}): {reply[:400]!r} {data[:300]!r}"
                )
            if number % CHECK_EVERY == 0:
                sample()
                good = framed("POST", *_GOOD)
                answer = await send(port, good, is_whole=True)
                if b" 200 OK" not in answer[:20]:
                    report.violate(f"after request {number} a valid one got {answer[:300]!r}")

    sample()
    await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
    sample()
    for memory in memories:
        memory.check_growth(report)


_GOOD = (
    BODIES[0][0],
    ["Content-Type: application/json"],
    json.dumps(BODIES[0][1]).encode(),
)


def run(seed: int, count: int, seconds: float) -> Report:
    with live_server("--log-level", "error", *OPTIONS) as server:
        report = Report("malformed", seconds)
        asyncio.run(soak(server, seed, count, report))
        report.require("malformed_requests", count)
        check_blocks(server, report)
        if server.get("/health").status_code != 200:
            report.violate("the server is not healthy")
    report.show()
    return report
