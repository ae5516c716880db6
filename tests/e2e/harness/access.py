"""A test client from a kubeconfig, whoever wrote that: ours, or the one of a developer's own cluster."""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.support.kube.certificates import KeyPair
from tests.support.kube.client import Client
from tests.support.kube.errors import ProvisionFailed
from tests.support.kube.kubeconfigs import Credentials


@contextmanager
def client_of(kubeconfig: Path) -> Iterator[Client]:
    """A client as the kubeconfig's current context. Raises ProvisionFailed where that needs a program to log in."""
    with tempfile.TemporaryDirectory(prefix="hetero-access-") as folder, _client(kubeconfig, Path(folder)) as client:
        yield client


def _client(kubeconfig: Path, folder: Path) -> Client:
    config = yaml.safe_load(kubeconfig.read_text(encoding="utf-8"))
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    user = _named(config["users"], context["user"]).get("user") or {}
    if "exec" in user or "auth-provider" in user:
        raise ProvisionFailed(
            f"{kubeconfig} logs in with a program, which these tests cannot: make one with a token or a certificate"
        )
    ca = _file(cluster, "certificate-authority", kubeconfig, folder)
    certificate = _file(user, "client-certificate", kubeconfig, folder)
    key = _file(user, "client-key", kubeconfig, folder)
    pair = KeyPair(certificate, key) if certificate and key else None
    return Client(cluster["server"], Credentials(pair, user.get("token")), ca)


def _named(entries: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(entry for entry in entries if entry["name"] == name)


def _file(entry: dict[str, Any], name: str, kubeconfig: Path, folder: Path) -> Path | None:
    """What an entry holds as a file, inline or by path."""
    if inline := entry.get(f"{name}-data"):
        path = folder / name
        path.touch(mode=0o600)
        path.write_bytes(base64.b64decode(inline))
        return path
    return kubeconfig.parent / entry[name] if entry.get(name) else None
