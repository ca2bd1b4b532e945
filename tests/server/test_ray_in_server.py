"""`octavo serve --executor ray --replicas 2`: a node is killed under streams."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from executor.ray_nodes import add_node, ranks_here, ray_cluster
from processes import assert_gone, parent_of
from server.live_server import LiveServer, live_server
from server.test_replicas_live import NUM_STREAMS, num_running, texts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
OPTIONS = ("--executor", "ray", "--replicas", "2", "--tensor-parallel-size", "2")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, each with room for one replica of two ranks."""
    with ray_cluster(2, 2) as running:
        yield running


@pytest.fixture(scope="module")
def server(cluster: Any) -> Iterator[LiveServer]:
    with live_server(*OPTIONS, "--dtype", "float32", "--ray-address", cluster.address) as running:
        yield running


def wait_for_ranks(count: int, seconds: float = 180) -> set[int]:
    deadline = time.monotonic() + seconds
    while len(found := ranks_here()) != count:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def test_no_stream_is_lost_or_altered_when_a_node_is_killed(
    cluster: Any, server: LiveServer
) -> None:
    """The replica that was there is replaced on a node that joins; then the other node goes."""
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        expected = [*pool.map(lambda number: texts(server, number), range(NUM_STREAMS))]
        for round_number in range(2):
            before = wait_for_ranks(4)
            lost = cluster.octavo_nodes.pop(0)
            cluster.octavo_nodes.append(add_node(cluster, 2))
            streams = [pool.submit(texts, server, number) for number in range(NUM_STREAMS)]
            while num_running(server) < NUM_STREAMS / 2:
                time.sleep(0.01)
            cluster.remove_node(lost, allow_graceful=False)
            assert [stream.result() for stream in streams] == expected, round_number
            after = wait_for_ranks(4)
            assert len(before & after) == 2  # those of the other node went on
    pids = ranks_here()
    homes = {parent_of(pid) for pid in pids}
    assert len(homes) == 4
    server.process.kill()
    server.process.wait()
    assert_gone(pids)
