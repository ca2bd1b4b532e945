"""What runs on the nodes of a Ray cluster: an actor in which one rank's process lives. No torch."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

from octavo.child_process import ChildProcess, is_stopped
from octavo.errors import ModelError
from octavo.executor.rank_sockets import join
from octavo.model_files import open_files
from octavo.models.hub import resolve_model

COMMAND = (sys.executable, "-m", "octavo.executor.rank")
# Which network gloo takes. By itself it takes the one that the host's own name stands for, which is
# the loopback on many systems.
INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # linux/sockios.h


class HomeFacts(NamedTuple):
    """What an engine has to know of a rank's node before it starts the rank."""

    version: str  # of octavo
    gpus: tuple[str, ...]  # the rank's, as CUDA_VISIBLE_DEVICES names them
    port: int  # that is free at the moment
    path: Path  # of the model
    files: dict[str, str]  # see ModelFiles.describe


class RankHome:
    """An actor of Ray. The rank's process ends with it, however it ends.

    The process is a child of the actor, not the actor itself: Ray's threads and signal handlers
    stay out of the rank, whose exit status can be told as that of a local one.
    """

    def facts(self, model: str, weights: bool) -> HomeFacts | ModelError:
        """How things are here.

        Args:
            model: see resolve_model.
            weights: whether its weights are needed.
        """
        import ray

        try:
            path = resolve_model(model, weights)
            files = open_files(path).describe(weights)
        except ModelError as error:
            return error
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        with socket.create_server(("", 0)) as server:
            port = server.getsockname()[1]
        return HomeFacts(version("octavo"), tuple(gpus), port, path, files)

    def start(
        self, rank: int, address: tuple[str, int], secret: bytes, environment: Mapping[str, str]
    ) -> int:
        """Start the rank's process, and connect it to the engine's.

        Args:
            rank: its number.
            address, secret: see rank_sockets.join.
            environment: variables of the process, beside those of the actor.

        Returns:
            Its process id.

        Raises:
            EngineFailed: the engine's process is not reached. NoRoom: see ChildProcess.
        """
        connection = join(address, secret, rank)
        variables = dict(environment)
        name = interface_of(connection.getsockname()[0])
        if name is not None and INTERFACE not in os.environ:
            variables[INTERFACE] = name
        self._child = ChildProcess(COMMAND, f"rank {rank}", connection, variables)
        return self._child.pid

    def wait(self) -> int:
        """Return the process's exit status when it has ended."""
        return self._child.exit_status.result()

    def is_stopped(self) -> bool:
        """See RankProcess.is_stopped."""
        return is_stopped(self._child.pid)


def interface_of(address: str) -> str | None:
    """The name of the network interface that has this IPv4 address, as far as the system tells."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request)
            except OSError:  # it has none
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
