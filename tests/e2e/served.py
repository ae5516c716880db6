"""A HeteroInference on a cluster, as a test drives it: what it says of itself, its pods, and a way in for clients."""

from __future__ import annotations

import json
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from hetero_api.contract import API_VERSION, GROUP, KIND, LABEL_NAME, LABEL_ROLE, ROLE_GATEWAY, ROLE_RANK
from hetero_client import HeteroClient
from tests.e2e.site import Site
from tests.support.kube.client import Object, condition
from tests.support.kube.polling import poll
from tests.support.kube.tools import find_kubectl

READY_TIMEOUT_S = 300.0
GONE_TIMEOUT_S = 60.0
"""Allowed to what a resource owned, by the test that is about it."""
LONGEST_GONE_S = 180.0
"""Patience of the other tests: the kubelet of 1.20 now and then lets go of a pod that has ended a minute later, with
its next round of garbage collection.
"""
FORWARD_TIMEOUT_S = 30.0
LOOK_S = 0.1
ORDER = ("Accepted", "Scheduled", "GroupFormed", "ModelReady", "GatewayReady", "Ready")
"""Conditions in the order in which they come true."""
CPU_RESOURCES = {"cpuMillis": 600, "memory": "1Gi"}
"""The gateway's, so that it fits beside a rank on a machine of two cores."""


def cpu_manifest(site: Site, name: str, **changes: Any) -> Object:
    """SmolLM2 on two CPU ranks of a core each, like examples/smollm2-cpu.yaml; `changes` of the spec.

    Shares are given, so that nothing is measured: these tests are about what happens, not about how fast.
    """
    pool = {
        "name": "cpu",
        "type": "CPU",
        "ranks": 2,
        "cpu": {"coresPerRank": 1, "memoryPerRank": "2Gi", "numa": {"policy": "BestEffort"}},
        "scheduling": {"tolerations": site.tolerations},
    }
    spec = {
        "model": {"uri": site.model_uri, "dtype": "float32", "maxModelLen": 2048},
        "pools": [pool],
        "placement": {"mode": "Tensor", "shares": {"attention": [2, 1], "mlp": [1, 1], "vocabulary": [1, 1]}},
        "gateway": {"resources": CPU_RESOURCES},
        **changes,
    }
    return {"apiVersion": f"{GROUP}/{API_VERSION}", "kind": KIND, "metadata": {"name": name}, "spec": spec}


