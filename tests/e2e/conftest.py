"""Fixtures of the end-to-end tests.

One cluster, one installed chart and mostly one resource serve the whole run, in the order in which a new user would
meet things; see site.py for the environment and harness/ for the nodes.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.e2e.served import Served, cpu_manifest, is_true
from tests.e2e.site import Site, open_site
from tests.support.helm import CHART
from tests.support.kube.client import Object

# As a user comes to them; a module that ends with an empty cluster stands before those that need one.
ORDER = (
    "test_images",
    "test_replicas",  # on nodes of its own, which are gone when the others' are made
    "test_upgrading",
    "test_janitor",
    "test_harness",
    "test_installing",
    "test_serving",
    "test_image_contents",
    "test_faults",
    "test_deleting",
    "test_one_pod",
    "test_gpu_pods",
    "test_cpu_policy",
)
TIMEOUT_S = 900
SYSTEM = "hetero-system"
RELEASE = "hetero"
NAMESPACE = "models"
NAME = "smollm2"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In ORDER, with time for machines of two cores."""
    ours = [item for item in items if Path(item.fspath).parent == Path(__file__).parent]
    for item in ours:
        item.add_marker(pytest.mark.timeout(TIMEOUT_S))
    ranks = {name: rank for rank, name in enumerate(ORDER)}
    places = [index for index, item in enumerate(items) if item in set(ours)]
    for place, item in zip(
        places, sorted(ours, key=lambda item: ranks.get(Path(item.fspath).stem, len(ORDER))), strict=True
    ):
        items[place] = item


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Site]:
    """The cluster. What it had and said at the end is kept when a test failed."""
    with open_site(os.environ, tmp_path_factory.mktemp("e2e"), smollm2) as site:
        try:
            yield site
        finally:
            site.keep("at-the-end.txt", overview(site))


@pytest.fixture(scope="session")
def operator(site: Site) -> Iterator[str]:
    """`helm install` of the chart; the name of the operator's Deployment, which is available."""
    with install_operator(site) as name:
        yield name


@contextmanager
def install_operator(site: Site, chart: str | Path = CHART, *options: str) -> Iterator[str]:
    """`helm install` of a chart; the name of the operator's Deployment, which is available."""
    site.helm.run(
        "install", RELEASE, chart, f"--namespace={SYSTEM}", "--create-namespace", *options,
        values=dict(site.chart_values),
    )  # fmt: skip
    (deployment,) = site.client.list_all("Deployment", SYSTEM)
    name = deployment["metadata"]["name"]
    with ExitStack() as stack:
        if not site.nodes:  # ours go as a whole
            stack.callback(site.helm.run, "uninstall", RELEASE, f"--namespace={SYSTEM}")
        site.client.wait_for("Deployment", name, SYSTEM, until=is_available, timeout_s=180)
        yield name


@pytest.fixture(scope="session")
def namespace(site: Site) -> Iterator[str]:
    """Where the resources are; on somebody else's cluster the one that is named, or one that is surely new."""
    if not site.nodes and (named := site.environment.get("HETERO_E2E_NAMESPACE")):
        yield named
        return
    name = site.create_namespace(NAMESPACE if site.nodes else f"hetero-e2e-{secrets.token_hex(3)}")
    yield name
    if not site.nodes:
        site.client.delete("Namespace", name)


@pytest.fixture(scope="session")
def first(site: Site, operator: str, namespace: str) -> Served:
    """The resource that most tests are about; applied by whichever needs it first."""
    served = Served(site, namespace, NAME)
    if site.client.find("HeteroInference", NAME, namespace) is None:
        served.apply(cpu_manifest(site, NAME))
    return served


@pytest.fixture
def served(first: Served) -> Served:
    """The same, as it serves."""
    if not is_true(first.object, "Ready"):
        first.wait_ready()
    return first


def is_available(deployment: Object) -> bool:
    """Whether all pods that are wanted are ready, and seen to be."""
    status = deployment.get("status", {})
    wanted = deployment["spec"]["replicas"]
    return bool(
        status.get("observedGeneration") == deployment["metadata"]["generation"]
        and status.get("availableReplicas", 0) == wanted
        and status.get("replicas", 0) == wanted
        and status.get("updatedReplicas", 0) == wanted
    )


def overview(site: Site) -> str:
    """Everything that one asks for first when something went wrong."""
    asked = (
        ("get", "nodes", "-o", "wide"),
        ("get", "hinf,pods", "-A", "-o", "wide"),
        ("describe", "hinf", "-A"),
        ("get", "events", "-A", "--sort-by=.lastTimestamp"),
        ("logs", f"--namespace={SYSTEM}", "--prefix", "--tail=200", "-l", "app.kubernetes.io/component=operator"),
        ("logs", f"--namespace={NAMESPACE}", "--prefix", "--tail=80", "-l", "app.kubernetes.io/name=heteroinference"),
    )
    return "\n".join(f"### kubectl {' '.join(command)}\n{answer_of(site, command)}" for command in asked)


def answer_of(site: Site, command: tuple[str, ...]) -> str:
    """kubectl's answer, or why there is none: an overview must not fail."""
    try:
        return site.kubectl(*command)
    except Exception as error:
        return f"{error}: {getattr(error, '__notes__', '')}\n"
