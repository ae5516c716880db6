"""Stores of all watched kinds, kept equal to the server's by reflectors, and the kinds that the server offers.

It runs whether this process leads or not, so that a new leader knows everything at once. Which optional kinds exist is
asked again every few minutes; a new one is listed before it counts as there. Only the groups that matter are asked, so
a dead aggregated API of someone else, which breaks a walk over all groups, does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from hetero_api.contract import ANNOTATION_APPLIED
from hetero_operator.cluster.kinds import ALWAYS_WATCHED, OPTIONAL, POD, ResourceKind, kind_of, watched_kinds
from hetero_operator.cluster.reflector import Reflector
from hetero_operator.cluster.store import Key, NamespaceBudget, ObjectStore
from hetero_operator.cluster.transport import Object, Transport
from hetero_operator.errors import ApiError, NotFound, OverBudget, Refused, Unreachable
from hetero_operator.reconcile.inventory import ObjectKey
from hetero_operator.reconcile.model import Capabilities, ObjectRef, Plan
from hetero_operator.timing import Backoff, unobserved

logger = logging.getLogger(__name__)
_MOST_ADMITTED: Final = 10_000
"""Objects changed by admission that are remembered; one that is forgotten is written once more."""
_DIGITS: Final = re.compile(r"\d+")
DISCOVERY_S: Final = 180.0
OPTIONAL_S: Final = 60.0
"""Longest wait for optional kinds to be listed."""
MAX_LOOK_BYTES: Final = 4 * 2**20
"""Bodies that a look at one resource may read because they are not kept."""


async def discover(api: Transport, known: Capabilities | None) -> Capabilities:
    """Return the server's capabilities. A group that does not answer counts as it was `known` before.

    Raises ApiError when the server does not give its version.
    """
    version = _version(await api.get("/version"))
    kinds = [(kind.api_version, kind.kind) for kind in OPTIONAL if await _offered(api, kind, known)]
    return Capabilities(version=version, kinds=frozenset(kinds))


async def _offered(api: Transport, kind: ResourceKind, known: Capabilities | None) -> bool:
    try:
        found = await api.get(kind.root)
    except NotFound:
        return False
    except ApiError as error:
        if known is None and not isinstance(error, Refused):
            raise  # nobody can say yet whether groups that run and use it can go on
        logger.warning("%s does not say what it offers: %s", kind.api_version, error)
        return known is not None and known.has(kind.api_version, kind.kind)
    return has_kind(found, kind)


def has_kind(group_version: dict[str, Any], kind: ResourceKind) -> bool:
    """Return whether the discovery document of a group and version lists a kind."""
    return any(item["name"] == kind.plural for item in group_version.get("resources") or ())


def _version(answer: dict[str, Any]) -> tuple[int, int]:
    """Return major and minor; distributions write a minor of "20+"."""
    major, minor = (_DIGITS.search(str(answer.get(key, ""))) for key in ("major", "minor"))
    return (int(major[0]) if major else 0, int(minor[0]) if minor else 0)


def _admission(wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> tuple[str, int] | None:
    generation = stored["metadata"].get("generation")
    annotations = wanted["metadata"].get("annotations") or {}
    return None if generation is None else (annotations.get(ANNOTATION_APPLIED, ""), generation)


class ClusterCache:
    """Stores of all watched kinds. `run` fills and follows them; `ready` is set once every store was filled."""

    def __init__(
        self,
        api: Transport,
        *,
        namespaces: Sequence[str],
        on_change: Callable[[Key], None],
        on_capabilities: Callable[[], None] = unobserved,
        count_restart: Callable[[str, str], None] = unobserved,
    ) -> None:
        """`on_capabilities` is called when the server offers something else than before."""
        self.ready = asyncio.Event()
        self._api = api
        self._namespaces: Sequence[str | None] = tuple(namespaces) or (None,)
        self._on_change = on_change
        self._on_capabilities = on_capabilities
        self._count_restart = count_restart
        self._capabilities: Capabilities | None = None
        self._budget = NamespaceBudget()
        self._stores: dict[ResourceKind, ObjectStore] = {}
        self._reflectors: dict[ResourceKind, list[Reflector]] = {}
        self._tasks: dict[ResourceKind, list[asyncio.Task[None]]] = {}
        self._admitted: dict[str, tuple[str, int]] = {}
        """What was wanted of objects that admission changed, by uid, and the generation that came of it."""

    @property
    def capabilities(self) -> Capabilities:
        """The server's capabilities, once `ready`."""
        assert self._capabilities is not None
        return self._capabilities

    async def run(self) -> None:
        """Watch until cancelled."""
        backoff, failures = Backoff(), 0
        try:
            while True:
                try:
                    await self._adjust(await discover(self._api, self._capabilities))
                    failures = 0
                except ApiError as error:
                    failures += 1
                    logger.warning("the API server does not say what it offers: %s", error)
                await asyncio.sleep(backoff.pause_s(failures) if failures else DISCOVERY_S)
        finally:
            await self._stop(list(self._tasks))

    async def owned_by(self, owner: Key) -> tuple[list[Object], list[Object]]:
        """Return the objects of all kinds but Pod, and the pods, that carry the resource's label.

        Bodies that are not kept are read. Raises ApiError, also while its namespace was not listed, or OverBudget when
        these are too large for one look.
        """
        for reflector in (one for kind in ALWAYS_WATCHED for one in self._reflectors.get(kind, ())):
            if reflector.namespace == owner.namespace and not reflector.synced.is_set():
                raise Unreachable(f"{reflector.kind.kind} of namespace {owner.namespace}: not listed yet")
        stores = {kind: store for kind, store in self._stores.items() if kind != POD}
        left_out = {kind: store.incomplete(owner) for kind, store in stores.items()}
        if sum(sum(sizes.values()) for sizes in left_out.values()) > MAX_LOOK_BYTES:
            raise OverBudget(*owner, limit=self._budget.limit)
        owned = []
        for kind, store in stores.items():
            bodies = {name: await self._body(kind, owner.namespace, name) for name in left_out[kind]}
            kept = (item for item in store.owned_by(owner) if item["metadata"]["name"] not in bodies)
            owned += [*kept, *(store.shown(body) for body in bodies.values() if body is not None)]
        return owned, self._stores[POD].owned_by(owner)

    def note_admitted(self, wanted: Mapping[str, Any], stored: Mapping[str, Any]) -> bool:
        """Note that an object was written and is stored otherwise; return whether that is news.

        Objects whose changes the server does not count are left out: others' changes of them could not be told apart.
        """
        uid, mark = stored["metadata"]["uid"], _admission(wanted, stored)
        if mark is None or self._admitted.get(uid) == mark:
            return False
        self._admitted.pop(uid, None)
        self._admitted[uid] = mark
        if len(self._admitted) > _MOST_ADMITTED:
            del self._admitted[next(iter(self._admitted))]
        return True

    def without_admitted(self, plan: Plan, owned: Sequence[Mapping[str, Any]]) -> Plan:
        """Return the plan without writes that the cluster's admission would change again to what is stored."""
        if not plan.apply or not self._admitted:
            return plan
        live = {ObjectKey.from_object(item): item for item in owned}
        return replace(plan, apply=tuple(item for item in plan.apply if not self._is_admitted(item, live)))

    def _is_admitted(self, wanted: Mapping[str, Any], live: Mapping[ObjectKey, Mapping[str, Any]]) -> bool:
        stored = live.get(ObjectKey.from_object(wanted))
        return stored is not None and self._admitted.get(stored["metadata"]["uid"], ()) == _admission(wanted, stored)

    def failed_pods(self, owner: Key) -> list[Object]:
        """Return the resource's pods that had failed when they were deleted, the last of each name."""
        return self._stores[POD].failed_pods(owner)

    async def _body(self, kind: ResourceKind, namespace: str, name: str) -> Object | None:
        """Return an object from the server, and keep it if there is room by now."""
        try:
            found = await self._api.get(kind.path(namespace, name))
        except NotFound:
            self._stores[kind].discard(namespace, name)
            return None
        self._stores[kind].put(found)
        return found

    def store(self, ref: ObjectRef) -> ObjectStore:
        """Return the store of a kind; one that nobody reads if the kind is not watched."""
        kind = kind_of(ref)
        return self._stores.get(kind, ObjectStore(kind))

    def sizes(self) -> Mapping[str, int]:
        """Return the number of objects that are kept, by kind."""
        return {kind.kind: len(store) for kind, store in self._stores.items()}

    def problems(self) -> list[str]:
        """Return the kinds that cannot be listed or watched now, or were not listed yet, with the reason."""
        found = []
        for reflector in self._all():
            if reflector.problem:
                found.append(reflector.problem)
            elif not reflector.synced.is_set():
                found.append(f"{reflector.kind.kind}: not listed yet")
        return found if self._reflectors else ["the API server was not reached yet"]

    def ended(self) -> list[str]:
        """Return the kinds whose watch has ended; there should never be any."""
        return [kind.kind for kind, tasks in self._tasks.items() if any(task.done() for task in tasks)]

    def _all(self) -> list[Reflector]:
        return [reflector for reflectors in self._reflectors.values() for reflector in reflectors]

    async def _adjust(self, found: Capabilities) -> None:
        """Watch new kinds; publish the capabilities once these are filled; then stop the watches of kinds that went.

        An optional kind that cannot be listed counts as one that is not offered, until it can.
        """
        wanted = watched_kinds(found)
        for kind in wanted:
            if kind not in self._tasks:
                self._start(kind)
        await self._wait_for(ALWAYS_WATCHED)
        with suppress(TimeoutError):
            async with asyncio.timeout(OPTIONAL_S):
                await self._wait_for(wanted)
        await self._stop([kind for kind in self._tasks if kind not in wanted])
        unlisted = {kind.kind for kind in wanted if not self._is_listed(kind)}
        found = replace(found, kinds=frozenset(kind for kind in found.kinds if kind[1] not in unlisted))
        if found == self._capabilities:
            return
        self._capabilities = found
        major, minor = found.version
        offered = ", ".join(sorted(f"{kind} of {version}" for version, kind in found.kinds)) or "none"
        logger.info("Kubernetes %d.%d; optional kinds: %s", major, minor, offered)
        self.ready.set()
        self._on_capabilities()

    async def _wait_for(self, kinds: Sequence[ResourceKind]) -> None:
        await asyncio.gather(*(one.answered.wait() for kind in kinds for one in self._reflectors[kind]))

    def _is_listed(self, kind: ResourceKind) -> bool:
        """Return whether a kind was listed in all namespaces that let pods be listed."""
        pairs = zip(self._reflectors[kind], self._reflectors[POD], strict=True)
        return all(one.synced.is_set() or not pods.synced.is_set() for one, pods in pairs)

    def _start(self, kind: ResourceKind) -> None:
        store = self._stores[kind] = ObjectStore(kind, budget=self._budget)
        self._reflectors[kind] = [
            Reflector(
                self._api,
                store,
                namespace=namespace,
                on_change=self._on_change,
                on_restart=lambda reason: self._count_restart(kind.kind, reason),
            )
            for namespace in self._namespaces
        ]
        self._tasks[kind] = [
            asyncio.create_task(reflector.run(), name=f"reflector {kind.plural} {number}")
            for number, reflector in enumerate(self._reflectors[kind])
        ]

    async def _stop(self, kinds: Sequence[ResourceKind]) -> None:
        tasks = [task for kind in kinds for task in self._tasks.pop(kind)]
        for kind in kinds:
            del self._reflectors[kind], self._stores[kind]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
