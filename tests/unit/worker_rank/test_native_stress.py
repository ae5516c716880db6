"""The native exchanges under their stress driver: plain, under sanitizers, and with faults put in, which must show."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hetero_worker.native.build import TCP_SOURCE
from tests.support.native_stress import (
    ADDRESS_SANITIZER,
    THREAD_SANITIZER,
    build_stress,
    build_tcp_stress,
    lacks,
    mutant,
    run_stress,
)

pytestmark = [pytest.mark.unit, pytest.mark.slow]

WRONG_ELEMENT, NOBODY_WOKE_IT, RACE = 1, 2, 66


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_hundred_thousand_rounds_are_right(ranks: int, tmp_path: Path) -> None:
    done = run_stress(build_stress(tmp_path, "-O3"), ranks=ranks, rounds=100_000, seed=ranks)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [THREAD_SANITIZER, ADDRESS_SANITIZER], ids=["thread", "address"])
def test_sanitizers_find_nothing(flags: tuple[str, ...], tmp_path: Path) -> None:
    if reason := lacks(tmp_path, flags):
        pytest.skip(f"no sanitizer: {reason}")

    done = run_stress(build_stress(tmp_path, *flags), ranks=4, rounds=10_000)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_two_thousand_rounds_over_tcp_are_right(ranks: int, tmp_path: Path) -> None:
    done = run_stress(build_tcp_stress(tmp_path, "-O3"), ranks=ranks, rounds=2_000, seed=ranks)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("flags", [THREAD_SANITIZER, ADDRESS_SANITIZER], ids=["thread", "address"])
def test_sanitizers_find_nothing_over_tcp(flags: tuple[str, ...], tmp_path: Path) -> None:
    if reason := lacks(tmp_path, flags):
        pytest.skip(f"no sanitizer: {reason}")

    done = run_stress(build_tcp_stress(tmp_path, *flags), ranks=4, rounds=1_000)

    assert (done.returncode, done.stderr) == (0, "")


def test_it_runs_on_arm64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated, on a machine of another kind."""
    for program in ("aarch64-linux-gnu-gcc", "qemu-aarch64"):
        if shutil.which(program) is None:
            pytest.skip(f"there is no {program} here")
    monkeypatch.setenv("CC", "aarch64-linux-gnu-gcc")

    done = run_stress(build_stress(tmp_path, "-O3", "-static"), ranks=3, rounds=2_000, under=["qemu-aarch64"])

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("was", "becomes", "status"),
    [
        ("for (uint64_t left = seats; left && result", "for (uint64_t left = 0; left && result", WRONG_ELEMENT),
        ("areas[seat][round & 1]", "areas[seat][round & 0]", WRONG_ELEMENT),
        ("if (group->settled < number - 1)", "if (0)", WRONG_ELEMENT),
        ("number > HX_LINK_DEPTH ? number - HX_LINK_DEPTH : 0", "0", WRONG_ELEMENT),
        ("1) << group->own)", "1) << group->own) & ~UINT64_C(1)", WRONG_ELEMENT),
        ("&seat->asleep, memory_order_seq_cst))\n", "&seat->asleep, memory_order_seq_cst) > 1)\n", NOBODY_WOKE_IT),
    ],
    ids=["no wait", "one parity", "overwritten too early", "link overrun", "rank 0 not waited for", "no wake"],
)  # fmt: skip
def test_a_fault_in_the_algorithm_shows(was: str, becomes: str, status: int, tmp_path: Path) -> None:
    program = build_stress(tmp_path, "-O2", "-Wno-unused", source=mutant(tmp_path, was, becomes))

    assert run_stress(program, ranks=3, rounds=50_000).returncode == status


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        ("ready = lesser(ready, group->sent[lane][seat]);", "ready += 0;"),
        ("ready = lesser(ready, group->got[lane][seat]);", "ready += 0;"),
        ("room = ring_bytes - (*got - group->added[lane])", "room = ring_bytes"),
        ("link->ring_bytes - (link->filled - link->emptied))", "link->ring_bytes)"),
        ("lesser(lane * part, bytes)", "lesser(lane * 0, bytes)"),
    ],
    ids=["replaced before it is sent", "added before it is there", "ring overrun", "link overrun", "one lane"],
)
def test_a_fault_in_the_algorithm_over_tcp_shows(was: str, becomes: str, tmp_path: Path) -> None:
    changed = mutant(tmp_path, was, becomes, source=TCP_SOURCE)
    program = build_tcp_stress(tmp_path, "-O2", "-Wno-unused", source=changed)

    assert run_stress(program, ranks=3, rounds=5_000).returncode == WRONG_ELEMENT


@pytest.mark.parametrize(
    ("was", "becomes"),
    [
        (
            "atomic_store_explicit(word_at(rank, offset), number, memory_order_seq_cst);",
            "atomic_store_explicit(word_at(rank, offset), number, memory_order_relaxed);",
        ),
        (
            "atomic_load_explicit(word_at(rank, offset), memory_order_acquire) >= number",
            "atomic_load_explicit(word_at(rank, offset), memory_order_relaxed) >= number",
        ),
    ],
    ids=["no release", "no acquire"],
)
def test_a_weaker_memory_order_is_a_race(was: str, becomes: str, tmp_path: Path) -> None:
    """Which no test on x86-64 would notice without the sanitizer."""
    if reason := lacks(tmp_path, THREAD_SANITIZER):
        pytest.skip(f"no sanitizer: {reason}")
    program = build_stress(tmp_path, *THREAD_SANITIZER, source=mutant(tmp_path, was, becomes))

    done = run_stress(program, ranks=3, rounds=2_000)

    assert "data race" in done.stderr
    assert done.returncode == RACE
