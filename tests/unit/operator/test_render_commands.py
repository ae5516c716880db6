"""What containers run is what the programs understand: rendered command lines, read by the programs' own parsers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero_api.contract import (
    ADMIN_PORT,
    HTTP_PORT,
    INFERENCE_PORT,
    LABEL_NAME,
    LABEL_ROLE,
    METRICS_PORT,
    POD_INSIDE_TLS_DIR,
    POD_ROUTER_KEYS_FILE,
    POD_TLS_DIR,
    RANKS_PORT,
    ROLE_GATEWAY,
    ROUTER_PORT,
)
from hetero_gateway.server.config import GatewayConfig
from hetero_gateway.smg import GatewayPods, RouterConfig
from hetero_worker.pod.config import PodConfig
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import OPTIONS, render_cases

CASES = render_cases()


def main_containers(name: str, kind: str) -> list[dict[str, Any]]:
    """Of the workloads of a kind."""
    case = CASES[name]
    applied = OperatorWorld(dict(case.resource), case.capabilities).plan().apply
    pods = [item["spec"]["template"]["spec"] for item in applied if item["kind"] == kind]
    return [container for pod in pods for container in pod["containers"]]


@pytest.mark.parametrize("name", CASES)
def test_the_gateway_understands_its_command_line(name: str, tmp_path: Path) -> None:
    container = next(item for item in main_containers(name, "Deployment") if item["name"] == "gateway")
    token = tmp_path / "token"
    token.write_text("t" * 32, encoding="utf-8")
    token.chmod(0o600)
    environment = {item["name"]: str(token) for item in container["env"] if item["name"].endswith("_FILE")}
    assert container["command"] == ["python", "-m", "hetero_gateway"]
    config = GatewayConfig.from_command_line(container["args"], environment)
    ports = (config.inference_port, config.admin_port, config.ranks_port, config.metrics_port)
    assert ports == (INFERENCE_PORT, ADMIN_PORT, RANKS_PORT, METRICS_PORT)
    assert config.admin_token == "t" * 32


def test_the_router_understands_its_command_line() -> None:
    [container] = [item for item in main_containers("router", "Deployment") if item["name"] == "router"]
    assert container["command"] == ["python", "-m", "hetero_gateway", "route"]
    config = RouterConfig.from_command_line(container["args"])
    assert (config.port, config.metrics_port, config.policy) == (HTTP_PORT, METRICS_PORT, "LeastLoad")
    assert config.gateways == (f"routed-engines.models.svc.cluster.local:{ROUTER_PORT}",)
    assert config.pods == GatewayPods("models", {LABEL_NAME: "routed", LABEL_ROLE: ROLE_GATEWAY})
    assert (config.keys, config.tls_dir) == (Path(POD_ROUTER_KEYS_FILE), Path(POD_TLS_DIR))


def test_both_understand_where_their_certificates_are(tmp_path: Path) -> None:
    world = OperatorWorld(dict(CASES["burstable"].resource), options=replace(OPTIONS, inside_tls=True))
    applied = [item for item in world.plan().apply if item["kind"] in ("StatefulSet", "Deployment")]
    workloads = {item["kind"]: item["spec"]["template"]["spec"]["containers"][0] for item in applied}
    token = tmp_path / "token"
    token.write_text("t" * 32, encoding="utf-8")
    environment = {item["name"]: str(token) for item in workloads["Deployment"]["env"]}
    gateway = GatewayConfig.from_command_line(workloads["Deployment"]["args"], environment)
    pod = PodConfig.from_command_line(workloads["StatefulSet"]["args"], {"POD_NAME": "x-cpu-0"})
    assert str(gateway.inside_tls_dir) == str(pod.inside_tls_dir) == POD_INSIDE_TLS_DIR


@pytest.mark.parametrize("name", CASES)
def test_rank_pods_understand_their_command_line(name: str) -> None:
    for container in main_containers(name, "StatefulSet"):
        from_pod = {"metadata.name": "x-cpu-3", "status.podIP": "10.1.2.3"}
        environment = {
            item["name"]: from_pod[item["valueFrom"]["fieldRef"]["fieldPath"]]
            for item in container["env"]
            if "valueFrom" in item
        }
        assert container["command"] == ["python", "-m", "hetero_worker.pod"]
        config = PodConfig.from_command_line(container["args"], environment)
        given = dict(zip(container["args"][::2], container["args"][1::2], strict=True))
        ordinal = int(given.get("--ordinal", 3))
        assert (config.pod_name, config.ordinal, config.pod_ip) == ("x-cpu-3", ordinal, "10.1.2.3")
        assert config.threads_per_rank * config.ranks_per_pod == int(container["resources"]["limits"]["cpu"])
        assert config.health_port == container["ports"][0]["containerPort"]
