"""What a rank writes is what its supervisor reads."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest

from hetero_api.host.heartbeat import Beat, HangWatch, Heartbeat, HeartbeatMemory, RankState
from hetero_api.supervision.child import is_stopped

pytestmark = pytest.mark.unit


@pytest.fixture
def memory() -> HeartbeatMemory:
    return HeartbeatMemory()


def writer(memory: HeartbeatMemory) -> Heartbeat:
    heartbeat = Heartbeat.open(Path(memory.path))
    memory.release()
    return heartbeat


def test_before_the_first_word_a_rank_is_starting(memory: HeartbeatMemory) -> None:
    assert memory.read() == Beat(RankState.STARTING, 0, 0.0, 0, 0)
    memory.release()


def test_state_epoch_steps_and_loads_are_read(memory: HeartbeatMemory) -> None:
    heartbeat = writer(memory)
    for state in (RankState.JOINING, RankState.FORMED, RankState.LOADED, RankState.SERVING):
        heartbeat.enter(state, epoch=3)
    heartbeat.count_step()
    heartbeat.count_step()
    assert memory.read() == Beat(RankState.SERVING, 3, 0.0, 2, 1)
    heartbeat.enter(RankState.JOINING, epoch=3)
    assert memory.read().loads == 1


def test_only_work_is_late(memory: HeartbeatMemory) -> None:
    heartbeat = writer(memory)
    now_s = time.monotonic()
    with heartbeat.working(10):
        beat = memory.read()
        assert beat.overdue_s(now_s + 9) == 0
        assert 4 < beat.overdue_s(now_s + 15) <= 5
    assert memory.read().overdue_s(now_s + 1_000_000) == 0


def test_long_work_is_not_late_while_it_gets_on(memory: HeartbeatMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat, now_s = writer(memory), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    with heartbeat.working(10):
        now_s = 109.0
        heartbeat.get_on()
        assert memory.read().overdue_s(118) == 0
        assert memory.read().overdue_s(121) == 2


def test_work_that_raises_is_over(memory: HeartbeatMemory) -> None:
    heartbeat = writer(memory)
    with pytest.raises(KeyError), heartbeat.working(10):
        raise KeyError
    assert memory.read().due_s == 0


def test_a_reader_never_sees_half_a_beat(memory: HeartbeatMemory) -> None:
    heartbeat = writer(memory)
    done = threading.Event()

    def write() -> None:
        for epoch in range(20_000):
            heartbeat.enter(RankState.JOINING if epoch % 2 else RankState.SERVING, epoch=epoch)
        done.set()

    thread = threading.Thread(target=write)
    heartbeat.enter(RankState.SERVING, epoch=0)
    thread.start()
    while not done.is_set():
        beat = memory.read()
        assert beat.state is (RankState.JOINING if beat.epoch % 2 else RankState.SERVING)
    thread.join()


def test_nobody_has_to_read() -> None:
    heartbeat = Heartbeat.open(None)
    with heartbeat.working(1):
        heartbeat.enter(RankState.JOINING, epoch=0)


def test_reading_leaves_no_descriptor_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        writer(HeartbeatMemory())
    import gc

    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_pulses_are_counted_beside_the_beats(memory: HeartbeatMemory) -> None:
    heartbeat = writer(memory)
    heartbeat.keep_pulse()
    heartbeat.enter(RankState.JOINING, epoch=2)
    deadline_s = time.monotonic() + 10
    while memory.read().pulse < 3:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    assert memory.read().state is RankState.JOINING


def beat(pulse: int) -> Beat:
    return Beat(RankState.SERVING, 1, 0.0, 0, 0, pulse)


def test_silence_is_the_time_since_the_pulse_was_seen_to_change() -> None:
    watch = HangWatch()
    looks = [(1, 0.0), (1, 0.25), (1, 0.5), (2, 0.75), (2, 1.0)]
    assert [watch.silent_s(beat(pulse), 100.0 + now_s) for pulse, now_s in looks] == [0, 0.25, 0.5, 0, 0.25]


def test_a_watch_that_was_held_up_does_not_take_its_own_absence_for_silence() -> None:
    watch = HangWatch()
    watch.silent_s(beat(1), 100.0)
    assert watch.silent_s(beat(1), 1000.0) == 0.5


@pytest.mark.parametrize(
    ("stopped", "for_s", "verdict"),
    [
        (True, 1.5, ""),
        (True, 2.0, "has been frozen for 2.0 s"),
        (False, 20.0, ""),
        (False, 20.5, "has been frozen for 20.5 s"),
    ],
)
def test_a_process_without_a_pulse_is_frozen_soon_if_it_is_stopped(stopped: bool, for_s: float, verdict: str) -> None:
    watch, beat, now_s = HangWatch(), Beat(RankState.SERVING, 1, 0.0, 0, 0, 7), 50.0
    watch.why(beat, now_s, is_stopped=lambda: stopped)
    while for_s > 0:
        now_s, for_s = now_s + 0.5, for_s - 0.5
        seen = watch.why(beat, now_s, is_stopped=lambda: stopped)
    assert seen == verdict


def test_a_process_that_is_late_hangs_though_its_pulse_goes_on() -> None:
    late = Beat(RankState.SERVING, 1, 100.0, 5, 1, 9)
    assert HangWatch().why(late, 112.0, is_stopped=lambda: False) == "is 12 s late with its work"


def test_the_kernel_tells_whether_a_process_is_stopped() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert is_stopped(process.pid)
        process.kill()
    assert not is_stopped(process.pid)


def test_a_program_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) T (b) S 1 7 7 0")
    assert not is_stopped(7, proc=tmp_path)
