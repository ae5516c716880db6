"""A gateway in a process of its own, with an obedient rank, which watches its own loop and memory.

    python -m tests.unit.server.gateway_process FOLDER MAX_MODEL_LEN

It prints one JSON line with its addresses, then one for each line that it reads: what happened since the last.
It has a limit: HEADROOM_BYTES of memory more than it has once it serves. Beyond that the kernel gives it none.

The longest pause of the loop is measured by a task that wakes every few milliseconds. Time in which the loop's thread
waited for a core is no pause of its own making, so it is taken off: the figure holds on a busy machine. Other threads'
waiting is not: the loop may wait for Python's lock, which they hold.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from hetero_gateway.server.config import read_model
from hetero_gateway.server.gateway import Gateway, Ports
from tests.unit.server.server_setup import GatewayBench, read_all, request, sampling, write_manifest, write_model

HEADROOM_BYTES = 512 * 1024 * 1024
_TICK_S = 0.002
_PROC = Path("/proc/self")
_SMALL = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
"""A model whose cache is small even for a million tokens."""


@dataclass(slots=True)
class GatewayReport:
    """What a gateway process says of itself. `pause_s` and `peak_bytes` are since the last report."""

    pause_s: float
    resident_bytes: int
    peak_bytes: int
    is_idle: bool
    num_http_connections: int


class GatewayProcess:
    """The parent's side."""

    def __init__(self, folder: Path, *, max_model_len: int = 64) -> None:
        command = [sys.executable, "-m", __name__, str(folder), str(max_model_len)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            self.addresses: dict[str, str] = self._read()
            process = psutil.Process(self._process.pid)
            most_bytes = _memory("VmData", f"/proc/{process.pid}/status") + HEADROOM_BYTES
            process.rlimit(psutil.RLIMIT_DATA, (most_bytes, most_bytes))
        except ValueError:
            self._process.communicate()
            raise

    def report(self) -> GatewayReport:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return GatewayReport(**self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


class _Bench(GatewayBench):
    ports = Ports("127.0.0.1", inference=0, admin=0, ranks=0, http=0, metrics=0)


class _LoopWatch:
    """The longest pause of the loop that it runs on."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    async def run(self) -> None:
        before, waited = time.monotonic(), _waited_s()
        while True:
            await asyncio.sleep(_TICK_S)
            now, waited_now = time.monotonic(), _waited_s()
            self._pause_s = max(self._pause_s, now - before - (waited_now - waited))
            before, waited = now, waited_now

    def take(self) -> float:
        pause_s, self._pause_s = self._pause_s, 0.0
        return pause_s


def _waited_s() -> float:
    """Seconds for which this thread was ready and had no core; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    except OSError:
        return 0.0


def _memory(name: str, file: str = "/proc/self/status") -> int:
    lines = Path(file).read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _forget_peak() -> None:
    """Reset the kernel's count of the peak; where it cannot, the peak is that of the process's whole life."""
    with contextlib.suppress(OSError):
        (_PROC / "clear_refs").write_text("5", encoding="ascii")


def _report(gateway: Gateway, watch: _LoopWatch, connections: Any) -> dict[str, Any]:
    peak_bytes = _memory("VmHWM")
    _forget_peak()
    return {
        "pause_s": watch.take(),
        "resident_bytes": _memory("VmRSS"),
        "peak_bytes": peak_bytes,
        "is_idle": gateway.core.is_idle,
        "num_http_connections": len(connections),
    }


async def _lines() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


async def _run(folder: Path, max_model_len: int) -> None:
    manifest = write_manifest(
        folder / "g.yaml",
        model={"uri": "hf://org/model", "maxModelLen": max_model_len},
        engine={"blockSize": 64, "maxNumSeqs": 2, "maxNumBatchedTokens": 64},
        gateway={"maxQueuedRequests": 1000},
    )
    model = read_model(manifest, write_model(folder, max_position_embeddings=max_model_len, **_SMALL))
    async with _Bench(model) as bench:
        await bench.join()
        # What is imported and made once is not what is measured.
        await read_all(bench.inference().Generate(request("hello", sampling=sampling(max_tokens=2))))
        # As the program `hetero_gateway` does: collections leave out what is there now.
        gc.collect()
        gc.freeze()
        server: Any = bench.gateway
        watch = _LoopWatch()
        watching = asyncio.create_task(watch.run())
        addresses = {name: getattr(bench.addresses, name) for name in ("inference", "admin", "ranks", "http")}
        _say(addresses | {"probes": f"127.0.0.1:{server._probe_server.port}"})
        lines = await _lines()
        while await lines.readline():
            _say(_report(bench.gateway, watch, server._http._server.server_state.connections))
        watching.cancel()


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


if __name__ == "__main__":
    asyncio.run(_run(Path(sys.argv[1]), int(sys.argv[2])))
