"""The operator of an installed chart as a local process, since there is no kubelet to run its pods.

Nothing of it is this test's own: the account's token is minted by the API server for the chart's ServiceAccount, so
RBAC is the chart's; the settings are read from the Deployment as it is stored in the cluster. Only the kubeconfig and
the ports are ours, because several operators share one machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero_operator.config import PREFIX
from tests.support.helm import Object, pod_environment
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.operator_process import OperatorProcess

COMMAND = ["python", "-m", "hetero_operator"]
_PORTS = ("metrics_port", "health_port")


@contextmanager
def installed_operator(
    cluster: Cluster, client: Client, folder: Path, *, name: str, namespace: str, pod: str = "pod-0"
) -> Iterator[OperatorProcess]:
    """What a pod of the Deployment would run, in `folder`; it leads when entered."""
    deployment = client.get("Deployment", name, namespace)
    template = deployment["spec"]["template"]["spec"]
    (container,) = template["containers"]
    assert container["command"] == COMMAND
    fields = {"metadata.name": pod, "metadata.namespace": namespace, "status.podIP": "127.0.0.1"}
    account = cluster.service_account(template["serviceAccountName"], namespace)
    settings = _settings(pod_environment(container, fields))
    with OperatorProcess(cluster.kubeconfig(account), folder, **settings) as operator:
        operator.wait_leading()
        yield operator


def run_leader_check(hook: Object, operator: OperatorProcess) -> str:
    """Run what the `helm test` pod runs, but against this operator's port; its output. Fails as the pod would."""
    (container,) = hook["spec"]["containers"]
    script, _, _, seconds = container["args"]
    command = [sys.executable, "-c", script, "127.0.0.1", str(operator.metrics_port), seconds]
    assert container["command"] == ["python", "-c"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=float(seconds) + 10)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _settings(environment: dict[str, str]) -> dict[str, str]:
    settings = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items()}
    return {name: value for name, value in settings.items() if name not in _PORTS}
