"""Versions of Kubernetes programs, as their --version says them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.support.kube.errors import ProvisionFailed

VERSION_TIMEOUT_S = 30.0


class Version(NamedTuple):
    """Ordered like the versions they are."""

    major: int
    minor: int
    patch: int

    @classmethod
    def parse(cls, text: str) -> Version:
        """The first X.Y.Z in a text. Raises ProvisionFailed when there is none."""
        found = re.search(r"(\d+)\.(\d+)\.(\d+)", text)
        if found is None:
            raise ProvisionFailed(f"no version in {text!r}")
        return cls(*(int(part) for part in found.groups()))

    def __str__(self) -> str:
        return ".".join(str(part) for part in self)


def version_of(program: Path) -> Version:
    """What `program --version` says. Raises ProvisionFailed when the program does not run here."""
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, text=True, check=False, timeout=VERSION_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ProvisionFailed(f"{program} --version does not run: {error}") from error
    if done.returncode != 0:
        raise ProvisionFailed(f"{program} --version failed: {(done.stderr or done.stdout).strip()[-500:]}")
    return Version.parse(done.stdout)
