"""The chart's dashboards are what Grafana reads, and ask for metrics that there are."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from hetero_api.metrics import GatewayMetric, MetricType, OperatorMetric, RankMetric
from tests.support.documents import ROOT
from tools.dashboards import BOARDS, FOLDER, Board

pytestmark = pytest.mark.unit

of_each_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


def samples() -> set[str]:
    """Names of all series that our programs export."""
    specs = [metric.value for program in (GatewayMetric, RankMetric, OperatorMetric) for metric in program]
    ends = [
        f"{spec.name}_{end}"
        for spec in specs
        if spec.type is MetricType.HISTOGRAM
        for end in ("bucket", "sum", "count")
    ]
    return {spec.exposed for spec in specs if spec.type is not MetricType.HISTOGRAM} | set(ends)


def lost(part: Any, whole: Any, path: str = "") -> list[str]:
    """Paths of what `part` has and `whole`, which may add defaults, has not."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return [one for key in part for one in lost(part[key], whole.get(key), f"{path}.{key}")]
    if isinstance(part, list) and isinstance(whole, list) and len(part) == len(whole):
        return [
            one for number, pair in enumerate(zip(part, whole, strict=True)) for one in lost(*pair, f"{path}[{number}]")
        ]
    return [] if part == whole else [path]


@of_each_board
def test_grafanas_own_model_keeps_all_of_it(board: Board) -> None:
    register_default_plugins()
    said = json.loads((ROOT / FOLDER / f"{board.name}.json").read_text())
    model = Dashboard.from_json(said)
    assert lost(said, json.loads(json.dumps(model, cls=JSONEncoder))) == []
    assert len(said["panels"]) == len(board.panels)
    assert all(panel["targets"] and panel["gridPos"]["w"] == 8 for panel in said["panels"])


@of_each_board
def test_its_expressions_ask_for_metrics_that_there_are(board: Board) -> None:
    for panel in board.panels:
        for query in panel.queries:
            named = set(re.findall(r"(?:hetero_|vllm:)\w+", query.expr))
            assert named, query
            assert named <= samples(), query
            assert 'namespace=~"$namespace"' in query.expr


def test_each_has_an_id_of_its_own() -> None:
    said = [json.loads((ROOT / FOLDER / f"{board.name}.json").read_text()) for board in BOARDS]
    assert len({each["uid"] for each in said}) == len(BOARDS)
