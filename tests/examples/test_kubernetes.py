"""The manifest is valid for Kubernetes, and means what the server does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from octavo.cli.serve import serve
from octavo.server.http.gate import OPEN_PATHS

MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "kubernetes.yaml"
VERSIONS = ("1.30", "1.34")  # preStop with sleep is enabled from 1.30 on


def documents() -> dict[str, Any]:
    """By their kinds."""
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def pod() -> dict[str, Any]:
    found: dict[str, Any] = documents()["Deployment"]["spec"]["template"]["spec"]
    return found


def options() -> dict[str, Any]:
    """What the command line of the container says, as `octavo serve` reads it."""
    command, *arguments = pod()["containers"][0]["args"]
    assert command == "serve"
    return serve.make_context("serve", arguments).params


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schema(version: str) -> None:
    assert set(documents()) == {"Deployment", "Service", "PodDisruptionBudget"}
    for document in documents().values():
        kubernetes_validate.validate(document, version, strict=True)


def test_the_validator_finds_mistakes() -> None:
    deployment = documents()["Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(deployment, VERSIONS[0], strict=True)


def test_selectors_and_ports() -> None:
    found = documents()
    labels = found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert found["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert found["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert found["Service"]["spec"]["selector"] == labels
    [port] = pod()["containers"][0]["ports"]
    assert found["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    assert port["containerPort"] == options()["listening"]["port"]
    annotations = found["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    volumes = {volume["name"] for volume in pod()["volumes"]}
    assert {mount["name"] for mount in pod()["containers"][0]["volumeMounts"]} == volumes


def test_octavo_is_not_process_1() -> None:
    """Orphans of an engine process that was killed would stay there as zombies."""
    assert pod()["shareProcessNamespace"] is True


def test_probes_need_no_key() -> None:
    [container] = pod()["containers"]
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[name]["httpGet"]["path"] in OPEN_PATHS
        assert container[name]["httpGet"]["port"] == container["ports"][0]["name"]
    assert container["livenessProbe"]["httpGet"]["path"] == "/version", "not the engine's health"


def test_replicas_have_gpus_and_time_to_drain() -> None:
    [container] = pod()["containers"]
    given = options()
    size = given["engine"].get("tensor_parallel_size", 1)
    num_gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert given["replication"]["replicas"] * size == num_gpus
    waits = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    seconds = waits + given["listening"]["drain_seconds"]
    assert pod()["terminationGracePeriodSeconds"] > seconds
