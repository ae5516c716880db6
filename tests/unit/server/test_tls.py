"""TLS of both doors: who is refused and why, and certificates that change while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import shutil
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme

from hetero_client.access import Access
from hetero_client.aio import AsyncHeteroClient
from hetero_client.client import HeteroClient
from hetero_client.errors import AccessError, CredentialsError, RequestError
from hetero_client.messages import Finished, SamplingParams, Started
from hetero_gateway.server.access import tls
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.access.tls import ServerTls, TlsFiles
from hetero_gateway.server.errors import TlsError
from hetero_gateway.server.openai import http_server
from tests.support.secret_volume import SecretVolume
from tests.support.wire import Wire
from tests.unit.group.group_setup import PATIENCE_S
from tests.unit.server.server_setup import GatewayBench, GrpcRank, served_model

pytestmark = pytest.mark.unit

LOOK_S = 0.01
NUM_STREAMS = 64
SAMPLING = SamplingParams(max_tokens=50, ignore_eos=True)
NAME = "localhost"
_HOUR = datetime.timedelta(hours=1)


class Authority:
    """A certificate authority that writes certificates as cert-manager does, signed by one below the root."""

    def __init__(self) -> None:
        root = trustme.CA()
        self._ca = root.create_child_ca()
        self.pem: bytes = root.cert_pem.bytes()

    def write(self, folder: Path, *names: str, lasts: datetime.timedelta = 24 * _HOUR) -> Path:
        """A new certificate for these names."""
        folder.mkdir(exist_ok=True)
        now = datetime.datetime.now(datetime.UTC)
        made = self._ca.issue_cert(*(names or (NAME,)), not_before=now - 2 * _HOUR, not_after=now + lasts)
        (folder / "tls.crt").write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        (folder / "tls.key").write_bytes(made.private_key_pem.bytes())
        (folder / "ca.crt").write_bytes(self.pem)
        return folder

    def access(self, **fields: Any) -> Access:
        return Access(ca=self.pem, **fields)

    def context(self, folder: Path | None = None) -> ssl.SSLContext:
        """A client's context that trusts this authority, and shows the certificate in a folder."""
        context = ssl.create_default_context(cadata=self.pem.decode())
        if folder is not None:
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return context


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


class TlsBench(GatewayBench):
    """A gateway with room for many streams, and its rank once it has joined."""

    rank: GrpcRank

    def __init__(self, folder: Path, files: TlsFiles) -> None:
        engine = {"blockSize": 4, "maxNumSeqs": NUM_STREAMS, "maxNumBatchedTokens": 1024}
        model = served_model(folder, engine=engine, gateway={"maxQueuedRequests": NUM_STREAMS})
        super().__init__(model, files=AccessFiles.load(tls_files=files, look_s=LOOK_S))

    def client(self, access: Access, *, host: str = NAME) -> AsyncHeteroClient:
        return AsyncHeteroClient(f"{host}:{self.addresses.inference.rpartition(':')[2]}", access=access)

    def http(self, context: ssl.SSLContext, *, host: str = NAME) -> httpx.AsyncClient:
        url = f"https://{host}:{self.addresses.http.rpartition(':')[2]}"
        return httpx.AsyncClient(base_url=url, verify=context, trust_env=False)


@pytest.fixture
async def encrypted(tmp_path: Path, authority: Authority) -> AsyncIterator[TlsBench]:
    files = TlsFiles(authority.write(tmp_path / "tls"), dns_names=(NAME,))
    async with TlsBench(tmp_path, files) as bench:
        bench.rank, _ = await bench.join()
        yield bench


async def test_both_doors_speak_tls(encrypted: TlsBench, authority: Authority) -> None:
    async with encrypted.client(authority.access()) as client:
        await client.wait_ready(PATIENCE_S)
        assert (await client.generate_text("hello")).usage.completion_tokens
    async with encrypted.http(authority.context()) as http:
        assert (await http.get("/health")).status_code == 200
        body = {"model": "g", "prompt": "hello", "stream": True}
        assert (await http.post("/v1/completions", json=body)).text.endswith("data: [DONE]\n\n")


