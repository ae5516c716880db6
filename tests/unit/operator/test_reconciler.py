"""One look at a resource: plans are made until nothing is left to do, and only then is it told."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import pytest

from hetero_api.contract import LABEL_NAME, LABEL_REPLICA, LABEL_REVISION, LABEL_ROLE
from hetero_operator.authority import inside_certificates
from hetero_operator.cluster.cache import ClusterCache
from hetero_operator.cluster.executor import PlanExecution
from hetero_operator.cluster.inquiries import NodeBook, SecretBook, WarningBook
from hetero_operator.cluster.kinds import ALWAYS_WATCHED, RESOURCE
from hetero_operator.cluster.reporting import EventRecorder, StatusWriter
from hetero_operator.cluster.resources import Resources
from hetero_operator.cluster.store import Key, NamespaceBudget, ObjectStore
from hetero_operator.errors import NotFound, OverBudget
from hetero_operator.gateway_probe import GatewayProbe
from hetero_operator.reconcile.differences import needs_apply, stamped
from hetero_operator.reconcile.model import (
    Capabilities,
    FailureKind,
    GatewayReport,
    Object,
    Observed,
    Outcome,
    Plan,
    Policy,
    RenderOptions,
    Report,
    Transition,
)
from hetero_operator.reconciler import MAX_ROUNDS, Collaborators, Reconciler
from tests.support.api_stand_in import Answer, ApiStandIn, Fault, refusal

KEY = Key("ns", "x")
PATH = RESOURCE.path("ns", "x")
MAPS = "/api/v1/namespaces/ns/configmaps"
NOW = datetime(2026, 1, 1, 1, 0, 0, tzinfo=UTC)
OPTIONS = RenderOptions("g", "c", "u", "0")
WANTED: Object = {
    "apiVersion": "v1", "kind": "ConfigMap", "data": {"a": "1"},
    "metadata": {"name": "x-1", "namespace": "ns", "labels": {LABEL_NAME: "x", LABEL_REVISION: "1"}},
}  # fmt: skip


class FakeTime:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def wants_a_config_map(observed: Observed) -> Plan:
    return Plan() if any(item["kind"] == "ConfigMap" for item in observed.owned) else Plan(apply=(WANTED,))


def tells_how_many(observed: Observed, plan: Plan, outcome: Outcome) -> Report:
    status: dict[str, Any] = {"worldSize": len(observed.owned), "reason": "Failed" if outcome.failures else "Fine"}
    known = observed.resource.get("status") or {}
    events = () if known.get("reason") == status["reason"] else (Transition("Normal", status["reason"], ""),)
    return Report(status=status, events=events, look_again_s=30.0)


@dataclass
class Bench:
    server: ApiStandIn
    parts: Collaborators
    clock: FakeTime
    seen: list[Observed] = field(default_factory=list)

    def reconciler(
        self, plan: Callable[[Observed], Plan] = wants_a_config_map, clock: Callable[[], datetime] = lambda: NOW
    ) -> Reconciler:
        def noted(observed: Observed) -> Plan:
            self.seen.append(observed)
            return plan(observed)

        return Reconciler(self.parts, OPTIONS, Policy(), plan=noted, report=tells_how_many, clock=clock)

    async def put_resource(self) -> None:
        self.parts.resources.hear("ADDED", await self.server.put(PATH, {"spec": {}}))

    async def put_pod(
        self, name: str, *, labels: dict[str, str] | None = None, owners: Sequence[Object] | None = None, **fields: Any
    ) -> None:
        made = made_by("x-cpu", "StatefulSet") if owners is None else list(owners)
        metadata = {"labels": {LABEL_NAME: "x", **(labels or {})}, "ownerReferences": made}
        item = {"metadata": metadata, **fields}
        stored = await self.server.put(f"/api/v1/namespaces/ns/pods/{name}", item)
        self.parts.cache._stores[ALWAYS_WATCHED[0]].put(stored)

    def writes(self) -> list[str]:
        return [call for call in self.server.calls if not call.startswith("GET")]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    clock = FakeTime()
    async with ApiStandIn() as server, server.transport() as api:
        cache = ClusterCache(api, namespaces=["ns"], on_change=lambda key: None)
        cache._stores = {kind: ObjectStore(kind) for kind in ALWAYS_WATCHED}
        cache._capabilities = Capabilities((1, 33), frozenset())
        resources = Resources(api, namespaces=["ns"], resync_s=60.0, on_change=lambda key: None, clock=clock)
        book = SecretBook(api, clock=clock)
        probe = GatewayProbe(admin_port=1, inference_port=1, timeout_s=0.5)
        parts = Collaborators(
            resources=resources,
            cache=cache,
            secrets=book,
            nodes=NodeBook(api, clock=clock),
            warnings=WarningBook(api, on_change=lambda key: None, clock=clock),
            gateways=probe,
            execution=partial(PlanExecution, api, cache, book),
            statuses=StatusWriter(api, resources.store, clock=clock),
            events=EventRecorder(api, identity="me", clock=clock),
        )
        yield Bench(server, parts, clock)
        await probe.close()


async def test_what_is_missing_is_made_and_told_of_in_one_look(bench: Bench) -> None:
    await bench.put_resource()
    verdict = await bench.reconciler().reconcile(KEY)
    assert (verdict.exists, verdict.reasons, verdict.look_again_s) == (True, frozenset(), 30.0)
    assert bench.writes() == [f"PATCH {MAPS}/x-1", f"PATCH {PATH}/status"]
    assert bench.server.objects[PATH]["status"]["worldSize"] == 1
    assert bench.parts.events.pending == 1


async def test_a_second_look_writes_nothing_and_asks_nothing(bench: Bench) -> None:
    await bench.put_resource()
    await bench.reconciler().reconcile(KEY)
    bench.clock.now += 1000.0
    calls = len([call for call in bench.server.calls if "secrets" not in call])
    await bench.reconciler().reconcile(KEY)
    assert len([call for call in bench.server.calls if "secrets" not in call]) == calls
    assert bench.parts.events.pending == 1


async def test_what_the_clusters_admission_changes_is_written_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GKE's Autopilot, for one, writes other resources into templates: to write ours again would change nothing."""
    path = "/apis/apps/v1/namespaces/ns/deployments/x-gateway"
    put = bench.server.put

    async def admit(where: str, item: dict[str, Any]) -> dict[str, Any]:
        if where == path:
            known = bench.server.objects.get(where, {"spec": None, "metadata": {"generation": 0}})
            spec = {**item["spec"], "cpu": 250}
            generation = known["metadata"]["generation"] + (spec != known["spec"])
            item = {**item, "spec": spec, "metadata": {**item["metadata"], "generation": generation}}
        return await put(where, item)

    monkeypatch.setattr(bench.server, "put", admit)
    metadata = {"name": "x-gateway", "namespace": "ns", "labels": {LABEL_NAME: "x"}}
    wanted = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": {"cpu": 100, "image": "a"}}

    def plan(observed: Observed) -> Plan:
        live = next((item for item in observed.owned if item["kind"] == "Deployment"), None)
        return Plan(apply=(stamped(wanted),) if needs_apply(stamped(wanted), live) else ())

    def writes() -> int:
        return bench.writes().count(f"PATCH {path}")

    await bench.put_resource()
    for _ in range(3):
        assert not (await bench.reconciler(plan).reconcile(KEY)).unsettled
    assert writes() == 1
    assert "is stored otherwise: the cluster's admission changes it" in caplog.text
    wanted["spec"] = {"cpu": 100, "image": "b"}
    for _ in range(2):
        assert not (await bench.reconciler(plan).reconcile(KEY)).unsettled
    assert writes() == 2
    assert bench.server.objects[path]["spec"] == {"cpu": 250, "image": "b"}
    changed = await bench.server.put(path, {**bench.server.objects[path], "spec": {"cpu": 1, "image": "c"}})
    next(store for kind, store in bench.parts.cache._stores.items() if kind.kind == "Deployment").put(changed)
    assert not (await bench.reconciler(plan).reconcile(KEY)).unsettled
    assert writes() == 3, "somebody has changed it since"
    assert bench.server.objects[path]["spec"] == {"cpu": 250, "image": "b"}


