"""A model's large files, fetched so that a process that was killed leaves what it has to the next.

The Hub's library resumes within a process only: what it has of a file goes when it fails, and nobody takes up what it
leaves when it is killed. A weight file is some gigabytes, and a pod may be deleted at any moment. So large files are
fetched here, each into a partial file that is named by its checksum, and put where the library looks for what it has
already; the library does all else. Whoever calls holds a lock for the model: two writers would mix up a partial file.
That a file is whole and right is for `checksums` to tell.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hetero_client.model_store.store import ModelKey, Report

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

SMALLEST_BYTES: Final = 16 * 1024 * 1024
"""Smaller ones are fetched anew by the library sooner than they are looked after here."""
LARGEST_BYTES: Final = 50_000_000_000
"""The Hub gives larger ones to its own library only (constants.MAX_HTTP_DOWNLOAD_SIZE there)."""
_AT_ONCE: Final = 8
"""Files in transfer, as the library does it."""
_MB: Final = 1_000_000


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file of the Hub, where it is being written, and where the library looks for it."""

    name: str
    url: str
    size_bytes: int
    partial: Path
    blob: Path

    @property
    def present_bytes(self) -> int:
        """How much of it is there."""
        return self.partial.stat().st_size if self.partial.is_file() else 0


def fetch_large_files(
    key: ModelKey,
    info: ModelInfo,
    *,
    blobs: Path,
    partials: Path,
    headers: dict[str, str],
    patterns: Sequence[str],
    report: Report,
) -> None:
    """Bring the large files that match a pattern and that `blobs` lacks. Raises as the Hub's library does."""
    files = list(_lacking(key, info, blobs=blobs, partials=partials, patterns=patterns))
    if not files:
        return
    for folder in (blobs, partials):
        folder.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        for _ in threads.map(_fetcher(headers, report), files):
            pass


def _lacking(
    key: ModelKey, info: ModelInfo, *, blobs: Path, partials: Path, patterns: Sequence[str]
) -> Iterator[LargeFile]:
    from huggingface_hub import hf_hub_url

    found: set[str] = set()
    for file in info.siblings or ():
        if file.lfs is None or not SMALLEST_BYTES <= file.lfs.size <= LARGEST_BYTES or file.lfs.sha256 in found:
            continue
        blob = blobs / file.lfs.sha256
        if any(fnmatchcase(file.rfilename, pattern) for pattern in patterns) and not blob.exists():
            found.add(file.lfs.sha256)
            url = hf_hub_url(key.name, file.rfilename, revision=info.sha)
            yield LargeFile(file.rfilename, url, file.lfs.size, partials / file.lfs.sha256, blob)


def _fetcher(headers: dict[str, str], report: Report) -> Callable[[LargeFile], None]:
    from huggingface_hub.file_download import http_get

    def fetch(file: LargeFile) -> None:
        if file.present_bytes > file.size_bytes:
            file.partial.unlink()
        present = file.present_bytes
        there = f", of which {present / _MB:.0f} MB are there" if present else ""
        report(f"fetching {file.name}: {file.size_bytes / _MB:.0f} MB{there}")
        with file.partial.open("ab") as partial:
            http_get(file.url, partial, resume_size=present, headers=headers, expected_size=file.size_bytes)
        os.replace(file.partial, file.blob)

    return fetch
