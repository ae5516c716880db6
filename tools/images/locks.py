"""The hashed locks: `locks/NAME.txt` for each image, and `locks/build.txt` for what builds the project.

uv resolves what an image's extras need, at the versions of constraints.txt, for all supported Pythons and machines at
once. pip installs a lock with --require-hashes, so a file that an index changed is refused.

torch's build for CPUs is not on PyPI. Its wheels are named by their URLs, with the hashes that their index lists
(locks/torch-cpu.sha256), so a build asks no second index, which might have packages of any other name.

The check needs no network: it compares locks with pyproject.toml and constraints.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from tools.images.catalogue import ROOT, named_images

LOCKS: Final = ROOT / "locks"
BUILD: Final = "build"
"""Lock of `build-system.requires`: what makes the program's wheel, and is in no image."""
TORCH_CPU: Final = LOCKS / "torch-cpu.sha256"
TORCH_CPU_INDEX: Final = "https://download.pytorch.org/whl/cpu"
PYTHONS: Final = ("3.11", "3.12", "3.13")
MACHINES: Final = ("x86_64", "aarch64")
_SOURCE: Final = "pyproject.toml"
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
_HEADER: Final = """\
# Made by `make locks` from pyproject.toml and constraints.txt; do not edit.
# pip install --require-hashes --only-binary=:all: -r THIS
"""


class LockError(Exception):
    """A lock could not be made or read; the text says why."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One package of a lock: a version, or a file by its URL. `text` is all of it as it stands there."""

    requirement: Requirement
    hashes: tuple[str, ...]
    asked_by: tuple[str, ...]
    """Names of packages that need it; `pyproject.toml` if the project itself does."""
    text: str

    @property
    def name(self) -> str:
        """Name as PyPI compares it."""
        return canonicalize_name(self.requirement.name)

    @property
    def version(self) -> Version | None:
        """The only version that it allows; None if there is no only one."""
        if self.requirement.url is not None:
            return parse_wheel_filename(unquote(self.requirement.url.rpartition("/")[2]))[1]
        pins = [pin.version for pin in self.requirement.specifier if pin.operator == "==" and "*" not in pin.version]
        return Version(pins[0]) if len(self.requirement.specifier) == 1 and pins else None

    def concerns(self, environment: Mapping[str, str]) -> bool:
        """Return whether it is installed there."""
        return _concerns(self.requirement, environment)


def _concerns(requirement: Requirement, environment: Mapping[str, str]) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**environment, "extra": ""})


def environment(python: str, machine: str) -> dict[str, str]:
    """Return the variables of markers for CPython on Linux."""
    return {
        "implementation_name": "cpython", "implementation_version": f"{python}.0", "os_name": "posix",
        "platform_machine": machine, "platform_python_implementation": "CPython", "platform_release": "",
        "platform_system": "Linux", "platform_version": "", "python_full_version": f"{python}.0",
        "python_version": python, "sys_platform": "linux",
    }  # fmt: skip


def environments() -> list[dict[str, str]]:
    """Return all that the locks are made for."""
    return [environment(python, machine) for python in PYTHONS for machine in MACHINES]


def wanted(name: str, project: Mapping[str, Any]) -> list[str]:
    """Return what the lock `name` is made for, of the whole pyproject.toml."""
    if name == BUILD:
        return list(project["build-system"]["requires"])
    return requirements(project["project"], named_images()[name].image.extras)


def requirements(project: Mapping[str, Any], extras: Sequence[str]) -> list[str]:
    """Return what the base install and these extras need, the project's own extras resolved. Raises ValueError."""
    known = project["optional-dependencies"]
    found = list(project["dependencies"])
    for extra in extras:
        if extra not in known:
            raise ValueError(f"{extra!r} is no extra of pyproject.toml: {', '.join(known)}")
        for requirement in known[extra]:
            own = re.fullmatch(rf"{re.escape(project['name'])}\[([\w,-]+)\]", requirement)
            found += requirements({**project, "dependencies": []}, own[1].split(",")) if own else [requirement]
    return list(dict.fromkeys(found))


def lock_names() -> list[str]:
    """Return the names of all locks."""
    return [BUILD, *named_images()]


def read_lock(text: str) -> list[Entry]:
    """Return a lock's entries. Raises LockError."""
    return [_entry(block) for block in _blocks(text)]