async def put_large(bench: Bench, name: str, size: int) -> None:
    """A ConfigMap that the cache knows, in a namespace that is over its budget."""
    owners = [{"kind": "HeteroInference", "name": "x", "uid": "u", "controller": True}]
    item = {"metadata": {"labels": {LABEL_NAME: "x"}, "ownerReferences": owners}, "data": {"a": "x" * size}}
    stores = bench.parts.cache._stores
    kind = next(kind for kind in stores if kind.kind == "ConfigMap")
    if not len(stores[kind]):
        stores[kind] = ObjectStore(kind, budget=NamespaceBudget(limit=1000))
    stores[kind].put(await bench.server.put(f"{MAPS}/{name}", item))


async def test_bodies_that_are_not_kept_are_read_for_each_look(bench: Bench) -> None:
    await bench.put_resource()
    await put_large(bench, "x-0", 2000)
    for _ in range(2):
        calls = len(bench.server.calls)
        await bench.reconciler().reconcile(KEY)
        [item] = bench.seen[-1].owned
        assert (item["kind"], item["data"]) == ("ConfigMap", {"a": "x" * 2000})
        assert f"GET {MAPS}/x-0" in bench.server.calls[calls:]
    del bench.server.objects[f"{MAPS}/x-0"]
    await bench.reconciler(lambda observed: Plan()).reconcile(KEY)
    assert bench.seen[-1].owned == []


