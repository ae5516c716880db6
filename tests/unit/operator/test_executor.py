"""Carrying out plans: order, strangers, stale caches, and what failures mean."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from hetero_api.contract import LABEL_NAME
from hetero_operator.cluster.cache import ClusterCache
from hetero_operator.cluster.executor import PlanExecution
from hetero_operator.cluster.inquiries import SecretBook
from hetero_operator.cluster.kinds import ALWAYS_WATCHED
from hetero_operator.cluster.store import Key, ObjectStore
from hetero_operator.cluster.transport import Transport
from hetero_operator.reconcile.model import Deletion, FailureKind, NewSecret, ObjectRef, Outcome, Plan
from tests.support.api_stand_in import ApiStandIn, Fault, refusal

OWNER = Key("ns", "x")
MAPS = "/api/v1/namespaces/ns/configmaps"
SECRETS = "/api/v1/namespaces/ns/secrets"
PODS = "/api/v1/namespaces/ns/pods"


@dataclass
class Bench:
    server: ApiStandIn
    cache: ClusterCache
    book: SecretBook
    api: Transport

    async def run(self, plan: Plan) -> Outcome:
        return await PlanExecution(self.api, self.cache, self.book, OWNER).carry_out(plan)

    def store(self, kind: str) -> ObjectStore:
        return next(store for its, store in self.cache._stores.items() if its.kind == kind)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with ApiStandIn() as server, server.transport() as api:
        cache = ClusterCache(api, namespaces=["ns"], on_change=lambda key: None)
        cache._stores = {kind: ObjectStore(kind) for kind in ALWAYS_WATCHED}
        book = SecretBook(api)
        yield Bench(server, cache, book, api)


def config_map(name: str, **data: str) -> dict[str, Any]:
    owners = [{"kind": "HeteroInference", "name": "x", "uid": "u", "controller": True}]
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "data": data,
        "metadata": {"name": name, "namespace": "ns", "labels": {LABEL_NAME: "x"}, "ownerReferences": owners},
    }  # fmt: skip


def secret() -> NewSecret:
    manifest = {**config_map("x-group-1"), "kind": "Secret"}
    del manifest["data"]
    return NewSecret(manifest, ("group-token", "admin-token"))


def deletion(kind: str, name: str, uid: str, **changes: Any) -> Deletion:
    return Deletion(ObjectRef("v1", kind, name), uid=uid, reason="test", **changes)


def writes(server: ApiStandIn) -> list[str]:
    return [call for call in server.calls if not call.startswith("GET")]


async def test_secrets_first_then_objects_in_order_then_deletions(bench: Bench) -> None:
    pod = await bench.server.put(f"{PODS}/old", {"metadata": {"labels": {LABEL_NAME: "x"}}})
    gone = deletion("Pod", "old", pod["metadata"]["uid"])
    done = await bench.run(Plan(create=(secret(),), apply=(config_map("b"), config_map("a")), delete=(gone,)))
    assert done == Outcome()
    assert writes(bench.server) == [
        f"POST {SECRETS}", f"PATCH {MAPS}/b", f"PATCH {MAPS}/a", f"DELETE {PODS}/old",
    ]  # fmt: skip


async def test_workloads_stay_as_they_are_when_what_their_pods_need_was_refused(bench: Bench) -> None:
    bench.server.faults.append(Fault("PATCH", "configmaps/a", refusal(422, "Invalid", message="too long")))
    workload = {**config_map("ranks"), "apiVersion": "apps/v1", "kind": "StatefulSet"}
    policy = {**config_map("p"), "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy"}
    done = await bench.run(Plan(apply=(config_map("a"), policy, workload)))
    assert [failure.ref.name for failure in done.failures] == ["a"]
    assert [call.rpartition("/")[2] for call in writes(bench.server)] == ["a", "p"]
    done = await bench.run(Plan(apply=(config_map("a"), workload)))
    assert done.failures == ()
    assert writes(bench.server)[-1].endswith("statefulsets/ranks")


async def test_tokens_are_long_random_and_different(bench: Bench) -> None:
    await bench.run(Plan(create=(secret(),)))
    data = bench.server.objects[f"{SECRETS}/x-group-1"]["data"]
    tokens = [base64.b64decode(value).decode() for value in data.values()]
    assert len(set(tokens)) == 2
    assert all(len(token) >= 43 and token.isascii() and token.isprintable() for token in tokens)
    assert "data" not in bench.book.store.owned_by(OWNER)[0]


def certificates(renews: str = "") -> NewSecret:
    manifest = {**config_map("x-inside-1"), "kind": "Secret"}
    del manifest["data"]
    return NewSecret(manifest, gateway_names=("x-gateway.ns.svc",), renews=renews)


async def test_certificates_are_made_and_renewed_under_the_same_authority(bench: Bench) -> None:
    assert await bench.run(Plan(create=(certificates(),))) == Outcome()
    first = bench.server.objects[f"{SECRETS}/x-inside-1"]
    calls = len(writes(bench.server))
    assert await bench.run(Plan(create=(certificates(first["metadata"]["uid"]),))) == Outcome()
    second = bench.server.objects[f"{SECRETS}/x-inside-1"]
    assert writes(bench.server)[calls:] == [f"DELETE {SECRETS}/x-inside-1", f"POST {SECRETS}"]
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
    assert first["data"]["ca.crt"] == second["data"]["ca.crt"]
    assert first["data"]["rank.crt"] != second["data"]["rank.crt"]
    assert bench.book.store.owned_by(OWNER)[0]["metadata"]["uid"] == second["metadata"]["uid"]


async def test_an_authority_goes_on_though_the_next_secret_is_refused_at_first(bench: Bench) -> None:
    await bench.run(Plan(create=(certificates(),)))
    first = bench.server.objects[f"{SECRETS}/x-inside-1"]
    bench.server.faults.append(Fault("POST", SECRETS, refusal(403, "Forbidden", "exceeded quota")))
    done = await bench.run(Plan(create=(certificates(first["metadata"]["uid"]),)))
    assert [failure.kind for failure in done.failures] == [FailureKind.FORBIDDEN]
    assert await bench.run(Plan(create=(certificates(),))) == Outcome()
    assert bench.server.objects[f"{SECRETS}/x-inside-1"]["data"]["ca.crt"] == first["data"]["ca.crt"]
    assert bench.book.replaced == {OWNER: {}}
    bench.book.forget_resource(OWNER)
    assert bench.book.replaced == {}


async def test_certificates_that_were_renewed_meanwhile_stay(bench: Bench) -> None:
    await bench.run(Plan(create=(certificates(),)))
    before = bench.server.objects[f"{SECRETS}/x-inside-1"]
    done = await bench.run(Plan(create=(certificates("another"),)))
    assert [failure.kind for failure in done.failures] == [FailureKind.TRANSIENT]
    assert bench.server.objects[f"{SECRETS}/x-inside-1"] == before


async def test_what_was_written_is_in_the_cache_at_once(bench: Bench) -> None:
    await bench.run(Plan(apply=(config_map("a", key="1"),)))
    (found,) = bench.store("ConfigMap").owned_by(OWNER)
    assert found["data"] == {"key": "1"}


async def test_a_stranger_s_object_is_told_and_nothing_at_all_is_written(bench: Bench) -> None:
    await bench.server.put(f"{MAPS}/b", {"metadata": {"labels": {LABEL_NAME: "someone"}}})
    done = await bench.run(Plan(create=(secret(),), apply=(config_map("a"), config_map("b"))))
    (failure,) = done.failures
    assert (failure.kind, failure.ref.name) == (FailureKind.FOREIGN, "b")
    assert writes(bench.server) == []


async def test_an_object_of_ours_that_the_cache_lacks_is_taken_in_and_planned_again(bench: Bench) -> None:
    await bench.server.put(f"{MAPS}/a", {"metadata": {"labels": {LABEL_NAME: "x"}}})
    done = await bench.run(Plan(apply=(config_map("a"),)))
    assert done.stale
    assert writes(bench.server) == []
    assert len(bench.store("ConfigMap")) == 1


async def test_a_known_object_is_written_only_as_the_one_that_was_seen(bench: Bench) -> None:
    bench.store("ConfigMap").put(await bench.server.put(f"{MAPS}/a", config_map("a")))
    del bench.server.objects[f"{MAPS}/a"]
    stranger = await bench.server.put(f"{MAPS}/a", {"metadata": {"labels": {LABEL_NAME: "someone"}}})
    done = await bench.run(Plan(apply=(config_map("a", key="1"),)))
    assert [failure.kind for failure in done.failures] == [FailureKind.TRANSIENT]
    assert bench.server.objects[f"{MAPS}/a"] == stranger


async def test_a_conflict_refreshes_the_cache(bench: Bench) -> None:
    bench.store("ConfigMap").put(await bench.server.put(f"{MAPS}/a", config_map("a")))
    del bench.server.objects[f"{MAPS}/a"]
    await bench.run(Plan(apply=(config_map("a"),)))
    assert len(bench.store("ConfigMap")) == 0
    assert (await bench.run(Plan(apply=(config_map("a"),)))).failures == ()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (422, FailureKind.INVALID), (400, FailureKind.INVALID), (403, FailureKind.FORBIDDEN),
        (500, FailureKind.TRANSIENT), (409, FailureKind.TRANSIENT), (404, FailureKind.TRANSIENT),
    ],
)  # fmt: skip
async def test_a_refusal_is_told_by_what_it_means_and_the_rest_is_tried(
    bench: Bench, code: int, kind: FailureKind
) -> None:
    bench.server.faults.append(Fault("PATCH", "/a", refusal(code, message="no")))
    pod = await bench.server.put(f"{PODS}/old", {})
    plan = Plan(apply=(config_map("a"), config_map("b")), delete=(deletion("Pod", "old", pod["metadata"]["uid"]),))
    done = await bench.run(plan)
    assert [(failure.kind, failure.ref.name, failure.message) for failure in done.failures] == [(kind, "a", "no")]
    assert f"{MAPS}/b" in bench.server.objects
    assert f"{PODS}/old" in bench.server.objects, "pods are only deleted when their templates were written"


async def test_a_server_that_is_too_busy_is_left_in_peace_for_as_long_as_it_asks(bench: Bench) -> None:
    bench.server.faults.append(Fault("PATCH", "/a", refusal(429, headers={"Retry-After": "9"})))
    done = await bench.run(Plan(apply=(config_map("a"), config_map("b"), config_map("c"))))
    assert done.retry_after_s == 9.0
    assert len(writes(bench.server)) == 1


async def test_when_it_cannot_be_seen_whose_a_name_is_nothing_is_written(bench: Bench) -> None:
    bench.server.faults.append(Fault("GET", "/b", refusal(500)))
    done = await bench.run(Plan(apply=(config_map("a"), config_map("b"))))
    assert [failure.kind for failure in done.failures] == [FailureKind.TRANSIENT]
    assert writes(bench.server) == []


async def test_a_secret_that_came_up_meanwhile_is_not_overwritten(bench: Bench) -> None:
    bench.server.faults.append(Fault("POST", "secrets", refusal(409, "AlreadyExists")))
    done = await bench.run(Plan(create=(secret(),)))
    assert [failure.kind for failure in done.failures] == [FailureKind.TRANSIENT]


async def test_another_object_of_the_name_is_not_deleted(bench: Bench) -> None:
    await bench.server.put(f"{PODS}/p", {"metadata": {"labels": {LABEL_NAME: "x"}}})
    done = await bench.run(Plan(delete=(deletion("Pod", "p", "an earlier one"),)))
    assert [failure.kind for failure in done.failures] == [FailureKind.TRANSIENT]
    assert f"{PODS}/p" in bench.server.objects


async def test_what_is_gone_already_is_as_good_as_deleted(bench: Bench) -> None:
    assert (await bench.run(Plan(delete=(deletion("Pod", "p", "uid"),)))).failures == ()


async def test_deletions_carry_uid_and_grace(bench: Bench) -> None:
    pod = await bench.server.put(f"{PODS}/p", {})
    await bench.run(Plan(delete=(deletion("Pod", "p", pod["metadata"]["uid"], grace_period_s=0),)))
    (_, options) = bench.server.bodies[-1]
    assert options["preconditions"] == {"uid": pod["metadata"]["uid"]}
    assert options["gracePeriodSeconds"] == 0
