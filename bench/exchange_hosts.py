"""What an exchange between two hosts costs: natively over TCP and over Gloo, beside what the wire can do.

    python -m bench.exchange_hosts [--delayed] [--rounds N]        # as root

Two processes, each in a network namespace (two_hosts.py) and on a core of its own, measure in turns within one run: a
byte to and fro over a plain socket (the round trip), plain streams one way (the line) and both ways, and sums over
either exchange. A sum counts as long as it took the rank that it took longer. Prints p50 and the targets, and writes
bench/results/exchange-hosts-DATE-WIRE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from bench.two_hosts import Host, two_hosts
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.gloo_exchange import GlooExchange
from tests.support.rank_processes import RankContext, run_ranks

RESULTS: Final = Path(__file__).parent / "results"
SIZES: Final = (4096, 65536, 1 << 20)
BOTH: Final = (0, 1)
STREAM_BYTES: Final = 32 << 20
_TURNS: Final = 5
_TIMEOUT_S: Final = 500.0

Times = dict[str, list[float]]
"""Seconds of each repetition, by what was measured: "round trip", "line", "tcp 4096", …"""


def measure(ranks: RankContext, hosts: Sequence[Host], cores: Sequence[int], rounds: int) -> Times:
    """One rank's body."""
    host = hosts[ranks.rank]
    host.enter()
    os.sched_setaffinity(0, {cores[ranks.rank]})
    torch.set_num_threads(1)
    group = ranks.form(ranks_pb2.EXCHANGE_KIND_TCP, timeout_s=_TIMEOUT_S, host=host.address)
    if group.kind != ranks_pb2.EXCHANGE_KIND_TCP:
        raise SystemExit(group.coordinator.formed(measure=False).exchange_reason)
    world = dist.group.WORLD
    assert world is not None, "forming a group makes it"
    gloo = GlooExchange({BOTH: world}, {}, rank=ranks.rank, timeout_s=_TIMEOUT_S)
    times: Times = {}
    with closing(_plain_socket(ranks, hosts)) as plain:
        for _ in range(_TURNS):
            times.setdefault("round trip", []).extend(_round_trips(plain, ranks.rank, rounds // _TURNS))
            times.setdefault("line", []).append(_stream_s(plain, ranks.rank))
            times.setdefault("line both ways", []).append(_both_ways_s(plain, ranks.rank))
            for size in SIZES:
                tensor, repeats = torch.ones(size // 4), max(5, min(rounds, rounds * 16384 // size) // _TURNS)
                for name, exchange in (("tcp", group.exchange), ("gloo", gloo)):
                    times.setdefault(f"{name} {size}", []).extend(_sums(exchange, tensor, repeats))
    group.close()
    return times


def _plain_socket(ranks: RankContext, hosts: Sequence[Host]) -> socket.socket:
    listener = socket.create_server((hosts[0].address, 0)) if ranks.rank == 0 else None
    port = int(ranks.meet(str(listener.getsockname()[1]) if listener else "")[0])
    if listener is None:
        plain = socket.create_connection((hosts[0].address, port))
    else:
        with listener:
            plain = listener.accept()[0]
    plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return plain


def _round_trips(plain: socket.socket, rank: int, repeats: int) -> list[float]:
    """Seconds of each round trip of a byte, waited for without sleep."""
    times = []
    for _ in range(repeats):
        begin_s = time.perf_counter()
        if rank == 0:
            plain.send(b"x")
        _spin_for_a_byte(plain)
        if rank == 1:
            plain.send(b"x")
        times.append(time.perf_counter() - begin_s)
    return times


def _spin_for_a_byte(plain: socket.socket) -> None:
    while True:
        try:
            if plain.recv(1, socket.MSG_DONTWAIT):
                return
        except BlockingIOError:
            os.sched_yield()


def _stream_s(plain: socket.socket, rank: int) -> float:
    """Seconds of a mebibyte in a stream from rank 0 to rank 1, and then back."""
    memory = bytearray(b"x" * STREAM_BYTES)
    if rank:
        _spin_for_a_byte(plain)
    else:
        plain.send(b"x")
    begin_s = time.perf_counter()
    for source in BOTH:
        if rank == source:
            plain.sendall(memory)
        else:
            plain.recv_into(memory, STREAM_BYTES, socket.MSG_WAITALL)
    return (time.perf_counter() - begin_s) * (1 << 20) / (2 * STREAM_BYTES)


def _both_ways_s(plain: socket.socket, rank: int) -> float:
    """Seconds of a mebibyte in two streams at once, one each way, as the ranks of a sum send."""
    sent, received = bytes(STREAM_BYTES), bytearray(STREAM_BYTES)
    if rank:
        _spin_for_a_byte(plain)
    else:
        plain.send(b"x")
    begin_s = time.perf_counter()
    sending = threading.Thread(target=plain.sendall, args=(sent,))
    sending.start()
    plain.recv_into(received, STREAM_BYTES, socket.MSG_WAITALL)
    sending.join()
    return (time.perf_counter() - begin_s) * (1 << 20) / STREAM_BYTES


def _sums(exchange: HostExchange, tensor: torch.Tensor, repeats: int) -> list[float]:
    times = []
    for number in range(repeats + 2):
        begin_s = time.perf_counter()
        exchange.all_reduce(tensor, BOTH)
        if number >= 2:
            times.append(time.perf_counter() - begin_s)
        tensor.fill_(1.0)
    return times


def summary(times: Sequence[Times]) -> dict[str, float]:
    """Median in microseconds of the slower rank's times; of the round trip rank 0's."""
    figures = {}
    for name in times[0]:
        ranks = times[:1] if name == "round trip" else times
        figures[name] = 1e6 * statistics.median(max(each) for each in zip(*(rank[name] for rank in ranks), strict=True))
    return figures


def verdicts(us: dict[str, float]) -> list[str]:
    """Return each target with what was measured."""
    small, limit = us["tcp 4096"], 1.3 * us["round trip"] + 20
    large, line = us[f"tcp {1 << 20}"], us["line"]
    lines = [
        f"round trip {us['round trip']:.1f} µs; line {(1 << 20) / line:.0f} MB/s, "
        f"{(1 << 20) / us['line both ways']:.0f} MB/s each way where both ways are in use",
        f"4 KB {small:.1f} µs; limit 1.3 round trips + 20 = {limit:.1f} µs: {_word(small <= limit)}",
        f"1 MB {large:.0f} µs; limit 1.3 x line = {1.3 * line:.0f} µs: {_word(large <= 1.3 * line)}",
    ]
    for size in SIZES:
        ratio = us[f"gloo {size}"] / us[f"tcp {size}"]
        lines.append(f"{size:8} bytes: Gloo {us[f'gloo {size}']:.1f} µs, {ratio:.1f} x: {_word(ratio >= 5)}")
    return lines


def _word(met: bool) -> str:
    return "met" if met else "missed"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--delayed", action="store_true", help="a wire that delays each packet by 100 µs")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed, one for each rank")
    body: Callable[..., Times] = measure
    with two_hosts(delayed=options.delayed) as hosts:
        us = summary(run_ranks(body, 2, hosts, cores, options.rounds, timeout_s=_TIMEOUT_S))
    print("\n".join(verdicts(us)))
    RESULTS.mkdir(exist_ok=True)
    wire = "delayed" if options.delayed else "veth"
    path = RESULTS / f"exchange-hosts-{datetime.now(UTC).date().isoformat()}-{wire}.json"
    result = {"machine": platform.machine(), "cores": cores, "wire": wire, "us": us}
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(f"wrote bench/results/{path.name}")


if __name__ == "__main__":
    main()