async def test_plain_clients_get_no_answer(encrypted: TlsBench) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{encrypted.addresses.http}/health")


@pytest.mark.parametrize("is_encrypted", [True, False])
async def test_neither_key_nor_prompt_can_be_read_on_the_wire(
    authority: Authority, tmp_path: Path, is_encrypted: bool
) -> None:
    files = TlsFiles(authority.write(tmp_path / "tls"))
    key, prompt = "the-key-of-alice", "the secret prompt"
    access = Access(key, tls=is_encrypted, ca=authority.pem)
    async with TlsBench(tmp_path, files) if is_encrypted else GatewayBench(served_model(tmp_path)) as bench:
        await bench.join()
        async with Wire(bench.addresses.inference) as by_grpc, Wire(bench.addresses.http) as by_http:
            async with AsyncHeteroClient(f"{NAME}:{by_grpc.port}", access=access) as client:
                await client.generate_text(prompt, sampling=SamplingParams(max_tokens=1))
            url = f"{'https' if is_encrypted else 'http'}://{NAME}:{by_http.port}"
            async with httpx.AsyncClient(base_url=url, verify=authority.context(), trust_env=False) as http:
                body = {"model": "g", "prompt": prompt, "max_tokens": 1}
                await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})
    # Without TLS both can be read, so the absence shows something.
    for seen in (bytes(by_grpc.seen), bytes(by_http.seen)):
        assert (key.encode() in seen, prompt.encode() in seen) == (not is_encrypted, not is_encrypted)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_no_version_before_1_2_is_spoken(
    encrypted: TlsBench, authority: Authority, version: ssl.TLSVersion
) -> None:
    context = authority.context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    is_old = version < ssl.TLSVersion.TLSv1_2
    with pytest.warns(DeprecationWarning, match="deprecated") if is_old else contextlib.nullcontext():
        context.minimum_version = context.maximum_version = version
    context.set_alpn_protocols(["h2", "http/1.1"])
    for address in (encrypted.addresses.inference, encrypted.addresses.http):
        shaken = await asyncio.to_thread(_shake_hands, int(address.rpartition(":")[2]), context)
        assert (shaken == version.name.replace("_", ".")) is not is_old, (address, shaken)


def _shake_hands(port: int, context: ssl.SSLContext) -> str:
    """The version that is spoken, or the error."""
    with socket.create_connection((NAME, port)) as plain:
        try:
            with context.wrap_socket(plain, server_hostname=NAME) as connection:
                return str(connection.version())
        except OSError as error:
            return str(error)


async def test_openssl_finds_name_and_chain_in_order(encrypted: TlsBench, authority: Authority, tmp_path: Path) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    (tmp_path / "ca.pem").write_bytes(authority.pem)
    for address in (encrypted.addresses.inference, encrypted.addresses.http):
        port = address.rpartition(":")[2]
        command = [
            openssl, "s_client", "-connect", f"{NAME}:{port}", "-CAfile", str(tmp_path / "ca.pem"),
            "-verify_return_error", "-verify_hostname", NAME, "-alpn", "h2,http/1.1", "-tls1_2", "-showcerts",
        ]  # fmt: skip
        done = await asyncio.to_thread(subprocess.run, command, input=b"", capture_output=True, timeout=PATIENCE_S)
        assert b"Verify return code: 0 (ok)" in done.stdout, done
        assert b"Protocol  : TLSv1.2" in done.stdout
        assert done.stdout.count(b"BEGIN CERTIFICATE") == 2
        assert b"depth=2" in done.stderr


@pytest.mark.parametrize(
    ("host", "stranger", "reason"),
    [
        (NAME, True, "unable to get local issuer certificate"),
        ("127.0.0.1", False, "is not in peer certificate|Hostname Verification Check failed"),
    ],
)
async def test_a_client_refuses_a_gateway_that_is_not_the_one_it_means(
    encrypted: TlsBench, authority: Authority, host: str, stranger: bool, reason: str
) -> None:
    mine = Authority() if stranger else authority
    async with encrypted.client(mine.access(), host=host) as client:
        with pytest.raises(AccessError, match=reason):
            await client.generate_text("hello")
    async with encrypted.http(mine.context(), host=host) as http:
        with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
            await http.get("/health")


