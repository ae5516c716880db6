"""Growth of every process of a group that serves for an hour at 70 % of what it can.

    python -m bench.soak [--minutes 60] [--share 0.7]

A group of two CPU ranks serves SmolLM2. Its most requests a second are measured first, by 8 clients without a pause.
Then requests come at random times at 70 % of that rate, half of them over each door. The resident memory of every
process is read each two seconds. After a warm-up of a fifth of the time a line is fitted to the means of BLOCKS equal
blocks of it; the upper bound of its slope (95 %, one-sided) must not be above 8 MB/h, and no request may be lost.
Prints a table, and writes bench/results/soak-DATE.json and .svg. The exit status is 1 if a process grows or a request
is lost.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

import psutil
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.home import RESULTS
from bench.machine import describe
from hetero_client import Access, HeteroClient
from hetero_client.home import HeteroHome
from hetero_client.load.doors import Door, GrpcDoor, HttpDoor
from hetero_client.load.run import LoadPlan, Sample, run_load
from hetero_client.model_store.demo_model import demo_directory
from tests.support.entered_thread import EnteredThread
from tests.support.local_group import LocalGroupProcess, write_manifest

LOOK_S: Final = 2.0
WARM_UP: Final = 0.2
BLOCKS: Final = 20
T_95: Final = 1.734
"""Student's t, one-sided 95 %, of BLOCKS - 2 degrees of freedom."""
MOST_MB_PER_HOUR: Final = 8.0
MEGABYTE: Final = 1e6
CLIENTS: Final = 8
PROMPT_TOKENS: Final = 64
OUTPUT_TOKENS: Final = 32
CAPACITY_REQUESTS: Final = 96


class Point(NamedTuple):
    """Resident memory of a process at a time."""

    at_s: float
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """A line through a process's memory after its warm-up, in MB/h."""

    resident_mb: float
    slope: float
    upper: float

    @property
    def is_bounded(self) -> bool:
        """Whether the process cannot be said to grow too much."""
        return self.upper <= MOST_MB_PER_HOUR


def growth_of(points: Sequence[Point]) -> Growth:
    """Fit a line to the means of blocks, whose noise is independent where that of single looks is not."""
    begin_s, end_s = points[0].at_s, points[-1].at_s
    warm_s = begin_s + WARM_UP * (end_s - begin_s)
    block_s = (end_s - warm_s) / BLOCKS
    blocks: list[list[Point]] = [[] for _ in range(BLOCKS)]
    for point in points:
        if point.at_s > warm_s:
            blocks[min(BLOCKS - 1, int((point.at_s - warm_s) / block_s))].append(point)
    if not all(blocks):
        raise ValueError("a block of the soak has no look at a process's memory; let it last longer")
    hours = [statistics.fmean(point.at_s for point in block) / 3600 for block in blocks]
    megabytes = [statistics.fmean(point.resident_bytes for point in block) / MEGABYTE for block in blocks]
    slope, intercept = statistics.linear_regression(hours, megabytes)
    residual = sum((y - intercept - slope * x) ** 2 for x, y in zip(hours, megabytes, strict=True)) / (BLOCKS - 2)
    middle = statistics.fmean(hours)
    error = math.sqrt(residual / sum((x - middle) ** 2 for x in hours))
    return Growth(megabytes[-1], slope, slope + T_95 * error)


class MemoryWatch(EnteredThread):
    """Resident memory of processes by name, read on a thread while it is entered."""

    def __init__(self, processes: dict[str, int]) -> None:
        super().__init__()
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self.points: dict[str, list[Point]] = {name: [] for name in processes}

    def _work(self) -> None:
        while not self._leaving.wait(LOOK_S):
            for name, process in self._processes.items():
                self.points[name].append(Point(time.monotonic(), process.memory_info().rss))


def lost(samples: Sequence[Sample]) -> list[str]:
    """Return why requests did not end with all their tokens."""
    return [
        sample.error or f"{sample.num_tokens} tokens of {OUTPUT_TOKENS}"
        for sample in samples
        if sample.error or sample.num_tokens != OUTPUT_TOKENS
    ]


def soak(doors: Sequence[Door], *, rate: float, seconds: float) -> list[Sample]:
    """Send requests at a rate for some time, an equal part through each door."""
    each = rate / len(doors)
    plan = LoadPlan(max(1, int(each * seconds)), 1, PROMPT_TOKENS, OUTPUT_TOKENS, rate=each)
    with ThreadPoolExecutor(len(doors)) as pool:
        runs = [pool.submit(run_load, door, replace(plan, seed=seed)) for seed, door in enumerate(doors, start=1)]
        return [sample for run in runs for sample in run.result()]


def draw(points: dict[str, list[Point]], path: Path) -> None:
    """Draw each process's memory over the soak, from what it had in its middle."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots()
    for name, looks in points.items():
        middle = statistics.median(look.resident_bytes for look in looks)
        minutes = [(look.at_s - looks[0].at_s) / 60 for look in looks]
        axes.plot(minutes, [(look.resident_bytes - middle) / MEGABYTE for look in looks], label=name, linewidth=1)
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory, MB from the median")
    axes.legend(fontsize=8, frameon=False)
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    figure.savefig(path)


def main(arguments: Sequence[str]) -> int:
    """Soak a group and write what came of it; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--share", type=float, default=0.7, help="of the rate that the group can serve")
    options = parser.parse_args(arguments)
    model = demo_directory(HeteroHome.from_environment())
    with tempfile.TemporaryDirectory() as folder:
        manifest = write_manifest(Path(folder), model=model, name="soak")
        with LocalGroupProcess(manifest, home=Path(folder) / "home", module="hetero_client") as group:
            record = group.record
            doors = (GrpcDoor(HeteroClient(record.inference)), HttpDoor(record.http, access=Access()))
            plan = LoadPlan(CAPACITY_REQUESTS, CLIENTS, PROMPT_TOKENS, OUTPUT_TOKENS)
            began_s = time.monotonic()
            failures = lost(run_load(doors[0], plan))
            capacity = CAPACITY_REQUESTS / (time.monotonic() - began_s)
            print(f"{capacity:.2f} requests/s at most; {options.minutes:g} minutes at {options.share:.0%}", flush=True)
            with MemoryWatch({**record.processes, "launcher": group.process.pid}) as watch:
                samples = soak(doors, rate=options.share * capacity, seconds=60 * options.minutes)
            failures += lost(samples)
            is_same = group.record.processes == record.processes
            for door in doors:
                door.close()
    growths = {name: growth_of(points) for name, points in watch.points.items()}
    for name, growth in growths.items():
        print(f"{name:10} {growth.resident_mb:8.1f} MB {growth.slope:+7.2f} MB/h, at most {growth.upper:+7.2f}")
    print(f"{len(samples)} requests, {len(failures)} lost{': ' + failures[0] if failures else ''}")
    path = RESULTS / f"soak-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.json"
    result = {
        **describe(), "options": vars(options), "capacity_requests_per_s": capacity, "requests": len(samples),
        "lost": failures[:10], "num_lost": len(failures), "processes_were_replaced": not is_same,
        "growth_mb_per_hour": {name: asdict(growth) for name, growth in growths.items()},
    }  # fmt: skip
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    draw(watch.points, path.with_suffix(".svg"))
    print(path)
    return int(bool(failures) or not is_same or not all(growth.is_bounded for growth in growths.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
