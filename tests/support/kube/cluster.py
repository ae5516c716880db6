"""A running control plane as its users see it: an address, certificates, identities, the audit log.

It is all in one folder, so that any process that shares the control plane can open it; nothing here starts or stops
anything (that is control_plane.py).
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.support.kube.audit import AuditLog
from tests.support.kube.certificates import Authority, KeyPair
from tests.support.kube.client import Client, Object
from tests.support.kube.errors import ApiError
from tests.support.kube.keeper import RECORD
from tests.support.kube.kubeconfigs import Credentials, write_kubeconfig
from tests.support.kube.polling import poll
from tests.support.kube.versions import Version

ADMIN = "admin"
TOKEN_LIFETIME_S = 3600
NAMESPACE_READY_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Cluster:
    """A control plane in `folder` that listens at `server` (https)."""

    folder: Path
    server: str
    version: Version
    has_controllers: bool
    """Whether a controller manager runs."""

    @property
    def pki(self) -> Path:
        return self.folder / "pki"

    @property
    def ca_file(self) -> Path:
        return self.pki / "ca.crt"

    @property
    def admin(self) -> Credentials:
        """Of a member of system:masters, to whom everything is allowed."""
        return Credentials(KeyPair(self.pki / f"{ADMIN}.crt", self.pki / f"{ADMIN}.key"))

    @property
    def admin_kubeconfig(self) -> Path:
        return self.folder / f"{ADMIN}.kubeconfig"

    @property
    def audit(self) -> AuditLog:
        """What the API server was asked, by whom."""
        return AuditLog(self.folder / "audit.log", self.client)

    def client(self, credentials: Credentials | None = None) -> Client:
        """A new client, the administrator's unless said otherwise; close it."""
        return Client(self.server, credentials or self.admin, self.ca_file)

    def user(self, name: str, groups: Sequence[str] = ()) -> Credentials:
        """A client certificate of a user, who may do what RBAC says of the name and the groups."""
        stem = f"user-{re.sub('[^A-Za-z0-9]', '-', name)}-{uuid.uuid4().hex[:8]}"
        pair = Authority(self.pki).issue(stem, common_name=name, organizations=groups, usage="clientAuth")
        return Credentials(pair)

    def service_account(self, name: str, namespace: str, *, lifetime_s: int = TOKEN_LIFETIME_S) -> Credentials:
        """A token of an existing ServiceAccount, as a pod would be given one."""
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": lifetime_s, "audiences": []},
        }
        with self.client() as client:
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
            return Credentials(token=client.request("POST", path, request)["status"]["token"])

    def kubeconfig(self, credentials: Credentials, *, server: str | None = None, namespace: str | None = None) -> Path:
        """A new kubeconfig file. `server` may be a proxy in front of this cluster; a plain-http one needs no CA."""
        url = server or self.server
        return write_kubeconfig(
            self.folder / "kubeconfigs" / f"{uuid.uuid4().hex[:12]}.yaml",
            server=url,
            credentials=credentials,
            ca_file=self.ca_file if url.startswith("https://") else None,
            namespace=namespace,
        )

    def create_namespace(self, client: Client, prefix: str = "test") -> str:
        """A namespace in which pods can be made at once: its default ServiceAccount is there."""
        name = f"{prefix}-{uuid.uuid4().hex[:10]}"
        client.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        if self.has_controllers:
            poll(
                lambda: self._service_account_usable(client.find("ServiceAccount", "default", name)),
                timeout_s=NAMESPACE_READY_TIMEOUT_S,
                describe=lambda: f"namespace {name} has no usable default ServiceAccount",
            )
        return name

    def _service_account_usable(self, account: Object | None) -> bool:
        # Before 1.24 admission refuses pods until the account has a token Secret.
        return account is not None and (self.version >= Version(1, 24, 0) or bool(account.get("secrets")))

    def save(self) -> None:
        """Leave the record for other processes."""
        record = {**asdict(self), "folder": str(self.folder), "version": str(self.version)}
        (self.folder / RECORD).write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Cluster:
        """The cluster of a folder in which a control plane was started."""
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return cls(folder, record["server"], Version.parse(record["version"]), record["has_controllers"])


def discard_namespace(client: Client, name: str, kinds: Sequence[str] = ()) -> None:
    """Delete a namespace without waiting for its end, but the objects of `kinds` and the pods in it at once.

    Nobody plays kubelet any more, so pods are deleted without grace.
    """
    for kind in (*kinds, "Pod"):
        try:
            client.delete_all(kind, name, grace_s=0)
        except ApiError as refusal:
            if refusal.code != 404:
                raise
    client.delete("Namespace", name)
