"""Cost and yield of rest: falling asleep, waking, and the first token of the request that wakes a group.

    python -m bench.idle [--times 5]

A group of one rank on two cores serves SmolLM2 and rests after a second without a request (spec.idle), at either level.
Each time it is asked once while it rests and once more at once. Prints medians by level, as docs/using.md has them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench.report import aligned
from hetero_client import AdminClient, HeteroClient, SamplingParams
from hetero_client.admin import IdleView
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory
from tests.support.local_group import LocalGroupProcess, wait_for, write_manifest

PROMPT: Final = tuple(range(3, 67))
LEVELS: Final = (1, 2)
PATIENCE_S: Final = 60.0


class Rest(NamedTuple):
    """Figures of one rest, in seconds and bytes."""

    sleep_s: float
    freed_bytes: int
    wake_s: float
    waking_s: float
    """To the first token of the request that wakes the group."""
    awake_s: float
    """To the first token of the next request."""


def first_token_s(client: HeteroClient) -> float:
    """Return the seconds to the first token of a request of 64 tokens; none of them is cached."""
    began_s = time.perf_counter()
    sampling = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    with client.generate(PROMPT, sampling=sampling, cache_salt=str(began_s)) as stream:
        next(event for event in stream if getattr(event, "token_ids", ()))
        return time.perf_counter() - began_s


def idle_of(admin: AdminClient) -> IdleView | None:
    return admin.topology().idle


def rest(group: LocalGroupProcess, client: HeteroClient, admin: AdminClient) -> Rest:
    """Wait until the group rests, then ask twice."""

    def rests() -> bool:
        idle = idle_of(admin)
        return idle is not None and idle.rests

    wait_for(rests, PATIENCE_S, group.describe)
    waking_s, awake_s = first_token_s(client), first_token_s(client)
    idle = idle_of(admin)
    assert idle is not None, "it has rested"
    return Rest(idle.sleep_s, sum(idle.freed_bytes), idle.wake_s, waking_s, awake_s)


def measure(level: int, *, times: int) -> list[Rest]:
    """Return the figures of some rests at a level."""
    model = demo_directory(HeteroHome.from_environment())
    with tempfile.TemporaryDirectory() as name:
        folder, idle = Path(name), {"sleepAfterSeconds": 1, "level": level}
        manifest = write_manifest(folder, model=model, ranks=1, cores=2, idle=idle)
        running = LocalGroupProcess(manifest, home=folder / "home", module="hetero_client")
        with running as group, group.client() as client:
            first_token_s(client)
            with group.admin() as admin:
                return [rest(group, client, admin) for _ in range(times)]


def main(arguments: Sequence[str]) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=5)
    options = parser.parse_args(arguments)
    rows = [["level", "falls asleep", "gives back", "wakes", "first token, waking", "first token, awake"]]
    for level in LEVELS:
        middle = Rest(*map(statistics.median, zip(*measure(level, times=options.times), strict=True)))
        times = [f"{seconds * 1000:.0f} ms" for seconds in (middle.wake_s, middle.waking_s, middle.awake_s)]
        rows.append([str(level), f"{middle.sleep_s * 1000:.0f} ms", f"{middle.freed_bytes / 1e6:.0f} MB", *times])
    print(aligned(rows))


if __name__ == "__main__":
    main(sys.argv[1:])
