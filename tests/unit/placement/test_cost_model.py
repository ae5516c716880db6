"""What steps cost: halves, helpers, stages, exchanges, and where measured points and rates meet."""

from __future__ import annotations

import pytest

from hetero_api.errors import PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementShares, WorkloadSpec
from hetero_placement.cost_model import SLICE_ROWS, CostModel, WidePlace
from hetero_placement.decision import Bounds
from hetero_placement.hardware import CostPoint, ExchangeSpeeds, Hardware, Part, Speeds
from hetero_placement.part_costs import PartCosts
from hetero_placement.shard_plans import deal_within_layers, plan_of_layers, plan_within_layers
from hetero_placement.steps import Repeated, Span, Step, WorkloadSteps, micro_batches, prompt_steps
from hetero_worker.models.lending import SLICE_ROWS as WORKER_SLICE_ROWS
from hetero_worker.models.lending import row_slices
from hetero_worker.models.micro_batches import best_number
from tests.support.closed_form import ClosedForm
from tests.unit.placement.placement_setup import LLAMA_70B, MIXTRAL, config_of, cpu, gpu, group, model_of

pytestmark = pytest.mark.unit

CONFIG = config_of(num_hidden_layers=2, vocab_size=256, intermediate_size=256)
WIDE = config_of(num_hidden_layers=8, hidden_size=4096, intermediate_size=64 * 4096, vocab_size=64, head_dim=64)


def split(heads: list[int], units: list[int], rows: list[int]) -> ShardPlan:
    return plan_within_layers(
        CONFIG, heads=heads, columns=[64 * u for u in units], experts=[0] * len(heads), rows=[64 * r for r in rows]
    )


def test_every_weight_is_read_once_a_decoded_token_on_one_rank() -> None:
    model = model_of(CONFIG, cpu(1e9))
    read = CONFIG.num_parameters - CONFIG.vocab_size * CONFIG.hidden_size - 5 * CONFIG.hidden_size
    seconds = model.decode_step_s(split([4], [4], [4]), batch=1, context=0)
    assert seconds == pytest.approx(4 * read / 1e9)


def test_a_decode_step_reads_the_matrices_of_a_rank_and_of_experts_those_that_rows_choose() -> None:
    model, plan = model_of(CONFIG, cpu(1e9), cpu(1e9)), split([3, 1], [1, 3], [2, 2])
    read = CONFIG.num_parameters - CONFIG.vocab_size * CONFIG.hidden_size - 5 * CONFIG.hidden_size
    assert sum(model.read_bytes(plan, rank, rows=2) for rank in (0, 1)) == pytest.approx(4 * read)
    mixtral = config_of(**MIXTRAL, num_hidden_layers=2, vocab_size=256, intermediate_size=256)
    experts = model_of(mixtral, cpu(1e9))
    whole = plan_within_layers(mixtral, heads=[4], columns=[0], experts=[8], rows=[256])
    reads = [experts.read_bytes(whole, 0, rows=rows) for rows in (0, 1, 1e6)]
    # Two of eight.
    assert reads[1] - reads[0] == pytest.approx((reads[2] - reads[0]) / 4)
    assert reads[2] < experts.weight_bytes(whole)[0]


def test_keys_and_values_are_read_for_every_row_that_decodes() -> None:
    model, plan = model_of(CONFIG, cpu(1e9)), split([4], [4], [4])
    more = model.decode_step_s(plan, batch=3, context=100) - model.decode_step_s(plan, batch=3, context=0)
    assert more == pytest.approx(3 * 100 * 2 * 4 * CONFIG.head_dim * 2 * 4 / 1e9)


def test_what_a_rank_saves_in_one_half_does_not_make_up_for_the_other() -> None:
    model = model_of(CONFIG, cpu(1e9), cpu(1e9))
    even = model.decode_step_s(split([2, 2], [2, 2], [2, 2]), batch=1, context=0)
    crossed = model.decode_step_s(split([3, 1], [1, 3], [2, 2]), batch=1, context=0)
    assert crossed > even * 1.2


def test_halves_of_a_layer_exchange_once_each_and_the_ends_of_a_step_three_times() -> None:
    config, plan = CONFIG, split([2, 2], [2, 2], [2, 2])
    quick, slow = (model_of(config, cpu(1e9), cpu(1e9), host_s=s) for s in (0.0, 1.0))
    added = slow.decode_step_s(plan, batch=1, context=0) - quick.decode_step_s(plan, batch=1, context=0)
    assert added == pytest.approx(2 * config.num_layers + 3)


