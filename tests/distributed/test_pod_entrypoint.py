"""A real gateway and a real rank pod of two ranks, as a cluster runs them: ranks die, gateways are replaced.

The ranks are of one container, or of two that share their pod's /dev/shm and have processes of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from hetero_api.contract import (
    AUTHORIZATION_KEY,
    ENV_ADMIN_TOKEN_FILE,
    ENV_GROUP_TOKEN_FILE,
    ENV_POD_IP,
    ENV_POD_NAME,
    EXIT_OK,
    EXIT_PERMANENT,
)
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from hetero_api.v1.ranks_pb2 import EXCHANGE_KIND_SHM
from tests.support.kube.ports import free_port
from tests.support.local_group import alive, shared_segments, wait_for, write_manifest

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(280)]

READY_S = 120.0
NUM_TOKENS = 12
LONG_TOKENS = 200
APART_S = 0.5
"""From the signal to a gateway or its ranks to that to the other."""
HEALTH = ("health", "health-1")
PORTS = ("inference", "admin", "ranks", "metrics", *HEALTH)


@dataclass
class Cluster:
    """One gateway's and one rank pod's processes, with the environment that the operator gives them."""

    folder: Path
    model: Path
    stack: ExitStack
    containers: int = 1
    """Containers that the two ranks are in; the pod has no more."""
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in PORTS})

    def __post_init__(self) -> None:
        self.manifest = write_manifest(
            self.folder, model=self.model, name="pod-entry", ranks_per_pod=2 // self.containers, max_model_len=256
        ).path
        for name in ("group", "admin"):
            (self.folder / name).write_text(f"{name}-token")
        self.environment = {
            **os.environ,
            ENV_GROUP_TOKEN_FILE: str(self.folder / "group"),
            ENV_ADMIN_TOKEN_FILE: str(self.folder / "admin"),
            ENV_POD_NAME: "x-cpu-0",
            ENV_POD_IP: "127.0.0.1",
        }

    def start_gateway(self) -> subprocess.Popen[bytes]:
        ports = [text for name in ("inference", "admin", "ranks", "metrics") for text in self._port(name)]
        return self._start("gateway", "hetero_gateway", "--manifest", str(self.manifest), "--host", "127.0.0.1", *ports)

    def start_pod(self, **changes: str) -> subprocess.Popen[bytes]:
        options = {
            "--gateway": f"127.0.0.1:{self.ports['ranks']}", "--pool": "cpu", "--ranks-per-pod": "2",
            "--threads-per-rank": "1", "--numa-policy": "BestEffort", "--memory-bytes-per-rank": str(2 << 30),
        } | changes  # fmt: skip
        arguments = [text for option in options.items() for text in option]
        return self._start("pod", "hetero_worker.pod", *arguments, *self._port("health"))

    def start_container(self, ordinal: int) -> subprocess.Popen[bytes]:
        """One of the containers of the pod, which counts its processes for itself; its own supervisor is its first."""
        options = {
            "--gateway": f"127.0.0.1:{self.ports['ranks']}", "--pool": "cpu", "--ordinal": str(ordinal),
            "--ranks-per-pod": "1", "--threads-per-rank": "1", "--numa-policy": "BestEffort",
            "--memory-bytes-per-rank": str(2 << 30), "--health-port": str(self.ports[HEALTH[ordinal]]),
        }  # fmt: skip
        arguments = [text for option in options.items() for text in option]
        return self._start(f"container-{ordinal}", "hetero_worker.pod", *arguments, within=own_process_ids())

    def _port(self, name: str) -> tuple[str, str]:
        return f"--{name}-port", str(self.ports[name])

    def _start(self, name: str, module: str, *arguments: str, within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        log = self.stack.enter_context((self.folder / f"{name}.log").open("ab"))
        process = self.stack.enter_context(
            subprocess.Popen(
                [*within, sys.executable, "-m", module, *arguments, "--model", str(self.model)],
                env=self.environment,
                stdout=log,
                stderr=log,
            )
        )
        self.stack.callback(process.kill)
        return process

    def probe(self, port: str, path: str) -> tuple[int, str]:
        """Status and text; 0 when nobody listens."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self.ports[port]}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode().strip()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode().strip()
        except OSError as error:
            return 0, str(error)

    def until(self, condition: Callable[[], bool], timeout_s: float = READY_S) -> None:
        wait_for(condition, timeout_s, self.describe)

    def until_ready(self) -> admin_pb2.GetTopologyResponse:
        ports = ("metrics", *HEALTH[: self.containers])
        self.until(lambda: all(self.probe(port, "/readyz")[0] == 200 for port in ports))
        return self.topology()

    def topology(self) -> admin_pb2.GetTopologyResponse:
        metadata = ((AUTHORIZATION_KEY, "Bearer admin-token"),)
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['admin']}") as channel:
            stub: Any = admin_pb2_grpc.AdminStub(channel)
            answer: admin_pb2.GetTopologyResponse = stub.GetTopology(
                admin_pb2.GetTopologyRequest(), metadata=metadata, timeout=10
            )
        return answer

    def generate(self) -> list[int]:
        """Greedy tokens, the same whenever the model is whole."""
        return list(self.stream(NUM_TOKENS))

    def stream(self, num_tokens: int) -> Iterator[int]:
        """Greedy tokens as they come."""
        asked = inference_pb2.GenerateRequest(
            text="The capital of France is",
            sampling=inference_pb2.SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True),
        )
        with grpc.insecure_channel(f"127.0.0.1:{self.ports['inference']}") as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            for event in stub.Generate(asked, timeout=60):
                yield from event.delta.token_ids

    def describe(self) -> str:
        logs = [f"--- {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self.folder.glob("*.log"))]
        probes = [self.probe("health", path) for path in ("/startupz", "/livez", "/readyz")]
        return "\n".join([*logs, json.dumps(probes)])


@pytest.fixture
def cluster(tmp_path: Path, smollm2: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, smollm2, stack)


def own_process_ids() -> list[str]:
    """Begin of a command that counts its processes for itself, as a container does.

    Empty where the machine lets nobody do so: then only that is not tried.
    """
    begin = ["unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    allowed = subprocess.run([*begin, "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0
    return begin if allowed else []


def ranks_of(pod: subprocess.Popen[bytes]) -> list[int]:
    """Pids of the ranks, oldest first. All come from the pod's forkserver, whose command line they have."""
    children = sorted(psutil.Process(pod.pid).children(), key=lambda child: child.create_time())
    forkserver, *ranks = children
    assert all(child.cmdline()[-1] == "hetero_worker.process.forkserver" for child in children)
    assert all(rank.ppid() == forkserver.ppid() == pod.pid for rank in ranks)
    return [rank.pid for rank in ranks]


def test_a_killed_rank_and_a_replaced_gateway_cost_no_neighbour_its_weights(cluster: Cluster) -> None:
    pod = cluster.start_pod()
    cluster.until(lambda: cluster.probe("health", "/livez") == (200, "ok"))
    assert cluster.probe("health", "/startupz")[0] == 503  # there is no gateway yet, and that is no fault
    gateway = cluster.start_gateway()
    first = cluster.until_ready()
    assert cluster.probe("health", "/startupz") == (200, "ok")
    assert (first.epoch, first.placement_mode, len(first.ranks)) == (1, "Tensor", 2)
    assert all(rank.load_s > 0 and rank.place.pod_name == "x-cpu-0" for rank in first.ranks)
    expected = cluster.generate()
    assert len(expected) == NUM_TOKENS
    assert cluster.topology().tokens_per_second > 0

    # A rank is killed: it is restarted in place, the other keeps its weights.
    staying, killed = ranks_of(pod)
    os.kill(killed, signal.SIGKILL)
    cluster.until(lambda: cluster.probe("metrics", "/readyz")[0] == 503)
    second = cluster.until_ready()
    assert (second.epoch, sorted(rank.load_s > 0 for rank in second.ranks)) == (2, [False, True])
    assert staying in ranks_of(pod)
    assert killed not in ranks_of(pod)
    assert cluster.generate() == expected
    assert 'hetero_rank_restarts_total{local_rank="1"} 1.0' in cluster.probe("health", "/metrics")[1]

    # The gateway is rolled out anew: both ranks stay, with their weights.
    before = ranks_of(pod)
    gateway.send_signal(signal.SIGTERM)
    assert gateway.wait(30) == EXIT_OK
    cluster.until(lambda: cluster.probe("health", "/readyz")[0] == 503)
    assert cluster.probe("health", "/livez") == (200, "ok")
    gateway = cluster.start_gateway()
    third = cluster.until_ready()
    assert (third.epoch, [rank.load_s for rank in third.ranks]) == (1, [0.0, 0.0])
    assert ranks_of(pod) == before
    assert cluster.generate() == expected

    # The gateway's machine dies.
    gateway.kill()
    gateway.wait(30)
    cluster.start_gateway()
    fourth = cluster.until_ready()
    assert [rank.load_s for rank in fourth.ranks] == [0.0, 0.0]
    assert ranks_of(pod) == before

    pod.send_signal(signal.SIGTERM)
    began_s = time.monotonic()
    assert pod.wait(30) == EXIT_OK
    assert time.monotonic() - began_s < 15
    assert not [pid for pid in before if alive(pid)]
    assert not [name for name in shared_segments() if name.startswith("hetero-pod-entry-")]


@pytest.mark.parametrize("first", ["pod", "gateway"])
def test_a_gateway_and_its_ranks_that_are_asked_to_go_together_end_their_streams_first(
    cluster: Cluster, first: str
) -> None:
    """As when their node is drained: the kubelet may ask one some time before the other."""
    processes = {"pod": cluster.start_pod(), "gateway": cluster.start_gateway()}
    cluster.until_ready()
    stream = cluster.stream(LONG_TOKENS)
    tokens = [next(stream)]
    processes[first].send_signal(signal.SIGTERM)
    time.sleep(APART_S)
    for process in processes.values():
        if process is not processes[first]:
            process.send_signal(signal.SIGTERM)
    tokens += stream
    assert len(tokens) == LONG_TOKENS
    assert [process.wait(15) for process in processes.values()] == [EXIT_OK, EXIT_OK]


def test_ranks_of_two_containers_share_memory_and_one_that_ends_heals_alone(tmp_path: Path, smollm2: Path) -> None:
    with ExitStack() as stack:
        cluster = Cluster(tmp_path, smollm2, stack, containers=2)
        cluster.environment[ENV_POD_NAME] = "x-ranks-0"
        cluster.start_gateway()
        _, second = cluster.start_container(0), cluster.start_container(1)
        formed = cluster.until_ready()
        assert (formed.epoch, formed.exchange) == (1, EXCHANGE_KIND_SHM)
        assert [rank.place.pod_name for rank in formed.ranks] == ["x-ranks-0"] * 2
        expected = cluster.generate()

        second.kill()  # the kernel ends all of its processes, as when the kubelet's patience is over
        second.wait(30)
        cluster.until(lambda: cluster.probe("metrics", "/readyz")[0] == 503)
        cluster.start_container(1)
        healed = cluster.until_ready()
        assert (healed.epoch, healed.exchange) == (2, EXCHANGE_KIND_SHM)
        assert [rank.load_s > 0 for rank in healed.ranks] == [False, True]
        assert cluster.generate() == expected
        assert not [name for name in shared_segments() if name.startswith("hetero-pod-entry-")]


def test_a_model_that_cannot_be_served_ends_the_pod_and_says_why_last(cluster: Cluster, tmp_path: Path) -> None:
    cluster.model = tmp_path / "no-model"
    pod = cluster.start_pod()
    assert pod.wait(60) == EXIT_PERMANENT
    last = (tmp_path / "pod.log").read_text().splitlines()[-1]
    assert f"{tmp_path / 'no-model' / 'config.json'}" in last


def test_cores_that_are_required_and_not_there_end_the_pod_and_say_so(cluster: Cluster, tmp_path: Path) -> None:
    pod = cluster.start_pod(**{"--threads-per-rank": "4096", "--numa-policy": "Required"})
    assert pod.wait(60) == EXIT_PERMANENT
    assert "spec.pools[cpu].cpu.coresPerRank: 2 x 4096" in (tmp_path / "pod.log").read_text().splitlines()[-1]