async def test_a_client_refuses_a_certificate_that_has_expired_meanwhile(authority: Authority, tmp_path: Path) -> None:
    lasts = datetime.timedelta(seconds=8)
    ends = datetime.datetime.now(datetime.UTC) + lasts
    files = TlsFiles(authority.write(tmp_path / "tls", lasts=lasts), dns_names=(NAME,))
    async with TlsBench(tmp_path, files) as bench:
        await bench.join()
        await asyncio.sleep(max((ends - datetime.datetime.now(datetime.UTC)).total_seconds() + 1, 0))
        async with bench.client(authority.access()) as client:
            with pytest.raises(AccessError, match="certificate has expired"):
                await client.generate_text("hello")
        async with bench.http(authority.context()) as http:
            with pytest.raises(httpx.ConnectError, match="certificate has expired"):
                await http.get("/health")


async def test_a_new_certificate_breaks_no_stream_and_is_shown_to_whoever_comes_next(
    encrypted: TlsBench, authority: Authority, tmp_path: Path
) -> None:
    successor = Authority()
    async with encrypted.client(authority.access()) as client, encrypted.http(authority.context()) as http:
        streams = [client.generate("hello", sampling=SAMPLING, resume_timeout_s=0) for _ in range(NUM_STREAMS // 2)]
        for stream in streams:
            assert isinstance(await anext(stream), Started)
        answers = asyncio.gather(*(_streamed(http) for _ in range(NUM_STREAMS // 2)))
        await encrypted.until(lambda: encrypted.gateway.core.stats().running_requests == NUM_STREAMS)
        encrypted.rank.may_step.clear()
        successor.write(tmp_path / "tls")
        await _until_trusted(encrypted, successor)
        encrypted.rank.may_step.set()
        assert all(text.endswith("data: [DONE]\n\n") for text in await answers)
        for stream in streams:
            assert isinstance([event async for event in stream][-1], Finished)
        # A connection that is there goes on; a new one is asked to trust the new authority.
        assert (await client.model_info()).vocab_size
    async with encrypted.client(authority.access()) as late:
        with pytest.raises(AccessError):
            await late.model_info()
    async with encrypted.client(successor.access()) as next_one:
        assert (await next_one.model_info()).vocab_size


async def _streamed(http: httpx.AsyncClient) -> str:
    body = {"model": "g", "prompt": "hello", "stream": True, "max_tokens": 50, "ignore_eos": True}
    return (await http.post("/v1/completions", json=body, timeout=PATIENCE_S)).text


async def _until_trusted(bench: TlsBench, authority: Authority) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            async with bench.http(authority.context()) as http:
                with contextlib.suppress(httpx.ConnectError):
                    await http.get("/health")
                    return


async def test_a_certificate_that_cannot_be_used_changes_nothing(
    encrypted: TlsBench, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority.write(tmp_path / "tls", "other.example")
    await encrypted.until(lambda: "stays in force" in caplog.text)
    assert "Hostname mismatch, certificate is not valid for 'localhost'" in caplog.text
    async with encrypted.client(authority.access()) as client:
        assert (await client.model_info()).vocab_size


async def test_clients_must_show_a_certificate_of_the_authority_in_force(tmp_path: Path, authority: Authority) -> None:
    clients, others = Authority(), Authority()
    mine, strange = clients.write(tmp_path / "mine", "me"), others.write(tmp_path / "strange", "me")
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    (wanted / "ca.crt").write_bytes(clients.pem)
    async with TlsBench(tmp_path, TlsFiles(authority.write(tmp_path / "tls"), wanted)) as bench:
        await bench.join()
        assert await _are_open(bench, authority, mine) == (True, True)
        for folder in (None, strange):
            assert await _are_open(bench, authority, folder) == (False, False)
        (wanted / "ca.crt").write_bytes(others.pem)
        async with asyncio.timeout(PATIENCE_S):
            while await _are_open(bench, authority, strange) != (True, True):
                pass
        assert await _are_open(bench, authority, mine) == (False, False)


async def _are_open(bench: TlsBench, authority: Authority, folder: Path | None) -> tuple[bool, bool]:
    """Whether each door answers a client that shows the certificate in a folder."""
    pair: dict[str, Any] = {}
    if folder is not None:
        pair = {"certificate": (folder / "tls.crt").read_bytes(), "private_key": (folder / "tls.key").read_bytes()}
    by_grpc = by_http = True
    async with bench.client(authority.access(**pair)) as client:
        try:
            await client.model_info()
        except RequestError:
            by_grpc = False
    async with bench.http(authority.context(folder)) as http:
        try:
            await http.get("/health")
        except httpx.TransportError:
            by_http = False
    return by_grpc, by_http


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"lasts": -_HOUR}, "certificate has expired"),
        ({"names": ["other.example"]}, "certificate is not valid for 'localhost'"),
    ],
)
def test_a_gateway_does_not_start_with_a_certificate_that_clients_would_refuse(
    tmp_path: Path, authority: Authority, change: dict[str, Any], reason: str
) -> None:
    folder = authority.write(tmp_path / "tls", *change.pop("names", []), **change)
    with pytest.raises(TlsError, match=reason) as caught:
        ServerTls(TlsFiles(folder, dns_names=(NAME,)))
    assert str(folder / "tls.crt") in str(caught.value)


def test_files_that_are_no_pair_or_are_not_there_are_named(tmp_path: Path, authority: Authority) -> None:
    folder, other = authority.write(tmp_path / "one"), authority.write(tmp_path / "two")
    shutil.copy(other / "tls.key", folder / "tls.key")
    with pytest.raises(TlsError, match="KEY_VALUES_MISMATCH"):
        ServerTls(TlsFiles(folder))
    (folder / "tls.key").unlink()
    with pytest.raises(TlsError, match=r"tls\.key: cannot be read: No such file"):
        ServerTls(TlsFiles(folder))
    (other / "tls.crt").write_text("no certificate")
    with pytest.raises(TlsError, match="cannot be used for TLS"):
        ServerTls(TlsFiles(other))


def test_files_that_are_exchanged_while_they_are_read_wait_for_the_next_look(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else gRPC would be given the key of one certificate beside another one."""
    one, two = (_contents(authority.write(tmp_path / name)) for name in ("one", "two"))
    volume = SecretVolume(tmp_path / "volume", one)
    served = ServerTls(TlsFiles(volume.folder))
    read = tls._read

    def exchanged_after_the_key(path: Path) -> bytes:
        content = read(path)
        if content == one["tls.key"]:
            volume.write(two)
        return content

    monkeypatch.setattr(tls, "_read", exchanged_after_the_key)
    with pytest.raises(TlsError, match="they changed while they were read"):
        served.load()
    served.load()


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


async def test_a_handshake_that_does_not_come_ends_the_connection(
    encrypted: TlsBench, monkeypatch: pytest.MonkeyPatch, authority: Authority, tmp_path: Path
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.05)
    (tmp_path / "more").mkdir()
    async with TlsBench(tmp_path / "more", TlsFiles(authority.write(tmp_path / "tls"))) as bench:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(bench.addresses.http.rpartition(":")[2]))
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


def test_a_key_does_not_travel_in_the_clear_unless_somebody_says_so() -> None:
    with pytest.raises(CredentialsError, match=r"a key would travel unencrypted to gateway\.example:50051"):
        HeteroClient("gateway.example:50051", access=Access("a-key"))
    for access in (Access("a-key", tls=False), Access("a-key", tls=True), Access()):
        HeteroClient("gateway.example:50051", access=access).close()
    HeteroClient("127.0.0.1:50051", access=Access("a-key")).close()
