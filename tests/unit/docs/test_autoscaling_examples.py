"""Examples of autoscalers are valid, scale the example resource, and read metrics that gateways have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kubernetes_validate
import pytest
import yaml

from hetero_api.contract import API_VERSION, GROUP, KIND
from hetero_api.crd import crd
from hetero_api.manifest import load_manifest
from hetero_api.metrics import GatewayMetric
from tests.support.documents import ROOT

pytestmark = pytest.mark.unit

FOLDER = ROOT / "examples/replicas"
NAMES = ("hpa", "keda")


def example(name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_scales_the_example_resource(name: str) -> None:
    target = example(name)["spec"]["scaleTargetRef"]
    resource = load_manifest(ROOT / "examples/replicas/smollm2-cpu.yaml")
    assert target == {"apiVersion": f"{GROUP}/{API_VERSION}", "kind": KIND, "name": resource.metadata.name}
    [version] = crd()["spec"]["versions"]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.replicas"


@pytest.mark.parametrize("name", NAMES)
def test_it_reads_a_metric_of_gateways(name: str) -> None:
    # An adapter's names have no colons.
    assert GatewayMetric.WAITING.value.name.replace(":", "_") in str(example(name)["spec"]).replace(":", "_")


def test_the_horizontal_pod_autoscaler_is_valid() -> None:
    kubernetes_validate.validate(dict(example("hpa")), "1.33", strict=True)
