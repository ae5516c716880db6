"""A rank process, as hetero_worker is one, that says at its end what it touched of CUDA.

    python -m tests.support.quiet_rank ...      hetero_worker's own options

HETERO_TEST_CUDA_MARK names a file. A line is written to it for each call that torch makes to begin with CUDA, and at
the end one for each library or device file of a GPU's driver that is mapped or open.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import NoReturn
from unittest import mock

MARK = "HETERO_TEST_CUDA_MARK"
_DRIVER = re.compile(r"(\S*/libcuda\.so\S*|/dev/nvidia\S*)")


def note(line: str) -> None:
    with Path(os.environ[MARK]).open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def driver_files() -> set[str]:
    """Of this process: what is mapped, and what is open."""
    opened = (os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if os.path.islink(entry.path))
    return set(_DRIVER.findall("\n".join([Path("/proc/self/maps").read_text(encoding="utf-8"), *opened])))


def refuse(*_: object, **__: object) -> NoReturn:
    note("torch.cuda was initialised")
    raise AssertionError("a CPU rank initialised torch.cuda")


def be_a_rank(arguments: list[str]) -> int:
    # Early, before the process is bound to cores, which these tests do not ask for.
    import torch.cuda

    from hetero_worker.process.rank import main

    note("started")
    with mock.patch.object(torch.cuda, "_lazy_init", refuse):
        try:
            return main(arguments, os.environ)
        finally:
            for file in sorted(driver_files()):
                note(f"has {file}")


if __name__ == "__main__":
    sys.exit(be_a_rank(sys.argv[1:]))
