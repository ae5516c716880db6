"""Plays faults at moments of real groups under the load of real clients, and prints a row for each.

    python -m tests.chaos                      # all pairs
    python -m tests.chaos --list               # what there is
    python -m tests.chaos --only "kill leader" --only "/ asleep"
    python -m tests.chaos --quick              # a dozen, in a minute on a quiet machine

As root it runs in namespaces of its own, where file systems fill up and networks drop packets, and puts processes into
cgroups that run out of memory; other users skip those pairs, and the last line counts them. Rows of all pairs go to
bench/results/chaos-DATE.txt, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.host_faults import enter_namespaces, is_inside

if TYPE_CHECKING:
    from tests.chaos.play import Pair


def main(arguments: Sequence[str]) -> int:
    """Play what the command line asks for; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the pairs and end")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="pairs whose name contains it")
    parser.add_argument("--quick", action="store_true", help="the quick ones, each at its first moments")
    options = parser.parse_args(arguments)
    status = None if options.list else enter_namespaces(arguments)
    if status is not None:
        return status
    pairs = chosen(options.only, is_quick=options.quick)
    if not pairs:
        parser.error("no pair has such a name; see --list")
    if options.list:
        print("\n".join([*(pair.name for pair in pairs), f"{len(pairs)} pairs"]))
        return 0
    return run(pairs, is_whole=not (options.only or options.quick))


def chosen(only: Sequence[str], *, is_quick: bool) -> list[Pair]:
    """Return the pairs that are asked for."""
    from tests.chaos.play import all_pairs  # with it comes torch, which only the process inside needs

    pairs = [pair for pair in all_pairs() if not only or any(text in pair.name for text in only)]
    return [pair for pair in pairs if not is_quick or (pair.fault.is_quick and pair.moment.name in QUICK_MOMENTS)]


QUICK_MOMENTS = ("decode", "asleep")


def run(pairs: Sequence[Pair], *, is_whole: bool) -> int:
    """Play pairs, print their rows, and return the exit status; keep the rows if these are all pairs."""
    from bench.home import RESULTS
    from bench.machine import describe
    from tests.chaos.play import play

    began_s, rows = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for row in play(pairs, folder=Path(folder), can_use_namespaces=is_inside()):
            print(row, flush=True)
            rows.append(row)
    failed, skipped = [row for row in rows if row.problems], [row for row in rows if row.skipped]
    took = f"{len(rows) - len(skipped)} pairs in {time.monotonic() - began_s:.0f} s"
    took = f"{took}: {len(failed)} failed, {len(skipped)} skipped"
    print(took)
    if is_whole:
        lines = [str(describe()), *map(str, rows), took]
        file = RESULTS / f"chaos-{datetime.now(UTC):%Y-%m-%d-%H%M%S}.txt"
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
