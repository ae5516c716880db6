"""The store of watched objects: what is newer wins, wherever it came from."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from hetero_api.contract import LABEL_NAME
from hetero_operator.cluster.kinds import ALWAYS_WATCHED, POD
from hetero_operator.cluster.store import MAX_FAILED_PODS, Key, NamespaceBudget, ObjectStore, key_of

OWNER = Key("ns", "x")


CONFIG_MAP = next(kind for kind in ALWAYS_WATCHED if kind.kind == "ConfigMap")


def pod(name: str, version: int, *, uid: str = "", owner: str = "x", **spec: Any) -> dict[str, Any]:
    metadata = {"namespace": "ns", "name": name, "uid": uid or f"uid-{name}", "resourceVersion": str(version)}
    return {"metadata": {**metadata, "labels": {LABEL_NAME: owner}, "managedFields": [{"manager": "x"}]}, "spec": spec}


def config_map(name: str, version: int, *, owned: bool = True, text: str = "") -> dict[str, Any]:
    owners = [{"kind": "HeteroInference", "name": "x", "uid": "u", "controller": True}] if owned else []
    metadata = {"namespace": "ns", "name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}
    named = {"labels": {LABEL_NAME: "x", "other": "label"}, "annotations": {"long": text}, "ownerReferences": owners}
    return {"metadata": {**metadata, **named}, "data": {"key": text}}


def replace(store: ObjectStore, items: list[dict[str, Any]], version: str, namespace: str | None = None) -> set[Key]:
    changed = {owner for item in items if (owner := store.put(item)) is not None}
    return changed | store.retain({key_of(item) for item in items}, version, namespace=namespace)


def names(store: ObjectStore, owner: Key = OWNER) -> list[str]:
    return [item["metadata"]["name"] for item in store.owned_by(owner)]


def test_objects_are_found_by_owner_with_their_kind_and_without_managed_fields() -> None:
    store = ObjectStore(POD)
    assert store.put(pod("b", 2)) == OWNER
    assert store.put(pod("a", 1)) == OWNER
    assert names(store) == ["a", "b"]
    (first, _) = store.owned_by(OWNER)
    assert (first["apiVersion"], first["kind"]) == ("v1", "Pod")
    assert "managedFields" not in first["metadata"]


def test_what_is_older_or_the_same_changes_nothing() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 5, nodeName="new"))
    assert store.put(pod("a", 5, nodeName="echo")) is None
    assert store.put(pod("a", 4, nodeName="old")) is None
    assert store.owned_by(OWNER)[0]["spec"] == {"nodeName": "new"}


def test_versions_are_compared_as_numbers() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 9))
    assert store.put(pod("a", 10)) == OWNER


def test_a_list_that_lacks_an_object_removes_it_and_tells_its_owner() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1))
    store.put(pod("b", 2, owner="y"))
    assert replace(store, [pod("a", 1)], "9") == {Key("ns", "y")}
    assert names(store) == ["a"]


def test_a_list_made_before_our_write_does_not_remove_what_we_wrote() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 12))
    assert replace(store, [], "11") == set()
    assert names(store) == ["a"]


def test_a_list_of_one_namespace_leaves_others_alone() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1))
    assert replace(store, [], "9", namespace="other") == set()
    assert names(store) == ["a"]


def test_when_a_kind_is_gone_so_are_its_objects_of_one_namespace_or_of_all() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1))
    store.put({"metadata": {**pod("b", 2, owner="y")["metadata"], "namespace": "other", "resourceVersion": "x-7"}})
    assert store.clear(namespace="ns") == {OWNER}
    assert len(store) == 1
    assert store.clear() == {Key("other", "y")}
    assert (len(store), names(store)) == (0, [])


def test_what_we_deleted_does_not_rise_from_old_news() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1))
    store.bury("ns", "a", "uid-a")
    assert store.put(pod("a", 2)) is None
    assert replace(store, [pod("a", 2)], "3") == set()
    assert names(store) == []
    assert store.put(pod("a", 4, uid="another")) == OWNER


def test_what_a_watch_reported_deleted_does_not_rise_from_the_late_answer_to_our_deletion() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1))
    assert store.drop(pod("a", 3)) == OWNER
    assert store.put(pod("a", 2)) is None
    assert names(store) == []
    assert store.put(pod("a", 4)) == OWNER  # the label came back, which a watch reports as an object's end too


def test_news_that_an_earlier_object_of_the_name_is_gone_removes_nothing() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 4, uid="second"))
    assert store.drop(pod("a", 5, uid="first")) is None
    assert names(store) == ["a"]


def failed(name: str, version: int, *, uid: str = "") -> dict[str, Any]:
    return {**pod(name, version, uid=uid), "status": {"phase": "Failed", "reason": "TopologyAffinityError"}}


def failed_uids(store: ObjectStore, owner: Key = OWNER) -> list[str]:
    return [item["metadata"]["uid"] for item in store.failed_pods(owner)]


def test_a_pod_that_had_failed_is_remembered_until_the_next_of_its_name_is_gone() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1, uid="first"))
    store.drop(failed("a", 2, uid="first"))
    store.put(pod("a", 3, uid="second"))
    assert names(store) == ["a"]
    assert failed_uids(store) == ["first"]
    assert failed_uids(store, Key("ns", "y")) == failed_uids(store, Key("other", "x")) == []
    (remembered,) = store.failed_pods(OWNER)
    assert remembered["status"]["reason"] == "TopologyAffinityError"
    assert remembered["metadata"]["labels"] == {LABEL_NAME: "x"}
    store.drop(pod("a", 4, uid="second"))
    assert failed_uids(store) == []


def test_only_the_last_failed_pods_are_remembered_and_none_that_we_deleted() -> None:
    store = ObjectStore(POD)
    store.put(failed("ours", 1))
    store.bury("ns", "ours", "uid-ours")
    assert failed_uids(store) == []
    for number in range(MAX_FAILED_PODS + 2):
        store.put(pod(f"p{number}", 2))
        store.drop(failed(f"p{number}", 3))
    assert failed_uids(store) == [f"uid-p{number}" for number in range(2, MAX_FAILED_PODS + 2)]


def test_an_object_that_changes_hands_is_found_with_the_new_owner_only() -> None:
    store = ObjectStore(POD)
    store.put(pod("a", 1))
    store.put(pod("a", 2, owner="y"))
    assert names(store) == []
    assert names(store, Key("ns", "y")) == ["a"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 30), st.booleans()), max_size=40))
def test_in_whatever_order_news_come_the_newest_is_kept(news: list[tuple[str, int, bool]]) -> None:
    store = ObjectStore(POD)
    newest: dict[str, int] = {}
    for name, version, _ in news:
        store.put(pod(name, version))
        newest[name] = max(newest.get(name, 0), version)
    assert {item["metadata"]["name"]: int(item["metadata"]["resourceVersion"]) for item in store.owned_by(OWNER)} == (
        newest
    )


def test_of_objects_that_no_resource_controls_only_metadata_are_kept() -> None:
    store = ObjectStore(CONFIG_MAP)
    store.put(config_map("ours", 1, text="x" * 2**20))
    store.put(config_map("theirs", 2, owned=False, text="x" * 2**20))
    ours, theirs = store.owned_by(OWNER)
    assert len(ours["data"]["key"]) == 2**20
    assert theirs["metadata"]["labels"] == {LABEL_NAME: "x"}
    assert set(theirs) == {"apiVersion", "kind", "metadata"}
    entry = store.entry("ns", "theirs")
    assert entry is not None
    assert len(entry.text) < 500
    assert not store.incomplete(OWNER)


def test_of_pods_the_node_and_the_status_are_kept() -> None:
    store = ObjectStore(POD)
    store.put({**pod("a", 1, nodeName="n", containers=["x" * 1000]), "status": {"phase": "Running"}})
    (found,) = store.owned_by(OWNER)
    assert (found["spec"], found["status"]) == ({"nodeName": "n"}, {"phase": "Running"})


def test_a_namespace_over_its_budget_keeps_no_more_bodies_until_there_is_room() -> None:
    store = ObjectStore(CONFIG_MAP, budget=NamespaceBudget(3 * 2**20))
    for version, name in enumerate("abcd", 1):
        store.put(config_map(name, version, text="x" * 2**20))
    assert list(store.incomplete(OWNER)) == ["b", "c", "d"]
    assert all(size > 2 * 2**20 for size in store.incomplete(OWNER).values())
    assert [set(item) - {"apiVersion", "kind"} for item in store.owned_by(OWNER)][1] == {"metadata"}
    assert store.put(config_map("b", 2, text="x" * 2**20)) is None, "nothing new, and still no room"
    store.drop(config_map("a", 1))
    assert store.put(config_map("b", 2, text="x" * 2**20)) == OWNER
    assert list(store.incomplete(OWNER)) == ["c", "d"]


def test_one_namespace_takes_nothing_from_another() -> None:
    budget = NamespaceBudget(2**20)
    store = ObjectStore(CONFIG_MAP, budget=budget)
    store.put(config_map("a", 1, text="x" * 2**20))
    other = config_map("b", 2, text="x")
    other["metadata"]["namespace"] = "other"
    store.put(other)
    assert not store.incomplete(Key("other", "x"))
    store.clear()
    assert budget.has_room("ns", 2**20), "everything is given back"
