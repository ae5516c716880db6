"""A real gateway and a real rank that know one another by the operator's certificates, asked by the operator's probe.

Between all of them is a listener, who reads neither token nor prompt; without certificates it reads both.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from hetero_api.contract import ENV_ADMIN_TOKEN_FILE, ENV_GROUP_TOKEN_FILE, ENV_POD_IP, ENV_POD_NAME
from hetero_api.group_state import GroupState
from hetero_api.v1 import inference_pb2, inference_pb2_grpc
from hetero_operator.gateway_probe import GatewayProbe
from hetero_operator.reconcile.model import GatewayReport
from tests.support.inside_certificates import Inside
from tests.support.kube.ports import free_port
from tests.support.local_group import wait_for, write_manifest
from tests.support.tiny_models import save_tiny_model
from tests.support.wire import Wire

pytestmark = pytest.mark.distributed

_ADDRESSES = (each for found in psutil.net_if_addrs().values() for each in found if each.family == socket.AF_INET)
POD_IP = next((each.address for each in _ADDRESSES if not each.address.startswith("127.")), "127.0.0.1")
"""An address of this machine that is not the loopback's, if it has one."""
PROMPT = b"the secret prompt"
TOKENS = {"group": "the-groups-own-token", "admin": "the-administrators-token"}
PORTS = ("inference", "admin", "ranks", "http", "metrics", "health")
PATIENCE_S = 90.0


@dataclass
class Pods:
    """One gateway's and one rank pod's processes, with what the operator gives them."""

    folder: Path
    stack: AsyncExitStack
    ports: dict[str, int] = field(default_factory=lambda: {name: free_port() for name in PORTS})
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / "model").mkdir()
        model = save_tiny_model(self.folder / "model", "llama")
        manifest = write_manifest(self.folder, model=model, ranks=2, ranks_per_pod=2, max_model_len=128)
        for name, token in TOKENS.items():
            (self.folder / name).write_text(token)
        self._model = ("--model", str(model))
        self._manifest = ("--manifest", str(manifest.path))
        self._environment = {
            **os.environ,
            ENV_GROUP_TOKEN_FILE: str(self.folder / "group"), ENV_ADMIN_TOKEN_FILE: str(self.folder / "admin"),
            ENV_POD_NAME: "x-cpu-0", ENV_POD_IP: POD_IP,
        }  # fmt: skip

    def start_gateway(self, inside: Path | None) -> None:
        ports = [text for name in PORTS[:-1] for text in (f"--{name}-port", str(self.ports[name]))]
        self._start("gateway", "hetero_gateway", inside, *self._manifest, *ports)

    def start_pod(self, inside: Path | None, *, ranks_port: int) -> None:
        self._start(
            "pod", "hetero_worker.pod", inside, "--gateway", f"localhost:{ranks_port}", "--pool", "cpu",
            "--ranks-per-pod", "2", "--threads-per-rank", "1", "--numa-policy", "None",
            "--memory-bytes-per-rank", str(1 << 30), "--health-port", str(self.ports["health"]),
        )  # fmt: skip

    def _start(self, name: str, module: str, inside: Path | None, *arguments: str) -> None:
        certificates = () if inside is None else ("--inside-tls-dir", str(inside))
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, *self._model, *arguments, *certificates],
                env=self._environment, stdout=log, stderr=log,
            )  # fmt: skip
        self.processes[name] = process
        self.stack.callback(process.wait)
        self.stack.callback(process.terminate)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text() if path.exists() else ""

    def listening(self) -> set[str]:
        """Addresses that the rank pod's processes listen on."""
        pod = psutil.Process(self.processes["pod"].pid)
        sockets = [
            found for process in (pod, *pod.children(recursive=True)) for found in process.net_connections("tcp")
        ]
        return {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN}

    async def generate(self) -> bytes:
        """The answer to the prompt, token by token."""
        asked = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingParams(max_tokens=4, ignore_eos=True),
        )
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['inference']}") as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            return bytes([1 async for event in stub.Generate(asked, timeout=60) for _ in event.delta.token_ids])


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:
        yield Pods(tmp_path, stack)


async def until_ready(pods: Pods, probe: GatewayProbe, inside: Inside | None) -> GatewayReport:
    credentials, end = None if inside is None else inside.operator(), time.monotonic() + PATIENCE_S
    while True:
        report = await probe.ask("x-gateway-0", "127.0.0.1", TOKENS["admin"], inside=credentials)
        if report.state is GroupState.READY and report.serving:
            return report
        assert time.monotonic() < end, f"{report.error}\n{pods.log('gateway')}\n{pods.log('pod')}"
        await asyncio.sleep(0.1)


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_a_listener_reads_neither_token_nor_prompt(pods: Pods, tmp_path: Path, is_encrypted: bool) -> None:
    inside = Inside.new() if is_encrypted else None
    folders = [inside.gateway(tmp_path / "g"), inside.rank(tmp_path / "r")] if inside else [None, None]
    async with Wire(f":{pods.ports['ranks']}") as to_ranks, Wire(f":{pods.ports['admin']}") as to_admin:
        pods.start_gateway(folders[0])
        pods.start_pod(folders[1], ranks_port=to_ranks.port)
        probe = GatewayProbe(admin_port=to_admin.port, inference_port=pods.ports["inference"])
        try:
            report = await until_ready(pods, probe, inside)
            assert len(await pods.generate()) == 4
            assert pods.listening() == {POD_IP}, "store, Gloo, exchange and probes are on the pod's address alone"
        finally:
            await probe.close()
    assert [rank.place.pod_name for rank in report.group.ranks] == ["x-cpu-0", "x-cpu-0"]
    heard = {TOKENS["group"].encode(): to_ranks.seen, PROMPT: to_ranks.seen, TOKENS["admin"].encode(): to_admin.seen}
    # Without certificates all of it can be read, so its absence shows something.
    assert {words: words in seen for words, seen in heard.items()} == dict.fromkeys(heard, not is_encrypted)


@pytest.mark.parametrize(
    ("names", "is_of_another_group", "reason"),
    [
        ((), True, "unable to get local issuer certificate"),
        (("x-gateway.other.svc",), False, "certificate is not valid for 'localhost'"),
    ],
    ids=["another authority", "another name"],
)
async def test_a_pod_that_does_not_trust_the_gateway_says_why(
    pods: Pods, tmp_path: Path, names: tuple[str, ...], is_of_another_group: bool, reason: str
) -> None:
    ours = Inside.new(*names)
    theirs = Inside.new() if is_of_another_group else ours
    pods.start_gateway(ours.gateway(tmp_path / "g"))
    pods.start_pod(theirs.rank(tmp_path / "r"), ranks_port=pods.ports["ranks"])
    await asyncio.to_thread(wait_for, lambda: reason in pods.log("pod"), PATIENCE_S, lambda: pods.log("pod"))
