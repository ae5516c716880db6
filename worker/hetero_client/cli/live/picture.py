"""Frames of `hetero top`: a group's state, its ranks with their parts of the model, and events, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hetero_api.cpu_list import format_cpu_list
from hetero_api.group_state import GroupState
from hetero_api.sharding import UnitRange
from hetero_client.admin import GroupTopology, RankView
from hetero_client.cli.console import table_of
from hetero_client.cli.live.history import History, StepPace
from hetero_client.cli.tables import MB, device_lines, prediction_line, topology_line

WIDE: Final = 140
"""Columns of a terminal that hold all of the table."""
_CELLS, _NARROW_CELLS = 10, 5
"""Cells of a bar on a wide terminal and on a narrow one."""
_EXCHANGE: Final = "exch"
_NUMBERS: Final = ("rank", "decode", "prefill", _EXCHANGE, "memory", "MB")
_WIDE_ONLY: Final = ("layers", f"prefill {_EXCHANGE}", "memory", "MB")
"""Columns that narrow terminals lack."""
_NONE: Final = "-"
_FULL, _EMPTY = "█", "·"
_STATE_STYLES: Final = {GroupState.READY: "bold green", GroupState.ABORTED: "bold red", GroupState.ASLEEP: "blue"}


def frame(history: History, *, width: int) -> RenderableType:
    """Return the picture of the newest look for a terminal of that width."""
    topology = history.last.topology
    parts: list[RenderableType] = [
        Text(topology_line(topology), style=_STATE_STYLES.get(topology.state, "bold yellow")),
        Text(load_line(history)),
        Text(cache_line(history)),
        ranks_table(history, width=width),
        *(Text(line, style="dim") for line in device_lines(topology)),
    ]
    if topology.placement is not None:
        parts.append(Text(prediction_line(topology.placement)))
    parts += [Text(event, style="yellow") for event in history.events]
    return Group(*parts)


def load_line(history: History) -> str:
    """Return tokens a second and the queue in a line."""
    rates, stats, topology = history.rates(), history.last.stats, history.last.topology
    words = [f"{rates.generated:,.1f} tokens/s"]
    if rates.prompt is not None and rates.steps is not None:
        words += [f"prompts {rates.prompt:,.1f} tokens/s", f"{rates.steps:,.1f} steps/s"]
    words.append(f"{stats.running_requests} running, {stats.waiting_requests} waiting")
    if topology.paused_requests:
        words.append(f"{topology.paused_requests} paused")
    if stats.preemptions:
        words.append(f"{stats.preemptions} preempted")
    if topology.stalled_s >= 1:
        words.append(f"a step takes {topology.stalled_s:.0f} s already")
    return " · ".join(words)


def cache_line(history: History) -> str:
    """Return the use of the KV cache in a line."""
    stats = history.last.stats
    share = stats.used_blocks / stats.num_blocks if stats.num_blocks else 0.0
    asked = stats.prompt_tokens + stats.cached_tokens
    hits = f" · {stats.cached_tokens / asked:.0%} of prompt tokens found there" if asked else ""
    bar = bar_of(UnitRange(0, stats.used_blocks), stats.num_blocks, cells=_CELLS)
    counts = f"{stats.used_blocks} of {stats.num_blocks} blocks used, {stats.cached_blocks} cached"
    return f"KV cache {bar} {share:.0%}: {counts}{hits}"


def ranks_table(history: History, *, width: int) -> Table:
    """Return a table of the ranks: where they are, what they hold, and the times of their steps.

    A step's time is followed by the share that the exchange has of it. Narrow terminals get shorter bars without
    numbers, and fewer columns.
    """
    is_wide = width >= WIDE
    dropped = () if is_wide else _WIDE_ONLY
    rows = [_row(history, index, is_wide=is_wide) for index in range(len(history.last.topology.ranks))]
    names = [name for name in (rows[0] if rows else ()) if name not in dropped]
    table = table_of(*(_EXCHANGE if name.endswith(_EXCHANGE) else name for name in names), right=_NUMBERS)
    for row in rows:
        table.add_row(*(row[name] for name in names))
    return table


def _row(history: History, index: int, *, is_wide: bool) -> dict[str, str]:
    """Return a rank's cells by column, in order."""
    topology = history.last.topology
    rank, decode, prefill = topology.ranks[index], history.decode_pace(index), history.prefill_pace(index)
    return {
        "rank": f"{rank.rank}" if rank.joined else f"{rank.rank} gone",
        "node": format_cpu_list(rank.numa_nodes) or _NONE,
        "cores": format_cpu_list(rank.cores) or _NONE,
        **held(rank, topology, is_wide=is_wide),
        **_times("decode", decode),
        **_times("prefill", prefill),
        "memory": _memory_share(rank, decode),
        "MB": f"{(rank.weight_bytes + rank.kv_bytes) / MB:.0f}",
    }


def held(rank: RankView, topology: GroupTopology, *, is_wide: bool) -> dict[str, str]:
    """Return bars of the layers, KV heads, MLP columns or experts, and vocabulary rows that a rank holds, by name."""
    ranks = topology.ranks
    mlps = ("MLP", rank.mlp_columns, [each.mlp_columns for each in ranks])
    if any(each.experts is not None and each.experts.size for each in ranks):
        mlps = ("experts", rank.experts, [each.experts for each in ranks])
    parts = (
        ("layers", rank.stage, [each.stage for each in ranks]),
        ("KV heads", rank.kv_heads, [each.kv_heads for each in ranks]),
        mlps,
        ("vocab", rank.head_rows, [each.head_rows for each in ranks]),
    )
    return {name: _bar(own, everyones, is_wide=is_wide, layered=rank.layered) for name, own, everyones in parts}


def _bar(part: UnitRange | None, everyones: Iterable[UnitRange | None], *, is_wide: bool, layered: bool) -> str:
    if part is None:
        return "by layer" if layered else _NONE
    total = max((each.end for each in everyones if each is not None), default=0)
    bar = bar_of(part, total, cells=_CELLS if is_wide else _NARROW_CELLS)
    return f"{bar} {part.size}" if is_wide else bar


def bar_of(part: UnitRange, total: int, *, cells: int) -> str:
    """Return a bar that is full where the part lies in the total. A part that is not empty fills a cell at least."""
    if not total or not part.size:
        return _EMPTY * cells
    begin = min(part.begin * cells // total, cells - 1)
    end = min(cells, max(begin + 1, round(part.end * cells / total)))
    return _EMPTY * begin + _FULL * (end - begin) + _EMPTY * (cells - end)


def _times(name: str, pace: StepPace) -> dict[str, str]:
    """Return the time of a step and the share of the exchange, by column."""
    time, share = (f"{1e3 * pace.step_s:.4g} ms", f"{pace.exchange_share:.0%}") if pace.steps else (_NONE, _NONE)
    return {name: time, f"{name} {_EXCHANGE}": share}


def _memory_share(rank: RankView, decode: StepPace) -> str:
    """Return the share of the measured memory bandwidth that decode steps reach while they compute."""
    compute_s = decode.step_s - decode.exchange_s
    if not (rank.memory_bandwidth and rank.decode.steps and rank.decode_read_bytes and compute_s > 0):
        return _NONE
    return f"{rank.decode_read_bytes / rank.decode.steps / compute_s / rank.memory_bandwidth:.0%}"
