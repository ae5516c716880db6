"""Kubeconfig files with everything inside them, so that they can be moved and handed to any program."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.support.kube.certificates import KeyPair


@dataclass(frozen=True, slots=True)
class Credentials:
    """How a caller proves who it is: a client certificate, a bearer token, or neither (anonymous)."""

    certificate: KeyPair | None = None
    token: str | None = None

    def user_entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {}
        if self.certificate is not None:
            entry["client-certificate-data"] = _encoded(self.certificate.certificate)
            entry["client-key-data"] = _encoded(self.certificate.key)
        if self.token is not None:
            entry["token"] = self.token
        return entry


def write_kubeconfig(
    path: Path, *, server: str, credentials: Credentials, ca_file: Path | None, namespace: str | None = None
) -> Path:
    """One cluster, one user, one context. `ca_file` is None for a plain-http server."""
    cluster = {"server": server}
    if ca_file is not None:
        cluster["certificate-authority-data"] = _encoded(ca_file)
    context = {"cluster": "test", "user": "test"}
    if namespace is not None:
        context["namespace"] = namespace
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": credentials.user_entry()}],
        "contexts": [{"name": "test", "context": context}],
        "current-context": "test",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    path.chmod(0o600)
    return path


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
