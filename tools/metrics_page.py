"""Writes docs/metrics.md: every metric of every program, from `hetero_api.metrics`."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Final

from hetero_api.metrics import GatewayMetric, MetricSpec, OperatorMetric, RankMetric

PAGE: Final = Path("docs/metrics.md")

_INTRO: Final = """\
<!-- Generated from protos/hetero_api/metrics.py by `make docs`. Do not edit. -->
# Metrics

Three programs are scraped, each at `/metrics`:

| program | port | by |
|---|---|---|
| gateway | the HTTP door (`spec.gateway.service.httpPort`), and the port of its probes | the resource's PodMonitor |
| rank pod | the port of its probes | the same |
| operator | 8080, behind the Service `NAME-operator-metrics` | the chart's ServiceMonitor |

A gateway that asks for keys asks for one of role `metrics` here ([front-door.md](front-door.md#keys)). Names that
begin with `vllm:` mean what they mean in vLLM, so dashboards made for it work, and so does the default configuration
of the Gateway API inference extension. Labels hold ranks, pools, phases and outcomes, and nothing that a caller sent.

Some questions, as queries:

```text
# tokens a second that a group generates
sum by (model_name) (rate(vllm:generation_tokens_total[1m]))
# share of decode time that each rank waits for others, or moves bytes
sum by (instance, rank) (rate(hetero_rank_step_seconds_total{phase="decode",part="exchange"}[1m]))
  / sum by (instance, rank) (rate(hetero_rank_step_seconds_total{phase="decode"}[1m]))
# share of its memory bandwidth at which each rank reads weights
rate(hetero_rank_read_bytes_total[1m])
  / on (instance, rank) rate(hetero_rank_step_seconds_total{phase="decode",part="compute"}[1m])
  / on (instance, rank) hetero_rank_memory_bandwidth_bytes_per_second
```
"""


def generate_metrics_page(root: Path) -> list[Path]:
    """Write the page under `root`; return what was written, relative to `root`."""
    (root / PAGE).parent.mkdir(parents=True, exist_ok=True)
    (root / PAGE).write_text(render_metrics_page(), encoding="utf-8")
    return [PAGE]


def render_metrics_page() -> str:
    """Return the page as Markdown, ending in a newline."""
    sections = (("Gateway", GatewayMetric), ("Rank pod", RankMetric), ("Operator", OperatorMetric))
    blocks = [_INTRO.rstrip("\n"), *(block for title, metrics in sections for block in _section(title, metrics))]
    return "\n\n".join(blocks) + "\n"


def _section(title: str, metrics: type[Enum]) -> Iterator[str]:
    yield f"## {title}"
    rows = ["| Metric | Type | Labels | Meaning |", "|---|---|---|---|"]
    yield "\n".join([*rows, *(_row(metric.value) for metric in metrics)])


def _row(metric: MetricSpec) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.exposed}` | {metric.type.value} | {labels} | {metric.text} |"
