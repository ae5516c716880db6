"""Models of the Hugging Face Hub, through huggingface_hub and its cache: the boundary to its errors."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Final

from hetero_client.errors import HubUnreachableError, MissingExtraError, ModelStoreError
from hetero_client.model_store.large_files import fetch_large_files
from hetero_client.model_store.store import ModelKey, Report

PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
"""What is fetched of a repository: no pickled weights, no other frameworks' files."""
TOKENIZER_PATTERNS: Final = (
    "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "chat_template.json", "*.jinja",
)  # fmt: skip
"""What is fetched for a gateway, which needs no weights."""

_GRANT: Final = "(`hf auth login`, or spec.model.tokenSecretRef in a cluster)"
_LIST_TIMEOUT_S: Final = 10.0
_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def download_snapshot(key: ModelKey) -> Path:
    """The folder of the model in the Hub's cache of whoever runs this, downloaded where it lacks, with his token.

    Its name is the commit. Raises ModelStoreError.
    """
    return _download(key, cache_dir=None, token=None, patterns=PATTERNS)


def download_resumably(
    key: ModelKey, *, cache_dir: Path, partials: Path, token: str | None, patterns: Sequence[str], report: Report
) -> Path:
    """The same in a cache that only the holder of a lock for this model changes; without a token none is sent.

    What a process that was killed had of a large file is in `partials`, and is taken up. Raises ModelStoreError.
    """

    def first_the_large_files() -> None:
        _bring_large_files(key, cache_dir, partials=partials, token=token, patterns=patterns, report=report)

    return _download(key, cache_dir=cache_dir, token=token or False, patterns=patterns, before=first_the_large_files)


def _bring_large_files(
    key: ModelKey, cache_dir: Path, *, partials: Path, token: str | None, patterns: Sequence[str], report: Report
) -> None:
    from huggingface_hub import HfApi, errors
    from huggingface_hub.file_download import repo_folder_name
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented, not in its __all__

    sent = token or False
    api = HfApi(token=sent)
    try:
        info = api.model_info(key.name, revision=key.revision, files_metadata=True, timeout=_LIST_TIMEOUT_S)
    except (OSError, _transport_error(errors)):
        return  # The library meets the same, and tells it, or does with what the cache has.
    blobs = cache_dir / repo_folder_name(repo_id=key.name, repo_type="model") / "blobs"
    headers = build_hf_headers(token=sent)
    fetch_large_files(key, info, blobs=blobs, partials=partials, headers=headers, patterns=patterns, report=report)


def _download(
    key: ModelKey,
    *,
    cache_dir: Path | None,
    token: str | bool | None,
    patterns: Sequence[str],
    before: Callable[[], None] = lambda: None,
) -> Path:
    """`before` is what else speaks with the Hub, for its errors to be told as the library's are."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"fetching {key.uri} needs huggingface_hub; install with: pip install 'heteroinference[models]'"
        ) from error
    try:
        before()
        snapshot = snapshot_download(
            key.name, revision=key.revision, cache_dir=cache_dir, token=token, allow_patterns=list(patterns)
        )
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


def _transport_error(errors: ModuleType) -> type[Exception]:
    """What breaks off in mid-transfer comes as httpx's own error, which the Hub's library passes on."""
    found: type[Exception] = getattr(errors, "HTTPError", OSError)
    return found


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
