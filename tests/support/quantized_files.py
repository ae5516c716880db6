"""Checkpoints with quantised weights, packed as the projects whose formats these are pack them, and what they mean.

Written out value by value from the formats' descriptions, so that it shares nothing with what reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

LAYER: Final = "model.layers.0.mlp.down_proj"
WEIGHT: Final = f"{LAYER}.weight"
AWQ_COLUMNS: Final = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight columns lies in each four bits of a word, from the lowest."""

Ints = npt.NDArray[np.int64]


class Quantized(NamedTuple):
    """A matrix before it is packed."""

    values: Ints
    """[out, in], unsigned."""
    zeros: Ints
    """[out, groups], unsigned."""
    scales: torch.Tensor
    """float16 [out, groups]."""
    group: int

    @property
    def numbers(self) -> torch.Tensor:
        """float32 [out, in]."""
        inputs = self.values.shape[1]
        zeros, scales = (
            np.repeat(part, self.group, axis=1)[:, :inputs] for part in (self.zeros, self.scales.float().numpy())
        )
        return torch.from_numpy(((self.values - zeros) * scales).astype(np.float32))


def random_quantized(outputs: int, inputs: int, *, bits: int, group: int, symmetric: bool, seed: int = 3) -> Quantized:
    """group 0: a scale a row."""
    random, size = np.random.default_rng(seed), group or inputs
    groups = -(-inputs // size)
    middle = np.full((outputs, groups), 1 << bits - 1)
    return Quantized(
        values=random.integers(0, 1 << bits, (outputs, inputs)),
        zeros=middle if symmetric else random.integers(1, 1 << bits, (outputs, groups)),
        scales=torch.from_numpy(random.uniform(0.001, 0.1, (outputs, groups)).astype(np.float16)),
        group=size,
    )


def packed(values: Ints, bits: int, *, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words along an axis; what is missing to a whole word is 0. `order`: places in a group of eight."""
    each = 32 // bits
    rows = np.moveaxis(values, axis, -1)
    rows = np.pad(rows, [(0, 0), (0, -rows.shape[1] % each)])
    words = np.zeros((len(rows), rows.shape[1] // each), dtype=np.uint64)
    for word in range(words.shape[1]):
        for place in range(each):
            column = word * each + (order[place] if order else place)
            words[:, word] |= rows[:, column].astype(np.uint64) << np.uint64(bits * place)
    return torch.from_numpy(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis).copy())


def awq_tensors(matrix: Quantized) -> dict[str, torch.Tensor]:
    return {
        "qweight": packed(matrix.values.T, 4, axis=1, order=AWQ_COLUMNS),
        "qzeros": packed(matrix.zeros.T, 4, axis=1, order=AWQ_COLUMNS),
        "scales": matrix.scales.T.contiguous(),
    }


def gptq_tensors(matrix: Quantized, bits: int, *, less_one: bool = True) -> dict[str, torch.Tensor]:
    return {
        "qweight": packed(matrix.values.T, bits, axis=0),
        "qzeros": packed(matrix.zeros.T - int(less_one), bits, axis=1),
        "scales": matrix.scales.T.contiguous(),
        "g_idx": torch.arange(matrix.values.shape[1], dtype=torch.int32) // matrix.group,
    }


def packed_int_tensors(matrix: Quantized, bits: int, *, symmetric: bool) -> dict[str, torch.Tensor]:
    tensors = {
        "weight_packed": packed(matrix.values, bits, axis=1),
        "weight_scale": matrix.scales,
        "weight_shape": torch.tensor(matrix.values.shape),
    }
    return tensors if symmetric else tensors | {"weight_zero_point": packed(matrix.zeros, bits, axis=0)}


def int_tensors(matrix: Quantized, *, symmetric: bool) -> dict[str, torch.Tensor]:
    tensors = {"weight": torch.from_numpy(matrix.values - 128).to(torch.int8), "weight_scale": matrix.scales}
    zeros = torch.from_numpy(matrix.zeros - 128).to(torch.int8)
    return tensors if symmetric else tensors | {"weight_zero_point": zeros}


def save_packed(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """A directory of one layer; `config` is its quantization_config."""
    save_file(
        {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps({"quantization_config": config}), encoding="utf-8")


def awq_config(group: int, **changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group or -1,
        "zero_point": True,
        "version": "gemm",
    } | changes


def gptq_config(bits: int, group: int, *, symmetric: bool, **changes: Any) -> dict[str, Any]:
    shape = {"bits": bits, "group_size": group or -1, "sym": symmetric, "desc_act": False}
    return {"quant_method": "gptq"} | shape | changes


def compressed_config(layout: str, bits: int, group: int, *, symmetric: bool, **changes: Any) -> dict[str, Any]:
    weights = {
        "num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
        "group_size": group or None, "actorder": None, "dynamic": False,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights | changes}},
        "ignore": ["lm_head"],
    }


E4M3_NUMBERS: Final = np.array(
    [
        (-1.0 if bits & 128 else 1.0) * ((1 if exponent else 0) + (bits & 7) / 8) * 2.0 ** (max(exponent, 1) - 7)
        for bits, exponent in ((bits, bits >> 3 & 15) for bits in range(256))
    ]
)
"""8-bit floats by their bits; 127 and 255 stand for no number."""
E2M1_NUMBERS: Final = np.array([sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)])
"""4-bit floats by their bits."""


class Written(NamedTuple):
    """Tensors of one layer, and the weights that they stand for."""

    tensors: dict[str, torch.Tensor]
    numbers: torch.Tensor
    """float32 [out, in]."""


def e4m3(bits: Ints) -> torch.Tensor:
    return torch.from_numpy(bits.astype(np.uint8)).view(torch.float8_e4m3fn)


def wide_floats(
    outputs: int,
    inputs: int,
    *,
    rows: int,
    columns: int,
    scale: str = "weight_scale",
    seed: int = 5,
    exact: bool = True,
) -> Written:
    """8-bit floats with a scale for so many rows and columns; 0: all. `exact`: scales that float16 has."""
    random = np.random.default_rng(seed)
    bits = random.integers(0, 256, (outputs, inputs))
    bits[(bits & 127) == 127] = 126
    high, wide = rows or outputs, columns or inputs
    scales = random.uniform(0.0004, 0.001, (-(-outputs // high), -(-inputs // wide)))
    scales = ((scales * 256).astype(np.float16) / np.float16(256) if exact else scales).astype(np.float32)
    spread = scales.repeat(high, axis=0).repeat(wide, axis=1)[:outputs, :inputs]
    stored = torch.from_numpy(scales).reshape(1) if not rows else torch.from_numpy(scales)
    numbers = torch.from_numpy((E4M3_NUMBERS[bits] * spread).astype(np.float32))
    return Written({"weight": e4m3(bits), scale: stored}, numbers)


def nvfp4(outputs: int, inputs: int, *, modelopt: bool, seed: int = 6, factor: float = 2.0**-9) -> Written:
    """4-bit floats in groups of 16; `factor` of the whole matrix."""
    random = np.random.default_rng(seed)
    bits, scales = random.integers(0, 16, (outputs, inputs)), random.integers(56, 100, (outputs, inputs // 16))
    spread = E4M3_NUMBERS[scales].repeat(16, axis=1)
    numbers = torch.from_numpy((E2M1_NUMBERS[bits] * spread * np.float32(factor)).astype(np.float32))
    packed, stored = halves_of_bytes(bits), e4m3(scales)
    if modelopt:
        factors = {"weight_scale_2": torch.tensor(factor), "input_scale": torch.tensor(0.1)}
        return Written({"weight": packed, "weight_scale": stored, **factors}, numbers)
    factors = {"weight_global_scale": torch.tensor([1 / factor]), "input_global_scale": torch.tensor([9.0])}
    return Written({"weight_packed": packed, "weight_scale": stored, **factors}, numbers)


def mxfp4(outputs: int, inputs: int, *, seed: int = 7) -> Written:
    """4-bit floats in groups of 32, with powers of two."""
    random = np.random.default_rng(seed)
    bits, exponents = random.integers(0, 16, (outputs, inputs)), random.integers(118, 124, (outputs, inputs // 32))
    numbers = E2M1_NUMBERS[bits] * np.exp2(exponents.astype(np.float64) - 127).repeat(32, axis=1)
    stored = torch.from_numpy(exponents.astype(np.uint8))
    tensors = {"weight_packed": halves_of_bytes(bits), "weight_scale": stored}
    return Written(tensors, torch.from_numpy(numbers.astype(np.float32)))


def act_order(outputs: int, inputs: int, *, group: int, symmetric: bool, layout: str, seed: int = 8) -> Written:
    """4 bits whose inputs belong to groups in any order, as GPTQ or compressed-tensors (`layout`) has it."""
    matrix = random_quantized(outputs, inputs, bits=4, group=group, symmetric=symmetric, seed=seed)
    groups = np.random.default_rng(seed).permutation(np.arange(inputs) // group)
    scales, zeros = matrix.scales.float().numpy()[:, groups], matrix.zeros[:, groups]
    numbers = torch.from_numpy(((matrix.values - zeros) * scales).astype(np.float32))
    order = torch.from_numpy(groups.astype(np.int32))
    if layout == "gptq":
        return Written(gptq_tensors(matrix, 4) | {"g_idx": order}, numbers)
    return Written(packed_int_tensors(matrix, 4, symmetric=symmetric) | {"weight_g_idx": order}, numbers)


def halves_of_bytes(bits: Ints) -> torch.Tensor:
    """uint8 [rows, columns / 2], the lower half of a byte first."""
    return torch.from_numpy((bits[:, ::2] | bits[:, 1::2] << 4).astype(np.uint8))


def float_config(layout: str, bits: int, **weights: Any) -> dict[str, Any]:
    """compressed-tensors' of floats, with activations quantised, too."""
    arguments = {"num_bits": bits, "type": "float", "symmetric": True, "dynamic": False, **weights}
    activations = {"num_bits": bits, "type": "float", "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": arguments, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


FP8_BLOCKS: Final = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [16, 32],
}
MODELOPT_NVFP4: Final = {
    "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head", "*mlp.gate"]
}  # fmt: skip
