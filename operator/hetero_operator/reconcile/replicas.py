"""The replicas of a resource, each an observation of its own, and the course that each of them takes.

A replica is a group: a gateway and its ranks, with objects, a revision and a budget of restarts of its own. So all
other modules work on a *view*: an observation with the objects and pods of one replica, and with the spec that this
replica has. Replica 0 always exists; it also owns what all replicas share.

A changed spec goes from replica to replica (RollingUpdate). The next one makes way when every replica that has the new
spec serves, callers have had time to learn of it, and enough others serve meanwhile. Replicas that do not serve go
first, then the highest ordinal. So a spec that does not work stops at the first replica, and the earlier one, applied
again, is rolled out to that one alone. With maxSurge further replicas, of ordinals above the others, come first and
leave last. Nothing of this is remembered: ConfigMaps and Deployments tell which spec a replica has.

Before ranks make way, a gateway that takes requests finishes those that it has: it loses its pod first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Any

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION, LABEL_ROLE, ROLE_GATEWAY
from hetero_api.effects import Effect, fields_with
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_cluster import RolloutStrategy
from hetero_operator.reconcile.exposure import held_doors
from hetero_operator.reconcile.inventory import DEPLOYMENT, Inventory, is_leaving, is_owned_by, label_of, ordinal_of
from hetero_operator.reconcile.manifests.config import stored_resource
from hetero_operator.reconcile.model import Object, Observed, Outcome, Plan
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.refusals import Refusal, read_spec
from hetero_operator.reconcile.revision import Revisions, revisions_of
from hetero_operator.reconcile.status.pods import has_ended, is_ready
from hetero_operator.reconcile.status.situation import Situation, is_serving


class Course(Enum):
    """Course of a replica until the next look."""

    WANTED = "wanted"
    """It has the spec as written, or gets it now."""
    KEPT = "kept"
    """It keeps the spec that it has, since its turn has not come."""
    DRAINING = "draining"
    """Its gateway finishes what it has; then it gets the spec as written."""
    LEAVING = "leaving"
    """It is not asked for."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One replica as it is reported."""

    view: Observed
    """With the spec that its pods are measured by."""
    course: Course
    is_asked_for: bool
    """Whether spec.replicas counts it; not of one that a roll-out adds."""
    is_updated: bool
    """Whether the spec as written is in force."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica and its course."""

    view: Observed
    """With the spec that it has until the next look."""
    spec: HeteroInferenceSpec
    """Spec of `view`."""
    course: Course
    judged: Judged
    others_serve: bool | None
    """Whether every other replica that is asked for serves; None: there is no other."""
    is_busy: bool
    """Whether its gateway may have requests in flight."""

    @property
    def has_gateway(self) -> bool:
        """Whether its gateway gets a pod."""
        runs = self.spec.replicas > 0 and not self.spec.suspend
        return runs and self.course in (Course.WANTED, Course.KEPT)

    @property
    def has_ranks(self) -> bool:
        """Whether its ranks get pods."""
        return self.has_gateway or self.is_busy


def view_of(observed: Observed, ordinal: int) -> Observed:
    """Return an observation of one replica alone; objects of strangers are in every view."""
    resource = observed.resource
    uid = resource["metadata"]["uid"]
    return replace(
        observed,
        resource={**resource, "status": _stored_status(resource.get("status") or {}, ordinal)},
        owned=[item for item in observed.owned if ordinal_of(item) == ordinal or not is_owned_by(item, uid)],
        pods=[pod for pod in observed.pods if ordinal_of(pod) == ordinal],
        failed_pods=[pod for pod in observed.failed_pods if ordinal_of(pod) == ordinal],
        gateway=observed.gateway if ordinal == 0 else observed.gateways.get(ordinal),
        gateways={},
        ordinal=ordinal,
    )


def present_ordinals(observed: Observed) -> list[int]:
    """Return the ordinals of replicas that have objects or pods, and 0."""
    uid = observed.resource["metadata"]["uid"]
    owned = (item for item in observed.owned if is_owned_by(item, uid))
    return sorted({0, *map(ordinal_of, owned), *map(ordinal_of, observed.pods)})


def replicas_of(observed: Observed, spec: HeteroInferenceSpec) -> tuple[Replica, ...]:
    """Return all replicas, those included that are not asked for any more; `spec` is valid and the one as written."""
    observed, spec = _with_doors_held(observed, spec)
    present = present_ordinals(observed)
    if spec.replicas <= 1 and present == [0] and not spec.rollout.surge:
        return (_lone(view_of(observed, 0), spec),)
    return tuple(_Rollout(observed, spec, present).replicas())


