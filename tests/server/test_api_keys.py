"""Who may do what: keys, tenants, origins, and what is not logged."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cli.click_harness import run as octavo
from octavo.errors import ConfigError
from octavo.server.http.keys import ApiKeys
from octavo.server.http.settings import Listening, ServerSettings
from octavo.server.run import bind, is_loopback, listen
from server.live_server import OPEN, OPTIONS, TIMEOUT, LiveServer, live_server

KEY, OTHER = "key-of-nobody-special", "key-of-the-acme-company"
SECRET = "the password of the old wizard is swordfish and nobody may read it in a log"
ORIGIN = "https://pages.example"


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "stderr"


@pytest.fixture(scope="module")
def guarded(log_file: Path) -> Iterator[LiveServer]:
    options = ["--cors-origin", ORIGIN, "--log-requests", "--log-format", "json"]
    options += ["--trust-request-chat-template", "--served-model-name", "one", "--policy"]
    options += ["priority", "--served-model-name", "two", "--ignore-unknown-fields"]
    options += ["--max-num-seqs", "2", "--max-waiting", "2"]
    keys = f"{KEY} {OTHER}:acme"
    with (
        log_file.open("w") as log,
        live_server(*options, stderr=log, OCTAVO_API_KEY=keys) as running,
    ):
        yield running


def complete(server: LiveServer, key: str, **fields: object) -> httpx.Response:
    body = {"prompt": SECRET, "max_tokens": 1, "temperature": 0, **fields}
    return server.post("/v1/completions", body, Authorization=f"Bearer {key}")


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/", "/docs", "/debug/kv", "/nothing"])
def test_everything_needs_the_key(guarded: LiveServer, path: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong-key"}, {"Authorization": KEY}):
        refused = guarded.get(path, **headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in refused.text
    assert guarded.get(path, Authorization=f"Bearer {KEY}").status_code in (200, 404)


def test_health_and_version_are_open(guarded: LiveServer) -> None:
    assert guarded.get("/health").status_code == 200
    assert guarded.get("/version").status_code == 200


def test_a_browser_is_asked_for_the_key(guarded: LiveServer) -> None:
    asked = guarded.get("/", Accept="text/html")
    assert asked.headers["www-authenticate"].startswith("Basic")
    page = httpx.get(guarded.url, auth=("anybody", KEY), **OPEN)
    assert page.status_code == 200


def test_tenants_share_no_cached_prefix(guarded: LiveServer) -> None:
    def num_cached(key: str, **fields: object) -> int:
        usage = complete(guarded, key, prompt=SECRET * 2, **fields).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert num_cached(KEY) == 0
    assert num_cached(KEY) > 0
    assert num_cached(OTHER) == 0
    assert num_cached(OTHER) > 0
    assert num_cached(OTHER, cache_salt="x") == 0


def test_a_key_has_one_salt() -> None:
    keys = ApiKeys([f"{KEY}:acme", KEY.upper(), f"{KEY}:acme"])
    assert keys.tenant(f"Bearer {KEY}") != keys.tenant(f"Bearer {KEY.upper()}")
    for other in (KEY, f"{KEY}:other"):
        with pytest.raises(ConfigError, match=r"^api_key: key 3 is an earlier one with"):
            ApiKeys([f"{KEY}:acme", KEY.upper(), other])


@pytest.mark.parametrize("variable", ["OCTAVO_API_KEY", "OCTAVO_ADMIN_KEY"])
def test_a_variable_without_a_key_opens_no_server(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "")
    run = octavo("serve", "--port", "-1")
    assert run.stderr.startswith(f"error: {variable}: it is set, but holds no key")
    given = {"OCTAVO_API_KEY": "--api-key", "OCTAVO_ADMIN_KEY": "--admin-key"}[variable]
    run = octavo("serve", given, KEY, "--port", "-1")
    assert run.stderr.startswith("error: port: -1")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *(("localhost", True), ("LOCALHOST", True), ("127.1", True), ("::1", True)),
        *(("0.0.0.0", False), ("10.1.2.3", False), (".", False), ("a" * 64, False)),
    ],
)
def test_which_hosts_are_this_machine_alone(host: str, expected: bool) -> None:
    assert is_loopback(host) == expected


@pytest.mark.parametrize("host", [".", "a" * 64, "a..b"])
def test_what_is_no_host_is_said_clearly(host: str) -> None:
    with pytest.raises(ConfigError, match=r"^host: .* is not an address of this machine"):
        bind(Listening(host=host, port=0))


def test_tenants_see_their_own_prefixes_alone(guarded: LiveServer) -> None:
    headers = {"Authorization": f"Bearer {OTHER}"}
    body = {"prefix": SECRET * 2, "name": "ours"}
    assert guarded.post("/v1/prefixes", body, **headers).json()["name"] == "ours"
    mine = guarded.get("/v1/prefixes", Authorization=f"Bearer {KEY}").json()["data"]
    theirs = guarded.get("/v1/prefixes", **headers).json()["data"]
    assert ([p["name"] for p in mine], [p["name"] for p in theirs]) == ([], ["ours"])
    url = f"{guarded.url}/v1/prefixes/ours"
    foreign = httpx.delete(url, headers={"Authorization": f"Bearer {KEY}"}, **OPEN)
    assert foreign.status_code == 404
    assert httpx.delete(url, headers=headers, **OPEN).status_code == 200


def test_origins(guarded: LiveServer, server: LiveServer) -> None:
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    url = f"{guarded.url}/v1/completions"
    allowed = httpx.options(url, headers=preflight, **OPEN)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    preflight |= {"Origin": "https://evil.example"}
    other = httpx.options(url, headers=preflight, **OPEN)
    assert "access-control-allow-origin" not in other.headers
    plain = server.get("/v1/models", Origin=ORIGIN)
    assert "access-control-allow-origin" not in plain.headers


def test_origins_and_names_that_no_request_can_have_are_refused() -> None:
    origins = (ORIGIN, "http://localhost:3000", "http://[::1]:80", "app://x", "*", "null")
    ServerSettings(("m",), cors_origins=origins, allowed_hosts=("a.example", "10.0.0.1", "[::1]"))
    for origin in (
        "",
        f"{ORIGIN}/",
        "pages.example",
        "https://Pages.example",
        f"{ORIGIN} {ORIGIN}",
    ):
        with pytest.raises(ConfigError, match=rf"^cors_origin: '{origin}' is not an origin"):
            ServerSettings(("m",), cors_origins=(ORIGIN, origin))
    for host in ("", "a.example:8000", "https://a.example", "::1", "a.example b.example"):
        with pytest.raises(ConfigError, match=rf"^allowed_host: '{host}' is not a name"):
            ServerSettings(("m",), allowed_hosts=("a.example", host))


def test_names_of_the_server(guarded: LiveServer, server: LiveServer) -> None:
    """Without a key, a page whose name leads to this machine is turned away."""
    for host, status in (("evil.example", 403), ("evil.example:8000", 403), ("LocalHost:1", 200)):
        answer = httpx.get(f"{server.url}/v1/models", headers={"host": host}, **OPEN)
        assert answer.status_code == status, host
    answer = httpx.get(f"{server.url}/v1/models", headers={"host": "evil.example"}, **OPEN)
    assert answer.json()["error"]["code"] == "unknown_host"
    answer = httpx.get(f"{guarded.url}/health", headers={"host": "any.example"}, **OPEN)
    assert answer.status_code == 200
    assert httpx.head(f"{guarded.url}/health", **OPEN).status_code == 200


def test_switches(guarded: LiveServer) -> None:
    """What the plain server refuses and this one was told to allow."""
    reply = complete(guarded, KEY, model="two", priority=3, unknown=1)
    assert reply.json()["model"] == "two"
    chat = {
        "messages": [{"role": "user", "content": "Once upon a time"}],
        "chat_template": "{{ messages[0].content }}",
        "return_token_ids": True,
        "max_tokens": 1,
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    reply = guarded.post("/v1/chat/completions", chat, **headers)
    tokens = guarded.post("/tokenize", {"prompt": "Once upon a time"}, **headers).json()["tokens"]
    assert reply.json()["prompt_token_ids"] == tokens
    chat["chat_template"] = "{{ messages.__class__.__mro__ }}"
    refused = guarded.post("/v1/chat/completions", chat, **headers)
    assert refused.status_code == 400
    chat["chat_template"] = "{% if %}"
    broken = guarded.post("/v1/chat/completions", chat, **headers)
    assert broken.json()["error"]["param"] == "chat_template"


def test_more_than_may_wait_is_refused_in_good_order(guarded: LiveServer) -> None:
    """Two run and two may wait; of twelve at once each is answered or told to come again."""

    async def ask_all() -> list[httpx.Response]:
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"prompt": "Once upon a time", "max_tokens": 200, "ignore_eos": True}
        async with httpx.AsyncClient(timeout=TIMEOUT, headers=headers) as client:
            url = f"{guarded.url}/v1/completions"
            return await asyncio.gather(*(client.post(url, json=body) for _ in range(12)))

    replies = asyncio.run(ask_all())
    refused = [reply for reply in replies if reply.status_code == 429]
    answered = [reply for reply in replies if reply.status_code == 200]
    assert len(answered) >= 2
    assert len(refused) + len(answered) == 12
    assert refused
    for reply in refused:
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["type"] == "rate_limit_error"
    for reply in answered:
        assert reply.json()["usage"]["completion_tokens"] == 200
    batch = {"prompt": ["a"] * 30, "max_tokens": 100, "ignore_eos": True}
    whole = guarded.post("/v1/completions", batch, Authorization=f"Bearer {KEY}")
    assert whole.status_code == 429, "a batch is accepted whole or not at all"
    held = guarded.get("/debug/kv", Authorization=f"Bearer {KEY}").json()["device"]["num_held"]
    assert held == 0


def test_nothing_sensitive_is_logged(guarded: LiveServer, log_file: Path) -> None:
    """Runs last in this file: the log has lines of all requests above."""
    assert complete(guarded, KEY, user="somebody").status_code == 200
    assert complete(guarded, KEY, temperature=9).status_code == 400
    assert complete(guarded, KEY, zzz=SECRET, stop=SECRET).status_code == 200
    log = log_file.read_text()
    assert '"path": "/v1/completions"' in log
    assert '"user": "somebody"' in log
    assert '"status": 400' in log
    for secret in ("swordfish", "wizard", KEY, OTHER, "acme"):
        assert secret not in log


def test_a_taken_port_is_said_clearly() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        program = "from octavo.cli.main import main; main()"
        run = subprocess.run(
            [sys.executable, "-c", program, "serve", "--port", port, *OPTIONS],
            capture_output=True,
            text=True,
        )
    assert run.returncode == 1
    last_line = run.stderr.splitlines()[-1]
    assert last_line.startswith(f"error: port: {port} is taken on 127.0.0.1")
    assert "Traceback" not in run.stderr


def test_of_two_servers_that_start_together_one_gets_the_port() -> None:
    with bind(Listening(port=0)) as first:
        settings = Listening(port=first.getsockname()[1])
        with bind(settings) as second:
            listen(first, settings)
            with pytest.raises(ConfigError, match=r"^port: \d+ is taken on 127.0.0.1"):
                listen(second, settings)


def test_signals() -> None:
    """The first lets open requests end and admits no others; the second ends them."""
    with live_server("--log-level", "warning") as server:
        url = f"{server.url}/v1/completions"
        body = {"prompt": "Once upon a time", "ignore_eos": True, "stream": True}
        with (
            httpx.stream("POST", url, json=body | {"max_tokens": 60}, **OPEN) as short,
            httpx.stream("POST", url, json=body | {"max_tokens": 2000}, **OPEN) as long,
        ):
            lines = long.iter_lines()
            next(lines)
            server.process.terminate()
            ended = [line for line in short.iter_lines() if line]
            assert '"finish_reason":"length"' in ended[-2]
            assert ended[-1] == "data: [DONE]"
            refused = server.post("/v1/completions", {"prompt": "a"})
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "unavailable"
            assert server.get("/health").status_code == 503
            server.process.terminate()
            ended = [line for line in lines if line]
        assert not any('"finish_reason":"' in line for line in ended)
        assert '"error":{"message":"the request was ended by the server"' in ended[-2]
        assert ended[-1] == "data: [DONE]"
        assert server.process.wait(TIMEOUT) == 0
