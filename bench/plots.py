"""Pictures of results, as SVG; matplotlib comes with the development environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from bench.report import Rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

OURS: Final = "#b3202c"
THEIRS: Final = "#8a9bb0"
INK: Final = "#333333"
_LINES: Final = ("#b3202c", "#1f6fb4", "#3a8f4d", "#d1661f", "#7a4fa3", "#6b6b6b")


@dataclass(frozen=True, slots=True)
class Curve:
    """Tokens a second over what grows."""

    name: str
    points: Sequence[tuple[float, float]]


def draw_peers(rows: Rows, *, title: str, path: Path) -> None:
    """Bars, a panel a workload, the fastest on top; a line across each bar's end is from the slowest to the fastest
    round."""
    workloads = list(next(iter(rows.values())).figures)
    height = 1.2 + 0.28 * len(rows)
    figure = Figure(figsize=(13, 2 * height), layout="constrained")
    FigureCanvasSVG(figure)
    panels = figure.subplots(2, 2, squeeze=False).ravel()
    for axes, workload in zip(panels, workloads, strict=False):
        _draw_bars(axes, rows, workload)
    for axes in panels[len(workloads) :]:
        axes.set_visible(False)
    figure.suptitle(title, color=INK)
    figure.savefig(path)


def draw_growth(panels: Mapping[str, Sequence[Curve]], *, title: str, path: Path) -> None:
    """Curves, a panel each of what grows, both axes logarithmic."""
    figure = Figure(figsize=(6 * len(panels), 4), layout="constrained")
    FigureCanvasSVG(figure)
    for axes, (what, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        for curve, colour in zip(curves, _LINES, strict=False):
            axes.plot(*zip(*curve.points, strict=True), marker="o", markersize=3, color=colour, label=curve.name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted({x for curve in curves for x, _ in curve.points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel(what)
        axes.set_ylabel("tokens/s")
        axes.legend(fontsize=8, frameon=False)
        _plain(axes)
    figure.suptitle(title, color=INK)
    figure.savefig(path)


def _draw_bars(axes: Axes, rows: Rows, workload: str) -> None:
    names = sorted(rows, key=lambda name: rows[name].figures[workload].tokens_per_s)
    figures = [rows[name].figures[workload] for name in names]
    colours = [OURS if rows[name].ours else THEIRS for name in names]
    middle = [figure.tokens_per_s for figure in figures]
    spread = [[f.tokens_per_s - f.low for f in figures], [f.high - f.tokens_per_s for f in figures]]
    bars = axes.barh(names, middle, color=colours, xerr=spread, error_kw={"ecolor": INK, "elinewidth": 1})
    axes.bar_label(bars, [f"{f.tokens_per_s:.0f}  ({f.share_of_limit:.0%})" for f in figures], padding=6, fontsize=8)
    axes.set_xlim(0, 1.25 * max(figure.high for figure in figures))
    axes.set_title(f"{workload}: tokens/s (share of the limit)", loc="left", fontsize=10, color=INK)
    _plain(axes)


def _plain(axes: Axes) -> None:
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
