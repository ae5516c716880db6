"""Curves over the share of the weights."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares, PlacementSpec, WorkloadSpec
from hetero_placement.decision import Option
from hetero_placement.solver import solve
from hetero_placement.steps import Load
from hetero_placement.sweep import LoadRates, rates_by_load, rates_with_proposals, sweep
from tests.unit.placement.placement_setup import GB, LLAMA_8B, MIXTRAL, SMOLLM2, bounds_of, config_of, cpu, gpu, group

pytestmark = pytest.mark.unit


def test_a_mixed_group_has_a_curve_a_mode_over_the_gpus_share() -> None:
    config, hardware = config_of(**LLAMA_8B), group(gpu(9e11, memory=24 * GB), cpu(3.7e11), host_s=3e-5)
    bounds = bounds_of(config)
    drawn = sweep(config, hardware, dtype="float32", workload=WorkloadSpec(), bounds=bounds, points=11)
    assert drawn.side == "GPU ranks"
    assert [curve.name for curve in drawn.curves] == [
        "Tensor, CPU ranks on MLP only", "Tensor, CPU ranks on all parts", "Layer split",
    ]  # fmt: skip
    for curve in drawn.curves:
        shares = [point.share for point in curve.points]
        assert shares == sorted(set(shares))
        assert shares[-1] == 1.0
        # 32 GB of weights do not fit 24 GB; a small part of them does.
        assert not curve.points[-1].fits
        assert curve.points[0].fits


def test_no_fitting_point_beats_what_was_chosen_for_decoding_alone() -> None:
    config, hardware = config_of(**SMOLLM2), group(cpu(2e10), cpu(1e10, pool="slow"), host_s=1e-6)
    bounds, workload = bounds_of(config), WorkloadSpec(prompt_tokens=1, output_tokens=1000)
    decision = solve(config, hardware, dtype="float32", placement=PlacementSpec(workload=workload), bounds=bounds)
    drawn = sweep(config, hardware, dtype="float32", workload=workload, bounds=bounds, points=31)
    best = max(point.decode_tokens_per_s for curve in drawn.curves for point in curve.points if point.fits)
    assert decision.chosen.prediction is not None
    assert best <= decision.chosen.prediction.decode_tokens_per_s * 1.001
    assert drawn.side == "rank 0"
    assert 0.5 < drawn.share(decision.chosen.weight_shares) < 0.75


def test_one_side_alone_has_no_curves() -> None:
    config = config_of(**SMOLLM2)
    for hardware in (group(cpu(1e10)), group(gpu(1e12), gpu(1e12))):
        drawn = sweep(config, hardware, dtype="float32", workload=WorkloadSpec(), bounds=bounds_of(config))
        assert drawn.curves == ()


DECODE, PROMPT = Load(2048, 1), Load(2048)


def rates(*options: tuple[str, tuple[float, ...], tuple[float, float]]) -> LoadRates:
    """Rates of options with a name, ranks' shares, and tokens/s of a decode and of a prompt; rank 0 is a GPU."""
    made = ((Option(name, None, weight_shares=shares), each) for name, shares, each in options)
    return LoadRates((DECODE, PROMPT), tuple(made), gpus=(0,))


@pytest.mark.parametrize(
    ("gpu_only", "mixed", "cpu_only", "expected"),
    [
        ((9.0, 9.0), (5.0, 5.0), (1.0, 1.0), "GPU ranks alone are fastest for each of these loads."),
        ((1.0, 1.0), (5.0, 5.0), (9.0, 9.0), "CPU ranks alone are fastest for each of these loads."),
        ((5.0, 9.0), (9.0, 5.0), (1.0, 1.0),
         "Fastest are GPU and CPU ranks together for decode 1; GPU ranks alone for prefill 2k."),
        ((5.0, 5.0), (5.001, 5.001), (1.0, 1.0), "GPU ranks alone are fastest for each of these loads."),
    ],
)  # fmt: skip
def test_it_is_said_plainly_which_ranks_are_faster(
    gpu_only: tuple[float, float], mixed: tuple[float, float], cpu_only: tuple[float, float], expected: str
) -> None:
    told = rates(("gpu", (1.0, 0.0), gpu_only), ("both", (0.5, 0.5), mixed), ("cpu", (0.0, 1.0), cpu_only))
    assert told.verdict == expected


@pytest.mark.parametrize("engine", [{"expert_deferral": 4}, {"kv_cache_dtype": "float8_e4m3fn"}])
def test_loads_are_predicted_with_the_engines_settings(engine: dict[str, Any]) -> None:
    config, hardware = config_of(**MIXTRAL), group(gpu(9e11, memory=24 * GB), cpu(2e11), host_s=3e-5)
    bounds = bounds_of(config, max_model_len=4096, **engine)
    workload = WorkloadSpec(prompt_tokens=1, output_tokens=1, concurrency=1)
    placement = PlacementSpec(workload=workload, shares=PlacementShares(attention=[1, 0], mlp=[0, 1]))
    options = solve(config, hardware, dtype="bfloat16", placement=placement, bounds=bounds).options
    made = rates_by_load(config, hardware, options, dtype="bfloat16", bounds=bounds)
    plain = rates_by_load(config, hardware, options, dtype="bfloat16", bounds=bounds_of(config, max_model_len=4096))
    assert made.rates[0][1][0] > 1.001 * plain.rates[0][1][0]


def test_a_group_of_one_kind_has_no_such_choice() -> None:
    assert rates(("gpu", (1.0,), (1.0, 1.0))).verdict == ""


def test_proposals_gain_by_the_arithmetic_where_rows_are_free_and_a_slow_draft_model_nothing() -> None:
    """A large model of which memory sets the pace: a row more costs next to nothing."""
    config, workload = config_of(**LLAMA_8B), WorkloadSpec(prompt_tokens=64, output_tokens=64)
    small, large = (config_of(**{**LLAMA_8B, "num_hidden_layers": layers}) for layers in (1, 30))
    hardware = group(cpu(1e11))
    for draft, fastest in ((small, True), (large, False)):
        by_ngrams, by_draft = rates_with_proposals(
            config,
            hardware,
            ShardPlan.whole(config),
            dtype="bfloat16",
            workload=workload,
            bounds=bounds_of(config, draft=draft),
            acceptance=0.6,
        )
        gain = by_ngrams.tokens_per_s / by_ngrams.plain_tokens_per_s
        assert 1.5 < gain <= 1 / (1 - 0.6)
        assert by_ngrams.length > by_draft.length
        assert (by_draft.length > 0) == fastest
        assert by_ngrams.tokens_per_s > by_draft.tokens_per_s
