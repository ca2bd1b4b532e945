"""Accepts connections from a listening socket, as many as there is room for, and ends them.

uvicorn's own server accepts without a bound: once all files are open, the event loop closes each
new connection without an answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from collections.abc import Awaitable
from email.utils import formatdate

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.host_memory import return_freed_memory
from octavo.server.http.errors import ApiError
from octavo.server.http.gate import OPEN_PATHS
from octavo.server.http.protocol import RETRY_SECONDS, Connection, Connections, dispatch
from octavo.server.http.settings import ConnectionLimits, Listening

CHECK_SECONDS = 1.0  # between two checks of all connections
TRIM_SECONDS = 10.0  # between two returns of freed memory to the system
LOG_SECONDS = 10.0  # between two log lines about connections that were closed or refused
PAUSE_SECONDS = 0.1  # without accepting, after a failure
MAX_ACCEPTS = 64  # before other work gets its turn
MAX_SPARE = 32  # connections beyond max_connections that are open to be refused
RESERVED_FILES = MAX_ACCEPTS + MAX_SPARE + 64  # the last for the engine, logs and libraries

logger = logging.getLogger(__name__)


class HttpServer:
    """One application on one listening socket."""

    def __init__(
        self, app: ASGIApp, listener: socket.socket, listening: Listening, limits: ConnectionLimits
    ) -> None:
        """`listener` is bound; `listening` names the files for TLS, if it is to be used."""
        self.connections = Connections(limits, self._go_on_accepting)
        self._config = uvicorn.Config(
            dispatch,
            http="httptools",
            ws="none",
            lifespan="off",
            proxy_headers=False,
            log_config=None,
            log_level="error",  # what clients do wrong is counted, not logged one by one
            access_log=False,
            timeout_keep_alive=math.ceil(limits.keep_alive_seconds),
            ssl_certfile=listening.ssl_certfile,
            ssl_keyfile=listening.ssl_keyfile,
        )
        self._config.load()
        self._app = app
        self._spare_app = _spare_app(app, limits.max_connections)
        self._listener = listener
        self._is_accepting = False
        self._is_closed = False
        self._last_log_time = -LOG_SECONDS
        self._last_trim_time = time.monotonic()
        self._num_ended_at_trim = 0
        self._update_date()

    def start(self) -> None:
        """Begin to accept connections. The socket must listen."""
        self._listener.setblocking(False)
        self._go_on_accepting()

    async def watch(self) -> None:
        """End connections that are too slow; runs until it is cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._update_date()
            self.connections.check(time.monotonic())
            self._go_on_accepting()
            self._log()
            await self._trim()

    async def close(self, seconds: float) -> None:
        """Accept no more connections. Those with a request have this many seconds to end."""
        self._is_closed = True
        self._stop_accepting()
        for connection in list(self.connections.open):
            connection.shutdown()
        deadline = time.monotonic() + seconds
        while self.connections.open and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        tasks = [*self.connections.uvicorn.tasks, *self.connections.arriving.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for connection in list(self.connections.open):
            connection.transport.abort()

    # ---------------------------------------------------------------- new connections

    def _go_on_accepting(self) -> None:
        if not self._is_accepting and not self._is_closed:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)
            self._is_accepting = True

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._is_accepting = False

    def _accept(self) -> None:
        """Accept what waits in the socket's queue."""
        spare = self.connections.spare
        for _ in range(MAX_ACCEPTS):
            if len(spare) >= MAX_SPARE and not self.connections.has_room(time.monotonic()):
                self._stop_accepting()  # until one of them has gone, or the next check
                return
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, for example
                # The socket stays readable: without a pause the loop would spin.
                self.connections.closed[f"not taken at once ({error.strerror})"] += 1
                self._stop_accepting()
                asyncio.get_running_loop().call_later(PAUSE_SECONDS, self._go_on_accepting)
                return
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        accepted.setblocking(False)
        all_connections = self.connections
        is_spare = all_connections.is_full and not all_connections.make_room(time.monotonic())
        app = self._spare_app if is_spare else self._app
        connection = Connection(self._config, all_connections, app)
        if is_spare:
            all_connections.closed["refused for want of room"] += 1
            all_connections.spare.add(connection)
        task = asyncio.get_running_loop().create_task(self._connect(connection, accepted))
        all_connections.arriving[connection] = task

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        """Give an accepted socket to its connection, after the TLS handshake if there is one."""
        is_tls = self._config.ssl is not None
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._config.ssl,
                ssl_handshake_timeout=self.connections.limits.header_seconds if is_tls else None,
            )
        except OSError as error:
            logger.debug("a connection has failed: %s", error)
        finally:
            if not connection.is_made:  # there was no handshake, or no time for it
                accepted.close()
                connection.forget()

    # ---------------------------------------------------------------- once in a while

    def _update_date(self) -> None:
        self.connections.uvicorn.default_headers = [(b"date", formatdate(usegmt=True).encode())]

    def _log(self) -> None:
        """Log what was closed and refused, without a line for each connection."""
        closed, now = self.connections.closed, time.monotonic()
        if not closed or now - self._last_log_time < LOG_SECONDS:
            return
        what = ", ".join(f"{count} {why}" for why, count in closed.items())
        logger.warning(
            "connections: %s; %d are open, max_connections is %d",
            what,
            len(self.connections.open),
            self.connections.limits.max_connections,
        )
        closed.clear()
        self._last_log_time = now

    async def _trim(self) -> None:
        """Return the memory of connections and large bodies that have ended to the system: glibc
        keeps what is freed below other allocations until it is asked to trim."""
        num_ended = self.connections.uvicorn.total_requests + self.connections.num_ended
        is_due = time.monotonic() - self._last_trim_time >= TRIM_SECONDS
        if is_due and num_ended > self._num_ended_at_trim:
            self._last_trim_time, self._num_ended_at_trim = time.monotonic(), num_ended
            await asyncio.to_thread(return_freed_memory)


def _spare_app(app: ASGIApp, max_connections: int) -> ASGIApp:
    """Serves connections beyond the limit: OPEN_PATHS as always, and 503 for everything else."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        def closing_send(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            return send(message)

        if scope["path"] in OPEN_PATHS:
            await app(scope, receive, closing_send)
            return
        # The whole request first: a connection that is closed before it was read is reset.
        while (await receive()).get("more_body", False):
            pass
        error = ApiError(
            503,
            f"there are {max_connections} connections already (max_connections)",
            code="too_many_connections",
            retry_after=RETRY_SECONDS,
        )
        await error.response()(scope, receive, closing_send)

    return serve
