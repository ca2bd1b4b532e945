"""A cluster of Ray's: this process's connection to it, and its nodes. No torch."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from ipaddress import ip_address
from typing import Any

from octavo.errors import ConfigError, shown
from octavo.parallel import OPTION

CONNECT_SECONDS = 5.0  # until a cluster's address counts as one that does not answer
# How often Ray tries to reach a cluster, 40 seconds each time, as it reads it when it is imported.
ATTEMPTS = "RAY_NUM_REDIS_GET_RETRIES"
MAX_TEXT = 300  # characters of Ray's errors that are shown
ACCELERATOR = "ray.io/accelerator-type"  # a node's label

_lock = threading.Lock()
_num_users = 0  # of this process's connection to Ray
_is_ours = False  # whether the connection was made here


def connect(address: str | None) -> None:
    """Connect this process to a cluster, unless it is; to be undone by `disconnect`.

    Args:
        address: see EngineConfig.ray_address.

    Raises:
        ConfigError: Ray is not installed, or there is no such cluster.
    """
    global _num_users, _is_ours
    if find_spec("ray") is None:
        raise ConfigError("executor", "ray needs the package: pip install 'octavo[ray]'")
    with _lock:
        ray = _import_ray()
        if not ray.is_initialized():
            _join_cluster(ray, find_cluster(address))
            _is_ours = True
        elif address is not None:
            current = ray.get_runtime_context().gcs_address
            if not is_at(find_cluster(address), current):
                raise ConfigError(
                    "ray_address",
                    f"{shown(address)} is another cluster than {current}, to which this program is "
                    "connected",
                )
        _num_users += 1


def disconnect() -> None:
    """The counterpart of `connect`: the last one closes a connection that was made there."""
    global _num_users, _is_ours
    import ray

    with _lock:
        _num_users -= 1
        if _num_users == 0 and _is_ours:
            _is_ours = False
            ray.shutdown()


def _import_ray() -> Any:
    is_own = ATTEMPTS not in os.environ
    if is_own:
        os.environ[ATTEMPTS] = "1"
    try:
        import ray
    finally:
        if is_own:
            del os.environ[ATTEMPTS]
    return ray


def _join_cluster(ray: Any, address: str) -> None:
    # Ray's handler would end the process, and it is not for Ray to say what becomes of a signal.
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:
        reason = f"{shown(address)}: {one_line(error)}"
        if address == "auto" and isinstance(error, ConnectionError):
            reason = "this host is no node of a running Ray cluster; ray start --head starts one"
        raise ConfigError("ray_address", reason) from error
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def find_cluster(given: str | None) -> str:
    """The address of a cluster to connect to, or "auto".

    Args:
        given: see EngineConfig.ray_address.

    Raises:
        ConfigError: it is no address, or nothing listens there (Ray is slow to find that).
    """
    address = given or os.environ.get("RAY_ADDRESS") or "auto"
    if address == "auto":
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or "/" in host or int(port) > 65535:
        raise ConfigError(
            "ray_address",
            f"{shown(address)} is not of the form HOST:PORT (a Ray client's ray:// is not served; "
            "this host must be a node of the cluster)",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            "ray_address", f"no Ray cluster answers at {shown(address)} ({error})"
        ) from error
    return address


def is_at(address: str, current: str) -> bool:
    """Whether a cluster's address, as a user gave it, is the one that Ray has found."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return True
    ip = socket.getaddrinfo(host.strip("[]"), None)[0][4][0]
    known, _, known_port = current.rpartition(":")
    is_here = ip_address(ip).is_loopback and known == local_address()
    return port == known_port and (is_here or ip == known.strip("[]"))


def local_address() -> str:
    """The address of this host by which the other nodes reach it."""
    import ray

    find: Any = ray.util.get_node_ip_address  # it has no types
    return str(find())


# ---------------------------------------------------------------- the nodes


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the cluster."""

    node_id: str
    address: str
    resources: Mapping[str, float]  # all of them, free or not
    accelerator: str | None  # what kind of GPU it has, if Ray knows

    def __str__(self) -> str:
        return f"node {self.address} ({self.node_id[:8]})"


def alive_nodes() -> list[RayNode]:
    """The nodes that the cluster has, as far as Ray knows."""
    import ray

    find: Any = ray.nodes  # it has no types
    return [
        RayNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Resources"],
            node.get("Labels", {}).get(ACCELERATOR),
        )
        for node in find()
        if node["Alive"]
    ]


def describe(bundle: Mapping[str, float]) -> str:
    """A bundle in words: "1 GPU"."""
    return ", ".join(f"{count:g} {kind}{'s' * (count > 1)}" for kind, count in bundle.items())


def check_room(bundle: Mapping[str, float], size: int, nodes: Sequence[RayNode]) -> None:
    """Check that the nodes could hold `size` ranks, if nothing else used them.

    Raises:
        ConfigError: they have too little.
    """
    room = sum(
        min(int(node.resources.get(kind, 0) // count) for kind, count in bundle.items())
        for node in nodes
    )
    if room < size:
        raise ConfigError(
            OPTION,
            f"{size} ranks need {describe(bundle)} each, and the nodes of the Ray cluster "
            f"({len(nodes)}) have room for {room}",
        )


def check_kinds(nodes: Sequence[RayNode]) -> None:
    """Check that a model's ranks are on equal GPUs.

    Raises:
        ConfigError: they are of different kinds.
    """
    kinds = {node.accelerator: node for node in nodes}
    if len(kinds) > 1:
        found = ", ".join(f"{kind or 'unknown'} on {node}" for kind, node in kinds.items())
        raise ConfigError(
            OPTION,
            f"the ranks' GPUs are of different kinds ({found}), and all would wait for the slowest",
        )


def one_line(error: BaseException) -> str:
    """What an error of Ray says, in one line."""
    text = " ".join(str(error).split())
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