async def test_a_resource_that_controls_too_much_is_not_looked_at_and_no_body_is_read(bench: Bench) -> None:
    await bench.put_resource()
    for number in range(5):
        await put_large(bench, f"x-{number}", 2**20)
    with pytest.raises(OverBudget, match=r"namespace ns control more than .*labelled heteroinference\.io/name=x"):
        await bench.reconciler().reconcile(KEY)
    assert bench.server.calls == []
    assert bench.parts.events.pending == 1, "its owner is told"


async def test_a_stateful_set_that_nobody_controls_breaks_no_look(bench: Bench) -> None:
    await bench.put_resource()
    metadata = {"labels": {LABEL_NAME: "x"}, "creationTimestamp": "2026-01-01T00:00:00Z"}
    orphan = {"metadata": metadata, "spec": {"replicas": 1}}
    [store] = [store for kind, store in bench.parts.cache._stores.items() if kind.kind == "StatefulSet"]
    store.put(await bench.server.put("/apis/apps/v1/namespaces/ns/statefulsets/x-cpu", orphan))
    await bench.reconciler().reconcile(KEY)
    assert [item["metadata"]["name"] for item in bench.seen[0].owned] == ["x-cpu"]


async def test_nothing_is_made_for_a_resource_that_is_gone_unheard(bench: Bench) -> None:
    await bench.put_resource()
    await bench.server.remove(PATH, silently=True)
    bench.clock.now += 60.0
    assert not (await bench.reconciler().reconcile(KEY)).exists
    assert bench.writes() == []
    assert not (await bench.reconciler().reconcile(KEY)).exists
    assert len(bench.seen) == 1


@pytest.mark.parametrize("answer", [refusal(404, "NotFound"), refusal(409, "Conflict")])
async def test_a_resource_that_is_gone_when_it_is_told_of_is_absent(bench: Bench, answer: Answer) -> None:
    await bench.put_resource()
    await bench.server.remove(PATH, silently=True)
    bench.server.faults.append(Fault("PATCH", "/status", answer))
    verdict = await bench.reconciler(lambda _: Plan()).reconcile(KEY)
    assert (verdict.exists, verdict.reasons) == (False, frozenset())
    assert bench.writes() == [f"PATCH {PATH}/status"]
    assert bench.parts.resources.get(KEY) is None
    assert not (await bench.reconciler(lambda _: Plan()).reconcile(KEY)).exists
    assert len(bench.writes()) == 1


async def test_a_status_that_is_not_found_on_a_resource_that_is_there_is_an_error(bench: Bench) -> None:
    await bench.put_resource()
    bench.server.faults.append(Fault("PATCH", "/status", refusal(404, "NotFound")))
    with pytest.raises(NotFound):
        await bench.reconciler(lambda _: Plan()).reconcile(KEY)


async def test_a_plan_for_an_old_spec_is_not_carried_out(bench: Bench) -> None:
    await bench.put_resource()
    await bench.server.put(PATH, {"spec": {"suspend": True}})
    bench.clock.now += 60.0
    await bench.reconciler(
        lambda observed: Plan() if observed.resource["spec"].get("suspend") else Plan(apply=(WANTED,))
    ).reconcile(KEY)
    assert f"{MAPS}/x-1" not in bench.server.objects


