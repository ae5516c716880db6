"""Weights in fewer bits: read in less time and held in less memory by ranks that keep them so, and by no others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_api.model_config import ModelConfig
from hetero_api.sharding import ShardPlan
from hetero_placement.cost_model import CostModel
from hetero_placement.hardware import RankHardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.shard_plans import in_units, largest_remainder, plan_within_layers, units_of
from tests.unit.placement.placement_setup import LLAMA_8B, MIXTRAL, bounds_of, config_of, cpu, gpu, group

pytestmark = pytest.mark.unit

CONFIG = config_of(**LLAMA_8B)
NARROW = frozenset({8, 4})


def _plan(config: ModelConfig, *parts: float) -> ShardPlan:
    """Every layer split alike, by parts of whole."""
    dense = 0 if config.experts else config.intermediate_size
    return plan_within_layers(
        config,
        heads=largest_remainder(config.num_kv_heads, parts),
        columns=in_units(dense, largest_remainder(units_of(dense), parts)),
        experts=largest_remainder(config.num_experts, parts),
        rows=in_units(config.vocab_size, largest_remainder(units_of(config.vocab_size), parts)),
    )


def _model(config: ModelConfig, *ranks: RankHardware) -> CostModel:
    return CostModel(config, group(*ranks), dtype="float32")


def _keeping(bits: frozenset[int]) -> RankHardware:
    return replace(cpu(1e11), weight_bits=bits)


@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.25), ("int4", 5.0)])
def test_a_decoded_token_reads_what_is_kept(quantization: str, bits: float) -> None:
    config, plan = CONFIG.quantized(quantization), _plan(CONFIG, 1.0)
    wide, narrow = (
        _model(config, _keeping(kept)).decode_step_s(plan, batch=1, context=0) for kept in (frozenset(), NARROW)
    )
    assert wide == _model(CONFIG, _keeping(NARROW)).decode_step_s(plan, batch=1, context=0)
    head = CONFIG.vocab_size * CONFIG.hidden_size
    layers = CONFIG.num_parameters - 2 * head
    expected = (layers * bits + head * 8.25) / (32 * (layers + head))
    assert narrow / wide == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize("config", [CONFIG, config_of(**LLAMA_8B, **MIXTRAL)], ids=["dense", "experts"])
def test_ranks_of_both_kinds_have_weights_of_their_own_widths(config: ModelConfig, quantization: str) -> None:
    plan = _plan(config, 0.5, 0.5)
    floats = _model(config, gpu(1e12), _keeping(NARROW)).weight_bytes(plan)
    found = _model(config.quantized(quantization), gpu(1e12), _keeping(NARROW)).weight_bytes(plan)
    assert found[0] == floats[0]
    assert found[1] < floats[1] * (0.27 if quantization == "int8" else 0.18)


def test_a_model_fits_where_it_would_not_in_sixteen_bits() -> None:
    plan, small = _plan(CONFIG, 1.0), replace(_keeping(NARROW), memory_bytes=10 * 10**9)
    told = {
        quantization: MemoryModel(
            CONFIG.quantized(quantization), group(small), bounds_of(CONFIG, max_num_seqs=4), dtype="float32"
        ).problem(plan)
        for quantization in ("none", "int8", "int4")
    }
    assert "32." in told["none"]
    assert told["int4"] == ""


def test_a_whole_model_is_as_large_as_its_ranks_keep_it() -> None:
    config = CONFIG.quantized("int8")
    model = _model(config, gpu(1e12), _keeping(NARROW))
    assert model.whole_bytes(0) == 4 * CONFIG.num_parameters
    assert CONFIG.num_parameters < model.whole_bytes(1) < 1.04 * CONFIG.num_parameters
