"""What is measured, in what order, within what time.

Sections follow one another, each with rank processes of its own: one that fails is told, and the next begins anew. What
the time does not suffice for is told as not reached, so the program ends in time on any machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Final

from bench.gpu import ablations, hetero
from bench.gpu.orders import Device, Load, MeasureDevice
from bench.gpu.ranks import RankFailedError, RankProcesses, seats_on
from bench.gpu.recipes import Recipe, decoding, throughput
from bench.gpu.report import DECODE_TARGET, THROUGHPUT_TARGET, Report, Row, ablation_rows, comparison_rows
from bench.gpu.roofline import Rates, Roofline
from bench.gpu.serving import CapacityError, Replica, Served, bounds_of
from bench.gpu.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, TINY, TINY_MOE
from bench.gpu.streaming import Streamed, prefill_rows
from hetero_api.errors import HeteroError
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_placement.part_costs import element_bytes
from hetero_placement.shard_plans import plan_within_layers

RESULTS: Final = Path(__file__).parents[1] / "results"
SECTIONS: Final = ("throughput", "large", "capped", "streamed")
_MEMORY_SHARE: Final = 0.7
"""Of the host's memory, what CPU ranks may use together."""
_PSEUDO_BYTES: Final = 2 << 30
_GIGABYTE: Final = 10**9


@dataclass(frozen=True, slots=True)
class Capped:
    """A shape, and memory of the GPU that it does not fit in."""

    name: str
    config: ModelConfig
    cap_bytes: int
    need_s: float
    """About what it takes."""


@dataclass(frozen=True, slots=True)
class Menu:
    """What there is to measure."""

    small: tuple[str, ModelConfig]
    """For throughput and ablations."""
    large: tuple[tuple[str, ModelConfig], ...]
    """For decoding at batch 1, beside the small one."""
    capped: tuple[Capped, ...]
    streamed: tuple[Streamed, ...]
    """Whose prompts are computed with experts of CPU ranks."""
    recipe: Recipe
    chunk: int
    """Most tokens of a step."""
    decode_tokens: int


def menu_of(*, tiny: bool, quick: bool) -> Menu:
    """`tiny`: only to see that it runs. `quick`: what takes a minute or two."""
    if tiny:
        recipe = throughput(TINY.vocab_size, sequences=6, shortest=5, longest=20)
        experts = (Streamed("tiny, experts", TINY_MOE, 1 << 30, 48, 0.0),)
        return Menu(("tiny", TINY), (), (Capped("tiny", TINY, 1 << 30, 0.0),), experts, recipe, 64, 12)
    shapes = (("Qwen3-8B", QWEN3_8B), ("Qwen3-30B-A3B", QWEN3_30B_A3B), ("Qwen3-32B", QWEN3_32B))
    capped = (Capped("Qwen3-8B", QWEN3_8B, 10 * _GIGABYTE, 75.0), Capped("Qwen3-32B", QWEN3_32B, 40 * _GIGABYTE, 120.0))
    streamed = (Streamed("Qwen3-30B-A3B", QWEN3_30B_A3B, 30 * _GIGABYTE, 4096, 120.0),)
    whole = Menu(("Qwen3-0.6B", QWEN3_06B), shapes, capped, streamed, throughput(QWEN3_06B.vocab_size), 16384, 128)
    return replace(whole, large=shapes[:2], capped=(), streamed=()) if quick else whole


