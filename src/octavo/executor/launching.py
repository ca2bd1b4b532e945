"""How the processes of a group of ranks come to be, and how one is connected to them. No torch.

A `Launcher` is all that differs between ranks of this machine and ranks of other ones.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple, Protocol

from octavo.channel import Channel
from octavo.child_process import ChildProcess, describe_exit, is_stopped, room_for, start_child
from octavo.config import EngineConfig
from octavo.errors import OutOfMemory
from octavo.executor.messages import Start
from octavo.host_memory import host_memory
from octavo.memory_budget import format_bytes
from octavo.models.config import ModelConfig
from octavo.parallel import Shard

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-m", "octavo.executor.rank")
RANK_BYTES = 256 << 20  # of a process that has loaded torch, and no model yet
EXIT_SECONDS = 5.0  # for a process that was killed, or whose socket has closed


class Ending(NamedTuple):
    """How a rank's process has ended."""

    text: str
    is_cause: bool
    """It was ended by something else than its own errors, which another rank's end may cause."""
    was_killed: bool
    """It was ended by SIGKILL from outside, or together with its host."""

    @classmethod
    def of(cls, status: int) -> Ending:
        """That of a process with this exit status; see ChildProcess."""
        return cls(describe_exit(status), status < 0, -status == signal.SIGKILL)


class RankProcess(ABC):
    """One rank's process, and the channel to it."""

    def __init__(self, start: Start, connection: socket.socket) -> None:
        """start: the first message that it is to be sent."""
        self.start = start
        self.rank = start.shard.rank
        self.channel = Channel(connection, start.config.rank_timeout)
        self.ended: Future[Ending] = Future()

    @abstractmethod
    def __str__(self) -> str:
        """Names it in errors."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once, whatever it does."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger, as far as can be told."""


class Launcher(Protocol):
    """Starts the ranks of one group, and owns their processes."""

    cause_seconds: float
    """How long to look for a rank that has died after an error of another one."""

    def launch(
        self, config: EngineConfig, model_config: ModelConfig, log_level: int
    ) -> Sequence[RankProcess]:
        """Start `config.tensor_parallel_size` processes.

        Args:
            config, model_config: of the whole engine; each process gets its own in `start`.
            log_level: as in Start.

        Raises:
            ConfigError, ModelError, OutOfMemory, EngineFailed: what it takes is not there. `close`
                must be called all the same.
        """
        ...

    def close(self) -> None:
        """End all processes; returns when they have ended. A second call does nothing."""
        ...


class LocalRank(RankProcess):
    """A process of this machine, behind a socket pair."""

    def __init__(self, start: Start, child: ChildProcess, connection: socket.socket) -> None:
        super().__init__(start, connection)
        self._child = child
        child.exit_status.add_done_callback(
            lambda status: self.ended.set_result(Ending.of(status.result()))
        )

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid})"

    @property
    def pid(self) -> int:
        return self._child.pid

    def kill(self) -> None:
        """See RankProcess.kill."""
        self._child.kill()

    def is_stopped(self) -> bool:
        """See RankProcess.is_stopped."""
        return is_stopped(self.pid)


class LocalLauncher:
    """Ranks of this machine, which meet in a file without a name: nothing is left of it, however
    this process ends."""

    cause_seconds = 0.5

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        """command: the ranks' program; see ChildProcess."""
        self._command = command
        self._processes: list[LocalRank] = []

    def launch(
        self, config: EngineConfig, model_config: ModelConfig, log_level: int
    ) -> Sequence[LocalRank]:
        """See Launcher.launch."""
        size = config.tensor_parallel_size
        if size * RANK_BYTES > (free := host_memory()):
            raise OutOfMemory(
                f"tensor_parallel_size: {size} processes take about {format_bytes(RANK_BYTES)} "
                f"each, and {format_bytes(free)} are free"
            )
        with room_for("the file in which ranks meet"):
            meeting = os.memfd_create("octavo-ranks")
        with open(meeting, "wb"):  # each rank has it, too
            for rank in range(size):
                shard, address = Shard(rank, size), f"file:///proc/self/fd/{meeting}"
                start = Start(config, model_config, shard, shard, address, log_level)
                child, connection = start_child(self._command, f"rank {rank}", inherited=[meeting])
                self._processes.append(LocalRank(start, child, connection))
        return self._processes

    def close(self) -> None:
        """See Launcher.close."""
        end_all(self._processes)


def end_all(processes: Sequence[RankProcess]) -> None:
    """Kill all processes, and wait for their ends."""
    for process in processes:
        process.kill()
        process.channel.close()
    _, alive = wait([process.ended for process in processes], EXIT_SECONDS)
    if alive:
        logger.error("%d ranks were killed and have not ended", len(alive))
