"""Dashboards and alerts against a real Prometheus, which scrapes a served group under load, a rank pod's health and the
operator: every expression returns data, or its panel says why not, and alerts fire and resolve."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from hetero_api.contract import KIND
from hetero_api.host.restarts import RestartPauses
from hetero_api.probe_server import ProbeServer
from hetero_api.supervision.child import Command
from hetero_api.supervision.service import Service
from hetero_client.errors import ClientError
from hetero_client.messages import SamplingParams
from hetero_worker.pod.health import PodHealth
from tests.cluster.conftest import ROOT
from tests.support.chart_rights import operators_of
from tests.support.helm import PROMETHEUS, Helm, only
from tests.support.kube.client import Client
from tests.support.kube.cluster import Cluster
from tests.support.kube.polling import poll
from tests.support.kube.tools import find_helm
from tests.support.local_group import LocalGroupProcess, write_manifest
from tests.support.operator_process import OperatorProcess
from tests.support.prometheus import Prometheus
from tests.support.tiny_models import save_tiny_model
from tools.dashboards import BOARDS

WINDOW = "8s"
"""What Grafana's $__rate_interval becomes."""
DATA_TIMEOUT_S = 40.0
ALERT_TIMEOUT_S = 30.0
RELEASE = "hetero"
SERVICE = f"{RELEASE}-heteroinference-operator-metrics"
LIVE = {"HeteroInferenceOperatorDown", "HeteroInferenceGroupNotReady", "HeteroInferenceRankMissing"}


@pytest.fixture
def operator(cluster: Cluster, client: Client, namespace: str, tmp_path: Path) -> Iterator[OperatorProcess]:
    """One that looks after a resource."""
    with operators_of(client, namespace) as group:
        user = cluster.user(f"operator-{namespace}", groups=[group])
        process = OperatorProcess(
            cluster.kubeconfig(user), tmp_path / "operator", namespaces=namespace, lease_namespace=namespace
        )
        with process:
            process.wait_leading()
            client.apply_file(ROOT / "examples/smollm2-cpu.yaml", namespace=namespace)
            client.wait_for(KIND, "smollm2", namespace, until=lambda found: "conditions" in found.get("status", {}))
            yield process


@pytest.fixture
def group(tmp_path: Path) -> Iterator[LocalGroupProcess]:
    """Two ranks of a tiny model."""
    (tmp_path / "model").mkdir()
    model = save_tiny_model(tmp_path / "model", "llama")
    manifest = write_manifest(tmp_path, model=model, ranks=2, max_model_len=256, recovery={"maxRestarts": 1000})
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group:
        yield group


@pytest.fixture
def pod() -> Iterator[str]:
    """Address of a rank pod's probes and metrics."""
    rank = Service(Command("0", ()), RestartPauses(first_s=1, longest_s=60))
    registry = PodHealth([rank], turned_s=time.monotonic).registry
    server = ProbeServer.start(host="127.0.0.1", port=0, probes={}, registry=registry)
    yield f"127.0.0.1:{server.port}"
    server.stop()


def rules(folder: Path) -> list[dict[str, Any]]:
    """The chart's alerts, which wait for nothing."""
    helm = Helm(find_helm(4), folder, major=4)
    rule = only(
        helm.template({"metrics": {"prometheusRule": {"enabled": True}}}, release=RELEASE, apis=[PROMETHEUS]),
        "PrometheusRule",
    )
    return [{**alert, "for": "0s"} for group in rule["spec"]["groups"] for alert in group["rules"]]


