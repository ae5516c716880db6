"""What the experts of a layer cost a rank on host cores: all in one native operation, one by one, and by kt-kernel.

    python -m bench.experts [--threads N] [--rows N ...] [--layers N] [--quantization int4 int8 none] [--seconds S]
                            [--dtype float32 bfloat16] [--peers]

Layers of Qwen3-30B-A3B's shape with random weights, more of them than caches hold, and rows that a real router spreads:
norm, choice and experts, as in a step. Ways take turns, and the median counts. A row of the table: milliseconds a
layer, the layers that a second has time for, and the share of the limit: the time that the weights of the chosen
experts take to be read, or their operations to be made, whichever is more (bench/limits.py).

`--peers`: beside kt-kernel (`python -m bench.peers.install --only kt-kernel`) in its formats of the same width, for
rows that chose the same experts, with as many threads and with one less, for it has another that hands them their work.
Its time is that of the experts alone. Its rows are bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Self, cast

import torch

from bench.home import ROOT, BenchHome
from bench.limits import Limits, measure
from bench.peers.environments import interpreter, missing
from bench.processes import hold, release, wait_without_spinning
from hetero_api.model_config import ModelConfig
from hetero_worker.layers.blocks import mlp_norm
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.layers.moe import ExpertMlp
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.layers.native_ops import NativeOps
from hetero_worker.native.op_library import OpLibrary, open_op_library
from hetero_worker.native.op_queue import Arena, OpQueue
from hetero_worker.probe.synthetic import SyntheticWeights

ROWS: Final = (1, 8, 64, 512)
_TURNS: Final = range(3, 100)
"""At least and at most so many."""
SHAPE: Final[Mapping[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "max_position_embeddings": 40960, "norm_topk_prob": True,
}  # fmt: skip
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
KT_KERNEL: Final = "kt-kernel"
KT_METHODS: Final[Mapping[str, tuple[str, ...]]] = {"none": ("BF16",), "int8": ("FP8",), "int4": ("RAWINT4", "MXFP4")}
"""kt-kernel's formats of the width, by ours."""


@contextmanager
def at_home(home: int | None) -> Iterator[None]:
    """Keep the calling thread to its core, as a rank does; two of a team on one core take twice as long for a while."""
    before = os.sched_getaffinity(0)
    if home is not None:
        os.sched_setaffinity(0, {home})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


class OneByOne(NativeLinear):
    """The native kernel, without an operation for all experts."""

    def join_experts(self, *_given: object, **_named: object) -> None:
        """Return None: experts are computed one by one."""


class Layers:
    """Experts on a kernel, and steps that go through all of them."""

    def __init__(
        self,
        config: ModelConfig,
        kernel: LinearKernel,
        op_queue: OpQueue,
        *,
        layers: int,
        dtype: torch.dtype = torch.float32,
        arithmetic: str = "float32",
        home: int | None = None,
    ) -> None:
        """`home`: core that the team's other threads leave to the calling one; None: all run anywhere."""
        ops, weights = NativeOps(op_queue), SyntheticWeights()
        self.mlps = [ExpertMlp(config, i, range(config.num_experts), norm=mlp_norm(config, i, ops), ops=ops)
                     for i in range(layers)]  # fmt: skip
        self._op_queue, self._home, self._dtype = op_queue, home, dtype
        for mlp in self.mlps:
            mlp.load(weights, dtype=dtype, kernel=kernel)
        self.expert_bytes = self.mlps[0].expert_bytes(dtype, kernel)
        self.arithmetic = arithmetic

    def seconds(self, hidden: torch.Tensor) -> float:
        """Return the seconds that a layer takes, on average."""
        rows = hidden.to(self._dtype)
        with at_home(self._home), self._op_queue.computing_in(Arena()):
            begin_s = time.perf_counter()
            for mlp in self.mlps:
                mlp(rows)
            return (time.perf_counter() - begin_s) / len(self.mlps)

    def chosen(self, hidden: torch.Tensor) -> list[list[list[int]]]:
        """Numbers of each row's experts, by layer."""
        with self._op_queue.computing_in(Arena()):
            return [mlp.choices(hidden.to(self._dtype))[0].tolist() for mlp in self.mlps]


def active(chosen: list[list[list[int]]]) -> float:
    """Return how many experts of a layer the rows choose, on average."""
    return statistics.mean(len({number for row in layer for number in row}) for layer in chosen)


class KtLayers:
    """Layers of the same shape by kt-kernel, in a process that stands still while others are measured."""

    arithmetic = "bfloat16"

    def __init__(self, command: Sequence[str], log: Path, *, threads: int) -> None:
        """`command` answers as bench.peers.kt_experts does. Raises RuntimeError with what it said if it ends."""
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": str(ROOT)}
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
                cwd=ROOT,
            )  # fmt: skip
        told = self._read()
        self.facts: dict[str, str] = told["facts"]
        self.expert_bytes: int = told["expert_bytes"]
        hold(self._process.pid)

    def seconds(self, chosen: list[list[list[int]]]) -> float:
        """Return the seconds that a layer takes, on average, for rows with these experts."""
        release(self._process.pid)
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(json.dumps({"chosen": chosen}) + "\n")
        stdin.flush()
        taken_s = float(self._read()["seconds"])
        hold(self._process.pid)
        return taken_s

    def _read(self) -> dict[str, Any]:
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{KT_KERNEL} ended ({self._log}):\n{self._log.read_text(errors='replace')[-1000:]}")
        told: dict[str, Any] = json.loads(line)
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release(self._process.pid)
        self._process.kill()
        self._process.__exit__(kind, error, trace)


