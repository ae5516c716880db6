"""Models of the Hugging Face Hub, through huggingface_hub and its own cache: the boundary to its errors."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from hetero_client.errors import MissingExtraError, ModelStoreError
from hetero_client.model_store.store import ModelKey

PATTERNS: Final = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja")
"""What is fetched of a repository: no pickled weights, no other frameworks' files."""


def download_snapshot(key: ModelKey) -> Path:
    """The folder of the model in the Hub's cache, downloaded where it lacks. Raises ModelStoreError."""
    try:
        from huggingface_hub import errors, snapshot_download
    except ImportError as error:
        raise MissingExtraError(
            f"fetching {key.uri} needs huggingface_hub; install with: pip install 'heteroinference[models]'"
        ) from error
    # What breaks off in mid-transfer comes as httpx's own error, which the Hub's library passes on.
    transport_error: type[Exception] = getattr(errors, "HTTPError", OSError)
    try:
        return Path(snapshot_download(key.name, revision=key.revision, allow_patterns=list(PATTERNS)))
    except errors.GatedRepoError as error:
        raise ModelStoreError(f"{key.uri}: is gated; ask for access on the Hub, then run `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ModelStoreError(f"{key.uri}: has no revision {key.revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelStoreError(f"{key.uri}: no such model on the Hub, or it is private (run `hf auth login`)") from error
    except (OSError, ValueError, transport_error) as error:
        raise ModelStoreError(f"{key.uri}: the Hub cannot be reached ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
