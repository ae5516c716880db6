"""Volumes and init containers that bring a model into a pod: at POD_MODEL_DIR, read-only for what serves it.

A draft model comes in the same ways, to POD_DRAFT_DIR, and adapters that are named by URI to folders of
POD_ADAPTERS_DIR, in pods of ranks: a gateway only says where they are.

    pvc://    the claim, mounted
    file://   the node's folder, mounted
    oci://    the image, mounted; before Kubernetes 1.35 an init container of that image copies it (needs `cp` in it)
    hf://     an init container fetches missing files into the cache, and lays them out

The cache stays mounted in the main container, because files that are laid out may be links into it.

Volumes of different sources have different names. Server-side apply joins volumes by name, and Kubernetes 1.20 leaves
an emptyDir that is no longer applied in place: a model that moves from the Hub into a claim would end as a volume with
two sources, which makes the API server refuse a Deployment, and with which a StatefulSet never creates a pod.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

from hetero_api.contract import (
    ENV_HUB_TOKEN_FILE,
    POD_ADAPTERS_DIR,
    POD_CACHE_DIR,
    POD_DRAFT_DIR,
    POD_HUB_TOKEN_FILE,
    POD_MODEL_DIR,
)
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_model import ModelSpec
from hetero_operator.reconcile.manifests.containers import MountedFiles, container, secret_file, tmp_mount
from hetero_operator.reconcile.manifests.rendering import Rendering
from hetero_operator.reconcile.names import MODEL_CONTAINER

MODEL_VOLUME: Final = "model"
MODEL_CLAIM_VOLUME: Final = "model-claim"
MODEL_IMAGE_VOLUME: Final = "model-image"
MODEL_FOLDER_VOLUME: Final = "model-folder"
CACHE_VOLUME: Final = "model-cache"
CACHE_CLAIM_VOLUME: Final = "model-cache-claim"
CACHE_FOLDER_VOLUME: Final = "model-cache-folder"
_DRAFT: Final = "draft-"
"""Prefix of the names of the draft model's volumes."""
_PREFIX: Final = re.compile(rf"^({_DRAFT}|adapter-[0-9]+-)")
"""Prefixes of the names of all volumes and containers but the served model's."""
MODEL_VOLUMES: Final = frozenset(
    {
        MODEL_VOLUME, MODEL_CLAIM_VOLUME, MODEL_IMAGE_VOLUME, MODEL_FOLDER_VOLUME,
        CACHE_VOLUME, CACHE_CLAIM_VOLUME, CACHE_FOLDER_VOLUME,
    }
)  # fmt: skip
"""Every volume that the served model or the cache may be in."""
HUB: Final = "hf"
CLAIM: Final = "pvc"
IMAGE: Final = "oci"
NODE: Final = "file"
_FILE_SUFFIX: Final = ".gguf"
_IMAGE_FOLDER: Final = "models"
"""Where a model lies in an image that does not say otherwise."""
IMAGE_VOLUMES_SINCE: Final = (1, 35)
"""First version of Kubernetes whose image volumes are on by default."""
_HUB_TOKEN: Final = "hub-token"


class ModelUri(NamedTuple):
    """A URI in its parts."""

    scheme: str
    source: str
    """The Hub's repository, the claim, or the image; "" for file://."""
    path: str
    """Folder within it, without slashes at its ends; of file:// the absolute path on the node."""
    file: str = ""
    """File of the folder that is the model; "": the folder is."""


def parse_model_uri(uri: str) -> ModelUri:
    """Split a URI that the spec has accepted into its parts."""
    scheme, _, rest = uri.partition("://")
    if scheme == CLAIM:
        claim, _, path = rest.partition("/")
        return ModelUri(scheme, claim, *_folder_and_file(path.strip("/")))
    if scheme == IMAGE:
        image, _, path = rest.partition("#")
        return ModelUri(scheme, image, *_folder_and_file(path.strip("/") or _IMAGE_FOLDER))
    if scheme == NODE:
        folder, file = _folder_and_file(rest.strip("/"))
        return ModelUri(scheme, "", f"/{folder}", file)
    return ModelUri(scheme, rest, "")


