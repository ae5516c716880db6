"""The router: the objects that it comes and goes with, its pod, its rights, who reaches it, and its condition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from hetero_api.contract import LABEL_NAME, LABEL_ROLE, LABEL_ROUTER, ROLE_GATEWAY, ROUTER_PORT
from hetero_operator.reconcile.inventory import ObjectKey
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import EXAMPLES, OPTIONS, UPGRADED, resource_of
from tests.support.replica_scene import ReplicaScene
from tests.support.restricted_profile import restricted_violations

SMG = {"type": "SMG"}
GATEWAYS = {LABEL_NAME: "x", LABEL_ROLE: ROLE_GATEWAY}
OWN = {
    "Deployment/x-router", "Service/x-router", "Service/x-engines", "ServiceAccount/x-router", "Role/x-router",
    "RoleBinding/x-router", "NetworkPolicy/x-router",
}  # fmt: skip


def objects(scene: ReplicaScene) -> set[str]:
    return {f"{key.kind}/{key.name}" for key in scene.world.objects}


def found(scene: ReplicaScene, kind: str, name: str = "x-router") -> Any:
    return scene.world.of_kind(kind)[name]


def container(scene: ReplicaScene) -> Any:
    [only] = found(scene, "Deployment")["spec"]["template"]["spec"]["containers"]
    return only


def option(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def gateway_arguments(scene: ReplicaScene, name: str = "x-gateway") -> list[str]:
    arguments: list[str] = found(scene, "Deployment", name)["spec"]["template"]["spec"]["containers"][0]["args"]
    return arguments


def test_it_comes_with_the_gateways_door_for_it_and_goes_again() -> None:
    scene = ReplicaScene.of(2)
    assert not OWN & objects(scene)
    assert "--router-port" not in gateway_arguments(scene)
    scene.change(router=SMG)
    scene.settle()
    assert objects(scene) >= OWN
    for name in ("x-gateway", "x-1-gateway"):
        assert option(gateway_arguments(scene, name), "--router-port") == str(ROUTER_PORT)
    scene.change(router={})
    scene.settle()
    assert not OWN & objects(scene)
    assert "--router-port" not in gateway_arguments(scene)


def test_all_its_objects_go_with_the_resource() -> None:
    scene = ReplicaScene.of(1, router=SMG)
    own = {key: item for key, item in scene.world.objects.items() if f"{key.kind}/{key.name}" in OWN}
    uid = scene.world.resource["metadata"]["uid"]
    assert len(own) == len(OWN)
    for item in own.values():
        assert [owner["uid"] for owner in item["metadata"]["ownerReferences"]] == [uid]
        assert item["metadata"]["labels"][LABEL_NAME] == "x"


def test_its_account_may_list_and_watch_pods_of_its_namespace_and_nothing_else() -> None:
    scene = ReplicaScene.of(1, router=SMG)
    assert found(scene, "Role")["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    binding = found(scene, "RoleBinding")
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "x-router"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "x-router", "namespace": "models"}]
    pod = found(scene, "Deployment")["spec"]["template"]["spec"]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("x-router", True)
    for name in ("x-gateway", "x-rank"):
        assert found(scene, "ServiceAccount", name)["automountServiceAccountToken"] is False


def test_it_watches_the_pods_of_all_gateways_and_asks_those_that_are_ready() -> None:
    scene = ReplicaScene.of(3, router=SMG)
    arguments = container(scene)["args"]
    assert option(arguments, "--pods") == "models/" + ",".join(f"{key}={value}" for key, value in GATEWAYS.items())
    assert option(arguments, "--gateway") == f"x-engines.models.svc.cluster.local:{ROUTER_PORT}"
    engines = found(scene, "Service", "x-engines")["spec"]
    assert engines["selector"] == GATEWAYS
    assert "publishNotReadyAddresses" not in engines
    gateways = [pod for pod in scene.world.pods.values() if pod["metadata"]["labels"].get(LABEL_ROLE) == ROLE_GATEWAY]
    assert len(gateways) == 3
    assert all(GATEWAYS.items() <= pod["metadata"]["labels"].items() for pod in gateways)


def test_a_replica_more_changes_nothing_about_it() -> None:
    scene = ReplicaScene.of(1, router=SMG)
    key = ObjectKey("apps", "Deployment", "x-router")
    before = scene.world.objects[key]["metadata"]["generation"]
    scene.change(replicas=3)
    scene.settle()
    assert scene.world.objects[key]["metadata"]["generation"] == before


def test_only_it_reaches_the_gateways_door_for_it() -> None:
    scene = ReplicaScene.of(1, router=SMG)
    rules = found(scene, "NetworkPolicy", "x-gateway")["spec"]["ingress"]
    opening = [rule for rule in rules if ROUTER_PORT in [port["port"] for port in rule["ports"]]]
    assert [rule["from"] for rule in opening] == [[{"podSelector": {"matchLabels": {LABEL_ROUTER: "x"}}}]]
    template = found(scene, "Deployment")["spec"]["template"]
    assert template["metadata"]["labels"][LABEL_ROUTER] == "x"
    assert not any(port["port"] == ROUTER_PORT for port in found(scene, "Service", "x")["spec"]["ports"])


def test_its_policy_lets_clients_in_and_gateways_the_api_server_and_name_servers_out() -> None:
    scene = ReplicaScene.of(1, router=SMG)
    policy = found(scene, "NetworkPolicy")["spec"]
    assert policy["ingress"] == [
        {"ports": [{"protocol": "TCP", "port": 9090}]},
        {"from": [{"podSelector": {}}], "ports": [{"protocol": "TCP", "port": 8000}]},
    ]
    gateways, api_server, names = policy["egress"]
    assert gateways == {
        "to": [{"podSelector": {"matchLabels": GATEWAYS}}], "ports": [{"protocol": "TCP", "port": ROUTER_PORT}],
    }  # fmt: skip
    assert [port["port"] for port in api_server["ports"]] == [443, 6443]
    assert {port["port"] for port in names["ports"]} == {53, 5353}
    scene.world.policy = replace(scene.world.policy, api_server_ports=(8443,))
    scene.settle()
    assert found(scene, "NetworkPolicy")["spec"]["egress"][1] == {"ports": [{"protocol": "TCP", "port": 8443}]}


def test_its_clients_are_the_gateways_but_for_those_of_an_earlier_version() -> None:
    def peers() -> Any:
        return [rule.get("from", "anywhere") for rule in found(scene, "NetworkPolicy")["spec"]["ingress"]][1]

    scene = ReplicaScene.of(1, router=SMG, gateway={"auth": {"mode": "None"}}, networkPolicy={"clientsFrom": "All"})
    assert peers() == "anywhere"
    scene = ReplicaScene.of(1)
    del found(scene, "NetworkPolicy", "x-gateway")["metadata"]["annotations"]["heteroinference.io/clients"]
    scene.change(router=SMG)
    scene.settle()
    assert not any("from" in rule for rule in found(scene, "NetworkPolicy", "x-gateway")["spec"]["ingress"][1:2])
    assert peers() == [{"podSelector": {}}]


def test_its_pod_is_restricted_and_no_part_of_a_replica() -> None:
    scene = ReplicaScene.of(1, router={**SMG, "resources": {"cpuMillis": 500, "memory": "1Gi"}})
    template = found(scene, "Deployment")["spec"]["template"]
    assert list(restricted_violations(template["spec"])) == []
    assert LABEL_NAME not in template["metadata"]["labels"]
    assert container(scene)["resources"]["limits"] == {"cpu": "500m", "memory": "1Gi"}
    assert container(scene)["image"] == OPTIONS.router_image
    assert scene.status()["replicas"] == 1


def test_keys_and_certificate_are_files_of_its_secrets() -> None:
    router = {
        **SMG, "cacheIsolation": "Shared", "tlsSecretName": "front", "keysSecretRef": {"name": "tenants", "key": "k"},
    }  # fmt: skip
    scene = ReplicaScene.of(1, router=router)
    arguments, pod = container(scene)["args"], found(scene, "Deployment")["spec"]["template"]["spec"]
    assert option(arguments, "--keys") == "/etc/hetero/router-keys/keys.txt"
    assert option(arguments, "--tls-dir") == "/etc/hetero/tls"
    secrets = {volume["secret"]["secretName"]: volume["secret"]["items"] for volume in pod["volumes"][:2]}
    assert secrets["tenants"] == [{"key": "k", "path": "keys.txt"}]
    assert [item["key"] for item in secrets["front"]] == ["tls.crt", "tls.key"]
    assert container(scene)["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"


def test_it_stays_while_replicas_make_way_and_stops_with_the_last() -> None:
    scene = ReplicaScene.of(2, router=SMG)
    scene.change(model={"uri": "hf://a/other"})
    replicas: list[int] = []
    for _ in range(30):
        todo = scene.world.plan()
        scene.world.act(todo)
        scene.move()
        replicas.append(found(scene, "Deployment")["spec"]["replicas"])
    assert set(replicas) == {2}
    for fields in ({"replicas": 0}, {"replicas": 2, "suspend": True}):
        scene.change(**fields)
        scene.settle()
        assert found(scene, "Deployment")["spec"]["replicas"] == 0


def test_its_two_pods_are_kept_apart_and_evicted_one_at_a_time() -> None:
    scene = ReplicaScene.of(1, router=SMG, disruptionBudget={"enabled": True})
    spec = found(scene, "Deployment")["spec"]
    assert spec["replicas"] == 2
    own = {LABEL_ROUTER: "x"}
    [apart] = spec["template"]["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert apart["podAffinityTerm"] == {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": own}}
    budget = found(scene, "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == {"matchLabels": own}
    template = spec["template"]
    scene.change(router={**SMG, "replicas": 1}, disruptionBudget={})
    scene.settle()
    assert (found(scene, "Deployment")["spec"]["replicas"], found(scene, "Deployment")["spec"]["template"]) == (
        1, template,
    )  # fmt: skip
    assert "PodDisruptionBudget/x-router" not in objects(scene)


def test_a_callers_address_stays_with_one_pod_which_remembers_its_responses() -> None:
    assert found(ReplicaScene.of(1, router=SMG), "Service")["spec"]["sessionAffinity"] == "ClientIP"


def test_callers_are_the_responders_while_nothing_serves() -> None:
    scene = ReplicaScene.of(0, router=SMG, idle={"responder": {"enabled": True}})
    responder = found(scene, "Deployment", "x-responder")["spec"]["template"]
    service = found(scene, "Service")["spec"]
    assert service["selector"].items() <= responder["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] in [
        port["name"] for port in responder["spec"]["containers"][0]["ports"]
    ]  # fmt: skip
    scene.change(replicas=1)
    scene.settle()
    assert found(scene, "Service", "x")["spec"]["selector"] == GATEWAYS
    assert found(scene, "Service")["spec"]["selector"].items() <= responder["metadata"]["labels"].items()
    assert deployment_says(scene, readyReplicas=1)["reason"] == "Serving"
    assert found(scene, "Service")["spec"]["selector"] == {LABEL_ROUTER: "x"}
    assert "Deployment/x-responder" not in objects(scene)


def test_an_upgrade_of_the_operator_leaves_it_and_a_new_revision_brings_the_new_image() -> None:
    scene = ReplicaScene.of(1, router=SMG)
    before = found(scene, "Deployment")["spec"]["template"]
    scene.world.options = UPGRADED
    scene.settle()
    assert found(scene, "Deployment")["spec"]["template"] == before
    scene.change(model={"uri": "hf://a/other"})
    scene.settle()
    assert container(scene)["image"] == UPGRADED.router_image


def test_one_is_made_beside_ranks_of_a_version_that_knew_none() -> None:
    scene = ReplicaScene.of(1)
    [config] = scene.world.of_kind("ConfigMap").values()
    config["data"]["templates.json"] = config["data"]["templates.json"].replace(OPTIONS.router_image, "")
    scene.change(router=SMG)
    scene.settle()
    assert container(scene)["image"] == OPTIONS.router_image


@pytest.mark.parametrize(
    "gateway",
    [{"auth": {"keysSecretRef": {"name": "clients"}}}, {"tls": {"secretName": "t", "clientCASecretName": "ca"}}],
    ids=["keys", "certificates"],
)
def test_a_router_without_keys_before_a_gateway_that_asks_for_proof_is_refused(gateway: dict[str, Any]) -> None:
    scene = ReplicaScene.of(1, gateway=gateway)
    scene.change(router={**SMG, "cacheIsolation": "Shared"})
    scene.settle()
    assert not OWN & objects(scene)
    accepted = scene.condition("Accepted")
    assert (accepted["status"], accepted["reason"]) == ("False", "InvalidSpec")
    assert accepted["message"].startswith("spec.router.keysSecretRef: is required")
    scene.change(router={**SMG, "cacheIsolation": "Shared", "keysSecretRef": {"name": "tenants"}})
    scene.settle()
    assert scene.condition("Accepted")["status"] == "True"
    assert objects(scene) >= OWN


def deployment_says(scene: ReplicaScene, **status: Any) -> dict[str, Any]:
    """The condition once the router's Deployment has this status."""
    live = found(scene, "Deployment")
    live["status"] = {"observedGeneration": live["metadata"]["generation"], **status}
    scene.settle()
    return dict(scene.condition("RouterReady"))


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_condition_says_whether_it_takes_calls(replicas: int) -> None:
    scene = ReplicaScene.of(replicas)
    assert (scene.condition("RouterReady")["status"], scene.condition("RouterReady")["reason"]) == (
        "False", "NotRequested",
    )  # fmt: skip
    scene.change(router=SMG)
    scene.settle()
    assert (scene.condition("RouterReady")["status"], scene.condition("RouterReady")["reason"]) == ("False", "Starting")
    assert deployment_says(scene)["reason"] == "RouterNotReady"
    told = deployment_says(scene, readyReplicas=1)
    assert (told["status"], told["reason"], told["message"]) == ("True", "Serving", "The router takes calls.")
    assert scene.condition("Degraded")["status"] == "False"
    scene.change(replicas=0)
    scene.settle()
    assert (scene.condition("RouterReady")["status"], scene.condition("RouterReady")["reason"]) == (
        "False", "ScaledToZero",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"}, "PodCreationFailed"),
        ({"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}, "RouterNotReady"),
    ],
    ids=["quota", "deadline"],
)
def test_a_broken_router_degrades_the_resource_which_serves_on(condition: dict[str, Any], reason: str) -> None:
    scene = ReplicaScene.of(1, router=SMG)
    told = deployment_says(scene, conditions=[condition])
    assert (told["status"], told["reason"]) == ("False", reason)
    degraded = scene.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", reason)
    assert "x-router" in degraded["message"]
    assert scene.condition("Ready")["status"] == "True"


def test_the_example_is_accepted_and_has_a_router() -> None:
    document = yaml.safe_load((EXAMPLES / "replicas/smollm2-router.yaml").read_text(encoding="utf-8"))
    world = OperatorWorld(resource_of(document["metadata"]["name"], document["spec"]))
    todo = world.plan()
    assert todo.refusal == ()
    assert "smollm2-routed-router" in {item["metadata"]["name"] for item in todo.apply}
