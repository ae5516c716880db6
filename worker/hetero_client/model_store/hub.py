"""Models of the Hugging Face Hub, through huggingface_hub and its cache: the boundary to its errors.

The library resumes a transfer within a process only: it drops what it has of a failed file, and nobody takes up the
file of a killed process. A weight file is some gigabytes, and a pod may be deleted at any moment. So
`download_resumably` fetches large files itself, each into a partial file named by its checksum, and moves them where
the library looks for files that it has. The library does the rest. The caller holds a lock for the model, because
two writers would mix up a partial file.

`verify_snapshot` checks that files are the Hub's, once for each file. The Hub's cache names each blob by its checksum:
sha256 for large files, git's sha1 for small ones. A file that was damaged on the way or on the disk does not fit its
name. Each commit has a manifest with the sha256, size and time of change of every file that fits. So the next start of
a pod only looks at the folder's entries, and files can be verified later without the Hub.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from glob import escape
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from hetero_api.gguf_model import gguf_models, listed_models, of_variant
from hetero_api.model_directory import ADAPTER_CONFIG, ADAPTER_TENSORS
from hetero_client.errors import DamagedFileError, HubUnreachableError, MissingExtraError, ModelStoreError
from hetero_client.home import read_json_object, write_atomically
from hetero_client.model_store.store import Lines, ModelKey, Report
from hetero_client.progress import Amount

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo


PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tiktoken.model")
"""Files to fetch: no pickled weights, no other frameworks' files."""
TOKENIZER_PATTERNS: Final = (
    "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "chat_template.json", "tiktoken.model", "*.jinja",
)  # fmt: skip
"""Files to fetch for a gateway, which needs no weights; of a model in GGUF it needs the header, so the whole file."""
ADAPTER_PATTERNS: Final = (ADAPTER_CONFIG, ADAPTER_TENSORS)
"""Files to fetch of a LoRA adapter."""
_GGUF: Final = ".gguf"
SMALLEST_BYTES: Final = 16 * 1024 * 1024
"""Smaller files are fetched by the library, which is quick enough to start over."""
LARGEST_BYTES: Final = 50_000_000_000
"""The Hub gives larger files to its own library only (its constants.MAX_HTTP_DOWNLOAD_SIZE)."""
_AT_ONCE: Final = 8
"""Files in transfer at once, as many as the library has."""
_MB: Final = 1_000_000
_GRANT: Final = "(`hf auth login`, or spec.model.tokenSecretRef in a cluster)"
_LIST_TIMEOUT_S: Final = 10.0
_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def download_snapshot(key: ModelKey, *, report: Report, patterns: Sequence[str] = PATTERNS) -> Path:
    """Download a model into the user's Hub cache, with the user's token, and return its folder.

    The folder's name is the commit. Raises ModelStoreError.
    """
    return _download(key, cache_dir=None, token=None, patterns=patterns, report=report)


def download_resumably(
    key: ModelKey, *, cache_dir: Path, partials: Path, token: str | None, patterns: Sequence[str], report: Lines
) -> Path:
    """Download a model into a cache whose lock for this model the caller holds, and return its folder.

    `partials` keeps what a killed process had of large files. None as `token` sends none. Raises ModelStoreError.
    """

    def fetch_large(info: ModelInfo | None, chosen: Sequence[str]) -> None:
        if info is not None:
            _fetch_listed(key, info, cache_dir, partials=partials, token=token, patterns=chosen, report=report)

    return _download(key, cache_dir=cache_dir, token=token or False, patterns=patterns, before=fetch_large)


def _fetch_listed(
    key: ModelKey,
    info: ModelInfo,
    cache_dir: Path,
    *,
    partials: Path,
    token: str | None,
    patterns: Sequence[str],
    report: Lines,
) -> None:
    """Fetch large files of a listing."""
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in its __all__

    blobs = cache_dir / repo_folder_name(repo_id=key.name, repo_type="model") / "blobs"
    headers = build_hf_headers(token=token or False)
    fetch_large_files(key, info, blobs=blobs, partials=partials, headers=headers, patterns=patterns, report=report)


def _listing(key: ModelKey, token: str | bool | None) -> ModelInfo | None:
    """Return what the Hub says of a model; None where it cannot be asked."""
    from huggingface_hub import HfApi, errors

    try:
        return HfApi(token=token).model_info(
            key.name, revision=key.revision, files_metadata=True, timeout=_LIST_TIMEOUT_S
        )
    except (OSError, _transport_error(errors)):
        return None  # The library meets the same error and reports it, or makes do with the cache.


def gguf_of(key: ModelKey, names: Iterable[str]) -> tuple[str, ...]:
    """Return those of a repository's files that are the asked-for model in GGUF; none where it has safetensors files.

    Raises ModelStoreError, which lists the models, unless it is one.
    """
    listed = list(names)
    models = gguf_models(listed)
    if key.variant is None and (not models or any(name.endswith(".safetensors") for name in listed)):
        return ()
    found = models if key.variant is None else of_variant(models, key.variant)
    if len(found) == 1:
        return found[0]
    shown = listed_models(found or models) or "none"
    problem = f"has {'no' if not found else 'several'} models in GGUF"
    named = f" of variant {key.variant}" if key.variant is not None else ""
    raise ModelStoreError(f"{key.uri}: {problem}{named}: {shown}; name one as hf://ORG/NAME:Q4_K_M does")


