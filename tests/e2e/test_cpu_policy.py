"""Kubelets whose CPU manager gives nobody cores of their own: status does not claim that it does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.cpusets import cpuset_of
from tests.e2e.served import Served, cpu_manifest, told
from tests.e2e.site import Site


@pytest.fixture
def without_static_policy(site: Site) -> Iterator[None]:
    """All kubelets with policy none; with policy static again afterwards."""
    if not site.nodes or site.real is None:
        pytest.skip("changes the kubelets' settings: only on nodes of our own")
    for name, node in site.nodes.items():
        node.set_cpu_policy(static=False)
        site.real.wait_ready(site.client, name)
    yield
    for name, node in site.nodes.items():
        node.set_cpu_policy(static=True)
        site.real.wait_ready(site.client, name)


@pytest.fixture
def shared(site: Site, operator: str, namespace: str, without_static_policy: None) -> Iterator[Served]:
    served = Served(site, namespace, "shared")
    served.apply(cpu_manifest(site, "shared"))
    yield served
    served.delete()


def test_cores_that_others_may_use_are_not_called_a_ranks_own(site: Site, shared: Served) -> None:
    shared.wait_ready()
    allowed = {name: cpuset_of(site, pod) for name, pod in shared.pods().items()}
    assert all(len(cpus) > 1 for cpus in allowed.values()), allowed
    found = shared.object
    status, reason, message = told(found, "NUMAPinned")
    assert (status, reason) == ("True", "NotGuaranteed")
    assert "asked for 1 CPUs and may run on" in message
    assert "CPU manager with policy static" in message
    site.keep("numa-without-static-policy.txt", f"NUMAPinned {status} {reason}: {message}\n")
