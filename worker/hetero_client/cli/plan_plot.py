"""Plot of `hetero plan`: predicted speed over the share of the weights, of decoding alone.

A placement is chosen for the whole load, prompts included, so the chosen one need not lie where a curve is highest. It
needs matplotlib, the `plot` extra.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from hetero_client.errors import MissingExtraError
from hetero_placement.decision import Decision
from hetero_placement.sweep import Curve, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOT_SUFFIXES: Final = (".png", ".svg")
_COLOURS: Final = ("#1f6fb4", "#d1661f", "#3a8f4d")
_INK: Final = "#333333"


def draw_plot(sweep: Sweep, decision: Decision, *, title: str, path: Path) -> None:
    """Write the plot in the format of the path's suffix. Raises MissingExtraError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "--plot needs matplotlib, which is not installed: pip install 'heteroinference[plot]'"
        ) from error
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for curve, colour in zip(sweep.curves, _COLOURS, strict=False):
        _draw_curve(axes, curve, colour)
    _mark_options(axes, sweep, decision)
    _label(axes, sweep, title)
    figure.savefig(path, dpi=150)


def _draw_curve(axes: Axes, curve: Curve, colour: str) -> None:
    """Draw the line, dotted where memory does not suffice."""
    shares = [100 * point.share for point in curve.points]
    rates = [point.decode_tokens_per_s for point in curve.points]
    fitting = [rate if point.fits else float("nan") for rate, point in zip(rates, curve.points, strict=True)]
    axes.plot(shares, rates, color=colour, linewidth=1, linestyle=":", alpha=0.7)
    axes.plot(shares, fitting, color=colour, linewidth=2, label=curve.name)


def _mark_options(axes: Axes, sweep: Sweep, decision: Decision) -> None:
    """Mark the chosen option by a star and the other possible ones by dots."""
    for option in decision.options:
        if option.prediction is None or not option.weight_shares:
            continue
        at = (100 * sweep.share(option.weight_shares), option.prediction.decode_tokens_per_s)
        if option is decision.chosen:
            label = f"chosen for the whole load: {option.name} ({at[1]:.3g} tokens/s)"
            axes.plot(*at, marker="*", markersize=15, color="#b3202c", linestyle="none", label=label, zorder=3)
        else:
            axes.plot(*at, marker="o", markersize=5, color=_INK, linestyle="none", zorder=2)


def _label(axes: Axes, sweep: Sweep, title: str) -> None:
    axes.set_title(title, fontsize=11, color=_INK, loc="left")
    axes.set_xlabel(f"share of the weights on {sweep.side}, %")
    axes.set_ylabel("predicted decode tokens/s")
    axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
    axes.grid(visible=True, color="#dddddd", linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    _add_legend(axes, handles, labels, has_unfit=any(not p.fits for curve in sweep.curves for p in curve.points))


def _add_legend(axes: Axes, handles: list[Any], labels: list[str], *, has_unfit: bool) -> None:
    """Add the legend, with entries for what is drawn without a label."""
    from matplotlib.lines import Line2D

    handles = [*handles, Line2D([], [], marker="o", markersize=5, color=_INK, linestyle="none")]
    labels = [*labels, "other options, each at its best for the whole load"]
    if has_unfit:
        handles.append(Line2D([], [], color=_INK, linewidth=1, linestyle=":"))
        labels.append("does not fit the memory")
    axes.legend(handles, labels, fontsize=8, frameon=False)