def _blocks(text: str) -> Iterator[str]:
    """Yield each line that begins an entry, with the indented ones below it."""
    for block in re.split(r"\n(?=\S)", text.strip()):
        if block and not block.startswith(("#", "-")):
            yield block


def _entry(block: str) -> Entry:
    told, _, comment = re.sub(r"\\\n", " ", block).partition("    # via ")
    asked, *hashes = re.split(r"\s+--hash=", told.strip())
    try:
        requirement = Requirement(asked.strip())
    except ValueError as error:
        raise LockError(f"no requirement: {block.splitlines()[0]}: {error}") from error
    return Entry(requirement, tuple(hashes), tuple(re.split(r",\s*", comment.strip())) if comment else (), block)


def problems(entries: Sequence[Entry], asked: Iterable[str], constraints: Mapping[str, Version]) -> list[str]:
    """Return what keeps a lock from being what pyproject.toml and constraints.txt ask for; empty: nothing."""
    needed = [Requirement(text) for text in asked]
    found = [problem for entry in entries for problem in _entry_problems(entry, constraints)]
    direct = {canonicalize_name(requirement.name) for requirement in needed}
    left = [entry.name for entry in entries if entry.name not in direct and not set(entry.asked_by) - {_SOURCE}]
    found += [f"nothing asks for {name}" for name in left]
    places: dict[str, list[str]] = {}
    for where in environments():
        for problem in _environment_problems(entries, needed, where):
            place = f"Python {where['python_version']} on {where['platform_machine']}"
            places.setdefault(problem, []).append(place)
    everywhere = len(environments())
    found += [text if len(at) == everywhere else f"{text} for {', '.join(at)}" for text, at in places.items()]
    return found


def _entry_problems(entry: Entry, constraints: Mapping[str, Version]) -> Iterator[str]:
    if not entry.hashes or not all(map(_HASH.fullmatch, entry.hashes)):
        yield f"{entry.name} has no hash, or one that is no SHA-256"
    version, agreed = entry.version, constraints.get(entry.name)
    if version is None:
        yield f"{entry.name} is not held at one version"
    elif agreed is not None and agreed.public != version.public:
        yield f"{entry.name} is {version}, and {agreed} in constraints.txt"


def torch_problems(entries: Sequence[Entry], torch: str | None) -> Iterator[str]:
    """Yield entries of torch that are not of the build that an image has: for "cpu", "cuda", or without it."""
    for entry in entries:
        version = entry.version
        if entry.name == "torch" and version is not None and (torch == "cpu") != (version.local == "cpu"):
            yield f"torch is {version}, which is no build for {torch}"


def _environment_problems(
    entries: Sequence[Entry], needed: Sequence[Requirement], where: Mapping[str, str]
) -> Iterator[str]:
    here = {entry.name: entry.version for entry in entries if entry.concerns(where)}
    counts = Counter(entry.name for entry in entries if entry.concerns(where))
    yield from (f"{name} stands there {count} times" for name, count in counts.items() if count > 1)
    for requirement in needed:
        name = canonicalize_name(requirement.name)
        if not _concerns(requirement, where):
            continue
        if name not in here:
            yield f"{name} is missing"
        elif (version := here[name]) is not None and not requirement.specifier.contains(version, prereleases=True):
            yield f"{name} is {version}, and pyproject.toml asks for {requirement.specifier}"


def read_constraints(path: Path = ROOT / "constraints.txt") -> dict[str, Version]:
    """Return the versions that all environments of the project share."""
    pins = [line.split("==") for line in path.read_text(encoding="utf-8").splitlines() if "==" in line]
    return {canonicalize_name(name): Version(version) for name, version in pins}


def read_project(path: Path = ROOT / _SOURCE) -> dict[str, Any]:
    """Return the whole pyproject.toml."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def check_locks(names: Sequence[str], folder: Path = LOCKS) -> list[str]:
    """Return what is wrong with these locks, each line beginning with the file's name."""
    project, constraints, found = read_project(), read_constraints(), []
    for name in names:
        path = folder / f"{name}.txt"
        try:
            entries = read_lock(path.read_text(encoding="utf-8"))
        except (OSError, LockError) as error:
            found.append(f"{path.name}: {error}")
            continue
        wrong = [*problems(entries, wanted(name, project), constraints), *torch_problems(entries, _torch(name))]
        found += [f"{path.name}: {problem}" for problem in wrong]
    return found