def _with_doors_held(observed: Observed, spec: HeteroInferenceSpec) -> tuple[Observed, HeteroInferenceSpec]:
    """Return the observation and its spec as long as the doors that this opens stay shut."""
    first = view_of(observed, 0)
    uid = observed.resource["metadata"]["uid"]
    deployments = [item for item in observed.owned if item["kind"] == DEPLOYMENT and is_owned_by(item, uid)]
    held = held_doors(spec, Names.of(first), Inventory.from_observed(first), deployments)
    if not held:
        return observed, spec
    resource = {**observed.resource, "spec": _merged(observed.resource["spec"], held)}
    narrower = read_spec(resource)
    assert not isinstance(narrower, Refusal)
    return replace(observed, resource=resource), narrower


def judged_replicas(observed: Observed, *, is_refused: bool) -> tuple[Judged, ...]:
    """Return all replicas as they are reported; those of a refused spec as they are."""
    spec = read_spec(observed.resource)
    if is_refused or isinstance(spec, Refusal):
        views = [view_of(observed, ordinal) for ordinal in present_ordinals(observed)]
        return tuple(Judged(view, Course.WANTED, is_asked_for=True, is_updated=False) for view in views)
    return tuple(replica.judged for replica in replicas_of(observed, spec))


def _lone(view: Observed, spec: HeteroInferenceSpec) -> Replica:
    """Return replica 0 where there is no other: its turn has always come."""
    known = _Known.of(view, spec)
    return known.on(known.course(has_turn=True), is_asked_for=True, others_serve=None)


@dataclass(frozen=True)
class _Known:
    """State of a replica, from which its course follows."""

    view: Observed
    """With the spec as written."""
    wanted: HeteroInferenceSpec
    kept_view: Observed
    """With the spec that it has; the same when that is the one as written."""
    kept: HeteroInferenceSpec
    is_new: bool
    """Whether nothing of it is in force."""
    is_updated: bool
    keeps_ranks: bool
    """Whether the spec as written restarts its gateway at most."""

    @classmethod
    def of(cls, view: Observed, wanted: HeteroInferenceSpec) -> _Known:
        inventory, names = Inventory.from_observed(view), Names.of(view)
        asked = revisions_of(view.resource, wanted)
        config = inventory.config_in_force(names)
        has = _revisions_of_config(config) if config is not None else None
        kept_view, kept = view, wanted
        if config is not None and has is not None and has.gateway != asked.gateway:
            kept_view, kept = _kept(view, stored_resource(config), has, wanted)
        is_new = has is None
        return cls(
            view=view,
            wanted=wanted,
            kept_view=kept_view,
            kept=kept,
            is_new=is_new,
            is_updated=kept_view is view and not is_new,
            keeps_ranks=has is None or has.ranks == asked.ranks,
        )

    @property
    def ordinal(self) -> int:
        return self.view.ordinal

    @cached_property
    def _situation(self) -> Situation:
        return Situation.from_look(self.kept_view, Plan(), Outcome())

    @cached_property
    def serves(self) -> bool:
        return is_serving(self._situation)

    @property
    def is_known_to_serve(self) -> bool:
        """Whether callers have had time to learn that it serves."""
        known_from = self._situation.known_from
        return self.serves and (known_from is None or known_from <= self.view.now)

    @property
    def is_busy(self) -> bool:
        return any(_is_busy(pod) for pod in self.view.pods)

    def course(self, *, has_turn: bool) -> Course:
        """Return the course of a replica that is asked for."""
        if self.is_new or self.is_updated:
            return Course.WANTED
        if not has_turn:
            return Course.KEPT
        return Course.DRAINING if self.is_busy and not self.keeps_ranks else Course.WANTED

    def on(self, course: Course, *, is_asked_for: bool, others_serve: bool | None) -> Replica:
        """Return the replica on a course."""
        is_wanted = course is Course.WANTED
        judged = self.kept_view if course in (Course.KEPT, Course.LEAVING) else self.view
        return Replica(
            view=self.view if is_wanted else self.kept_view,
            spec=self.wanted if is_wanted else self.kept,
            course=course,
            judged=Judged(judged, course, is_asked_for, self.is_updated),
            others_serve=others_serve,
            is_busy=self.is_busy,
        )


