"""Ranks on the nodes of a Ray cluster: placed and watched by Ray, spoken to without it. No torch.

Ray chooses the nodes (a placement group), starts an actor for each rank there (`RankHome`), and
tells when an actor or its node is gone. Plans and results travel over a TCP connection to each rank
(rank_sockets.py), tensors between the ranks by torch.distributed.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ConfigError, EngineFailed, ModelError, OctavoError
from octavo.executor.launching import Ending, RankProcess, end_all
from octavo.executor.messages import Start
from octavo.executor.rank_sockets import JOIN_SECONDS, RankListener
from octavo.executor.ray_cluster import (
    RayNode,
    alive_nodes,
    check_kinds,
    check_room,
    connect,
    describe,
    disconnect,
    local_address,
    one_line,
)
from octavo.executor.ray_home import HomeFacts, RankHome
from octavo.executor.sharded import ShardedExecutor
from octavo.model_files import open_files
from octavo.models.config import ModelConfig
from octavo.parallel import Shard

logger = logging.getLogger(__name__)

PLACE_SECONDS = 60.0  # until devices that others use must be free; Ray takes some to miss a node
POLL_SECONDS = 1.0  # between looks at the nodes while something is waited for
STOPPED_SECONDS = 2.0  # to ask whether a rank was stopped


def make_executor(config: EngineConfig, model_config: ModelConfig) -> ShardedExecutor:
    """See ShardedExecutor; its ranks are on the nodes of the cluster `config.ray_address`."""
    return ShardedExecutor(config, model_config, RayLauncher())


class RayRank(RankProcess):
    """A process on a node, behind a TCP connection; its actor says how it ends."""

    def __init__(self, start: Start, connection: socket.socket, home: Home, pid: int) -> None:
        super().__init__(start, connection)
        self._connection, self._home, self.pid = connection, home, pid
        home.call("wait").future().add_done_callback(self._take_end)

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.pid} on {self._home.node})"

    def kill(self) -> None:
        """See RankProcess.kill: the process ends with its actor."""
        import ray

        if ray.is_initialized():
            ray.kill(self._home.actor)
        elif not self.ended.done():  # Ray ends actors with the connection of who made them
            self.ended.set_result(Ending("the connection to Ray was closed", True, False))

    def is_stopped(self) -> bool:
        """See RankProcess.is_stopped."""
        import ray

        try:
            return bool(ray.get(self._home.call("is_stopped"), timeout=STOPPED_SECONDS))
        except ray.exceptions.RayError:
            return False

    def _take_end(self, status: Future[int]) -> None:
        error = status.exception()
        if error is None:
            self.ended.set_result(Ending.of(status.result()))
            return
        text = f"its node, or Ray's process there, was lost ({one_line(error)})"
        self.ended.set_result(Ending(text, True, True))
        with contextlib.suppress(OSError):  # it is closed already
            # A host that is gone closes nothing: callers wait for the rank and must learn it..
            self._connection.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Home:
    """Where a rank's process will live."""

    node: RayNode
    actor: Any  # of RankHome

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor: an ObjectRef of what it returns."""
        return getattr(self.actor, method).remote(*arguments)

    def get(self, reference: Any) -> Any:
        """What a call has returned. Raises EngineFailed if it has failed, or the node was lost."""
        import ray

        while not ray.wait([reference], timeout=POLL_SECONDS)[0]:
            if all(node.node_id != self.node.node_id for node in alive_nodes()):
                # Ray would look for another place, as long as it takes.
                raise EngineFailed(f"{self.node} was lost")
        try:
            return ray.get(reference)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            reason = cause if isinstance(cause, OctavoError) else one_line(error)
            raise EngineFailed(f"{self.node}: {reason}") from error


class RayLauncher:
    """See Launcher. A rank that dies with its node may be missed for some seconds."""

    cause_seconds = 5.0

    def __init__(self) -> None:
        self._is_connected = False
        self._group: Any = None  # a PlacementGroup
        self._processes: list[RayRank] = []

    def launch(
        self, config: EngineConfig, model_config: ModelConfig, log_level: int
    ) -> Sequence[RayRank]:
        """See Launcher.launch.

        Raises:
            ConfigError: Ray is not installed, there is no cluster, or it has too few devices or
                different ones. ModelError: a node does not have the engine's model.
        """
        connect(config.ray_address)
        self._is_connected = True
        config = config_for(config, alive_nodes())
        homes = self._open_homes(config)
        facts = gather_facts(config, model_config, homes)
        starts = make_starts(config, model_config, homes, facts, log_level)
        with contextlib.closing(RankListener(local_address(), len(homes))) as listener:
            pids = start_ranks(listener, homes, starts, facts)
            for start, home, pid in zip(starts, homes, pids, strict=True):
                connection = listener.ranks.pop(start.shard.rank)
                self._processes.append(RayRank(start, connection, home, pid))
        return self._processes

    def close(self) -> None:
        """See Launcher.close."""
        if not self._is_connected:
            return
        import ray

        end_all(self._processes)
        if self._group is not None and ray.is_initialized():
            ray.util.remove_placement_group(self._group)  # and what else lives there
        self._is_connected = False
        disconnect()

    def _open_homes(self, config: EngineConfig) -> list[Home]:
        """An actor for each rank, those of one node after each other."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle, size = bundle_of(config), config.tensor_parallel_size
        check_room(bundle, size, alive_nodes())
        self._group = ray.util.placement_group([bundle] * size, strategy="PACK")
        deadline = time.monotonic() + PLACE_SECONDS
        while not self._group.wait(POLL_SECONDS):
            check_room(bundle, size, alive_nodes())  # one may have been lost
            if time.monotonic() > deadline:
                raise EngineFailed(
                    f"the Ray cluster had no room for {size} ranks ({describe(bundle)} each) "
                    f"within {PLACE_SECONDS:g} s: others use it, or a node has been lost"
                )
        placed = ray.util.placement_group_table(self._group)["bundles_to_node_id"]
        nodes = {node.node_id: node for node in alive_nodes()}
        homes = []
        for index, node_id in sorted(placed.items(), key=lambda item: (item[1], item[0])):
            if node_id not in nodes:
                raise EngineFailed(f"a node of the Ray cluster was lost ({node_id[:8]})")
            options = ray.remote(RankHome).options(
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, index),
                max_restarts=0,
                max_concurrency=4,  # one call waits for the rank's end, others come meanwhile
            )
            homes.append(Home(nodes[node_id], options.remote()))
        return homes


