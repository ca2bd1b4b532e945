"""What each replica gets of the machine, and too many of them."""

from __future__ import annotations

import pytest

from octavo.config import make_config
from octavo.errors import ConfigError
from octavo.server.engine_process.placement import Replication, place_replicas


@pytest.mark.parametrize("number", [0, -1, 257])
def test_the_number_of_replicas(number: int) -> None:
    with pytest.raises(ConfigError, match=f"replicas: {number} is not between 1 and 256"):
        Replication(number)


def test_gpus_are_dealt_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,GPU-ab12,7,1")
    config = make_config("demo", tensor_parallel_size=2)
    places = place_replicas(config, 2)
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in places] == ["4,5", "GPU-ab12,7"]
    assert {own.num_threads for own, _ in places} == {None}
    with pytest.raises(ConfigError, match=r"3 replicas of 2 GPUs each need 6 GPUs.* may use 5"):
        place_replicas(config, 3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=r"2 replicas need 2 GPUs.* may use 0"):
        place_replicas(make_config("demo", device="cuda"), 2)


def test_cpu_replicas_divide_threads_and_memory() -> None:
    config = make_config("demo", device="cpu", num_threads=7)
    places = place_replicas(config, 3)
    assert [(own.num_threads, own.host_share, env) for own, env in places] == [(2, 3, {})] * 3
    assert place_replicas(config, 1) == [(config, {})], "one alone gets all there is"
    many = place_replicas(make_config("demo", device="cpu"), 64)
    assert {own.num_threads for own, _ in many} == {1}
