"""Draws docs/architecture.svg: the programs, their rooms in the order of their imports, and what passes between them.

Everything but the four arrows is read from the code: a room is a package, its place follows from what it imports (a
room stands above the rooms that it imports), and its words are the first sentence of its docstring.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import TopologicalSorter
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Final

from tools.measure_code import Module, modules_of

PICTURE: Final = Path("docs/architecture.svg")
_COLUMNS: Final = ("hetero_client", "hetero_gateway", "hetero_worker", "hetero_operator")
_BELOW: Final = ("hetero_placement", "hetero_api")
_ARROWS: Final = (
    ("hetero_client", "hetero_gateway", "gRPC, OpenAI"),
    ("hetero_gateway", "hetero_worker", "StepPlans"),
    ("hetero_operator", "hetero_worker", "pods"),
)
_WIDTH: Final = 300
_GAP: Final = 70
_ROW: Final = 54
_TOP: Final = 70
_COLOURS: Final = {
    "hetero_client": "#e8f1fb",
    "hetero_gateway": "#e9f7ef",
    "hetero_worker": "#fdf3e3",
    "hetero_operator": "#f5ecfa",
    "hetero_placement": "#f3f4f6",
    "hetero_api": "#f3f4f6",
}


@dataclass(frozen=True)
class Room:
    """One package of a program."""

    name: str
    words: str
    level: int
    """Longest way of imports below it, within its program."""


def rooms_of(modules: Sequence[Module], program: str) -> list[Room]:
    """Return the rooms of a program, top first."""
    inside = [module for module in modules if module.name.split(".")[0] == program]
    known = {module.name: module.room for module in modules}
    graph: dict[str, set[str]] = {module.room: set() for module in inside}
    for module in inside:
        others = {known[name] for name in module.imports(known)}
        graph[module.room] |= {room for room in others if room in graph and not _is_above(room, module.room)}
    levels = _levels(graph)
    words = {module.name: _first_sentence(module) for module in inside if module.path.name == "__init__.py"}
    rooms = [Room(name, words.get(name, ""), levels[name]) for name in graph]
    return sorted(rooms, key=lambda room: (-room.level, room.name))


def _is_above(room: str, other: str) -> bool:
    """True if `room` is the package that `other` lies in, or itself: those are no layers."""
    return room == other or other.startswith(f"{room}.")


def _levels(graph: Mapping[str, set[str]]) -> dict[str, int]:
    acyclic: dict[str, set[str]] = {}
    for room in sorted(graph):  # rooms may import one another; the first by name stands above
        acyclic[room] = {other for other in graph[room] if room not in _reached(acyclic, other)}
    levels: dict[str, int] = {}
    for room in TopologicalSorter(acyclic).static_order():
        levels[room] = 1 + max((levels[other] for other in acyclic.get(room, ())), default=-1)
    return levels


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        fresh = graph.get(waiting.pop(), set()) - found
        found |= fresh
        waiting += fresh
    return found


def _first_sentence(module: Module) -> str:
    words = " ".join((ast.get_docstring(module.tree) or "").split("\n\n")[0].split())
    return words.partition(". ")[0].rstrip(".")


def draw(modules: Sequence[Module]) -> str:
    """Return the picture as SVG."""
    columns = {name: rooms_of(modules, name) for name in _COLUMNS}
    below = {name: rooms_of(modules, name) for name in _BELOW}
    height = _ROW * max(len(rooms) for rooms in columns.values()) + 40
    bottom = _TOP + height + 50
    total = len(_COLUMNS) * _WIDTH + (len(_COLUMNS) - 1) * _GAP
    parts = [
        part
        for number, (name, rooms) in enumerate(columns.items())
        for part in _box(name, rooms, x=20 + number * (_WIDTH + _GAP), y=_TOP, width=_WIDTH, height=height)
    ]
    for name, rooms in below.items():
        tall = 40 + _ROW * -(-len(rooms) // len(_COLUMNS))
        parts += _box(name, rooms, x=20, y=bottom, width=total, height=tall, across=len(_COLUMNS))
        bottom += tall + 20
    parts += [_arrow(*arrow) for arrow in _ARROWS]
    size = f'width="{total + 40}" height="{bottom}" viewBox="0 0 {total + 40} {bottom}"'
    head = '<defs><marker id="tip" markerWidth="8" markerHeight="8" markerUnits="userSpaceOnUse" refX="7" refY="4" '
    head += 'orient="auto">'
    head += '<path d="M0,0 L8,4 L0,8 z" fill="#333"/></marker></defs>'
    title = _text(20, 34, "Programs and rooms: a room imports only rooms below it", size=17, weight="bold")
    body = "\n".join([head, f'<rect width="{total + 40}" height="{bottom}" fill="#fff"/>', title, *parts])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">\n{body}\n</svg>\n'


def _box(name: str, rooms: Sequence[Room], *, x: int, y: int, width: int, height: int, across: int = 1) -> list[str]:
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{_COLOURS[name]}" stroke="#888"/>'
    parts = [frame, _text(x + 12, y + 22, name, size=14, weight="bold")]
    room_width = width // across
    for number, room in enumerate(rooms):
        left, top = x + 12 + number % across * room_width, y + 34 + number // across * _ROW
        short = room.name.removeprefix(f"{name}.") if room.name != name else "(root)"
        parts.append(f'<rect x="{left}" y="{top}" width="{room_width - 24}" height="{_ROW - 6}" rx="4" fill="#fff"/>')
        parts.append(_text(left + 8, top + 15, short, size=12, weight="bold"))
        for line, words in enumerate(wrap(room.words, (room_width - 40) // 5, max_lines=2, placeholder="…")):
            parts.append(_text(left + 8, top + 29 + 12 * line, words, size=9))
    return parts


def _arrow(start: str, end: str, words: str) -> str:
    first, last = _COLUMNS.index(start), _COLUMNS.index(end)
    is_right = last > first
    begin = 20 + first * (_WIDTH + _GAP) + (_WIDTH if is_right else 0)
    stop = begin + (_GAP - 4 if is_right else 4 - _GAP)
    y = _TOP + 60
    line = f'<line x1="{begin}" y1="{y}" x2="{stop}" y2="{y}" stroke="#333" stroke-width="2" marker-end="url(#tip)"/>'
    return line + _text((begin + stop) // 2, y - 8, words, size=10, anchor="middle")


def _text(x: int, y: int, words: str, *, size: int, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(words)}</text>'


def generate_picture(root: Path) -> list[Path]:
    """Write the picture under `root`; return what was written, relative to `root`."""
    (root / PICTURE).parent.mkdir(parents=True, exist_ok=True)
    (root / PICTURE).write_text(draw(modules_of(Path(__file__).resolve().parent.parent)), encoding="utf-8")
    return [PICTURE]
