"""Models of the Hugging Face Hub, through huggingface_hub and its cache: the boundary to its errors."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hetero_client.errors import HubUnreachableError, MissingExtraError, ModelStoreError
from hetero_client.model_store.store import ModelKey

PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
"""What is fetched of a repository: no pickled weights, no other frameworks' files."""
TOKENIZER_PATTERNS: Final = (
    "config.json", "generation_config.json", "tokenizer*.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "chat_template.json", "*.jinja",
)  # fmt: skip
"""What is fetched for a gateway, which needs no weights."""

_GRANT: Final = "(`hf auth login`, or spec.model.tokenSecretRef in a cluster)"
_DISK_ERRORS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)


def download_snapshot(
    key: ModelKey,
    *,
    cache_dir: Path | None = None,
    token: str | bool | None = None,
    patterns: Sequence[str] = PATTERNS,
) -> Path:
    """The folder of the model in the Hub's cache, downloaded where it lacks; its name is the commit.

    `cache_dir` and `token` default to those of whoever runs this; token False sends none. Raises ModelStoreError.
    """
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"fetching {key.uri} needs huggingface_hub; install with: pip install 'heteroinference[models]'"
        ) from error
    # What breaks off in mid-transfer comes as httpx's own error, which the Hub's library passes on.
    transport_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    try:
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
    except (OSError, ValueError, transport_error) as error:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = error.filename or cache_dir or "the Hub's cache"
            raise ModelStoreError(f"{key.uri}: {where} cannot be written: {error.strerror}") from error
        raise HubUnreachableError(f"{key.uri}: the Hub cannot be reached ({_first_line(error)})") from error
    return Path(snapshot)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
