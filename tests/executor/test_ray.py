"""Ranks on two nodes of a Ray cluster: the tokens of one process, and how their ends are seen."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import model_zoo
from executor.ray_nodes import add_node, ranks_here, ray, ray_cluster
from executor.test_sharded import GREEDY, OPTIONS, say
from octavo import LLM
from octavo.errors import ConfigError, EngineFailed, ModelError, ProcessKilled
from processes import assert_gone, parent_of

# Ray leaves sockets and processes of its own to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster(1, 1) as running:
        yield running


def options_for(cluster: Any, **options: Any) -> dict[str, Any]:
    shared = {"executor": "ray", "ray_address": cluster.address, "tensor_parallel_size": 2}
    return {"num_threads": 1, **shared, **options}


def make(cluster: Any, **options: Any) -> LLM:
    model = options.pop("model", model_zoo.model_directory("llama3"))
    return LLM(model, **OPTIONS, **options_for(cluster, **options))


@pytest.mark.slow
def test_the_same_tokens_from_ranks_on_two_nodes(cluster: Any) -> None:
    """Greedy, several samples, beams, preemption; and the process keeps its signal handler."""
    options = {"num_blocks": 60, "preemption_mode": "swap", "num_threads": 1}
    model = model_zoo.model_directory("llama3")
    expected, preemptions, _ = say(model, **options)
    assert sum(preemptions.values()) > 0
    handler = signal.getsignal(signal.SIGTERM)
    shared = say(model, **options_for(cluster, **options))
    assert shared[0] == expected
    assert shared[1].keys() == preemptions.keys()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not ray.is_initialized()
    assert not ranks_here()


def check_a_breakdown(llm: LLM, who: str, number: int, kind: type[Exception], text: str) -> None:
    assert llm.engine.executor.capacity.num_ranks == 2
    ranks = llm.engine.executor._ranks._ranks
    assert len({str(each).split("(")[-1] for each in ranks}) == 2  # on two nodes
    deltas = llm.stream([3, 4, 5], replace(GREEDY, max_tokens=400))
    next(deltas)
    os.kill(ranks[1].pid if who == "rank" else parent_of(ranks[1].pid), number)
    with pytest.raises(kind, match=text):
        list(deltas)
    assert_gone(ranks_here())


@pytest.mark.parametrize(
    ("who", "number", "kind", "text"),
    [
        ("home", signal.SIGKILL, ProcessKilled, r"on node .*: its node, or Ray's process there,"),
        pytest.param(  # that ranks without Ray are waited for so long is seen in test_sharded.py
            *("rank", signal.SIGSTOP, EngineFailed),
            r"rank_timeout \(4 s\): rank \d .* was stopped",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rank_that_breaks_down_ends_the_engine(
    cluster: Any, who: str, number: int, kind: type[Exception], text: str
) -> None:
    with make(cluster, rank_timeout=4.0) as llm:
        check_a_breakdown(llm, who, number, kind, text)


@pytest.mark.slow  # test_a_rank_that_breaks_down_ends_the_engine has a death on another node
def test_ranks_end_with_an_engine_that_is_killed(cluster: Any) -> None:
    """Though one of them does not run; and their places are free again, for an engine that ends
    when one of its ranks is killed."""
    program = f"""
from octavo import LLM
llm = LLM({str(model_zoo.model_directory("llama3"))!r}, **{OPTIONS!r}, **{options_for(cluster)!r})
print(*(rank.pid for rank in llm.engine.executor._ranks._ranks), flush=True)
input()
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = {int(pid) for pid in parent.stdout.readline().split()}
        assert len(pids) == 2
        assert pids <= ranks_here()
        os.kill(min(pids), signal.SIGSTOP)
        parent.kill()
    assert_gone(pids)
    with make(cluster, rank_timeout=4.0) as llm:
        llm.generate([[3, 4, 5]], replace(GREEDY, max_tokens=3), use_tqdm=False)
        text = r"on node .*: it was ended by signal 9 \(SIGKILL\)"
        check_a_breakdown(llm, "rank", signal.SIGKILL, ProcessKilled, text)


@pytest.mark.slow  # each attempt connects to the cluster; test_ray_options.py has the rules
def test_what_a_cluster_refuses(cluster: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"4 ranks need 1 CPU each, .* \(3\) have room for 2"):
        make(cluster, tensor_parallel_size=4)
    with pytest.raises(ConfigError, match=r"heads .* cannot be divided evenly among 3 ranks"):
        make(cluster, tensor_parallel_size=3)
    model_zoo.write_model("llama3", tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated"):
        make(cluster, model=tmp_path)
    assert_gone(ranks_here())
    assert not ray.is_initialized()


@pytest.mark.slow
def test_one_rank_and_a_connection_of_the_program_s_own(cluster: Any) -> None:
    """Two engines share it, and leave it open."""
    ray.init(cluster.address, log_to_driver=False)
    try:
        options = {"tensor_parallel_size": 1, "ray_address": None}
        with make(cluster, **options) as first, make(cluster, **options) as second:
            short = replace(GREEDY, max_tokens=5)
            said = [llm.generate([[3, 4]], short, use_tqdm=False) for llm in (first, second)]
            assert said[0][0].outputs[0].token_ids == said[1][0].outputs[0].token_ids
            first.close()
            second.generate([[3, 4]], short, use_tqdm=False)
            with socket.create_server(("127.0.0.1", 0)) as server:
                other = f"127.0.0.1:{server.getsockname()[1]}"
                with pytest.raises(ConfigError, match=r"ray_address: .* is another cluster than"):
                    make(cluster, ray_address=other)
            port = cluster.address.rpartition(":")[2]
            make(cluster, ray_address=f"localhost:{port}", tensor_parallel_size=1).close()
        assert ray.is_initialized()
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_node_that_is_lost(cluster: Any) -> None:
    """The engine says so; the next one is placed on the nodes that are left."""
    lost = add_node(cluster, 2)
    with make(cluster) as llm:
        # Ray packs: both ranks are on the node that has room for both.
        ranks = llm.engine.executor._ranks._ranks
        assert len({str(each).split("(")[-1] for each in ranks}) == 1
        deltas = llm.stream([3, 4, 5], replace(GREEDY, max_tokens=400))
        next(deltas)
        cluster.remove_node(lost, allow_graceful=False)
        with pytest.raises(EngineFailed, match=r"rank . .process .* on node"):
            list(deltas)
    with make(cluster) as llm:
        llm.generate([[3, 4, 5]], replace(GREEDY, max_tokens=3), use_tqdm=False)
