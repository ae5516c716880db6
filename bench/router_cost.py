"""What a router before gateways costs: Shepherd Model Gateway, between the same gateway and the same clients.

    python -m bench.router_cost [--rounds 5]

A real gateway with a rank that computes nothing (bench.gateway_alone), and the router before it as `hetero up --router`
and the operator start it. Three doors in turns, gRPC, HTTP, and HTTP through the router, in each round anew:

- 1 stream, a rank that takes 3 ms a step: milliseconds to the first token.
- 64 streams, a rank that takes 20 ms a step, as one that computes a model: the same, tokens/s, and the processor time
  of gateway and router.
- 64 streams, as fast as it goes, with client, rank, gateway and router on the same cores: tokens/s, processor time.

Prints medians over rounds, with the best in brackets, and writes all to bench/results/router-DATE.json. Processor time
of one stream is mostly that of heartbeats and health checks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from bench import machine
from bench.gateway_alone import Running, gateway, load
from bench.processes import cpu_s
from bench.report import aligned

DOORS: Final = ("gRPC", "HTTP", "HTTP through the router")
RESULTS: Final = Path(__file__).parent / "results"
PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """One of the loads."""

    name: str
    step_ms: float
    streams: int
    tokens: int
    times: int


LOADS: Final = (
    Load("1 stream, steps of 3 ms", 3.0, 1, 8, 40),
    Load("64 streams, steps of 20 ms", 20.0, 64, 150, 1),
    Load("64 streams, as fast as it goes", 0.0, 64, 200, 2),
)


@contextlib.contextmanager
def router(door: str) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a router before one gateway, once it serves."""
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        port, metrics_port = (server.getsockname()[1] for server in held)
    command = [
        sys.executable, "-m", "hetero_gateway", "route", "--gateway", door, "--port", str(port),
        "--metrics-port", str(metrics_port),
    ]  # fmt: skip
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_ready(f"http://127.0.0.1:{port}/readiness", process)
            yield f"127.0.0.1:{port}", psutil.Process(process.pid)
        finally:
            process.kill()


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), opener.open(url, timeout=1):
            return
        time.sleep(0.1)
    raise TimeoutError("the router does not serve")


def measure(what: Load, rounds: int) -> list[dict[str, Any]]:
    """Every run of a load: door, first token, tokens/s, and processor time a token."""
    runs = []
    with gateway(step_ms=what.step_ms, router_door=True) as running, router(running.router_door) as (address, process):
        addresses = dict(zip(DOORS, (running.address, running.http_address, address), strict=True))
        for turn in range(rounds + 1):
            for door, where in addresses.items():
                found = one_run(what, running, process, door=door, address=where)
                if turn:  # the first warms up
                    runs.append({"load": what.name, "door": door, "round": turn, **found})
    return runs


def one_run(what: Load, running: Running, routing: psutil.Process, *, door: str, address: str) -> dict[str, float]:
    before = (running.cpu_s, cpu_s(routing.pid))
    kind = "gateway" if door == DOORS[0] else "http"
    came = load(kind, address, streams=what.streams, tokens=what.tokens, times=what.times)
    wanted = what.streams * what.tokens * what.times
    if came["tokens"] != wanted:
        raise RuntimeError(f"{door}: {came['tokens']} tokens came, {wanted} had to")
    used = (running.cpu_s - before[0], cpu_s(routing.pid) - before[1])
    return {
        "first_ms": came["first_ms"],
        "tokens_per_s": came["tokens"] / came["wall_s"],
        "gateway_us_a_token": used[0] / came["tokens"] * 1e6,
        "router_us_a_token": used[1] / came["tokens"] * 1e6,
        "router_cores": used[1] / came["wall_s"],
    }


def table(runs: list[dict[str, Any]]) -> str:
    """Medians over rounds; in brackets the best round, because whatever else runs on the machine only slows."""
    rows = [("load", "door", "first token", "tokens/s", "gateway a token", "router a token, cores")]
    for what in LOADS:
        for door in DOORS:
            of_it = [run for run in runs if (run["load"], run["door"]) == (what.name, door)]

            def shown(key: str, best: Callable[[Iterable[float]], float], digits: int = 0) -> str:
                found = [run[key] for run in of_it]  # noqa: B023
                return f"{statistics.median(found):,.{digits}f} ({best(found):,.{digits}f})"

            routed = f"{shown('router_us_a_token', min)} µs, {shown('router_cores', min, 2)}"
            first, rate = f"{shown('first_ms', min, 1)} ms", shown("tokens_per_s", max)
            gateway_us = f"{shown('gateway_us_a_token', min)} µs"
            rows.append((what.name, door, first, rate, gateway_us, routed if door == DOORS[2] else ""))
    return aligned(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # Proxies are for other hosts.
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    about = machine.describe()
    runs = [run for what in LOADS for run in measure(what, options.rounds)]
    print(table(runs))
    path = RESULTS / f"router-{time.strftime('%Y-%m-%d-%H%M%S')}.json"
    path.write_text(json.dumps({"about": about, "runs": runs}, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
