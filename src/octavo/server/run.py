"""A server's life: socket, engine, HTTP, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import resource
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, FastAPI

from octavo.config import EngineConfig
from octavo.engine.garbage import what_is_there_left_out
from octavo.errors import ConfigError
from octavo.server.engine_process.client import EngineClient
from octavo.server.engine_process.placement import Replication
from octavo.server.engine_process.supervision import Supervision
from octavo.server.http.app import create_app
from octavo.server.http.batch import Batch, Tally, run_batch
from octavo.server.http.context import Storage
from octavo.server.http.listener import RESERVED_FILES, HttpServer
from octavo.server.http.settings import ConnectionLimits, Listening, ServerSettings
from octavo.server.http.streams import unless
from octavo.server.observability.observation import Observation

CLOSE_SECONDS = 2  # for connections to end once their requests have
BACKLOG = 1 << 16  # connections that wait to be accepted; the system may allow fewer (somaxconn)

logger = logging.getLogger(__name__)


def run_server(
    config: EngineConfig,
    supervision: Supervision,
    settings: ServerSettings,
    listening: Listening,
    limits: ConnectionLimits,
    replication: Replication,
    say: Callable[[str], None],
    routers: Sequence[APIRouter] = (),
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. `say` gets one line when requests can be sent. Until
    its end the process is the server's: its signals, open files and garbage collector.

    `routers` are endpoints from outside the package. Raises ConfigError (for a port that is taken,
    for example), ModelError or OutOfMemory.
    """
    start = time.monotonic()
    name = settings.model_names[0]

    def ready(url: str) -> None:
        say(f"octavo serves {name} at {url} (ready after {time.monotonic() - start:.1f} s)")
        if not settings.api_keys and not is_loopback(listening.host):
            logger.warning("every client that reaches %s may use it: there is no --api-key", url)

    logger.info("starting %s; the first start takes longest, because it compiles kernels", name)
    check_tls(listening)
    limits = allow_files(limits)
    with contextlib.closing(bind(listening)) as listener:
        observation = Observation(name)
        client = EngineClient(config, supervision, observation.listeners, replication=replication)
        app = create_app(client, settings, [*observation.routers(client), *routers])
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(_serve(client, app, listening, limits, listener, ready))


def run_batch_file(
    config: EngineConfig,
    settings: ServerSettings,
    batch: Batch,
    max_inflight: int,
    show: Callable[[Tally], None],
) -> Tally:
    """Answer a file of requests. Raises KeyboardInterrupt after SIGINT or SIGTERM."""
    # The queue is bounded already: only so many requests are read from the file at a time.
    client = EngineClient(config, Supervision(max_waiting=max_inflight * settings.max_prompts))
    app = create_app(client, settings)

    async def run() -> Tally:
        with signals() as stop:
            try:
                if await unless(stop.wait(), client.start()) is not None:
                    done = await unless(stop.wait(), run_batch(app, batch, max_inflight, show))
                    if done is not None:
                        return done.result()
                raise KeyboardInterrupt
            finally:
                await client.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(run())


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, which is the faster one, where it is installed."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def bind(listening: Listening) -> socket.socket:
    """A socket that has its port but does not listen yet: a taken port is reported early, and
    clients connect only when they can be served."""
    host, port = listening.host, listening.port
    try:
        family, kind, protocol, _, address = _resolve(host, port)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "host", f"{host!r} is not an address of this machine ({error})"
        ) from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(listening, error) from error
    return listener


def _resolve(host: str, port: int) -> tuple[Any, ...]:
    """Family, type, protocol, name and address of a socket that is to listen there."""
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]


def listen(listener: socket.socket, listening: Listening) -> None:
    """Accept clients. Raises ConfigError if another process listens there already."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _unusable(listening, error) from error


def _unusable(listening: Listening, error: OSError) -> ConfigError:
    host, port = listening.host, listening.port
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            "port", f"{port} is taken on {host}; choose another (--port 0 takes a free one)"
        )
    return ConfigError("port", f"{host}:{port} cannot be used ({error.strerror})")


def check_tls(listening: Listening) -> None:
    """Raises ConfigError if certificate and key cannot be used."""
    if listening.ssl_certfile is None:
        return
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(listening.ssl_certfile, listening.ssl_keyfile)
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError("ssl_certfile", f"it cannot be used ({error})") from error


def url_of(listening: Listening, port: int) -> str:
    scheme = "http" if listening.ssl_certfile is None else "https"
    return f"{scheme}://{host_in_urls(listening.host)}:{port}"


def host_in_urls(host: str) -> str:
    """A name or address as URLs and Host headers have it: IPv6 addresses are in brackets."""
    return f"[{host}]" if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether the server listens for this machine alone, however `host` is written: 127.1, say."""
    try:
        _, _, _, _, address = _resolve(host, 0)
    except (OSError, UnicodeError):  # of which `bind` tells the user
        return False
    return ipaddress.ip_address(address[0]).is_loopback


async def _serve(
    client: EngineClient,
    app: FastAPI,
    listening: Listening,
    limits: ConnectionLimits,
    listener: socket.socket,
    ready: Callable[[str], None],
) -> None:
    """Start the engine, serve until a signal, drain, and end the engine."""
    with signals() as stop:
        try:
            if await unless(stop.wait(), client.start()) is None:
                return
            storage: Storage | None = app.state.context.storage
            if storage is not None:
                storage.batches.start(app)
            server = HttpServer(app, listener, listening, limits)
            listen(listener, listening)
            server.start()
            watching = asyncio.create_task(server.watch())
            try:
                with what_is_there_left_out():
                    ready(url_of(listening, listener.getsockname()[1]))
                    await unless(stop.wait(), asyncio.shield(watching))
                    stop.clear()
                    if storage is not None:
                        await storage.batches.stop()
                    if client.open_requests:
                        logger.info("draining; a second signal ends all requests at once")
                    await unless(stop.wait(), client.drain(listening.drain_seconds))
                await client.close()
            finally:
                watching.cancel()
                await server.close(CLOSE_SECONDS)
        finally:
            await client.close()


def allow_files(limits: ConnectionLimits) -> ConnectionLimits:
    """Raise the soft limit of open files to the hard one, and bound the connections by it.

    That needs no privileges. The soft limit is often 1,024 for the sake of programs that call
    `select`.
    """
    before, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    most = max(files - RESERVED_FILES, files // 2)
    limits = replace(limits, max_connections=min(limits.max_connections, most))
    logger.info(
        "at most %d connections and %d open files%s",
        limits.max_connections,
        files,
        "" if files == before else f" (the soft limit was {before})",
    )
    return limits


@contextlib.contextmanager
def signals() -> Iterator[asyncio.Event]:
    """An event that SIGTERM, SIGINT and SIGHUP set; under nohup, which ignores it, not SIGHUP."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
