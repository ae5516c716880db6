"""Unpacks a packed set of Kubernetes programs into the cache, once, after checking it against SHA256SUMS beside it."""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Callable
from pathlib import Path

from tests.support.kube.cache import LAST, Cache
from tests.support.kube.errors import ProvisionFailed
from tests.support.kube.versions import Version, version_of

SUMS = "SHA256SUMS"


def unpack_once(archive: Path, cache: Cache, *, ask: Callable[[Path], Version] = version_of) -> Path:
    """The cache's folder with the archive's programs. Raises ProvisionFailed when the archive is not what it should be.

    Seconds the first time; afterwards a note in the cache, which names the file as it was, tells the folder.
    """
    if not archive.is_file():
        raise ProvisionFailed(f"$HETERO_KUBERNETES_ARCHIVE is {archive}, which is not a file")
    state = archive.stat()
    note = cache.root / "archives" / f"{archive.name}-{state.st_size}-{state.st_mtime_ns}"
    with cache.locked():
        if note.exists() and (folder := cache.root / note.read_text()).is_dir():
            return folder
        verify(archive)
        folder = _unpack(archive, cache, ask)
        note.parent.mkdir(exist_ok=True)
        note.write_text(folder.name)
    return folder


def verify(archive: Path) -> None:
    """Compare with the line in SHA256SUMS beside the archive, if that file is there."""
    sums = archive.with_name(SUMS)
    if not sums.is_file():
        return
    expected = parse_sums(sums.read_text())
    if archive.name not in expected:
        raise ProvisionFailed(f"{sums} has no line for {archive.name}")
    check_digest(archive, expected[archive.name])


def parse_sums(text: str) -> dict[str, str]:
    """Digests by file name, from what sha256sum writes."""
    lines = [line.split() for line in text.splitlines()]
    return {line[1].removeprefix("*"): line[0] for line in lines if len(line) == 2}


def check_digest(path: Path, expected: str, algorithm: str = "sha256") -> None:
    """Raises ProvisionFailed when the file's digest is another."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, algorithm).hexdigest()
    if actual != expected.strip().lower():
        raise ProvisionFailed(f"{path.name} is damaged or wrong: {algorithm} {actual}, and {expected} was expected")


def _unpack(archive: Path, cache: Cache, ask: Callable[[Path], Version]) -> Path:
    with cache.workplace() as folder:
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(folder, filter="data")
        except (tarfile.TarError, OSError) as error:
            raise ProvisionFailed(f"{archive} cannot be unpacked: {error}") from error
        servers = sorted(folder.rglob(LAST))
        if not servers:
            raise ProvisionFailed(f"{archive} has no {LAST}")
        target = cache.folder(ask(servers[0]))
        cache.adopt([path for path in servers[0].parent.iterdir() if path.is_file()], target)
    return target
