"""The operator's side of a group's inside: it makes the certificates, and shows its own before it sends a token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from hetero_api.contract import ANNOTATION_RENEW_AFTER
from hetero_operator.gateway_probe import InsideTls
from hetero_operator.reconcile.inventory import ObjectKey
from hetero_operator.reconcile.manifests.config import RENEWED_AFTER
from hetero_operator.reconcile.status.text import parsed_time
from tests.support.asked_gateway import Gateway
from tests.support.inside_certificates import EXPIRED, NAME, Inside
from tests.support.operator_world import OperatorWorld
from tests.support.render_cases import OPTIONS, UPGRADED, resource_of

pytestmark = pytest.mark.unit

SPEC: dict[str, Any] = {"model": {"uri": "hf://a/b"}, "pools": [{"name": "cpu", "type": "CPU", "ranks": 2}]}
INSIDE = replace(OPTIONS, inside_tls=True)
OURS, THEIRS = Inside.new(), Inside.new()


# --- what it makes --------------------------------------------------------------------------------------


def running(options: Any = INSIDE) -> OperatorWorld:
    world = OperatorWorld(resource_of("x", SPEC), options=options)
    world.reconcile()
    return world


def secret_of(world: OperatorWorld) -> dict[str, Any] | None:
    found = [item for name, item in world.of_kind("Secret").items() if "-inside-" in name]
    return found[0] if found else None


def pod_files(world: OperatorWorld) -> dict[str, Any]:
    """The volume with certificates of each pod, and the arguments of its container, by role."""
    found = {}
    for pod in world.pods.values():
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        [main] = pod["spec"]["containers"]
        found[pod["metadata"]["labels"]["heteroinference.io/role"]] = (volumes.get("inside-tls"), main)
    return found


def test_each_pod_reads_its_own_certificate_and_no_key_of_the_authority() -> None:
    for role, (volume, main) in pod_files(running()).items():
        items = {item["key"]: item["path"] for item in volume["secret"]["items"]}
        assert items == {"ca.crt": "ca.crt", f"{role}.crt": "tls.crt", f"{role}.key": "tls.key"}
        [mount] = [mount for mount in main["volumeMounts"] if mount["name"] == "inside-tls"]
        assert mount == {"name": "inside-tls", "mountPath": "/etc/hetero/inside", "readOnly": True}
        assert main["args"][main["args"].index("--inside-tls-dir") + 1] == "/etc/hetero/inside"


def test_certificates_are_for_the_names_that_the_gateway_is_dialled_by() -> None:
    [_, certificates] = OperatorWorld(resource_of("x", SPEC), options=INSIDE).plan().create
    host = "x-gateway.models.svc"
    assert certificates.gateway_names == (host, f"{host}.cluster.local", "localhost")
    assert not certificates.renews
    main = pod_files(running())["rank"][1]
    assert main["args"][main["args"].index("--gateway") + 1] == f"{host}.cluster.local:50053"


def test_nothing_of_it_is_there_without_the_setting() -> None:
    world = running(OPTIONS)
    assert secret_of(world) is None
    assert all(volume is None and "--inside-tls-dir" not in main["args"] for volume, main in pod_files(world).values())


def test_a_group_that_began_without_certificates_goes_on_without() -> None:
    world = running(OPTIONS)
    world.options = replace(UPGRADED, inside_tls=True)
    assert world.plan().idle
    world.change({**SPEC, "engine": {"maxNumSeqs": 7}})  # the gateway is made again, the ranks stay
    world.reconcile()
    assert secret_of(world) is None
    world.change({**SPEC, "engine": {"maxNumSeqs": 7}, "podMetadata": {"labels": {"a": "b"}}})
    world.reconcile()
    assert secret_of(world) is not None
    assert all(volume is not None for volume, _ in pod_files(world).values())


def test_certificates_are_renewed_in_time_and_their_place_is_kept() -> None:
    world = running()
    secret = secret_of(world)
    assert secret is not None
    due = parsed_time(secret["metadata"]["annotations"][ANNOTATION_RENEW_AFTER])
    assert due is not None
    assert timedelta(0) <= world.now + RENEWED_AFTER - due <= timedelta(minutes=1)
    world.now = due - timedelta(seconds=1)
    assert world.plan().idle
    world.now = due
    [renewed] = world.plan().create
    assert renewed.renews == secret["metadata"]["uid"]
    assert renewed.manifest["metadata"]["name"] == secret["metadata"]["name"]
    assert parsed_time(renewed.manifest["metadata"]["annotations"][ANNOTATION_RENEW_AFTER]) == due + RENEWED_AFTER
    assert not world.plan().apply
    assert not world.plan().delete


def test_a_secret_that_does_not_say_when_is_renewed_now() -> None:
    world = running()
    secret = secret_of(world)
    assert secret is not None
    del secret["metadata"]["annotations"]
    assert [item.renews for item in world.plan().create] == [secret["metadata"]["uid"]]


def test_the_secret_of_an_earlier_revision_goes_with_its_last_pod() -> None:
    world = running()
    before = secret_of(world)
    assert before is not None
    world.change({**SPEC, "podMetadata": {"labels": {"a": "b"}}})
    world.reconcile()
    assert ObjectKey.from_object(before) not in world.objects
    assert secret_of(world) is not None


# --- what it shows a gateway, and asks it to show -------------------------------------------------------


def encrypted(inside: Inside) -> Gateway:
    """A gateway that asks administrators for certificates, and does not try its own before."""
    authority, certificate, key = inside.values("ca.crt", "gateway.crt", "gateway.key")
    return Gateway(grpc.ssl_server_credentials([(key, certificate)], authority, require_client_auth=True))


async def error_of(gateway: Gateway, inside: InsideTls | None) -> str:
    await gateway.start()
    await gateway.health.set("hetero.v1.Inference", health_pb2.HealthCheckResponse.SERVING)
    probe = gateway.probe()
    report = await probe.ask("p", "127.0.0.1", "secret", inside=inside)
    await probe.close()
    return report.error


@pytest.fixture
async def started() -> AsyncIterator[list[Gateway]]:
    gateways: list[Gateway] = []
    yield gateways
    for gateway in gateways:
        await gateway.stop()


async def test_a_gateway_of_the_group_is_asked(started: list[Gateway]) -> None:
    started.append(encrypted(OURS))
    assert await error_of(started[-1], OURS.operator()) == ""


@pytest.mark.parametrize(
    ("gateway", "operator", "reason"),
    [
        (THEIRS, OURS.operator(), "CERTIFICATE_VERIFY_FAILED"),
        (OURS, OURS.operator("x-gateway.other.svc"), "Hostname Verification Check failed"),
        (Inside.new(age=EXPIRED), Inside.new(age=EXPIRED).operator(), "CERTIFICATE_VERIFY_FAILED"),
        (OURS, THEIRS.trusting(OURS).operator(), ""),
        (OURS, None, ""),
    ],
    ids=["wrong authority", "wrong name", "expired", "the operator is a stranger", "the operator shows nothing"],
)
async def test_no_token_is_sent_to_who_is_not_of_the_group(
    started: list[Gateway], gateway: Inside, operator: InsideTls | None, reason: str
) -> None:
    started.append(encrypted(gateway))
    error = await error_of(started[-1], operator)
    assert error.startswith("UNAVAILABLE")
    assert reason in error
    assert started[-1].tokens == []


async def test_a_gateway_that_shows_nothing_gets_no_token(started: list[Gateway]) -> None:
    started.append(Gateway())
    assert (await error_of(started[-1], OURS.operator(NAME))).startswith("UNAVAILABLE")
    assert started[-1].tokens == []
