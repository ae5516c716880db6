"""From a model's name to a manifest in the home folder, for commands that are given no file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Final

import yaml

from hetero_api.host.gpus import visible_gpus
from hetero_api.host.topology import CpuTopology
from hetero_client.cli.console import errors, print_note
from hetero_client.cli.model_commands import show_progress
from hetero_client.home import HeteroHome
from hetero_client.launcher.made_manifest import MODEL_LENGTH, make_manifest, resource_name
from hetero_client.model_store.resolve import obtain_model
from hetero_client.model_store.store import ModelStore, check_model_directory

MANIFEST_SUFFIXES: Final = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class MadeManifest:
    """A manifest, as YAML, and its resource's name."""

    name: str
    text: str


def manifest_of(source: str, *, home: HeteroHome) -> Path:
    """Return the manifest that a user named, or one that is made of a model and kept. Raises ModelStoreError."""
    if source.endswith(MANIFEST_SUFFIXES):
        return Path(source)
    return keep_manifest(describe_model(source, home=home), home=home)


def describe_model(
    what: str, *, home: HeteroHome, quantization: str = "none", max_model_len: int | None = None
) -> MadeManifest:
    """Return a manifest that serves a model on all of this machine; fetch the model first if it is not here.

    `max_model_len` None: the model's own, at most MODEL_LENGTH. Raises ModelStoreError.
    """
    with errors().status("fetching") as status:
        uri, directory = obtain_model(what, ModelStore(home), report=lambda text: show_progress(status, text))
    length = max_model_len or min(check_model_directory(directory).max_position, MODEL_LENGTH)
    fields: dict[str, Any] = {"maxModelLen": length}
    if quantization != "none":
        fields["quantization"] = str(quantization)
    name = resource_name(PurePosixPath(what).name.removesuffix(".gguf"))
    manifest = make_manifest(
        uri, name=name, cores=CpuTopology.of_this_process().cores, gpus=visible_gpus(os.environ), model=fields
    )
    return MadeManifest(name, yaml.safe_dump(manifest, sort_keys=False))


def keep_manifest(manifest: MadeManifest, *, home: HeteroHome) -> Path:
    """Write a manifest to the home folder, show it, and return its path."""
    home.made.mkdir(parents=True, exist_ok=True)
    path = home.made / f"{manifest.name}.yaml"
    path.write_text(manifest.text, encoding="utf-8")
    print_note(f"{manifest.text.rstrip()}\nkept as {path}; start it again with: hetero up {path}")
    return path
