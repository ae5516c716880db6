"""The chart's alerts, by promtool: each fires on its fault, not before its time, and not without the fault."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_api.metrics import GatewayMetric, OperatorMetric, RankMetric
from tests.support.documents import ROOT, anchors
from tests.support.helm import PROMETHEUS, Helm, only
from tests.support.kube.tools import find_helm, find_prometheus

POD = 'namespace="a",instance="10.0.0.1:8080",pod="x"'
OURS = 'namespace="hetero-system",service="hetero-heteroinference-operator-metrics"'


@dataclass(frozen=True, slots=True)
class Fault:
    """Series by minutes, in promtool's notation, that make an alert fire between two minutes; and labels it has."""

    series: Mapping[str, str]
    quiet_at: int
    fires_at: int
    labels: Mapping[str, str] = field(default_factory=dict)


FAULTS = {
    "HeteroInferenceOperatorDown": Fault({f"hetero_operator_leader{{{OURS}}}": "1 _x60"}, 5, 12),
    "HeteroInferenceOperatorHasNoLeader": Fault({f"hetero_operator_leader{{{OURS}}}": "1 0x60"}, 2, 4),
    "HeteroInferenceOperatorHasTwoLeaders": Fault(
        {f'hetero_operator_leader{{{OURS},pod="{pod}"}}': "1x60" for pod in "ab"}, 0, 2
    ),
    "HeteroInferenceReconcileErrors": Fault(
        {f'hetero_operator_reconcile_errors_total{{{OURS},reason="ApplyForbidden"}}': "0+1x60"}, 10, 20,
        {"reason": "ApplyForbidden"},
    ),
    "HeteroInferenceOperatorForbidden": Fault(
        {f'hetero_operator_api_requests_total{{{OURS},verb="patch",code="403"}}': "0+1x60"}, 3, 8, {"verb": "patch"}
    ),
    "HeteroInferenceWatchesRestart": Fault(
        {f'hetero_operator_watch_restarts_total{{{OURS},kind="Pod",reason="error"}}': "0+2x60"}, 8, 25, {"kind": "Pod"}
    ),
    "HeteroInferenceQueueWaits": Fault({f"hetero_operator_queue_oldest_seconds{{{OURS}}}": "0+60x60"}, 5, 10),
    "HeteroInferenceGroupNotReady": Fault({f"hetero_ready{{{POD}}}": "1x5 0x60"}, 14, 18),
    "HeteroInferenceRankMissing": Fault({f'hetero_rank_info{{{POD},rank="1",pool="cpu"}}': "1x5 0x60"}, 14, 18),
    "HeteroInferenceGroupRecoversOften": Fault({f"hetero_recoveries_total{{{POD}}}": "0x10 0+1x60"}, 10, 20),
    "HeteroInferenceRankRestartsOften": Fault(
        {f'hetero_rank_restarts_total{{{POD},local_rank="0"}}': "0x10 0+1x60"}, 10, 20
    ),
    "HeteroInferenceRequestsWait": Fault(
        {f'vllm:num_requests_waiting{{{POD},model_name="m"}}': "0x2 3x60", f"hetero_ready{{{POD}}}": "1x62"}, 12, 20
    ),
    "HeteroInferencePreemptions": Fault(
        {f'vllm:num_preemptions_total{{{POD},model_name="m"}}': "0+30x60", f"hetero_ready{{{POD}}}": "1x60"}, 8, 20
    ),
    "HeteroInferenceSlowerThanPredicted": Fault({f"hetero_placement_step_time_ratio{{{POD}}}": "2x60"}, 25, 35),
    "HeteroInferenceMemoryNotLocal": Fault({f'hetero_rank_local_memory_ratio{{{POD},rank="0"}}': "0.5x60"}, 8, 12),
}  # fmt: skip
HEALTHY = {
    f"hetero_operator_leader{{{OURS}}}": "1x60",
    f"hetero_ready{{{POD}}}": "1x60",
    f'hetero_rank_info{{{POD},rank="0",pool="cpu"}}': "1x60",
    f"hetero_recoveries_total{{{POD}}}": "1x60",
    f'hetero_rank_local_memory_ratio{{{POD},rank="0"}}': "0.99x60",
    f"hetero_placement_step_time_ratio{{{POD}}}": "1.1x60",
    f'vllm:num_requests_waiting{{{POD},model_name="m"}}': "0 5 0 5 0 5x3 0 5x5 0 5x5 0 5x5 0 5x5 0 5x5",
}


