"""From an earlier release to this one and back, on two real nodes, under a load that never pauses.

HETERO_E2E_BEFORE is a folder with the earlier release, as `make release` made it there: its chart and its images. Its
version has to be another: gateways and ranks of two versions refuse one another.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import pytest

from hetero_api.contract import ANNOTATION_RESTARTED_AT, VERSION
from tests.e2e.conftest import RELEASE, SYSTEM, install_operator, is_available
from tests.e2e.harness.node_settings import NodePlan
from tests.e2e.replicas import (
    NAME,
    NAMESPACE,
    STREAMS,
    check,
    disturbed,
    manifest,
    pods_of,
    save_ascii_model,
    undisturbed,
    wait_replicas,
)
from tests.e2e.served import Served, restarts_of
from tests.e2e.site import Site, image_archives, own_nodes
from tests.support.helm import CHART
from tests.support.kube.client import Object
from tests.support.kube.polling import poll

BEFORE: Final = "HETERO_E2E_BEFORE"


@pytest.fixture(scope="module")
def earlier() -> Path:
    """The chart of the earlier release."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("installs two releases: only on nodes of our own")
    folder = os.environ.get(BEFORE)
    if not folder:
        pytest.skip(f"{BEFORE} names no folder with an earlier release: make release DIST=FOLDER there")
    (found,) = Path(folder).glob("*.tgz")
    assert VERSION not in found.name, f"{found} is of this version"
    return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, earlier: Path) -> Iterator[Site]:
    """Two nodes with the images of both releases, and the operator of the earlier one."""
    images = [*image_archives(os.environ).values(), *sorted(earlier.parent.glob("*.tar"))]
    plans = [NodePlan(f"node-{number}", static=False) for number in (1, 2)]
    folder = tmp_path_factory.mktemp("upgrading")
    with (
        own_nodes(os.environ, folder, save_ascii_model(folder / "model"), plans=plans, images=images) as site,
        install_operator(site, earlier),
    ):
        site.create_namespace(NAMESPACE)
        yield site


def versions(pods: Iterable[Object]) -> set[str]:
    """Tags of the images that pods run."""
    return {pod["spec"]["containers"][0]["image"].rpartition(":")[2] for pod in pods}


def wait_operator(site: Site, version: str) -> None:
    """Until all pods of the operator are of a version. One that ends may lead: its roll-outs have its own."""
    (deployment,) = site.client.list_all("Deployment", SYSTEM)
    site.client.wait_for("Deployment", deployment["metadata"]["name"], SYSTEM, until=is_available, timeout_s=180)
    poll(lambda: versions(site.client.list_all("Pod", SYSTEM)) == {version}, timeout_s=60)


def restart(served: Served, version: str) -> None:
    """Restart as `kubectl rollout restart` does: replica by replica, with what the operator of a version renders."""
    served.site.kubectl(
        "annotate", "hinf", NAME, f"--namespace={NAMESPACE}", f"{ANNOTATION_RESTARTED_AT}=to-{version}", "--overwrite"
    )
    served.wait(lambda _: versions(pods_of(served)) == {version})
    wait_replicas(served, 2)


def test_an_upgrade_and_a_rollback_fail_no_request(site: Site, earlier: Path) -> None:
    served = Served(site, NAMESPACE, NAME)
    served.apply(manifest(site, 2, routed=False))
    wait_replicas(served, 2)
    texts = undisturbed(served)
    assert len(texts) == STREAMS
    before = earlier.stem.rpartition("-")[2]
    assert versions(pods_of(served)) == {before}

    def change() -> None:
        for chart, version in ((CHART, VERSION), (None, before)):
            pods = restarts_of({pod["metadata"]["name"]: pod for pod in pods_of(served)})
            if chart is None:
                site.helm.run("rollback", RELEASE, f"--namespace={SYSTEM}")
            else:
                site.helm.run("upgrade", RELEASE, chart, f"--namespace={SYSTEM}", values=dict(site.chart_values))
            wait_operator(site, version)
            wait_replicas(served, 2)
            assert restarts_of({pod["metadata"]["name"]: pod for pod in pods_of(served)}) == pods
            restart(served, version)
            assert versions(pods_of(served)) == {version}

    check(disturbed(served, "upgrade", change), texts)
