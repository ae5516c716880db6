"""The harness itself, on the real thing: control plane, identities, audit log, outages."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import urllib3

from tests.cluster.conftest import ROOT, StartControlPlane
from tests.cluster.workloads import config_map, owned_by, pod, stateful_set
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.errors import ApiError, Conflict, NotFound
from tests.support.kube.kubelet import Kubelet
from tests.support.kube.polling import poll
from tests.support.kube.spawned import alive
from tests.support.kube.tools import find_kubectl


def test_a_namespace_takes_pods_at_once(client: Client, namespace: str) -> None:
    assert client.create(pod("one", namespace))["status"]["phase"] == "Pending"


def test_our_resource_is_served(client: Client, namespace: str) -> None:
    assert client.discovery.resolve("HeteroInference").plural == "heteroinferences"
    assert client.list_all("HeteroInference", namespace) == []


def test_a_stateful_set_makes_pods(client: Client, namespace: str) -> None:
    client.apply(stateful_set("ranks", namespace, replicas=2))
    pods = client.wait_list("Pod", namespace, labels="app=ranks", until=lambda found: len(found) == 2)
    assert [found["metadata"]["name"] for found in pods] == ["ranks-0", "ranks-1"]


def test_what_is_owned_goes_with_its_owner(client: Client, namespace: str) -> None:
    owner = client.apply(config_map("owner", namespace))
    client.apply(owned_by(owner, config_map("owned", namespace)))
    client.delete("ConfigMap", "owner", namespace)
    client.wait_gone("ConfigMap", "owned", namespace)


def test_apply_knows_who_owns_a_field(client: Client, namespace: str) -> None:
    client.apply(config_map("shared", namespace, key="ours"), manager="one")
    with pytest.raises(Conflict, match='conflict with "one"'):
        client.apply(config_map("shared", namespace, key="theirs"), manager="other", force=False)
    client.apply(config_map("shared", namespace, key="theirs"), manager="other", dry_run=True)
    assert client.get("ConfigMap", "shared", namespace)["data"] == {"key": "ours"}


def test_a_refusal_says_what_the_server_said(client: Client, namespace: str) -> None:
    with pytest.raises(NotFound) as absent:
        client.get("Pod", "nobody", namespace)
    assert absent.value.message == 'pods "nobody" not found'
    with pytest.raises(ApiError) as invalid:
        client.create(pod("one", namespace, containers=[]))
    assert (invalid.value.code, invalid.value.reason) == (422, "Invalid")


def test_calls_are_counted_by_user(cluster: Cluster, client: Client, namespace: str) -> None:
    mark = cluster.audit.mark()
    client.apply(config_map("a", namespace))
    client.get("ConfigMap", "a", namespace)
    (write,) = cluster.audit.writes_of("admin", since=mark, namespace=namespace)
    assert (write.verb, write.resource, write.name, write.code) == ("patch", "configmaps", "a", 201)
    assert cluster.audit.writes_of("somebody", since=mark) == []


def test_a_service_account_may_what_rbac_says(cluster: Cluster, client: Client, namespace: str) -> None:
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "reader", "namespace": namespace}}
    client.apply(account)
    meta = {"name": "reader", "namespace": namespace}
    rules = [{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get", "list"]}]
    rbac = "rbac.authorization.k8s.io"
    client.apply({"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": meta, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "reader", "namespace": namespace}
    reference = {"apiGroup": rbac, "kind": "Role", "name": "reader"}
    client.apply(
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "subjects": [subject],
            "roleRef": reference,
        }
    )
    mark = cluster.audit.mark()
    with cluster.client(cluster.service_account("reader", namespace)) as reader:
        poll(lambda: _allowed(reader, namespace), timeout_s=10)
        with pytest.raises(ApiError, match="403 Forbidden"):
            reader.apply(config_map("a", namespace))
    (refused,) = cluster.audit.writes_of(f"system:serviceaccount:{namespace}:reader", since=mark)
    assert refused.code == 403


def _allowed(reader: Client, namespace: str) -> bool:
    try:
        reader.list_all("ConfigMap", namespace)
    except ApiError:  # the authorizer hears of a new role by a watch
        return False
    return True


def test_a_kubeconfig_serves_other_programs(cluster: Cluster, namespace: str) -> None:
    path = cluster.kubeconfig(cluster.user("alice", groups=["system:masters"]), namespace=namespace)
    command = [str(find_kubectl()), "--kubeconfig", str(path), "create", "configmap", "made-by-kubectl"]
    subprocess.run(command, check=True, capture_output=True)
    assert [call.name for call in cluster.audit.writes_of("alice", namespace=namespace)] == ["made-by-kubectl"]


def test_a_pod_ends_when_its_kubelet_says_so(client: Client, namespace: str) -> None:
    kubelet = Kubelet(client, namespace)
    client.create(pod("one", namespace))
    kubelet.run("one")
    client.delete("Pod", "one", namespace)
    assert "deletionTimestamp" in client.get("Pod", "one", namespace)["metadata"]
    assert kubelet.finish_deletions() == ["one"]
    client.wait_gone("Pod", "one", namespace)


def test_the_api_server_goes_and_comes_back(start_control_plane: StartControlPlane) -> None:
    plane = start_control_plane(controllers=(), crds=())
    with plane.cluster.client() as client:
        client.apply(config_map("kept", "default"))
        for with_signal in (signal.SIGTERM, signal.SIGKILL):
            plane.stop_api_server(with_signal)
            with pytest.raises(urllib3.exceptions.HTTPError):
                client.get("ConfigMap", "kept", "default")
            plane.start_api_server()
            assert client.find("ConfigMap", "kept", "default") is not None


ORPHAN = """
import sys, time
from pathlib import Path
from tests.support.kube import keeper
from tests.support.kube.components import Component
from tests.support.kube.control_plane import hold
from tests.support.kube.spawned import Spawned
folder = Path(sys.argv[1])
users = hold(folder)
Spawned.start([sys.executable, "-I", keeper.__file__, str(folder)], log=folder / "keeper.log", environment={})
server = Component("server", [sys.executable, "-c", "import time; time.sleep(600)", str(folder)], folder=folder)
server.start()
print(server.pid, flush=True)
time.sleep(600)
"""


def test_a_killed_test_run_leaves_no_servers(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE) as run:
        assert run.stdout is not None
        server = int(run.stdout.readline())
        assert alive(server)
        run.kill()
    poll(lambda: not alive(server), timeout_s=10)
