"""Views of groups: tables of the ranks' placement and of running groups, and the progress of a start.

Progress is a live table on a terminal, elsewhere a line for each change.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hetero_api.group_state import GroupState
from hetero_api.sharding import UnitRange
from hetero_client.admin import GroupTopology, IdleView, PlacementView, RankView
from hetero_client.cli.console import FollowedWork, table_of
from hetero_client.launcher.commands import GATEWAY
from hetero_client.launcher.run_directory import GroupRecord
from hetero_client.progress import Amount

MB = 1_000_000
WIDE = 130
FULL_COLUMNS = (
    "rank", "pool", "device", "cores", "KV heads", "MLP columns", "vocab rows", "weights MB", "KV MB", "kernels",
)  # fmt: skip
NARROW_COLUMNS = tuple(name for name in FULL_COLUMNS if name not in ("device", "kernels"))
OPTION_COLUMNS = ("", "placement", "decode tok/s", "prefill tok/s", "workload s", "why not")
_NUMBERS = ("rank", "weights MB", "KV MB", "decode tok/s", "prefill tok/s", "workload s")
_NONE = "-"


def placement_view(topology: GroupTopology, *, width: int) -> RenderableType:
    """Return a table of the ranks' shards, with formats of weights below it, and on a narrow terminal the devices."""
    formats = _lines((rank.rank, rank.weight_formats) for rank in topology.ranks)
    if width >= WIDE:
        table, lines = _table(FULL_COLUMNS, [placement_cells(rank) for rank in topology.ranks]), formats
    else:
        table = _table(NARROW_COLUMNS, [placement_cells(rank, counts=False) for rank in topology.ranks])
        lines = [*device_lines(topology), *formats]
    return Group(table, *(Text(line) for line in lines)) if lines else table


def device_lines(topology: GroupTopology) -> list[str]:
    """Return a line for each different device, with its kernels and the ranks that have it."""
    return _lines((rank.rank, _device_words(rank) or (_NONE,)) for rank in topology.ranks)


def placement_cells(rank: RankView, *, counts: bool = True) -> dict[str, str]:
    """Return one rank's cells by column; `counts` adds the number of units to ranges of columns or rows."""
    return {
        "rank": str(rank.rank),
        "pool": rank.pool,
        "device": rank.device or _NONE,
        "cores": _cores(rank),
        "KV heads": _units(rank.kv_heads, rank, count=True),
        "MLP columns": _mlp(rank, count=counts),
        "vocab rows": _vocabulary(rank, count=counts),
        "weights MB": f"{rank.weight_bytes / MB:.1f}",
        "KV MB": f"{rank.kv_bytes / MB:.1f}",
        "kernels": ", ".join(_choices(rank)) or _NONE,
    }


def topology_line(topology: GroupTopology) -> str:
    """Return the group's state in a line."""
    parts = [f"epoch {topology.epoch}", f"exchange {topology.exchange or 'none'}"]
    if topology.placement_mode:
        parts.append(f"placement {topology.placement_mode}")
    if topology.cache_layout is not None:
        blocks = f"{topology.num_blocks} blocks of {topology.block_size} tokens"
        parts.append(f"KV cache {topology.cache_layout.value}, {blocks}")
    if topology.asleep:
        parts.append(f"asleep: {', '.join(topology.asleep)}")
    if topology.idle is not None:
        parts.append(_idle_words(topology.idle))
    if topology.speculation:
        parts.append(f"speculation {topology.speculation}")
    if topology.paused_requests:
        parts.append(f"paused requests: {topology.paused_requests}")
    reason = f" ({topology.reason})" if topology.reason else ""
    return f"{topology.name}: {topology.state.value}{reason}, {', '.join(parts)}"


def _idle_words(idle: IdleView) -> str:
    """Return whether the group rests, and what it took the last time."""
    state = "rests until the next request" if idle.rests else f"rested {idle.sleeps} times"
    woke = f", woke in {idle.wake_s:.2f} s" if idle.wake_s else ""
    return f"{state} (fell asleep in {idle.sleep_s:.2f} s{woke})"


