"""One layer in each layout of quantised safetensors, with the weights that it stands for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from hetero_api.weight_format import FP8, WeightFormat
from tests.support.quantized_files import (
    FP8_BLOCKS,
    MODELOPT_NVFP4,
    Quantized,
    Written,
    act_order,
    awq_config,
    awq_tensors,
    compressed_config,
    float_config,
    gptq_config,
    gptq_tensors,
    int_tensors,
    mxfp4,
    nvfp4,
    packed_int_tensors,
    random_quantized,
    save_packed,
    wide_floats,
)

OUTPUTS: Final = 48
INPUTS: Final = 96

Save = Callable[[Path, Quantized], None]


def _awq(group: int) -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        save_packed(directory, awq_tensors(matrix), awq_config(group))

    matrix = random_quantized(OUTPUTS, INPUTS, bits=4, group=group, symmetric=False)
    return save, matrix, WeightFormat(4, group, has_minimum=True)


def _gptq(bits: int, group: int, *, symmetric: bool, layout: str = "gptq") -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        tensors = gptq_tensors(matrix, bits, less_one=layout == "gptq")
        save_packed(directory, tensors, gptq_config(bits, group, symmetric=symmetric, checkpoint_format=layout))

    matrix = random_quantized(OUTPUTS, INPUTS, bits=bits, group=group, symmetric=symmetric)
    return save, matrix, WeightFormat(bits, group, has_minimum=not symmetric)


def _packed_ints(bits: int, group: int, *, symmetric: bool) -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        config = compressed_config("pack-quantized", bits, group, symmetric=symmetric)
        save_packed(directory, packed_int_tensors(matrix, bits, symmetric=symmetric), config)

    matrix = random_quantized(OUTPUTS, INPUTS, bits=bits, group=group, symmetric=symmetric)
    return save, matrix, WeightFormat(bits, group, has_minimum=not symmetric)


def _ints(group: int, *, symmetric: bool) -> tuple[Save, Quantized, WeightFormat]:
    def save(directory: Path, matrix: Quantized) -> None:
        config = compressed_config("int-quantized", 8, group, symmetric=symmetric)
        save_packed(directory, int_tensors(matrix, symmetric=symmetric), config)

    matrix = random_quantized(OUTPUTS, INPUTS, bits=8, group=group, symmetric=symmetric)
    return save, matrix, WeightFormat(8, group, has_minimum=not symmetric)


CASES: Final = {
    "awq in groups": _awq(32),
    "awq in rows": _awq(0),
    "gptq": _gptq(4, 32, symmetric=True),
    "gptq with zero points": _gptq(4, 32, symmetric=False),
    "gptq with zero points as they are": _gptq(4, 32, symmetric=False, layout="gptq_v2"),
    "gptq in rows": _gptq(4, 0, symmetric=True),
    "gptq in rows with zero points": _gptq(4, 0, symmetric=False),
    "gptq of 8 bits": _gptq(8, 48, symmetric=True),
    "gptq of 8 bits with zero points": _gptq(8, 32, symmetric=False),
    "gptq of 8 bits in rows": _gptq(8, 0, symmetric=True),
    "gptq of 8 bits in rows with zero points": _gptq(8, 0, symmetric=False),
    "packed ints": _packed_ints(4, 32, symmetric=True),
    "packed ints with zero points": _packed_ints(4, 32, symmetric=False),
    "packed ints of 8 bits": _packed_ints(8, 32, symmetric=True),
    "packed ints in rows": _packed_ints(4, 0, symmetric=True),
    "ints in rows": _ints(0, symmetric=True),
    "ints in groups with zero points": _ints(32, symmetric=False),
}
_BLOCKS: Final = float_config("float-quantized", 8, strategy="block", block_structure=[20, 32])
FLOATS: Final[dict[str, tuple[Written, dict[str, Any], WeightFormat]]] = {
    "blocks": (wide_floats(OUTPUTS, INPUTS, rows=20, columns=32), _BLOCKS, WeightFormat(8, 32, is_float=True)),
    "scale_inv": (
        wide_floats(OUTPUTS, INPUTS, rows=16, columns=32, scale="weight_scale_inv"),
        FP8_BLOCKS,
        WeightFormat(8, 32, is_float=True),
    ),
    "rows": (
        wide_floats(OUTPUTS, INPUTS, rows=1, columns=0),
        float_config("float-quantized", 8, strategy="channel"),
        FP8,
    ),
    "tensor": (wide_floats(OUTPUTS, INPUTS, rows=0, columns=0), {"quant_method": "modelopt", "quant_algo": "FP8"}, FP8),
    "tensor, early": (wide_floats(OUTPUTS, INPUTS, rows=0, columns=0), {"quant_method": "fp8"}, FP8),
    "nvfp4": (
        nvfp4(OUTPUTS, INPUTS, modelopt=False),
        float_config("nvfp4-pack-quantized", 4, strategy="tensor_group", group_size=16),
        WeightFormat(4, 16, is_float=True),
    ),
    "nvfp4 of modelopt": (
        nvfp4(OUTPUTS, INPUTS, modelopt=True),
        {"quant_method": "modelopt", **MODELOPT_NVFP4},
        WeightFormat(4, 16, is_float=True),
    ),
    "mxfp4": (
        mxfp4(OUTPUTS, INPUTS),
        float_config("mxfp4-pack-quantized", 4, strategy="group", group_size=32),
        WeightFormat(4, 32, is_float=True),
    ),
}
ACT_ORDER: Final[dict[str, tuple[Written, dict[str, Any]]]] = {
    "gptq act-order": (
        act_order(OUTPUTS, INPUTS, group=32, symmetric=False, layout="gptq"),
        gptq_config(4, 32, symmetric=False, desc_act=True),
    ),
    "compressed act-order": (
        act_order(OUTPUTS, INPUTS, group=32, symmetric=False, layout="compressed"),
        compressed_config("pack-quantized", 4, 32, symmetric=False, actorder="group"),
    ),
}


def save_layer(directory: Path, name: str) -> None:
    """A directory of one layer in any of these layouts."""
    if name in CASES:
        save, matrix, _ = CASES[name]
        save(directory, matrix)
    else:
        written, config, *_ = FLOATS.get(name) or ACT_ORDER[name]
        save_packed(directory, written.tensors, config)
