"""Runs in turns: the order, who is held, repeats of disturbed runs, and who breaks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bench import turns
from bench.turns import Quiet, Run, take_turns
from tests.unit.bench.bench_setup import BATCH, DECODE, Scripted

pytestmark = pytest.mark.unit

NOT_LOOKED_AT = Quiet(attempts=0)


WORKLOADS = {"decode1": DECODE, "batch8": BATCH}


def take(contenders: Sequence[Scripted], quiet: Quiet = NOT_LOOKED_AT) -> tuple[turns.Runs, dict[str, str]]:
    return take_turns(contenders, WORKLOADS, rounds=2, quiet=quiet, tell=lambda *_: None)


def test_contenders_take_turns_after_one_run_that_warms_up() -> None:
    diary: list[str] = []
    runs, broken = take([Scripted("A", diary), Scripted("B", diary)])
    one_round = ["A decode1", "B decode1", "A batch8", "B batch8"]
    assert diary == ["A decode1", "B decode1", *one_round, *one_round]
    assert [run.measured.elapsed_s for run in runs["A"]["decode1"]] == [2.0, 4.0]
    assert broken == {}


def test_one_that_breaks_or_makes_too_few_tokens_is_named_and_asked_no_more() -> None:
    diary: list[str] = []
    contenders = [Scripted("A", diary, breaks_at=1), Scripted("B", diary, short_at=2), Scripted("C", diary)]
    runs, broken = take(contenders)
    assert broken == {"A": "broke at decode1: broke", "B": "broke at batch8: made 19 tokens, not 20"}
    assert diary.count("A decode1") == 1
    assert len(runs["C"]["batch8"]) == 2


def disturb(monkeypatch: pytest.MonkeyPatch, cores: Sequence[float]) -> None:
    """What others are found to use, run by run."""
    seen = iter(cores)

    class Load:
        def __init__(self, pid: int) -> None:
            pass

        def cores(self) -> float:
            return next(seen)

    monkeypatch.setattr(turns, "ForeignLoad", Load)
    monkeypatch.setattr(turns, "wait_quiet", lambda *_, **__: 0.0)


def only_run(monkeypatch: pytest.MonkeyPatch, cores: Sequence[float]) -> Run:
    disturb(monkeypatch, [0.0, *cores])
    quiet = Quiet(most_cores=0.2, attempts=3)
    workloads = {"decode1": DECODE}
    runs, _ = take_turns([Scripted("A", [])], workloads, rounds=1, quiet=quiet, tell=lambda *_: None)
    return runs["A"]["decode1"][0]


def test_a_disturbed_run_is_repeated_until_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    run = only_run(monkeypatch, [0.9, 0.1])
    assert (run.attempts, run.disturbed, run.measured.elapsed_s) == (2, False, 3.0)


def test_when_none_is_quiet_the_least_disturbed_counts_and_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = only_run(monkeypatch, [0.9, 0.4, 0.8])
    assert (run.attempts, run.disturbed, run.foreign_cores) == (2, True, 0.4)
