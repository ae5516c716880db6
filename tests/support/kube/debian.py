"""Debian's packages as a source of programs, without root and without touching the machine's own package lists.

apt works on lists and a cache of its own below a work folder; packages are unpacked, never installed. Where they come
from is the machine's own configuration, or the variable that tools/debian.py names.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.kube.downloads import Say
from tests.support.kube.errors import ProvisionFailed, SourceUnreachable
from tools.debian import RELEASE, NoDebianSources, apt_sources

PROGRAMS = ("apt-get", "dpkg")


class DebianArchive:
    """apt-get in a folder of its own."""

    def __init__(self, work: Path, say: Say) -> None:
        self._work = work
        self._say = say
        self._environment = {**os.environ, "APT_CONFIG": str(work / "apt.conf"), "LC_ALL": "C"}

    def open(self) -> None:
        """Fetch the package lists (seconds, 40 MB). Raises SourceUnreachable where there is no such archive."""
        missing = [program for program in PROGRAMS if shutil.which(program) is None]
        if missing:
            raise SourceUnreachable(f"not a Debian machine: no {' and no '.join(missing)}")
        try:
            sources = apt_sources()
        except NoDebianSources as error:
            raise SourceUnreachable(str(error)) from error
        self._configure(sources)
        self._say(f"reading the package lists of Debian {RELEASE}")
        self._apt("update", "--error-on=any")

    def unpack(self, packages: Sequence[str]) -> Path:
        """Download binary packages and unpack them over one another; the root of the tree."""
        downloads, tree = self._work / "packages", self._work / "root"
        downloads.mkdir(exist_ok=True)
        self._apt("download", *packages, folder=downloads)
        for package in sorted(downloads.glob("*.deb")):
            run(["dpkg", "-x", str(package), str(tree)])
        return tree

    def source(self, package: str, version: str) -> Path:
        """Download a source package, unpacked by nobody; the folder with its parts."""
        folder = self._work / "source"
        folder.mkdir(exist_ok=True)
        self._apt("source", "--download-only", f"{package}={version}", folder=folder)
        return folder

    def _configure(self, sources: str) -> None:
        for folder in ("sources", "lists/partial", "cache/archives/partial"):
            (self._work / folder).mkdir(parents=True, exist_ok=True)
        (self._work / "sources" / "debian.sources").write_text(sources, encoding="utf-8")
        settings = {
            "Dir::Etc::sourcelist": "/dev/null",
            "Dir::Etc::sourceparts": str(self._work / "sources"),
            "Dir::State::lists": str(self._work / "lists"),
            "Dir::Cache": str(self._work / "cache"),
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        if os.geteuid() == 0:  # the sandbox user could not write into our folders
            settings["APT::Sandbox::User"] = "root"
        lines = [f'{key} "{value}";\n' for key, value in settings.items()]
        (self._work / "apt.conf").write_text("".join(lines), encoding="utf-8")

    def _apt(self, *arguments: str, folder: Path | None = None) -> None:
        try:
            run(["apt-get", "-qq", *arguments], folder=folder, environment=self._environment)
        except ProvisionFailed as error:
            raise SourceUnreachable(str(error)) from error


def run(
    command: Sequence[str | Path],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    stdin: bytes | None = None,
) -> str:
    """What the command prints. Raises ProvisionFailed with the end of its complaints."""
    done = subprocess.run(command, cwd=folder, env=environment, input=stdin, capture_output=True, check=False)
    if done.returncode != 0:
        said = (done.stderr + done.stdout).decode(errors="replace").strip()[-2000:]
        raise ProvisionFailed(f"{' '.join(str(part) for part in command[:4])} ended with {done.returncode}: {said}")
    return done.stdout.decode(errors="replace")
