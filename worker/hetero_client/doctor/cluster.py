"""Snapshot of a cluster, as far as groups depend on it, which `cluster_checks` judges.

kubectl asks, so that the kubeconfig's plugins and proxies work as they do for the user, with the user's rights. What
these rights do not allow is a problem of that answer alone.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote

from hetero_api.contract import GROUP, PLURAL

KUBECTL: Final = "kubectl"
OPERATOR_LABELS: Final = "app.kubernetes.io/name=heteroinference-operator,app.kubernetes.io/component=operator"
"""Labels of the chart's Deployment."""
DEFINITION: Final = f"{PLURAL}.{GROUP}"
_VERSION_PATH: Final = "/version"
_DEFINITION_PATH: Final = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{DEFINITION}"
_OPERATORS_PATH: Final = f"/apis/apps/v1/deployments?labelSelector={quote(OPERATOR_LABELS)}"
_NODES_PATH: Final = "/api/v1/nodes"
_TIMEOUT_S: Final = 20.0
_AT_ONCE: Final = 8
"""Kubelets that are asked at a time."""
_NOT_FOUND: Final = "(NotFound)"

Object = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of the API server: an object, or why there is none."""

    found: Object | None = None
    problem: str = ""

    @property
    def is_missing(self) -> bool:
        """True if the server says that there is no such object."""
        return _NOT_FOUND in self.problem

    @property
    def items(self) -> Sequence[Object]:
        """Objects of a list; none without an answer."""
        items: Sequence[Object] = (self.found or {}).get("items", ())
        return items


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster, as this user sees it."""

    version: Answer
    definition: Answer
    """The CustomResourceDefinition."""
    operators: Answer
    """Deployments of operators, in all namespaces."""
    nodes: Answer
    kubelets: Mapping[str, Answer]
    """Configuration of each node's kubelet, by the node's name."""


Get = Callable[[str], Answer]


def read_cluster(get: Get) -> Cluster:
    """Ask for everything. `get` answers a path of the API server, from several threads."""
    version = get(_VERSION_PATH)
    if version.found is None:
        return Cluster(version, version, version, version, {})
    nodes = get(_NODES_PATH)
    names = [node["metadata"]["name"] for node in nodes.items]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        configurations = pool.map(get, (f"{_NODES_PATH}/{quote(name)}/proxy/configz" for name in names))
        kubelets = dict(zip(names, configurations, strict=True))
    return Cluster(version, get(_DEFINITION_PATH), get(_OPERATORS_PATH), nodes, kubelets)


def kubectl(context: str | None) -> Get:
    """Return a function that asks the kubeconfig's cluster, that of another `context` if one is given."""
    options = () if context is None else ("--context", context)

    def get(path: str) -> Answer:
        program = shutil.which(KUBECTL)
        if program is None:
            return Answer(problem=f"there is no {KUBECTL} on PATH")
        command = (program, *options, "get", "--raw", path)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            return Answer(problem=f"no answer within {_TIMEOUT_S:g} s")
        if done.returncode:
            return Answer(problem=(done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1])
        return _parsed(done.stdout)

    return get


def _parsed(text: str) -> Answer:
    try:
        data = json.loads(text)
    except ValueError:
        data = None
    return Answer(data) if isinstance(data, dict) else Answer(problem="the answer is no JSON object")
