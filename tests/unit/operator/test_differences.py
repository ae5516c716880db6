"""When an object is written again: told on objects as a real API server showed them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.contract import ANNOTATION_APPLIED
from hetero_operator.reconcile.differences import needs_apply, stamped

STORED = Path(__file__).parent / "stored"
"""Pairs of what was applied and what a Kubernetes 1.20.2 API server then showed."""


def pair(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    applied, live = yaml.safe_load_all((STORED / f"{name}.yaml").read_text(encoding="utf-8"))
    return applied, live


KINDS = sorted(path.stem for path in STORED.glob("*.yaml"))


@pytest.mark.parametrize("name", KINDS)
def test_what_the_server_filled_in_is_no_difference(name: str) -> None:
    applied, live = pair(name)
    assert not needs_apply(applied, live)


@pytest.mark.parametrize("name", KINDS)
def test_every_value_that_is_changed_or_taken_away_is_a_difference(name: str) -> None:
    applied, live = pair(name)
    for path in leaves(applied):
        for change in (spoil_value, take_away):
            changed = copy.deepcopy(live)
            change(changed, path)
            assert needs_apply(applied, changed), f"{change.__name__} {path}"


def test_an_object_that_is_not_there_is_a_difference() -> None:
    applied, _ = pair(KINDS[0])
    assert needs_apply(applied, None)


def test_what_we_want_no_longer_is_a_difference_by_its_hash() -> None:
    applied, live = pair("Service")
    del applied["spec"]["ports"][0]["name"]
    del applied["metadata"]["annotations"][ANNOTATION_APPLIED]
    assert needs_apply(stamped(applied), live)


def test_what_others_add_is_no_difference() -> None:
    applied, live = pair("StatefulSet")
    live["metadata"]["labels"]["team"] = "other"
    pod = live["spec"]["template"]["spec"]
    pod["containers"].insert(0, {"name": "sidecar", "image": "proxy"})
    pod["containers"][1]["env"].append({"name": "ADDED", "value": "1"})
    pod["volumes"].reverse()
    assert not needs_apply(applied, live)


def test_one_more_rule_of_a_network_policy_is_a_difference() -> None:
    applied, live = pair("NetworkPolicy")
    live["spec"]["ingress"].append({"ports": [{"protocol": "TCP", "port": 50052}]})
    assert needs_apply(applied, live)
    applied, live = pair("NetworkPolicy")
    live["spec"]["ingress"][0]["ports"].append({"protocol": "TCP", "port": 50052})
    assert needs_apply(applied, live)


def maps(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all maps."""
    inner = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    found = [one for key, value in inner for one in maps(value, (*path, key))]
    return [path, *found] if isinstance(item, dict) else found


@pytest.mark.parametrize(("name", "below"), [("Service", ("spec", "selector")), ("NetworkPolicy", ("spec",))])
def test_one_more_field_of_a_selector_or_of_a_policy_is_a_difference(name: str, below: tuple[str, ...]) -> None:
    applied, live = pair(name)
    paths = [path for path in maps(live) if path[: len(below)] == below]
    assert paths
    for path in paths:
        changed = copy.deepcopy(live)
        part = changed
        for key in path:
            part = part[key]
        part["added"] = "x"
        assert needs_apply(applied, changed), path


def test_one_more_argument_is_a_difference() -> None:
    applied, live = pair("StatefulSet")
    live["spec"]["template"]["spec"]["containers"][0]["args"].append("--trace")
    assert needs_apply(applied, live)


def test_true_is_not_one() -> None:
    item = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "immutable": True}
    assert needs_apply(item, {**item, "immutable": 1})


def leaves(item: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all scalars; items of lists by their index, for servers keep their order."""
    if isinstance(item, dict):
        return [found for key, value in item.items() for found in leaves(value, (*path, key))]
    if isinstance(item, list):
        return [found for index, value in enumerate(item) for found in leaves(value, (*path, index))]
    return [path]


def spoil_value(live: Any, path: tuple[Any, ...]) -> None:
    walk(live, path[:-1])[path[-1]] = "spoiled"


def take_away(live: Any, path: tuple[Any, ...]) -> None:
    del walk(live, path[:-1])[path[-1]]


def walk(item: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        item = item[key]
    return item
