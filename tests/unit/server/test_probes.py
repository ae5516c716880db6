"""/livez and /readyz over HTTP, as the kubelet asks them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator

import pytest

from hetero_api import probe_server
from hetero_api.probe_server import ProbeServer
from hetero_gateway.server import health
from hetero_gateway.server.health import GatewayProbes, LoopReader
from tests.unit.group.group_setup import GroupBench, group_settings, wait_until
from tests.unit.server.server_setup import GatewayBench, request, sampling

pytestmark = pytest.mark.unit


def get(url: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=10) as response:
            return response.status, response.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()


@pytest.fixture
async def url(bench: GatewayBench) -> AsyncIterator[str]:
    server: ProbeServer = bench.gateway._start_probes("127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.port}"
    await asyncio.to_thread(server.stop)


async def ask(url: str) -> tuple[int, str]:
    return await asyncio.to_thread(get, url)


async def test_a_gateway_without_ranks_is_alive_and_not_ready(bench: GatewayBench, url: str) -> None:
    assert await ask(f"{url}/livez") == (200, "ok")
    assert await ask(f"{url}/readyz") == (503, "the group is NEW")
    _, life = await bench.join()
    assert await ask(f"{url}/readyz") == (200, "ok")
    life.cancel()
    await bench.until(lambda: not bench.gateway.group.is_ready)
    assert await ask(f"{url}/readyz") == (503, "the group is ABORTED")
    assert await ask(f"{url}/livez") == (200, "ok")


async def test_a_draining_gateway_is_alive_and_not_ready(bench: GatewayBench, url: str) -> None:
    await bench.join()
    bench.gateway.drain()
    assert await ask(f"{url}/readyz") == (503, "the group is DRAINING")
    assert await ask(f"{url}/livez") == (200, "ok")


async def test_other_paths_are_not_found_and_metrics_are_there(url: str) -> None:
    assert await ask(f"{url}/") == (404, "there is /livez, /metrics, /readyz")
    status, text = await ask(f"{url}/metrics")
    assert status == 200
    assert "hetero_ready 0.0" in text


async def test_a_step_that_is_out_for_too_long_is_told(bench: GatewayBench) -> None:
    rank, _ = await bench.join()
    rank.may_step.clear()
    reader = LoopReader(asyncio.get_running_loop())
    patient = GatewayProbes(bench.gateway.group, reader, step_timeout_s=60)
    impatient = GatewayProbes(bench.gateway.group, reader, step_timeout_s=0.01)
    assert await asyncio.to_thread(impatient.live) == ""
    call = bench.inference().Generate(request([1], sampling=sampling(max_tokens=1)))
    await call.read()
    await bench.until(lambda: bench.gateway.group.stalled_s > 0.02)
    assert await asyncio.to_thread(patient.live) == ""
    assert "a step has been out for" in await asyncio.to_thread(impatient.live)
    rank.may_step.set()
    await bench.until(lambda: bench.gateway.group.stalled_s == 0)
    assert await asyncio.to_thread(impatient.live) == ""


async def test_a_loop_that_does_not_turn_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "LOOP_TIMEOUT_S", 0.05)
    async with GroupBench(group_settings()) as group_bench:
        gateway_probes = GatewayProbes(group_bench.group, LoopReader(asyncio.get_running_loop()), step_timeout_s=60)
        answers: list[str] = []
        asking = threading.Thread(target=lambda: answers.append(gateway_probes.live()))
        asking.start()
        asking.join()  # blocks the loop
        assert answers == ["the event loop has not answered within 0.05 s"]
        # What was asked too late is not answered behind the asker's back.
        await asyncio.sleep(0)


def test_a_slow_client_holds_up_nobody() -> None:
    import socket

    from prometheus_client import CollectorRegistry

    server = ProbeServer.start(host="127.0.0.1", port=0, probes={"/livez": lambda: ""}, registry=CollectorRegistry())
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as silent:
            silent.send(b"GET /li")
            began_s = time.monotonic()
            assert get(f"http://127.0.0.1:{server.port}/livez") == (200, "ok")
            assert time.monotonic() - began_s < 5
    finally:
        server.stop()


def num_handlers() -> int:
    """Return how many threads serve connections of probe servers; asyncio's own threads come and go."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


async def test_clients_that_say_nothing_do_not_keep_the_kubelet_out(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_server, "MAX_CONNECTIONS", 4)
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    silent = [await asyncio.to_thread(socket.create_connection, address) for _ in range(20)]
    assert await ask(f"{url}/livez") == (200, "ok")
    # Handlers of closed connections end at once, not when their patience is over.
    await wait_until(lambda: 0 < num_handlers() <= 4)
    for connection in silent:
        connection.close()
