"""Compiles kernels of attention, of linear layers and of routers for GPUs of two ages, without one.

In a process of its own, which interprets nothing.

python -m tests.support.compiled_kernels     prints what each takes of shared memory, in bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hetero_worker.kernels import matmul, paged_attention, routing
from hetero_worker.kernels.attention_tiles import Tile, Widths
from hetero_worker.kernels.matmul import MatmulTile

Constants = Mapping[str, int | float | bool | None]
_TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
_INDICES = ("tables", "lengths", "starts")
_FACTORS = ("factor", "cap_factor")
_FIXED = {"logits": "*fp32", "sinks": "*fp32"}
_TENSORS = ("query", "keys", "values", "out", "x", "weight", "bias", "hidden", "norm", "router")
_THREADS_PER_WARP = 32
_CASES = (
    (80, torch.float32, Widths(80, 0), 1, False),
    (90, torch.bfloat16, Widths(128, 0), 7, True),
    (80, torch.float32, Widths(512, 0), 8, False),
    (80, torch.bfloat16, Widths(512, 64), 20, False),
    (80, torch.float32, Widths(512, 64), 20, False),
    (90, torch.bfloat16, Widths(512, 64), 128, False),
)
"""Compute capability, type, elements of a head, query heads a KV head, soft cap; the last three: latent attention."""
_WEIGHTS = ((24576, 4096, False), (4096, 12288, True), (50, 7, True))
"""Out and in features, and whether there is a bias: a wide weight, a narrow one and an odd one."""


def _kernels(dtype: torch.dtype, widths: Widths, group: int, *, has_cap: bool) -> Iterator[tuple[Any, Constants]]:
    """The three kernels with their constants, as the launchers give them."""
    tile = Tile.of(widths.first, dtype.itemsize)
    padded, padded_rest = widths.padded
    shape: Constants = {
        "first_dim": widths.first, "padded_dim": padded, "rest_dim": widths.rest, "padded_rest": padded_rest,
        "most_splits": 64, "has_sinks": not has_cap,
    }  # fmt: skip
    program: Constants = {
        "block_size": 16, "group": group, "heads": min(group, 16), "tile": tile.tokens, "has_cap": has_cap,
    }  # fmt: skip
    yield paged_attention._decode, {**shape, **program, "lanes": 16, "least_tiles": 2}
    yield paged_attention._spans, {**shape, **program, "lanes": tile.lanes}
    yield paged_attention._combine, shape


def _products(dtype: torch.dtype) -> Iterator[tuple[Any, Constants, int]]:
    """The kernel of linear layers for each weight, and that of routers: with constants and stages."""
    for out_features, in_features, has_bias in _WEIGHTS:
        tile = MatmulTile.of(out_features, dtype.itemsize)
        shape: Constants = {"out_features": out_features, "in_features": in_features, "has_bias": has_bias}
        program: Constants = {"tile_rows": 64, "tile_columns": tile.columns, "depth": tile.depth}
        yield matmul._matmul, {**shape, **program, **({} if has_bias else {"bias": None})}, tile.stages
    experts: Constants = {"eps": 1e-6, "width": 2048, "num_experts": 60, "tile_experts": 32, "depth": 256}
    yield routing._router, experts, 2


def _shared_bytes(kernel: Any, dtype: torch.dtype, constants: Constants, capability: int, stages: int) -> int:
    names = [parameter.name for parameter in kernel.params]
    signature = {name: _type_of(name, dtype, constants) for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): constants[name] for name in names if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")},
    )
    target = GPUTarget("cuda", capability, _THREADS_PER_WARP)
    return int(triton.compile(source, target=target, options={"num_warps": 4, "num_stages": stages}).metadata.shared)


def _type_of(name: str, dtype: torch.dtype, constants: Constants) -> str:
    if name in constants:
        return "constexpr"
    if name in _INDICES:
        return "*i32"
    if name in _FACTORS:
        return "fp32"
    if name in _FIXED:
        return _FIXED[name]
    if name.startswith("partial_"):
        return "*fp32"
    return _TYPES[dtype] if name in _TENSORS else "i32"


def main() -> None:
    for capability, dtype, widths, group, has_cap in _CASES:
        for kernel, constants in _kernels(dtype, widths, group, has_cap=has_cap):
            stages = Tile.of(widths.first, dtype.itemsize).stages
            print(kernel.__name__, dtype, capability, _shared_bytes(kernel, dtype, constants, capability, stages))
    for capability in (80, 90):
        for dtype in _TYPES:
            for kernel, constants, stages in _products(dtype):
                shared = _shared_bytes(kernel, dtype, constants, capability, stages)
                print(kernel.__name__, dtype, capability, shared)


if __name__ == "__main__":
    main()
