"""A real gateway and a real rank that know one another by the operator's certificates, asked by the operator's probe.

Between all of them is a listener, who reads neither token nor prompt; without certificates it reads both. Certificates
and their authority are exchanged in mounted Secrets as the operator and the kubelet do it, under streams.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
import psutil
import pytest

from hetero_api.contract import ENV_ADMIN_TOKEN_FILE, ENV_GROUP_TOKEN_FILE, ENV_POD_IP, ENV_POD_NAME
from hetero_api.group_state import GroupState
from hetero_api.v1 import inference_pb2, inference_pb2_grpc
from hetero_operator.authority import AUTHORITY_LIFE
from hetero_operator.gateway_probe import GatewayProbe
from hetero_operator.reconcile.model import GatewayReport
from hetero_worker.process.link_tls import LinkTls
from tests.support.inside_certificates import Inside
from tests.support.kube.ports import free_port
from tests.support.local_group import wait_for, write_manifest
from tests.support.secret_volume import SecretVolume
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
NUM_STREAMS = 64
STREAM_TOKENS = 100
MORE_THAN_HALF = AUTHORITY_LIFE / 2 + timedelta(days=10)


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
        manifest = write_manifest(
            self.folder, model=model, ranks=2, ranks_per_pod=2, max_model_len=128, engine={"maxNumSeqs": NUM_STREAMS},
            recovery={"maxRestarts": 100},
        )  # fmt: skip
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
        sockets = [found for process in self._of_pod() for found in process.net_connections("tcp")]
        return {found.laddr.ip for found in sockets if found.status == psutil.CONN_LISTEN}

    def kill_rank(self) -> None:
        """Kill a process that is connected to the gateway."""
        linked = next(
            process
            for process in self._of_pod()
            for found in process.net_connections("tcp")
            if found.raddr and found.raddr.port == self.ports["ranks"]
        )
        linked.send_signal(signal.SIGKILL)

    def _of_pod(self) -> list[psutil.Process]:
        pod = psutil.Process(self.processes["pod"].pid)
        return [pod, *pod.children(recursive=True)]

    async def generate(self, num_tokens: int = 4) -> AsyncIterator[int]:
        """The answer to the prompt, token by token."""
        asked = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=inference_pb2.SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        options = (("grpc.use_local_subchannel_pool", 1),)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports['inference']}", options=options) as channel:
            stub: Any = inference_pb2_grpc.InferenceStub(channel)
            async for event in stub.Generate(asked, timeout=PATIENCE_S):
                for token in event.delta.token_ids:
                    yield token


class Streams:
    """Clients that ask for one stream after another while it is entered. Whatever is dropped fails the end."""

    def __init__(self, pods: Pods) -> None:
        self._pods = pods
        self._num_tokens = [0] * NUM_STREAMS
        self._is_over = False
        self._clients: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._clients = [asyncio.create_task(self._ask_on(number)) for number in range(NUM_STREAMS)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over = True
        await asyncio.gather(*self._clients)

    async def all_go_on(self) -> None:
        """Wait until each has got a token more; fail when one ended."""
        before, end = list(self._num_tokens), time.monotonic() + PATIENCE_S
        while not all(now > then for now, then in zip(self._num_tokens, before, strict=True)):
            assert not any(client.done() for client in self._clients), self._pods.log("gateway")
            assert time.monotonic() < end, f"{self._num_tokens} after {before}"
            await asyncio.sleep(0.05)

    async def _ask_on(self, number: int) -> None:
        while not self._is_over:
            num_before = self._num_tokens[number]
            async for _ in self._pods.generate(STREAM_TOKENS):
                self._num_tokens[number] += 1
            assert self._num_tokens[number] == num_before + STREAM_TOKENS


@pytest.fixture
async def pods(tmp_path: Path) -> AsyncIterator[Pods]:
    async with AsyncExitStack() as stack:
        yield Pods(tmp_path, stack)


async def until_ready(pods: Pods, probe: GatewayProbe, inside: Inside | None, *, after_epoch: int = 0) -> GatewayReport:
    credentials, end = None if inside is None else inside.operator(), time.monotonic() + PATIENCE_S
    while True:
        report = await probe.ask("x-gateway-0", "127.0.0.1", TOKENS["admin"], inside=credentials)
        if report.state is GroupState.READY and report.serving and report.group.epoch > after_epoch:
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
            assert len([token async for token in pods.generate()]) == 4
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


def generations() -> list[Inside]:
    """What an operator makes in turn: the old authority signs, then the next one, which is trusted alone at last."""
    first = Inside.new(stored=Inside.new(age=MORE_THAN_HALF))
    second = Inside.new(stored=first)
    third = Inside.new(stored=second)
    bundles = [each.data["ca.crt"].count(b"BEGIN CERTIFICATE") for each in (first, second, third)]
    assert bundles == [2, 2, 1]
    return [first, second, third]


@pytest.mark.timeout(600)
async def test_certificates_and_their_authority_rotate_under_streams_and_none_is_dropped(
    pods: Pods, tmp_path: Path
) -> None:
    first, *following = generations()
    gateway = SecretVolume(tmp_path / "gateway", first.gateway_files())
    ranks = SecretVolume(tmp_path / "ranks", first.rank_files())
    pods.start_gateway(gateway.folder)
    pods.start_pod(ranks.folder, ranks_port=pods.ports["ranks"])
    epoch = await epoch_of(pods, first)
    async with Streams(pods) as streams:
        for former, latter in zip((first, *following), following, strict=False):
            await streams.all_go_on()
            gateway.write(latter.gateway_files())
            await until_shown(pods, latter)
            assert await epoch_of(pods, latter) == epoch, "connections live on"
            await streams.all_go_on()
            # The kubelets of other nodes may be later: ranks come back with what they had, and then with what is new.
            for certificates in (former, latter):
                ranks.write(certificates.rank_files())
                pods.kill_rank()
                epoch = await epoch_of(pods, certificates, after=epoch)
            is_known = latter is following[0]
            assert is_known == (not refusal(pods, first, tmp_path / "stranger"))
            assert is_known == await answers(pods, first)
    assert "does not take this rank's certificate" in refusal(pods, first, tmp_path / "stranger")


async def epoch_of(pods: Pods, inside: Inside, *, after: int = 0) -> int:
    """The epoch in which the group serves, over a new connection of an operator's."""
    probe = GatewayProbe(admin_port=pods.ports["admin"], inference_port=pods.ports["inference"])
    try:
        return (await until_ready(pods, probe, inside, after_epoch=after)).group.epoch
    finally:
        await probe.close()


