"""Who comes through which door: every method and route without a key, with keys of each role, and while keys change."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2_grpc

from hetero_api.api_keys import hash_of
from hetero_api.contract import AUTHORIZATION_KEY, ENV_GROUP_TOKEN_FILE
from hetero_api.errors import ManifestError
from hetero_api.v1 import admin_pb2, inference_pb2
from hetero_client.access import Access
from hetero_client.aio import AsyncHeteroClient
from hetero_client.errors import AccessError
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.server.access.files import AccessFiles, FileWatch
from hetero_gateway.server.access.principals import current_principal
from hetero_gateway.server.config import GatewayConfig
from hetero_gateway.server.gateway import Ports
from tests.unit.group.group_setup import PATIENCE_S, wait_until
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling, served_model

pytestmark = pytest.mark.unit

INFERENCE = [method.name for method in inference_pb2.DESCRIPTOR.services_by_name["Inference"].methods]
ADMIN = [method.name for method in admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods]
NO_ROUTES = [("GET", "/nothing"), ("POST", "/health/"), ("GET", "/page/nothing.js")]
LOOK_S = 0.01


def entry(name: str, key: str, *roles: str, **limits: Any) -> dict[str, Any]:
    return {"name": name, "hashes": [hash_of(key)], "roles": list(roles) or ["user"], "limits": limits}


ENTRIES = [entry("alice", "a-key"), entry("scraper", "m-key", "metrics"), entry("root", "r-key", "admin", "user")]


def write_keys(path: Path, entries: Sequence[dict[str, Any]]) -> Path:
    path.write_text(yaml.safe_dump(entries))
    return path


class KeyedBench(GatewayBench):
    """A gateway whose callers need keys, and which serves metrics."""

    ports = Ports("127.0.0.1", inference=0, admin=0, ranks=0, http=0, metrics=0)

    def __init__(self, folder: Path) -> None:
        self.keys_file = write_keys(folder / "keys.yaml", ENTRIES)
        super().__init__(served_model(folder), files=AccessFiles.load(keys_file=self.keys_file, look_s=LOOK_S))

    def client(self, key: str) -> AsyncHeteroClient:
        return AsyncHeteroClient(self.addresses.inference, access=Access(key))

    @property
    def metrics_url(self) -> str:
        server: Any = self.gateway
        return f"http://127.0.0.1:{server._probe_server.port}"


@pytest.fixture
async def keyed(tmp_path: Path) -> AsyncIterator[KeyedBench]:
    async with KeyedBench(tmp_path) as bench:
        await bench.join()
        yield bench


def shown(key: str) -> tuple[tuple[str, str], ...]:
    return ((AUTHORIZATION_KEY, f"Bearer {key}"),)


async def code_of(call: Any, message: Any, metadata: Any = ()) -> grpc.StatusCode:
    """The status of a call of one answer or of many."""
    try:
        running = call(message, metadata=metadata)
        if hasattr(running, "read"):
            await read_all(running)
        else:
            await running
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def ask(bench: GatewayBench, method: str, path: str, key: str = "", **options: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(base_url=f"http://{bench.addresses.http}", trust_env=False) as http:
        return await http.request(method, path, headers=headers, **options)


async def test_no_method_answers_without_a_key(keyed: KeyedBench) -> None:
    for service, stub, methods in ((inference_pb2, keyed.inference(), INFERENCE), (admin_pb2, keyed.admin(), ADMIN)):
        for method in methods:
            message = getattr(service, f"{method}Request")()
            for metadata in ((), shown("another-key"), shown("a-key") * 2):
                code = await code_of(getattr(stub, method), message, metadata)
                assert code is grpc.StatusCode.UNAUTHENTICATED, (method, metadata)


async def test_reflection_needs_a_key_and_health_does_not(keyed: KeyedBench) -> None:
    for address in (keyed.addresses.inference, keyed.addresses.admin):
        channel = keyed.channel(address)
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(reflection.ServerReflectionInfo().read(), PATIENCE_S)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=""))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("key", ["", "a-kex"])
async def test_no_route_answers_without_a_key(keyed: KeyedBench, key: str) -> None:
    server: Any = keyed.gateway
    routes = [
        (method, route.path.replace("{model:path}", "g"))
        for route in server._endpoint.application().routes
        for method in route.methods - {"HEAD"}
        if route.path not in {"/health", *server._page.open_paths}
    ]
    assert {("POST", "/v1/embeddings"), ("GET", "/metrics"), ("GET", "/page/status")} < {*routes}
    for method, path in [*routes, *NO_ROUTES]:
        answer = await ask(keyed, method, path, key, content=b"{" * 100_000)
        assert answer.status_code == 401, path
        assert answer.headers["WWW-Authenticate"] == "Bearer"
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert (await ask(keyed, "GET", "/health")).status_code == 200


async def test_both_doors_answer_a_user(keyed: KeyedBench) -> None:
    async with keyed.client("a-key") as client:
        answer = await client.generate_text("hello")
        assert answer.text or answer.token_ids
        assert (await client.model_info()).model_uri
    body = {"model": "g", "prompt": "hello", "max_tokens": 2}
    assert (await ask(keyed, "POST", "/v1/completions", "a-key", json=body)).status_code == 200
    streamed = await ask(keyed, "POST", "/v1/completions", "a-key", json={**body, "stream": True})
    assert streamed.text.endswith("data: [DONE]\n\n")


async def test_a_key_without_the_role_is_forbidden(keyed: KeyedBench) -> None:
    async with keyed.client("m-key") as client:
        with pytest.raises(AccessError, match="the key of 'scraper' lacks the role user"):
            await client.generate_text("hello")
    assert (await ask(keyed, "GET", "/v1/models", "m-key")).status_code == 403
    for method in ADMIN:
        message = getattr(admin_pb2, f"{method}Request")()
        code = await code_of(getattr(keyed.admin(), method), message, shown("a-key"))
        assert code is grpc.StatusCode.PERMISSION_DENIED, method
    code = await code_of(keyed.admin().GetTopology, admin_pb2.GetTopologyRequest(), shown("r-key"))
    assert code is grpc.StatusCode.OK


async def test_metrics_need_their_role_and_probes_nothing(keyed: KeyedBench) -> None:
    async with httpx.AsyncClient(base_url=keyed.metrics_url, trust_env=False) as http:
        for key, status in (("", 401), ("another", 401), ("a-key", 403), ("m-key", 200)):
            answer = await http.get("/metrics", headers={"Authorization": f"Bearer {key}"} if key else {})
            assert answer.status_code == status, key
        for probe in ("/livez", "/readyz"):
            assert (await http.get(probe)).status_code == 200
    for key, status in (("", 401), ("another", 401), ("a-key", 403), ("m-key", 200)):
        assert (await ask(keyed, "GET", "/metrics", key)).status_code == status, key


async def test_keys_change_while_a_stream_runs(keyed: KeyedBench) -> None:
    stub = keyed.inference()
    stream = stub.Generate(request([1], sampling=sampling(ignore_eos=True, max_tokens=40)), metadata=shown("a-key"))
    await stream.read()
    write_keys(keyed.keys_file, [entry("bob", "b-key")])
    model = inference_pb2.GetModelInfoRequest()
    await until_code(stub.GetModelInfo, model, shown("b-key"), grpc.StatusCode.OK)
    assert await code_of(stub.GetModelInfo, model, shown("a-key")) is grpc.StatusCode.UNAUTHENTICATED
    assert (await read_all(stream))[-1].HasField("finished")


async def test_a_wrong_keys_file_changes_nothing_and_is_logged(
    keyed: KeyedBench, caplog: pytest.LogCaptureFixture
) -> None:
    keyed.keys_file.write_text("- {name: mallory}")
    await wait_until(lambda: "stays in force" in caplog.text)
    assert "hashes: is required" in caplog.text
    model = inference_pb2.GetModelInfoRequest()
    assert await code_of(keyed.inference().GetModelInfo, model, shown("a-key")) is grpc.StatusCode.OK
    write_keys(keyed.keys_file, [entry("bob", "b-key")])
    await until_code(keyed.inference().GetModelInfo, model, shown("b-key"), grpc.StatusCode.OK)


async def test_a_file_whose_reading_breaks_is_read_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    reads: list[bool] = []

    def read() -> None:
        reads.append(len(reads) > 1)
        if not reads[-1]:
            raise KeyError("nobody thought of that")

    watch = FileWatch([write_keys(tmp_path / "keys.yaml", ENTRIES)], read, look_s=LOOK_S)
    write_keys(tmp_path / "keys.yaml", ENTRIES[:1])
    running = asyncio.create_task(watch.run())
    await wait_until(lambda: True in reads)
    running.cancel()
    assert caplog.text.count("nobody thought of that") == 1


async def until_code(call: Any, message: Any, metadata: Any, code: grpc.StatusCode) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await code_of(call, message, metadata) is not code:
            pass


async def test_no_key_is_in_the_log(keyed: KeyedBench, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    await test_both_doors_answer_a_user(keyed)
    await ask(keyed, "GET", "/v1/models", "another-key")
    assert "refused" in caplog.text
    assert "-key" not in caplog.text


async def test_the_hash_of_nothing_is_nobodys_key(keyed: KeyedBench) -> None:
    write_keys(keyed.keys_file, [entry("nobody", ""), entry("mark", "mark-key")])
    model = inference_pb2.GetModelInfoRequest()
    await until_code(keyed.inference().GetModelInfo, model, shown("mark-key"), grpc.StatusCode.OK)
    for metadata in ((), shown("")):
        assert await code_of(keyed.inference().GetModelInfo, model, metadata) is grpc.StatusCode.UNAUTHENTICATED


def test_a_wrong_keys_file_keeps_a_gateway_from_starting(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="hashes: is required"):
        AccessFiles.load(keys_file=write_keys(tmp_path / "keys.yaml", [{"name": "a"}]))


def test_a_secret_that_the_resource_names_needs_its_file(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("t")
    gateway = served_model(tmp_path, gateway={"auth": {"keysSecretRef": {"name": "clients"}}}).resource.spec.gateway
    arguments = ["--manifest", "g.yaml", "--model", "m"]
    bare, keyed = (
        GatewayConfig.from_command_line([*arguments, *more], {ENV_GROUP_TOKEN_FILE: str(token)})
        for more in ((), ("--keys", "keys.yaml"))
    )
    with pytest.raises(UnsupportedSpecError, match=r"spec.gateway.auth.keysSecretRef: no files were given .* --keys"):
        bare.check_access(gateway)
    keyed.check_access(gateway)


def test_nobody_is_let_in_by_default() -> None:
    with pytest.raises(LookupError):
        current_principal()
