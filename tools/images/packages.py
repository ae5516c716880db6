"""What runs inside a build, with nothing but Python's standard library: the packages of an image, and the program.

    python3 packages.py dependencies LOCK [--torch cpu|cuda]   the packages of a lock, into VENV
    python3 packages.py program LOCK                           the project, into PROGRAM, to be laid over VENV

Two steps, because an image has a layer for each: packages change with the image's lock only, and are most of its size;
a change of the project's sources makes a layer of two megabytes anew.

pip takes nothing whose hash is not in a lock, and no package that it would have to build. A wheel that a lock names by
its URL is taken from the build context `wheels` if a file of that name is there; its hash has to be right all the same.

Byte code is made here, for a container cannot keep any: its root is read-only, and a rank that is started anew would
compile torch's sources each time. It is marked as never to be checked against the sources' times, which a copy from
one stage to another need not keep. One process compiles in a fixed order: the bytes of byte code depend on what else
was compiled before, and images are to be the same each time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final
from urllib.parse import unquote

BUILD: Final = Path("/build")
"""Where the project's files are copied to."""
VENV: Final = Path("/opt/hetero")
PIP: Final = Path("/opt/pip")
"""A second environment, that has pip: what is shipped needs none."""
PROGRAM: Final = Path("/program")
WHEELS: Final = Path("/wheels")
"""The build context `wheels`; empty unless one is given."""
CA_BUNDLE: Final = Path("/run/secrets/ca-bundle")

STRICT: Final = ("--require-hashes", "--only-binary=:all:")
"""How pip installs a lock: nothing without a hash, and nothing that would have to be built, which runs its code."""

NEVER_RUN: Final = (
    "numpy/**/tests",
    "numpy/_core/include",
    "numpy/_core/lib",
    "sympy/**/tests",
    "networkx/**/tests",
    "mpmath/tests",
    "kubernetes/client/api/*_api.py",
    "kubernetes/aio/client/api/*_api.py",
    "torch/bin/protoc*",
    "torch/bin/*test*",
    "torch/test",
    "torch/include",
    "torch/share",
    "torch/lib/*.a",
    "nvidia/**/include",
    "nvidia/**/*.a",
    "**/*.pyi",
    "**/*.pxd",
    "**/*.pyx",
)
"""Below site-packages: tests, headers, static libraries and type stubs; and the Kubernetes client's classes of API
calls, which it loads when they are asked for: the operator calls paths."""


def never_runs(path: str) -> bool:
    """Return whether a file, by its path below site-packages, is below one of NEVER_RUN's patterns."""
    return _NEVER_RUN.fullmatch(path) is not None


def _expression(pattern: str) -> str:
    """Return a regular expression for a pattern: `**/` is any folders, `*` any text of one name, a folder all below."""
    parts = re.split(r"(\*\*/|\*)", pattern)
    return "".join({"**/": "(?:.*/)?", "*": "[^/]*"}.get(part, re.escape(part)) for part in parts) + "(?:/.*)?"


_NEVER_RUN: Final = re.compile("|".join(map(_expression, NEVER_RUN)), re.DOTALL)


def trim(site_packages: Path) -> int:
    """Remove what never runs, and folders that held nothing else; the bytes gained."""
    gained = 0
    for file in [path for path in site_packages.rglob("*") if path.is_symlink() or path.is_file()]:
        if never_runs(file.relative_to(site_packages).as_posix()):
            gained += file.lstat().st_size
            file.unlink()
            _remove_empty(file.parent, site_packages)
    return gained


def _remove_empty(folder: Path, root: Path) -> None:
    while folder != root and not any(folder.iterdir()):
        folder.rmdir()
        folder = folder.parent


def with_local_wheels(lock: str, wheels: Path) -> str:
    """Return a lock's text, in which URLs are those of files below `wheels` where there is one of that name."""

    def local(match: re.Match[str]) -> str:
        file = wheels / unquote(match[1])
        return f" @ {file.as_uri()} " if file.is_file() else match[0]

    return re.sub(r" @ https://\S*/([^/\s]+) ", local, lock)


