"""Prompts whose experts come to the GPU rank: from where on it pays, and why nothing is streamed where nothing is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from hetero_api.model_config import ModelConfig
from hetero_api.spec import PlacementSpec, WorkloadSpec
from hetero_placement.cost_model import CostModel
from hetero_placement.decision import Bounds, Decision, Option
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.solver import MLP_ONLY, STREAMING, solve
from hetero_placement.steps import Span, Step
from hetero_placement.streaming import StreamingCosts
from tests.unit.placement.placement_setup import GB, config_of, cpu, gpu
from tests.unit.placement.test_expert_layouts import CONFIG, QWEN3_30B, with_gpu

pytestmark = pytest.mark.unit

PROMPTS = WorkloadSpec(prompt_tokens=4000, output_tokens=1, concurrency=1)
BOUNDS = Bounds(max_model_len=4096, max_num_batched_tokens=4096, expert_streaming=None)
GPU: dict[str, Any] = {"flops": 1e14, "bus": 2.5e10, "memory": 12 * GB}
MIXED = with_gpu(gpu(9e11, **GPU), cpu(4e11, flops=2e12))


def solved(
    hardware: Hardware = MIXED, *, config: ModelConfig = CONFIG, bounds: Bounds = BOUNDS, **placement: Any
) -> Decision:
    spec = PlacementSpec(**{"workload": PROMPTS, **placement})
    return solve(config, hardware, dtype="bfloat16", placement=spec, bounds=bounds)


@cache
def streamed() -> Option:
    """The option of the group and bounds above."""
    return option_of(solved())


def option_of(decision: Decision, name: str = STREAMING) -> Option:
    return next(option for option in decision.options if option.name.startswith(name))


def step(rows: int) -> Step:
    return Step(spans=(Span(rows, 0),), draws=1)


def test_long_prompts_choose_it_and_are_predicted_to_gain() -> None:
    decision = solved()
    option, resident = option_of(decision), option_of(decision, MLP_ONLY)
    assert decision.chosen is option
    assert option.streaming is not None
    assert option.predicted.prefill_tokens_per_s > 1.5 * resident.predicted.prefill_tokens_per_s
    assert f"in steps of {option.streaming.min_rows} tokens or more" in decision.reason
    assert option.streaming.chunk_s < option.streaming.resident_chunk_s


def test_the_threshold_is_where_both_take_as_long() -> None:
    option = streamed()
    assert option.streaming is not None
    costs = StreamingCosts(CostModel(CONFIG, MIXED.levelled(), dtype="bfloat16"), option.made)
    least = option.streaming.min_rows
    assert 1 < least < 4096
    assert costs.step_s(step(least)) < costs.resident_s(step(least))
    assert costs.step_s(step(least - 1)) >= costs.resident_s(step(least - 1))


def test_from_the_full_chunk_on_time_grows_with_the_rows_and_before_it_does_not() -> None:
    option = streamed()
    assert option.streaming is not None
    costs = StreamingCosts(CostModel(CONFIG, MIXED.levelled(), dtype="bfloat16"), option.made)
    full = option.streaming.full_rows
    assert costs.step_s(step(full // 4)) > 0.8 * costs.step_s(step(full))
    assert costs.step_s(step(4 * full)) > 2 * costs.step_s(step(full))


def test_decoding_does_not_depend_on_it() -> None:
    option = streamed()
    model = CostModel(CONFIG, MIXED.levelled(), dtype="bfloat16")
    plain = model.predict(option.made, PROMPTS, BOUNDS)
    assert option.predicted.decode_step_s == plain.decode_step_s
    assert option.predicted.prefill_tokens_per_s > plain.prefill_tokens_per_s


def test_the_gpu_has_room_for_both_buffers_beside_its_part() -> None:
    option = streamed()
    assert option.streaming is not None
    memory = MemoryModel(CONFIG, MIXED.levelled(), BOUNDS, dtype="bfloat16")
    assert memory.room(option.made, 0) >= option.streaming.buffer_bytes > 0
    assert not memory.problem(option.made)


def test_a_threshold_that_is_asked_for_counts() -> None:
    option = option_of(solved(bounds=replace(BOUNDS, expert_streaming=123)))
    assert option.streaming is not None
    assert option.streaming.min_rows == 123


def test_what_is_asked_for_is_chosen_though_another_is_faster() -> None:
    assert solved(bounds=replace(BOUNDS, expert_streaming=4096), workload=WorkloadSpec()).chosen.streaming is not None
    assert solved(workload=WorkloadSpec()).chosen.streaming is None


def test_shares_that_fix_the_plan_stream_too() -> None:
    shares = {"attention": [1.0, 0.0], "mlp": [0.0, 1.0]}
    assert solved(shares=shares).chosen.streaming is not None


SLOW_BUS = with_gpu(gpu(9e11, **{**GPU, "bus": 1e8}), cpu(4e11, flops=1e15))
WIDE = config_of(**QWEN3_30B | {"num_hidden_layers": 24, "moe_intermediate_size": 1536}).quantized("int4")
FAR = replace(MIXED, ranks=(MIXED.ranks[0], *(replace(rank, host="elsewhere") for rank in MIXED.ranks[1:])))
DENSE = config_of(**{key: value for key, value in QWEN3_30B.items() if "expert" not in key and "moe" not in key} | {
    "architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 8,
})  # fmt: skip


@pytest.mark.parametrize(
    ("hardware", "config", "bounds", "why_not"),
    [
        (MIXED, CONFIG, replace(BOUNDS, expert_streaming=0), "spec.engine.expertStreaming is 0"),
        (MIXED, DENSE, BOUNDS, "the model has no experts"),
        (with_gpu(gpu(9e11, **GPU), gpu(9e11, **GPU), cpu(2e11)), CONFIG, BOUNDS, "to one GPU rank, not to 2"),
        (FAR, CONFIG, BOUNDS, "share no memory with the GPU rank"),
        (SLOW_BUS, WIDE, BOUNDS, "CPU ranks compute experts faster than the bus brings them"),
        (MIXED, CONFIG, replace(BOUNDS, max_num_batched_tokens=16), "spec.engine.maxNumBatchedTokens is 16"),
    ],
)
def test_what_keeps_experts_where_they_are_is_told(
    hardware: Hardware, config: ModelConfig, bounds: Bounds, why_not: str
) -> None:
    decision = solved(hardware, config=config, bounds=bounds)
    option = option_of(decision)
    assert why_not in option.why_not
    assert option.plan is None
    assert decision.chosen.streaming is None
