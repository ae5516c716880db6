"""Layers of experts by kt-kernel, KTransformers' kernels for host cores, timed for bench.experts, which asks by pipes.

Runs on the interpreter of its own environment: nothing of this project is imported, but what is beside this module.

    python -m bench.peers.kt_experts --method NAME --layers N --threads N --rows N --shape HIDDEN COLUMNS EXPERTS CHOSEN

First line, when the weights are there: `{"facts": {"variant", "version"}, "expert_bytes"}`. Then a request a line:

    {"chosen": [[[numbers of a row's experts]]]}   of each layer; rows are random bfloat16, shares alike
        -> {"seconds": of a layer, on average}

Weights are random. `expert_bytes` are those of the numbers and their scales, as the format stores them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch

GROUP = 32
"""Inputs that share a scale, of formats of 4 bits; of RAWINT4 and MXFP4 as they are published."""
BLOCK = 128
"""Of FP8: rows and columns of a block with one scale."""

Matrix = tuple[torch.Tensor, torch.Tensor | None]
"""Numbers, and their scales."""


def floats(outputs: int, inputs: int) -> Matrix:
    return torch.randn(outputs, inputs).mul_(inputs**-0.5).bfloat16(), None


def nibbles(outputs: int, inputs: int) -> Matrix:
    scales = torch.full((outputs, inputs // GROUP), 2.0**-8, dtype=torch.bfloat16)
    return torch.randint(256, (outputs, inputs // 2), dtype=torch.uint8), scales


def eights(outputs: int, inputs: int) -> Matrix:
    numbers = torch.randn(outputs, inputs).to(torch.float8_e4m3fn).view(torch.uint8)
    return numbers, torch.full((-(-outputs // BLOCK), -(-inputs // BLOCK)), inputs**-0.5)


METHODS: dict[str, tuple[Callable[[int, int], Matrix], int, int, tuple[str, ...]]] = {
    "BF16": (floats, 16, 0, ("AMXBF16_MOE", "AVX2BF16_MOE")),
    "FP8": (eights, 8, BLOCK, ("AMXFP8_MOE", "AVX2FP8_MOE")),
    "RAWINT4": (nibbles, 4, GROUP, ("AMXInt4_KGroup_MOE", "AVX2RawInt4_MOE")),
    "MXFP4": (nibbles, 4, GROUP, ("AMXFP4_KGroup_MOE", "AVX2MXFP4_MOE")),
}
"""How a method's matrices are made, its bits, its group, and its classes, the best first."""


class Layers:
    """Layers of one method, and a step that goes through all of them."""

    def __init__(self, method: str, shape: list[int], *, layers: int, threads: int, rows: int) -> None:
        import kt_kernel  # type: ignore[import-not-found]

        ext = kt_kernel.kt_kernel_ext
        self.variant: str = kt_kernel.__cpu_variant__
        self.hidden, self.columns, self.experts, self.per_token = shape
        self._make, self._bits, self._group, names = METHODS[method]
        self._class = next(getattr(ext.moe, name) for name in names if hasattr(ext.moe, name))
        self.kind: str = self._class.__name__
        pool = ext.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [threads]
        self._engine, self._ext, self._rows = ext.CPUInfer(pool), ext, rows
        self._mask = torch.zeros(self.experts, dtype=torch.uint8)
        self.expert_bytes = 0
        self._layers = [self._layer(number) for number in range(layers)]

    def _layer(self, number: int) -> Any:
        matrices = {
            name: [self._make(*shape) for _ in range(self.experts)]
            for name, shape in (
                ("gate", (self.columns, self.hidden)),
                ("up", (self.columns, self.hidden)),
                ("down", (self.hidden, self.columns)),
            )
        }
        firsts = [made[0] for made in matrices.values()]
        self.expert_bytes = sum(part.nbytes for pair in firsts for part in pair if part is not None)
        config = self._ext.moe.MOEConfig(self.experts, self.per_token, self.hidden, self.columns, self._mask.data_ptr())
        config.layer_idx, config.pool, config.max_len = number, self._engine.backend_, max(self._rows, 1)
        if self._group:
            config.quant_config.bits, config.quant_config.group_size = self._bits, self._group
            config.quant_config.zero_point = False
        for name, made in matrices.items():
            setattr(config, f"{name}_projs", [[numbers.data_ptr() for numbers, _ in made]])
            scales = [0 if scale is None else scale.data_ptr() for _, scale in made]
            setattr(config, f"{name}_scales", [scales])
        moe = self._class(config)
        order = torch.arange(self.experts, dtype=torch.int64)
        self._engine.submit(moe.load_weights_task(order.data_ptr()))
        self._engine.sync()
        return moe

    def seconds(self, chosen: list[list[list[int]]]) -> float:
        rows = len(chosen[0])
        size = torch.tensor([rows], dtype=torch.int32)
        x = torch.randn(rows, self.hidden).bfloat16()
        y = torch.empty_like(x)
        shares = torch.full((rows, self.per_token), 1 / self.per_token)
        numbers = [torch.tensor(each, dtype=torch.int64) for each in chosen]
        began_s = time.perf_counter()
        for layer, ids in zip(self._layers, numbers, strict=True):
            self._engine.submit(
                layer.forward_task(
                    size.data_ptr(),
                    self.per_token,
                    ids.data_ptr(),
                    shares.data_ptr(),
                    x.data_ptr(),
                    y.data_ptr(),
                    False,
                )
            )
            self._engine.sync()
        taken_s = time.perf_counter() - began_s
        if not y.isfinite().all():
            raise RuntimeError("kt-kernel gave numbers that are not finite")
        return taken_s / len(self._layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="most of a request")
    parser.add_argument("--shape", type=int, nargs=4, required=True)
    options = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the library prints
    torch.manual_seed(0)
    layers = Layers(options.method, options.shape, layers=options.layers, threads=options.threads, rows=options.rows)
    facts = {"variant": layers.variant, "kind": layers.kind, "version": version("kt-kernel")}
    print(json.dumps({"facts": facts, "expert_bytes": layers.expert_bytes}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps({"seconds": layers.seconds(json.loads(line)["chosen"])}), file=answers, flush=True)


if __name__ == "__main__":
    main()