def options_view(placement: PlacementView) -> RenderableType:
    """Return a table of the placements considered, the chosen one marked, and its predicted and measured speed."""
    rows = [
        {
            "": "*" if option.chosen else "",
            "placement": option.name,
            "decode tok/s": _figure(option.decode_tokens_per_second),
            "prefill tok/s": _figure(option.prefill_tokens_per_second),
            "workload s": _figure(option.workload_s),
            "why not": option.why_not,
        }
        for option in placement.options
    ]
    return Group(_table(OPTION_COLUMNS, rows), Text(prediction_line(placement)), Text(placement.reason))


def prediction_line(placement: PlacementView) -> str:
    """Return predicted and measured speed in a line."""
    predicted = f"predicted {placement.predicted_tokens_per_second:.3g} tokens/s"
    if not placement.step_time_ratio:
        return f"{predicted}; nothing measured yet"
    return (
        f"{predicted}, measured {placement.measured_tokens_per_second:.3g}: "
        f"a step takes {placement.step_time_ratio:.2f} of the predicted time"
    )


def _figure(value: float) -> str:
    """Return the value with 3 digits, or a dash if it was not predicted."""
    return f"{float(f'{value:.3g}'):,g}" if value else _NONE


def groups_table(groups: Sequence[GroupRecord]) -> Table:
    """Return a table of the groups that run on this machine."""
    rows = [
        {
            "name": group.name,
            "pid": str(group.pid),
            "phase": group.phase,
            "address": group.inference,
            "ranks": str(len(group.processes) - 1),
            "up": duration(time.time() - group.started_at),
            "manifest": group.manifest,
        }
        for group in groups
    ]
    return _table(list(rows[0]) if rows else [], rows)


def duration(seconds: float) -> str:
    """Return a duration in the form 42s, 3m05s or 2h07m."""
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02}m"


def _cores(rank: RankView) -> str:
    if not rank.cores:
        return "not bound"
    cores = ",".join(map(str, rank.cores))
    return cores if rank.pinned else f"{cores} (not pinned)"


def _units(units: UnitRange | None, rank: RankView, *, count: bool) -> str:
    if units is None:
        return "by layer" if rank.layered else _NONE
    if not units.size:
        return "none"
    return f"{units.begin}..{units.end - 1}" + (f" ({units.size})" if count else "")


def _mlp(rank: RankView, *, count: bool) -> str:
    """Return the rank's experts, or its MLP columns if it has no experts."""
    if rank.experts is not None and rank.experts.size:
        experts = f"experts {_units(rank.experts, rank, count=count)}"
        if rank.expert_columns is None or not rank.expert_columns.size:
            return experts
        return f"{experts}, columns {_units(rank.expert_columns, rank, count=count)} of each"
    return _units(rank.mlp_columns, rank, count=count)


def _vocabulary(rank: RankView, *, count: bool) -> str:
    """Return the rows of embedding and output head, as one range where they are equal."""
    embedding, head = (_units(rows, rank, count=count) for rows in (rank.embedding_rows, rank.head_rows))
    return head if embedding == head else f"{embedding} in, {head} out"