def make_lock(name: str, *, wheels: Path | None, index: str, folder: Path = LOCKS) -> Path:
    """Resolve and write a lock. Versions that an older one has are kept where they still fit. Raises LockError.

    `wheels` is a folder that has torch's wheel for CPUs, where its index is not in reach. `index` is a second index,
    for torch's build for another CUDA.
    """
    project, constraints = read_project(), read_constraints()
    torch = _torch(name)
    asked = wanted(name, project)
    versions = {package: str(version) for package, version in constraints.items()}
    if torch == "cpu":
        versions["torch"] = f"{constraints['torch'].public}+cpu"
    # For no other lock: a folder that has torch's build for CPUs would give it to the GPU ranks, too.
    places = [str(wheels or f"{TORCH_CPU_INDEX}/torch/")] if torch == "cpu" else []
    path = folder / f"{name}.txt"
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    blocks = [entry.text for entry in read_lock(resolve(asked, versions, before, places=places, index=index))
              if any(entry.concerns(where) for where in environments())]  # fmt: skip
    if torch == "cpu":
        listed = list(torch_cpu_blocks(constraints["torch"], TORCH_CPU.read_text(encoding="utf-8")))
        blocks = [part for block in blocks for part in (listed if block.startswith("torch==") else [block])]
    options = f"--extra-index-url {index}\n" if index else ""
    path.write_text(_HEADER + options + "\n".join(blocks) + "\n", encoding="utf-8")
    return path


def _torch(name: str) -> str | None:
    return named_images()[name].image.torch if name != BUILD else None


def torch_cpu_blocks(version: Version, listing: str) -> Iterator[str]:
    """Yield entries for torch's wheels without CUDA, of a listing as sha256sum writes it. Raises LockError."""
    hashes = {name: digest for digest, name in (line.split() for line in listing.splitlines() if line)}
    for python in PYTHONS:
        for machine in MACHINES:
            tag = f"cp{python.replace('.', '')}"
            file = f"torch-{version.public}+cpu-{tag}-{tag}-manylinux_2_28_{machine}.whl"
            if file not in hashes:
                raise LockError(f"{TORCH_CPU.name} lists no {file}: add what {TORCH_CPU_INDEX}/torch/ lists")
            marker = f"python_version == '{python}' and platform_machine == '{machine}'"
            yield (
                f"torch @ {TORCH_CPU_INDEX}/{quote(file)} ; {marker} \\\n"
                f"    --hash=sha256:{hashes[file]}\n    # via {_SOURCE}"
            )


def resolve(
    asked: Sequence[str], versions: Mapping[str, str], before: str, *, places: Sequence[str], index: str
) -> str:
    """Return the lock that uv makes within these versions, its comments as they are in a lock. Raises LockError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        needed, pins, lock = folder / _SOURCE.replace(".toml", ".in"), folder / "constraints.txt", folder / "lock.txt"
        needed.write_text("\n".join(asked) + "\n", encoding="utf-8")
        pins.write_text("".join(f"{package}=={version}\n" for package, version in versions.items()), encoding="utf-8")
        lock.write_text(re.sub(r"^torch @ (?:.*\n)(?:\s+.*\n)*", "", before, flags=re.M), encoding="utf-8")
        command = [
            *_uv(), "pip", "compile", str(needed), "--constraint", str(pins), "--output-file", str(lock), "--quiet",
            "--universal", "--python-version", PYTHONS[0], "--generate-hashes", "--no-header", "--annotation-style",
            "line", *(part for place in places for part in ("--find-links", place)),
            *(["--index", index, "--index-strategy", "unsafe-best-match"] if index else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        if done.returncode:
            raise LockError(f"uv: {done.stderr.strip()}")
        text = lock.read_text(encoding="utf-8")
    # Where it was resolved is nobody's concern, and a constraint is no reason to have a package.
    text = text.replace(f"-r {needed}", _SOURCE).replace(f"-r {needed.name}", _SOURCE)
    pinned = rf"-c \S*{re.escape(pins.name)}"
    return re.sub(rf", {pinned}|{pinned}, ", "", text)


def _uv() -> list[str]:
    return [sys.executable, "-m", "uv", "--no-config"]
