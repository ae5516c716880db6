"""Every check of what is installed, and the process that says what ranks would compute with."""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import pytest

from hetero_client.doctor.findings import Grade
from hetero_client.doctor.software import (
    SOFTWARE_CHECKS,
    RankSoftware,
    Software,
    check_compiler,
    check_exchange,
    check_gpus,
    check_instruction_set,
    check_kernels,
    check_software,
    check_torch,
    check_transformers,
    is_older,
    read_software,
)

pytestmark = pytest.mark.unit

RANKS = RankSoftware("2.13.0+cpu", "", "x86_64", "/usr/bin/cc", "", ("avx512", "avx2", "generic"), "", ())
GOOD = Software({"torch": "2.13.0+cpu", "transformers": "5.23.0"}, {"torch": "2.11", "transformers": "5.0"}, RANKS)
NOT_BUILT = "the native kernels were not built: install a C compiler"
OLD_DRIVER = "this node's NVIDIA driver is 470.82.01, and torch needs 580; update the driver"


def with_ranks(**changes: object) -> Software:
    return replace(GOOD, ranks=replace(RANKS, **changes))  # type: ignore[arg-type]


CASES = [
    (check_torch, replace(GOOD, versions={}, ranks=None), Grade.FAIL, "not installed"),
    (check_torch, replace(GOOD, versions={"torch": "2.9.1"}), Grade.FAIL, "2.9.1, older than 2.11"),
    (check_torch, replace(GOOD, ranks=None, problem="no cffi"), Grade.FAIL, "ranks do not start: no cffi"),
    (check_torch, with_ranks(torch="2.13.0", cuda="13.0"), Grade.OK, "2.13.0, for CUDA 13.0"),
    (check_transformers, replace(GOOD, versions={"torch": "2.13.0"}), Grade.WARN, "not installed"),
    (check_transformers, replace(GOOD, versions={"transformers": "4.57.1"}), Grade.WARN, "4.57.1, older than 5.0"),
    (check_compiler, with_ranks(compiler="", kernels_problem=NOT_BUILT), Grade.WARN, "none"),
    (check_compiler, with_ranks(compiler=""), Grade.OK, "none; the native libraries are built"),
    (check_kernels, with_ranks(kernels_problem=NOT_BUILT, isas=()), Grade.WARN, NOT_BUILT),
    (check_kernels, replace(GOOD, ranks=None), Grade.WARN, "not told"),
    (check_exchange, with_ranks(exchange_problem="stale"), Grade.WARN, "stale"),
    (check_exchange, replace(GOOD, ranks=None), Grade.WARN, "not told"),
    (check_instruction_set, with_ranks(isas=("generic",)), Grade.WARN, "neither AVX2 nor AVX-512"),
    (check_instruction_set, with_ranks(isas=("generic",), architecture="aarch64"), Grade.OK, "generic"),
    (check_instruction_set, replace(GOOD, asked_isa="avx2"), Grade.WARN, "avx2, by HETERO_CPU_ISA"),
    (check_gpus, with_ranks(gpu_problems=("", OLD_DRIVER)), Grade.FAIL, "1 of 2 cannot be used: this node's NVIDIA"),
    (check_gpus, with_ranks(gpu_problems=("", "")), Grade.OK, "2, all usable by torch"),
]


def test_a_good_installation_passes_every_check() -> None:
    findings = check_software(GOOD)
    assert [finding for finding in findings if finding.grade is not Grade.OK] == []
    assert len({finding.check for finding in findings}) == len(SOFTWARE_CHECKS)


@pytest.mark.parametrize(("check", "software", "grade", "seen"), CASES)
def test_a_check_finds_what_is_missing(check: object, software: Software, grade: Grade, seen: str) -> None:
    assert callable(check)
    finding = check(software)
    assert finding.grade is grade
    assert seen in finding.seen
    assert bool(finding.cost) == bool(finding.fix) == (grade is not Grade.OK)


def test_every_check_can_find_something() -> None:
    assert {check for check, _, grade, _ in CASES if grade is not Grade.OK} == set(SOFTWARE_CHECKS)


def test_the_fix_of_a_gpu_is_what_the_backend_advises() -> None:
    assert check_gpus(with_ranks(gpu_problems=(OLD_DRIVER,))).fix == "update the driver"


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.13.0+cpu", "2.11", False),
        ("2.9", "2.11", True),
        ("2.11", "2.11", False),
        ("3", "2.11", False),
        ("1", "", False),
    ],
)
def test_versions_are_compared_by_numbers(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) is older


def test_a_process_reports_what_ranks_would_compute_with() -> None:
    software = read_software(os.environ)
    assert software.problem == ""
    assert software.ranks is not None
    assert software.ranks.torch == software.versions["torch"]
    assert bool(software.ranks.isas) == (not software.ranks.kernels_problem)
    assert not software.ranks.isas or "generic" in software.ranks.isas
    assert {"torch", "transformers"} <= software.least.keys()


def test_a_process_that_fails_is_a_finding_with_its_last_line() -> None:
    program = (sys.executable, "-c", "raise SystemExit('torch is broken')")
    software = read_software(os.environ, program=program)
    assert (software.ranks, software.problem) == (None, "torch is broken")
    assert read_software(os.environ, program=("/no/such/program",)).ranks is None
