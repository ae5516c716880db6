"""What a result says of the machine and the versions it was measured with."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from bench.home import ROOT

_VECTOR: Final = frozenset({"avx2", "avx_vnni", "fma", "f16c", "asimd", "asimddp", "i8mm", "bf16"})
_VECTOR_FAMILIES: Final = ("avx512", "amx_", "sve")


def describe() -> dict[str, Any]:
    """Date, machine, command and revision."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "revision": revision(),
        "machine": {
            "cpu": cpu_name(),
            "instruction_sets": instruction_sets(),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
        },
        "command": " ".join(sys.orig_argv[1:]),
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def instruction_sets() -> list[str]:
    """Return the vector and tile extensions of the CPU that kernels may use, as the kernel names them, sorted."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        name, _, flags = line.partition(":")
        if name.strip() in {"flags", "Features"}:
            return sorted(flag for flag in flags.split() if flag in _VECTOR or flag.startswith(_VECTOR_FAMILIES))
    return []


def revision() -> str:
    """Of the working tree, with "+" if it differs from the commit; empty where there is no git."""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty=+"]
    told = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    return told.stdout.strip()
