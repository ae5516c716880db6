"""What the engine core gives on a real group: overlapped scheduling on and off, and the prefix cache.

    python -m bench.engine_core [--rounds 5]

- Overlap: tokens/s of SmolLM2 on one rank of two threads at batch 1, 8 and 32, spec.engine.overlapScheduling on and off
  in turns; and, from the rank's own log, the gap between two steps as a share of the time. Limit with it on: 10 %.
- Prefix cache: time to first token of a prompt of 520 tokens, cold, and when its first 512 are those of an earlier
  prompt. Limit: 25 %.

Prints a table; exit status 1 when a limit is exceeded.
"""

from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
from pathlib import Path
from typing import Final

from bench.ours import HeteroContender
from bench.workloads import Workload, make_workloads
from hetero_client import HeteroClient, SamplingParams
from hetero_client.home import HeteroHome
from hetero_client.model_store.demo_model import demo_directory

BATCHES: Final = ("decode1", "batch8", "batch32")
PREFIX: Final = 512
SUFFIX: Final = 8
MOST_GAP: Final = 0.10
MOST_OF_COLD: Final = 0.25
_GAPS: Final = re.compile(r"(\d+ steps: gap before a step .* gaps are ([0-9.]+)% of the time)")


def rates(group: HeteroContender, workloads: dict[str, Workload], into: dict[str, list[float]]) -> None:
    """One turn: tokens/s of each workload."""
    for name, workload in workloads.items():
        measured = group.run(workload)
        into[name].append(measured.output_tokens / measured.elapsed_s)


def first_token_s(client: HeteroClient, prompt: list[int], *, salt: str) -> float:
    sampling = SamplingParams(temperature=0, max_tokens=1)
    return client.generate_text(prompt, sampling=sampling, cache_salt=salt).timings.first_token_s or 0.0


def prefix_cache(client: HeteroClient, rounds: int) -> tuple[float, float]:
    """Median seconds to the first token: cold, and with a cached prefix."""
    chooser = random.Random(0)
    cold, warm = list[float](), list[float]()
    for number in range(rounds + 1):
        prefix = [chooser.randrange(1000, 40_000) for _ in range(PREFIX)]
        tails = [[chooser.randrange(1000, 40_000) for _ in range(SUFFIX)] for _ in range(2)]
        cold.append(first_token_s(client, prefix + tails[0], salt=f"round-{number}"))
        warm.append(first_token_s(client, prefix + tails[1], salt=f"round-{number}"))
    return statistics.median(cold[1:]), statistics.median(warm[1:])


def gap_share(log: str) -> float:
    """The last epoch's; prints the line that tells it."""
    found = _GAPS.findall(log)
    if not found:
        raise RuntimeError("the rank's log tells no gaps:\n" + log[-2000:])
    line, share = found[-1]
    print(f"    {line}")
    return float(share) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    model: Path = demo_directory(HeteroHome.from_environment())
    workloads = {name: workload for name, workload in make_workloads(model).items() if name in BATCHES}
    groups = {
        overlap: HeteroContender(model=model, ranks=1, cores=2, engine={"overlapScheduling": overlap})
        for overlap in (True, False)
    }
    found: dict[bool, dict[str, list[float]]] = {overlap: {name: [] for name in workloads} for overlap in groups}
    problems = []
    for group in groups.values():
        group.start()
    for _ in range(rounds + 1):
        for overlap, group in groups.items():
            rates(group, workloads, found[overlap])
    cold_s, warm_s = prefix_cache(groups[True].client, rounds)
    for overlap, group in groups.items():
        cells = [f"{name} {statistics.median(each[1:]):.1f} tok/s" for name, each in found[overlap].items()]
        print(f"overlap {'on ' if overlap else 'off'}: {', '.join(cells)}")
        share = gap_share(group.end())
        group.stop()
        if overlap and share > MOST_GAP:
            problems.append(f"gaps are {share:.1%} of the time, more than {MOST_GAP:.0%}")
    ratio = warm_s / cold_s
    print(
        f"first token of {PREFIX + SUFFIX} tokens: cold {cold_s * 1e3:.0f} ms, with {PREFIX} cached "
        f"{warm_s * 1e3:.0f} ms: {ratio:.0%}"
    )
    if ratio > MOST_OF_COLD:
        problems.append(f"a cached prefix takes {ratio:.0%} of the cold time, more than {MOST_OF_COLD:.0%}")
    for problem in problems:
        print(f"EXCEEDED: {problem}")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
