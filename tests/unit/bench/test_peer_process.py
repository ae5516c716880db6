"""A peer's program and who asks it: one JSON line for another, whatever the peer prints."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from bench.peers.process import PeerProgram, ProcessPeer
from bench.workloads import Workload

pytestmark = pytest.mark.unit

WORKLOAD = Workload("two", ((1, 2), (7,)), 3)


def program(log: Path, dtype: str = "float32") -> PeerProgram:
    return PeerProgram(
        python=Path(sys.executable), module="tests.unit.bench.counting_peer", model=Path("nowhere"), dtype=dtype,
        threads=1, log=log, max_seqs=5,
    )  # fmt: skip


Make = Callable[[str], ProcessPeer]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[ProcessPeer] = []

    def one(dtype: str = "float32") -> ProcessPeer:
        made.append(ProcessPeer("counting", program(tmp_path / "logs" / "peer.log", dtype)))
        return made[-1]

    yield one
    for peer in made:
        peer.stop()


def test_it_generates_what_is_asked_for_and_tells_times_and_heads(make: Make, tmp_path: Path) -> None:
    peer = make("float32")
    assert peer.start() > 0
    measured = peer.run(WORKLOAD)
    assert measured.output_tokens == 6
    assert measured.heads == ((3, 4, 5), (8, 9, 10))
    assert measured.elapsed_s > 0
    assert measured.first_token_s == 0.001
    assert peer.facts()["seqs"] == "5"
    assert peer.peak_bytes() > 1_000_000
    assert "written past Python" in (tmp_path / "logs" / "peer.log").read_text()


def test_it_scores_windows(make: Make) -> None:
    peer = make("float32")
    peer.start()
    assert peer.negative_log_likelihoods([[1, 2], [3, 4]]) == [3.0, 7.0]


def test_one_that_tells_no_probabilities_says_so(make: Make) -> None:
    peer = make("mute")
    peer.start()
    with pytest.raises(RuntimeError, match="tells no log-probabilities"):
        peer.negative_log_likelihoods([[1, 2]])


def test_one_that_ends_is_told_with_its_last_words(make: Make) -> None:
    with pytest.raises(RuntimeError, match="out of fingers"):
        make("broken").start()


def becomes(process: psutil.Process, *, stopped: bool) -> bool:
    """Signals take a moment."""
    deadline_s = time.monotonic() + 10.0
    while (process.status() == psutil.STATUS_STOPPED) != stopped and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return (process.status() == psutil.STATUS_STOPPED) == stopped


def test_it_is_held_still_and_released_and_ends_even_while_held(make: Make) -> None:
    peer = make("float32")
    peer.start()
    process = psutil.Process(peer.pid)
    peer.hold()
    assert becomes(process, stopped=True)
    peer.release()
    assert becomes(process, stopped=False)
    peer.hold()
    peer.stop()
    assert not process.is_running()