class _Rollout:
    """Decides about all replicas of one resource."""

    def __init__(self, observed: Observed, spec: HeteroInferenceSpec, present: Sequence[int]) -> None:
        self._spec = spec
        self._present = frozenset(present)
        asked = range(max(1, spec.replicas))
        self._asked = {ordinal: _Known.of(view_of(observed, ordinal), spec) for ordinal in asked}
        extra = range(len(asked), len(asked) + self._num_extra())
        others = sorted({*extra, *(ordinal for ordinal in present if ordinal not in self._asked)})
        self._others = {ordinal: _Known.of(view_of(observed, ordinal), spec) for ordinal in others}
        self._extra = frozenset(extra)

    def replicas(self) -> Iterator[Replica]:
        """Yield all replicas by ordinal."""
        turns = self._turns()
        for ordinal, known in self._asked.items():
            course = known.course(has_turn=ordinal in turns)
            yield known.on(course, is_asked_for=True, others_serve=self._others_serve(ordinal))
        for ordinal, known in self._others.items():
            course = Course.WANTED if ordinal in self._extra else Course.LEAVING
            yield known.on(course, is_asked_for=False, others_serve=self._others_serve(ordinal))

    def _others_serve(self, ordinal: int) -> bool | None:
        others = [known.is_known_to_serve for number, known in self._asked.items() if number != ordinal]
        return all(others) if others else None

    @property
    def _runs(self) -> bool:
        return self._spec.replicas > 0 and not self._spec.suspend

    def _outdated(self) -> list[_Known]:
        """Return replicas of an earlier spec in the order in which they make way."""
        found = [known for known in self._asked.values() if not (known.is_updated or known.is_new)]
        return sorted(found, key=lambda known: (known.serves, -known.ordinal))

    def _num_extra(self) -> int:
        """Return how many replicas the roll-out adds: none once all others have the spec as written and serve."""
        if not self._runs:
            return 0
        asked, surge = self._asked.values(), self._spec.rollout.surge
        there = sum(ordinal in self._present for ordinal in range(len(asked), len(asked) + surge))
        all_serve = there and all(known.is_known_to_serve for known in asked)
        return min(surge, max(len(self._outdated()), 0 if all_serve else there))

    def _turns(self) -> set[int]:
        """Return the ordinals of the replicas of an earlier spec that get the one as written now."""
        outdated, rollout = self._outdated(), self._spec.rollout
        at_once = rollout.strategy == RolloutStrategy.RECREATE or not self._runs
        if at_once or (self._spec.replicas == 1 and not rollout.surge):
            return {known.ordinal for known in outdated}
        extra = [self._others[ordinal] for ordinal in self._extra]
        everyone = [*self._asked.values(), *extra]
        under_way = sum(not known.is_known_to_serve for known in everyone if known.is_updated or known.is_new)
        serving = sum(known.is_known_to_serve for known in everyone)
        turns: set[int] = set()
        for known in outdated:
            if under_way + len(turns) >= max(1, rollout.max_unavailable):
                break
            if known.serves:
                serving -= known.is_known_to_serve
                if serving < self._spec.replicas - rollout.max_unavailable:
                    break
            turns.add(known.ordinal)
        return turns


def _revisions_of_config(config: Object) -> Revisions:
    return Revisions(label_of(config, LABEL_REVISION), label_of(config, LABEL_GATEWAY_REVISION))


def _kept(
    view: Observed, stored: Object, revisions: Revisions, wanted: HeteroInferenceSpec
) -> tuple[Observed, HeteroInferenceSpec]:
    """Return a view with the stored spec, and that spec; with the spec as written where the stored one is not valid.

    Fields that restart nothing are those of the spec as written, if both go together.
    """
    free: dict[str, Any] = fields_with(view.resource["spec"], frozenset({Effect.NONE}))
    fewest: dict[str, Any] = {key: free[key] for key in ("replicas", "suspend", "rollout") if key in free}
    for fields in (free, fewest):
        resource = {**view.resource, "spec": _merged(stored["spec"], fields)}
        spec = read_spec(resource)
        if not isinstance(spec, Refusal):
            return replace(view, resource=resource, revisions=revisions), spec
    return view, wanted


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        known = merged.get(key)
        merged[key] = _merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return merged


def _is_busy(pod: Object) -> bool:
    """Return whether a pod is a gateway's that takes requests, or that finishes those that it has."""
    is_gateway = label_of(pod, LABEL_ROLE) == ROLE_GATEWAY
    return is_gateway and not has_ended(pod) and (is_leaving(pod) or is_ready(pod))


def _stored_status(stored: Object, ordinal: int) -> Object:
    """Return the last report about one replica; a lone one has the whole status."""
    groups: Sequence[Mapping[str, Any]] = stored.get("groups") or ()
    if not groups:
        return stored if ordinal == 0 else {}
    return next((group for group in groups if group.get("ordinal") == ordinal), {})
