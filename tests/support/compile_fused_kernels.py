"""Compile the kernels of fused steps for a GPU that is not there, down to its machine code, and print their names.

    python -m tests.support.compile_fused_kernels

What Triton's interpreter lets pass, its compiler may not: types, shapes that are no powers of two, names of a scope.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hetero_api.model_parts import Activation
from hetero_worker.kernels import activations, delta_rule, low_rank, norms, rotary, trial

TARGET = GPUTarget("cuda", 90, 32)
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32"}
DELTA_HEADS = {
    "key_heads": 16, "group": 2, "key_dim": 128, "value_dim": 96, "tile_keys": 128, "tile_values": 128,
}  # fmt: skip
HEADS = {"num_heads": 14, "num_kv_heads": 2, "head_dim": 96, "tile_heads": 8, "block": 64}


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[str, object]) -> None:
    """Raises what the compiler raises. Arguments are of `types`, those that are not named there of the type of all."""
    signature = {
        name: "constexpr" if name in constants else types.get(name, types["tensors"]) for name in kernel.arg_names
    }
    indexed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    compiled = triton.compile(ASTSource(kernel, signature, constexprs=indexed), target=TARGET)
    if not compiled.asm["cubin"]:
        raise RuntimeError(f"no machine code came of {kernel.__name__}")


def compile_all(dtype: torch.dtype) -> None:
    numbers = {"x_stride": "i32", "residual_stride": "i32", "delta_stride": "i32", "row_stride": "i32", "eps": "fp32"}
    types = {"tensors": POINTERS[dtype], "slots": "*i64", "out": POINTERS[dtype], **numbers}
    compile_kernel(norms._rms_norm, {**types, "weight": "*fp32"}, {"width": 5120, "block": 8192})
    compile_kernel(norms._add_rms_norm, types, {"width": 896, "block": 1024})
    for activation in get_args(Activation):
        compile_kernel(activations._gated, types, {"columns": 4864, "activation": activation, "block": 1024})
    floats = dict.fromkeys(
        ("convolution", "windows", "convolved", "decays", "decay_biases", "norm", "matrices"), "*fp32"
    )
    delta = {**types, **floats, "lengths": "*i32", "num_tokens": "i32", "width": "i32", "scale": "fp32"}
    compile_kernel(delta_rule._convolve, {**delta, "out": "*fp32"}, {"channels": 8192, "taps": 4, "block": 256})
    compile_kernel(delta_rule._rule, delta, DELTA_HEADS)
    each_head = {**HEADS, "over_all_heads": False, "mean_squares": None}
    compile_kernel(rotary._rotate, types, {**each_head, "norms": True})
    compile_kernel(rotary._rotate, types, {**each_head, "norms": False, "weights": None})
    halves = {**types, "keys": "*fp16", "values": "*fp16"}
    compile_kernel(rotary._rotate, halves, {**each_head, "norms": False, "weights": None})
    compile_kernel(rotary._rotate, {**types, "mean_squares": "*fp32"}, {**HEADS, "norms": True, "over_all_heads": True})
    adapters = {**types, "numbers": "*i64", "table": "*i64", "blocks": "*i32", "products": "*fp32", "rows": "i32"}
    tiles = {"parts": 3, "most_rank": 16, "tile_rows": 16, "tile_ranks": 16}
    for leaders in (1, 16):
        own = {**tiles, "leaders": leaders}
        depth = 256 // dtype.itemsize
        compile_kernel(low_rank._shrink, adapters, {**own, "in_features": 4096, "piece": 1024, "depth": depth})
        compile_kernel(low_rank._expand, adapters, {**own, "out_features": 6144, "pieces": 4, "tile_columns": 64})


if __name__ == "__main__":
    compile_kernel(trial._count, {"tensors": "*i32"}, {"block": 4})
    for each in POINTERS:
        compile_all(each)
        print(f"compiled for {each}")