async def test_what_is_refused_is_told_and_kept_for_later(bench: Bench) -> None:
    await bench.put_resource()
    bench.server.faults.append(Fault("PATCH", "configmaps", refusal(422, "Invalid", "no")))
    verdict = await bench.reconciler().reconcile(KEY)
    assert [failure.kind for failure in verdict.failures] == [FailureKind.INVALID]
    assert not verdict.transient
    assert bench.server.objects[PATH]["status"]["reason"] == "Failed"


async def test_plans_that_never_end_are_cut_short_and_told(bench: Bench) -> None:
    await bench.put_resource()
    verdict = await bench.reconciler(lambda observed: Plan(apply=(WANTED,))).reconcile(KEY)
    assert verdict.unsettled
    assert verdict.reasons == {"Unsettled"}
    assert bench.server.count(f"PATCH {MAPS}") == MAX_ROUNDS


async def test_nodes_are_asked_for_only_where_a_pod_is_in_trouble(bench: Bench) -> None:
    await bench.put_resource()
    ready = {"conditions": [{"type": "Ready", "status": "True"}]}
    await bench.put_pod("fine", spec={"nodeName": "n1"}, status=ready)
    await bench.put_pod("bad", spec={"nodeName": "n2"}, status={})
    await bench.put_pod("unbound", status={})
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[0].nodes == {"n2": None}
    bench.server.faults.append(Fault("GET", "nodes", refusal(403, "Forbidden"), times=10))
    bench.clock.now += 60.0
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].nodes == {}, "what may not be asked is not known"


GATEWAY_LABELS = {LABEL_ROLE: "gateway", LABEL_REVISION: "1"}
RUNS = {"phase": "Running", "podIP": "127.0.0.1"}


def made_by(name: str, kind: str = "ReplicaSet") -> list[Object]:
    return [{"kind": kind, "name": name, "uid": "r", "controller": True}]


async def put_gateway(bench: Bench, name: str, owners: list[Object], status: Object, **labels: str) -> None:
    await bench.put_pod(name, labels={**GATEWAY_LABELS, **labels}, owners=owners, status=status)


async def put_deployment(bench: Bench, name: str = "x-gateway", **pod: Any) -> None:
    """A Deployment, by default the gateway's, as the resource's own."""
    uid = bench.server.objects[PATH]["metadata"]["uid"]
    owners = [{"kind": "HeteroInference", "name": "x", "uid": uid, "controller": True}]
    metadata = {"labels": {LABEL_NAME: "x"}, "ownerReferences": owners}
    path = f"/apis/apps/v1/namespaces/ns/deployments/{name}"
    stored = await bench.server.put(path, {"metadata": metadata, "spec": {"template": {"spec": pod}}})
    kind = next(kind for kind in bench.parts.cache._stores if kind.kind == "Deployment")
    bench.parts.cache._stores[kind].put(stored)


async def test_a_gateway_is_asked_once_it_runs_and_has_an_address(bench: Bench) -> None:
    await bench.put_resource()
    await put_deployment(bench)
    await put_gateway(bench, "g", made_by("x-gateway-abc"), {"phase": "Pending"})
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is None
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is not None
    assert bench.seen[-1].gateway.error.startswith("UNAVAILABLE")


async def test_a_gateway_is_asked_beside_a_router_and_a_responder(bench: Bench) -> None:
    await bench.put_resource()
    for name in ("x-router", "x-gateway", "x-responder"):
        await put_deployment(bench, name)
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is not None


@pytest.mark.parametrize(
    "owners",
    [
        [],
        made_by("x-gateway-abc", "StatefulSet"),
        made_by("y-gateway-abc"),
        made_by("x-gateway-b-abc"),
        [{**made_by("x-gateway-abc")[0], "controller": False}],
    ],
    ids=["nobody", "another kind", "another Deployment", "one with a longer name", "without control"],
)
async def test_a_pod_that_only_calls_itself_a_gateway_is_told_no_token(bench: Bench, owners: list[Object]) -> None:
    await bench.put_resource()
    await put_deployment(bench)
    await put_gateway(bench, "stranger", owners, RUNS)
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is None
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is not None
    assert bench.seen[-1].gateway.pod == "g"


