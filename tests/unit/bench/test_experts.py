"""What bounds a layer of experts, and that each way computes the same."""

from __future__ import annotations

import pytest
import torch

from bench.experts import SHAPE, Layers, OneByOne, least_seconds, line, medians
from bench.limits import Limits
from hetero_api.model_config import ModelConfig
from hetero_worker.layers.native_linear import NativeLinear
from tests.support.native_compute import op_queue_of

pytestmark = pytest.mark.unit

SMALL = {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
LIMITS = Limits(threads=2, read_bytes_per_s=1e9, fp32_flops=1e9, bf16_flops=2e9, int8_ops=4e9)


def test_reading_bounds_few_rows_and_operations_many() -> None:
    config = ModelConfig.from_hf({**SHAPE, **SMALL})
    few, many = (
        least_seconds(config, LIMITS, expert_bytes=1000.0, active=2.0, rows=rows, arithmetic="int8") for rows in (1, 64)
    )
    assert few == pytest.approx(2 * 2 * 3 * 64 * 32 / 4e9)
    assert many == pytest.approx(64 * few)
    slow = least_seconds(config, LIMITS, expert_bytes=1e6, active=8.0, rows=1, arithmetic="int8")
    assert slow == pytest.approx(8e-3)
    assert line("int4", 8, 0.002, 0.001).split() == ["int4", "8", "2.000", "500", "50%"]


def test_ways_take_turns_over_the_same_layers() -> None:
    config, op_queue = ModelConfig.from_hf({**SHAPE, **SMALL}).quantized("int4"), op_queue_of()
    kernels = {"together": NativeLinear(op_queue), "one by one": OneByOne(op_queue)}
    ways = {name: Layers(config, kernel, op_queue, layers=2) for name, kernel in kernels.items()}
    hidden = torch.randn(5, 64)
    assert set(medians(ways, hidden, 0.0)) == set(ways)
    assert {layers.active(hidden) for layers in ways.values()} == {ways["together"].active(hidden)}
    together, one_by_one = (layers.mlps[1](hidden) for layers in ways.values())
    torch.testing.assert_close(together, one_by_one, rtol=1e-5, atol=1e-6)
