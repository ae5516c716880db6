"""Views of `hetero plan`: tables of the options and of what each rank gets, and a plot of speeds.

The plot shows predicted speed over the share of the weights, of decoding alone. A placement is chosen for the whole
load, prompts included, so the chosen one need not lie where a curve is highest. It needs matplotlib, the `plot` extra.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from hetero_api.sharding import LayerShard, RankShard
from hetero_api.spec_pools import PoolType
from hetero_client.cli.console import table_of
from hetero_client.errors import MissingExtraError
from hetero_placement.decision import Decision, Option
from hetero_placement.hardware import Hardware
from hetero_placement.memory_model import MemoryModel
from hetero_placement.sweep import Curve, Sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

GB: Final = 1e9
PLOT_SUFFIXES: Final = (".png", ".svg")
_COLOURS: Final = ("#1f6fb4", "#d1661f", "#3a8f4d")
_INK: Final = "#333333"


def options_table(decision: Decision, hardware: Hardware) -> Table:
    """Return a table with a row for each option, the chosen one marked."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    kinds = [kind for kind in (PoolType.GPU, PoolType.CPU) if any(rank.kind == kind for rank in hardware.ranks)]
    table.add_column("")
    table.add_column("placement", no_wrap=True)
    for name in ("decode tok/s", "prefill tok/s", "workload s", *(f"on {kind.value}" for kind in kinds)):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("why not")
    for option in decision.options:
        style = "bold" if option is decision.chosen else None
        mark = "*" if option is decision.chosen else ""
        table.add_row(
            mark, option.name, *_figures(option), *_shares(option, hardware, kinds), option.why_not, style=style
        )
    return table


def ranks_table(decision: Decision, hardware: Hardware, memory: MemoryModel) -> Table:
    """Return a table with a row for each rank of the chosen plan."""
    numbers = ("layers", "KV heads", "MLP", "vocab rows", "weights GB", "needs GB", "has GB")
    table = table_of("rank", "pool", *numbers, right=("rank", *numbers))
    for number, (shard, rank) in enumerate(zip(decision.plan.ranks, hardware.ranks, strict=True)):
        need = memory.need(number, shard)
        table.add_row(
            str(number),
            rank.pool,
            str(sum(not layer.is_empty for layer in shard.layers)),
            str(max(layer.kv_heads.size for layer in shard.layers)),
            _mlp(shard),
            _vocabulary(shard),
            f"{need.weights / GB:.2f}",
            f"{need.total / GB:.2f}",
            f"{rank.memory_bytes / GB:.2f}",
        )
    return table


def cache_line(decision: Decision, memory: MemoryModel, *, block_size: int) -> str:
    """Return a line with the capacity of the chosen plan's KV cache."""
    blocks = memory.kv_blocks(decision.plan) - 1
    return f"KV cache: at least {blocks} blocks of {block_size} tokens"


def decision_json(decision: Decision, hardware: Hardware, memory: MemoryModel) -> dict[str, Any]:
    """Return the whole decision as JSON data, in seconds, bytes and tokens."""
    return {
        "kvBlocks": memory.kv_blocks(decision.plan) - 1,
        "chosen": decision.chosen.name,
        "reason": decision.reason,
        "options": [_option_json(option, is_chosen=option is decision.chosen) for option in decision.options],
        "ranks": [
            {
                "rank": number,
                "pool": hardware.ranks[number].pool,
                "kind": hardware.ranks[number].kind.value,
                "weightShare": decision.chosen.weight_shares[number],
                "memoryBytes": hardware.ranks[number].memory_bytes,
                "neededBytes": asdict(memory.need(number, shard)),
                "layers": [_layer_json(layer) for layer in shard.layers],
                "embeddingRows": list(shard.embedding_rows),
                "headRows": list(shard.head_rows),
            }
            for number, shard in enumerate(decision.plan.ranks)
        ],
    }


def _option_json(option: Option, *, is_chosen: bool) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": option.name,
        "mode": str(option.mode) if option.mode is not None else None,
        "chosen": is_chosen,
        "whyNot": option.why_not or None,
        "weightShares": list(option.weight_shares) or None,
    }
    if option.prediction is not None:
        data |= {"decodeTokensPerSecond": option.prediction.decode_tokens_per_s}
        if option.plan is not None:
            data |= {
                "prefillTokensPerSecond": option.prediction.prefill_tokens_per_s,
                "workloadSeconds": option.prediction.workload_s,
            }
    return data


def _layer_json(layer: LayerShard) -> dict[str, list[int]]:
    return {"kvHeads": list(layer.kv_heads), "mlpColumns": list(layer.mlp_columns), "experts": list(layer.experts)}


def _figures(option: Option) -> list[str]:
    if option.prediction is None:
        return ["no fit", "", ""] if option.mode is not None else ["", "", ""]
    decode = _rate(option.prediction.decode_tokens_per_s)
    if option.plan is None:
        return [decode, "", ""]
    return [decode, _rate(option.prediction.prefill_tokens_per_s), f"{option.prediction.workload_s:.3g}"]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.1f}"


def _shares(option: Option, hardware: Hardware, kinds: Sequence[PoolType]) -> list[str]:
    if not option.weight_shares:
        return [""] * len(kinds)
    return [
        f"{sum(s for s, rank in zip(option.weight_shares, hardware.ranks, strict=True) if rank.kind == kind):.0%}"
        for kind in kinds
    ]


def _mlp(shard: RankShard) -> str:
    """Return the largest number of columns in a layer, or of experts, or both where layers differ."""
    columns = max(layer.mlp_columns.size for layer in shard.layers)
    experts = max(layer.experts.size for layer in shard.layers)
    parts = [f"{columns} columns"] if columns or not experts else []
    return ", ".join(parts + ([f"{experts} experts"] if experts else []))


def _vocabulary(shard: RankShard) -> str:
    if shard.embedding_rows.size == shard.head_rows.size:
        return str(shard.head_rows.size)
    return f"{shard.embedding_rows.size} in, {shard.head_rows.size} out"


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
