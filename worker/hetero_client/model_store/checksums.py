"""Verification that the files of a Hub snapshot are the Hub's, once for each file.

The Hub's cache names each blob by its checksum: sha256 for large files, git's sha1 for small ones. A file that was
damaged on the way or on the disk does not fit its name. Each commit has a manifest with the sha256, size and time of
change of every file that fits. So the next start of a pod only looks at the folder's entries, and files can be verified
later without the Hub.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hetero_client.errors import DamagedFileError

_CHUNK_BYTES: Final = 8 * 1024 * 1024
_SHA256: Final = re.compile("[0-9a-f]{64}")
_GIT_SHA1: Final = re.compile("[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file at the time when its checksum was right."""

    sha256: str
    size_bytes: int
    mtime_ns: int


def verify_snapshot(snapshot: Path, manifest: Path, *, thoroughly: bool = False) -> dict[str, FileRecord]:
    """Verify the files of a snapshot that are not in the manifest (`thoroughly`: all), write and return the manifest.

    Raises DamagedFileError after removing the damaged file from the cache, so that the next fetch brings it again.
    """
    known = {} if thoroughly else read_manifest(manifest)
    records = dict(read_manifest(manifest))
    for path in sorted(path for path in snapshot.rglob("*") if path.is_file()):
        name = str(path.relative_to(snapshot))
        if not _is_known(path, known.get(name)):
            records[name] = _verify(path, expected=records.get(name))
    _write_manifest(manifest, records)
    return records


def read_manifest(path: Path) -> dict[str, FileRecord]:
    """Return records by file name; none without a readable manifest, which only costs another check."""
    try:
        entries: Mapping[str, Mapping[str, object]] = json.loads(path.read_text(encoding="utf-8"))["files"]
        return {
            name: FileRecord(str(entry["sha256"]), int(str(entry["size_bytes"])), int(str(entry["mtime_ns"])))
            for name, entry in entries.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def _is_known(path: Path, record: FileRecord | None) -> bool:
    status = path.stat()
    return record is not None and (status.st_size, status.st_mtime_ns) == (record.size_bytes, record.mtime_ns)


def _verify(path: Path, *, expected: FileRecord | None) -> FileRecord:
    blob = path.resolve()
    status = blob.stat()
    sha256, git_sha1 = _checksums(blob, status.st_size)
    wanted = {
        checksum for pattern, checksum in ((_SHA256, sha256), (_GIT_SHA1, git_sha1)) if pattern.fullmatch(blob.name)
    }
    fits = blob.name in wanted if wanted else expected is None or expected.sha256 == sha256
    if not fits:
        blob.unlink()
        if path.is_symlink():
            path.unlink()
        raise DamagedFileError(
            f"{path.name}: was damaged: its sha256 is {sha256}, the Hub's name for it is {blob.name}"
        )
    return FileRecord(sha256, status.st_size, status.st_mtime_ns)


def _checksums(path: Path, size_bytes: int) -> tuple[str, str]:
    """Return the sha256, and git's sha1 of a file with this content."""
    sha256, git = hashlib.sha256(), hashlib.sha1(f"blob {size_bytes}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha256.update(chunk)
            git.update(chunk)
    return sha256.hexdigest(), git.hexdigest()


def _write_manifest(path: Path, records: Mapping[str, FileRecord]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"files": {name: asdict(records[name]) for name in sorted(records)}}, indent=1) + "\n"
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(temporary, path)