def least_seconds(
    config: ModelConfig, limits: Limits, *, expert_bytes: float, active: float, rows: int, arithmetic: str
) -> float:
    """Return the seconds that the active experts of a layer take at the machine's limits."""
    if config.experts is None:
        raise ValueError("the model has no experts")
    operations = 2 * rows * config.experts.per_token * 3 * config.hidden_size * config.experts.intermediate_size
    return max(active * expert_bytes / limits.read_bytes_per_s, operations / limits.rate_of(arithmetic))


def medians(ways: Mapping[str, Callable[[], float]], seconds: float) -> dict[str, float]:
    """Return the median seconds of a layer, by way; they take turns."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    begin_s = time.perf_counter()
    for turn in range(_TURNS.stop):
        if turn >= _TURNS.start and time.perf_counter() - begin_s > seconds * len(ways):
            break
        for name, seconds_of_layer in ways.items():
            samples[name].append(seconds_of_layer())
    return {name: statistics.median(taken) for name, taken in samples.items()}


def line(name: str, rows: int, taken_s: float, least_s: float) -> str:
    """Return a row of the table."""
    return f"{name:34}{rows:>6}{taken_s * 1e3:>12.3f}{1 / taken_s:>12.0f}{least_s / taken_s:>10.0%}"


def kt_layers(method: str, config: ModelConfig, threads: int, options: argparse.Namespace) -> KtLayers:
    """Start kt-kernel with these threads; another of it hands them their work."""
    assert config.experts is not None, "a model of experts"
    home, experts = BenchHome.from_environment(), config.experts
    shape = (config.hidden_size, experts.intermediate_size, experts.number, experts.per_token)
    command = [str(interpreter(home, KT_KERNEL)), "-m", "bench.peers.kt_experts", "--method", method]
    command += ["--layers", str(options.layers), "--threads", str(threads), "--rows", str(max(options.rows))]
    command += ["--shape", *map(str, shape)]
    return KtLayers(command, home.log(f"kt-experts-{method}-{threads}"), threads=threads)


def compare(quantization: str, library: OpLibrary, limits: Limits, options: argparse.Namespace) -> None:
    """Print the rows of one width."""
    assert library.op_queue is not None, "there are native kernels"
    queue, config = library.op_queue, ModelConfig.from_hf(dict(SHAPE)).quantized(quantization)
    kernels: dict[str, tuple[LinearKernel, str]] = {
        f"together, {dtype} rows": (NativeLinear(queue, DTYPES[dtype]), dtype) for dtype in options.dtype
    }
    kernels["one by one"] = OneByOne(queue, DTYPES[options.dtype[0]]), options.dtype[0]
    ours = {
        f"{quantization}, {name}": Layers(
            config, kernel, queue, layers=options.layers, dtype=DTYPES[dtype], home=library.home,
            arithmetic=dtype if quantization == "none" else "int8",
        )
        for name, (kernel, dtype) in kernels.items()
    }  # fmt: skip
    first = next(iter(ours.values()))
    with ExitStack() as stack:
        peers = {
            f"{KT_KERNEL} {method}, {threads} threads": stack.enter_context(kt_layers(method, config, threads, options))
            for method in (KT_METHODS[quantization] if options.peers else ())
            for threads in range(max(1, options.threads - 1), options.threads + 1)
        }
        for name, peer in peers.items():
            print(f"{name}: {' '.join(peer.facts.values())}")
        for rows in options.rows:
            hidden = torch.randn(rows, config.hidden_size, generator=torch.Generator().manual_seed(rows))
            chosen = first.chosen(hidden)
            ways: dict[str, Callable[[], float]] = {
                **{name: partial(layers.seconds, hidden) for name, layers in ours.items()},
                **{name: partial(peer.seconds, chosen) for name, peer in peers.items()},
            }
            for name, taken_s in medians(ways, options.seconds).items():
                way = ours.get(name) or peers[name]
                least_s = least_seconds(
                    config, limits, expert_bytes=way.expert_bytes, active=active(chosen), rows=rows,
                    arithmetic=way.arithmetic,
                )  # fmt: skip
                print(line(name, rows, taken_s, least_s), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--quantization", nargs="+", choices=("none", "int8", "int4"), default=["int4"])
    parser.add_argument("--seconds", type=float, default=2.0, help="for each way and number of rows, about")
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["float32"], help="of our rows")
    parser.add_argument("--peers", action="store_true", help="beside kt-kernel")
    options = parser.parse_args()
    if options.peers and (problem := missing(BenchHome.from_environment(), KT_KERNEL)):
        parser.error(problem)
    limits, library = measure(options.threads), open_op_library(options.threads)
    if library.op_queue is None:
        parser.error(library.reason)
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads: {limits.told()}\n")
    print(f"{'':34}{'rows':>6}{'ms a layer':>12}{'layers/s':>12}{'of limit':>10}")
    with torch.inference_mode():
        for quantization in options.quantization:
            compare(quantization, library, limits, options)


if __name__ == "__main__":
    wait_without_spinning("bench.experts")
    main()
