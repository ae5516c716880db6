"""The course of our figures: bench/results/history.jsonl has one line a run of `make bench-peers`, the oldest first."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.home import RESULTS
from bench.report import Rows
from bench.targets import Verdict, ratios

PATH = RESULTS / "history.jsonl"


def line(about: Mapping[str, Any], model: str, rows: Rows, found: Sequence[Verdict]) -> dict[str, Any]:
    """What is kept of a run: when, where, of which revision, our tokens/s and our ratios to the best peers."""
    return {
        "date": about["date"],
        "revision": about["revision"],
        "cpu": about["machine"]["cpu"],
        "model": model,
        "tokens_per_s": {
            name: {workload: round(figure.tokens_per_s, 1) for workload, figure in row.figures.items()}
            for name, row in rows.items()
            if row.ours
        },
        "ratios": ratios(found),
    }


def append(entry: Mapping[str, Any], path: Path = PATH) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(entry) + "\n")
