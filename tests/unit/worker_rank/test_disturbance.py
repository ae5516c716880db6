"""Whether others had the cores is what the kernel counted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hetero_worker.host.disturbance import CoreWatch

pytestmark = pytest.mark.unit

TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")


class Machine:
    """Three cores, of which a process has 0 and 2, and how long each worked."""

    def __init__(self, folder: Path) -> None:
        self.now_s = self.own_s = 0.0
        self.stat = folder / "stat"
        self._busy_s = [7.0, 7.0, 7.0]
        self.watch = self.work(0)

    def work(self, *others_s: float, column: int = 0, own_s: float = 0.0, elapsed_s: float = 0.0) -> CoreWatch:
        """On each core for others, and on the process's for it."""
        self.now_s, self.own_s = self.now_s + elapsed_s, self.own_s + own_s
        added = [*others_s, 0.0, 0.0, 0.0][:3]
        self._busy_s = [busy + more for busy, more in zip(self._busy_s, added, strict=True)]
        self._busy_s[0] += own_s
        lines = ["cpu  1 2 3 4"]
        for number, busy_s in enumerate(self._busy_s):
            columns = [0] * 10
            columns[column] = round(busy_s * TICKS_A_SECOND)
            lines.append(f"cpu{number} {' '.join(map(str, columns))}")
        self.stat.write_text("\n".join([*lines, "intr 5 6", "btime 7"]), encoding="ascii")
        return CoreWatch(cpus=(0, 2), stat=self.stat, own_s=lambda: self.own_s, clock=lambda: self.now_s)


def test_work_of_others_on_the_cores_disturbs(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.work(0.1, 9.0, 0.09, own_s=0.8, elapsed_s=1.0)
    assert not machine.watch.was_disturbed()  # a tenth of two cores' second would be more
    machine.work(0.0, 0.0, 0.02)
    assert machine.watch.was_disturbed()


def test_the_process_does_not_disturb_itself_nor_does_what_was_before(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.work(own_s=2.0, elapsed_s=1.0)
    assert not machine.watch.was_disturbed()
    later = machine.work(5.0)
    assert machine.watch.was_disturbed()
    assert not later.was_disturbed()


@pytest.mark.parametrize(("column", "disturbs"), [(1, True), (3, False), (4, False), (7, True), (8, False)])
def test_idle_cores_do_not_disturb_and_a_hypervisor_does(tmp_path: Path, column: int, disturbs: bool) -> None:
    machine = Machine(tmp_path)
    watch = machine.work(column=column)
    machine.work(1.0, column=column)
    assert watch.was_disturbed() == disturbs


def test_a_short_time_is_not_told_apart_from_none(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.work(0.04, elapsed_s=0.001)
    assert not machine.watch.was_disturbed()
    machine.work(0.02)
    assert machine.watch.was_disturbed()


def test_a_kernel_that_does_not_count_tells_of_no_disturbance(tmp_path: Path) -> None:
    assert not CoreWatch(stat=tmp_path / "none", own_s=lambda: 0.0).was_disturbed()


def test_this_machine_counts() -> None:
    assert CoreWatch(own_s=lambda: 0.0)._others() > 0