def _folder_and_file(path: str) -> tuple[str, str]:
    folder, _, file = path.rpartition("/")
    return (folder, file) if file.endswith(_FILE_SUFFIX) else (path, "")


def is_model_volume(name: str) -> bool:
    """Return whether a model, an adapter or their cache is in the volume of this name."""
    return _PREFIX.sub("", name) in MODEL_VOLUMES


def is_model_container(name: str) -> bool:
    """Return whether the init container of this name brings a model or an adapter."""
    return _PREFIX.sub("", name) == MODEL_CONTAINER


class _Delivery(NamedTuple):
    """A model or adapter, where it goes in a pod, and what the names of its volumes begin with."""

    model: ModelSpec
    into: str
    prefix: str = ""
    is_adapter: bool = False

    @property
    def container(self) -> str:
        return f"{self.prefix}{MODEL_CONTAINER}"

    @property
    def path(self) -> str:
        file = parse_model_uri(self.model.uri).file
        return f"{self.into}/{file}" if file else self.into

    @property
    def mount(self) -> dict[str, Any]:
        return {"name": f"{self.prefix}{MODEL_VOLUME}", "mountPath": self.into}


def model_uris(spec: HeteroInferenceSpec) -> dict[str, ModelUri]:
    """Return the URIs of the models and adapters of a group, by their paths."""
    draft = spec.engine.speculative.draft
    drafts = {} if draft is None else {"spec.engine.speculative.draft.uri": draft.uri}
    found = {"spec.model.uri": spec.model.uri, **drafts, **spec.engine.adapters.uris}
    return {path: parse_model_uri(uri) for path, uri in found.items()}


def model_options(spec: HeteroInferenceSpec) -> dict[str, str]:
    """Return the options that say to a program in a pod where the models are."""
    return dict(zip(("--model", "--draft"), (each.path for each in _deliveries(spec)), strict=False))


def model_containers(spec: HeteroInferenceSpec) -> set[str]:
    """Return the names of the init containers that may bring models and adapters into a pod of ranks."""
    return {each.container for each in (*_deliveries(spec), *_adapters(spec))}


def adapter_directories(spec: HeteroInferenceSpec) -> list[str]:
    """Return the directories in pods of ranks of adapters that are named by URI, in order."""
    return [each.path for each in _adapters(spec)]


def deliver_models(
    rendering: Rendering, *, image: str, resources: dict[str, Any], tokenizer_only: bool
) -> MountedFiles:
    """Return the parts that bring the models into a pod; `image` and `resources` are for init containers.

    `tokenizer_only`: no weights, and no adapters.
    """
    adapters = [] if tokenizer_only else _adapters(rendering.spec)
    parts = [
        _deliver(rendering, each, image=image, resources=resources, tokenizer_only=tokenizer_only)
        for each in (*_deliveries(rendering.spec), *adapters)
    ]
    # Fetched models share the cache and the Hub's token.
    volumes = {volume["name"]: volume for part in parts for volume in part.volumes}
    mounts = {mount["name"]: mount for part in parts for mount in part.mounts}
    fillers = tuple(filler for part in parts for filler in part.init_containers)
    return MountedFiles(tuple(volumes.values()), tuple(mounts.values()), fillers)


def _deliveries(spec: HeteroInferenceSpec) -> list[_Delivery]:
    """Return the model's delivery, and that of the draft model, which is fetched as the model is."""
    model, draft = spec.model, spec.engine.speculative.draft
    drafts = [] if draft is None else [model.model_copy(update={"uri": draft.uri, "revision": None})]
    return [_Delivery(model, POD_MODEL_DIR), *(_Delivery(each, POD_DRAFT_DIR, _DRAFT) for each in drafts)]


def _adapters(spec: HeteroInferenceSpec) -> list[_Delivery]:
    """Return the deliveries of adapters that are named by URI, which are fetched as the model is."""
    models = [
        spec.model.model_copy(update={"uri": uri, "revision": None}) for uri in spec.engine.adapters.uris.values()
    ]
    return [
        _Delivery(each, f"{POD_ADAPTERS_DIR}/{at}", f"adapter-{at}-", is_adapter=True) for at, each in enumerate(models)
    ]


