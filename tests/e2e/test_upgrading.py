"""Two releases in a registry: installed from there, upgraded and rolled back, on two real nodes under steady load.

HETERO_E2E_BEFORE and HETERO_E2E_RELEASE are folders with the earlier release and this one, as `make release
DIST=FOLDER` made them of commits whose notes are cut. Their versions differ: gateways and ranks of two versions refuse
one another. The nodes have no image of ours and pull them from the registry, by digest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self
from urllib.parse import urlsplit

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
from tests.e2e.site import Site, own_nodes
from tests.support.kube.client import Object
from tests.support.kube.polling import poll
from tests.support.oci_registry import OciRegistry, SigningKeys
from tools.images.archive import read_archive
from tools.release.__main__ import main
from tools.release.chart import NAME as CHART_NAME

BEFORE: Final = "HETERO_E2E_BEFORE"
THIS: Final = "HETERO_E2E_RELEASE"
PLACE: Final = "ai/hetero"


@dataclass(frozen=True, slots=True)
class Release:
    """A folder that `make release` filled."""

    folder: Path
    version: str
    images: frozenset[str]
    """Digests."""

    @classmethod
    def read(cls, variable: str) -> Self:
        named = os.environ.get(variable)
        if not named:
            pytest.skip(f"{variable} names no folder with a release: make release DIST=FOLDER")
        (chart,) = Path(named).glob("*.tgz")
        digests = frozenset(read_archive(path).digest for path in Path(named).glob("*.tar"))
        return cls(Path(named), chart.stem.removeprefix(f"{CHART_NAME}-"), digests)

    def push(self, registry: OciRegistry, keys: SigningKeys) -> None:
        """Push and sign it, as its maker does."""
        where = f"{registry.address}/{PLACE}"
        assert main(["push", str(self.folder), where, "--plain-http", *keys.options], {}) == 0

    def runs_in(self, pods: Iterable[Object]) -> bool:
        """Whether all containers of pods are of this release's images."""
        images = {one["image"].rpartition("@")[2] for pod in pods for one in pod["spec"]["containers"]}
        return images <= self.images


@pytest.fixture(scope="module")
def releases() -> tuple[Release, Release]:
    """The earlier release, and this one."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("installs two releases: only on nodes of our own")
    before, this = Release.read(BEFORE), Release.read(THIS)
    assert this.version == VERSION != before.version
    return before, this


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> SigningKeys:
    return SigningKeys.make(tmp_path_factory.mktemp("keys"), passphrase="long enough")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, releases: tuple[Release, Release]) -> Iterator[Site]:
    """Two nodes that have no image of ours."""
    plans = [NodePlan(f"node-{number}", static=False) for number in (1, 2)]
    folder = tmp_path_factory.mktemp("upgrading")
    with own_nodes(os.environ, folder, save_ascii_model(folder / "model"), plans=plans, images=[]) as site:
        site.create_namespace(NAMESPACE)
        yield site


@pytest.fixture(scope="module")
def registry(
    site: Site, releases: tuple[Release, Release], keys: SigningKeys, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OciRegistry]:
    """A registry that nodes and Helm reach, with both releases."""
    assert site.real is not None
    host = urlsplit(site.real.cluster.server).hostname
    assert host is not None
    with OciRegistry(tmp_path_factory.mktemp("registry"), host) as registry:
        for release in releases:
            release.push(registry, keys)
        for node in site.nodes.values():
            node.runtime.trust_plain_http(registry.address)
        yield registry


def chart_of(registry: OciRegistry) -> str:
    return f"oci://{registry.address}/{PLACE}/{CHART_NAME}"


def wait_operator(site: Site, release: Release) -> None:
    """Until all pods of the operator are of a release. One that ends may lead: its roll-outs have its own images."""
    (deployment,) = site.client.list_all("Deployment", SYSTEM)
    site.client.wait_for("Deployment", deployment["metadata"]["name"], SYSTEM, until=is_available, timeout_s=180)
    poll(lambda: release.runs_in(site.client.list_all("Pod", SYSTEM)), timeout_s=60)


def restart(served: Served, release: Release) -> None:
    """Restart as `kubectl rollout restart` does: replica by replica, with what the operator of a release renders."""
    served.site.kubectl(
        "annotate", "hinf", NAME, f"--namespace={NAMESPACE}", f"{ANNOTATION_RESTARTED_AT}=to-{release.version}",
        "--overwrite",
    )  # fmt: skip
    served.wait(lambda _: release.runs_in(pods_of(served)))
    wait_replicas(served, 2)


@pytest.mark.timeout(1800)  # images are pushed, and pulled twice
def test_an_upgrade_and_a_rollback_fail_no_request(
    site: Site, registry: OciRegistry, releases: tuple[Release, Release], keys: SigningKeys, tmp_path: Path
) -> None:
    before, this = releases
    for release in releases:
        digest = read_archive(release.folder / "gateway.tar").digest
        assert registry.signed_identities(f"{PLACE}/gateway", digest, keys.public, tmp_path)
    began = time.monotonic()
    with install_operator(site, chart_of(registry), "--plain-http", f"--version={before.version}"):
        served = Served(site, NAMESPACE, NAME)
        served.apply(manifest(site, 2, routed=False))
        wait_replicas(served, 2)
        print(f"helm install from the registry, images pulled, two replicas serve: {time.monotonic() - began:.1f} s")
        texts = undisturbed(served)
        assert len(texts) == STREAMS
        assert before.runs_in(pods_of(served))
        upgrade = [chart_of(registry), "--plain-http", f"--version={this.version}"]

        def change() -> None:
            for command, release in ((["upgrade", RELEASE, *upgrade], this), (["rollback", RELEASE], before)):
                pods = restarts_of({pod["metadata"]["name"]: pod for pod in pods_of(served)})
                values = dict(site.chart_values) if release is this else None
                site.helm.run(*command, f"--namespace={SYSTEM}", values=values)
                wait_operator(site, release)
                wait_replicas(served, 2)
                assert restarts_of({pod["metadata"]["name"]: pod for pod in pods_of(served)}) == pods
                restart(served, release)
                assert release.runs_in(pods_of(served))

        check(disturbed(served, "upgrade", change), texts)
