"""Compile the sampling kernels for a GPU that is not there, down to its machine code.

python -m tests.support.compile_sampling_kernels
"""

from __future__ import annotations

from hetero_worker.kernels import sampling
from tests.support.compile_fused_kernels import compile_kernel

INTEGERS = dict.fromkeys(("rows", "keys", "out_ids"), "*i64")
NUMBERS = dict.fromkeys(("row_stride", "begin", "count"), "i32")

if __name__ == "__main__":
    for logits in ("*fp32", "*bf16"):
        types = {"tensors": "*fp32", "logits": logits, **INTEGERS, **NUMBERS}
        compile_kernel(sampling._best_kernel, types, {"block_size": 256})
    print("compiled")