@contextmanager
def load(group: LocalGroupProcess) -> Iterator[None]:
    """Calls over both doors, one after another, with a common prefix."""
    over = threading.Event()
    prompt = "a prompt that every call begins with, so that its blocks are found in the prefix cache: "

    def over_grpc() -> None:
        with group.client() as client:
            for number in range(1_000_000):
                if over.is_set():
                    return
                try:
                    client.generate_text(f"{prompt}{number}", sampling=SamplingParams(max_tokens=24, ignore_eos=True))
                except ClientError:
                    over.wait(0.1)

    def over_http() -> None:
        with httpx.Client(base_url=f"http://{group.record.http}", trust_env=False, timeout=60) as http:
            while not over.is_set():
                http.post("/v1/completions", json={"model": "test", "prompt": prompt, "max_tokens": 8})

    threads = [threading.Thread(target=target) for target in (over_grpc, over_grpc, over_http)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process, and let it go on afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def in_force(expression: str) -> str:
    """The expression as Grafana sends it for all namespaces."""
    return expression.replace("$namespace", ".*").replace("$__rate_interval", WINDOW)


def has_data(prometheus: Prometheus, expression: str) -> bool:
    """Whether there is a sample, and all samples are numbers."""
    values = [float(sample["value"][1]) for sample in prometheus.query(in_force(expression))]
    return bool(values) and not any(map(math.isnan, values))


def test_every_expression_has_data_and_alerts_fire_and_resolve(
    operator: OperatorProcess, group: LocalGroupProcess, pod: str, tmp_path: Path
) -> None:
    alerts = rules(tmp_path / "helm")
    seen = {"namespace": "hetero-system", "service": SERVICE}
    targets = {
        "group": (group.record.http, {"namespace": "models", "pod": "test-gateway"}),
        "pod": (pod, {"namespace": "models", "pod": "test-cpu-0"}),
        "operator": (f"127.0.0.1:{operator.metrics_port}", seen),
    }
    with Prometheus(tmp_path / "prometheus", targets, alerts) as prometheus, load(group):
        queries = [
            (board.name, panel.title, query.expr)
            for board in BOARDS
            for panel in board.panels
            for query in panel.queries
            if not panel.empty
        ]
        wanting: list[Any] = queries

        def all_have_data() -> bool:
            nonlocal wanting
            wanting = [each for each in wanting if not has_data(prometheus, each[2])]
            return not wanting

        poll(all_have_data, timeout_s=DATA_TIMEOUT_S, describe=lambda: "\n".join(map(str, wanting)))
        for board in BOARDS:
            for panel in board.panels:
                for query in panel.queries:
                    prometheus.query(in_force(query.expr))
        assert LIVE.isdisjoint(prometheus.firing())
        for name in {name for alert in alerts for name in re.findall(r"(?:hetero_|vllm:)\w+", alert["expr"])}:
            families = prometheus.query(f'{{__name__="{name}"}}')
            assert families or name in MAY_BE_ABSENT, name

        with stopped(group.process.pid):  # so that nothing starts the rank again before it has been seen to be missing
            os.kill(group.record.processes["cpu-1"], signal.SIGKILL)
            poll(lambda: has_fired(prometheus, "HeteroInferenceGroupNotReady"), timeout_s=ALERT_TIMEOUT_S)
            poll(lambda: has_fired(prometheus, "HeteroInferenceRankMissing"), timeout_s=ALERT_TIMEOUT_S)
        operator.stop()
        poll(lambda: "HeteroInferenceOperatorDown" in prometheus.firing(), timeout_s=ALERT_TIMEOUT_S)
        operator.start()
        poll(lambda: LIVE.isdisjoint(prometheus.firing()), timeout_s=ALERT_TIMEOUT_S)


MAY_BE_ABSENT = {
    "hetero_operator_reconcile_errors_total",  # while nothing has failed
    "hetero_operator_watch_restarts_total",  # while no watch has ended
    "hetero_rank_local_memory_ratio",  # of ranks that are not bound
}


def has_fired(prometheus: Prometheus, name: str) -> bool:
    """Whether an alert fires, or did within the last minute."""
    return bool(prometheus.query(f'count_over_time(ALERTS{{alertname="{name}",alertstate="firing"}}[1m])'))