def served_files(key: ModelKey, snapshot: Path) -> dict[str, Path]:
    """Return the files of a snapshot that are served, by their names; those of GGUF are put side by side.

    Raises ModelStoreError, which lists the models in GGUF, unless one is meant.
    """
    files = {str(path.relative_to(snapshot)): path.resolve() for path in snapshot.rglob("*") if path.is_file()}
    chosen = gguf_of(key, files)
    others = {name: path for name, path in files.items() if not name.endswith(_GGUF)}
    return others | {Path(name).name: files[name] for name in chosen if name in files}


def _download(
    key: ModelKey,
    *,
    cache_dir: Path | None,
    token: str | bool | None,
    patterns: Sequence[str],
    before: Callable[[ModelInfo | None, Sequence[str]], None] = lambda _info, _patterns: None,
    report: Report | None = None,
) -> Path:
    """List the model's files, call `before`, then the library, and translate the errors of all."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"fetching {key.uri} needs huggingface_hub; install with: pip install 'heteroinference[models]'"
        ) from error
    try:
        info = _listing(key, token)
        names = [file.rfilename for file in info.siblings or ()] if info is not None else []
        chosen = [escape(name) for name in wanted_files(key, names, patterns)] or list(patterns)
        before(info, chosen)
        snapshot = snapshot_download(
            key.name, revision=key.revision, cache_dir=cache_dir, token=token, allow_patterns=chosen,
            tqdm_class=None if report is None else reporting_bar(f"downloading {key.uri}", report),
        )  # fmt: skip
    except errors.GatedRepoError as error:
        raise ModelStoreError(
            f"{key.uri}: is gated; ask for access on the Hub, then give its token {_GRANT}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ModelStoreError(f"{key.uri}: has no revision {key.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelStoreError(
            f"{key.uri}: no such model on the Hub, or it is private and needs its token {_GRANT}"
        ) from error
    except (OSError, ValueError, _transport_error(errors)) as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = error.filename or cache_dir or "the Hub's cache"
            raise ModelStoreError(f"{key.uri}: {where} cannot be written: {error.strerror}") from error
        raise HubUnreachableError(f"{key.uri}: the Hub cannot be reached ({_first_line(error)})") from error
    return Path(snapshot)


def reporting_bar(work: str, report: Report) -> type[Any]:
    """Return a class of bars for the Hub's library that report bytes in place of drawing themselves."""
    from tqdm.auto import tqdm

    class Bar(tqdm):  # type: ignore[misc]  # it has no types
        """Bar of tqdm's whose display is `report`."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **{**settings, "disable": False, "file": io.StringIO()})

        def display(self, *_args: Any, **_settings: Any) -> bool:
            """Report; tqdm calls it ten times a second at most."""
            if self.unit == "B" and self.n and self.total:
                report.amount(Amount(work, int(self.n), int(self.total)))
            return True

    return Bar


def wanted_files(key: ModelKey, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """Return those of a repository's files that match a pattern, and those that are the model in GGUF.

    No others in folders: there, and beside the model as consolidated*.safetensors, publishers repeat it in their own
    format. Raises ModelStoreError.
    """
    found = [name for name in names if "/" not in name and any(fnmatchcase(name, pattern) for pattern in patterns)]
    if not {"model.safetensors", "model.safetensors.index.json"}.isdisjoint(found):
        found = [name for name in found if not fnmatchcase(name, "consolidated*.safetensors")]
    return [*found, *(gguf_of(key, names) if names and tuple(patterns) != ADAPTER_PATTERNS else ())]


def _transport_error(errors: ModuleType) -> type[Exception]:
    """Return the error of a transfer that broke off: httpx's own, which the Hub's library passes on."""
    found: type[Exception] = getattr(errors, "HTTPError", OSError)
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True, slots=True)
class LargeFile:
    """A file of the Hub, its partial file, and the path where the library looks for it."""

    name: str
    url: str
    size_bytes: int
    partial: Path
    blob: Path

    @property
    def present_bytes(self) -> int:
        """Bytes fetched so far."""
        return self.partial.stat().st_size if self.partial.is_file() else 0


def fetch_large_files(
    key: ModelKey,
    info: ModelInfo,
    *,
    blobs: Path,
    partials: Path,
    headers: dict[str, str],
    patterns: Sequence[str],
    report: Lines,
) -> None:
    """Fetch the large files that match a pattern and that `blobs` lacks. Raises the Hub library's errors."""
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


def _fetcher(headers: dict[str, str], report: Lines) -> Callable[[LargeFile], None]:
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
    manifest.parent.mkdir(parents=True, exist_ok=True)
    files = {name: asdict(records[name]) for name in sorted(records)}
    write_atomically(manifest, json.dumps({"files": files}, indent=1) + "\n")
    return records


def read_manifest(path: Path) -> dict[str, FileRecord]:
    """Return records by file name; none without a readable manifest, which only costs another check."""
    try:
        entries = (read_json_object(path) or {}).get("files", {})
        return {name: FileRecord(**entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError):
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
