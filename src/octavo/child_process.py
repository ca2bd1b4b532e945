"""A process of octavo's own and its connection: started, monitored, killed. No torch."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

from octavo.errors import EngineFailed, lines_of_code, without_values

PR_SET_PDEATHSIG = 1  # linux/prctl.h
# Files, memory or processes of this one, or of the whole system.
NO_ROOM = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN})


class NoRoom(EngineFailed):
    """The system has no room for another process now. It says nothing of the engine."""


class ChildProcess:
    """Owns a process that ends when the connection which it was given is closed."""

    def __init__(
        self,
        command: Sequence[str],
        what: str,
        connection: socket.socket,
        environment: Mapping[str, str] | None = None,
        inherited: Sequence[int] = (),
    ) -> None:
        """Start a program.

        Args:
            command: gets the number of the connection's file descriptor as its last argument.
            what: names the process in errors.
            connection: the child's alone from now on: it is closed here.
            environment: variables of the process, beside those of this one.
            inherited: file descriptors that it gets, too, under the same numbers.

        Raises:
            NoRoom: the system has too few resources for a process at the moment.
        """
        self.exit_status: Future[int] = Future()
        spawned: Future[subprocess.Popen[bytes]] = Future()
        with connection, room_for(what):
            # The child asks the kernel to end it with the thread that started it. This thread lasts
            # as long as the child does; the caller's may not.
            descriptors = [connection.fileno(), *inherited]
            arguments = (command, descriptors, environment or {}, spawned, self.exit_status)
            Thread(target=_watch, args=arguments, daemon=True).start()
            self._process = spawned.result()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> bool:
        """End it at once, whatever it does. False if it has ended."""
        if self._process.poll() is not None:
            return False
        self._process.send_signal(signal.SIGKILL)
        return True


def start_child(
    command: Sequence[str],
    what: str,
    environment: Mapping[str, str] | None = None,
    inherited: Sequence[int] = (),
) -> tuple[ChildProcess, socket.socket]:
    """A process that has one end of a socket pair, and the other end. See ChildProcess."""
    with room_for(what):
        ours, theirs = socket.socketpair()
    try:
        return ChildProcess(command, what, theirs, environment, inherited), ours
    except BaseException:
        ours.close()
        raise


@contextmanager
def room_for(what: str) -> Iterator[None]:
    """Raises NoRoom where the system has none."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NoRoom(f"there is no room for {what} ({error.strerror})") from None
        raise
    except RuntimeError as error:  # of Thread.start
        raise NoRoom(f"there is no room for {what} ({error})") from None


def _watch(
    command: Sequence[str],
    descriptors: Sequence[int],
    environment: Mapping[str, str],
    spawned: Future[subprocess.Popen[bytes]],
    exit_status: Future[int],
) -> None:
    """Start the program and wait for its end; in a process group of its own, so that the terminal's
    Ctrl-C does not reach it. Of the file descriptors that it gets it is told the first."""
    try:
        child = subprocess.Popen(
            [*command, str(descriptors[0])],
            stdin=subprocess.DEVNULL,
            stdout=2,  # what libraries print goes to the log, too
            pass_fds=descriptors,
            env={**os.environ, **environment},
            process_group=0,
        )
    except BaseException as error:
        spawned.set_exception(error)
        return
    spawned.set_result(child)
    exit_status.set_result(child.wait())


def describe_exit(status: int) -> str:
    """How a process has ended, by its `exit_status`."""
    if status < 0:
        names = {each.value: f" ({each.name})" for each in signal.Signals}
        # Most real-time signals have no name.
        return f"it was ended by signal {-status}{names.get(-status, '')}"
    return f"it exited with status {status}"


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by a signal or a debugger, as far as the system tells."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # it is gone, or this is not Linux
        return False
    return status.rpartition(")")[2].split()[0] in ("T", "t")


# ---------------------------------------------------------------- in the child


def open_connection(file_descriptor: int) -> socket.socket:
    """The connection that the parent process has handed over. From now on this process ends with
    its parent, and leaves signals that go to all processes at once to it."""
    os.set_inheritable(file_descriptor, False)
    if sys.platform == "linux":
        # Have the kernel end this process when the thread that started it ends.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # A Ctrl-C in the terminal, its end, or a service manager's SIGTERM: the parent decides what
    # becomes of the requests.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return socket.socket(fileno=file_descriptor)


def forward_logs(level: int, send: Callable[[logging.LogRecord, str], None]) -> None:
    """Hand octavo's log records, with their text, to the parent process, which owns the log."""
    logger = logging.getLogger("octavo")
    logger.setLevel(level)
    logger.handlers = [_Forwarding(send)]
    logger.propagate = False


class _WithoutValues(logging.Formatter):
    """Writes an error as the server's log does: without a message that may quote a request."""

    def formatException(self, ei: Any) -> str:
        """See logging.Formatter.formatException."""
        _, error, _ = ei
        return "" if error is None else f"{without_values(error)}\n{lines_of_code(error)}".rstrip()


class _Forwarding(logging.Handler):
    def __init__(self, send: Callable[[logging.LogRecord, str], None]) -> None:
        super().__init__()
        self._send = send
        self.setFormatter(_WithoutValues())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._send(record, self.format(record))
        except OSError:
            self.handleError(record)  # the other side is gone, and the process about to end
