"""The commit that a release is made of. What is built here is built from a copy of it: nothing else gets in."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


class ReleaseError(Exception):
    """A release could not be made or pushed; the text says why, and what to do."""


def run(
    command: Sequence[str | Path], *, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> bytes:
    """Return what a program prints. Raises ReleaseError with what it complains of."""
    words = [str(part) for part in command]
    try:
        done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, check=False)
    except FileNotFoundError as error:
        raise ReleaseError(f"there is no program {words[0]}: install it") from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode(errors="replace").strip()
        raise ReleaseError(f"{' '.join(words[:4])} … ended with {done.returncode}: {said[-2000:]}")
    return done.stdout


def require_committed(root: Path) -> None:
    """Raises ReleaseError when a checkout holds what its commit does not."""
    if changed := run(["git", "-C", root, "status", "--porcelain"]).decode().splitlines():
        raise ReleaseError(
            f"the checkout has changes that are in no commit ({changed[0].strip()}): commit or remove them"
        )


def export(root: Path, folder: Path) -> Path:
    """Write the files of the commit that is checked out below `folder`; return it."""
    archive = run(["git", "-C", root, "archive", "--format=tar", "HEAD"])
    with tarfile.open(fileobj=io.BytesIO(archive)) as read:
        read.extractall(folder, filter="data")
    return folder
