"""Where a decoding step's time goes on the GPU: kernels by their time, of steps that are done one by one.

    PYTHONPATH=.:worker:protos python -m bench.gpu.step_profile Qwen3-8B:1 Qwen3-30B-A3B:1,16

Each argument is a shape, and numbers of sequences that decode. `wall` includes the host's part, which steps in
flight hide; `busy` is the sum of the kernels' times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch

from bench.gpu.shapes import QWEN3_06B, QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B
from bench.gpu.weights import MadeWeights
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.plan_runner import PlanRunner

SHAPES: Final = {
    "Qwen3-0.6B": QWEN3_06B, "Qwen3-8B": QWEN3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B, "Qwen3-32B": QWEN3_32B
}  # fmt: skip
_PROMPT: Final = 64
_BLOCKS, _BLOCK_SIZE = 40, 16
_WARM_UP, _TIMED, _PROFILED = 8, 40, 10
_KERNELS: Final = 20


class _Rank:
    """One GPU rank with a whole model, which is given plans in this process."""

    def __init__(self, name: str, *, most_rows: int) -> None:
        self._step = 0
        backend, config = CudaBackend(0, pool="bench"), SHAPES[name]
        backend.open()
        self._runner = PlanRunner(backend)
        self._runner.attach(LocalExchange())
        report = self._runner.load(
            LoadRequest(
                directory=Path("made weights"), config=config, dtype="bfloat16", shard_plan=ShardPlan.whole(config),
                rank=0, max_model_len=2048, max_num_batched_tokens=4096, max_num_seqs=most_rows,
                memory_bytes=backend.memory_bytes, open_weights=MadeWeights, num_gpu_ranks=1,
            )
        )  # fmt: skip
        self._runner.allocate(1 + most_rows * _BLOCKS, _BLOCK_SIZE)
        print(f"{name} on {backend.name}: {report.weight_bytes / 1e9:.2f} GB, {' '.join(report.kernels)}")

    def begin(self, rows: int) -> None:
        """Read `rows` prompts."""
        plan = ranks_pb2.StepPlan()
        for slot in range(rows):
            tokens = [(7 * slot + i) % 1000 for i in range(_PROMPT)]
            new = plan.new_sequences.add(slot=slot, token_ids=tokens, num_prompt_tokens=_PROMPT)
            new.sampling.CopyFrom(ranks_pb2.Sampling(temperature=0, top_p=1))
            plan.spans.add(slot=slot, num_tokens=_PROMPT, sample=True)
            plan.block_slots.extend([slot] * (_BLOCKS - 1))
            plan.block_ids.extend(range(1 + slot * _BLOCKS, (slot + 1) * _BLOCKS))
        self._execute(plan)

    def decode(self, rows: int, steps: int) -> None:
        """Decode, and wait for the device."""
        for _ in range(steps):
            self._execute(ranks_pb2.StepPlan(decode_slots=range(rows)))
        torch.cuda.synchronize()

    def release(self, rows: int) -> None:
        """Forget the sequences."""
        self._execute(ranks_pb2.StepPlan(released_slots=range(rows)))

    def close(self) -> None:
        self._runner.detach()

    def _execute(self, plan: ranks_pb2.StepPlan) -> None:
        self._step += 1
        plan.step_id = self._step
        self._runner.execute(plan, list)


def profile(rank: _Rank, rows: int) -> None:
    """Print the profile of steps of `rows` sequences."""
    rank.begin(rows)
    rank.decode(rows, _WARM_UP)
    began_s = time.perf_counter()
    rank.decode(rows, _TIMED)
    wall_us = (time.perf_counter() - began_s) / _TIMED * 1e6
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        rank.decode(rows, _PROFILED)
    kernels: list[Any] = [each for each in found.key_averages() if each.self_device_time_total > 0]
    busy_us = sum(each.self_device_time_total for each in kernels) / _PROFILED
    number = sum(each.count for each in kernels) / _PROFILED
    print(f"{rows} rows: wall {wall_us:.0f} us a step, busy {busy_us:.0f} us, {number:.0f} kernels and copies")
    for each in sorted(kernels, key=lambda each: -each.self_device_time_total)[:_KERNELS]:
        times, name = each.count / _PROFILED, each.key[:100]
        print(f"  {each.self_device_time_total / _PROFILED:9.1f} us {times:7.1f} x  {name}", flush=True)
    rank.release(rows)


def main(arguments: Sequence[str]) -> int:
    """Profile each of the shapes."""
    for argument in arguments:
        name, _, numbers = argument.partition(":")
        counts = [int(number) for number in numbers.split(",")]
        rank = _Rank(name, most_rows=max(counts))
        for rows in counts:
            profile(rank, rows)
        rank.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
