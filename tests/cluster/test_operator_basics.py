"""The operator as a process against a real API server: it makes, keeps, heals and leaves alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.contract import GROUP, KIND, LABEL_NAME, PLURAL
from tests.cluster.conftest import CRD, StartControlPlane
from tests.support.chart_rights import operators_of
from tests.support.kube.client import Client, Object
from tests.support.kube.cluster import Cluster
from tests.support.kube.polling import poll
from tests.support.operator_process import OperatorProcess

EXAMPLES = Path(__file__).parents[2] / "examples"
OWNED_KINDS = ("Service", "ServiceAccount", "ConfigMap", "Secret", "StatefulSet", "Deployment", "NetworkPolicy")
PER_RESOURCE = 11
RECREATED_TIMEOUT_S = 60.0


@pytest.fixture
def operator(cluster: Cluster, client: Client, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """Looks after the test's namespace only, with the chart's rights, and with a Lease and a name of its own."""
    with operators_of(client, namespace) as group:
        user = cluster.user(_user_of(namespace), groups=[group])
        process = OperatorProcess(
            cluster.kubeconfig(user), tmp_path / "operator", namespaces=namespace, lease_namespace=namespace
        )
        with process:
            process.wait_leading()
            yield process


def test_an_example_becomes_all_its_objects_and_a_status(
    operator: OperatorProcess, client: Client, namespace: str
) -> None:
    resource = make(client, namespace)
    owned = wait_owned(client, namespace, resource["metadata"]["name"])
    for item in owned:
        (reference,) = item["metadata"]["ownerReferences"]
        assert (reference["uid"], reference["kind"], reference["controller"]) == (
            resource["metadata"]["uid"], KIND, True,
        )  # fmt: skip
    name = resource["metadata"]["name"]
    told = client.wait_for(KIND, name, namespace, until=lambda found: "conditions" in found.get("status", {}))
    assert told["status"]["observedGeneration"] == told["metadata"]["generation"]
    assert not told["metadata"].get("finalizers")
    assert not told["metadata"].get("annotations")


def test_nothing_is_written_when_nothing_changed_nor_after_a_restart(
    operator: OperatorProcess, cluster: Cluster, client: Client, namespace: str
) -> None:
    resource = make(client, namespace)
    wait_owned(client, namespace, resource["metadata"]["name"])
    wait_quiet(cluster, namespace)
    mark = cluster.audit.mark()
    client.apply(example(namespace))
    looked = operator.metric("hetero_operator_reconcile_seconds_count")
    client.apply({**example(namespace), "metadata": {**example(namespace)["metadata"], "labels": {"touched": "yes"}}})
    operator.wait_metric("hetero_operator_reconcile_seconds_count", lambda value: value > looked)
    operator.restart()
    operator.wait_leading()
    operator.wait_metric("hetero_operator_resources_reconciled", lambda value: value == 1)
    wait_quiet(cluster, namespace)
    assert writes(cluster, namespace, mark) == []


@pytest.mark.parametrize("kind", OWNED_KINDS)
def test_what_is_deleted_by_others_is_made_again(
    operator: OperatorProcess, client: Client, namespace: str, kind: str
) -> None:
    resource = make(client, namespace)
    name = resource["metadata"]["name"]
    victim = next(item for item in wait_owned(client, namespace, name) if item["kind"] == kind)
    client.delete(kind, victim["metadata"]["name"], namespace)
    if kind == "Secret":
        operator.restart()  # Secrets are not watched: a look at one that is believed in comes later
    client.wait_for(
        kind,
        victim["metadata"]["name"],
        namespace,
        until=lambda found: bool(found["metadata"]["uid"] != victim["metadata"]["uid"]),
    )


def test_what_others_changed_is_healed(operator: OperatorProcess, client: Client, namespace: str) -> None:
    name = make(client, namespace)["metadata"]["name"]
    wait_owned(client, namespace, name)
    client.patch("Service", f"{name}-gateway", {"metadata": {"labels": {LABEL_NAME: name, "mine": "stays"}}}, namespace)
    client.patch("StatefulSet", f"{name}-cpu", {"spec": {"replicas": 0}}, namespace)
    client.wait_for("StatefulSet", f"{name}-cpu", namespace, until=lambda found: found["spec"]["replicas"] > 0)
    assert client.get("Service", f"{name}-gateway", namespace)["metadata"]["labels"]["mine"] == "stays"


def test_a_stranger_s_object_is_left_alone_and_nothing_else_is_made(
    operator: OperatorProcess, cluster: Cluster, client: Client, namespace: str
) -> None:
    name = example(namespace)["metadata"]["name"]
    stranger = {
        "apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": f"{name}-rank", "namespace": namespace},
    }  # fmt: skip
    before = client.create(stranger)
    make(client, namespace)
    told = client.wait_for(KIND, name, namespace, until=lambda found: _condition(found, "Accepted") == "False")
    (accepted,) = [one for one in told["status"]["conditions"] if one["type"] == "Accepted"]
    assert accepted["reason"] == "NameConflict"
    assert f"{name}-rank" in accepted["message"]
    assert owned_objects(client, namespace, name) == []
    client.delete("ServiceAccount", f"{name}-rank", namespace)
    assert before["metadata"]["uid"]
    wait_owned(client, namespace, name, timeout_s=60.0)


def test_a_deleted_resource_goes_at_once_and_its_objects_follow(
    operator: OperatorProcess, cluster: Cluster, client: Client, namespace: str
) -> None:
    name = make(client, namespace)["metadata"]["name"]
    wait_owned(client, namespace, name)
    wait_quiet(cluster, namespace)
    operator.kill()
    client.delete(KIND, name, namespace)
    client.wait_gone(KIND, name, namespace, timeout_s=5.0)
    operator.start()
    operator.wait_leading()
    mark = cluster.audit.mark()
    poll(
        lambda: not owned_objects(client, namespace, name),
        timeout_s=30.0,
        describe=lambda: str([item["metadata"]["name"] for item in owned_objects(client, namespace, name)]),
    )
    assert writes(cluster, namespace, mark) == []


def test_sigterm_ends_it_and_gives_the_lease_back(operator: OperatorProcess, client: Client, namespace: str) -> None:
    assert operator.stop() == 0
    lease = client.get("coordination.k8s.io/v1/Lease", "heteroinference-operator", namespace)
    assert not lease["spec"].get("holderIdentity")


def test_a_definition_that_is_deleted_and_made_again_is_picked_up_by_the_same_process(
    start_control_plane: StartControlPlane, tmp_path: Path
) -> None:
    plane = start_control_plane()
    with plane.cluster.client() as client, everywhere(plane.cluster, client, tmp_path / "op") as operator:
        operator.wait_leading()
        namespace = plane.cluster.create_namespace(client)
        name = make(client, namespace)["metadata"]["name"]
        wait_owned(client, namespace, name)
        pid = operator.pid
        client.delete("CustomResourceDefinition", f"{PLURAL}.{GROUP}")
        client.wait_gone("CustomResourceDefinition", f"{PLURAL}.{GROUP}")
        poll(lambda: not operator.ready(), timeout_s=30.0, describe=lambda: "still ready without its kind")
        client.install_crd(CRD)
        make(client, namespace)
        wait_owned(client, namespace, name, timeout_s=RECREATED_TIMEOUT_S)
        assert (operator.running, operator.pid) == (True, pid)


@contextmanager
def everywhere(cluster: Cluster, client: Client, folder: Path) -> Iterator[OperatorProcess]:
    """An operator that looks after all namespaces, with the chart's rights to that."""
    home = cluster.create_namespace(client)
    with operators_of(client, home, everywhere=True) as group:
        kubeconfig = cluster.kubeconfig(cluster.user(_user_of(home), groups=[group]))
        with OperatorProcess(kubeconfig, folder, lease_namespace=home) as operator:
            yield operator


