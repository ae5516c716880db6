"""The chart on real nodes: the operator comes up as the chart says, and its images hold what they should."""

from __future__ import annotations

from tests.e2e.conftest import RELEASE, SYSTEM
from tests.e2e.site import Site
from tests.support.kube.client import Object
from tests.support.kube.errors import ApiError
from tests.support.kube.polling import poll
from tests.support.restricted_profile import restricted_violations


def operator_pods(site: Site) -> list[Object]:
    """Without those that an installation before this one leaves, which may be ending still."""
    found = site.client.list_all("Pod", SYSTEM, labels="app.kubernetes.io/component=operator")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def test_the_operator_is_up_in_pods_of_the_restricted_profile(site: Site, operator: str) -> None:
    pods = operator_pods(site)
    assert len(pods) == 2
    assert [list(restricted_violations(pod["spec"])) for pod in pods] == [[], []]
    assert site.helm.status(RELEASE, SYSTEM)["info"]["status"] == "deployed"


def test_helm_test_finds_the_leader(site: Site, operator: str) -> None:
    assert "Succeeded" in site.helm.run("test", RELEASE, f"--namespace={SYSTEM}", "--timeout=90s")


def test_the_namespace_of_resources_refuses_pods_that_are_not_restricted(site: Site, namespace: str) -> None:
    container = {"name": "main", "image": "none", "securityContext": {"privileged": True}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "privileged", "namespace": namespace},
        "spec": {"containers": [container]},
    }

    def refusal() -> str:
        """Empty while the namespace is too new for a pod of any kind."""
        try:
            site.client.create(pod, dry_run=True)
        except ApiError as error:
            return str(error) if "PodSecurity" in str(error) else ""
        raise AssertionError("a privileged pod was admitted")

    assert "privileged" in poll(refusal, timeout_s=30)
