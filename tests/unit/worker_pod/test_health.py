"""When a rank pod is started, alive and ready."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest

from hetero_api.host.heartbeat import Beat, RankState
from hetero_api.host.restarts import RestartPauses
from hetero_api.supervision.child import Command
from hetero_api.supervision.service import Service
from hetero_worker.pod.health import LOOP_LIMIT_S, PodHealth

pytestmark = pytest.mark.unit

NOW_S = 1000.0


class SaidRank(Service):
    """A rank that says what the test wants; None while it does not run."""

    def __init__(self, local_rank: int, beat: Beat | None = None) -> None:
        super().__init__(Command(str(local_rank), ()), RestartPauses(first_s=1, longest_s=60))
        self.said = beat

    def beat(self) -> Beat | None:
        return self.said


def beat(state: RankState, *, epoch: int = 1, due_s: float = 0.0, steps: int = 0, loads: int = 0) -> Beat:
    return Beat(state, epoch, due_s, steps, loads)


def health(*ranks: SaidRank, turned_s: float = NOW_S) -> PodHealth:
    return PodHealth(ranks, turned_s=lambda: turned_s, clock=lambda: NOW_S)


@pytest.mark.parametrize("waiting", [RankState.STARTING, RankState.JOINING, RankState.BROKEN])
def test_a_pod_has_started_once_every_rank_met_its_group(waiting: RankState) -> None:
    first, second = SaidRank(0, beat(RankState.LOADED, loads=1)), SaidRank(1)
    pod = health(first, second)
    assert pod.startup() == "rank 1 is not running"
    second.said = beat(waiting)
    assert pod.startup() == f"rank 1 is {waiting.name}"
    second.said = beat(RankState.FORMED)  # a load takes as long as its model is large
    assert pod.startup() == ""
    second.said = None
    assert pod.startup() == ""  # for good: liveness takes over


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (beat(RankState.JOINING), ""),
        (None, ""),  # in the pause before its next start
        (beat(RankState.SERVING, due_s=NOW_S + 1), ""),
        (beat(RankState.SERVING, due_s=NOW_S - 7), "rank 1 is 7 s late"),
        (beat(RankState.STARTING, due_s=NOW_S - 30), "rank 1 is 30 s late"),
    ],
)
def test_a_rank_that_waits_is_alive_and_one_that_hangs_is_not(said: Beat | None, problem: str) -> None:
    assert health(SaidRank(0, beat(RankState.SERVING)), SaidRank(1, said)).live() == problem


def test_a_supervisor_that_does_not_turn_is_not_alive() -> None:
    serving = SaidRank(0, beat(RankState.SERVING))
    assert health(serving, turned_s=NOW_S - LOOP_LIMIT_S + 1).live() == ""
    assert "has not looked for 16 s" in health(serving, turned_s=NOW_S - LOOP_LIMIT_S - 1).live()


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (beat(RankState.SERVING, epoch=2), ""),
        (beat(RankState.SERVING, epoch=1), "ranks serve in epochs 1, 2"),
        (beat(RankState.LOADED, epoch=2), "rank 1 is LOADED"),
        (None, "rank 1 is not running"),
    ],
)
def test_a_pod_is_ready_while_all_its_ranks_serve_in_one_epoch(said: Beat | None, problem: str) -> None:
    assert health(SaidRank(0, beat(RankState.SERVING, epoch=2)), SaidRank(1, said)).ready() == problem


def test_metrics_tell_of_every_rank() -> None:
    restarted = SaidRank(1)
    restarted.restarts = 3
    pod = health(SaidRank(0, beat(RankState.SERVING, epoch=2, steps=9)), restarted)
    lines = generate_latest(pod.registry).decode().splitlines()
    for line in (
        'hetero_rank_running{local_rank="0"} 1.0',
        'hetero_rank_running{local_rank="1"} 0.0',
        'hetero_rank_serving{local_rank="0"} 1.0',
        'hetero_rank_epoch{local_rank="0"} 2.0',
        'hetero_rank_steps_total{local_rank="0"} 9.0',
        'hetero_rank_restarts_total{local_rank="1"} 3.0',
    ):
        assert line in lines
