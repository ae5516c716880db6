"""Compiles the kernels of quantised weights for GPUs of three ages, without one, and prints what each takes.

In a process of its own, which interprets nothing.

    python -m tests.support.compile_quantized_kernels [all]
prints name, capability, format, rows of a tile, bytes of shared memory, registers, and bytes that are spilled

Without `all`, of each format and of each capability some.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hetero_api.weight_format import FP8, INT8, WeightFormat, int4
from hetero_worker.kernels import grouped_matmul, quantized_matmul
from hetero_worker.kernels.quantized_matmul import QuantizedLayout, QuantizedTile

Constants = Mapping[str, int | bool | None]
CAPABILITIES: Final = (80, 90, 100)
FORMATS: Final = {
    "awq": int4(128),
    "int4": int4(),
    "gptq": WeightFormat(4, 128),
    "int8": INT8,
    "fp8": FP8,
    "fp8-blocks": WeightFormat(8, 128, is_float=True),
    "mxfp4": WeightFormat(4, 32, is_float=True),
    "nvfp4": WeightFormat(4, 16, is_float=True),
}
_SOME: Final = {(80, "awq", 1), (80, "fp8", 1), (90, "mxfp4", 500), (90, "nvfp4", 1), (100, "int8", 40)}
_POINTERS: Final = {
    "values": "*u8", "scales": "*fp16", "minima": "*fp16", "ids": "*i64", "partial": "*fp32", "factor": "fp32",
    "order": "*i64", "bounds": "*i32", "table": "*i64", "counts": "*i64", "results": "*fp32", "chosen": "*i64",
    "shares": "*fp32",
}  # fmt: skip
_FLOATS: Final = ("x", "bias", "out", "total")
_UNKNOWN: Final = (
    "rows",
    "each",
    "out_features",
    "size",
    "parts",
    "first",
    "factor",
    "per_token",
    "num_experts",
    "width",
)
"""Arguments that kernels are not specialised on."""
_CUOBJDUMP: Final = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def constants_of(layout: QuantizedLayout, weights: WeightFormat) -> dict[str, int | bool | None]:
    """As `quantized_matmul.constants_of`, and without minima no pointer to them."""
    middle = 128 if weights.bits == 8 else 0 if weights.has_minimum else 8
    return {
        "group": weights.group, "chunk": layout.chunk, "bits": weights.bits, "middle": middle,
        "is_float": weights.is_float, "has_minima": weights.has_minimum,
        **({} if weights.has_minimum else {"minima": None}),
    }  # fmt: skip


def compiled(kernel: Any, floats: str, constants: Constants, capability: int, **options: int) -> Any:
    """Return the kernel, compiled."""
    names = kernel.arg_names
    types = dict.fromkeys(_FLOATS, floats) | _POINTERS
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items() if name in names},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(names)
            if name not in constants and name not in _UNKNOWN
        },
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"enable_fp_fusion": True, **options})


def usage(kernel: Any) -> tuple[int, int]:
    """Return registers of a thread, and bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [_CUOBJDUMP, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True, timeout=60
        ).stdout
    (found,) = re.findall(r"REG:(\d+) STACK:(\d+)", told)
    return int(found[0]), int(found[1])


def lines(cases: set[tuple[int, str, int]]) -> Iterator[tuple[object, ...]]:
    """Yield a line for each capability, format and number of rows."""
    for capability, name, rows in sorted(cases):
        weights = FORMATS[name]
        layout = QuantizedLayout.of((4096, 4096), weights)
        tile = QuantizedTile.of(rows, layout, 2, batch_invariant=False)
        constants = {
            **constants_of(layout, weights), "has_tail": False, "has_bias": False, "bias": None,
            "tile_columns": tile.columns, "tile_rows": tile.rows,
        }  # fmt: skip
        kernel = compiled(
            quantized_matmul._product, "*bf16", constants, capability, num_warps=tile.warps, num_stages=tile.stages
        )
        yield "_product", capability, name, tile.rows, kernel.metadata.shared, *usage(kernel)


def experts() -> Iterator[tuple[object, ...]]:
    """Yield a line for each capability and kind of experts' weights, of few and of many rows."""
    own = ((80, "int4", 1, 0), (90, "mxfp4", 1, 0), (90, "floats", 500, 0), (100, "fp8-blocks", 500, 0))
    of_host_cores = ((80, "int4", 500, 4), (90, "int8", 500, 4), (90, "floats", 500, 2), (100, "fp8", 500, 1))
    for capability, name, rows, lane in (*own, *of_host_cores):
        tile = QuantizedTile.of_rows(rows, 2, batch_invariant=False)
        weights = FORMATS.get(name)
        floats: Constants = {
            "group": 0, "chunk": 64, "bits": 16, "middle": 0, "is_float": True, "has_minima": False
        }  # fmt: skip
        given = floats if weights is None else constants_of(QuantizedLayout.of((4096, 4096), weights), weights)
        constants = {
            **given, "has_bias": True, "has_tail": False, "is_first": True, "padded_experts": 128,
            "tile_columns": tile.columns, "tile_rows": tile.rows,
            "lane": lane, "panel_size": 4096 * 32 if lane else 0,
        }  # fmt: skip
        made = compiled(
            grouped_matmul._grouped, "*bf16", constants, capability, num_warps=tile.warps, num_stages=tile.stages
        )
        yield "_grouped", capability, name, tile.rows, made.metadata.shared, *usage(made)


def beside() -> Iterator[tuple[object, ...]]:
    """Yield a line for each of the other kernels."""
    weights = FORMATS["awq"]
    constants = constants_of(QuantizedLayout.of((4096, 4096), weights), weights)
    for kernel, given in (
        (quantized_matmul._add_parts, {"has_bias": True, "block": 1024}),
        (quantized_matmul._look_up, {**constants, "block": 256}),
        (grouped_matmul._add_choices, {"per_token": 8, "adds": True, "block": 256}),
    ):
        made = compiled(kernel, "*bf16", given, 90)
        yield kernel.__name__, 90, "awq", 0, made.metadata.shared, *usage(made)


if __name__ == "__main__":
    everything = set(product(CAPABILITIES, FORMATS, (1, 40, 500)))
    for line in (*lines(everything if sys.argv[1:] == ["all"] else _SOME), *experts(), *beside()):
        print(*line, flush=True)