def test_helpers_on_the_mlp_only_cost_one_exchange_a_layer() -> None:
    plan = split([4, 0], [0, 4], [4, 0])
    quick, slow = (model_of(CONFIG, gpu(1e9), cpu(1e9), host_s=s) for s in (0.0, 1.0))
    added = slow.decode_step_s(plan, batch=1, context=0) - quick.decode_step_s(plan, batch=1, context=0)
    assert added == pytest.approx(CONFIG.num_layers + 2)  # the draw's two rounds are the whole group's


def test_a_helpers_way_is_hidden_behind_what_the_leader_computes_meanwhile() -> None:
    plan = split([4, 0], [3, 1], [4, 0])
    none, hidden = (model_of(CONFIG, gpu(1e9), cpu(1e9), host_s=s) for s in (0.0, 1e-5))
    seconds = [model.decode_step_s(plan, batch=1, context=0) for model in (none, hidden)]
    assert seconds[1] - seconds[0] == pytest.approx(2e-5)  # the draw only


def test_copies_over_the_bus_are_the_leaders_alone() -> None:
    plan = split([2, 2, 0], [1, 1, 2], [2, 2, 0])
    free = CostModel(CONFIG, group(gpu(1e12), gpu(1e12), cpu(1e12)), dtype="float32")
    bus = CostModel(CONFIG, group(gpu(1e12, bus=1e6), gpu(1e12, bus=1e3), cpu(1e12)), dtype="float32")
    row_s = CONFIG.hidden_size * 4 / 1e6
    lent = bus.wide_half_s([0, 1], [1, 1, 2], Step(decode_rows=1))
    assert lent == pytest.approx(2 * row_s, rel=1e-3)
    assert free.wide_half_s([0, 1], [1, 1, 2], Step(decode_rows=1)) < row_s
    assert plan.stages()[0].leader == 0


def test_a_mixed_round_is_one_among_gpus_the_leaders_copies_and_one_in_host_memory() -> None:
    hardware = Hardware(
        (gpu(1e12, bus=1e6), gpu(1e12, bus=1e3), cpu(1e12)),
        ExchangeSpeeds.of_rates(1.0), ExchangeSpeeds.of_rates(0.25),
    )  # fmt: skip
    costs = CostModel(CONFIG, hardware, dtype="float32").exchange
    assert costs.among([0, 1, 2], 1e6) == pytest.approx(0.25 + 1.0 + 2 * 1.0)
    assert costs.among([0, 1], 1e6) == 0.25
    assert costs.among([0, 2], 1e6) == pytest.approx(1.0 + 2 * 1.0)
    assert costs.among([2], 1e6) == 0.0


def test_stages_take_turns_while_they_decode() -> None:
    model = model_of(CONFIG, cpu(1e9), cpu(1e9))
    whole, layered = plan_of_layers(CONFIG, [2, 0]), plan_of_layers(CONFIG, [1, 1])
    both = [model.decode_step_s(plan, batch=1, context=64) for plan in (whole, layered)]
    assert both[0] == pytest.approx(both[1])


def test_stages_overlap_in_long_prompts() -> None:
    config = config_of(num_hidden_layers=4, hidden_size=1024, intermediate_size=4096)
    model = model_of(config, cpu(1e10, flops=1e11), cpu(1e10, flops=1e11))
    ((prompt, _),) = prompt_steps(512, 512)
    whole, layered = (model.step_s(plan_of_layers(config, counts), prompt) for counts in ([4, 0], [2, 2]))
    assert 0.5 < layered / whole < 0.75


@pytest.mark.parametrize("rows", [1, 31, 32, 64, 128, 500, 512, 4096])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
def test_micro_batches_are_those_that_the_worker_makes(rows: int, stages: int) -> None:
    assert micro_batches(rows, stages) == best_number(rows, stages)


def test_slices_are_those_that_the_worker_makes() -> None:
    assert SLICE_ROWS == WORKER_SLICE_ROWS


@pytest.mark.parametrize("rows", [0, 1, 127, 128, 129, 500, 1000, 4096])
@pytest.mark.parametrize("helpers", [1, 2, 3, 8, 64])
def test_slices_of_experts_are_as_many_as_the_worker_makes(rows: int, helpers: int) -> None:
    place = WidePlace([0], helpers=helpers, experts=True)
    made = row_slices(rows, row_bytes=4, link_bytes=1 << 20, expert_helpers=helpers).bounds
    assert place.num_slices(rows) == max(1, len(made))


