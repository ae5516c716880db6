"""A small synchronous client for tests: objects are the plain dictionaries that manifests are.

It knows nothing of the operator's own client, so that a test never checks code with itself, and it validates nothing
before the server does. Kinds are named as discovery.py says. Thread-safe.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self
from urllib.parse import urlencode

import urllib3
import yaml

from tests.support.kube.discovery import Discovery, ResourceType
from tests.support.kube.errors import ApiError, Conflict, NotFound
from tests.support.kube.kubeconfigs import Credentials
from tests.support.kube.polling import poll

Object = dict[str, Any]
PatchType = Literal["merge", "json", "strategic"]
Propagation = Literal["Background", "Foreground", "Orphan"]

FIELD_MANAGER = "test"
REQUEST_TIMEOUT_S = 30.0
WAIT_TIMEOUT_S = 20.0
PATCH_CONTENT: Mapping[str, str] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "apply": "application/apply-patch+yaml",
}
ERRORS: Mapping[int, type[ApiError]] = {404: NotFound, 409: Conflict}


class Client:
    """Calls one API server as one user."""

    def __init__(self, server: str, credentials: Credentials, ca_file: Path | None = None) -> None:
        self.server = server
        self._token = credentials.token
        pair = credentials.certificate
        self._pool = urllib3.PoolManager(
            maxsize=16,
            ca_certs=None if ca_file is None else str(ca_file),
            cert_file=None if pair is None else str(pair.certificate),
            key_file=None if pair is None else str(pair.key),
            retries=False,
            timeout=REQUEST_TIMEOUT_S,
        )
        self.discovery = Discovery(lambda path: self.request("GET", path))

    def close(self) -> None:
        """Give the connections back."""
        self._pool.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def request(
        self, method: str, path: str, body: Any = None, *, content: str = "application/json", **query: object
    ) -> Object:
        """Any call; the answer's object. Raises ApiError (NotFound, Conflict); urllib3 errors where nobody answers."""
        answer: Object = json.loads(self.request_text(method, path, body, content=content, **query) or "{}")
        return answer

    def request_text(
        self, method: str, path: str, body: Any = None, *, content: str = "application/json", **query: object
    ) -> str:
        """Like `request`, for answers that are not JSON, as /healthz or /metrics."""
        asked = {key: value for key, value in query.items() if value is not None}
        url = f"{self.server}{path}" + (f"?{urlencode(asked)}" if asked else "")
        headers = {"Accept": "application/json, */*", "Content-Type": content}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        answer = self._pool.request(method, url, body=data, headers=headers)
        text = answer.data.decode()
        if answer.status >= 400:
            raise ERRORS.get(answer.status, ApiError)(answer.status, f"{method} {path}", _status(text))
        return text

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """One object. Raises NotFound."""
        return self.request("GET", self._path(kind, namespace, name))

    def find(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """One object, or None."""
        try:
            return self.get(kind, name, namespace)
        except NotFound:
            return None

    def list_all(
        self, kind: str, namespace: str | None = None, *, labels: str | None = None, fields: str | None = None
    ) -> list[Object]:
        """All objects of a kind, in one namespace or in all. Selectors as kubectl takes them."""
        resource = self.discovery.resolve(kind)
        answer = self.request("GET", resource.path(namespace), labelSelector=labels, fieldSelector=fields)
        return [{"apiVersion": resource.api_version, "kind": resource.kind, **item} for item in answer["items"]]

    def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """POST; the created object."""
        path = self._type_of(manifest).path(_namespace_of(manifest))
        return self.request("POST", path, manifest, fieldManager=FIELD_MANAGER, dryRun="All" if dry_run else None)

    def apply(
        self, manifest: Object, *, manager: str = FIELD_MANAGER, force: bool = True, dry_run: bool = False
    ) -> Object:
        """Server-side apply. Raises Conflict when another manager owns a field and `force` is off."""
        path = self._type_of(manifest).path(_namespace_of(manifest), manifest["metadata"]["name"])
        return self.request(
            "PATCH",
            path,
            manifest,
            content=PATCH_CONTENT["apply"],
            fieldManager=manager,
            force=str(force).lower(),
            dryRun="All" if dry_run else None,
        )

    def apply_file(self, path: Path, *, namespace: str | None = None) -> list[Object]:
        """Apply every document of a YAML file, into `namespace` where one is given."""
        applied = []
        for manifest in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if manifest is None:
                continue
            if namespace is not None and self._type_of(manifest).namespaced:
                manifest["metadata"]["namespace"] = namespace
            applied.append(self.apply(manifest))
        return applied

    def replace(self, manifest: Object, *, subresource: str | None = None) -> Object:
        """PUT; refused with Conflict when the manifest's resourceVersion is old."""
        path = self._type_of(manifest).path(_namespace_of(manifest), manifest["metadata"]["name"], subresource)
        return self.request("PUT", path, manifest, fieldManager=FIELD_MANAGER)

    def patch(
        self,
        kind: str,
        name: str,
        body: Any,
        namespace: str | None = None,
        *,
        subresource: str | None = None,
        type: PatchType = "merge",
    ) -> Object:
        """PATCH; a merge patch unless said otherwise."""
        path = self._path(kind, namespace, name, subresource)
        return self.request("PATCH", path, body, content=PATCH_CONTENT[type], fieldManager=FIELD_MANAGER)

    def patch_status(self, kind: str, name: str, status: Object, namespace: str | None = None) -> Object:
        """Merge into the status subresource."""
        return self.patch(kind, name, {"status": status}, namespace, subresource="status")

    def delete(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        propagation: Propagation = "Background",
        grace_s: int | None = None,
    ) -> None:
        """Ask for deletion; nothing is wrong when it is gone already."""
        options = _delete_options(propagation, grace_s)
        try:
            self.request("DELETE", self._path(kind, namespace, name), options)
        except NotFound:
            return

    def delete_all(
        self, kind: str, namespace: str | None, *, labels: str | None = None, grace_s: int | None = None
    ) -> None:
        """Delete a collection."""
        path = self._path(kind, namespace)
        self.request("DELETE", path, _delete_options("Background", grace_s), labelSelector=labels)

    def wait_for(
        self,
        kind: str,
        name: str,
        namespace: str | None = None,
        *,
        until: Callable[[Object], bool] = lambda found: True,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> Object:
        """The object, once it exists and `until` holds of it; fails showing it as it was last."""
        last: Object | None = None

        def probe() -> Object | None:
            nonlocal last
            last = self.find(kind, name, namespace)
            return last if last is not None and until(last) else None

        return poll(probe, timeout_s=timeout_s, describe=lambda: f"{kind} {name}: {_shown(last)}")

    def wait_list(
        self,
        kind: str,
        namespace: str | None = None,
        *,
        until: Callable[[list[Object]], bool],
        labels: str | None = None,
        timeout_s: float = WAIT_TIMEOUT_S,
    ) -> list[Object]:
        """The objects of a kind, once `until` holds of the list."""
        last: list[Object] = []

        def probe() -> tuple[list[Object]] | None:
            nonlocal last
            last = self.list_all(kind, namespace, labels=labels)
            return (last,) if until(last) else None

        (found,) = poll(probe, timeout_s=timeout_s, describe=lambda: f"{kind}: {_shown(last)}")
        return found

    def wait_gone(
        self, kind: str, name: str, namespace: str | None = None, *, timeout_s: float = WAIT_TIMEOUT_S
    ) -> None:
        """Until the object does not exist."""
        last: Object | None = None

        def probe() -> bool:
            nonlocal last
            last = self.find(kind, name, namespace)
            return last is None

        poll(probe, timeout_s=timeout_s, describe=lambda: f"{kind} {name} is still there: {_shown(last)}")

    def create_or_replace(self, manifest: Object) -> Object:
        """The object as the manifest says, whoever owned its fields, whoever writes to it meanwhile."""
        kind, name = f"{manifest['apiVersion']}/{manifest['kind']}", manifest["metadata"]["name"]

        def attempt() -> Object | None:
            existing = self.get(kind, name, _namespace_of(manifest))
            metadata = {**manifest["metadata"], "resourceVersion": existing["metadata"]["resourceVersion"]}
            try:
                return self.replace({**manifest, "metadata": metadata})
            except Conflict:
                return None

        try:
            return self.create(manifest)
        except Conflict:
            return poll(attempt, timeout_s=WAIT_TIMEOUT_S, describe=lambda: f"{kind} {name} is written without end")

    def install_crd(self, path: Path) -> list[str]:
        """Create or replace a file's CustomResourceDefinitions and wait until they are served; their names.

        Not by server-side apply, which refuses fields that the server does not know: before 1.25 the CEL rules.
        """
        documents = yaml.safe_load_all(path.read_text(encoding="utf-8"))
        names = [self.create_or_replace(crd)["metadata"]["name"] for crd in documents if crd is not None]
        for name in names:
            self.wait_for("CustomResourceDefinition", name, until=is_established)
        return names

    def _path(self, kind: str, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        return self.discovery.resolve(kind).path(namespace, name, subresource)

    def _type_of(self, manifest: Object) -> ResourceType:
        return self.discovery.resolve(f"{manifest['apiVersion']}/{manifest['kind']}")


def condition(found: Object, type: str) -> Object | None:
    """The condition of a type in an object's status."""
    conditions = found.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one["type"] == type), None)


def is_established(crd: Object) -> bool:
    """Whether a CustomResourceDefinition is served."""
    established = condition(crd, "Established")
    return established is not None and established["status"] == "True"


def _namespace_of(manifest: Object) -> str | None:
    namespace: str | None = manifest["metadata"].get("namespace")
    return namespace


def _delete_options(propagation: Propagation, grace_s: int | None) -> Object:
    options: Object = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": propagation}
    return options if grace_s is None else {**options, "gracePeriodSeconds": grace_s}


def _status(text: str) -> Object:
    try:
        status = json.loads(text)
    except ValueError:
        return {"message": text}
    return status if isinstance(status, dict) else {"message": text}


def _shown(found: Any) -> str:
    return yaml.safe_dump(found, sort_keys=False)[-6000:]
