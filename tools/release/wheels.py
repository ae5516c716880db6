"""Wheels with the native libraries inside, one an architecture, and the source distribution.

The libraries ask nothing of Python and little of the C library, so one wheel serves all Pythons. auditwheel finds out
which C library they need at least, and names the wheel for it: manylinux_2_34 where Debian 12's compiler built them.
Compilers are those of Debian's names, `x86_64-linux-gnu-gcc` and `aarch64-linux-gnu-gcc`, native or not. hatchling and
what it needs are of the versions and hashes in locks/build.txt.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import venv
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tools.release.sources import ReleaseError, run

ARCHITECTURES: Final = ("x86_64", "aarch64")
LIBRARIES: Final = ("hetero_worker/distributed/libhetero_exchange.so", "hetero_worker/native/libhetero_compute.so")
_LOCK: Final = "locks/build.txt"


def build_wheels(tree: Path, folder: Path, architectures: Sequence[str], *, created: int) -> list[Path]:
    """Build what pip installs from a copy of the sources into `folder`; the files.

    `created` is the time, in seconds, of the files in them. Raises ReleaseError.
    """
    for architecture in architectures:
        compiler_of(architecture)
    with tempfile.TemporaryDirectory(prefix="hetero-release-") as name:
        work = Path(name)
        hatchling: list[str | Path] = [_backend(work / "backend", tree / _LOCK), "-m", "hatchling", "build"]
        run([*hatchling, "--target", "sdist", "--directory", folder], folder=tree, environment=_environment(created))
        files = list(folder.glob("*.tar.gz"))
        for architecture in architectures:
            made = work / architecture
            environment = {**_environment(created), **_cross(architecture)}
            run([*hatchling, "--target", "wheel", "--directory", made], folder=tree, environment=environment)
            (wheel,) = made.glob("*.whl")
            files.append(name_for_its_libc(wheel, folder, created=created))
    return files


def compiler_of(architecture: str) -> str:
    """Return the compiler's name. Raises ReleaseError where there is none."""
    compiler = f"{architecture}-linux-gnu-gcc"
    if shutil.which(compiler) is None:
        package = architecture.replace("_", "-")
        headers = {"x86_64": "amd64", "aarch64": "arm64"}[architecture]
        raise ReleaseError(
            f"there is no {compiler}: install Debian's packages gcc-{package}-linux-gnu and libc6-dev-{headers}-cross, "
            f"or say ARCHITECTURES without {architecture}"
        )
    return compiler


def name_for_its_libc(wheel: Path, folder: Path, *, created: int) -> Path:
    """Write a wheel with the tag of the oldest C library that its libraries run with; the file. Raises ReleaseError."""
    with zipfile.ZipFile(wheel) as read:
        if missing := set(LIBRARIES) - set(read.namelist()):
            raise ReleaseError(f"{wheel.name} has no {min(missing)}: its compiler failed; say make native to see why")
    before = set(folder.glob("*.whl"))
    audit = [sys.executable, "-m", "auditwheel", "repair", "--plat=auto", "--only-plat", "--patcher=none"]
    run([*audit, f"--wheel-dir={folder}", wheel], environment=_environment(created))
    (named,) = set(folder.glob("*.whl")) - before
    return named


def _backend(folder: Path, lock: Path) -> Path:
    """Make an environment with what builds the project; its Python."""
    venv.create(folder, with_pip=True)
    python = folder / "bin/python"
    strict = ["--require-hashes", "--only-binary=:all:", "--quiet", "--disable-pip-version-check"]
    run([python, "-m", "pip", "install", *strict, "--requirement", lock])
    return python


def _environment(created: int) -> dict[str, str]:
    return {**os.environ, "SOURCE_DATE_EPOCH": str(created), "PYTHONHASHSEED": "0"}


def _cross(architecture: str) -> Mapping[str, str]:
    """Return what has hatch_build.py compile for an architecture: sysconfig names the platform by the second."""
    return {"CC": compiler_of(architecture), "_PYTHON_HOST_PLATFORM": f"linux-{architecture}"}
