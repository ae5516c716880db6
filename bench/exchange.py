"""What an exchange between two ranks costs: native shared memory, native TCP and Gloo, side by side.

    python -m bench.exchange [--rounds N]

Two processes, pinned to the first two cores of this process, sum tensors of 4 B to 8 MB through the same Python call
that the model makes. They take turns, round by round, within one run. A round follows a short one of another
exchange, so both ranks are there; it counts as long as it took the rank that it took longer. Prints p50 and p99 in
microseconds and how many times as long Gloo takes, and writes bench/results/exchange-DATE.json. Of TCP and Gloo between
hosts see exchange_hosts.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.gloo_exchange import GlooExchange
from hetero_worker.distributed.native_exchange import load
from hetero_worker.distributed.shm_exchange import AREA_BYTES, ShmExchange
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment, unlink
from tests.support.rank_processes import RankContext, run_ranks

RESULTS: Final = Path(__file__).parent / "results"
SIZES: Final = (4, 64, 576, 4096, 16384, 65536, 262144, 1 << 20, 8 << 20)
"""Bytes; 576 fp32 numbers are a row of SmolLM2's."""
BOTH: Final = (0, 1)
KINDS: Final = ("native", "tcp", "gloo")
_TARGETS_US: Final = {4096: 10.0, 65536: 40.0}
_TIMEOUT_S: Final = 900.0

Times = dict[str, dict[int, list[float]]]
"""Seconds of every round, by kind and bytes."""


def measure(ranks: RankContext, cores: Sequence[int], rounds: int) -> Times:
    """One rank's body."""
    os.sched_setaffinity(0, {cores[ranks.rank]})
    torch.set_num_threads(1)
    group = ranks.form(ranks_pb2.EXCHANGE_KIND_TCP, timeout_s=_TIMEOUT_S)
    world = dist.group.WORLD
    assert world is not None, "forming a group makes it"
    gloo = GlooExchange({BOTH: world}, {}, rank=ranks.rank, timeout_s=_TIMEOUT_S)
    exchanges: dict[str, HostExchange] = {"native": _shared(ranks, gloo), "tcp": group.exchange, "gloo": gloo}
    times: Times = {kind: {size: [] for size in SIZES} for kind in KINDS}
    for size in SIZES:
        tensor = torch.ones(size // 4)
        for number in range(_rounds_of(size, rounds)):
            for kind, exchange in exchanges.items():
                took_s = _time_round(exchange, exchanges["native"], tensor)
                if number:
                    times[kind][size].append(took_s)
    for exchange in exchanges.values():
        exchange.close()
    group.close()
    return times


def _shared(ranks: RankContext, gloo: HostExchange) -> ShmExchange:
    name = f"{ranks.segment_prefix}bench"
    layout = SegmentLayout(2, AREA_BYTES)
    if ranks.rank == 0:
        segment = ShmSegment.create(name, layout)
    gloo.broadcast(torch.zeros(1), 0)
    if ranks.rank == 1:
        segment = ShmSegment.attach(name, layout, rank=1)
    gloo.broadcast(torch.zeros(1), 1)
    unlink(name)
    loaded = load()
    if loaded.library is None:
        raise SystemExit(loaded.reason)
    return ShmExchange(segment, timeout_s=_TIMEOUT_S, library=loaded.library)


def _rounds_of(size: int, rounds: int) -> int:
    return max(20, min(rounds, rounds * 65536 // size)) + 1


def _time_round(exchange: HostExchange, fence: HostExchange, tensor: torch.Tensor) -> float:
    """The second of two rounds in a row: then both ranks are there, and the caches are as in use."""
    group = exchange.among(BOTH)
    group.all_reduce(tensor, BOTH)
    tensor.fill_(1.0)
    fence.all_reduce(_FENCE, BOTH)
    begin_s = time.perf_counter()
    group.all_reduce(tensor, BOTH)
    return time.perf_counter() - begin_s


_FENCE: Final = torch.zeros(1)


def summary(times: Sequence[Times]) -> dict[str, dict[int, dict[str, float]]]:
    """p50 and p99 in microseconds, by kind and bytes, of both ranks' times."""
    return {
        kind: {size: _percentiles(_slower([rank[kind][size] for rank in times])) for size in SIZES} for kind in KINDS
    }


def _slower(by_rank: Sequence[Sequence[float]]) -> list[float]:
    return [max(took_s) for took_s in zip(*by_rank, strict=True)]


def _percentiles(times_s: Sequence[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    return {"p50": 1e6 * statistics.median(ordered), "p99": 1e6 * ordered[int(0.99 * (len(ordered) - 1))]}


def table(figures: Mapping[str, Mapping[int, Mapping[str, float]]]) -> str:
    heads = "  ".join(f"{kind + ' p50/p99 µs':>22}" for kind in KINDS)
    lines = [f"{'bytes':>8}  {heads}   gloo/native  gloo/tcp"]
    for size in SIZES:
        p50 = {kind: figures[kind][size]["p50"] for kind in KINDS}
        cells = "  ".join(f"{p50[kind]:11.1f} /{figures[kind][size]['p99']:9.1f}" for kind in KINDS)
        target = f"   (target {_TARGETS_US[size]:g} µs)" if size in _TARGETS_US else ""
        lines.append(
            f"{size:8}  {cells}   {p50['gloo'] / p50['native']:10.1f}x {p50['gloo'] / p50['tcp']:8.1f}x{target}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    rounds = parser.parse_args().rounds
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("two cores are needed, one for each rank")
    body: Callable[..., Times] = measure
    figures = summary(run_ranks(body, 2, cores, rounds, timeout_s=_TIMEOUT_S))
    print(table(figures))
    today = datetime.now(UTC).date().isoformat()
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"exchange-{today}.json"
    path.write_text(json.dumps({"machine": platform.machine(), "cores": cores, "us": figures}, indent=2) + "\n")
    print(f"wrote {path.relative_to(Path.cwd())}" if path.is_relative_to(Path.cwd()) else f"wrote {path}")


if __name__ == "__main__":
    main()
