"""The router's process, as a user or a pod starts it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path


@asynccontextmanager
async def route(
    *arguments: str, log: Path, variables: Mapping[str, str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python -m hetero_gateway route` without proxies, with these variables besides; killed at the end."""
    environment = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    command = [sys.executable, "-m", "hetero_gateway", "route", *arguments]
    with log.open("wb") as file:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=file, stderr=file, env={**environment, **(variables or {})}
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