def example(namespace: str) -> Object:
    """examples/smollm2-cpu.yaml as a cluster can run it: its model in a claim."""
    manifest: Object = yaml.safe_load((EXAMPLES / "smollm2-cpu.yaml").read_text(encoding="utf-8"))
    manifest["metadata"]["namespace"] = namespace
    return manifest


def make(client: Client, namespace: str) -> Object:
    return client.apply(example(namespace))


def owned_objects(client: Client, namespace: str, name: str) -> list[Object]:
    return [item for kind in OWNED_KINDS for item in client.list_all(kind, namespace, labels=f"{LABEL_NAME}={name}")]


def wait_owned(client: Client, namespace: str, name: str, *, timeout_s: float = 20.0) -> list[Object]:
    """The resource's objects, once all are there."""

    def probe() -> list[Object] | None:
        found = owned_objects(client, namespace, name)
        return found if len(found) == PER_RESOURCE else None

    return poll(
        probe,
        timeout_s=timeout_s,
        describe=lambda: str(
            [(item["kind"], item["metadata"]["name"]) for item in owned_objects(client, namespace, name)]
        ),
    )


def writes(cluster: Cluster, namespace: str, since: int) -> list[str]:
    """What the operator wrote, its Lease aside."""
    calls = cluster.audit.writes_of(_user_of(namespace), since=since)
    return [str(call) for call in calls if call.resource != "leases"]


def wait_quiet(cluster: Cluster, namespace: str, *, quiet_polls: int = 30) -> None:
    """Until the operator has written nothing in 30 looks at the audit log, one every 0.1 s."""
    mark, polls = cluster.audit.mark(), 0

    def quiet() -> bool:
        nonlocal mark, polls
        polls += 1
        if writes(cluster, namespace, mark):
            mark, polls = cluster.audit.mark(), 0
        return polls >= quiet_polls

    poll(quiet, timeout_s=40.0, describe=lambda: str(writes(cluster, namespace, mark)), interval_s=0.1)


def _condition(found: Object, kind: str) -> Any:
    return next((one["status"] for one in found.get("status", {}).get("conditions", []) if one["type"] == kind), None)


def _user_of(namespace: str) -> str:
    return f"operator-{namespace}"
