"""What this machine can do at most: memory read bandwidth and fp32 matrix multiplication, through torch.

A decode step reads every weight once, so `bandwidth / bytes` bounds single-stream decoding; a prefill does two
floating-point operations a weight and token, so `flops / (2 * weights)` bounds prefill. Run in a process of its own,
so that torch's threads do not stay:

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


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured with `threads` threads."""

    threads: int
    read_bytes_per_s: float
    """256 MiB read once, far over the caches: the median of several."""
    fp32_flops: float
    """2048 x 2048 x 2048, the better of torch's matmul and oneDNN's packed linear."""


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
    size = 2048
    x, w = torch.randn(size, size), torch.randn(size, size)
    packed = torch.ops.mkldnn._reorder_linear_weight(w, size)
    with torch.inference_mode():
        seconds = min(
            _median_s(lambda: x @ w),
            _median_s(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")),
        )
    return Limits(threads, read, 2 * size**3 / seconds)


def measure(threads: int) -> Limits:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "bench.limits", "--threads", str(threads)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return Limits(**json.loads(result.stdout))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, required=True)
    print(json.dumps(asdict(measure_here(parser.parse_args().threads))))
