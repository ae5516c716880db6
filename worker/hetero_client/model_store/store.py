"""The local store of model directories, keyed by Hub name and revision.

An entry is a directory of its own (made by a conversion) or a link to one (a Hub snapshot, a folder of the
user). Entries appear by one rename, so a reader sees a whole model or none; making one is serialised by a
lock a model. `hetero-source.json` in a directory tells where it came from.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from hetero_api.host.file_lock import FileLock
from hetero_api.model_config import CONFIG_FILE
from hetero_client.errors import ModelStoreError
from hetero_client.home import HeteroHome

Report = Callable[[str], None]
"""Told what is going on, for a person."""

SOURCE_FILE: Final = "hetero-source.json"
HUB_SCHEME: Final = "hf://"
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_HUB_NAME: Final = re.compile(rf"{_PART}(/{_PART})?")
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a stored directory came from. `note` is for a person: what was changed on the way."""

    uri: str
    origin: str
    note: str
    sha256: str
    dtype: str

    def describe(self) -> str:
        return f"{self.origin}, {self.note}" if self.note else self.origin


@dataclass(frozen=True, slots=True)
class ModelKey:
    """A Hub model: "ORG/NAME", and a revision if one was asked for."""

    name: str
    revision: str | None = None

    @classmethod
    def parse(cls, uri: str, *, revision: str | None = None) -> ModelKey:
        """From "hf://ORG/NAME" or "ORG/NAME". Raises ModelStoreError."""
        name = uri.removeprefix(HUB_SCHEME)
        if not _HUB_NAME.fullmatch(name):
            raise ModelStoreError(f"{uri!r} names no Hub model; write hf://ORG/NAME")
        if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise ModelStoreError(f"revision {revision!r} is no branch, tag or commit")
        return cls(name, revision)

    @property
    def uri(self) -> str:
        return HUB_SCHEME + self.name

    @property
    def folder(self) -> str:
        """Path below models/hf."""
        return self.name if self.revision is None else f"{self.name}@{self.revision.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An entry of the store."""

    name: str
    path: Path
    origin: str
    size_bytes: int


class ModelStore:
    """The store below one home folder."""

    def __init__(self, home: HeteroHome) -> None:
        self.home = home

    def path_of(self, key: ModelKey) -> Path:
        return self.home.models / "hf" / key.folder

    def find(self, key: ModelKey) -> StoredModel | None:
        """The entry, None if there is none (or it links to a folder that is gone)."""
        path = self.path_of(key)
        return self._entry(key.folder, path) if (path / CONFIG_FILE).is_file() else None

    def entries(self) -> list[StoredModel]:
        """All entries, by name."""
        root = self.home.models / "hf"
        folders = {path.parent for pattern in ("*/", "*/*/") for path in root.glob(pattern + CONFIG_FILE)}
        return [self._entry(str(path.relative_to(root)), path) for path in sorted(folders)]

    @contextmanager
    def locked(self, key: ModelKey, *, report: Report) -> Iterator[None]:
        """While entered, nobody else makes this entry."""
        lock = FileLock(self.home.models / ".locks" / f"{key.folder.replace('/', '--')}.lock")
        if not lock.try_acquire():
            report(f"{key.name}: another process (pid {lock.holder_pid()}) is fetching it; waiting")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    @contextmanager
    def new_directory(self, key: ModelKey) -> Iterator[Path]:
        """A folder to fill; it becomes the entry when the block ends well, and vanishes when it does not."""
        target = self.path_of(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}."
        for stale in target.parent.glob(f"{prefix}*"):  # Left by a fetch that was killed; the lock is ours.
            shutil.rmtree(stale, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
        try:
            yield folder
            folder.chmod(0o755)
            _remove(target)
            folder.rename(target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def link(self, key: ModelKey, directory: Path) -> StoredModel:
        """Make the entry a link to a directory that lies elsewhere."""
        target = self.path_of(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise ModelStoreError(f"{target} is a stored model; remove it first to use {directory} in its place")
        link = target.with_name(f".{target.name}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(directory.absolute(), target_is_directory=True)
        os.replace(link, target)
        return self._entry(key.folder, target)

    def _entry(self, name: str, path: Path) -> StoredModel:
        source = read_source(path)
        origin = source.describe() if source else f"link to {path.resolve()}" if path.is_symlink() else "unknown"
        size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
        return StoredModel(name, path, origin, size)


def write_source(directory: Path, source: ModelSource) -> None:
    (directory / SOURCE_FILE).write_text(json.dumps(asdict(source), indent=2) + "\n", encoding="utf-8")


def read_source(directory: Path) -> ModelSource | None:
    """Where a directory came from; None when it does not say."""
    try:
        return ModelSource(**json.loads((directory / SOURCE_FILE).read_text(encoding="utf-8")))
    except (FileNotFoundError, ValueError, TypeError):
        return None


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
