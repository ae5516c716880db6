"""Shepherd Model Gateway, as it is published, in front of a gateway's router door."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from tests.support.kube.ports import free_port

START_S = 60.0
_CODE = "import sys; from smg.cli import main; sys.exit(main())"


@asynccontextmanager
async def smg(*workers: str, log: Path, arguments: tuple[str, ...] = ()) -> AsyncIterator[str]:
    """The address of a router that has all `workers`, "host:port" each; it ends with the context."""
    port = free_port()
    command = [
        sys.executable, "-c", _CODE, "launch", "--host=127.0.0.1", f"--port={port}",
        f"--prometheus-port={free_port()}", "--prometheus-host=127.0.0.1", "--worker-startup-check-interval=1",
        "--worker-urls", *(f"grpc://{worker}" for worker in workers), *arguments,
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(*command, stdout=file, stderr=file, env=environment)
    try:
        await _until_ready(port, process, len(workers), log)
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _until_ready(port: int, process: asyncio.subprocess.Process, num_workers: int, log: Path) -> None:
    async with (
        asyncio.timeout(START_S),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as http,
    ):
        while not await _has(http, num_workers):
            if process.returncode is not None:
                told = await asyncio.to_thread(log.read_text, "utf-8", "replace")
                raise RuntimeError(f"the router ended: {told[-4000:]}")
            await asyncio.sleep(0.05)


async def _has(http: httpx.AsyncClient, num_workers: int) -> bool:
    try:
        told = (await http.get("/workers")).json()
    except (httpx.TransportError, ValueError):
        return False
    healthy = [each for each in told.get("workers", ()) if each.get("is_healthy")]
    if len(healthy) < num_workers:
        return False
    # The tokenizer is fetched from a worker behind that.
    told = await http.post("/v1/tokenize", json={"model": healthy[0]["model_id"], "prompt": "a"})
    return bool(told.status_code == httpx.codes.OK)