def _deliver(
    rendering: Rendering, delivery: _Delivery, *, image: str, resources: dict[str, Any], tokenizer_only: bool
) -> MountedFiles:
    uri = parse_model_uri(delivery.model.uri)
    if uri.scheme == HUB:
        return _fetched(rendering, delivery, image=image, resources=resources, tokenizer_only=tokenizer_only)
    if uri.scheme == IMAGE and rendering.capabilities.version < IMAGE_VOLUMES_SINCE:
        return _copied(rendering, delivery, uri, resources)
    return _mounted(rendering, delivery, uri)


def _mounted(rendering: Rendering, delivery: _Delivery, uri: ModelUri) -> MountedFiles:
    volume: dict[str, Any]
    if uri.scheme == CLAIM:
        volume = {"name": MODEL_CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": uri.source, "readOnly": True}}
    elif uri.scheme == IMAGE:
        policy = rendering.spec.images.pull_policy.value
        volume = {"name": MODEL_IMAGE_VOLUME, "image": {"reference": uri.source, "pullPolicy": policy}}
    else:
        volume = {"name": MODEL_FOLDER_VOLUME, "hostPath": {"path": uri.path, "type": "Directory"}}
    volume["name"] = f"{delivery.prefix}{volume['name']}"
    below = {"subPath": uri.path} if uri.source and uri.path else {}
    mount = {"name": volume["name"], "mountPath": delivery.into, "readOnly": True, **below}
    return MountedFiles((volume,), (mount,))


def _copied(rendering: Rendering, delivery: _Delivery, uri: ModelUri, resources: dict[str, Any]) -> MountedFiles:
    source = f"/{uri.path}/." if uri.path else f"/{uri.file}"  # the image's root holds more than a model
    copy = container(
        rendering, delivery.container, uri.source, resources=resources,
        command=["cp", "-a", source, delivery.into],
        mounts=[delivery.mount],
    )  # fmt: skip
    volume = {"name": delivery.mount["name"], "emptyDir": {}}
    return MountedFiles((volume,), ({**delivery.mount, "readOnly": True},), (copy,))


def _fetched(
    rendering: Rendering, delivery: _Delivery, *, image: str, resources: dict[str, Any], tokenizer_only: bool
) -> MountedFiles:
    model = delivery.model
    cache = _cache_volume(model)
    token = secret_file(_HUB_TOKEN, model.token_secret_ref, POD_HUB_TOKEN_FILE)
    fetch = container(
        rendering, delivery.container, image, resources=resources,
        command=["python", "-m", "hetero_client.model_delivery"],
        args=_fetch_arguments(delivery, tokenizer_only=tokenizer_only),
        env={ENV_HUB_TOKEN_FILE: POD_HUB_TOKEN_FILE} if token.volumes else {},
        mounts=[
            delivery.mount,
            {"name": cache["name"], "mountPath": POD_CACHE_DIR},
            tmp_mount(),
            *token.mounts,
        ],
    )  # fmt: skip
    volumes = ({"name": delivery.mount["name"], "emptyDir": {}}, cache, *token.volumes)
    cache_mount = {"name": cache["name"], "mountPath": POD_CACHE_DIR, "readOnly": True}
    return MountedFiles(volumes, ({**delivery.mount, "readOnly": True}, cache_mount), (fetch,))


def _fetch_arguments(delivery: _Delivery, *, tokenizer_only: bool) -> list[str]:
    model = delivery.model
    revision = ["--revision", model.revision] if model.revision else []
    scope = ["--adapter"] if delivery.is_adapter else ["--tokenizer-only"] if tokenizer_only else []
    return ["--uri", model.uri, *revision, "--cache", POD_CACHE_DIR, "--into", delivery.into, *scope]


def _cache_volume(model: ModelSpec) -> dict[str, Any]:
    """Return the cache's volume. A folder on the node must exist: the kubelet would create one for root only."""
    if model.cache.claim_name:
        return {"name": CACHE_CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": model.cache.claim_name}}
    if model.cache.host_path:
        return {"name": CACHE_FOLDER_VOLUME, "hostPath": {"path": model.cache.host_path, "type": "Directory"}}
    return {"name": CACHE_VOLUME, "emptyDir": {}}
