"""Gives the operators of a test's namespace the rights that the chart gives to its operator, and no other.

So every test that runs an operator is a test of the chart's roles as well: a right that is missing there fails it. The
roles are the chart's as it renders them for that namespace; only who has them differs: a group, because the replicas of
a test are users with names of their own, so that the audit log tells them apart.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.support.helm import Helm, Object
from tests.support.kube.client import Client
from tests.support.kube.tools import find_helm

RELEASE: Final = "heteroinference"
"""With this name the chart's Lease has the operator's default name."""
_BINDINGS: Final = ("RoleBinding", "ClusterRoleBinding")


@contextmanager
def operators_of(client: Client, namespace: str, *, everywhere: bool = False) -> Iterator[str]:
    """A group whose members may, until the end, what the operator of a chart that is installed in a namespace may.

    They hold their Lease there, and look after that namespace or, with `everywhere`, after all.
    """
    group = f"operators-{namespace}"
    granted = _granted(namespace, [] if everywhere else [namespace], group)
    try:
        for item in granted:
            client.create(item)
        yield group
    finally:
        for item in granted:
            client.delete(item["kind"], item["metadata"]["name"], item["metadata"].get("namespace"))


def _granted(namespace: str, watched: Sequence[str], group: str) -> list[Object]:
    """The chart's bindings, to the group, and the roles that they are about."""
    with tempfile.TemporaryDirectory() as folder:
        helm = Helm(find_helm(4), Path(folder), major=4)
        objects = helm.template({"watchNamespaces": list(watched)}, release=RELEASE, namespace=namespace)
    bindings = [item for item in objects if item["kind"] in _BINDINGS]
    bound = {(item["roleRef"]["kind"], item["roleRef"]["name"]) for item in bindings}
    roles = [item for item in objects if (item["kind"], item["metadata"]["name"]) in bound]
    subject = {"kind": "Group", "name": group, "apiGroup": "rbac.authorization.k8s.io"}
    return [*roles, *({**item, "subjects": [subject]} for item in bindings)]
