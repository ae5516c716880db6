"""A change of each field of the spec, live: the objects that it changes, and the pods that it makes anew. No others.

Every row of field_changes.py gets a resource of its own, all at once: first as they were, then as they are to be.
Pods come from the real StatefulSet and Deployment controllers and are told apart by uid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from hetero_api.contract import CONFIG_MANIFEST_KEY, ROLE_GATEWAY, ROLE_RANK
from hetero_api.effects import Effect, effect_of, spec_leaves
from hetero_api.manifest import parse_manifest
from tests.cluster.conftest import StartControlPlane
from tests.cluster.field_changes import BACK_TO_DEFAULT, CHANGES, Change, Restarts
from tests.support.hetero_resources import ABSENT, resource
from tests.support.kube.client import Client, Object, condition
from tests.support.kube.errors import ApiError
from tests.support.operator_scene import Scene
from tests.support.owned_objects import Owned, is_refused, normalised
from tests.support.stand_in_crds import POD_GROUP, POD_MONITOR, inference_pool

ROWS = [*CHANGES.items(), *BACK_TO_DEFAULT.items()]
SETTLE_TIMEOUT_S = 240.0
ONE_RANK = {"pools.0.ranks": 1}
"""Few pods, for the sake of time."""
EFFECT_OF = {
    Restarts.RANKS: Effect.RANKS,
    Restarts.GATEWAY: Effect.GATEWAY,
    Restarts.NOTHING: Effect.NONE,
    Restarts.ENDS: Effect.NONE,
}


def test_every_field_has_a_row() -> None:
    assert set(CHANGES) == set(spec_leaves())


def test_the_rows_agree_with_the_table_of_effects() -> None:
    told = {path: EFFECT_OF[row.restarts] for path, row in CHANGES.items() if row.restarts is not Restarts.REFUSED}
    assert told == {path: effect_of(path) for path in told}


@pytest.fixture
def scene(start_control_plane: StartControlPlane) -> Iterator[Scene]:
    """A cluster of the test's own, which has all that fields can name."""
    plane = start_control_plane()
    with plane.cluster.client() as client:
        for crd in (POD_MONITOR, POD_GROUP, inference_pool(plane.cluster.version)):
            client.create(crd)
            client.wait_for("CustomResourceDefinition", crd["metadata"]["name"], until=_is_served)
        client.create(
            {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": "urgent"}, "value": 9}
        )
        runtime = "node.k8s.io/v1"
        client.create(
            {"apiVersion": runtime, "kind": "RuntimeClass", "metadata": {"name": "nvidia"}, "handler": "nvidia"}
        )
    with Scene.alone(plane.cluster) as scene:
        yield scene


@pytest.mark.slow
@pytest.mark.minutes(3)
@pytest.mark.timeout(900)
def test_a_change_of_a_field_does_what_it_must_and_no_more(scene: Scene) -> None:
    with scene.operator():
        for number, (_, row) in enumerate(ROWS):
            scene.client.apply(resource(_name(number), scene.namespace, {**ONE_RANK, **row.base}))
        before = scene.owned.wait_settled(timeout_s=SETTLE_TIMEOUT_S)
        scene.wait_quiet()
        before = scene.owned.every()
        refused = {number for number, (path, row) in enumerate(ROWS) if not _change(scene, number, path, row)}
        scene.owned.wait_settled(timeout_s=SETTLE_TIMEOUT_S)
        scene.wait_quiet()
        after = scene.owned.every()
    found = {}
    for number, (path, row) in enumerate(ROWS):
        name = _name(number)
        problems = _problems(scene.client, path, row, before[name], after[name], number in refused)
        if problems:
            found[f"{path} ({name})"] = problems
    assert not found, yaml.safe_dump(found, sort_keys=False, width=200)


def _is_served(crd: Object) -> bool:
    return (condition(crd, "Established") or {}).get("status") == "True"


def _name(number: int) -> str:
    return f"field-{number:03}"


def _change(scene: Scene, number: int, path: str, row: Change) -> bool:
    """Whether the API server took the change."""
    try:
        scene.client.apply(resource(_name(number), scene.namespace, {**ONE_RANK, **row.base, row.at or path: row.new}))
    except ApiError:
        return False
    return True


def _problems(client: Client, path: str, row: Change, before: Owned, after: Owned, refused: bool) -> list[str]:
    """What is not as the row says."""
    wants_refusal = row.restarts is Restarts.REFUSED or bool(row.needs and not client.discovery.has(row.needs))
    restarts = Restarts.REFUSED if wants_refusal else row.restarts
    problems = []
    if (refused or is_refused(after.resource)) is not wants_refusal:
        problems.append(f"refused: {condition(after.resource, 'Accepted')}")
    wanted, found = _wanted_changes(row, restarts, before), _changes(before, after)
    if found != wanted:
        problems.append(f"objects: {found}, not {wanted}")
    problems += _pod_problems(restarts, before, after)
    if restarts in (Restarts.RANKS, Restarts.GATEWAY):
        problems += _arrival_problems(path, row, restarts, before, after)
    return problems


def _wanted_changes(row: Change, restarts: Restarts, before: Owned) -> dict[str, str]:
    pools = {f"StatefulSet/NAME-{pool['name']}": "changed" for pool in before.resource["spec"]["pools"]}
    gateway = {"Deployment/NAME-gateway": "changed"}
    match restarts:
        case Restarts.RANKS:
            return {
                **pools, **gateway, "Secret/NAME-group-RANKS": "replaced", "ConfigMap/NAME-GATEWAY": "replaced",
                **row.more,
            }  # fmt: skip
        case Restarts.GATEWAY:
            return {**gateway, "ConfigMap/NAME-GATEWAY": "replaced", **row.more}
        case Restarts.ENDS:
            return {**pools, **gateway, **row.more}
        case Restarts.NOTHING:
            return dict(row.more)
        case Restarts.REFUSED:
            return {}


def _changes(before: Owned, after: Owned) -> dict[str, str]:
    """What became of each object: made, gone, replaced by another of its kind, or changed."""
    old, new = _by_role(before), _by_role(after)
    changes = {
        **dict.fromkeys(new.keys() - old.keys(), "made"),
        **dict.fromkeys(old.keys() - new.keys(), "gone"),
        **{key: _difference(old[key], new[key], before.name) for key in old.keys() & new.keys()},
    }
    return {key: what for key, what in sorted(changes.items()) if what}


def _by_role(owned: Owned) -> dict[str, Object]:
    """Objects by kind and name, the resource's name and revisions in it written as what they are."""
    status = owned.resource["status"]
    revisions = {
        "Secret": (status["revision"], "RANKS"),
        "ResourceClaimTemplate": (status["revision"], "RANKS"),
        "ConfigMap": (status["gatewayRevision"], "GATEWAY"),
    }
    found = {}
    for key, item in owned.objects.items():
        revision, role = revisions.get(key.kind, ("", ""))
        text = str(key).replace(owned.name, "NAME")
        found[text.replace(revision, role) if revision else text] = item
    return found


def _difference(old: Object, new: Object, name: str) -> str:
    if old["metadata"]["uid"] != new["metadata"]["uid"]:
        return "replaced"
    return "" if normalised(old, name=name) == normalised(new, name=name) else "changed"


def _pod_problems(restarts: Restarts, before: Owned, after: Owned) -> list[str]:
    problems = []
    for role, anew in (
        (ROLE_RANK, restarts is Restarts.RANKS),
        (ROLE_GATEWAY, restarts in (Restarts.RANKS, Restarts.GATEWAY)),
    ):
        old, new = set(before.pod_uids(role).values()), set(after.pod_uids(role).values())
        kept = new.isdisjoint(old) if anew else new == old
        right = not new if restarts is Restarts.ENDS else kept
        if not right or not old:
            problems.append(f"{role} pods: {sorted(old)} became {sorted(new)}")
    return problems


def _arrival_problems(path: str, row: Change, restarts: Restarts, before: Owned, after: Owned) -> list[str]:
    """Whether the new value is where programs read it."""
    problems = []
    configs = after.of_kind("ConfigMap")
    if len(configs) != 1:
        return [f"{len(configs)} ConfigMaps"]
    config = configs[0]
    read = parse_manifest(config["data"][CONFIG_MANIFEST_KEY]).spec  # no default is written
    kept = read.model_dump(mode="json", by_alias=True, exclude_none=True)
    if row.new is not ABSENT and _at(kept, row.at or path) != row.new:
        problems.append(f"{CONFIG_MANIFEST_KEY} has {_at(kept, row.at or path)!r}")
    kind = "StatefulSet" if restarts is Restarts.RANKS else "Deployment"
    if row.shows and not _shown_by_a_change(row.shows, before.of_kind(kind), after.of_kind(kind)):
        problems.append(f"{row.shows} is not what the change brought to the {kind}")
    return problems


def _shown_by_a_change(text: str, before: list[Object], after: list[Object]) -> bool:
    old, new = (json.dumps([item["spec"]["template"] for item in items]) for items in (before, after))
    return text not in old and text in new


def _at(spec: Mapping[str, Any], path: str) -> Any:
    """The value at a path; lists of sections are compared by what was asked of them."""
    value: Any = spec
    for part in path.split("."):
        value = value[int(part)] if isinstance(value, list) else (value or {}).get(part)
    return value