@pytest.mark.parametrize("owners", [[], made_by("y-cpu", "StatefulSet"), made_by("x-cpu", "Job")], ids=str)
async def test_a_pod_that_has_only_the_labels_of_a_resource_does_not_count(bench: Bench, owners: list[Object]) -> None:
    await bench.put_resource()
    await bench.put_pod("stranger", labels={LABEL_REPLICA: "999"}, owners=owners, status={})
    await bench.put_pod("x-cpu-0", status={})
    await bench.reconciler().reconcile(KEY)
    assert [pod["metadata"]["name"] for pod in bench.seen[-1].pods] == ["x-cpu-0"]


async def test_a_gateway_without_a_deployment_of_ours_is_not_asked(bench: Bench) -> None:
    await bench.put_resource()
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is None


async def test_a_gateway_that_knows_certificates_is_asked_with_one_or_not_at_all(bench: Bench) -> None:
    await bench.put_resource()
    await put_deployment(bench, volumes=[{"name": "inside-tls"}])
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway is not None
    assert bench.seen[-1].gateway.error == "Secret x-inside-1 is not there yet"
    made = inside_certificates(("x-gateway.ns.svc",), NOW)
    data = {key: base64.b64encode(value).decode() for key, value in made.items()}
    await bench.server.put("/api/v1/namespaces/ns/secrets/x-inside-1", {"metadata": {}, "data": data})
    await bench.reconciler().reconcile(KEY)
    assert bench.seen[-1].gateway.error.startswith("UNAVAILABLE")


@pytest.mark.parametrize("uses_tls", [True, False])
async def test_a_gateway_is_asked_by_the_tls_that_it_has_whatever_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, uses_tls: bool
) -> None:
    asked: list[bool] = []

    async def ask(pod: str, *_: Any, uses_tls: bool, **__: Any) -> GatewayReport:
        asked.append(uses_tls)
        return GatewayReport(pod)

    monkeypatch.setattr(bench.parts.gateways, "ask", ask)
    spec = {"spec": {} if uses_tls else {"gateway": {"tls": {"secretName": "tls"}}}}
    bench.parts.resources.hear("ADDED", await bench.server.put(PATH, spec))
    await put_deployment(bench, volumes=[{"name": "tls"}] if uses_tls else [])
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler().reconcile(KEY)
    assert set(asked) == {uses_tls}


@pytest.mark.parametrize("takes_s", [0.5, 5.0])
async def test_what_changes_while_a_gateway_answers_slowly_is_seen(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, takes_s: float
) -> None:
    now = [NOW]

    async def answer_late(pod: str, *_: Any, **__: Any) -> GatewayReport:
        now[0] += timedelta(seconds=takes_s)
        await bench.put_pod("late", status={})
        return GatewayReport(pod, error="DEADLINE_EXCEEDED: ")

    monkeypatch.setattr(bench.parts.gateways, "ask", answer_late)
    await bench.put_resource()
    await put_deployment(bench)
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    await bench.reconciler(lambda _: Plan(), clock=lambda: now[0]).reconcile(KEY)
    [seen] = bench.seen
    assert {pod["metadata"]["name"] for pod in seen.pods} == ({"g", "late"} if takes_s > 1 else {"g"})
    assert seen.gateway is not None


async def test_a_resource_that_goes_while_its_gateway_answers_slowly_is_absent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [NOW]

    async def answer_late(pod: str, *_: Any, **__: Any) -> GatewayReport:
        now[0] += timedelta(seconds=5.0)
        bench.parts.resources.hear("DELETED", bench.server.objects[PATH])
        return GatewayReport(pod, error="DEADLINE_EXCEEDED: ")

    monkeypatch.setattr(bench.parts.gateways, "ask", answer_late)
    await bench.put_resource()
    await put_deployment(bench)
    await put_gateway(bench, "g", made_by("x-gateway-abc"), RUNS)
    assert not (await bench.reconciler(clock=lambda: now[0]).reconcile(KEY)).exists
    assert bench.seen == []
    assert bench.writes() == []


async def test_the_secret_of_a_revision_is_seen_without_listing_any(bench: Bench) -> None:
    await bench.put_resource()
    await bench.server.put("/api/v1/namespaces/ns/secrets/x-group-1", {"metadata": {"labels": {LABEL_NAME: "x"}}})
    await bench.reconciler().reconcile(KEY)
    assert "Secret" in {item["kind"] for item in bench.seen[-1].owned}
    assert "GET /api/v1/namespaces/ns/secrets" not in bench.server.calls