def install_dependencies(lock: Path, *, torch: str | None) -> None:
    """Packages of a lock into VENV, without what never runs, with byte code."""
    _pip_locked(["--python", VENV / "bin/python"], lock)
    site_packages = _site_packages(VENV)
    print(f"removed {trim(site_packages) / 1e6:.0f} MB that never run")
    if torch:
        _check_torch(torch)
    _compile(site_packages)


def install_program(lock: Path) -> None:
    """The project into PROGRAM, built by a lock's packages.

    Fails where the native exchange could not be built: ranks would be slower unnoticed.
    """
    _pip_locked([], lock)
    # Not pip, which would compile the kernels once for the metadata, and once more for the wheel. What is installed
    # says where it came from, so that has the same name each time.
    wheels = BUILD / "dist"
    _run([PIP / "bin/python", "-m", "hatchling", "build", "--target", "wheel", "--directory", wheels], folder=BUILD)
    (wheel,) = wheels.glob("*.whl")
    _pip(["--python", VENV / "bin/python"], ["--no-deps", "--prefix", PROGRAM, wheel])
    site_packages = _site_packages(PROGRAM)
    if not list(site_packages.glob("hetero_worker/distributed/*.so")):
        sys.exit("packages.py: the native exchange was not built; see the warning above")
    _compile(site_packages)


def _pip_locked(target: Sequence[str | Path], lock: Path) -> None:
    """Install a lock's packages, each with the hash that the lock has for it, and built by nobody here."""
    with tempfile.TemporaryDirectory() as folder:
        requirements = Path(folder) / lock.name
        requirements.write_text(with_local_wheels(lock.read_text(encoding="utf-8"), WHEELS), encoding="utf-8")
        _pip(target, [*STRICT, "--requirement", requirements])


def _pip(target: Sequence[str | Path], arguments: Sequence[str | Path]) -> None:
    """Install by pip of the environment PIP; `target` says for which other."""
    certificates = {"PIP_CERT": str(CA_BUNDLE)} if CA_BUNDLE.exists() else {}
    settings = ["--no-compile", "--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore"]
    found: list[str | Path] = ["--find-links", WHEELS] if WHEELS.is_dir() and any(WHEELS.iterdir()) else []
    pip: list[str | Path] = [PIP / "bin/python", "-m", "pip", *target, "install", *settings, *found, *arguments]
    _run(pip, environment={**os.environ, **certificates})


def _check_torch(kind: str) -> None:
    """That torch can be imported still, and is the build that the image is for."""
    question = "import torch; print('cuda' if torch.version.cuda else 'cpu')"
    answer = subprocess.run([VENV / "bin/python", "-B", "-c", question], check=True, text=True, stdout=subprocess.PIPE)
    if answer.stdout.strip() != kind:
        sys.exit(f"packages.py: torch is a build for {answer.stdout.strip()}, not {kind}: see the lock")


def _compile(site_packages: Path) -> None:
    """Byte code of all sources, whether there is some or not: what an import has made holds its source's time.

    One that is no valid Python (templates, for instance) is left as it is.
    """
    options = ["-f", "-q", "-q", "--invalidation-mode", "unchecked-hash"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    _run([VENV / "bin/python", "-m", "compileall", *options, site_packages], check=False, environment=environment)


def _site_packages(prefix: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(prefix), "platbase": str(prefix)}))


def _run(
    command: Sequence[str | Path],
    *,
    check: bool = True,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> None:
    subprocess.run([str(part) for part in command], check=check, env=environment, cwd=folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    dependencies = steps.add_parser("dependencies")
    dependencies.add_argument("lock", type=Path)
    dependencies.add_argument("--torch", choices=("cpu", "cuda"))
    steps.add_parser("program").add_argument("lock", type=Path)
    chosen = parser.parse_args()
    try:
        if chosen.step == "program":
            install_program(chosen.lock)
        else:
            install_dependencies(chosen.lock, torch=chosen.torch)
    except subprocess.CalledProcessError as error:
        sys.exit(f"packages.py: {' '.join(map(str, error.cmd[:4]))} … ended with exit status {error.returncode}")


if __name__ == "__main__":
    main()
