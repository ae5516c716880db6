"""Compares an image with its lock and its bill of materials, and asks for advisories about what it has.

The comparison needs no network: each package has to be in the lock at that version, each file has to be what its
package's RECORD and the bill of materials say, and no other file may be there. What is signed is the bill of materials
or the digest in it; from there everything else follows.

Advisories come by pip-audit. A package that it could not ask about is named as not looked at: that is no all-clear.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.version import Version

from tools.images.archive import ImageContent
from tools.images.contents import Contents, Package, contents_of
from tools.images.locks import Entry, environment
from tools.images.packages import never_runs
from tools.images.sbom import Sbom, reference

OWN: Final = "heteroinference"
"""The project's own package, which is in no lock."""
_TIMEOUT_S: Final = 600.0


def image_problems(image: ImageContent, lock: Sequence[Entry], sbom: Sbom) -> list[str]:
    """Return where an image is not what its lock and its bill of materials say; empty: nowhere."""
    contents = contents_of(image, base_layers=sbom.base_layers)
    found = [*image.problems]
    if image.digest != sbom.digest:
        found.append(f"its digest is {image.digest}, and {sbom.digest} in the bill of materials")
    found += _lock_problems(contents, lock)
    for package in contents.packages:
        if package.own:
            found += _record_problems(package, image)
    return [*found, *_sbom_problems(contents, sbom)]


def _lock_problems(contents: Contents, lock: Sequence[Entry]) -> Iterator[str]:
    where = place(contents)
    locked = {entry.name: entry.version for entry in lock if entry.concerns(where)}
    installed = {package.name: Version(package.version) for package in contents.packages if package.own}
    yield from (f"{name} is locked, and missing" for name in sorted(locked.keys() - installed.keys()))
    for name, version in installed.items():
        if name == OWN:
            continue
        if name not in locked:
            yield f"{name} {version} is there, and not in the lock"
        elif locked[name] != version:
            yield f"{name} is {version}, and {locked[name]} in the lock"
    if OWN not in installed:
        yield f"{OWN} is missing"


def _record_problems(package: Package, image: ImageContent) -> Iterator[str]:
    named = f"of {package.name} {package.version}"
    if not package.recorded:
        yield f"there is no RECORD {named}"
    for path, sha256 in package.recorded.items():
        if path not in image.files:
            if not never_runs(path.removeprefix(f"{package.site_packages}/")):
                yield f"/{path} {named} is missing"
        elif sha256 and image.files[path].sha256 != sha256:
            yield f"/{path} {named} is not what its RECORD says"


def _sbom_problems(contents: Contents, sbom: Sbom) -> Iterator[str]:
    packages = {reference(package, contents): package.digest for package in contents.packages}
    files = {f"/{path}": sha256 for path, sha256 in contents.loose.items()}
    listed = {f"/{path}": sha256 for path, sha256 in sbom.loose.items()}
    yield from _differences(packages, sbom.packages, "the files of {} are not those of the bill of materials")
    yield from _differences(files, listed, "{}, of no package, is not what the bill of materials says")


def _differences(there: Mapping[str, str], listed: Mapping[str, str], changed: str) -> Iterator[str]:
    yield from (f"{name} is in the bill of materials, and missing" for name in sorted(listed.keys() - there.keys()))
    yield from (f"{name} is there, and not in the bill of materials" for name in sorted(there.keys() - listed.keys()))
    yield from (changed.format(name) for name in sorted(there.keys() & listed.keys()) if there[name] != listed[name])


@dataclass(frozen=True, slots=True)
class Advisories:
    """What pip-audit said."""

    found: tuple[str, ...] = ()
    """A line for each advisory."""
    unchecked: tuple[str, ...] = ()
    """A line for each package that it could not ask about."""


def place(contents: Contents) -> dict[str, str]:
    """Return the variables of markers in an image; where it has no packages, of the Dockerfiles' default."""
    return environment(contents.python or "3.11", contents.machine or "x86_64")


def ask_for_advisories(lock: Sequence[Entry], where: Mapping[str, str]) -> Advisories:
    """Ask about the packages that a lock has there; without a network all of them are unchecked."""
    # A build for CPUs has the code, and so the advisories, of the release.
    pins = {entry.name: entry.version.public for entry in lock if entry.version is not None and entry.concerns(where)}
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "packages.txt"
        listed.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()), encoding="utf-8")
        command = [
            sys.executable, "-m", "pip_audit", "--requirement", str(listed), "--no-deps", "--disable-pip",
            "--format", "json", "--progress-spinner", "off",
        ]  # fmt: skip
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return Advisories(unchecked=(f"all {len(pins)} packages: no answer in {_TIMEOUT_S:.0f} s",))
    return read_advisories(done.stdout, done.stderr, pins)


def read_advisories(output: str, errors: str, pins: Mapping[str, str]) -> Advisories:
    """Return what pip-audit's JSON says. What it does not say of a package is not taken for good news."""
    try:
        told = {it["name"]: it for it in json.loads(output)["dependencies"]}
    except (ValueError, KeyError, TypeError):
        reason = (errors.strip().splitlines() or ["pip-audit said nothing"])[-1]
        return Advisories(unchecked=(f"all {len(pins)} packages: {reason}",))
    found, unchecked = [], []
    for name, version in pins.items():
        answer = told.get(name, {"skip_reason": "pip-audit did not name it"})
        if "skip_reason" in answer:
            unchecked.append(f"{name} {version}: {answer['skip_reason']}")
        for advisory in answer.get("vulns", []):
            fixed = ", ".join(advisory.get("fix_versions", [])) or "no version yet"
            found.append(f"{name} {version}: {advisory['id']}, mended in {fixed}")
    return Advisories(tuple(found), tuple(unchecked))