async def answers(pods: Pods, inside: Inside) -> bool:
    """Whether the gateway hears an operator who has these certificates."""
    probe = GatewayProbe(admin_port=pods.ports["admin"], inference_port=pods.ports["inference"])
    try:
        return not (await probe.ask("x-gateway-0", "127.0.0.1", TOKENS["admin"], inside=inside.operator())).error
    finally:
        await probe.close()


async def until_shown(pods: Pods, inside: Inside) -> None:
    """Wait until both ports inside show who connects the new certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    wanted = ssl.PEM_cert_to_DER_cert(inside.gateway_files()["tls.crt"].decode())

    def is_shown(name: str) -> bool:
        with (
            socket.create_connection(("127.0.0.1", pods.ports[name])) as plain,
            context.wrap_socket(plain) as connection,
        ):
            return connection.getpeercert(binary_form=True) == wanted

    for name in ("ranks", "admin"):
        await asyncio.to_thread(wait_for, partial(is_shown, name), PATIENCE_S, lambda: pods.log("gateway"))


def refusal(pods: Pods, inside: Inside, folder: Path) -> str:
    """Why the gateway does not take a rank that has these certificates; "" if it does."""
    with closing(socket.create_connection(("localhost", pods.ports["ranks"]))) as connection:
        try:
            LinkTls(inside.rank(folder)).shake_hands(connection, "localhost")
        except OSError as error:
            return str(error)
    return ""
