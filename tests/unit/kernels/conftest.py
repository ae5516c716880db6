"""Triton's interpreter for the tests of this folder: kernels run as plain Python, on the host's tensors.

Triton reads its switch when functions are compiled, which for its own library is when it is imported; hence it is set
here, before any module of this folder is collected, and a Triton that somebody else has imported before is an error.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np
import pytest

assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", (
    "triton was imported before its interpreter was switched on: who imports it must do so lazily"
)
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def _products_of_tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tl.dot` as a GPU does it: bfloat16 are numbers, and each element of a product is computed like any other.

    The interpreter keeps bfloat16 as its 16 bits and multiplies these; and a host's matrix product may add up the
    elements at a matrix's edge in another order.
    """
    from triton.runtime.interpreter import TensorHandle, interpreter_builder, tl

    def numbers(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return (handle.data.astype(np.uint32) << 16).view(np.float32)
        return handle.data.astype(np.float32)

    def multiply(a: Any, b: Any, addend: Any, *_: object) -> Any:
        product = np.einsum("ik,jk->ij", numbers(a), np.ascontiguousarray(numbers(b).T))
        return TensorHandle(product + addend.data, addend.dtype.scalar)

    monkeypatch.setattr(interpreter_builder, "create_dot", multiply)
