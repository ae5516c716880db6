"""Fixtures of the tests that run on a real control plane. How it all works: tests/support/kube.

`cluster` is shared by all processes of a test run: API server, controllers, our CRD, no scheduler and no nodes, so that
a test plays scheduler and kubelet. A test sees only what it makes in its own `namespace`. A test that stops servers or
needs the cluster for itself takes `start_control_plane`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from tests.support.kube.binaries import Binaries, find_binaries
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster, discard_namespace
from tests.support.kube.control_plane import ControlPlane, Options
from tests.support.kube.flags import CONTROLLERS
from tests.support.kube.shared import shared_control_plane
from tests.support.operator_scene import Scene

ROOT = Path(__file__).parents[2]
CRD = ROOT / "charts/heteroinference/files/crd.yaml"
KIND = "HeteroInference"
OPTIONS = Options(crds=[CRD])

StartControlPlane = Callable[..., ControlPlane]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let processes that share the tests begin with those that take minutes, each with one of them and a short one.

    A test that begins last and takes five minutes is five minutes in which the others are done. Of those with a mark,
    some wait more than they compute: four that compute, at once, would keep API servers of two cores from answering.
    """
    if processes := getattr(config, "workerinput", {}).get("workercount", 0):
        items.sort(key=lambda item: -_minutes(item))
        longest, others = items[:processes], items[processes:]
        between, shortest = others[:-processes], others[-processes:]
        items[:] = [item for pair in zip_longest(longest, shortest) for item in pair if item is not None] + between


def _minutes(item: pytest.Item) -> float:
    """How long a test takes, as far as its mark `minutes` tells."""
    mark = item.get_closest_marker("minutes")
    return float(mark.args[0]) if mark else 0.0


@pytest.fixture(scope="session")
def binaries() -> Binaries:
    """Of the Kubernetes servers. Fails, saying what to run, when there are none."""
    return find_binaries()


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this test run have in common."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def cluster(run_folder: Path, binaries: Binaries) -> Iterator[Cluster]:
    """The shared control plane, without a scheduler."""
    with shared_control_plane(run_folder, "control-plane", binaries, OPTIONS) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def scheduling_cluster(run_folder: Path, binaries: Binaries) -> Iterator[Cluster]:
    """Another shared one, with scheduler and node controller, for fake nodes (tests.support.kube.nodes)."""
    options = replace(OPTIONS, scheduler=True, controllers=[*CONTROLLERS, "nodelifecycle"])
    with shared_control_plane(run_folder, "scheduling-control-plane", binaries, options) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def client(cluster: Cluster) -> Iterator[Client]:
    """The shared control plane's administrator."""
    with cluster.client() as client:
        yield client


@pytest.fixture
def namespace(cluster: Cluster, client: Client) -> Iterator[str]:
    """A fresh namespace of the shared control plane."""
    name = cluster.create_namespace(client)
    yield name
    discard_namespace(client, name, [KIND])


@pytest.fixture
def scene(cluster: Cluster, client: Client) -> Iterator[Scene]:
    """A fresh namespace of the shared control plane, for operators that look after it alone."""
    with Scene.of(cluster, client) as scene:
        yield scene


@pytest.fixture
def start_control_plane(tmp_path: Path, binaries: Binaries) -> Iterator[StartControlPlane]:
    """Starts a control plane of the test's own, `start_control_plane(**changes of OPTIONS)`; it ends with the test."""
    with ExitStack() as stack:
        count = 0

        def start(**changes: Any) -> ControlPlane:
            nonlocal count
            count += 1
            options = replace(OPTIONS, **changes)
            return stack.enter_context(ControlPlane(tmp_path / f"control-plane-{count}", binaries, options))

        yield start
