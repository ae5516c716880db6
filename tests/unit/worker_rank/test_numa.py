"""What the kernel tells of affinity and memory, and what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetero_worker.host.numa import (
    MPOL_BIND,
    MPOL_PREFERRED,
    LinuxKernel,
    MemoryPolicy,
    anonymous_bytes,
    local_percent,
    parse_numa_maps,
    threads_started_on,
)
from tests.support.played_kernel import PlayedKernel

pytestmark = pytest.mark.unit

NUMA_MAPS = """\
55a0c0000000 default file=/usr/bin/python3.11 mapped=2 N0=2 kernelpagesize_kB=4
7f6c00000000 bind:1 anon=3 dirty=3 N0=1 N1=2 kernelpagesize_kB=4
7f6c10000000 default file=/dev/zero\\040(deleted) dirty=256 N1=256 kernelpagesize_kB=4
7f6c20000000 default
"""


def test_numa_maps_tells_the_pages_of_the_mapping_asked_for() -> None:
    assert parse_numa_maps(NUMA_MAPS, 0x7F6C00000000) == {0: 1, 1: 2}
    assert parse_numa_maps(NUMA_MAPS, 0x7F6C10000000) == {1: 256}
    assert parse_numa_maps(NUMA_MAPS, 0x7F6C20000000) == {}
    assert parse_numa_maps(NUMA_MAPS, 0x1000) is None


MEMORY_MAPS = """\
55a0c0000000 default file=/usr/bin/python3.11 mapped=2 N0=2 kernelpagesize_kB=4
55a0c1000000 default file=/usr/bin/python3.11 anon=4 dirty=4 N0=4 kernelpagesize_kB=4
55a0c2000000 default heap anon=512 dirty=512 N0=512 kernelpagesize_kB=4
7f6c00000000 bind:1 anon=1024 dirty=1024 N0=512 N1=512 kernelpagesize_kB=4
7f6c10000000 default huge anon=2 dirty=2 N1=2 kernelpagesize_kB=2048
7f6c20000000 default file=/dev/shm/x dirty=256 N1=256 kernelpagesize_kB=4
7f6c30000000 default stack:1 anon=0
"""


def test_anonymous_memory_is_counted_in_bytes_of_its_pages() -> None:
    assert anonymous_bytes(MEMORY_MAPS) == {0: 1024 * 4096, 1: 512 * 4096 + 2 * 2**21}


@pytest.mark.parametrize(
    ("nodes", "before", "percent"),
    [
        ((0,), {}, 40),
        ((1,), {}, 60),
        ((0, 1), {}, 100),
        ((7,), {}, 0),
        ((), {}, None),
        ((1,), {0: 40}, 100),  # all that came since lies on node 1
        ((1,), {0: 50, 1: 30}, 100),  # some of what was there before is gone
        ((0,), {0: 40, 1: 60}, None),
    ],
)
def test_share_of_new_memory_on_the_ranks_own_nodes(
    nodes: tuple[int, ...], before: dict[int, int], percent: int | None
) -> None:
    assert local_percent(nodes, {0: 40, 1: 60}, before=before) == percent


def test_share_is_rounded_down() -> None:
    assert local_percent((0,), {0: 999, 1: 1}) == 99


def test_nothing_is_told_where_the_kernel_has_no_numa_maps(tmp_path: Path) -> None:
    kernel = LinuxKernel(proc_root=tmp_path)
    assert kernel.probe_pages() is None
    assert kernel.memory_by_node() is None
    assert kernel.memory_nodes() is None


def in_a_thread(work: Callable[[], None]) -> None:
    """Affinity and memory policy end with the thread."""
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if problems:
        raise problems[0]


def test_the_running_kernel_does_as_it_is_told() -> None:
    def work() -> None:
        kernel = LinuxKernel()
        first = min(kernel.affinity())
        kernel.set_affinity([first])
        assert kernel.affinity() == {first}
        pages = kernel.probe_pages()
        if pages is None or kernel.memory_policy() is None:
            pytest.skip("this sandbox tells nothing of NUMA")
        assert kernel.knows_numa()
        node = min(kernel.memory_nodes() or {0})
        for mode in (MPOL_BIND, MPOL_PREFERRED):
            kernel.set_memory_policy(mode, [node])
            assert kernel.memory_policy() == MemoryPolicy(mode, (node,))
        assert kernel.probe_pages() == {node: 256}
        assert (kernel.memory_by_node() or {})[node] > 2**20

    in_a_thread(work)


def test_threads_started_within_run_elsewhere_and_the_caller_comes_home() -> None:
    def work() -> None:
        kernel, seen = LinuxKernel(), []
        home = kernel.affinity()
        with threads_started_on([max(home)], kernel):
            other = threading.Thread(target=lambda: seen.append(kernel.affinity()))
            other.start()
            other.join()
        assert seen == [{max(home)}]
        assert kernel.affinity() == home

    in_a_thread(work)


def test_without_cpus_for_them_threads_start_where_the_caller_is() -> None:
    kernel = PlayedKernel({0, 1})
    with threads_started_on((), kernel):
        assert kernel.affinity() == {0, 1}


def test_cpus_that_the_cpuset_took_away_are_said_and_not_insisted_on(caplog: pytest.LogCaptureFixture) -> None:
    class Shrunk(PlayedKernel):
        def set_affinity(self, cpus: object) -> None:
            raise OSError(22, "Invalid argument")

    with threads_started_on([5], Shrunk({0, 1})):
        pass
    assert "cannot run on CPUs 5: Invalid argument" in caplog.text
