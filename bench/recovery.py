"""How long a group takes to recover: ranks, and the gateway, are killed or frozen again and again under load.

    python -m bench.recovery [--kills 50] [--streams 16] [--gateway-kills 5]

A group of two ranks of one core each serves SmolLM2 to 16 greedy streams that never pause. At random moments a random
process gets SIGKILL or SIGSTOP; a recovery lasts from the signal to the first token that comes after the outage, as a
client sees it. Every stream's whole text is compared with that of an undisturbed run. Prints a table and writes
bench/results/recovery-DATE.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory
from tests.support.crowd import Blow, Crowd, Killer, ask_undisturbed
from tests.support.local_group import LocalGroupProcess, write_manifest

RESULTS: Final = Path(__file__).parent / "results"
RANKS: Final = ("cpu-0", "cpu-1")
MAX_TOKENS: Final = 64


def measure(group: LocalGroupProcess, *, streams: int, kills: int, gateway_kills: int, seed: int) -> list[Blow]:
    """All blows. Raises AssertionError when a stream was not what it is without them."""
    with group.client() as client:
        questions = ask_undisturbed(client, count=streams, max_tokens=MAX_TOKENS)
    blows: list[Blow] = []
    with Crowd(group.record.inference, questions) as crowd:
        killer = Killer(group, crowd, seed=seed)
        for number in range(kills + gateway_kills):
            of_ranks = number < kills
            blow = killer.strike(
                RANKS if of_ranks else ["gateway"], (signal.SIGKILL, signal.SIGSTOP) if of_ranks else (signal.SIGKILL,)
            )
            blows.append(blow)
            print(f"{number + 1}: {blow.victim} {blow.signal_name} {blow.recovery_s:.2f} s", file=sys.stderr)
    crowd.check()
    print(f"{crowd.completed} streams completed, each with its undisturbed text", file=sys.stderr)
    return blows


def table(blows: Sequence[Blow]) -> str:
    """Least, median, greatest recovery by kind of blow."""
    kinds = sorted({(blow.victim, blow.signal_name) for blow in blows})
    groups = {
        f"{victim} {name}": [b for b in blows if (b.victim, b.signal_name) == (victim, name)] for victim, name in kinds
    }
    groups["all ranks"] = [blow for blow in blows if blow.victim != "gateway"]
    lines = [f"{'blow':20} {'count':>5} {'least':>7} {'median':>7} {'greatest':>8}"]
    for name, members in groups.items():
        if members:
            times_s = [blow.recovery_s for blow in members]
            median_s = statistics.median(times_s)
            lines.append(f"{name:20} {len(members):5} {min(times_s):6.2f}s {median_s:6.2f}s {max(times_s):7.2f}s")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--gateway-kills", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-forkserver", action="store_true", help="measure without a prepared process")
    options = parser.parse_args(arguments)
    model = demo_directory(HeteroHome.from_environment())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = write_manifest(folder, model=model, name="recovery", recovery={"maxRestarts": 1000})
        more = ["--no-forkserver"] if options.no_forkserver else []
        with LocalGroupProcess(manifest, home=folder / "home", module="hetero_client", options=more) as group:
            blows = measure(
                group, streams=options.streams, kills=options.kills, gateway_kills=options.gateway_kills,
                seed=options.seed,
            )  # fmt: skip
    print(table(blows))
    date = datetime.now(UTC)
    path = RESULTS / f"recovery-{date:%Y-%m-%d-%H%M}.json"
    path.write_text(
        json.dumps(
            {
                "date": date.isoformat(timespec="seconds"), "cpus": os.cpu_count(), "options": vars(options),
                "blows": [asdict(blow) for blow in blows],
            },
            indent=1,
        ) + "\n",
        encoding="utf-8",
    )  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])