@pytest.fixture(scope="module")
def alerts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The alerts that an installation has."""
    helm = Helm(find_helm(4), tmp_path_factory.mktemp("helm"), major=4)
    rule = only(helm.template({"metrics": {"prometheusRule": {"enabled": True}}}, apis=[PROMETHEUS]), "PrometheusRule")
    return [alert for group in rule["spec"]["groups"] for alert in group["rules"]]


def promtool(*arguments: str | Path) -> None:
    """Fails with what promtool says."""
    done = subprocess.run([find_prometheus("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_fires_on_its_fault_alone(alerts: list[dict[str, Any]], tmp_path: Path) -> None:
    assert {alert["alert"] for alert in alerts} == set(FAULTS)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": alerts}]}))
    promtool("check", "rules", tmp_path / "rules.yaml")
    # Labels and texts are promtool's to compare whole; that it fires is asked of the series ALERTS.
    cases = [_case(fault.series, {name: fault}) for name, fault in FAULTS.items()]
    cases.append(_case(HEALTHY, {}))
    test = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "tests.yaml").write_text(yaml.safe_dump(test))
    promtool("test", "rules", tmp_path / "tests.yaml")


def _case(series: Mapping[str, str], faults: Mapping[str, Fault]) -> dict[str, Any]:
    """Only these alerts fire, each between its times; healthy operators lead, so that they are not missed."""
    present = dict(series)
    if not any("hetero_operator_leader" in name for name in present):
        present[f"hetero_operator_leader{{{OURS}}}"] = "1x60"
    looks = [
        _look(f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{name}"}}) > bool 0', minute, fires)
        for name, fault in faults.items()
        for minute, fires in ((fault.quiet_at, False), (fault.fires_at, True))
    ]
    for name, fault in faults.items():
        for label, value in fault.labels.items():
            expression = (
                f'count by (alertname) (ALERTS{{alertstate="firing",alertname="{name}",{label}="{value}"}}) > bool 0'
            )
            looks.append(_look(expression, fault.fires_at, True, name=name))
    others = "|".join(faults) or "none"
    looks += [
        _look(f'count(ALERTS{{alertstate="firing",alertname!~"{others}"}})', minute, False) for minute in (15, 30, 45)
    ]
    values = [{"series": name, "values": value} for name, value in present.items()]
    return {"interval": "1m", "input_series": values, "promql_expr_test": looks}


def _look(expression: str, minute: int, fires: bool, *, name: str = "") -> dict[str, Any]:
    found = re.search(r'alertname="(\w+)"', expression)
    label = name or (found.group(1) if found else "")
    samples = [{"labels": f'{{alertname="{label}"}}', "value": 1}] if fires else []
    return {"expr": expression, "eval_time": f"{minute}m", "exp_samples": samples}


def test_each_asks_for_metrics_that_there_are(alerts: list[dict[str, Any]]) -> None:
    exposed = {metric.value.exposed for program in (GatewayMetric, RankMetric, OperatorMetric) for metric in program}
    for alert in alerts:
        named = set(re.findall(r"(?:hetero_|vllm:)\w+", alert["expr"]))
        assert named, alert
        assert named <= exposed, alert


def test_each_has_a_runbook_that_is_there(alerts: list[dict[str, Any]]) -> None:
    entries = anchors(ROOT / "docs/troubleshooting.md")
    for alert in alerts:
        page, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert (page, anchor in entries) == ("docs/troubleshooting.md", True), alert["alert"]
