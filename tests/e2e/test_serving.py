"""What a new user does: apply a resource, watch it become ready, read text from it, and look at it with kubectl."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hetero_client import HeteroClient, SamplingParams
from tests.e2e.cpusets import cpuset_of, cpusets_of_others
from tests.e2e.served import ORDER, Served, is_true, restarts_of, told
from tests.e2e.site import Site
from tests.support.kube.client import Object
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.prompts import PROMPTS
from tests.support.restricted_profile import restricted_violations

GREEDY = SamplingParams(temperature=0, max_tokens=24)
QUESTION = "What is the capital of France?"
CHAT_TIMEOUT_S = 120
SOME_PROMPTS = PROMPTS[:3]
SHARES = {"attention": [2, 1], "mlp": [1, 1], "vocabulary": [1, 1]}


def texts(client: HeteroClient) -> list[str]:
    return [client.generate_text(prompt, sampling=GREEDY).text for prompt in SOME_PROMPTS]


@pytest.fixture(scope="module")
def local_texts(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the same two ranks say as processes of this machine."""
    folder = tmp_path_factory.mktemp("local")
    manifest = write_manifest(folder, model=smollm2, shares=SHARES)
    with LocalGroupProcess(manifest, home=folder / "home") as group, group.client() as client:
        return texts(client)


def test_conditions_come_true_in_order(first: Served) -> None:
    seen: list[str] = []

    def look(found: Object) -> bool:
        seen.extend(kind for kind in ORDER if kind not in seen and is_true(found, kind))
        return "Ready" in seen

    found = first.wait(look)
    assert seen == list(ORDER)
    assert found["status"]["ranks"] == "2/2"
    assert told(found, "Ready")[1] == "Serving"
    assert told(found, "Degraded")[0] == told(found, "Progressing")[0] == "False"
    assert found["status"]["epoch"] == 1
    assert restarts_of(first.pods()).keys() == {"smollm2-cpu-0", "smollm2-cpu-1"}
    assert [count for _, count in restarts_of({**first.pods(), **first.pods("gateway")}).values()] == [0, 0, 0]


def test_a_client_reads_the_text_that_the_same_ranks_say_locally(served: Served, local_texts: list[str]) -> None:
    with served.client() as client:
        read = texts(client)
    assert "Paris" in read[0]
    if served.site.has_our_files:
        assert read == local_texts


def test_hetero_chat_answers_through_a_port_forward(served: Served) -> None:
    with served.connected() as address:
        command = [
            sys.executable,
            "-m",
            "hetero_client",
            "chat",
            "--address",
            address,
            "--temperature",
            "0",
            "-n",
            "24",
        ]
        done = subprocess.run(
            command, input=f"{QUESTION}\n/exit\n", capture_output=True, text=True, check=False, timeout=CHAT_TIMEOUT_S
        )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    served.site.keep("hetero-chat.txt", f"> {QUESTION}\n{done.stdout}")


def test_kubectl_shows_what_matters(site: Site, served: Served) -> None:
    place = (f"--namespace={served.namespace}", served.name)
    short = site.kubectl("get", "hinf", *place)
    wide = site.kubectl("get", "hinf", *place, "-o", "wide")
    described = site.kubectl("describe", "hinf", *place)
    status = site.kubectl("get", "hinf", *place, "-o", "yaml")
    for name, text in {"get": short, "get-wide": wide, "describe": described, "get-yaml": status}.items():
        site.keep(f"kubectl-{name}.txt", text)
    assert short.split()[:7] == ["NAME", "READY", "RANKS", "EPOCH", "RESTARTS", "REASON", "AGE"]
    assert short.split()[7:10] == ["smollm2", "True", "2/2"]
    assert {"MODEL", "MODE", "TOK/S"} <= set(wide.split())
    assert "Serving" in described
    assert "Events:" in described


def test_every_pod_is_of_the_restricted_profile(served: Served) -> None:
    pods = {**served.pods(), **served.pods("gateway")}
    assert {name: list(restricted_violations(pod["spec"])) for name, pod in pods.items()} == {name: [] for name in pods}
    assert all(pod["status"]["qosClass"] == "Guaranteed" for pod in pods.values())


def test_each_cpu_rank_has_a_core_of_its_own_and_status_proves_it(site: Site, served: Served) -> None:
    if not site.nodes:
        pytest.skip("reads the cgroups of nodes: only on nodes of our own")
    found = served.object
    assert told(found, "NUMAPinned")[:2] == ("True", "Pinned")
    places = {place["pod"]: place for place in found["status"]["placements"]}
    pods = served.pods()
    for name, pod in pods.items():
        cpus = cpuset_of(site, pod)
        assert len(cpus) == 1, f"{name} may run on {sorted(cpus)}"
        assert places[name]["cpus"] == ",".join(map(str, cpus))
        assert places[name]["localMemoryPercent"] == 100
        assert not any(cpus & others for others in cpusets_of_others(site, pod).values()), cpusets_of_others(site, pod)
    assert found["status"]["pools"][0]["pinned"] == 2
    rows = [f"{name}: cpuset of its container {sorted(cpuset_of(site, pod))}" for name, pod in pods.items()]
    status, reason, message = told(found, "NUMAPinned")
    site.keep("exclusive-cores.txt", "\n".join([*rows, f"NUMAPinned {status} {reason}: {message}", ""]))
