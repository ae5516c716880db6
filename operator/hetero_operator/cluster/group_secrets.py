"""The groups' Secrets, which are read one by one and by name, and never listed.

Whoever may list Secrets may read all of them; the operator needs a few, whose names it knows. So nothing watches them:
an answer is believed for a while, and read again sooner when pods of the resource wait for something. Metadata are
kept, values are not; the admin's token of a revision is kept apart.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from hetero_api.contract import LABEL_NAME, LABEL_REVISION, SECRET_ADMIN_TOKEN_KEY
from hetero_operator.cluster.kinds import SECRET
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import NotFound
from hetero_operator.reconcile.names import Names

BELIEVED_S: Final = 300.0
DOUBTED_S: Final = 20.0

Object = dict[str, Any]


class SecretBook:
    """Metadata of the groups' Secrets, and the admin token of each resource."""

    def __init__(self, api: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.store = ObjectStore(SECRET, secret_fields=("data", "stringData"))
        self._api = api
        self._clock = clock
        self._asked: dict[Key, dict[str, float]] = {}
        self._tokens: dict[Key, tuple[str, str, str]] = {}

    async def secrets_of(self, owner: Key, objects: Iterable[Object], *, doubt: bool) -> list[Object]:
        """Return the Secrets of all revisions that the resource's objects and pods have. Raises ApiError."""
        names = {Names(owner.name).group_secret(revision) for revision in _revisions(objects)}
        known = [item["metadata"]["name"] for item in self.store.owned_by(owner)]
        # What is kept and was never asked for is an answer to a write of ours.
        asked = dict.fromkeys(known, self._clock()) | self._asked.get(owner, {})
        names.update(known)
        for name in sorted(names):
            if self._clock() - asked.get(name, -math.inf) > (DOUBTED_S if doubt else BELIEVED_S):
                await self._refresh(Key(owner.namespace, name))
                asked[name] = self._clock()
        self._asked[owner] = {name: moment for name, moment in asked.items() if name in names}
        return self.store.owned_by(owner)

    async def admin_token(self, owner: Key, revision: str) -> str:
        """Return the token that a gateway of that revision asks its administrator for, "" if there is none.

        Raises ApiError.
        """
        name = Names(owner.name).group_secret(revision)
        entry = self.store.entry(owner.namespace, name)
        known = self._tokens.get(owner)
        if entry is not None and known is not None and known[:2] == (name, entry.version):
            return known[2]
        try:
            found = await self._api.get(SECRET.path(owner.namespace, name))
        except NotFound:
            return ""
        token = base64.b64decode((found.get("data") or {}).get(SECRET_ADMIN_TOKEN_KEY, "")).decode()
        self._tokens[owner] = (name, found["metadata"]["resourceVersion"], token)
        return token

    def forget_resource(self, owner: Key) -> None:
        """Drop everything about a resource that is gone."""
        self._asked.pop(owner, None)
        self._tokens.pop(owner, None)
        for item in self.store.owned_by(owner):
            self.store.discard(owner.namespace, item["metadata"]["name"])

    async def _refresh(self, key: Key) -> None:
        try:
            found = await self._api.get(SECRET.path(*key))
        except NotFound:
            self.store.discard(*key)
            return
        if LABEL_NAME in (found["metadata"].get("labels") or {}):
            self.store.put(found)


def _revisions(objects: Iterable[Object]) -> set[str]:
    labels = ((item["metadata"].get("labels") or {}).get(LABEL_REVISION) for item in objects)
    return {revision for revision in labels if revision}
