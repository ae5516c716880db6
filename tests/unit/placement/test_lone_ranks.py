"""Ranks of one host share its memory: what one of them takes alone is less than what it takes beside others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_api.spec import PlacementShares
from hetero_placement.cost_model import CostModel
from hetero_placement.hardware import CostPoint, Hardware, Part, Speeds
from hetero_placement.shard_plans import deal_layers, deal_within_layers
from tests.unit.placement.placement_setup import SMOLLM2, config_of, cpu, group

SHARED = 20e9
ALONE = 35e9


def speeds(*costs: CostPoint) -> Speeds:
    return Speeds(memory_bandwidth=SHARED, lone_memory_bandwidth=ALONE, flops={"float32": 1e11}, costs=costs)


def hardware(*hosts: str) -> Hardware:
    like = group(*(cpu(SHARED) for _ in hosts))
    ranks = (replace(rank, host=host, speeds=speeds()) for rank, host in zip(like.ranks, hosts, strict=True))
    return replace(like, ranks=tuple(ranks))


def test_what_memory_sets_the_pace_of_is_faster_alone() -> None:
    alone = speeds(CostPoint(Part.MLP, 1, 0, 1e-5, 4e-6), CostPoint(Part.MLP, 512, 0, 1e-5, 1e-4)).alone
    assert alone.memory_bandwidth == ALONE
    assert alone.costs[0].unit_s == pytest.approx(4e-6 * SHARED / ALONE)
    assert alone.costs[0].fixed_s == 1e-5


def test_what_arithmetic_sets_the_pace_of_is_not() -> None:
    points = (CostPoint(Part.MLP, 256, 0, 0.0, 256e-6), CostPoint(Part.MLP, 512, 0, 0.0, 512e-6))
    assert speeds(*points).alone.costs == points


def test_what_was_measured_alone_comes_before_what_bandwidth_lets_one_expect() -> None:
    known = replace(
        speeds(CostPoint(Part.MLP, 1, 0, 1e-5, 4e-6), CostPoint(Part.MLP, 512, 0, 0.0, 1e-4)), lone_gain=1.25
    )
    assert known.alone.costs[0].unit_s == pytest.approx(4e-6 / 1.25)
    assert known.alone.memory_bandwidth == ALONE
    assert known.alone.alone is known.alone
    not_faster = replace(known, lone_gain=1.0)
    assert not_faster.alone is not_faster


def test_without_a_measurement_nothing_is_made_up() -> None:
    unknown = Speeds(memory_bandwidth=SHARED)
    assert unknown.alone is unknown


def test_a_stage_that_computes_while_the_others_wait_has_the_memory_for_itself() -> None:
    config = config_of(**SMOLLM2)
    layers = deal_layers(config, cores=[1, 1], shares=PlacementShares())
    one_host = CostModel(config, hardware("a", "a"), dtype="float32")
    two_hosts = CostModel(config, hardware("a", "b"), dtype="float32")
    step_s = one_host.decode_step_s(layers, batch=1, context=64)
    assert step_s == pytest.approx(two_hosts.decode_step_s(layers, batch=1, context=64))
    weight_bytes = sum(one_host.weight_bytes(layers))
    assert step_s == pytest.approx(weight_bytes / ALONE, rel=0.1)


def test_ranks_that_compute_together_share_it() -> None:
    config = config_of(**SMOLLM2)
    even = deal_within_layers(config, cores=[1, 1], shares=PlacementShares())
    one_host = CostModel(config, hardware("a", "a"), dtype="float32").decode_step_s(even, batch=1, context=64)
    two_hosts = CostModel(config, hardware("a", "b"), dtype="float32").decode_step_s(even, batch=1, context=64)
    assert one_host / two_hosts == pytest.approx(ALONE / SHARED, rel=0.1)
