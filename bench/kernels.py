"""What the linear layers of a step cost with each kernel: the native ones and torch's, side by side.

    python -m bench.kernels [--threads N] [--models NAME ...] [--rows N ...] [--kernels NAME ...] [--seconds S]
                            [--isa NAME]

For each shape of a model's layers there are as many weights as are far over the caches, and they are gone through in
turn; kernels take turns, and the median counts. A table a model: rows of a step, and for each kernel the milliseconds
of all its linear layers and the share of what the machine can do at most: of the time that its weights take to be read,
or its operations to be made, whichever is more (bench/limits.py). Writes bench/results/kernels-DATE.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Final

import torch

from bench.limits import Limits, measure
from hetero_api.weight_format import INT8, WeightFormat, int4
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.linear_kernels import PackedWeight, PlainKernel
from hetero_worker.layers.native_linear import NativeLinear
from hetero_worker.native.compute_library import load_compute
from hetero_worker.native.op_queue import OpQueue
from hetero_worker.native.team import NativeTeam

RESULTS: Final = Path(__file__).parent / "results"
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SET_BYTES: Final = 96 * 1024 * 1024
"""Of all weights of one shape: more than caches hold."""
_TURNS: Final = range(3, 100)
"""At least and at most so many."""

Shape = tuple[int, int]
Weight = Callable[[torch.Tensor], torch.Tensor]
"""x float32 [rows, in] → [rows, out]."""


@dataclass(frozen=True, slots=True)
class Model:
    """Linear layers of a model, (out, in), and how many of each."""

    layers: int
    hidden: int
    qkv: int
    heads: int
    columns: int
    vocabulary: int

    @property
    def shapes(self) -> Mapping[Shape, int]:
        return {
            (self.qkv, self.hidden): self.layers,
            (self.hidden, self.heads): self.layers,
            (2 * self.columns, self.hidden): self.layers,
            (self.hidden, self.columns): self.layers,
            (self.vocabulary, self.hidden): 1,
        }


MODELS: Final = {
    "smollm2-135m": Model(30, 576, 960, 576, 1536, 49152),
    "qwen3-0.6b": Model(28, 1024, 4096, 2048, 3072, 151936),
    "qwen3-1.7b": Model(28, 2048, 4096, 2048, 6144, 151936),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to multiply, and what bounds it."""

    bits: float
    """Of a weight in memory, its share of scales included."""
    arithmetic: str
    """As bench.limits knows it."""
    pack: Callable[[Shape], Weight]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of rows."""
        return torch.bfloat16 if self.arithmetic == "bfloat16" else torch.float32


def kernels(op_queue: OpQueue) -> dict[str, Kernel]:
    """All that there are on this machine."""
    native, narrow = NativeLinear(op_queue), NativeLinear(op_queue, torch.bfloat16)
    return {
        "native fp32": Kernel(32, "float32", lambda shape: _plain(native.pack(_random(shape)))),
        "native bf16": Kernel(16, "float32", lambda shape: _plain(native.pack(_random(shape).bfloat16()))),
        "native bf16 of bf16": Kernel(16, "bfloat16", lambda shape: _plain(narrow.pack(_random(shape).bfloat16()))),
        "native fp16": Kernel(16, "float32", lambda shape: _plain(native.pack(_random(shape).half()))),
        "native int8": Kernel(8, "int8", lambda shape: _plain(native.pack_quantized(_whole(shape, INT8)))),
        "native int4": Kernel(5, "int8", lambda shape: _plain(native.pack_quantized(_whole(shape, int4())))),
        "torch fp32": Kernel(32, "float32", lambda shape: _plain(PlainKernel().pack(_random(shape)))),
        "torch bf16": Kernel(16, "bfloat16", lambda shape: _plain(PlainKernel().pack(_random(shape).bfloat16()))),
        "fbgemm fp16": Kernel(16, "float32", _dynamic_fp16),
        "_weight_int8pack_mm": Kernel(8, "bfloat16", _int8pack),
        "_weight_int4pack_mm": Kernel(5, "bfloat16", _int4pack),
        "oneDNN dynamic int8": Kernel(8, "int8", lambda shape: _dynamic_int8(shape, "onednn")),
        "fbgemm dynamic int8": Kernel(8, "int8", lambda shape: _dynamic_int8(shape, "fbgemm")),
    }


@lru_cache(maxsize=1)
def _random(shape: Shape) -> torch.Tensor:
    return torch.empty(shape).normal_(0.0, 0.02)


@lru_cache(maxsize=1)
def _whole(shape: Shape, weights: WeightFormat) -> QuantizedMatrix:
    outputs, inputs = shape
    low, high, dtype = (-127, 128, torch.int8) if weights.bits == 8 else (0, 16, torch.uint8)
    scales = torch.full((outputs, weights.groups(inputs)), 0.01)
    values = torch.randint(low, high, shape, dtype=dtype)
    return QuantizedMatrix(weights, values, scales, -8 * scales if weights.has_minimum else None)


def _plain(packed: PackedWeight) -> Weight:
    return lambda x: packed(x, None)


def _dynamic_fp16(shape: Shape) -> Weight:
    packed = torch.ops.quantized.linear_prepack_fp16(_random(shape), None)
    return lambda x: torch.ops.quantized.linear_dynamic_fp16(x, packed)


def _dynamic_int8(shape: Shape, engine: str) -> Weight:
    torch.backends.quantized.engine = engine
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and all that packs for these kernels
        quantized = torch.quantize_per_tensor(_random(shape), 0.001, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(quantized, None)
    return lambda x: torch.ops.quantized.linear_dynamic(x, packed, False)


def _int8pack(shape: Shape) -> Weight:
    values = _whole(shape, INT8).values
    scales = torch.full((shape[0],), 0.01, dtype=torch.bfloat16)
    return lambda x: torch._weight_int8pack_mm(x, values, scales)


def _int4pack(shape: Shape) -> Weight:
    values = torch.randint(0, 16, shape, dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values, 1)
    numbers = torch.full((shape[1] // 32, shape[0], 2), 0.01, dtype=torch.bfloat16)
    return lambda x: torch.ops.aten._weight_int4pack_mm_for_cpu(x, packed, 32, numbers)


def available(candidates: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """Those that this torch build has; says which it lacks."""
    found = {}
    for name, kernel in candidates.items():
        try:
            kernel.pack((64, 64))(torch.ones(2, 64).to(kernel.dtype))
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            print(f"{name}: not here ({str(error).splitlines()[0]})", flush=True)
        else:
            found[name] = kernel
    return found


def measure_shape(shape: Shape, candidates: Mapping[str, Kernel], rows: Sequence[int], seconds: float) -> Times:
    """Median seconds of one product, by kernel and rows."""
    times: Times = {}
    sets = {name: _weights_of(shape, kernel) for name, kernel in candidates.items()}
    for count in rows:
        wide = torch.randn(count, shape[1])
        rows_of = {name: wide.to(kernel.dtype) for name, kernel in candidates.items()}
        samples: dict[str, list[float]] = {name: [] for name in candidates}
        begin = time.perf_counter()
        for turn in range(_TURNS.stop):
            if turn >= _TURNS.start and time.perf_counter() - begin > seconds * len(candidates):
                break
            for name, weights in sets.items():
                samples[name].append(_seconds_of_each(weights, rows_of[name]))
        for name, taken in samples.items():
            times.setdefault(name, {})[count] = statistics.median(taken)
    return times


Times = dict[str, dict[int, float]]


def _weights_of(shape: Shape, kernel: Kernel) -> list[Weight]:
    num_bytes = shape[0] * shape[1] * kernel.bits / 8
    return [kernel.pack(shape) for _ in range(max(1, round(SET_BYTES / num_bytes)))]


def _seconds_of_each(weights: Sequence[Weight], x: torch.Tensor) -> float:
    start = time.perf_counter()
    for weight in weights:
        weight(x)
    return (time.perf_counter() - start) / len(weights)


def least_seconds(kernel: Kernel, shapes: Mapping[Shape, int], rows: int, limits: Limits) -> float:
    """Of a step's linear layers: weights are read once, and all operations made, at most at the machine's limits."""
    numbers = sum(outputs * inputs * count for (outputs, inputs), count in shapes.items())
    read_s = numbers * kernel.bits / 8 / limits.read_bytes_per_s
    return max(read_s, 2 * numbers * rows / limits.rate_of(kernel.arithmetic))


def step_seconds(shapes: Mapping[Shape, int], measured: Mapping[Shape, Times]) -> Times:
    """Of all linear layers, by kernel and rows."""
    names = next(iter(measured.values()))
    return {
        name: {
            rows: sum(count * measured[shape][name][rows] for shape, count in shapes.items()) for rows in names[name]
        }
        for name in names
    }


def table(times: Times, shares: Times) -> str:
    """Milliseconds and share of the limit."""
    rows = list(next(iter(times.values())))
    lines = [f"{'ms (share of the limit)':24}" + "".join(f"{count:>16}" for count in rows)]
    for name, taken in times.items():
        cells = (f"{taken[count] * 1e3:9.2f} ({shares[name][count]:4.0%})" for count in rows)
        lines.append(f"{name:24}" + "".join(f"{cell:>16}" for cell in cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rows", nargs="+", type=int, default=list(ROWS))
    parser.add_argument("--kernels", nargs="+", help="default: all")
    parser.add_argument("--seconds", type=float, default=0.5, help="for each kernel, shape and number of rows, about")
    parser.add_argument("--isa", help="instruction set of the native kernels; default: the best that there is")
    arguments = parser.parse_args()
    limits = measure(arguments.threads)
    print(f"{platform.processor() or platform.machine()}, {arguments.threads} threads: {limits.told()}", flush=True)
    loaded = load_compute()
    if loaded.library is None:
        parser.error(loaded.reason)
    try:
        loaded.library.use(arguments.isa or loaded.library.isa)
    except ValueError as error:
        parser.error(f"{error}")
    torch.set_num_threads(arguments.threads)
    candidates = kernels(OpQueue(NativeTeam(loaded.library, arguments.threads)))
    if unknown := set(arguments.kernels or ()) - set(candidates):
        parser.error(f"no kernel {', '.join(sorted(unknown))}; there are {', '.join(candidates)}")
    candidates = available({name: candidates[name] for name in arguments.kernels or candidates})
    results = {}
    for model in arguments.models:
        shapes = MODELS[model].shapes
        measured = {}
        with torch.inference_mode():
            for shape in shapes:
                measured[shape] = measure_shape(shape, candidates, arguments.rows, arguments.seconds)
                gc.collect()
        times = step_seconds(shapes, measured)
        shares = {
            name: {
                rows: least_seconds(candidates[name], shapes, rows, limits) / taken for rows, taken in by_rows.items()
            }
            for name, by_rows in times.items()
        }
        print(f"\n{model}\n{table(times, shares)}", flush=True)
        results[model] = {"seconds": times, "shares": shares}
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"kernels-{datetime.now(UTC):%Y-%m-%d}.json"
    said = {"limits": asdict(limits), "isa": loaded.library.isa, "models": results}
    path.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
