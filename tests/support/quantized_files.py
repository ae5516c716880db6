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
