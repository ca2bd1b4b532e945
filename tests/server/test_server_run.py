"""How a server starts and stops."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from octavo.server.http.settings import ConnectionLimits, Listening
from octavo.server.run import _serve, allow_files, bind, new_event_loop, signals
from server.clients import run


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_stop_the_server(number: signal.Signals) -> None:
    async def test() -> None:
        with signals() as stop:
            os.kill(os.getpid(), number)
            await stop.wait()

    before = signal.signal(number, signal.SIG_DFL)  # the tests may run under nohup
    try:
        run(test())
    finally:
        signal.signal(number, before)


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    async def test() -> None:
        with signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run(test())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_what_fails_at_the_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not leave a server without clients that never ends."""
    said: list[str] = []

    async def nothing() -> None:
        said.append("client")

    def fail(_: Any) -> None:
        raise RuntimeError("the loop cannot watch it")

    monkeypatch.setattr("octavo.server.http.listener.HttpServer.start", fail)
    client: Any = SimpleNamespace(start=nothing, close=nothing)
    app = FastAPI()
    app.state.context = SimpleNamespace(storage=None)
    listening = Listening(port=0)
    with bind(listening) as listener:
        serving = _serve(client, app, listening, ConnectionLimits(), listener, said.append)
        with pytest.raises(RuntimeError, match="cannot watch"):
            run(serving)
    assert said == ["client", "client"]  # started and closed, and never ready


@pytest.mark.usefixtures("collecting_all")
def test_collections_leave_out_what_was_there_before_the_first_request() -> None:
    async def nothing(*_: Any) -> None:
        """It starts, drains and closes at once."""

    said: list[int] = []

    def ready(_: str) -> None:
        said.append(gc.get_freeze_count())
        os.kill(os.getpid(), signal.SIGTERM)

    client: Any = SimpleNamespace(start=nothing, drain=nothing, close=nothing, open_requests={})
    app = FastAPI()
    app.state.context = SimpleNamespace(storage=None)
    listening = Listening(port=0)
    with bind(listening) as listener:
        run(_serve(client, app, listening, ConnectionLimits(), listener, ready))
    [frozen] = said
    assert frozen > 10_000
    assert gc.get_freeze_count() == 0


def test_the_limit_of_open_files_is_raised_and_bounds_the_connections() -> None:
    program = """
import resource
from octavo.server.run import allow_files
from octavo.server.http.settings import ConnectionLimits
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 1000))
print(allow_files(ConnectionLimits()).max_connections, resource.getrlimit(resource.RLIMIT_NOFILE))
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout
    assert output == "840 (1000, 1000)\n"


def test_fewer_connections_than_files_may_be_asked_for() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert allow_files(ConnectionLimits(7)).max_connections == 7
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_uvloop_is_used_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    uvloop = pytest.importorskip("uvloop")
    loop = new_event_loop()
    assert isinstance(loop, uvloop.Loop)
    loop.close()
    monkeypatch.setitem(sys.modules, "uvloop", None)  # an import of it raises
    loop = new_event_loop()
    assert type(loop).__module__.startswith("asyncio.")
    loop.close()