@dataclass(frozen=True, slots=True)
class Served:
    """The resource `name` in `namespace`."""

    site: Site
    namespace: str
    name: str

    @property
    def object(self) -> Object:
        """As it is now."""
        return self.site.client.get(KIND, self.name, self.namespace)

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """`kubectl apply -f -`."""
        # 1.20 would prune what it does not know in a CRD, and its kubectl refuse it; manifests have no such thing.
        self.site.kubectl("apply", f"--namespace={self.namespace}", "-f", "-", stdin=yaml.safe_dump(dict(manifest)))

    def wait(self, until: Callable[[Object], bool], timeout_s: float = READY_TIMEOUT_S) -> Object:
        """The resource once `until` holds of it; a failure says how resource and pods were last."""
        try:
            return self.site.client.wait_for(KIND, self.name, self.namespace, until=until, timeout_s=timeout_s)
        except AssertionError as late:
            late.add_note(self.site.kubectl("get", "pods", "-A", "-o", "wide"))
            raise

    def wait_ready(self, *, after_epoch: int = 0, timeout_s: float = READY_TIMEOUT_S) -> Object:
        """Once it serves, in an epoch later than `after_epoch`."""

        def serves(found: Object) -> bool:
            return is_true(found, "Ready") and is_current(found) and found["status"].get("epoch", 0) > after_epoch

        return self.wait(serves, timeout_s)

    def pods(self, role: str = ROLE_RANK) -> dict[str, Object]:
        """By name."""
        labels = f"{LABEL_NAME}={self.name},{LABEL_ROLE}={role}"
        found = self.site.client.list_all("Pod", self.namespace, labels=labels)
        return {pod["metadata"]["name"]: pod for pod in found}

    def gateway(self) -> Object:
        """The gateway's pod."""
        (pod,) = self.pods(ROLE_GATEWAY).values()
        return pod

    def delete(self) -> float:
        """`kubectl delete`, until nothing of it is left; the seconds that took."""
        started = time.monotonic()
        self.site.kubectl("delete", "hinf", self.name, f"--namespace={self.namespace}", "--wait=true")
        poll(
            lambda: not self.leftovers(),
            timeout_s=LONGEST_GONE_S,
            describe=lambda: f"still there: {self.leftovers()}",
            interval_s=LOOK_S,
        )
        return time.monotonic() - started

    def leftovers(self) -> list[str]:
        """What the resource owned and is still there."""
        kinds = ("Pod", "StatefulSet", "Deployment", "ReplicaSet", "Service", "ConfigMap", "Secret", "ServiceAccount")
        return [
            f"{kind} {one['metadata']['name']}"
            for kind in kinds
            for one in self.site.client.list_all(kind, self.namespace, labels=f"{LABEL_NAME}={self.name}")
        ]

    @contextmanager
    def connected(self) -> Iterator[str]:
        """Address of the front door through `kubectl port-forward`."""
        with port_forward(self.site, self.namespace, f"service/{self.name}", 50051) as address:
            yield address

    @contextmanager
    def client(self) -> Iterator[HeteroClient]:
        """The Python client through `kubectl port-forward`."""
        with self.connected() as address, HeteroClient(address) as client:
            client.wait_ready(FORWARD_TIMEOUT_S)
            yield client


@contextmanager
def port_forward(site: Site, namespace: str, target: str, port: int) -> Iterator[str]:
    """`kubectl port-forward` to a port; yields HOST:PORT here."""
    command = [str(find_kubectl()), f"--kubeconfig={site.kubeconfig}", f"--namespace={namespace}"]
    command += ["port-forward", target, f":{port}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    watchdog = threading.Timer(FORWARD_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline()
        watchdog.cancel()
        found = re.search(r"127\.0\.0\.1:(\d+)", line)
        assert found is not None, f"kubectl port-forward: {line}{process.stderr.read() if not line else ''}"
        yield f"127.0.0.1:{found[1]}"
    finally:
        watchdog.cancel()
        process.kill()
        process.communicate()


class Watching:
    """Looks again and again while entered; `look` may keep what it sees. Its first failure is raised at the end."""

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="watching")

    def _run(self) -> None:
        while not self._stop.is_set() and self._error is None:
            try:
                self._look()
            except BaseException as error:
                self._error = error
            self._stop.wait(LOOK_S)

    def __enter__(self) -> Watching:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error


def is_true(found: Object, kind: str) -> bool:
    """Whether a condition is."""
    one = condition(found, kind)
    return one is not None and one["status"] == "True"


def is_current(found: Object) -> bool:
    """Whether the status is about the spec as it is now."""
    return bool(found.get("status", {}).get("observedGeneration") == found["metadata"]["generation"])


def told(found: Object, kind: str) -> tuple[str, str, str]:
    """Status, reason and message of a condition."""
    one = condition(found, kind)
    assert one is not None, f"no condition {kind}: {json.dumps(found.get('status'))}"
    return one["status"], one["reason"], one["message"]


def is_because(found: Object, kind: str, reason: str) -> bool:
    """Whether a condition is as it is for a reason; it may not be told yet."""
    one = condition(found, kind)
    return one is not None and one["reason"] == reason


def restarts_of(pods: Mapping[str, Object]) -> dict[str, tuple[str, int]]:
    """uid and container restarts of pods: what changes when anything of them began anew."""
    return {
        name: (pod["metadata"]["uid"], sum(one["restartCount"] for one in pod["status"].get("containerStatuses", [])))
        for name, pod in pods.items()
    }