# ---------------------------------------------------------------- what each rank gets


def config_for(config: EngineConfig, nodes: Sequence[RayNode]) -> EngineConfig:
    """The options with the device that all ranks have.

    Raises:
        ConfigError: no node has a GPU, which was asked for.
    """
    has_gpus = any(node.resources.get("GPU", 0) >= 1 for node in nodes)
    if config.device == "cuda" and not has_gpus:
        raise ConfigError("device", "'cuda' was asked for, but no node of the cluster has a GPU")
    wants_cpu = config.device == "cpu" or config.attention_backend in ("cpu", "reference")
    return replace(config, device="cuda" if has_gpus and not wants_cpu else "cpu")


def bundle_of(config: EngineConfig) -> dict[str, float]:
    """What each rank reserves of its node: a GPU, or CPUs."""
    return {"GPU": 1} if config.device == "cuda" else {"CPU": config.num_threads or 1}


def gather_facts(
    config: EngineConfig, model_config: ModelConfig, homes: Sequence[Home]
) -> list[HomeFacts]:
    """How things are on each rank's node, where the same must be installed as here.

    Raises:
        ConfigError: another version of octavo is installed on a node, or its GPU is of another kind
            than the others'. ModelError: a node has not the same model. EngineFailed: a node was
            lost.
    """
    if config.device == "cuda":
        check_kinds([home.node for home in homes])
    weights = config.load_format != "dummy"
    path = Path(config.model).expanduser()
    is_named = config.model == "demo" or not path.exists()
    asked = config.model if is_named else str(path.absolute())
    calls = [home.call("facts", asked, weights) for home in homes]
    own = open_files(model_config.path).describe(weights)
    gathered = []
    for home, call in zip(homes, calls, strict=True):
        facts = home.get(call)
        if isinstance(facts, ModelError):
            raise ModelError(f"{home.node}: {facts}")
        check_facts(facts, str(home.node), own)
        gathered.append(facts)
    return gathered


def check_facts(facts: HomeFacts, where: str, files: Mapping[str, str]) -> None:
    """Check that a node has this version of octavo, and a model that is described so.

    Raises:
        ConfigError, ModelError: it has not; names the node as `where`.
    """
    if facts.version != (own := version("octavo")):
        raise ConfigError("executor", f"{where} has octavo {facts.version}, and this host {own}")
    for name in sorted({*files, *facts.files}):
        there, here = facts.files.get(name, "missing"), files.get(name, "missing")
        if there != here:
            raise ModelError(
                f"{where} has another model than this host: {facts.path / name} is {there} "
                f"there, and {here} here"
            )


def make_starts(
    config: EngineConfig,
    model_config: ModelConfig,
    homes: Sequence[Home],
    facts: Sequence[HomeFacts],
    log_level: int,
) -> list[Start]:
    """Each rank's first message. Ranks are numbered in the order of their homes."""
    size = len(homes)
    nodes = [home.node.node_id for home in homes]
    host = homes[0].node.address
    address = f"tcp://{f'[{host}]' if ':' in host else host}:{facts[0].port}"
    starts = []
    for rank, node_id in enumerate(nodes):
        neighbours = Shard(nodes[:rank].count(node_id), nodes.count(node_id))
        own = config
        if config.device == "cpu":  # ranks on a CPU divide these
            own = replace(config, num_threads=(config.num_threads or 1) * neighbours.size)
        model = replace(model_config, path=facts[rank].path)
        starts.append(Start(own, model, Shard(rank, size), neighbours, address, log_level))
    return starts


def start_ranks(
    listener: RankListener,
    homes: Sequence[Home],
    starts: Sequence[Start],
    facts: Sequence[HomeFacts],
) -> list[int]:
    """Have the ranks' processes started and connected. Returns their process ids.

    Raises:
        EngineFailed: one of them was not started, or has not reached this process.
    """
    import ray

    calls = []
    for start, home in zip(starts, homes, strict=True):
        environment = gpus_of(home.node, homes, facts)
        arguments = (start.shard.rank, listener.address, listener.secret, environment)
        calls.append(home.call("start", *arguments))
    homes_of = dict(zip(calls, homes, strict=True))
    deadline = time.monotonic() + 2 * JOIN_SECONDS
    while not listener.accept(0.2):
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in done:
            homes_of[call].get(call)  # raises what went wrong
        if time.monotonic() > deadline:
            missing = [str(rank) for rank in range(len(homes)) if rank not in listener.ranks]
            raise EngineFailed(
                f"ranks that have not reached the engine's process: {', '.join(missing)}"
            )
    return [home.get(call) for call, home in homes_of.items()]


def gpus_of(node: RayNode, homes: Sequence[Home], facts: Sequence[HomeFacts]) -> dict[str, str]:
    """The variables of a rank's process. All ranks of a node see the GPUs of all of them, as ranks
    of one host do elsewhere, too: symmetric memory wants different device numbers."""
    pairs = zip(homes, facts, strict=True)
    gpus = [gpu for home, each in pairs if home.node == node for gpu in each.gpus]
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
