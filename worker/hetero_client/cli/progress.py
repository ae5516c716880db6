"""Progress of a start, rank by rank: a live table on a terminal, elsewhere a line for each change."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from hetero_api.group_state import GroupState
from hetero_client.admin import GroupTopology, RankView
from hetero_client.launcher.commands import GATEWAY

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

    def __init__(self, console: Console, names: tuple[str, ...]) -> None:
        self._console = console
        self._phases: dict[str, str] = dict.fromkeys(names, STARTING)
        self._reason = ""
        self._began_s = time.monotonic()
        self._live: Live | None = None

    def show(self, topology: GroupTopology) -> None:
        """Update the display."""
        for rank in topology.ranks:
            self._set(self._name(rank), rank_phase(topology, rank))
        if topology.reason != self._reason and topology.state == GroupState.ABORTED:
            self._console.print(f"  group: {topology.reason}", style="yellow", markup=False, highlight=False)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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

    def _line(self, name: str, phase: str) -> None:
        elapsed_s = time.monotonic() - self._began_s
        self._console.print(f"  {elapsed_s:5.1f} s  {name}: {phase}", markup=False, highlight=False)

    def _render(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, phase in self._phases.items():
            done = (name == GATEWAY and phase != STARTING) or phase == GroupState.READY.value
            mark = Text("✓", style="green") if done else Spinner("dots")
            table.add_row(mark, name, Text(phase, style="green" if done else "cyan"))
        table.add_row("", Text(f"{time.monotonic() - self._began_s:.0f} s", style="dim"))
        return table
