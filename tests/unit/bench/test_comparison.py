"""One set of figures from groups that were measured apart, and what is kept and drawn of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bench import history, targets
from bench.comparison import Comparison, Taken, compare, rows_of, scales_to, unlike
from bench.contenders import Contender, Measured
from bench.entrants import LINK, Entrant, Setting
from bench.home import BenchHome
from bench.plots import Curve, draw_growth, draw_peers
from bench.report import Width
from bench.targets import ONE_RANK
from bench.turns import Quiet, Run
from bench.workloads import Workload
from tests.unit.bench.bench_setup import CONFIG, DECODE, LIMITS, Absent, Scripted

pytestmark = pytest.mark.unit

WORKLOADS = {"decode1": DECODE}
SETTING = Setting(BenchHome(Path("nowhere")), "model", Path("nowhere"), CONFIG, 2)


def taken(*speeds: float, bits: int = 16, head: Sequence[int] = (5, 6), disturbed: bool = False) -> Taken:
    """Decodes at these tokens/s, a round each."""
    runs = [
        Run(Measured(1.0 + 8 / speed, 1.0, DECODE.output_tokens, (tuple(head),)), 0.0, 1, disturbed) for speed in speeds
    ]
    return Taken(Width(bits, "float32"), {}, 5.0, 2.0, 10, 20, {"decode1": runs})


def entrant(name: str, *, bits: int = 16) -> Entrant:
    return Absent(name, bits, 0.0, 0.0, ours=name.startswith("hetero"))


ENTRANTS = [entrant(ONE_RANK), entrant(LINK), entrant("late", bits=8)]
GROUPS = [{ONE_RANK: taken(60.0, 50.0, 40.0), LINK: taken(40.0)}, {LINK: taken(20.0), "late": taken(30.0, bits=8)}]


def test_a_later_group_is_scaled_by_what_the_link_lost() -> None:
    assert scales_to(GROUPS[0], GROUPS[1], WORKLOADS) == {"decode1": pytest.approx(2.0)}
    assert scales_to(GROUPS[0], {"late": taken(30.0)}, WORKLOADS) == {"decode1": 1.0}
    rows = rows_of(Comparison(GROUPS), ENTRANTS, SETTING, WORKLOADS, LIMITS)
    speeds = {name: round(row.figures["decode1"].tokens_per_s, 6) for name, row in rows.items()}
    assert list(rows) == [ONE_RANK, LINK, "late"]
    assert speeds == {ONE_RANK: 50.0, LINK: 40.0, "late": 60.0}
    assert rows[ONE_RANK].ours
    assert (rows[ONE_RANK].first_start_s, rows[ONE_RANK].start_s) == (5.0, 2.0)
    assert (rows[ONE_RANK].peak_bytes, rows[ONE_RANK].allowed_bytes) == (10, 20)


def test_shares_are_of_the_limit_of_each_ones_width() -> None:
    rows = rows_of(Comparison(GROUPS), ENTRANTS, SETTING, WORKLOADS, LIMITS)
    reads_per_s = LIMITS.read_bytes_per_s / CONFIG.num_parameters
    assert rows[ONE_RANK].figures["decode1"].share_of_limit == pytest.approx(50.0 / (reads_per_s / 2))
    assert rows["late"].figures["decode1"].share_of_limit == pytest.approx(60.0 / reads_per_s)


def test_disturbed_rounds_are_counted() -> None:
    groups = [{ONE_RANK: taken(60.0, 50.0, disturbed=True)}]
    rows = rows_of(Comparison(groups), ENTRANTS, SETTING, WORKLOADS, LIMITS)
    assert rows[ONE_RANK].figures["decode1"].disturbed == 2


def test_who_generates_other_tokens_than_most_is_named() -> None:
    groups = [{"a": taken(1.0), "b": taken(1.0), "c": taken(1.0, head=(5, 7))}]
    assert unlike(Comparison(groups), "decode1") == ["c"]


ABOUT: Mapping[str, object] = {"date": "2026-01-02", "revision": "abc+", "machine": {"cpu": "one"}}


def test_history_has_a_line_a_run(tmp_path: Path) -> None:
    rows = rows_of(Comparison(GROUPS), ENTRANTS, SETTING, WORKLOADS, LIMITS)
    path = tmp_path / "results" / "history.jsonl"
    for _ in range(2):
        history.append(history.line(ABOUT, "model", rows, targets.verdicts(rows)), path)
    first, second = map(json.loads, path.read_text().splitlines())
    assert first == second
    assert first["tokens_per_s"] == {ONE_RANK: {"decode1": 50.0}}
    assert first["ratios"]["decode1, 16-bit weights"] == 1.25


def test_the_plot_names_all_and_shows_shares(tmp_path: Path) -> None:
    rows = rows_of(Comparison(GROUPS), ENTRANTS, SETTING, WORKLOADS, LIMITS)
    draw_peers(rows, title="A title", path=tmp_path / "peers.svg")
    picture = (tmp_path / "peers.svg").read_text()
    share = f"{rows['late'].figures['decode1'].share_of_limit:.0%}"
    for text in ("A title", "late", LINK, f"60  ({share})", "decode1: tokens/s"):
        assert f"<!-- {text}" in picture


def test_growth_is_drawn_a_panel_each(tmp_path: Path) -> None:
    curve = Curve("ours", ((1, 10.0), (2, 18.0), (4, 30.0)))
    draw_growth({"sequences": [curve], "tokens": [curve]}, title="Growth", path=tmp_path / "growth.svg")
    picture = (tmp_path / "growth.svg").read_text()
    for text in ("Growth", "sequences", "tokens", "ours"):
        assert f"<!-- {text} -->" in picture


def test_who_cannot_be_had_is_named_and_nobody_else_is_kept_from_running() -> None:
    found = compare([entrant("a"), entrant("b")], SETTING, WORKLOADS, rounds=1, quiet=Quiet(attempts=0))
    assert found.absent == {"a": "a is nobody", "b": "b is nobody"}
    assert found.groups == []


def test_a_workload_is_found_by_its_name() -> None:
    other = Workload("other", ((1,),), 2)
    with pytest.raises(KeyError):
        rows_of(Comparison(GROUPS), ENTRANTS, SETTING, {"other": other}, LIMITS)


class Startable(Scripted):
    """Starts take what is left to take."""

    def __init__(self, name: str, diary: list[str], left_s: list[float]) -> None:
        super().__init__(name, diary)
        self._left_s = left_s

    def start(self) -> float:
        self._diary.append("start")
        return self._left_s.pop(0)

    def facts(self) -> Mapping[str, str]:
        return {"arithmetic": "float32"}

    def stop(self) -> None:
        self._diary.append("stop")


@dataclass(frozen=True, slots=True)
class Startables(Entrant):
    """The next start, of whomever, takes the next of these seconds."""

    left_s: list[float] = field(default_factory=lambda: [5.0, 2.0])
    diary: list[str] = field(default_factory=list)

    def open(self, setting: Setting) -> Contender:
        return Startable(self.name, self.diary, self.left_s)


def test_everybody_is_started_ended_and_started_again() -> None:
    each = Startables("each", 16, 0.0, 0.0)
    (group,) = compare([each], SETTING, WORKLOADS, rounds=1, quiet=Quiet(attempts=0)).groups
    assert each.diary == ["start", "stop", "start", "each decode1", "each decode1", "stop"]
    assert (group["each"].first_start_s, group["each"].start_s) == (5.0, 2.0)
