"""One engine process: started, talked to, ended."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from octavo.child_process import ChildProcess, describe_exit, start_child
from octavo.engine.results import error_of
from octavo.errors import EngineFailed
from octavo.server.engine_process import messages as m
from octavo.server.engine_process.channel import ChannelProtocol

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "octavo.server.engine_process.loop")
EXIT_SECONDS = 5.0  # for a process to end by itself, and again when it was killed


@dataclass(frozen=True, slots=True)
class Death:
    """How an engine process ended."""

    cause: str
    is_kill_from_outside: bool  # SIGKILL of it or one of its ranks, and it was not us


class EngineProcess:
    """Owns a child process and the socket to it."""

    def __init__(
        self,
        command: Sequence[str],
        on_message: Callable[[m.Message], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            command: gets the number of its socket's file descriptor as its last argument.
            on_message: called with each message, once the engine is ready.
            environment: variables of the process, beside those of this one.
        """
        self._command = command
        self._environment = environment or {}
        self._on_message = on_message
        loop = asyncio.get_running_loop()
        # None: it is gone before it was ready.
        self._ready: asyncio.Future[m.EngineInfo | None] = loop.create_future()
        # Done when its socket has closed: nothing more comes of it, though it may not have ended.
        self.gone: asyncio.Future[None] = loop.create_future()
        self._crash: m.Crashed | None = None
        self._was_killed = False
        self._channel = ChannelProtocol(self._receive, self._end)
        self._child: ChildProcess | None = None

    async def start(self, start: m.Start, seconds: float) -> m.EngineInfo:
        """Start it, and wait until the engine is ready.

        Raises the engine's error; NoRoom if the system has too few resources for a process at the
        moment; EngineFailed if the process ended or took too long. No process is left
        then.
        """
        self._child, connection = start_child(self._command, "an engine process", self._environment)
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: self._channel, sock=connection)
        except BaseException:
            connection.close()  # which ends the child
            raise
        self.send(start)
        try:
            info = await asyncio.wait_for(asyncio.shield(self._ready), seconds)
        except TimeoutError:
            self.kill()
            await self.end()
            raise EngineFailed(f"it was not ready within start_seconds ({seconds:g})") from None
        except BaseException:  # also if the caller has left
            self.kill()
            await self.end()
            raise
        if info is None:
            await self.end()
            cause = (await self.death()).cause
            raise EngineFailed(f"the engine process died while it started: {cause}")
        return info

    @property
    def pid(self) -> int:
        assert self._child is not None, "it has not been started"
        return self._child.pid

    def send(self, command: m.Command) -> None:
        """Does nothing if the process is gone; `gone` says so soon."""
        self._channel.send(m.encode(command))

    def kill(self) -> None:
        """End it at once, whatever it does. It is gone then, also if a device keeps it from ending:
        nothing more is heard of it."""
        if self._child is not None and self._child.kill():
            self._was_killed = True
        self._channel.close()

    async def death(self) -> Death:
        """How it has died, once it is gone. It may not have ended yet; see `end`."""
        if self._crash is not None:
            return Death(self._crash.message, self._crash.is_kill_from_outside)
        if not self._was_killed and not await self._exits():
            self.kill()
        if self._was_killed:  # what it ends with is known, and when it does is not
            return Death(describe_exit(-signal.SIGKILL), False)
        status = self._exit_status().result()
        return Death(describe_exit(status), -status == signal.SIGKILL)

    async def end(self) -> None:
        """Close the socket, which ends the process, and wait for that: its devices and its memory
        are free then."""
        while not await self.ends():
            pass

    async def ends(self) -> bool:
        """Whether it ends soon after its socket is closed, or when it is killed for not doing so. A
        device may keep it from ending for longer."""
        self._channel.close()
        if await self._exits():
            return True
        self.kill()
        return await self._exits()

    async def _exits(self) -> bool:
        """Whether it has ended within EXIT_SECONDS."""
        exiting = asyncio.wrap_future(self._exit_status())
        done, _ = await asyncio.wait([exiting], timeout=EXIT_SECONDS)
        return bool(done)

    def _exit_status(self) -> Future[int]:
        assert self._child is not None, "it has not been started"
        return self._child.exit_status

    def _receive(self, payload: bytes) -> None:
        message = m.decode_message(payload)
        if isinstance(message, m.EngineInfo):
            if not self._ready.done():
                self._ready.set_result(message)
        elif isinstance(message, m.StartFailed):
            error = error_of(message.error)
            if isinstance(error, EngineFailed):  # no mistake of the user's
                logger.error("%s", message.traceback)
            if not self._ready.done():
                self._ready.set_exception(error)
        else:
            self._on_message(message)
            if isinstance(message, m.Crashed):
                self._crash = message
                # It is over, and must not count as serving until its devices have let go, which may
                # never be.
                self._channel.close()

    def _end(self) -> None:
        for future in (self._ready, self.gone):
            if not future.done():
                future.set_result(None)
