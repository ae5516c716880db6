"""Carries out a plan: creates, applies, deletes, in this order, and reports refusals.

The operator never takes over an object of somebody else: before it writes anything, it reads every object that the
cache lacks by name. If one exists without our label, nothing at all is written. Known objects are written with the uid
that was seen (metadata.uid; uid preconditions), so a stale cache does no harm. Answers go to the cache at once, and the
next look sees them. Workloads are not written when an object failed that their pods need. Pods are deleted only if
everything before went well, because they are created again from templates that must be the new ones.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final

from hetero_api.contract import LABEL_NAME
from hetero_operator.authority import inside_certificates
from hetero_operator.cluster.cache import ClusterCache
from hetero_operator.cluster.inquiries import SecretBook
from hetero_operator.cluster.kinds import kind_of
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, Conflict, NotFound, Refused, Unreachable
from hetero_operator.reconcile.differences import needs_apply
from hetero_operator.reconcile.inventory import label_of, taken_by_others
from hetero_operator.reconcile.model import (
    Deletion,
    FailureKind,
    NewSecret,
    Object,
    ObjectRef,
    Outcome,
    Plan,
    WriteFailure,
)
from hetero_operator.timing import now_utc

logger = logging.getLogger(__name__)

TOKEN_BYTES: Final = 32
_WORKLOADS: Final = frozenset({"StatefulSet", "Deployment"})
_NEEDED: Final = frozenset({"Secret", "ServiceAccount", "ConfigMap", "ResourceClaimTemplate", "StatefulSet"})
"""Kinds without which the pods of a workload that is written after them cannot start, or find no ranks."""


class PlanExecution:
    """The execution of one plan of one resource."""

    def __init__(self, api: Transport, cache: ClusterCache, book: SecretBook, owner: Key) -> None:
        self._api = api
        self._cache = cache
        self._book = book
        self._owner = owner
        self._failures: list[WriteFailure] = []
        self._retry_after_s = 0.0
        self._halted = False

    async def carry_out(self, plan: Plan) -> Outcome:
        """Write the plan, unless an object comes up that the cache lacks, or that belongs to somebody else.

        Raises NotLeading; refusals of the API server are in the outcome.
        """
        if await self._discovered(plan):
            return Outcome(stale=True)
        if not self._failures:
            await self._write(plan)
        return Outcome(tuple(self._failures), retry_after_s=self._retry_after_s)

    async def _write(self, plan: Plan) -> None:
        for secret in plan.create:
            await self._create(secret)
        for manifest in plan.apply:
            await self._apply(manifest)
        for deletion in plan.delete if not self._failures else ():
            await self._delete(deletion)

    async def _discovered(self, plan: Plan) -> bool:
        """Read objects that the cache lacks. Return whether one of ours came up."""
        manifests = [*(secret.manifest for secret in plan.create), *plan.apply]
        unseen = [ref for ref in map(ObjectRef.from_object, manifests) if self._known(ref) is None]
        return any(await asyncio.gather(*(self._look(ref) for ref in unseen)))

    async def _look(self, ref: ObjectRef) -> bool:
        """Return whether the object is there and ours. One of somebody else is a failure."""
        try:
            found = await self._api.get(self._path(ref))
        except NotFound:
            return False
        except ApiError as error:
            self._failed(ref, error)
            return False
        if label_of(found, LABEL_NAME) != self._owner.name:
            self._failures.append(WriteFailure(ref, FailureKind.FOREIGN, taken_by_others(ref)))
            return False
        return self._remember(ref, found)

    async def _create(self, secret: NewSecret) -> None:
        ref = ObjectRef.from_object(secret.manifest)
        try:
            values = await self._values(ref, secret)
            made = await self._api.create(kind_of(ref).path(self._owner.namespace), {**secret.manifest, "data": values})
        except Conflict:
            # Since we looked, someone made it: it is either ours or a stranger's, which the next look will tell.
            self._failures.append(WriteFailure(ref, FailureKind.TRANSIENT, f"{ref.kind} {ref.name} came up meanwhile"))
            await self._see_again(ref)
        except ApiError as error:
            self._failed(ref, error)
        else:
            self._remember(ref, made)
            self._book.replaced.get(self._owner, {}).pop(ref.name, None)

    async def _values(self, ref: ObjectRef, secret: NewSecret) -> dict[str, str]:
        """Make up the values of a Secret; the one that it renews is deleted. Raises ApiError.

        An operator may create and delete Secrets, and change none. Pods keep the files of one that is gone.
        """
        values = {key: secrets.token_urlsafe(TOKEN_BYTES).encode() for key in secret.generated_keys}
        if secret.gateway_names:
            replaced = self._book.replaced.setdefault(self._owner, {})
            if secret.renews:
                replaced[ref.name] = await self._data_of(ref) or replaced.get(ref.name, {})
            stored = replaced.get(ref.name, {})
            values |= await asyncio.to_thread(inside_certificates, secret.gateway_names, now_utc(), stored)
        if secret.renews:
            await self._make_way(ref, secret.renews)
        return {key: base64.b64encode(value).decode() for key, value in values.items()}

    async def _data_of(self, ref: ObjectRef) -> dict[str, bytes]:
        """Return the data of a Secret, {} if it is gone. Raises ApiError."""
        try:
            found = await self._api.get(self._path(ref))
        except NotFound:
            return {}
        return {key: base64.b64decode(value) for key, value in (found.get("data") or {}).items()}

    async def _make_way(self, ref: ObjectRef, uid: str) -> None:
        """Delete an object, if it still is the one of that uid. Raises ApiError."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": {"uid": uid}}
        with suppress(NotFound):
            await self._api.delete(self._path(ref), options)
        self._store(ref).bury(self._owner.namespace, ref.name, uid)

    async def _apply(self, manifest: Object) -> None:
        ref = ObjectRef.from_object(manifest)
        if self._halted or (ref.kind in _WORKLOADS and self._lacks_something()):
            return
        known = self._known(ref)
        if known is not None:
            manifest = {**manifest, "metadata": {**manifest["metadata"], "uid": known}}
        try:
            stored = await self._api.apply(self._path(ref), manifest)
            self._remember(ref, stored)
            if needs_apply(manifest, stored) and self._cache.note_admitted(manifest, stored):
                logger.warning(
                    "%s %s/%s was written and is stored otherwise: the cluster's admission changes it, and it stays so",
                    ref.kind, self._owner.namespace, ref.name,
                )  # fmt: skip
        except Conflict as error:
            self._failed(ref, error)
            await self._see_again(ref)
        except ApiError as error:
            self._failed(ref, error)

    def _lacks_something(self) -> bool:
        """Return whether a write failed that pods depend on: new ones could not start, so the old ones have to stay."""
        return any(failure.ref.kind in _NEEDED for failure in self._failures)

    async def _delete(self, deletion: Deletion) -> None:
        if self._halted:
            return
        options: dict[str, Any] = {
            "apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background",
            "preconditions": {"uid": deletion.uid},
        }  # fmt: skip
        if deletion.grace_period_s is not None:
            options["gracePeriodSeconds"] = deletion.grace_period_s
        try:
            answer = await self._api.delete(self._path(deletion.ref), options)
        except NotFound:
            self._bury(deletion)
        except Conflict as error:
            self._failed(deletion.ref, error)
            await self._see_again(deletion.ref)
        except ApiError as error:
            self._failed(deletion.ref, error)
        else:
            ref, namespace = deletion.ref, self._owner.namespace
            logger.info("deleted %s %s/%s: %s", ref.kind, namespace, ref.name, deletion.reason)
            if answer.get("kind") == "Status" or deletion.grace_period_s == 0:
                self._bury(deletion)
            else:
                self._remember(deletion.ref, answer)

    async def _see_again(self, ref: ObjectRef) -> None:
        """Read an object that the cache was wrong about, for the watch may take a while."""
        try:
            self._remember(ref, await self._api.get(self._path(ref)))
        except NotFound:
            self._store(ref).discard(self._owner.namespace, ref.name)
        except ApiError as error:
            logger.debug("%s %s cannot be looked at: %s", ref.kind, ref.name, error)

    def _known(self, ref: ObjectRef) -> str | None:
        """Return the uid of the object that was seen, None if there is none."""
        entry = self._store(ref).entry(self._owner.namespace, ref.name)
        return None if entry is None else entry.uid

    def _remember(self, ref: ObjectRef, found: Mapping[str, Any]) -> bool:
        """Put an answer into the cache. Return whether it was news."""
        return bool(label_of(found, LABEL_NAME)) and self._store(ref).put(found) is not None

    def _bury(self, deletion: Deletion) -> None:
        self._store(deletion.ref).bury(self._owner.namespace, deletion.ref.name, deletion.uid)

    def _store(self, ref: ObjectRef) -> ObjectStore:
        return self._book.store if ref.kind == "Secret" else self._cache.store(ref)

    def _path(self, ref: ObjectRef) -> str:
        return kind_of(ref).path(self._owner.namespace, ref.name)

    def _failed(self, ref: ObjectRef, error: ApiError) -> None:
        self._failures.append(WriteFailure(ref, failure_kind(error), error.message))
        self._retry_after_s = max(self._retry_after_s, error.retry_after_s)
        # Where nobody answers, or says to come back later, the rest would only be refused as well.
        self._halted = self._halted or isinstance(error, Unreachable) or error.status in (429, 503)


def failure_kind(error: ApiError) -> FailureKind:
    """Return what an error of a write means for the next attempt."""
    if error.status == 403:
        return FailureKind.FORBIDDEN
    return FailureKind.INVALID if isinstance(error, Refused) else FailureKind.TRANSIENT


def any_transient(failures: Iterable[WriteFailure]) -> bool:
    """Return whether trying again soon may cure one of the failures."""
    return any(failure.kind is FailureKind.TRANSIENT for failure in failures)
