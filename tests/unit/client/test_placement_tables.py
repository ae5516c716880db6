"""How a placement is shown: what was considered, what was predicted, and what became of it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from hetero_api.v1 import admin_pb2, ranks_pb2
from hetero_client.admin import PlacementView, topology_from
from hetero_client.cli.tables import options_view, prediction_line, topology_line

pytestmark = pytest.mark.unit


def view(*, ratio: float = 0.0) -> PlacementView:
    report = admin_pb2.PlacementReport(
        options=[
            admin_pb2.PlacementOption(
                name="Tensor, all ranks", mode="Tensor", chosen=True, decode_tokens_per_second=41.26,
                prefill_tokens_per_second=1234.5, workload_s=6.4, weight_shares=[0.5, 0.5],
            ),
            admin_pb2.PlacementOption(name="GPU only", mode="GpuOnly", why_not="too little memory"),
        ],
        reason="because it is faster",
        predicted_tokens_per_second=41.26,
        step_time_ratio=ratio,
        measured_tokens_per_second=41.26 / ratio if ratio else 0.0,
        host_times=[ranks_pb2.ExchangeTime(bytes=4096, seconds=2e-6)],
    )  # fmt: skip
    answer = admin_pb2.GetTopologyResponse(name="g", placement=report, placement_mode="Tensor", exchange_reason="r")
    topology = topology_from(answer)
    assert (topology.placement_mode, topology.exchange_reason, topology.model_source) == ("Tensor", "r", "")
    assert "placement Tensor" in topology_line(topology)
    assert topology.placement is not None
    return topology.placement


def test_options_are_told_with_the_one_in_force_marked() -> None:
    text = io.StringIO()
    Console(file=text, width=120).print(options_view(view()))
    lines = [line.split() for line in text.getvalue().splitlines() if line.strip()]
    [chosen] = [line for line in lines if line[0] == "*"]
    assert chosen[-3:] == ["41.3", "1,230", "6.4"]
    [other] = [line for line in lines if line[0] == "GPU"]
    assert other[2:] == ["-", "-", "-", "too", "little", "memory"]
    assert "because it is faster" in text.getvalue()


def test_the_prediction_is_told_beside_what_was_measured() -> None:
    assert prediction_line(view()) == "predicted 41.3 tokens/s; nothing measured yet"
    assert prediction_line(view(ratio=1.1)).endswith("measured 37.5: a step takes 1.10 of the predicted time")


def test_a_group_that_has_decided_nothing_has_no_placement() -> None:
    topology = topology_from(admin_pb2.GetTopologyResponse(name="g"))
    assert topology.placement is None
    assert "placement" not in topology_line(topology)
