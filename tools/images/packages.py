"""What runs inside a build, with nothing but Python's standard library: the packages of an image, and the program.

    python3 packages.py dependencies EXTRA... [--torch cpu|cuda]   what extras of pyproject.toml need, into VENV
    python3 packages.py program                                    the project, into PROGRAM, to be laid over VENV

Two steps, because an image has a layer for each: packages change with pyproject.toml and constraints.txt only, and are
most of its size; a change of the project's sources makes a layer of two megabytes anew.

Byte code is made here, for a container cannot keep any: its root is read-only, and a rank that is started anew would
compile torch's sources each time. It is marked as never to be checked against the sources' times, which a copy from
one stage to another need not keep.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

BUILD: Final = Path("/build")
"""Where the project's files are copied to."""
VENV: Final = Path("/opt/hetero")
PIP: Final = Path("/opt/pip")
"""A second environment, that has pip: what is shipped needs none."""
PROGRAM: Final = Path("/program")
WHEELS: Final = Path("/wheels")
"""The build context `wheels`; empty unless one is given."""
CA_BUNDLE: Final = Path("/run/secrets/ca-bundle")

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


def requirements(project: Mapping[str, Any], extras: Sequence[str]) -> list[str]:
    """What the base install and these extras need, the project's own extras resolved. Raises ValueError."""
    known = project["optional-dependencies"]
    found = list(project["dependencies"])
    for extra in extras:
        if extra not in known:
            raise ValueError(f"{extra!r} is no extra of pyproject.toml: {', '.join(known)}")
        for requirement in known[extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[([\w,-]+)\]", requirement)
            found += requirements({**project, "dependencies": []}, own[1].split(",")) if own else [requirement]
    return list(dict.fromkeys(found))


def doomed(site_packages: Path) -> Iterator[Path]:
    """Files and folders below NEVER_RUN's patterns."""
    for pattern in NEVER_RUN:
        yield from sorted(site_packages.glob(pattern))


def trim(site_packages: Path) -> int:
    """Remove what never runs; the bytes gained."""
    gained = 0
    for path in doomed(site_packages):
        if path.is_dir():
            gained += sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            shutil.rmtree(path)
        elif path.exists():
            gained += path.stat().st_size
            path.unlink()
    return gained


def install_dependencies(extras: Sequence[str], *, torch: str | None, environment: Mapping[str, str]) -> None:
    """Packages into VENV, without what never runs, with byte code."""
    with (BUILD / "pyproject.toml").open("rb") as file:
        wanted = requirements(tomllib.load(file)["project"], extras)
    index = environment.get("TORCH_INDEX", "") if torch else ""
    _pip(
        ["install", "--no-compile", "--constraint", BUILD / "constraints.txt"],
        [*(["--extra-index-url", index] if index else []), *wanted],
    )
    site_packages = _site_packages(VENV)
    print(f"removed {trim(site_packages) / 1e6:.0f} MB that never run")
    if torch:
        _check_torch(torch)
    _compile(site_packages)


def install_program() -> None:
    """The project into PROGRAM. Fails where the native exchange could not be built: ranks would be slower unnoticed."""
    _pip(["install", "--no-compile", "--no-deps", "--prefix", PROGRAM], [BUILD])
    site_packages = _site_packages(PROGRAM)
    if not list(site_packages.glob("hetero_worker/distributed/*.so")):
        sys.exit("packages.py: the native exchange was not built; see the warning above")
    _compile(site_packages)


def _pip(command: Sequence[str | Path], arguments: Sequence[str | Path]) -> None:
    """pip of the environment PIP, for the environment VENV."""
    # A variable, not an option: the pip that installs the build's own requirements has to know as well.
    certificates = {"PIP_CERT": str(CA_BUNDLE)} if CA_BUNDLE.exists() else {}
    settings = ["--disable-pip-version-check", "--no-warn-script-location", "--root-user-action=ignore"]
    pip: list[str | Path] = [PIP / "bin/python", "-m", "pip", "--python", VENV / "bin/python"]
    found: list[str | Path] = ["--find-links", WHEELS] if WHEELS.is_dir() and any(WHEELS.iterdir()) else []
    _run([*pip, *command, *settings, *found, *arguments], environment={**os.environ, **certificates})


def _check_torch(kind: str) -> None:
    """That torch can be imported still, and is the build that the image is for."""
    question = "import torch; print('cuda' if torch.version.cuda else 'cpu')"
    answer = subprocess.run([VENV / "bin/python", "-c", question], check=True, text=True, stdout=subprocess.PIPE)
    if answer.stdout.strip() != kind:
        sys.exit(f"packages.py: torch is a build for {answer.stdout.strip()}, not {kind}: see TORCH_INDEX and `wheels`")


def _compile(site_packages: Path) -> None:
    """Byte code of all sources. One that is no valid Python (templates, for instance) is left as it is."""
    options = ["-q", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"]
    _run([VENV / "bin/python", "-m", "compileall", *options, site_packages], check=False)


def _site_packages(prefix: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(prefix), "platbase": str(prefix)}))


def _run(command: Sequence[str | Path], *, check: bool = True, environment: Mapping[str, str] | None = None) -> None:
    subprocess.run([str(part) for part in command], check=check, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    steps = parser.add_subparsers(dest="step", required=True)
    dependencies = steps.add_parser("dependencies")
    dependencies.add_argument("extras", nargs="+")
    dependencies.add_argument("--torch", choices=("cpu", "cuda"))
    steps.add_parser("program")
    chosen = parser.parse_args()
    try:
        if chosen.step == "program":
            install_program()
        else:
            install_dependencies(chosen.extras, torch=chosen.torch, environment=os.environ)
    except subprocess.CalledProcessError as error:
        sys.exit(f"packages.py: {' '.join(map(str, error.cmd[:4]))} … ended with exit status {error.returncode}")
    except ValueError as error:
        sys.exit(f"packages.py: {error}")


if __name__ == "__main__":
    main()
