"""What this machine can do at most: memory read bandwidth, and matrix multiplication in each arithmetic, through torch.

A decode step reads every weight once, so `bandwidth / bytes` bounds single-stream decoding; a prefill does two
operations a weight and token, so `rate / (2 * weights)` bounds prefill. Run in a process of its own, so that torch's
threads do not stay:

    python -m bench.limits --threads 2
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

SIZE: Final = 2048
OPERATIONS: Final = 2 * SIZE**3


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured with `threads` threads."""

    threads: int
    read_bytes_per_s: float
    """256 MiB read once, far over the caches: the median of several."""
    fp32_flops: float
    """2048 x 2048 x 2048, the better of torch's matmul and oneDNN's packed linear."""
    bf16_flops: float
    """The same in bfloat16; `fp32_flops` where the CPU has no instructions for it."""
    int8_ops: float
    """The same with int8 factors and int32 sums; on x86 this is VNNI where the CPU has it."""

    def or_better(self, again: Limits) -> Limits:
        """Of two measurements the higher rate each: others on a host slow a machine down, nothing speeds it up."""
        best = {name: max(getattr(self, name), getattr(again, name)) for name in asdict(self)}
        return Limits(**best)

    def told(self) -> str:
        """In words."""
        reads, rates = self.read_bytes_per_s / 1e9, (self.fp32_flops, self.bf16_flops, self.int8_ops)
        fp32, bf16, int8 = (rate / 1e9 for rate in rates)
        return f"reads {reads:.1f} GB/s, fp32 {fp32:.0f} GFLOP/s, bf16 {bf16:.0f} GFLOP/s, int8 {int8:.0f} GOP/s"

    def rate_of(self, arithmetic: str) -> float:
        """Operations a second that bound a contender of this arithmetic. Raises ValueError."""
        match arithmetic:
            case "float32":
                return self.fp32_flops
            case "bfloat16":
                return max(self.fp32_flops, self.bf16_flops)  # without instructions for it, widening is faster
            case "int8":
                return max(self.fp32_flops, self.bf16_flops, self.int8_ops)
            case _:
                raise ValueError(f"no limit was measured for arithmetic in {arithmetic}")


def _median_s(function: Callable[[], object], *, repeats: int = 7) -> float:
    function()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def measure_here(threads: int) -> Limits:
    """Measure in this process."""
    import torch

    torch.set_num_threads(threads)
    memory = torch.ones(64 * 1024 * 1024)
    read = memory.nbytes / _median_s(memory.sum)
    with torch.inference_mode():
        fp32 = _float_rate(torch.float32)
        # A CPU with neither AVX-512 nor AVX-NE-CONVERT has to widen bfloat16, and torch's matmul takes minutes there.
        bf16 = _float_rate(torch.bfloat16) if torch.ops.mkldnn._is_mkldnn_bf16_supported() else fp32
        return Limits(threads, read, fp32, bf16, _int8_rate())


def _float_rate(dtype: torch.dtype) -> float:
    import torch

    x, w = torch.randn(SIZE, SIZE, dtype=dtype), torch.randn(SIZE, SIZE, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(w, SIZE)
    seconds = min(
        _median_s(lambda: x @ w), _median_s(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
    )
    return OPERATIONS / seconds


def _int8_rate() -> float:
    import torch

    x, w = (torch.randint(-127, 128, (SIZE, SIZE), dtype=torch.int8) for _ in range(2))
    return OPERATIONS / min(_median_s(lambda: torch._int_mm(x, w)), _median_s(lambda: torch._int_mm(x, w.t())))


def measure(threads: int) -> Limits:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "bench.limits", "--threads", str(threads)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return Limits(**json.loads(result.stdout))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    print(json.dumps(asdict(measure_here(parser.parse_args().threads))))
