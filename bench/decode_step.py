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
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from bench.home import BenchHome
from bench.limits import Limits, measure
from bench.report import aligned
from bench.shapes import DEMO, MODELS, directory_of
from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementShares
from hetero_api.v1 import ranks_pb2
from hetero_placement.shard_plans import deal_within_layers
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.native.team import NativeTeam
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.plan_runner import PlanRunner

STEPS: Final = 200
WARM_STEPS: Final = 8
AHEAD: Final = 4
"""Plans that are given to the runner together: what a gateway has out, and answers may wait for, at 8 ms a step."""
BLOCK_SIZE: Final = 16
MEMORY_BYTES: Final = 8 << 30
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


class _Rank:
    """A runner with sequences in its slots."""

    def __init__(
        self, directory: Path, quantization: str, *, dtype: str, threads: int, most_rows: int, context: int
    ) -> None:
        config = ModelConfig.from_directory(directory).quantized(quantization)
        self._blocks = -(-(context + STEPS + WARM_STEPS + 1) // BLOCK_SIZE)
        self._context = context
        self._runner = PlanRunner(cpu_backend())
        self._runner.attach(LocalExchange())
        report = self._runner.load(
            LoadRequest(
                directory=directory,
                config=config,
                dtype=dtype,
                shard_plan=deal_within_layers(config, cores=[threads], shares=PlacementShares()),
                rank=0,
                max_model_len=self._blocks * BLOCK_SIZE,
                max_num_batched_tokens=max(512, most_rows),
                max_num_seqs=most_rows,
                memory_bytes=MEMORY_BYTES,
                cache_size_is_given=True,
            )
        )
        self.weight_bytes = report.weight_bytes
        self._runner.allocate(1 + most_rows * self._blocks, BLOCK_SIZE)
        self._next_step = 1

    def steps(self, rows: int, together: int, clock: _Clock) -> Taken:
        """Fill so many slots, decode, and release them."""
        for slot in range(rows):
            self._execute(self._prompt(slot))
        taken, kernels = [], []
        for _ in range((WARM_STEPS + STEPS) // together):
            plans = [self._numbered(ranks_pb2.StepPlan(decode_slots=range(rows))) for _ in range(together)]
            clock.seconds = 0.0
            begin_s = time.perf_counter()
            for _ in self._runner.execute_many(plans, lambda: None):
                pass
            taken.append((time.perf_counter() - begin_s) / together)
            kernels.append(clock.seconds / together)
        self._execute(ranks_pb2.StepPlan(released_slots=range(rows)))
        step_s, kernels_s = (statistics.median(samples[WARM_STEPS // together :]) for samples in (taken, kernels))
        return Taken(rows, together, step_s, kernels_s, self.weight_bytes)

    def _prompt(self, slot: int) -> ranks_pb2.StepPlan:
        token_ids = [5 + (7 * slot + 13 * i) % 4000 for i in range(self._context)]
        first = 1 + slot * self._blocks
        new = ranks_pb2.NewSequence(
            slot=slot,
            token_ids=token_ids,
            num_prompt_tokens=len(token_ids),
            block_ids=range(first, first + self._blocks),
            sampling=ranks_pb2.Sampling(temperature=0.0, top_p=1.0),
        )
        span = ranks_pb2.ScheduledSpan(slot=slot, num_tokens=len(token_ids), sample=True)
        return ranks_pb2.StepPlan(new_sequences=[new], spans=[span])

    def _execute(self, plan: ranks_pb2.StepPlan) -> None:
        self._runner.execute(self._numbered(plan))

    def _numbered(self, plan: ranks_pb2.StepPlan) -> ranks_pb2.StepPlan:
        plan.step_id = self._next_step
        self._next_step += 1
        return plan


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
        rank = _Rank(
            directory, quantization, dtype=dtype, threads=threads, most_rows=max(arguments.rows),
            context=arguments.context,
        )  # fmt: skip
        name = f"{'16 bit' if quantization == 'none' else quantization}, {dtype}"
        measured += [(name, rank.steps(rows, plans, clock)) for rows in arguments.rows for plans in (1, AHEAD)]
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