def test_slices_let_a_helpers_ways_and_work_overlap() -> None:
    model = model_of(CONFIG, cpu(1e9, flops=1e9), cpu(1e9, flops=1e9), host_s=0.002)
    one, four = (model.wide_half_s([0], [0, 4], Step(decode_rows=r)) for r in (128, 512))
    assert one < four < 4 * one


def test_a_leader_that_lends_works_slice_by_slice_and_reads_its_weights_for_each() -> None:
    model = model_of(CONFIG, cpu(1e9), cpu(1e15))
    alone, lending = (model.wide_half_s([0], units, Step(decode_rows=512)) for units in ([4, 0], [4, 1]))
    assert lending == pytest.approx(4 * alone)


def test_chunks_of_a_prompt_and_their_draws() -> None:
    first, last = prompt_steps(1200, 512)
    assert first == Repeated(Step(spans=(Span(512, 256),)), 2)
    assert last == Repeated(Step(spans=(Span(176, 1024),), draws=1), 1)
    assert [repeated.step.spans for repeated in prompt_steps(512, 512)] == [(Span(512, 0),)]


def test_short_prompts_share_a_step() -> None:
    workload = WorkloadSpec(prompt_tokens=100, output_tokens=64, concurrency=12)
    steps = WorkloadSteps.of(workload, Bounds(max_model_len=1024, max_num_batched_tokens=512, max_num_seqs=8))
    assert [(r.step.rows, r.step.draws, r.times) for r in steps.prefill] == [(500, 5, 2), (200, 2, 1)]
    (decode,) = steps.decode
    assert (decode.step.decode_rows, decode.times) == (8, 64 * 12 / 8)


def test_with_equal_shares_tensor_comes_to_the_closed_formula() -> None:
    """Two exchanges a layer: whole units divide alike; the ends of a step are all that it does not know."""
    config = config_of(**LLAMA_70B)
    model = model_of(config, cpu(4e11), cpu(4e11), host_s=60e-6)
    plan = deal_within_layers(config, cores=[1, 1], shares=PlacementShares())
    read = 4 * (config.num_parameters - config.vocab_size * config.hidden_size)
    form = ClosedForm(weight_bytes=read, num_layers=80, gpu_bandwidth=4e11, cpu_bandwidth=4e11)
    expected = form.tensor_s(exchanges=2, exchange_s=60e-6) + 3 * 60e-6
    assert model.decode_step_s(plan, batch=1, context=0) == pytest.approx(expected, rel=2e-3)


def test_with_little_attention_mlp_only_comes_to_the_closed_formula() -> None:
    """The formula adds the exchange to the slower side; here it only delays the helpers."""
    model = model_of(WIDE, gpu(9e11), cpu(3e11))
    plan = plan_within_layers(WIDE, heads=[4, 0], columns=[64 * 3072, 64 * 1024], experts=[0, 0], rows=[64, 0])
    read = 4 * (WIDE.num_parameters - WIDE.vocab_size * WIDE.hidden_size)
    form = ClosedForm(weight_bytes=read, num_layers=8, gpu_bandwidth=9e11, cpu_bandwidth=3e11)
    assert model.decode_step_s(plan, batch=1, context=0) == pytest.approx(
        form.tensor_s(exchanges=1, exchange_s=0.0), rel=0.01
    )


def test_layer_split_comes_to_the_closed_formula() -> None:
    config = config_of(**LLAMA_70B)
    model = model_of(config, gpu(9e11), cpu(3e11))
    read = 4 * (config.num_parameters - config.vocab_size * config.hidden_size)
    form = ClosedForm(weight_bytes=read, num_layers=80, gpu_bandwidth=9e11, cpu_bandwidth=3e11)
    step_s = model.decode_step_s(plan_of_layers(config, [40, 40]), batch=1, context=0)
    assert step_s == pytest.approx(form.layer_s(share=0.5), rel=0.02)


