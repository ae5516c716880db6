"""Installed software that ranks run on, and the checks of it.

Versions come from the packages' metadata. What only a rank's own code can say (native libraries, instruction sets,
devices) comes from `python -m hetero_worker.backends.software`, a process, so nothing of it is loaded here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib import metadata
from typing import Any, Final

from hetero_api.contract import ENV_CPU_ISA
from hetero_client.doctor.findings import Finding, fail, ok, warn

DISTRIBUTION: Final = "heteroinference"
TORCH: Final = "torch"
TRANSFORMERS: Final = "transformers"
PROGRAM: Final = (sys.executable, "-m", "hetero_worker.backends.software")
TIMEOUT_S: Final = 120.0
"""Limit of the process, which imports torch."""
GENERIC: Final = "generic"
"""Kernels for what every processor of an architecture has."""
X86: Final = "x86_64"
_BUILD: Final = f"install a C compiler (gcc or clang), then: {sys.executable} -m hetero_worker.native.build"
_BOUND: Final = re.compile(r"^(?P<name>[\w-]+)>=(?P<least>\d+(?:\.\d+)*)")


@dataclass(frozen=True, slots=True)
class RankSoftware:
    """Facts that the code of ranks reports; see `hetero_worker.backends.software.report`."""

    torch: str
    cuda: str
    """Version of CUDA that torch is built for; "" without."""
    architecture: str
    """As the kernel names it, e.g. "x86_64"."""
    compiler: str
    kernels_problem: str
    isas: tuple[str, ...]
    exchange_problem: str
    gpu_problems: tuple[str, ...]
    """For each visible GPU why it cannot be used; "" where it can."""


@dataclass(frozen=True, slots=True)
class Software:
    """Packages that are installed, and what the code of ranks reports."""

    versions: Mapping[str, str]
    """Versions of torch and transformers, as far as they are installed."""
    least: Mapping[str, str]
    """Versions that this package asks for at least."""
    ranks: RankSoftware | None
    """None where the code of ranks does not run."""
    problem: str = ""
    """Why it does not."""
    asked_isa: str = ""
    """Instruction set that the environment asks for."""


def read_software(environment: Mapping[str, str], *, program: Sequence[str] = PROGRAM) -> Software:
    """Look at what is installed. Takes seconds, as torch is imported in a process."""
    versions = {name: found for name in (TORCH, TRANSFORMERS) if (found := _version(name))}
    ranks, problem = _ask(program, environment) if TORCH in versions else (None, "torch is not installed")
    return Software(versions, _least_versions(), ranks, problem, environment.get(ENV_CPU_ISA, ""))


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _least_versions() -> dict[str, str]:
    try:
        requirements = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:  # the sources are used without an installation
        return {}
    bounds = (_BOUND.match(requirement) for requirement in requirements)
    return {bound["name"]: bound["least"] for bound in bounds if bound}


def _ask(program: Sequence[str], environment: Mapping[str, str]) -> tuple[RankSoftware | None, str]:
    """Return what the code of ranks reports, or why it reports nothing."""
    try:
        done = subprocess.run(
            program, env=dict(environment), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, str(error)
    if done.returncode:
        return None, (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    return ranks_from(json.loads(done.stdout.splitlines()[-1])), ""


def ranks_from(data: Mapping[str, Any]) -> RankSoftware:
    """Return a report as a dataclass."""
    given = ((field.name, data[field.name]) for field in fields(RankSoftware))
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in given}
    return RankSoftware(**values)


def check_torch(software: Software) -> Finding:
    """Check that torch is there, and that the code of ranks runs with it."""
    seen, least = software.versions.get(TORCH, "none"), software.least.get(TORCH, "")
    cost, fix = "no rank can start on this machine", f"pip install '{DISTRIBUTION}[worker]'"
    if TORCH not in software.versions:
        return fail("torch", "not installed", cost=cost, fix=fix)
    if is_older(seen, least):
        return fail("torch", f"{seen}, older than {least}", cost=cost, fix=fix)
    if software.ranks is None:
        return fail("torch", f"{seen}; ranks do not start: {software.problem}", cost=cost, fix=fix)
    cuda = software.ranks.cuda
    return ok("torch", f"{software.ranks.torch}, {f'for CUDA {cuda}' if cuda else 'without CUDA'}")


def check_transformers(software: Software) -> Finding:
    """Check that transformers is there, for models that are converted when they are fetched."""
    seen, least = software.versions.get(TRANSFORMERS, ""), software.least.get(TRANSFORMERS, "")
    if seen and not is_older(seen, least):
        return ok("transformers", seen)
    return warn(
        "transformers", f"{seen}, older than {least}" if seen else "not installed",
        cost="`hetero model fetch` cannot convert the demo model; nothing else needs it",
        fix=f"pip install '{DISTRIBUTION}[models]'",
    )  # fmt: skip


def is_older(version: str, least: str) -> bool:
    """Return True if a version such as "2.13.0+cpu" is below `least`; never where `least` is unknown."""
    return bool(least) and _numbers(version) < _numbers(least)


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]


def check_kernels(software: Software) -> Finding:
    """Check that the native kernels of host cores can be used."""
    problem = software.ranks.kernels_problem if software.ranks else ""
    cost = "ranks on host cores compute with torch's operators, and decode several times slower"
    return _check_library("native kernels", software.ranks, problem, cost=cost)


def check_exchange(software: Software) -> Finding:
    """Check that the native exchange can be used."""
    problem = software.ranks.exchange_problem if software.ranks else ""
    cost = "ranks exchange over Gloo, which takes longer in every layer, and steps are not recorded whole"
    return _check_library("native exchange", software.ranks, problem, cost=cost)


def _check_library(name: str, ranks: RankSoftware | None, problem: str, *, cost: str) -> Finding:
    if ranks is None:
        return warn(name, "not told", cost="unknown: the code of ranks does not run", fix=_BUILD)
    return warn(name, problem, cost=cost, fix=_fix_of_build(ranks)) if problem else ok(name, "built")


def _fix_of_build(ranks: RankSoftware) -> str:
    return f"{sys.executable} -m hetero_worker.native.build" if ranks.compiler else _BUILD


def check_compiler(software: Software) -> Finding:
    """Check that there is a C compiler, or nothing left to compile."""
    ranks = software.ranks
    if ranks is None or ranks.compiler:
        return ok("C compiler", ranks.compiler if ranks else "not told")
    if not (ranks.kernels_problem or ranks.exchange_problem):
        return ok("C compiler", "none; the native libraries are built")
    return warn("C compiler", "none", cost="the native libraries cannot be built here", fix=_BUILD)


def check_instruction_set(software: Software) -> Finding:
    """Check that ranks on host cores compute with vectors, and with the widest that the processor has."""
    ranks, asked = software.ranks, software.asked_isa
    if ranks is None or not ranks.isas:
        return ok("instruction set", "torch chooses: there are no native kernels")
    best = ranks.isas[0]
    if asked and asked != best:
        return warn(
            "instruction set", f"{asked}, by {ENV_CPU_ISA}; the processor has {best}",
            cost="kernels use narrower vectors than they could", fix=f"unset {ENV_CPU_ISA}",
        )  # fmt: skip
    if best != GENERIC or ranks.architecture != X86:
        return ok("instruction set", best)
    return warn(
        "instruction set", f"{best}: the processor shows neither AVX2 nor AVX-512",
        cost="products of matrices run without wide vectors, many times slower",
        fix="pass the host's processor to the guest (QEMU: -cpu host), or take one with AVX2",
    )  # fmt: skip


def check_gpus(software: Software) -> Finding:
    """Check that torch can use every NVIDIA GPU that is visible here."""
    if software.ranks is None:
        return ok("GPUs", "not told: the code of ranks does not run")
    problems = software.ranks.gpu_problems
    wrong = [number for number, problem in enumerate(problems) if problem]
    if not wrong:
        return ok("GPUs", f"{len(problems)}, all usable by torch" if problems else "none visible")
    cause, _, remedy = problems[wrong[0]].partition("; ")
    return fail(
        "GPUs", f"{len(wrong)} of {len(problems)} cannot be used: {cause}",
        cost="ranks of type GPU cannot start on them", fix=remedy,
    )  # fmt: skip


SOFTWARE_CHECKS: Final[Sequence[Callable[[Software], Finding]]] = (
    check_torch, check_transformers, check_compiler, check_kernels, check_exchange, check_instruction_set, check_gpus,
)  # fmt: skip


def check_software(software: Software) -> list[Finding]:
    """Return the findings of all checks of what is installed."""
    return [check(software) for check in SOFTWARE_CHECKS]
