"""Every fuzz target takes its seeds, outlives what was found earlier, and some changes of the seeds."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest

from tests.support.examples import examples
from tests.unit.fuzz.__main__ import FINDINGS, corpus_of, fuzz
from tests.unit.fuzz.targets import TARGETS

pytestmark = pytest.mark.unit

CHANGES = 40
each_target = pytest.mark.parametrize("name", TARGETS)


@each_target
def test_seeds_are_taken_and_changed_ones_are_taken_or_refused(name: str) -> None:
    target = TARGETS[name]
    seeds = list(target.seeds())
    random_, taken = random.Random(name), 0
    for seed in seeds:
        taken += target.check(seed)
        for _ in range(examples(CHANGES) // len(seeds)):
            target.check(target.mutate(seed, random_))
    assert taken > 0 or name == "handshakes"


@each_target
def test_earlier_findings_are_mended(name: str) -> None:
    for path in (FINDINGS / name).glob("*"):
        TARGETS[name].check(path.read_bytes())


@each_target
def test_what_fuzzing_has_reached_is_still_taken_or_refused(name: str) -> None:
    for data in corpus_of(name):
        TARGETS[name].check(data)


@pytest.mark.slow
def test_ten_seconds_of_each_find_nothing(tmp_path: Path) -> None:
    """The inputs are the same each time, and all targets share a process; `make fuzz` tries others for half an hour."""
    if importlib.util.find_spec("atheris") is None:
        pytest.skip("atheris has no build for this machine")
    outcomes = fuzz([*TARGETS], seconds=10, seed=1, findings=tmp_path / "findings", cache=tmp_path / "cache")
    assert [name for name in TARGETS if name not in outcomes or not outcomes[name].passed] == []