class Bench:
    """One run of the program. `keep` gets the report after each section, so that a run that is stopped leaves it."""

    def __init__(
        self, arguments: argparse.Namespace, tell: Callable[[str], None], keep: Callable[[Report], object]
    ) -> None:
        self._device = Device.CUDA if arguments.device == "cuda" else Device.PSEUDO
        self._dtype: str = "bfloat16" if self._device is Device.CUDA else "float32"
        self._cpu_ranks: int = arguments.cpu_ranks
        self._only = frozenset(arguments.only or SECTIONS)
        self._menu = menu_of(tiny=arguments.tiny, quick=arguments.quick)
        self._ends_s: float = time.monotonic() + arguments.limit_s
        self._tell, self._keep = tell, keep
        self.report = Report("no device was reached", self._device is Device.CUDA, datetime.now(UTC))

    def run(self) -> Report:
        if "throughput" in self._only:
            self._section("throughput", 40.0, self._throughput)
        if "large" in self._only:
            self._section("decoding of large shapes", 30.0, self._large)
        for capped in self._menu.capped if "capped" in self._only else ():
            self._section(f"{capped.name}, capped", capped.need_s, lambda capped=capped: self._capped(capped))  # type: ignore[misc]
        for streamed in self._menu.streamed if "streamed" in self._only else ():
            self._section(f"{streamed.name}, streamed", streamed.need_s, partial(self._streamed, streamed))
        return self.report

    def _section(self, name: str, need_s: float, work: Callable[[], None]) -> None:
        """One section, or why there is none."""
        if self._left_s() < need_s:
            self.report.failures.append(f"{name}: not reached, {self._left_s():.0f} s were left")
            return
        number = len(self.report.rows)
        try:
            work()
        except (RankFailedError, CapacityError, HeteroError) as error:
            self.report.failures.append(f"{name}: FAILED: {str(error).strip().splitlines()[-1]}")
            self._tell(f"{name}: FAILED: {error}")
        for row in self.report.rows[number:]:
            self._tell("  ".join(cell for cell in row.cells() if cell))
        self._keep(self.report)

    def _left_s(self) -> float:
        return self._ends_s - time.monotonic()

    def _group(self, *, cpu_ranks: int = 0) -> AbstractContextManager[RankProcesses]:
        total = _host_memory() * _MEMORY_SHARE
        memory = _PSEUDO_BYTES if self._device is Device.PSEUDO else int(total / max(1, cpu_ranks))
        cores = sorted(os.sched_getaffinity(0))
        return RankProcesses(seats_on(cores, self._device, cpu_ranks=cpu_ranks, memory_bytes=memory))

    def _throughput(self) -> None:
        name, config = self._menu.small
        with self._group() as group:
            rates = self._rates(group)
            replica, served = self._serve(group, config, self._menu.recipe)
            self._add_throughput(name, config, rates, replica, served)
            self._decode(group, name, config, rates)
            load = self._load(config, self._menu.recipe)
            output = min(ablations.OUTPUT, 4 * self._menu.decode_tokens)
            found = list(ablations.measure(group, load, output=output, limit_s=self._left_s() / 30))
        self.report.rows.extend(ablation_rows(name, found))
        self.report.details["ablations"] = [asdict(each) for each in found]

    def _add_throughput(self, name: str, config: ModelConfig, rates: Rates, replica: Replica, served: Served) -> None:
        bound_s = served.bound_s(Roofline(config, element_bytes(self._dtype), rates))
        row = Row(
            f"{name}, {len(self._menu.recipe.requests)} requests",
            served.tokens_per_s,
            served.output_tokens / bound_s,
            note=self._note(replica, served),
        )
        self.report.rows.append(replace(row, met=row.share >= THROUGHPUT_TARGET))

    def _rates(self, group: RankProcesses) -> Rates:
        """Of rank 0's device; its name is the report's from now on."""
        speeds = ranks_pb2.DeviceSpeeds.FromString(group.ask(MeasureDevice())[0])
        hello = group.hellos[0]
        what = hello.device_name if self.report.is_gpu else f"HOST TENSORS, no GPU ({hello.device_name})"
        rates = Rates(speeds.memory_bandwidth, {rate.dtype: rate.flops for rate in speeds.matmul}[self._dtype])
        self.report.device = (
            f"{what}: {rates.bandwidth / 1e9:,.0f} GB/s read, {rates.flops / 1e12:,.1f} TFLOP/s {self._dtype}, measured"
        )
        self.report.details["rates"] = {**asdict(rates), "bus": speeds.to_device_bandwidth}
        self.report.details["versions"] = {"torch": hello.torch_version}
        return rates

    def _load(self, config: ModelConfig, recipe: Recipe) -> Load:
        plan = plan_within_layers(
            config,
            heads=[config.num_kv_heads],
            columns=[config.intermediate_size],
            experts=[config.experts.number if config.experts is not None else 0],
            rows=[config.vocab_size],
        )
        return Load(config, self._dtype, plan, bounds_of(recipe, max_num_batched_tokens=self._menu.chunk), (0,))

    def _serve(self, group: RankProcesses, config: ModelConfig, recipe: Recipe) -> tuple[Replica, Served]:
        """After a warm-up with the recipe's first requests."""
        most = sum(len(r.prompt_token_ids) + (r.max_tokens or 0) for r in recipe.requests)
        replica = Replica(group, self._load(config, recipe), most_tokens=most)
        short = [replace(r, max_tokens=8) for r in recipe.requests]
        replica.serve(Recipe(tuple(short)), limit_s=self._left_s() / 4)
        return replica, replica.serve(recipe, limit_s=self._left_s() / 3)

    def _decode(self, group: RankProcesses, name: str, config: ModelConfig, rates: Rates) -> None:
        """One stream, against what reading allows."""
        recipe = decoding(config.vocab_size, sequences=1, prompt=32, output=self._menu.decode_tokens)
        replica, served = self._serve(group, config, recipe)
        roofline = Roofline(config, element_bytes(self._dtype), rates)
        steps = sum(1 for step in served.steps if step.computes and not step.spans)
        limit = steps / served.bound_s(roofline, decode_only=True) if steps else 0.0
        row = Row(f"{name}, decode at batch 1", served.decode_tokens_per_s, limit, note=self._note(replica, served))
        self.report.rows.append(replace(row, met=row.share >= DECODE_TARGET))

    def _note(self, replica: Replica, served: Served) -> str:
        preempted = f"{served.preemptions} preemptions" if served.preemptions else ""
        parts = (" ".join(replica.kernels), preempted, "" if served.complete else "TIME RAN OUT")
        return ", ".join(part for part in parts if part)

    def _large(self) -> None:
        if not self._menu.large:
            return
        with self._group() as group:
            rates, memory = self._rates(group), group.hellos[0].memory_bytes
            for name, config in self._menu.large:
                if config.num_parameters * element_bytes(self._dtype) > 0.8 * memory:
                    self.report.rows.append(Row(f"{name}, decode at batch 1", note="does not fit this device"))
                else:
                    self._decode(group, name, config, rates)

    def _capped(self, capped: Capped) -> None:
        with self._group(cpu_ranks=self._cpu_ranks) as group:
            self._rates(group)
            found = hetero.compare(
                group, capped.name, capped.config, dtype=self._dtype, cap_bytes=capped.cap_bytes,
                limit_s=self._left_s() / 10,
            )  # fmt: skip
        self.report.rows.extend(comparison_rows(found))
        self.report.details[f"{capped.name}, capped"] = {"reason": found.reason}

    def _streamed(self, streamed: Streamed) -> None:
        with self._group(cpu_ranks=self._cpu_ranks) as group:
            self._rates(group)
            self.report.rows.extend(prefill_rows(group, streamed, dtype=self._dtype, limit_s=self._left_s() / 10))


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write; 1 when a section failed or, on a GPU, a target was missed."""
    parser = argparse.ArgumentParser(prog="bench.gpu", description="Measures the GPU runner.")
    parser.add_argument("--quick", action="store_true", help="small shapes only, no capped ones")
    parser.add_argument("--limit-s", type=float, default=330.0, help="most seconds of it all; default 330")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="sections; all by default")
    parser.add_argument("--cpu-ranks", type=int, default=2, help="beside a capped GPU; default 2")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: host tensors in a GPU's place")
    parser.add_argument("--tiny", action="store_true", help="a shape of no use but to see that the program runs")
    parser.add_argument("--results", type=Path, help="folder for the JSON file; default bench/results, of a GPU only")
    asked = parser.parse_args(arguments)
    bench = Bench(asked, lambda line: print(line, flush=True), lambda report: _write(report, asked.results))
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.report.failures.append("the rest: stopped before its end")
    print(f"\n{bench.report.table()}")
    if (path := _write(bench.report, asked.results)) is not None:
        print(f"written: {path}")
    return 0 if bench.report.passed else 1


def _write(report: Report, folder: Path | None) -> Path | None:
    """Write the report; of host tensors only where a folder is named."""
    is_of_gpu = report.is_gpu and "rates" in report.details
    folder = folder or (RESULTS if is_of_gpu else None)
    return None if folder is None else report.write(folder)


def _host_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
