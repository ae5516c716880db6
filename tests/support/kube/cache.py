"""The folder where programs are kept between runs: one folder a Kubernetes version, and one for an etcd by itself.

Files arrive by renaming, the API server last, so that a version folder which has it is whole. Whoever adds something
holds the cache's lock.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.kube.versions import Version

LAST = "kube-apiserver"
ETCD_FOLDER = "etcd"


class Cache:
    """Below `root`, which need not exist yet."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def folder(self, version: Version) -> Path:
        """Of the programs of a version."""
        return self.root / str(version)

    def folders(self, wanted: Version | None = None) -> list[Path]:
        """Where programs may be: the versions, the newest first (or only the wanted one), then the single etcd."""
        found = [] if not self.root.is_dir() else [path for path in self.root.iterdir() if path.name[:1].isdigit()]
        versions = sorted((Version.parse(path.name) for path in found), reverse=True)
        return [self.folder(version) for version in versions if wanted in (None, version)] + [self.root / ETCD_FOLDER]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Alone among all processes."""
        self.root.mkdir(parents=True, exist_ok=True)
        with (self.root / ".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def workplace(self) -> Iterator[Path]:
        """A temporary folder on the cache's file system."""
        self.root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".new-", dir=self.root) as folder:
            yield Path(folder)

    def adopt(self, programs: list[Path], folder: Path) -> None:
        """Move programs into a folder of the cache, in the order that keeps it whole."""
        folder.mkdir(parents=True, exist_ok=True)
        for program in sorted(programs, key=lambda path: path.name == LAST):
            program.chmod(0o755)
            os.replace(program, folder / program.name)
