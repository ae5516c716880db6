"""Experts that host cores packed, computed from a copy of their memory by torch and by a device's kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from hetero_api.model_parts import ExpertsConfig
from hetero_api.weight_format import FP8, WeightFormat
from hetero_worker.checkpoints.quantized_matrix import QuantizedMatrix
from hetero_worker.layers.fused_ops import PLAIN_OPS
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.layers.native_linear import NativeLinear, NativeWeight
from hetero_worker.layers.triton.linear import DeviceKernel
from hetero_worker.memory.panels import ExpertArena, PanelLayer, Place, mapped
from tests.support.native_compute import op_queue_of, randn
from tests.support.whole_number_linear import FORMATS
from tests.unit.kernels.test_quantized_matmul import random_matrix

pytestmark = pytest.mark.unit

NUMBER, PER_TOKEN, HIDDEN, WIDTH = 5, 2, 72, 40
HELD = (0, 3, 4)
SHAPE = ExpertsConfig(NUMBER, PER_TOKEN, WIDTH, layers=(0,))
HOST = torch.device("cpu")
STORED = (torch.float32, torch.bfloat16, torch.float16, FP8, *FORMATS)


class Packed:
    """Some experts, packed into an arena, and what another process sees of it."""

    def __init__(self, stored: WeightFormat | torch.dtype) -> None:
        self.arena = ExpertArena(len(HELD), 4 * 3 * HIDDEN * WIDTH)
        kernel = NativeLinear(op_queue_of(), allocate=self.arena.allocate)
        self.numbers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.arena.allocate(100)  # something else lies before
        begin = self.arena.num_bytes
        weights: dict[int, tuple[NativeWeight, NativeWeight]] = {}
        for number in HELD:
            first = self._pack(kernel, (2 * WIDTH, HIDDEN), stored, seed=2 * number)
            second = self._pack(kernel, (HIDDEN, WIDTH), stored, seed=2 * number + 1)
            weights[number] = first[0], second[0]
            self.numbers[number] = first[1], second[1]
        self.arena.trim()
        gate_up, down = weights[HELD[0]]
        places = {number: (self._place(first), self._place(second)) for number, (first, second) in weights.items()}
        layer = PanelLayer(begin, self.arena.num_bytes, gate_up.panels, down.panels, places)
        self.layer = PanelLayer.from_json(layer.to_json()).moved(256)
        seen = mapped(os.dup(self.arena.fd), self.arena.num_bytes)
        self.buffer = torch.zeros(256 + layer.num_bytes, dtype=torch.uint8)
        self.buffer[256:].copy_(seen[layer.begin : layer.end])

    def _pack(
        self, kernel: NativeLinear, shape: tuple[int, int], stored: WeightFormat | torch.dtype, *, seed: int
    ) -> tuple[NativeWeight, torch.Tensor]:
        if isinstance(stored, torch.dtype):
            weight = randn(*shape, seed=seed, dtype=stored)
            return kernel.pack(weight), weight.float()
        matrix: QuantizedMatrix = random_matrix(*shape, stored, seed=seed)
        return kernel.pack_quantized(matrix), matrix.dequantized()

    def _place(self, weight: NativeWeight) -> Place:
        return Place(*(part.data_ptr() - self.arena.address for part in weight.memory))

    def sum(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for token, numbers in enumerate(chosen.tolist()):
            for place, number in enumerate(numbers):
                if number in self.numbers:
                    gate_up, down = self.numbers[number]
                    inner = PLAIN_OPS.gated(x[token : token + 1] @ gate_up.T, "silu")
                    total[token] += shares[token, place] * (inner @ down.T)[0]
        return total


def inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chosen = randn(tokens, NUMBER, seed=4).argsort(dim=1)[:, :PER_TOKEN]
    return randn(tokens, HIDDEN, seed=5), chosen, torch.rand(chosen.shape, generator=torch.Generator().manual_seed(6))


@pytest.mark.parametrize("stored", STORED, ids=str)
@pytest.mark.parametrize("kernel", [PlainKernel(), DeviceKernel(HOST, torch.float32)], ids=["torch", "triton"])
def test_they_add_up_as_their_numbers_do(stored: WeightFormat | torch.dtype, kernel: Any) -> None:
    packed = Packed(stored)
    experts = kernel.panel_experts(SHAPE, "silu", packed.layer, packed.buffer)
    x, chosen, shares = inputs(9)
    expected, total = packed.sum(x, chosen, shares), torch.full_like(x, 3.0)
    experts.add(total, x, chosen, shares)
    bound = 1e-5 * float(expected.abs().max())
    torch.testing.assert_close(total - 3.0, expected, rtol=0, atol=max(bound, 1e-5))


@pytest.mark.parametrize("kernel", [PlainKernel(), DeviceKernel(HOST, torch.float32)], ids=["torch", "triton"])
def test_an_expert_takes_the_place_of_another(kernel: Any) -> None:
    packed = Packed(FORMATS[0])
    experts = kernel.panel_experts(SHAPE, "silu", packed.layer, packed.buffer)
    experts.rename(HELD[0], 1)
    packed.numbers[1] = packed.numbers.pop(HELD[0])
    x, chosen, shares = inputs(9)
    expected, total = packed.sum(x, chosen, shares), torch.zeros_like(x)
    experts.add(total, x, chosen, shares)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
