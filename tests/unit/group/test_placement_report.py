"""What is told of a placement: the options, the prediction, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_gateway.engine.step_pace import MOST_SIZES, DecodePace
from hetero_gateway.group.placement import PlacedRanks, Placement, decide_placement, report_placement, step_time_ratio
from hetero_placement.cost_model import CostModel
from tests.unit.engine.engine_setup import generation
from tests.unit.group.group_setup import HOST_TIMES, GroupBench, collect, group_settings, hello

pytestmark = pytest.mark.unit


def placement() -> Placement:
    ranks = PlacedRanks([hello(0), hello(1)], [ranks_pb2.Formed(host_times=HOST_TIMES)] * 2)
    return decide_placement(group_settings(), ranks, None)


def paced(decided: Placement, *, factor: float) -> DecodePace:
    """Steps that took so many times what was predicted."""
    pace = DecodePace()
    for rows, context in ((1, 96), (4, 608), (1, 96)):
        step_s = decided.cost_model.decode_step_s(decided.plan, batch=rows, context=context)
        pace.add_step(factor * step_s, rows=rows, tokens=rows * context)
    return pace


def test_the_ratio_is_that_of_all_sizes_together() -> None:
    decided = placement()
    assert step_time_ratio(decided, DecodePace()) == 0
    assert step_time_ratio(decided, paced(decided, factor=1.25)) == pytest.approx(1.25)


def counted(method: Callable[..., Any], name: str, calls: list[str]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        calls.append(name)
        return method(*given)

    return call


def test_a_report_reads_the_plan_once_and_predicts_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    decided, pace = placement(), DecodePace()
    for rows in range(1, 500):
        pace.add_step(0.03, rows=rows, tokens=100 * rows)
    calls: list[str] = []
    for name in ("view", "_step_s"):
        monkeypatch.setattr(CostModel, name, counted(getattr(CostModel, name), name, calls))
    assert report_placement(decided, pace).step_time_ratio > 0
    assert Counter(calls) == {"view": 1, "_step_s": MOST_SIZES}


def test_the_report_tells_options_prediction_and_exchange() -> None:
    decided = placement()
    report = report_placement(decided, paced(decided, factor=2.0))
    [chosen] = [option for option in report.options if option.chosen]
    assert len(report.options) > 1
    assert sum(chosen.weight_shares) == pytest.approx(1)
    assert report.predicted_tokens_per_second == chosen.decode_tokens_per_second > 0
    assert report.measured_tokens_per_second == pytest.approx(report.predicted_tokens_per_second / 2)
    assert report.reason == decided.decision.reason
    assert [(time.bytes, time.seconds) for time in report.host_times] == [(4096, 1e-5), (1 << 20, 1e-4)]
    assert not report.device_times


def test_exchange_times_are_the_median_of_what_ranks_measured() -> None:
    formed = [
        ranks_pb2.Formed(host_times=[ranks_pb2.ExchangeTime(bytes=64, seconds=seconds)]) for seconds in (1.0, 5.0, 2.0)
    ]
    settings = group_settings({"name": "cpu", "ranks": 3})
    decided = decide_placement(settings, PlacedRanks([hello(rank) for rank in range(3)], formed), None)
    assert decided.hardware.host_exchange.points == ((64, 2.0),)


async def test_topology_tells_the_placement_once_it_was_decided() -> None:
    async with GroupBench() as bench:
        assert not bench.topology.HasField("placement")
        assert bench.topology.placement_mode == ""
        await bench.ready()
        assert bench.topology.placement_mode == "Tensor"
        assert bench.topology.placement.step_time_ratio == 0
        await collect(bench.core.submit(generation("r", range(9), max_tokens=6)))
        assert bench.topology.placement.step_time_ratio > 0
