"""What a decode step of one rank costs, and how much of it is not spent in kernels.

    python -m bench.decode_step [--model NAME] [--quantization none int8 int4] [--rows 1 8 32] [--context 128]
                               [--dtype float32 bfloat16]

A CPU rank's runner in this process, with all threads, and plans as the scheduler makes them: all rows decode, greedily.
Plans come one at a time, as when a gateway waits for each result, and AHEAD together, as when it sends steps ahead.
Kernels are what the native library runs; the rest is Python, from the plan to the tokens. Medians of STEPS steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, ParamSpec, TypeVar

from bench.decoding import DecodingRank
from bench.home import BenchHome
from bench.limits import Limits, measure
from bench.report import aligned
from bench.shapes import DEMO, MODELS, directory_of
from hetero_api.model_config import ModelConfig
from hetero_worker.native.team import NativeTeam

STEPS: Final = 200
WARM_STEPS: Final = 8
AHEAD: Final = 4
"""Plans that are given to the runner together: what a gateway has out, and answers may wait for, at 8 ms a step."""
MOST_OVERHEAD: Final = 0.08
"""Of a step of one row, where plans come AHEAD together."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Taken:
    """Medians, of steps of so many rows whose plans came so many together."""

    rows: int
    together: int
    step_s: float
    kernels_s: float
    weight_bytes: int

    @property
    def overhead(self) -> float:
        """Share of the step that is not spent in kernels."""
        return 1 - self.kernels_s / self.step_s


class _Clock:
    """How long the native library was at work."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self) -> None:
        """From now on, in all teams. Costs a fraction of a microsecond a call."""
        for name in ("run", "run_one", "run_call"):
            setattr(NativeTeam, name, self._timed(getattr(NativeTeam, name)))

    def _timed(self, method: Callable[P, T]) -> Callable[P, T]:
        def timed(*arguments: P.args, **named: P.kwargs) -> T:
            begin_s = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.seconds += time.perf_counter() - begin_s

        return timed


def measure_steps(rank: DecodingRank, rows: int, together: int, clock: _Clock) -> Taken:
    """Fill so many slots, decode, and release them."""
    rank.fill(rows)
    taken, kernels = [], []
    for _ in range((WARM_STEPS + STEPS) // together):
        clock.seconds = 0.0
        taken.append(rank.decode(rows, together))
        kernels.append(clock.seconds / together)
    rank.release(rows)
    step_s, kernels_s = (statistics.median(samples[WARM_STEPS // together :]) for samples in (taken, kernels))
    return Taken(rows, together, step_s, kernels_s, rank.report.weight_bytes)


def table(measured: Sequence[tuple[str, Taken]], limits: Limits) -> str:
    """A line a width, number of rows, and of plans that came together."""
    head = ["weights", "rows", "plans", "step ms", "kernels ms", "not in kernels", "tokens/s"]
    lines = [[*head, "weights read, GB/s (share)"]]
    for name, taken in measured:
        rate = taken.weight_bytes / taken.step_s
        lines.append(
            [
                name,
                str(taken.rows),
                str(taken.together),
                f"{taken.step_s * 1e3:.2f}",
                f"{taken.kernels_s * 1e3:.2f}",
                f"{taken.overhead:.1%}",
                f"{taken.rows / taken.step_s:.1f}",
                f"{rate / 1e9:.1f} ({rate / limits.read_bytes_per_s:.0%})",
            ]
        )
    return aligned(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default=DEMO)
    parser.add_argument("--quantization", nargs="+", choices=("none", "int8", "int4"), default=["none", "int8", "int4"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--context", type=int, default=128, help="tokens of each sequence before the first step")
    arguments = parser.parse_args()
    threads = len(os.sched_getaffinity(0))
    directory = directory_of(arguments.model, BenchHome.from_environment())
    limits = measure(threads)
    clock = _Clock()
    clock.watch()
    measured = []
    for quantization, dtype in product(arguments.quantization, arguments.dtype):
        config = ModelConfig.from_directory(directory).quantized(quantization)
        rank = DecodingRank(
            directory, config, dtype=dtype, most_rows=max(arguments.rows), context=arguments.context,
            steps=WARM_STEPS + STEPS,
        )  # fmt: skip
        name = f"{'16 bit' if quantization == 'none' else quantization}, {dtype}"
        measured += [(name, measure_steps(rank, rows, plans, clock)) for rows in arguments.rows for plans in (1, AHEAD)]
    print(f"{arguments.model}, {threads} threads, context {arguments.context}: {limits.told()}\n")
    print(table(measured, limits))
    late = [
        name
        for name, taken in measured
        if (taken.rows, taken.together) == (1, AHEAD) and taken.overhead > MOST_OVERHEAD
    ]
    if late:
        print(f"more than {MOST_OVERHEAD:.0%} of a step of one row is not in kernels: {', '.join(late)}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