def _table(columns: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Table:
    table = table_of(*columns, right=_NUMBERS)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table


def _choices(rank: RankView) -> tuple[str, ...]:
    """Return the kernels, notes on weights, and the memory that graphs of steps take of their reserve."""
    if not rank.graph_reserve_bytes:
        return *rank.kernels, *rank.weight_notes
    return (
        *rank.kernels,
        *rank.weight_notes,
        f"graphs take {rank.graph_bytes / MB:.0f} of {rank.graph_reserve_bytes / MB:.0f} MB reserved",
    )


def _device_words(rank: RankView) -> tuple[str, ...]:
    words = ", ".join(part for part in (rank.device, *_choices(rank)) if part)
    return (words,) if words else ()


def _lines(said: Iterable[tuple[int, Iterable[str]]]) -> list[str]:
    """Return a line for each different thing that is said of ranks, with their numbers."""
    who: dict[str, list[str]] = {}
    for rank, words in said:
        for each in words:
            who.setdefault(each, []).append(str(rank))
    return [f" rank {', '.join(numbers)}: {what}" for what, numbers in who.items()]


STARTING: Final = "starting"


def rank_phase(topology: GroupTopology, rank: RankView) -> str:
    """Return the phase of a rank's start in a word or two."""
    if not rank.joined:
        return "joining"
    match topology.state:
        case GroupState.NEW | GroupState.ABORTED:
            return "joined"
        case GroupState.FORMING:
            return "forming the group"
        case GroupState.LOADING:
            return _loading_phase(rank)
        case _:
            return topology.state.value


def _loading_phase(rank: RankView) -> str:
    if not rank.weight_bytes:
        return "loading weights"
    needs_cache = rank.layered or (rank.kv_heads is not None and rank.kv_heads.size > 0)
    return "allocating KV cache" if needs_cache and not rank.kv_bytes else "warming up"


class StartDisplay:
    """Display of a group's start; call `show` with every topology."""

    def __init__(
        self, console: Console, names: tuple[str, ...], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._clock = clock
        self._phases: dict[str, str] = dict.fromkeys(names, STARTING)
        self._works: dict[str, FollowedWork] = {}
        self._reason = ""
        self._began_s = clock()
        self._live: Live | None = None

    def show(self, topology: GroupTopology) -> None:
        """Update the display."""
        for rank in topology.ranks:
            name = self._name(rank)
            self._set(name, rank_phase(topology, rank))
            self._follow(name, rank.progress)
        if topology.reason != self._reason and topology.state == GroupState.ABORTED:
            self._console.print(f"  group: {topology.reason}", style="yellow", highlight=False)
        self._reason = topology.reason

    def gateway_listens(self, address: str) -> None:
        """Show that the gateway listens and the ranks have been started."""
        self._set(GATEWAY, f"listens on {address}")

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self._console, transient=True, refresh_per_second=8)
            self._live.start()
        else:
            self._line(", ".join(self._phases), STARTING)
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def _name(self, rank: RankView) -> str:
        """Return the name of the rank's process, by its place if the gateway does not know the name yet."""
        ranks = [name for name in self._phases if name != GATEWAY]
        return rank.pod_name or (ranks[rank.rank] if rank.rank < len(ranks) else f"rank {rank.rank}")

    def _set(self, name: str, phase: str) -> None:
        if self._phases.get(name) == phase:
            return
        self._phases[name] = phase
        if self._live is None:
            self._line(name, phase)

    def _follow(self, name: str, amount: Amount | None) -> None:
        """Show how far a rank's long work has come: the terminal's table does, else a line every ten seconds."""
        known, now_s = self._works.pop(name, None), self._clock()
        if amount is None:
            return
        if known is None or known.now.work != amount.work:
            known = FollowedWork(amount, now_s)
        known.now = amount
        if self._live is None and (line := known.due_line(now_s)):
            self._line(name, line)
        self._works[name] = known

    def _line(self, name: str, phase: str) -> None:
        elapsed_s = self._clock() - self._began_s
        self._console.print(f"  {elapsed_s:5.1f} s  {name}: {phase}", highlight=False)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, phase in self._phases.items():
            done = (name == GATEWAY and phase != STARTING) or phase == GroupState.READY.value
            mark = Text("✓", style="green") if done else Spinner("dots")
            work = self._works.get(name)
            cells: list[RenderableType] = [Text(phase, style="green" if done else "cyan")]
            if work is not None:
                bar = ProgressBar(total=work.now.total, completed=work.now.done, width=24)
                cells = [Text(work.now.work, style="cyan"), bar, Text(work.text(self._clock()), style="cyan")]
            table.add_row(mark, name, *cells)
        table.add_row("", Text(f"{self._clock() - self._began_s:.0f} s", style="dim"))
        return table
