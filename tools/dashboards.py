"""Writes the chart's Grafana dashboards: what serves, its ranks and their memory, and the operator.

Panels are data here; `grafana-foundation-sdk` makes JSON of them. Tests run every expression against a real Prometheus
(tests/cluster/test_monitoring.py). A panel that rightly shows nothing at times says when, in `empty`: without that
its expressions must return data from a group that serves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement, SortOrder, TooltipDisplayMode
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableOption, VariableRefresh

FOLDER: Final = Path("charts/heteroinference/files/dashboards")
_SOURCE: Final = DataSourceRef(type_val="prometheus", uid="${datasource}")
_ALL: Final = ".*"
_S: Final = 'namespace=~"$namespace"'
_R: Final = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression, and the legend of its series."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of lines over time. `empty` says when it rightly shows nothing; "": never while a group serves."""

    title: str
    unit: str
    queries: Sequence[Query]
    empty: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard. `namespaces_of` is the metric whose namespaces can be chosen."""

    name: str
    title: str
    namespaces_of: str
    panels: Sequence[Panel]


def _quantiles(metric: str, *quantiles: float) -> list[Query]:
    return [
        Query(f"histogram_quantile({q:g}, sum by (le) (rate({metric}_bucket{{{_S}}}{_R})))", f"p{100 * q:g}")
        for q in quantiles
    ]


def _rate(metric: str, by: str) -> Query:
    labels = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return Query(f"sum by ({by}) (rate({metric}{{{_S}}}{_R}))", labels)


def _value(metric: str, by: str) -> Query:
    labels = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return Query(f"sum by ({by}) ({metric}{{{_S}}})", labels)


def _a_step(phase: str, part: str) -> Query:
    of = f'{_S},phase="{phase}"'
    seconds = f'sum by (instance, rank) (rate(hetero_rank_step_seconds_total{{{of},part="{part}"}}{_R}))'
    steps = f"sum by (instance, rank) (rate(hetero_rank_phase_steps_total{{{of}}}{_R}))"
    return Query(f"{seconds} / ({steps} > 0)", f"rank {{{{rank}}}} {part}")


_READ: Final = (
    f"sum by (instance, rank) (rate(hetero_rank_read_bytes_total{{{_S}}}{_R})) / (sum by (instance, rank) "
    f'(rate(hetero_rank_step_seconds_total{{{_S},phase="decode",part="compute"}}{_R})) > 0)'
)
_LIMIT: Final = f"sum by (instance, rank) (hetero_rank_memory_bandwidth_bytes_per_second{{{_S}}})"

SERVING: Final = Board(
    "serving",
    "HeteroInference: serving",
    "hetero_ready",
    (
        Panel("Serving", "none", [_value("hetero_ready", "instance")]),
        Panel(
            "Requests",
            "none",
            [
                Query(f"sum by (model_name) (vllm:num_requests_running{{{_S}}})", "{{model_name}} running"),
                Query(f"sum by (model_name) (vllm:num_requests_waiting{{{_S}}})", "{{model_name}} waiting"),
                Query(f"sum(hetero_paused_requests{{{_S}}})", "paused"),
            ],
        ),
        Panel(
            "Tokens a second",
            "none",
            [
                Query(
                    f"sum by (model_name) (rate(vllm:generation_tokens_total{{{_S}}}{_R}))", "{{model_name}} generated"
                ),
                Query(f"sum by (model_name) (rate(vllm:prompt_tokens_total{{{_S}}}{_R}))", "{{model_name}} prompt"),
            ],
        ),
        Panel("Time to first token", "s", _quantiles("vllm:time_to_first_token_seconds", 0.5, 0.95, 0.99)),
        Panel("Between tokens", "s", _quantiles("vllm:inter_token_latency_seconds", 0.5, 0.95, 0.99)),
        Panel("Whole request", "s", _quantiles("vllm:e2e_request_latency_seconds", 0.5, 0.95, 0.99)),
        Panel(
            "Queue, prefill, decode (mean)",
            "s",
            [
                Query(
                    f"sum(rate(vllm:request_{phase}_time_seconds_sum{{{_S}}}{_R})) / "
                    f"(sum(rate(vllm:request_{phase}_time_seconds_count{{{_S}}}{_R})) > 0)",
                    phase,
                )
                for phase in ("queue", "prefill", "decode")
            ],
        ),
        Panel("KV cache in use", "percentunit", [_value("vllm:kv_cache_usage_perc", "model_name, instance")]),
        Panel(
            "Prompt tokens found in the prefix cache",
            "percentunit",
            [
                Query(
                    f"sum by (model_name) (rate(vllm:prefix_cache_hits_total{{{_S}}}{_R})) / "
                    f"(sum by (model_name) (rate(vllm:prefix_cache_queries_total{{{_S}}}{_R})) > 0)",
                    "{{model_name}}",
                )
            ],
        ),
        Panel(
            "KV blocks",
            "none",
            [
                _value("hetero_num_blocks", "instance"),
                Query(f"sum by (instance) (hetero_free_blocks{{{_S}}})", "{{instance}} free"),
                Query(f"sum by (instance) (hetero_cached_blocks{{{_S}}})", "{{instance}} free, and can be hit"),
            ],
        ),
        Panel("Preemptions a second", "none", [_rate("vllm:num_preemptions_total", "model_name")]),
        Panel("Completions a second", "none", [_rate("vllm:request_success_total", "finished_reason")]),
        Panel(
            "Calls over gRPC a second",
            "none",
            [_rate("hetero_requests_total", "outcome")],
            empty="Empty before the first call.",
        ),
        Panel(
            "Calls over HTTP a second",
            "none",
            [_rate("hetero_http_calls_total", "outcome")],
            empty="Empty before the first call.",
        ),
        Panel("Length of prompts", "none", _quantiles("vllm:request_prompt_tokens", 0.5, 0.95)),
        Panel("Length of completions", "none", _quantiles("vllm:request_generation_tokens", 0.5, 0.95)),
        Panel(
            "Groups lost and recovered",
            "none",
            [
                Query(f"sum by (instance) (hetero_recoveries_total{{{_S}}})", "{{instance}} recovered"),
                Query(f"sum by (instance) (hetero_epoch{{{_S}}})", "{{instance}} epoch"),
            ],
        ),
    ),
)

RANKS: Final = Board(
    "ranks",
    "HeteroInference: ranks and NUMA",
    "hetero_ready",
    (
        Panel("Ranks that have joined", "none", [_value("hetero_rank_info", "instance, rank, pool, device, numa")]),
        Panel("Step, as the gateway sees it", "s", _quantiles("hetero_step_seconds", 0.5, 0.99)),
        Panel(
            "A decode step: compute and exchange", "s", [_a_step("decode", "compute"), _a_step("decode", "exchange")]
        ),
        Panel(
            "A step with prompts: compute and exchange",
            "s",
            [_a_step("prefill", "compute"), _a_step("prefill", "exchange")],
        ),
        Panel(
            "Share of decode time in the exchange",
            "percentunit",
            [
                Query(
                    "sum by (instance, rank) "
                    f'(rate(hetero_rank_step_seconds_total{{{_S},phase="decode",part="exchange"}}{_R})) / '
                    f'(sum by (instance, rank) (rate(hetero_rank_step_seconds_total{{{_S},phase="decode"}}{_R})) > 0)',
                    "rank {{rank}}",
                )
            ],
        ),
        Panel("Weights read", "Bps", [Query(_READ, "rank {{rank}}"), Query(_LIMIT, "rank {{rank}}: limit")]),
        Panel(
            "Weights read, of the measured bandwidth", "percentunit", [Query(f"{_READ} / {_LIMIT}", "rank {{rank}}")]
        ),
        Panel("Memory of a rank", "bytes", [_value("hetero_rank_memory_bytes", "instance, rank, kind")]),
        Panel(
            "Memory on its own NUMA nodes",
            "percentunit",
            [_value("hetero_rank_local_memory_ratio", "instance, rank")],
            empty="Empty for ranks that are not bound to NUMA nodes.",
        ),
        Panel(
            "Tokens a second, predicted and measured",
            "none",
            [
                _value("hetero_placement_predicted_tokens_per_second", "instance"),
                Query(
                    f"sum by (instance) (hetero_placement_measured_tokens_per_second{{{_S}}})", "{{instance}} measured"
                ),
            ],
        ),
        Panel(
            "Measured over predicted time of decode steps",
            "none",
            [_value("hetero_placement_step_time_ratio", "instance")],
        ),
        Panel(
            "All-reduce, measured as the group formed",
            "s",
            [_value("hetero_exchange_seconds", "instance, among, bytes")],
            empty="Empty for groups of one rank.",
        ),
        Panel("Exchange", "none", [_value("hetero_exchange_info", "instance, kind")]),
        Panel("Pairs of experts that changed places", "none", [_value("hetero_expert_swaps_total", "instance")]),
        Panel("Steps a second", "none", [_rate("hetero_steps_total", "instance")]),
        Panel(
            "Rank processes that serve",
            "none",
            [_value("hetero_rank_serving", "instance, local_rank")],
            empty="Empty outside of clusters: rank pods have these metrics.",
        ),
        Panel(
            "Restarts of rank processes",
            "none",
            [_value("hetero_rank_restarts_total", "instance, local_rank")],
            empty="Empty outside of clusters: rank pods have these metrics.",
        ),
    ),
)

OPERATOR: Final = Board(
    "operator",
    "HeteroInference: operator",
    "hetero_operator_leader",
    (
        Panel("Leads", "none", [_value("hetero_operator_leader", "instance")]),
        Panel(
            "Resources",
            "none",
            [
                Query(f"max(hetero_operator_resources{{{_S}}})", "known"),
                Query(f"max(hetero_operator_resources_reconciled{{{_S}}})", "looked at"),
            ],
        ),
        Panel("Looks a second", "none", [_rate("hetero_operator_reconciles_total", "result")]),
        Panel(
            "A look",
            "s",
            _quantiles("hetero_operator_reconcile_seconds", 0.5, 0.99),
            empty="Empty while no resource is looked at.",
        ),
        Panel(
            "Looks that failed, a second",
            "none",
            [_rate("hetero_operator_reconcile_errors_total", "reason")],
            empty="Empty while nothing has failed.",
        ),
        Panel(
            "Queue",
            "none",
            [
                Query(f"sum(hetero_operator_queue_depth{{{_S}}})", "resources that wait"),
                Query(f"sum(rate(hetero_operator_queue_retries_total{{{_S}}}{_R}))", "retries a second"),
            ],
        ),
        Panel(
            "Wait in the queue",
            "s",
            _quantiles("hetero_operator_queue_seconds", 0.5, 0.99),
            empty="Empty while no resource is looked at.",
        ),
        Panel("Longest wait now", "s", [Query(f"max(hetero_operator_queue_oldest_seconds{{{_S}}})", "oldest")]),
        Panel(
            "Calls of the Kubernetes API a second", "none", [_rate("hetero_operator_api_requests_total", "verb, code")]
        ),
        Panel(
            "Watches started again, a second",
            "none",
            [_rate("hetero_operator_watch_restarts_total", "kind, reason")],
            empty="Empty while no watch has ended.",
        ),
        Panel("Statuses written a second", "none", [_rate("hetero_operator_status_writes_total", "instance")]),
        Panel("Objects in memory", "none", [_value("hetero_operator_cached_objects", "instance, kind")]),
    ),
)

BOARDS: Final = (SERVING, RANKS, OPERATOR)


def generate_dashboards(root: Path) -> list[Path]:
    """Write the dashboards under `root`; return what was written, relative to `root`."""
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    written = []
    for board in BOARDS:
        written.append(FOLDER / f"{board.name}.json")
        (root / written[-1]).write_text(render_board(board), encoding="utf-8")
    return written


def render_board(board: Board) -> str:
    """Return a dashboard's JSON, ending in a newline."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(f"heteroinference-{board.name}")
        .tags(["heteroinference"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("namespace")
            .label("Namespace")
            .datasource(_SOURCE)
            .query(f"label_values({board.namespaces_of}, namespace)")
            .include_all(True)
            .all_value(_ALL)
            .current(VariableOption(selected=True, text="All", value="$__all"))
            .refresh(VariableRefresh.ON_DASHBOARD_LOAD)
        )
    )
    for panel in board.panels:
        built = built.with_panel(_panel(panel))
    return json.dumps(built.build(), cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _panel(panel: Panel) -> timeseries.Panel:
    made = timeseries.Panel().title(panel.title).unit(panel.unit).datasource(_SOURCE).span(8).height(7).min(0)
    legend = common.VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
    made = made.legend(legend.show_legend(True).calcs([]))
    made = made.tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    if panel.empty:
        made = made.description(panel.empty)
    for query in panel.queries:
        made = made.with_target(prometheus.Dataquery().expr(query.expr).legend_format(query.legend))
    return made
