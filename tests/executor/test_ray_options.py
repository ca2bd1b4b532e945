"""What is checked before ranks are started on a Ray cluster. Needs no cluster, and no Ray."""

from __future__ import annotations

import importlib.util
import logging
import re
import socket
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import model_zoo
from octavo import LLM
from octavo.config import make_config
from octavo.errors import ConfigError, ModelError
from octavo.executor import ray_cluster
from octavo.executor.ray_cluster import RayNode, check_kinds, check_room, find_cluster
from octavo.executor.ray_home import HomeFacts, interface_of
from octavo.executor.ray_launcher import (
    Home,
    bundle_of,
    check_facts,
    config_for,
    gpus_of,
    make_starts,
)
from octavo.model_files import open_files
from octavo.models.registry import read_model_config
from octavo.parallel import Shard
from octavo.server.engine_process.placement import place_replicas

CPUS = RayNode("a" * 56, "10.0.0.1", {"CPU": 8.0}, None)
ONE = RayNode("b" * 56, "10.0.0.2", {"CPU": 8.0, "GPU": 1.0}, "H200")
FOUR = RayNode("c" * 56, "10.0.0.3", {"CPU": 8.0, "GPU": 4.0}, "A100")


def test_ray_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        ray_cluster, "find_spec", lambda name: None if name == "ray" else find(name)
    )
    with pytest.raises(ConfigError, match=r"executor: ray needs .*pip install 'octavo\[ray\]'"):
        LLM(model_zoo.model_directory("llama3"), executor="ray", tensor_parallel_size=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"ray_address": "10.0.0.1:6379"},
            "ray_address: '10.0.0.1:6379' is of use to the",
        ),
        ({"executor": "ray", "ray_address": 5}, "ray_address: 5 is not text"),
        ({"executor": "ray", "ray_address": ""}, "ray_address: is empty"),
    ],
)
def test_options_that_contradict(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_config("demo", **options)


@pytest.mark.parametrize(
    "address", ["local", "ray://10.0.0.1:10001", "10.0.0.1", ":6379", "head:x", "head:99999", "a b"]
)
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"ray_address: .* is not of the form HOST:PORT"):
        find_cluster(address)


def test_an_address_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert find_cluster(f"127.0.0.1:{port}") == f"127.0.0.1:{port}"
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    for given in (None, f"127.0.0.1:{port}"):
        with pytest.raises(ConfigError, match=rf"ray_address: no Ray cluster .*:{port}'.*refused"):
            find_cluster(given)
    with pytest.raises(ConfigError, match="ray_address: no Ray cluster answers at"):
        find_cluster("no-such-host.invalid:6379")


def test_what_a_rank_reserves() -> None:
    config = make_config("demo", executor="ray", tensor_parallel_size=4, num_threads=3)
    assert bundle_of(config_for(config, [CPUS, ONE])) == {"GPU": 1}
    assert bundle_of(config_for(config, [CPUS])) == {"CPU": 3}
    assert bundle_of(config_for(replace(config, device="cpu"), [ONE])) == {"CPU": 3}
    assert bundle_of(config_for(make_config("demo", executor="ray"), [CPUS])) == {"CPU": 1}
    with pytest.raises(ConfigError, match="device: 'cuda' was asked for, but no node"):
        config_for(replace(config, device="cuda"), [CPUS])


def test_clusters_that_are_too_small_or_mixed() -> None:
    check_room({"GPU": 1}, 5, [CPUS, ONE, FOUR])
    with pytest.raises(
        ConfigError,
        match=r"tensor_parallel_size: 6 ranks need 1 GPU each, .* \(3\) have room for 5",
    ):
        check_room({"GPU": 1}, 6, [CPUS, ONE, FOUR])
    with pytest.raises(ConfigError, match=r"5 ranks need 3 CPUs each, .* \(2\) have room for 4"):
        check_room({"CPU": 3}, 5, [CPUS, ONE])
    check_kinds([FOUR, FOUR])
    with pytest.raises(ConfigError, match=r"kinds \(H200 on node 10\.0\.0\.2 .*, A100 on"):
        check_kinds([ONE, FOUR])


def test_ranks_of_a_node_share_its_gpus_and_threads() -> None:
    homes = [Home(node, None) for node in (ONE, FOUR, FOUR)]
    facts = [
        HomeFacts("0", (gpu,), 1234, Path(f"/models/{gpu}"), {}) for gpu in ("0", "3", "GPU-ab")
    ]
    model = read_model_config(model_zoo.model_directory("llama3"))
    config = make_config("demo", executor="ray", tensor_parallel_size=3, num_threads=2)
    starts = make_starts(replace(config, device="cpu"), model, homes, facts, logging.INFO)
    assert [start.shard for start in starts] == [Shard(rank, 3) for rank in range(3)]
    assert [start.neighbours for start in starts] == [Shard(0, 1), Shard(0, 2), Shard(1, 2)]
    assert [start.config.num_threads for start in starts] == [2, 4, 4]
    assert {start.address for start in starts} == {"tcp://10.0.0.2:1234"}
    assert str(starts[2].model_config.path) == "/models/GPU-ab"
    assert gpus_of(ONE, homes, facts) == {"CUDA_VISIBLE_DEVICES": "0"}
    assert gpus_of(FOUR, homes, facts) == {"CUDA_VISIBLE_DEVICES": "3,GPU-ab"}


def test_a_node_with_another_model_or_version(tmp_path: Path) -> None:
    model_zoo.write_model("llama3", tmp_path)
    files = open_files(tmp_path).describe()
    assert set(files) == {"config.json", "model.safetensors"}
    assert set(open_files(tmp_path).describe(weights=False)) == {"config.json"}

    facts = HomeFacts(version("octavo"), (), 1, tmp_path, files)
    check_facts(facts, "node 1", files)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    changed = facts._replace(files=open_files(tmp_path).describe())
    with pytest.raises(ModelError, match=r"node 1 .*safetensors is \d+ bytes there, and \d+"):
        check_facts(changed, "node 1", files)
    weights.unlink()
    missing = facts._replace(files=open_files(tmp_path).describe())
    with pytest.raises(ModelError, match=r"model\.safetensors is missing there"):
        check_facts(missing, "node 1", files)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"config\.json is SHA-256 44136fa355b3678a there"):
        check_facts(facts._replace(files=open_files(tmp_path).describe()), "node 1", files)
    with pytest.raises(ConfigError, match=r"executor: node 1 has octavo 7, and this host"):
        check_facts(facts._replace(version="7"), "node 1", files)


def test_replicas_are_placed_by_ray() -> None:
    config = make_config("demo", executor="ray", tensor_parallel_size=2, num_threads=4)
    places = place_replicas(config, 3)
    assert places == [(replace(config, host_share=3), {})] * 3


def test_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("203.0.113.9") is None
