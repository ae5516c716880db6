"""The team of native threads: what it runs, in which order, and what a CALL that does not give 0 does."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import threading
import time
from collections.abc import Callable
from ctypes import c_int, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
from annotated_types import Le

from hetero_api.spec_pools import CpuSpec
from hetero_worker.native.build import COMPUTE_HEADER
from hetero_worker.native.compute_library import ffi, pick_op
from hetero_worker.native.loading import address_of
from hetero_worker.native.team import NativeTeam
from tests.support.native_compute import add_of as add
from tests.support.native_compute import call_of as call
from tests.support.native_compute import compute_library

pytestmark = pytest.mark.unit

SIZES = (1, 2, 3, 5)
Function = ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p, c_void_p)


def table(ops: list[Any]) -> Any:
    return ffi.new("uintptr_t[]", list(map(address_of, ops)))


def threads_of_this_process() -> set[int]:
    return {int(path.name) for path in Path("/proc/self/task").iterdir()}


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline_s = time.monotonic() + 10
    while not is_so() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return is_so()


@pytest.mark.parametrize("size", SIZES)
def test_operations_see_what_earlier_ones_wrote(size: int) -> None:
    """In whatever order: a sum of 1, 2, 4, … doubles only if no operation overtakes another."""
    team = NativeTeam(compute_library(), size)
    source = random.Random(size)
    for _ in range(50):
        rows, width = source.randrange(1, 40), source.randrange(1, 200)
        x = torch.ones(rows, width)
        ops: list[Any] = [add(x, x) for _ in range(20)]
        assert team.run(table(ops), 0) == (20, 0)
        assert torch.equal(x, torch.full_like(x, 2.0**20))


@pytest.mark.parametrize("size", SIZES)
def test_a_team_that_has_slept_works_on(size: int) -> None:
    team = NativeTeam(compute_library(), size, spin_ns=0)
    x, ones = torch.zeros(64, 64), torch.ones(64, 64)
    for _ in range(20):
        time.sleep(0.002)
        team.run_one(add(x, ones))
    assert torch.equal(x, torch.full_like(x, 20.0))


@pytest.mark.parametrize("size", SIZES)
def test_a_call_is_made_in_its_turn_by_the_calling_thread(size: int) -> None:
    team, x = NativeTeam(compute_library(), size), torch.ones(4, 4)
    seen: list[tuple[int, float]] = []

    def look(_first: int, _second: int, _third: int) -> int:
        seen.append((threading.get_ident(), float(x[0, 0])))
        return 0

    function = Function(look)
    ops: list[Any] = [add(x, x), call(function), add(x, x), call(function)]
    assert team.run(table(ops), 0) == (4, 0)
    assert seen == [(threading.get_ident(), 2.0), (threading.get_ident(), 4.0)]


@pytest.mark.parametrize("size", SIZES)
def test_a_call_that_does_not_give_0_ends_the_run_there(size: int) -> None:
    team, x = NativeTeam(compute_library(), size), torch.ones(4, 4)
    refuse = Function(lambda _first, _second, _third: 7)
    ops: list[Any] = [add(x, x), call(refuse), add(x, x)]
    for _ in range(100):
        x.fill_(1)
        assert team.run(table(ops), 0) == (1, 7)
        assert x[0, 0] == 2
        assert team.run(table(ops), 2) == (3, 0)
        assert x[0, 0] == 4


def test_members_wait_for_a_call_that_takes_its_time() -> None:
    """Long enough that they sleep."""
    team, x = NativeTeam(compute_library(), 3), torch.ones(64, 8)

    def wait(_first: int, _second: int, _third: int) -> int:
        time.sleep(0.05)
        return 0

    function = Function(wait)
    ops: list[Any] = [add(x, x), call(function), add(x, x)]
    assert team.run(table(ops), 0) == (3, 0)
    assert torch.equal(x, torch.full_like(x, 4.0))


@pytest.mark.parametrize("size", SIZES)
def test_a_member_that_wakes_late_from_a_call_takes_no_later_call_for_it(size: int) -> None:
    """Members sleep in the first call. When they wake, the next run may have been stopped at the same index."""
    libc, team = ctypes.CDLL(None), NativeTeam(compute_library(), size)
    slow, refused = call(libc.usleep, 1000), call(libc.abs, 7)
    x, ones = torch.zeros(64, 64), torch.ones(64, 64)
    for number in range(100):
        assert team.run_call(slow) == 0
        assert team.run_call(refused) == 7
        team.run_one(add(x, ones))
        assert torch.equal(x, torch.full_like(x, number + 1.0))


def test_a_run_of_nothing_is_none() -> None:
    team = NativeTeam(compute_library(), 2)
    assert team.run(table([]), 0) == (0, 0)


def test_threads_are_where_they_are_told_to_be_and_end_with_the_team() -> None:
    core = min(os.sched_getaffinity(0))
    before = threads_of_this_process()
    team = NativeTeam(compute_library(), 3, cpus=[core, core])
    own = threads_of_this_process() - before
    assert len(own) == 2
    assert all(os.sched_getaffinity(thread) == {core} for thread in own)
    del team
    gc.collect()
    assert eventually(lambda: not own & threads_of_this_process())


def test_a_team_may_be_as_large_as_the_resource_allows() -> None:
    most = re.search(r"#define HC_MAX_MEMBERS (\d+)", COMPUTE_HEADER.read_text(encoding="utf-8"))
    [limit] = [each.le for each in CpuSpec.model_fields["cores_per_rank"].metadata if isinstance(each, Le)]
    assert most is not None
    assert int(most[1]) == limit
    with pytest.raises(OSError, match=f"a team of {int(most[1]) + 1} threads"):
        NativeTeam(compute_library(), int(most[1]) + 1)


def test_a_team_that_cannot_be_had_says_so() -> None:
    before = threads_of_this_process()
    with pytest.raises(OSError, match="a team of 3 threads cannot be started"):
        NativeTeam(compute_library(), 3, cpus=[min(os.sched_getaffinity(0)), 10_000])
    with pytest.raises(OSError, match="a team of 0 threads"):
        NativeTeam(compute_library(), 0)
    with pytest.raises(ValueError, match="2 threads need as many cores, not 1"):
        NativeTeam(compute_library(), 3, cpus=[0])
    assert eventually(lambda: threads_of_this_process() == before)


@pytest.mark.parametrize("size", SIZES)
def test_rows_are_picked(size: int) -> None:
    team, x, index = NativeTeam(compute_library(), size), torch.randn(9, 33), torch.tensor([8, 0, 3, 3])
    y = torch.empty(4, 33)
    op = pick_op(4, 4 * 33, x.data_ptr(), index.data_ptr(), y.data_ptr())
    team.run_one(op)
    assert torch.equal(y, x[index])