def test_measured_points_count_before_rates_and_are_joined_by_lines() -> None:
    points = tuple(CostPoint(Part.MLP, rows, 0, fixed, unit) for rows, fixed, unit in ((1, 1.0, 2.0), (9, 3.0, 10.0)))
    costs = PartCosts(CONFIG, Speeds(1e9, costs=points, costs_dtype="float32"), dtype="float32")
    assert costs.mlp(1).of(3) == pytest.approx(1 + 3 * 2)
    assert costs.mlp(5).of(1) == pytest.approx(2 + 6)
    assert costs.mlp(17).of(1) == pytest.approx(5 + 18)
    assert costs.mlp(0.5) == costs.mlp(1)
    assert costs.mlp(5).of(0) == 0.0


def test_decode_points_are_joined_over_rows_and_context() -> None:
    points = tuple(
        CostPoint(Part.ATTENTION_DECODE, rows, context, 0.0, rows + context / 100)
        for rows in (1, 9) for context in (100, 500)
    )  # fmt: skip
    costs = PartCosts(CONFIG, Speeds(1e9, costs=points, costs_dtype="float32"), dtype="float32")
    assert costs.attention(Step(decode_rows=5, context=300), None).unit_s == pytest.approx(8.0)
    assert costs.attention(Step(decode_rows=5, context=300), 100).unit_s == pytest.approx(6.0)
    assert costs.attention(Step(decode_rows=5, context=900), None).unit_s == pytest.approx(14.0)


def test_a_later_chunk_costs_what_its_context_adds() -> None:
    """Seconds of 2·rows + rows²: pairs cost 2 a piece."""
    points = tuple(CostPoint(Part.ATTENTION_PREFILL, r, 0, 0.0, 2.0 * r + r * r) for r in (64, 256, 512))
    costs = PartCosts(CONFIG, Speeds(1e9, costs=points, costs_dtype="float32"), dtype="float32")
    fresh, later = (costs.attention(Step(spans=(Span(256, c),)), None).unit_s for c in (0, 1000))
    assert fresh == pytest.approx(2 * 256 + 256**2)
    assert later - fresh == pytest.approx(2 * 256 * 1000)


def test_points_of_another_type_are_scaled_by_what_rates_say() -> None:
    points = (CostPoint(Part.MLP, 1, 0, 1.0, 8.0),)
    costs = PartCosts(CONFIG, Speeds(1e9, costs=points, costs_dtype="float32"), dtype="bfloat16")
    assert costs.mlp(1) == pytest.approx((1.0, 4.0))


def test_cached_keys_and_values_count_in_their_own_type() -> None:
    """Of a step at long contexts most is reading them; measured points had them in the arithmetic type."""
    points = tuple(CostPoint(Part.ATTENTION_DECODE, 16, context, 0.0, 1.0) for context in (1, 30_000))
    step = Step(decode_rows=16, context=30_000)
    for speeds in (Speeds(1e9), Speeds(1e9, costs=points, costs_dtype="float32")):
        wide, narrow = (
            PartCosts(CONFIG, speeds, dtype="float32", cache_dtype=cached).attention(step, None).unit_s
            for cached in ("", "bfloat16")
        )
        assert narrow / wide == pytest.approx(0.5, abs=0.01)
    short = PartCosts(CONFIG, Speeds(1e9, costs=points, costs_dtype="float32"), dtype="float32", cache_dtype="bfloat16")
    assert short.attention(Step(decode_rows=1, context=1), None).unit_s == pytest.approx(1.0, abs=0.01)


def test_experts_are_read_if_a_row_chooses_them() -> None:
    config = config_of(**MIXTRAL)
    costs = PartCosts(config, Speeds(1e9), dtype="float32")
    one, many = costs.experts(1), costs.experts(1000)
    assert one.unit_s == pytest.approx(config.params_per_expert * 4 / 1e9 / 4)
    assert many.unit_s == pytest.approx(config.params_per_expert * 4 / 1e9)
    assert one.fixed_s > 0


def test_weights_are_counted_where_they_lie() -> None:
    model = model_of(CONFIG, cpu(1e9), cpu(1e9))
    norms = 5 * CONFIG.hidden_size
    weights = model.weight_bytes(split([1, 3], [4, 0], [1, 3]))
    assert sum(weights) == 4 * (CONFIG.num_parameters - norms)
    assert weights[0] == 4 * (
        2 * (CONFIG.attention_params_per_kv_head + 256 * CONFIG.mlp_params_per_column) + 2 * 64 * CONFIG.hidden_size
    )


def test_an_unknown_type_is_an_error_with_those_that_are_known() -> None:
    with pytest.raises(PlanError, match=r"dtype 'int3' is not known; known: float32"):
        CostModel(CONFIG, group(cpu(1e9)), dtype="int3")
