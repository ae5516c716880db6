"""Figures of what proposed tokens give: which are compared with which, and which are below their targets."""

from __future__ import annotations

import pytest

from bench.against import ratios_of
from bench.speculation import KINDS, PLAIN, Found, _pairs, missed
from bench.turns import Run
from tests.unit.bench.bench_setup import DECODE, measured

pytestmark = pytest.mark.unit

PLAIN_PEER, LOOKUP = "llama.cpp F16", "llama.cpp F16, lookup 10"


def found_of(workload: str, seconds: dict[str, float]) -> Found:
    """Two rounds; in the second one everybody takes twice as long for what comes behind the first token."""

    def run(behind_s: float) -> Run:
        return Run(measured(DECODE, elapsed_s=1.0 + behind_s, first_token_s=1.0), 0.0, 1, False)

    runs = {name: {workload: [run(each), run(2 * each)]} for name, each in seconds.items()}
    return Found([], ratios_of(_pairs({workload: DECODE}, runs)), {}, {})


def test_each_is_compared_with_its_own_without_proposals_and_ours_with_the_peers_lookup() -> None:
    found = found_of("quote 1", {**dict.fromkeys(KINDS, 4.0), "NGram": 2.0, PLAIN_PEER: 6.0, LOOKUP: 3.0})
    assert {each.entrant: round(each.ratio, 6) for each in found.ratios} == {
        "NGram / None": 2.0, "Auto / None": 1.0, "Auto, draft / None": 1.0,
        f"{LOOKUP} / {PLAIN_PEER}": 2.0, f"NGram / {LOOKUP}": 1.5,
    }  # fmt: skip
    assert all(each.low == pytest.approx(each.ratio) == pytest.approx(each.high) for each in found.ratios)


def test_without_the_peer_ours_are_compared_all_the_same() -> None:
    assert len(found_of("random", dict.fromkeys(KINDS, 1.0)).ratios) == len(KINDS) - 1
    lookup_alone = found_of("prose", {**dict.fromkeys(KINDS, 1.0), LOOKUP: 1.0})
    assert f"NGram / {LOOKUP}" in {each.entrant for each in lookup_alone.ratios}


@pytest.mark.parametrize(
    ("workload", "kind", "seconds", "below"),
    [
        ("quote 1", "NGram", 0.5, False),
        ("quote 1", "NGram", 0.6, True),
        ("random", "Auto", 1.02, False),
        ("random", "Auto", 1.05, True),
        ("prose", "Auto", 1.05, False),
    ],
)
def test_a_figure_below_its_target_is_named(workload: str, kind: str, seconds: float, below: bool) -> None:
    usual = {**dict.fromkeys(KINDS, 1.0), "NGram": 0.5}
    problems = missed("a model", 16, PLAIN, found_of(workload, {**usual, kind: seconds}))
    assert bool(problems) == below
    assert all(kind in problem for problem in problems)
