"""A Ray cluster of several nodes on this machine, and the processes of ranks on them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import octavo

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'octavo[ray]'")
STORE_BYTES = 80 << 20  # of each node: nothing is stored there
MARK = ("OCTAVO_TEST_CLUSTER", str(os.getpid()))
SOURCES = Path(octavo.__file__).parents[1]


@contextmanager
def ray_cluster(*cpus: int) -> Iterator[Any]:
    """A cluster whose head, on which engines run, has no CPUs; and nodes with so many each."""
    from ray.cluster_utils import Cluster

    paths = [str(SOURCES), *filter(None, [os.environ.get("PYTHONPATH")])]
    patch = pytest.MonkeyPatch()  # of what the nodes start
    patch.setenv("PYTHONPATH", os.pathsep.join(paths))
    patch.setenv(*MARK)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 0,
            "include_dashboard": False,
            "object_store_memory": STORE_BYTES,
        },
    )
    try:
        cluster.octavo_nodes = [add_node(cluster, count) for count in cpus]
        yield cluster
    finally:
        cluster.shutdown()
        patch.undo()


def add_node(cluster: Any, cpus: int) -> Any:
    return cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)


def ranks_here() -> set[int]:
    """The process ids of all ranks on nodes of this process's clusters."""
    found = set()
    mark = "=".join(MARK)
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                arguments = (folder / "cmdline").read_text().split("\0")
                variables = (folder / "environ").read_text().split("\0")
            except OSError:  # it has ended
                continue
            if "octavo.executor.rank" in arguments and mark in variables:
                found.add(int(folder.name))
    return found
