"""What was found: one short table for a person, and all of it as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from bench.gpu.ablations import Ablation
from bench.gpu.hetero import TENSOR_GAIN, TENSOR_SHARE, Comparison, Way
from hetero_placement.solver import ALL_PARTS, MLP_ONLY

THROUGHPUT_TARGET: Final = 0.60
"""Share of the roofline that the issue wants of the recipe."""
DECODE_TARGET: Final = 0.75
"""Share of the bandwidth limit that it wants of decoding at batch 1."""
_HEAD: Final = ("what", "tokens/s", "against", "share", "")


@dataclass(frozen=True, slots=True)
class Row:
    """One line. `met` is None where there is no target, or no figure."""

    what: str
    tokens_per_s: float = 0.0
    against: float = 0.0
    """What the figure is compared with, tokens/s; 0: nothing."""
    note: str = ""
    met: bool | None = None

    @property
    def share(self) -> float:
        return self.tokens_per_s / self.against if self.against else 0.0

    def cells(self) -> tuple[str, ...]:
        """As text, in the table's columns."""
        verdict = {None: "", True: "ok", False: "BELOW TARGET"}[self.met]
        note = ", ".join(part for part in (verdict, self.note) if part)
        return (self.what, _number(self.tokens_per_s), _number(self.against), _percent(self.share), note)


@dataclass(slots=True)
class Report:
    """Grows as sections end."""

    device: str
    """Its name, and, where it is none, that it is the host."""
    is_gpu: bool
    began: datetime
    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """Sections that could not be measured, and why."""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Nothing failed, and on a GPU every target was met."""
        return not self.failures and not (self.is_gpu and any(row.met is False for row in self.rows))

    def table(self) -> str:
        """All rows, under the device's name."""
        return "\n".join([self.device, *lines([_HEAD, *(row.cells() for row in self.rows)]), *self.failures])

    def as_json(self) -> dict[str, Any]:
        return {
            "date": self.began.isoformat(timespec="seconds"),
            "device": self.device,
            "is_gpu": self.is_gpu,
            "rows": [{**asdict(row), "share": row.share} for row in self.rows],
            "failures": self.failures,
            **self.details,
        }

    def write(self, folder: Path) -> Path:
        """As gpu-DATE.json."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"gpu-{self.began:%Y-%m-%d-%H%M}.json"
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n", encoding="utf-8")
        return path


def lines(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they need to be; the first to the left, figures to the right, notes to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    for row in rows:
        cells = [
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def ablation_rows(what: str, found: Sequence[Ablation]) -> Iterator[Row]:
    """Each variant against the one with all on, batch by batch."""
    whole: Mapping[int, float] = next((each.tokens_per_s for each in found if each.name == "all on"), {})
    for ablation in found:
        for batch, speed in ablation.tokens_per_s.items():
            yield Row(f"{what}, {ablation.name}, batch {batch}", speed, whole.get(batch, 0.0))


def comparison_rows(found: Comparison) -> Iterator[Row]:
    """Each way's measurement against its prediction, and what the issue wants to see of them."""
    what = f"{found.model} in {found.cap_bytes / 1e9:.3g} GB"
    gains = found.tensor_over_layer
    for way in found.ways:
        is_tensor = way.name in (MLP_ONLY, ALL_PARTS) and bool(way.measured)
        met = way.measured >= TENSOR_SHARE * way.predicted if is_tensor and way.chosen else None
        yield Row(f"{what}: {way.name}", way.measured, way.predicted, _way_note(way), met)
    if gains is not None:
        predicted, measured = gains
        met = measured >= TENSOR_GAIN if predicted >= TENSOR_GAIN else None
        yield Row(f"{what}: Tensor over Layer", note=f"{measured:.2f}x, predicted {predicted:.2f}x", met=met)
    if found.solver_chose_best is not None:
        yield Row(f"{what}: the solver chose the measured best", met=found.solver_chose_best)


def _way_note(way: Way) -> str:
    return ", ".join(part for part in ("chosen" if way.chosen else "", way.note) if part)


def _number(value: float) -> str:
    return f"{value:,.1f}" if value else ""


def _percent(share: float) -> str:
    return f"{share:.0%}" if share else ""
