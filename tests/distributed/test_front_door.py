"""`hetero up` with keys and TLS: a real group that answers those alone who show a key, over encrypted connections."""

from __future__ import annotations

import asyncio
import os
import ssl
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from typer.testing import CliRunner

from hetero_client import Access, HeteroClient, SamplingParams
from hetero_client.aio import AsyncHeteroClient
from hetero_client.cli.main import app
from hetero_client.errors import AccessError, NotConnectedError, RequestError
from hetero_client.home import HeteroHome
from hetero_client.messages import Finished
from hetero_client.model_store.demo_model import demo_directory
from tests.support.local_group import REPOSITORY, LocalGroupProcess, write_manifest
from tests.support.secret_volume import SecretVolume
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed

PATIENCE_S = 90.0
NUM_CLIENTS = 8
"""Of each door."""
STREAM_TOKENS = 100


def certificates(folder: Path) -> tuple[Path, trustme.CA]:
    """A folder with the server's certificate for `--tls-dir`, and its authority, which is in ca.crt beside it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.crt")
    tls = folder / "tls"
    tls.mkdir()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(tls / "tls.key")
    certificate.cert_chain_pems[0].write_to_path(tls / "tls.crt")
    return tls, authority


def test_up_takes_keys_and_certificates_in_place_of_secrets(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_tiny_model(tmp_path / "model", "llama")
    folder, _ = certificates(tmp_path)
    made = CliRunner().invoke(app, ["key", "alice", "--out", str(tmp_path / "alice.key")])
    (tmp_path / "keys.yaml").write_text(made.stdout)

    options = ["--keys", str(tmp_path / "keys.yaml"), "--tls-dir", str(folder)]
    manifest = write_manifest(tmp_path, model=model, ranks=1, max_model_len=128)
    with LocalGroupProcess(manifest, home=tmp_path / "home", options=options) as group:
        address = group.record.inference
        access = Access.find(api_key_file=tmp_path / "alice.key", ca_file=tmp_path / "ca.crt")
        with HeteroClient(address, access=access) as client:
            assert client.generate_text("hello", sampling=SamplingParams(max_tokens=2)).usage.completion_tokens
        stranger = Access.find(ca_file=tmp_path / "ca.crt", environment={})
        with HeteroClient(address, access=stranger) as client, pytest.raises(AccessError, match="must be 'Bearer KEY'"):
            client.model_info()
        with HeteroClient(address, access=Access()) as client, pytest.raises(NotConnectedError):
            client.model_info()
        with group.admin() as admin, pytest.raises(AccessError):
            admin.topology()
        # The command shows the run's token, which its owner alone can read.
        command = [sys.executable, "-m", "hetero_client", "topology"]
        environment = {**os.environ, "HETERO_HOME": str(tmp_path / "home")}
        shown = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        assert "ready" in shown.stdout
    assert "OpenAI API: https://" in group.output
    assert "page: https://" in group.output


def test_chat_shows_a_certificate_where_up_asks_for_one(tmp_path: Path) -> None:
    tls, authority = certificates(tmp_path)
    (tmp_path / "client-ca").mkdir()
    authority.cert_pem.write_to_path(tmp_path / "client-ca/ca.crt")
    mine = authority.issue_cert("alice.example")
    mine.private_key_pem.write_to_path(tmp_path / "alice.key")
    mine.cert_chain_pems[0].write_to_path(tmp_path / "alice.crt")
    options = ["--tls-dir", str(tls), "--client-ca-dir", str(tmp_path / "client-ca")]
    model = demo_directory(HeteroHome.from_environment())
    manifest = write_manifest(tmp_path, model=model, ranks=1, max_model_len=128)
    with LocalGroupProcess(manifest, home=tmp_path / "home", options=options) as group:
        command = [
            sys.executable, "-m", "hetero_client", "chat", "--address", group.record.inference,
            "--ca", str(tmp_path / "ca.crt"), "--max-tokens", "4",
        ]  # fmt: skip
        shown = {"HETERO_CLIENT_CERT_FILE": tmp_path / "alice.crt", "HETERO_CLIENT_KEY_FILE": tmp_path / "alice.key"}
        for certificate, exit_code in ((shown, 0), ({}, 1)):
            environment = {**os.environ, **{name: str(path) for name, path in certificate.items()}}
            done = subprocess.run(
                command, cwd=REPOSITORY, env=environment, input="Hello\n", capture_output=True, text=True, check=False
            )
            assert done.returncode == exit_code, done.stderr
            assert bool(done.stdout.strip()) == (exit_code == 0)


class Tenant:
    """A name with its key, and an authority that it trusts."""

    def __init__(self, folder: Path, name: str) -> None:
        self._file = folder / f"{name}.key"
        self.entry = CliRunner().invoke(app, ["key", name, "--out", str(self._file)]).stdout.encode()
        """For a keys file."""
        self._authority = trustme.CA()
        self._pem: bytes = self._authority.cert_pem.bytes()

    def certificate(self) -> dict[str, bytes]:
        """A new one that it trusts, as cert-manager writes it."""
        made = self._authority.issue_cert("127.0.0.1")
        return {"tls.crt": made.cert_chain_pems[0].bytes(), "tls.key": made.private_key_pem.bytes()}

    def grpc(self, address: str) -> AsyncHeteroClient:
        return AsyncHeteroClient(address, access=Access(self._file.read_text().strip(), ca=self._pem))

    def http(self, address: str) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self._file.read_text().strip()}"}
        context = ssl.create_default_context(cadata=self._pem.decode())
        return httpx.AsyncClient(
            base_url=f"https://{address}", verify=context, trust_env=False, headers=headers, timeout=PATIENCE_S
        )


@pytest.mark.timeout(300)
async def test_secrets_that_the_kubelet_exchanges_count_for_the_next_and_drop_no_stream(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    model = save_tiny_model(tmp_path / "model", "llama")
    old, new = Tenant(tmp_path, "old"), Tenant(tmp_path, "new")
    tls = SecretVolume(tmp_path / "tls", old.certificate())
    keys = SecretVolume(tmp_path / "keys", {"keys.yaml": old.entry})
    options = ["--keys", str(keys.folder / "keys.yaml"), "--tls-dir", str(tls.folder)]
    engine = {"maxNumSeqs": 2 * NUM_CLIENTS}
    manifest = write_manifest(tmp_path, model=model, ranks=1, max_model_len=128, engine=engine)
    with LocalGroupProcess(manifest, home=tmp_path / "home", options=options) as group:
        doors = (group.record.inference, group.record.http)
        async with old.grpc(doors[0]) as grpc, old.http(doors[1]) as http:
            is_over = asyncio.Event()
            asked = [lambda: by_grpc(grpc), lambda: by_http(http)] * NUM_CLIENTS
            clients = [asyncio.create_task(ask_on(one, is_over)) for one in asked]
            # Each renewal is seen by its own: nobody trusts a certificate of the other authority.
            keys.write({"keys.yaml": old.entry + new.entry})
            tls.write(new.certificate())
            await until_open(new, doors, clients)
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                async with old.http(doors[1]) as late:
                    await late.get("/v1/models")
            async with old.grpc(doors[0]) as late_client:
                with pytest.raises(AccessError):
                    await late_client.model_info()
            is_over.set()
            keys.write({"keys.yaml": new.entry})
            num_streams = await asyncio.gather(*clients)
            assert min(num_streams) >= 1
            # Connections live on; the key that they showed does not.
            await until(lambda: is_refused(http))
            with pytest.raises(AccessError):
                await grpc.model_info()
        await until_open(new, doors, [])


async def ask_on(ask: Callable[[], Awaitable[None]], is_over: asyncio.Event) -> int:
    """Ask again and again; how many were answered."""
    count = 0
    while not is_over.is_set():
        await ask()
        count += 1
    return count


async def by_grpc(client: AsyncHeteroClient) -> None:
    sampling = SamplingParams(max_tokens=STREAM_TOKENS, ignore_eos=True)
    *_, last = [event async for event in client.generate("hello", sampling=sampling, resume_timeout_s=0)]
    assert isinstance(last, Finished)


async def by_http(client: httpx.AsyncClient) -> None:
    body: dict[str, Any] = {
        "model": "test", "prompt": "hello", "stream": True, "max_tokens": STREAM_TOKENS, "ignore_eos": True
    }  # fmt: skip
    answer = await client.post("/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n"), answer.text


async def until_open(tenant: Tenant, doors: tuple[str, str], clients: list[asyncio.Task[int]]) -> None:
    """Wait until both doors let new connections of a tenant in; fail when a client ended meanwhile."""

    async def is_open() -> bool:
        assert not any(client.done() for client in clients)
        try:
            async with tenant.grpc(doors[0]) as grpc, tenant.http(doors[1]) as http:
                await grpc.model_info()
                return (await http.get("/v1/models")).status_code == 200
        except (RequestError, httpx.ConnectError):
            return False

    await until(is_open)


async def is_refused(client: httpx.AsyncClient) -> bool:
    return (await client.get("/v1/models")).status_code == 401


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
