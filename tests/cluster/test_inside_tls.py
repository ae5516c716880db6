"""Certificates of a group's inside on a real API server, with the rights of the chart: made, mounted, renewed."""

from __future__ import annotations

from hetero_api.contract import ANNOTATION_RENEW_AFTER
from tests.support.kube.client import Object
from tests.support.operator_scene import Scene

INSIDE = {"inside_tls": "true"}
LONG_AGO = "2020-01-01T00:00:00Z"


def secret_of(scene: Scene) -> Object:
    secrets = scene.client.list_all("Secret", scene.namespace)
    found = [item for item in secrets if "-inside-" in item["metadata"]["name"]]
    return found[0] if found else {}


def test_certificates_are_made_with_the_group_and_renewed_while_it_runs(scene: Scene) -> None:
    with scene.operator(settings=INSIDE) as operator, scene.autopilot():
        scene.apply("x")
        scene.client.wait_list("Pod", scene.namespace, until=lambda pods: len(pods) == 3)
        first = secret_of(scene)
        pods = scene.client.list_all("Pod", scene.namespace)
        for pod in pods:
            names = {volume["secret"]["secretName"] for volume in pod["spec"]["volumes"] if "secret" in volume}
            assert first["metadata"]["name"] in names
        assert "ca.key" in first["data"]
        note = {"metadata": {"annotations": {ANNOTATION_RENEW_AFTER: LONG_AGO}}}
        scene.client.patch("Secret", first["metadata"]["name"], note, scene.namespace)
        operator.restart()  # one that knows of the Secret already believes what it knows for minutes
        operator.wait_leading()
        scene.client.wait_for(
            "Secret", first["metadata"]["name"], scene.namespace,
            until=lambda found: bool(found["metadata"]["uid"] != first["metadata"]["uid"]),
        )  # fmt: skip
        second = secret_of(scene)
        assert second["data"]["ca.crt"] == first["data"]["ca.crt"]
        assert second["data"]["gateway.crt"] != first["data"]["gateway.crt"]
        assert second["metadata"]["annotations"][ANNOTATION_RENEW_AFTER] > LONG_AGO
        scene.wait_quiet()
        assert {pod["metadata"]["uid"] for pod in scene.client.list_all("Pod", scene.namespace)} == {
            pod["metadata"]["uid"] for pod in pods
        }
        assert secret_of(scene)["metadata"]["uid"] == second["metadata"]["uid"]
