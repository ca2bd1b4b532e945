"""What each replica gets of the machine: its devices, its threads and its share of the memory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.host_memory import num_cpus
from octavo.server.engine_process.routing import Routing

VISIBLE = "CUDA_VISIBLE_DEVICES"
MAX_REPLICAS = 256


@dataclass(frozen=True, slots=True)
class Replication:
    """How many engines there are behind one address, and which of them gets a request."""

    replicas: int = 1
    """Engine processes behind the address, each with the whole model; with several GPUs, each has
    `tensor_parallel_size` of them."""
    routing: Routing = "prefix"
    """Which replica gets a request: one that has its prefix in the cache and is not much busier
    than the others, the one with the least load, or one after the other."""

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise ConfigError("replicas", f"{self.replicas} is not between 1 and {MAX_REPLICAS}")


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them. Loads no driver."""
    given = os.environ.get(VISIBLE)
    if given is not None:
        return [name.strip() for name in given.split(",") if name.strip() not in ("", "-1")]
    nodes = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia*")]
    return sorted((name for name in nodes if name.isdecimal()), key=int)


def place_replicas(
    config: EngineConfig, num_replicas: int
) -> list[tuple[EngineConfig, Mapping[str, str]]]:
    """The options of each replica's engine, and the variables of its process.

    Replica i gets the GPUs from i times tensor_parallel_size on; on a CPU the replicas divide the
    threads. One replica alone gets all there is. Ranks on a Ray cluster are placed by Ray.

    Raises:
        ConfigError: there are too few GPUs for so many replicas.
    """
    if num_replicas == 1:
        return [(config, {})]
    if config.executor == "ray":  # which places the ranks; those of all replicas may share a host
        return [(replace(config, host_share=num_replicas), {})] * num_replicas
    size = config.tensor_parallel_size
    gpus = visible_gpus() if config.device != "cpu" else []
    if gpus or config.device == "cuda":
        if num_replicas * size > len(gpus):
            needed = f"{num_replicas} replicas" + (f" of {size} GPUs each" if size > 1 else "")
            raise ConfigError(
                "replicas",
                f"{needed} need {num_replicas * size} GPUs, and this process may use {len(gpus)}",
            )
        groups = [gpus[i * size : (i + 1) * size] for i in range(num_replicas)]
        shared = replace(config, host_share=num_replicas)
        return [(shared, {VISIBLE: ",".join(group)}) for group in groups]
    num_threads = max(1, (config.num_threads or num_cpus()) // num_replicas)
    return [(replace(config, num_threads=num_threads, host_share=num_replicas), {})] * num_replicas
