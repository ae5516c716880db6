"""Draws the pictures of docs/concepts.md: a model over ranks, a request's life, a resource's life.

They are narrow, so that a telephone shows them, and have two sets of colours: an SVG in a page follows its reader's
choice of dark or light. The first picture is of a real plan: what the placement's arithmetic deals for an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Final

from hetero_api.sharding import UnitRange
from hetero_api.status import ConditionType
from tools.planning_page import example_plan

FOLDER: Final = Path("docs/pictures")
EXAMPLE: Final = ("glm-4.5-air", "xeon6454s-rtx4090")
"""Model and machine of the picture of a placement."""
_WIDTH: Final = 480
_CHARS: Final = 62
"""Characters of a line of small text across a picture."""
_CONDITIONS: Final = (
    (ConditionType.ACCEPTED, "the spec makes sense and is in force"),
    (ConditionType.SCHEDULED, "every pod has a node"),
    (ConditionType.GROUP_FORMED, "all ranks are in one epoch"),
    (ConditionType.MODEL_READY, "every rank has its weights"),
    (ConditionType.GATEWAY_READY, "the front door is open"),
    (ConditionType.READY, "requests are served"),
)
_LIGHT: Final = {
    "ink": "#1f2328", "dim": "#59636e", "paper": "#ffffff", "box": "#f6f8fa", "line": "#8c959f", "a": "#2f6fb3",
    "b": "#b4501e", "c": "#3f7d3a", "on": "#ffffff",
}  # fmt: skip
_DARK: Final = {
    "ink": "#e6edf3", "dim": "#9198a1", "paper": "#131416", "box": "#1f2329", "line": "#6e7681", "a": "#79b8ff",
    "b": "#f0a26b", "c": "#8ddb8c", "on": "#131416",
}  # fmt: skip
"""Colours of text, background, boxes, arrows, three ranks, and text upon these."""
_RULES: Final = """\
text { fill: var(--ink); font: 13px system-ui, sans-serif }
.title { font-weight: 600; font-size: 14px }
.small { fill: var(--dim); font-size: 12px }
.on { fill: var(--on); font-size: 12px; font-weight: 600 }
.box { fill: var(--box); stroke: var(--line) }
.a { fill: var(--a) } .b { fill: var(--b) } .c { fill: var(--c) }
.part { stroke: var(--paper); stroke-width: 2 }
.way { fill: none; stroke: var(--line); stroke-width: 1.5 }
.tip { fill: var(--line) }"""
_TIP: Final = (
    '<defs><marker id="tip" markerWidth="9" markerHeight="9" markerUnits="userSpaceOnUse" refX="8" refY="4.5" '
    'orient="auto"><path class="tip" d="M0,0 L9,4.5 L0,9 z"/></marker></defs>'
)


@dataclass(frozen=True)
class Step:
    """A box of a way from top to bottom; `after` is said of the arrow that leaves it."""

    title: str
    words: str
    after: str = ""


_REQUEST: Final = (
    Step("Client", "gRPC, or the OpenAI API over HTTP; with a traceparent if it traces", "prompt, sampling, key"),
    Step("Door", "The guard turns the key into a principal with limits; the call is read: bounds, tokens, constraints"),
    Step(
        "Queue",
        "Admitted, or refused with a status that says why; waits by priority and arrival",
        "when slots and blocks are free",
    ),
    Step(
        "Scheduler",
        "One token budget a step: prompts in chunks, decode rows, prefix hits. Writes one StepPlan",
        "StepPlan, to every rank",
    ),
    Step(
        "Ranks",
        "Each computes its shard of the step; they sum over NCCL, shared memory or TCP; each samples its vocabulary",
        "token, from rank 0",
    ),
    Step(
        "Output processor",
        "Tokens become text; stop strings cut it; thoughts and calls of tools are told apart",
        "deltas of the stream",
    ),
    Step("Client", "Started, Delta …, one Finished for each completion"),
)
_RESOURCE: Final = (
    Step(
        "kubectl apply",
        "One HeteroInference: a model, pools of ranks, a placement",
        "bounds and rules, held by the API server",
    ),
    Step("Observe", "The operator looks at the resource and at all that it owns"),
    Step("Plan", "Pure functions say what should be there: workloads, Services, policies, Secrets"),
    Step(
        "Apply", "Writes what differs, behind the fence: nobody writes without the Lease. A second look writes nothing"
    ),
    Step("Report", "Conditions say what was seen, and name the first rank that blocks"),
)


def generate_concept_pictures(root: Path) -> list[Path]:
    """Write the pictures under `root`; return what was written, relative to `root`."""
    pictures = {"placement": _placement(), "request": _request(), "resource": _resource()}
    (root / FOLDER).mkdir(parents=True, exist_ok=True)
    for name, svg in pictures.items():
        (root / FOLDER / f"{name}.svg").write_text(svg, encoding="utf-8")
    return [FOLDER / f"{name}.svg" for name in pictures]


def _placement() -> str:
    model, machine = EXAMPLE
    plan = example_plan(machine, model)
    last = [rank.layers[-1] for rank in plan.ranks]
    rows: list[tuple[str, list[UnitRange]]] = [
        ("Attention: KV heads of each layer", [layer.kv_heads for layer in last])
    ]
    rows.append(("Routed experts: columns of each of them", [layer.expert_columns for layer in last]))
    rows.append(("Vocabulary rows", [rank.head_rows for rank in plan.ranks]))
    parts = [_text(16, 30, f"{model}: one GPU, a CPU rank on each socket", "title")]
    names = ["rank 0: GPU", *(f"rank {i}: NUMA node {i - 1}" for i in range(1, len(plan.ranks)))]
    x = 16
    for kind, name in zip("abc", names, strict=True):
        parts.append(f'<rect class="{kind}" x="{x}" y="46" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 57, name, "small"))
        x += 30 + 7 * len(name)
    y = 92
    for title, ranges in rows:
        parts.append(_text(16, y, title))
        parts += _bar(ranges, y + 10)
        y += 72
    parts += _lines(
        16,
        y,
        "Every rank computes each step together with the others: they sum their parts after each half of a layer.",
    )
    return _svg(parts, y + 34)


def _bar(ranges: Sequence[UnitRange], y: int) -> Iterator[str]:
    """Yield a bar of all units, in the colours of the ranks that own them."""
    whole = _WIDTH - 32
    total = max(units.end for units in ranges)
    for kind, units in zip("abc", ranges, strict=True):
        if units.size:
            x, width = 16 + whole * units.begin / total, whole * units.size / total
            yield f'<rect class="{kind} part" x="{x:.1f}" y="{y}" width="{width:.1f}" height="28" rx="3"/>'
            yield _text(x + width / 2, y + 19, f"{units.begin} to {units.end - 1}", "on", anchor="middle")


def _request() -> str:
    parts, bottom = _way(_REQUEST, top=16)
    parts += _return(bottom, begin=4, end=2, words="lost rank, or no blocks: again from its tokens")
    return _svg(parts, bottom[-1] + 16)


def _resource() -> str:
    parts, bottom = _way(_RESOURCE, top=16)
    parts += _return(bottom, begin=4, end=1, words="a change, an event, or 45 s later")
    y = bottom[-1] + 34
    parts.append(_text(16, y, "Conditions become true in this order", "title"))
    for number, (condition, words) in enumerate(_CONDITIONS):
        top = y + 16 + 34 * number
        parts.append(f'<circle class="c" cx="26" cy="{top + 12}" r="9"/>')
        parts.append(_text(26, top + 16, str(number + 1), "on", anchor="middle"))
        parts.append(_text(46, top + 17, condition.value, "title"))
        parts.append(_text(170, top + 17, words, "small"))
    return _svg(parts, y + 24 + 34 * len(_CONDITIONS))


def _way(steps: Sequence[Step], *, top: int) -> tuple[list[str], list[int]]:
    """Return boxes from top to bottom with arrows between them, and the bottom of each."""
    parts, bottoms, y = [_TIP], [], top
    width = _WIDTH - 16 - 60
    for step in steps:
        lines = wrap(step.words, _CHARS - 8)
        height = 32 + 16 * len(lines)
        parts.append(f'<rect class="box" x="16" y="{y}" width="{width}" height="{height}" rx="6"/>')
        parts.append(_text(28, y + 22, step.title, "title"))
        parts += [_text(28, y + 40 + 16 * i, line, "small") for i, line in enumerate(lines)]
        y += height
        bottoms.append(y)
        if step is not steps[-1]:
            parts.append(f'<path class="way" d="M60,{y} V{y + 26}" marker-end="url(#tip)"/>')
            parts.append(_text(74, y + 18, step.after, "small"))
            y += 28
    return parts, bottoms


def _return(bottoms: Sequence[int], *, begin: int, end: int, words: str) -> Iterator[str]:
    """Yield a way back at the right side, from a step to an earlier one, with words along it."""
    right, from_y, to_y = _WIDTH - 60, bottoms[begin] - 20, bottoms[end] - 20
    yield f'<path class="way" d="M{right},{from_y} h26 V{to_y} h-24" marker-end="url(#tip)"/>'
    middle = (from_y + to_y) // 2
    along = _text(right + 44, middle, words, "small", anchor="middle")
    yield f'<g transform="rotate(-90 {right + 44} {middle})">{along}</g>'


def _lines(x: int, y: int, words: str) -> Iterator[str]:
    for i, line in enumerate(wrap(words, _CHARS)):
        yield _text(x, y + 16 * i, line, "small")


def _text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'


def _svg(parts: Sequence[str], height: int) -> str:
    body = "\n".join(parts)
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    paper = f'<rect width="{_WIDTH}" height="{height}" rx="8" fill="var(--paper)"/>'
    light, dark = ("; ".join(f"--{name}: {colour}" for name, colour in each.items()) for each in (_LIGHT, _DARK))
    style = f"svg {{ {light} }}\n@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n{_RULES}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>\n{style}\n</style>'
    return f"{head}\n{paper}\n{body}\n</svg>\n"
