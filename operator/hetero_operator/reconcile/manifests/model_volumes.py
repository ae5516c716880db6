"""Volumes and init containers that bring a model into a pod: at POD_MODEL_DIR, read-only for what serves it.

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

from typing import Any, Final, NamedTuple

from hetero_api.contract import ENV_HUB_TOKEN_FILE, POD_CACHE_DIR, POD_HUB_TOKEN_FILE, POD_MODEL_DIR
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
MODEL_VOLUMES: Final = frozenset(
    {
        MODEL_VOLUME, MODEL_CLAIM_VOLUME, MODEL_IMAGE_VOLUME, MODEL_FOLDER_VOLUME,
        CACHE_VOLUME, CACHE_CLAIM_VOLUME, CACHE_FOLDER_VOLUME,
    }
)  # fmt: skip
"""Every volume that a model or its cache may be in."""
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


def served_path(model: ModelSpec) -> str:
    """Return the model's path within a pod."""
    file = parse_model_uri(model.uri).file
    return f"{POD_MODEL_DIR}/{file}" if file else POD_MODEL_DIR


def deliver_model(rendering: Rendering, *, image: str, resources: dict[str, Any], tokenizer_only: bool) -> MountedFiles:
    """Return the parts that bring the model into a pod; `image` and `resources` are for an init container."""
    uri = parse_model_uri(rendering.spec.model.uri)
    if uri.scheme == HUB:
        return _fetched(rendering, image=image, resources=resources, tokenizer_only=tokenizer_only)
    if uri.scheme == IMAGE and rendering.capabilities.version < IMAGE_VOLUMES_SINCE:
        return _copied(rendering, uri, resources)
    return _mounted(rendering, uri)


def _mounted(rendering: Rendering, uri: ModelUri) -> MountedFiles:
    volume: dict[str, Any]
    if uri.scheme == CLAIM:
        volume = {"name": MODEL_CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": uri.source, "readOnly": True}}
    elif uri.scheme == IMAGE:
        policy = rendering.spec.images.pull_policy.value
        volume = {"name": MODEL_IMAGE_VOLUME, "image": {"reference": uri.source, "pullPolicy": policy}}
    else:
        volume = {"name": MODEL_FOLDER_VOLUME, "hostPath": {"path": uri.path, "type": "Directory"}}
    below = {"subPath": uri.path} if uri.source and uri.path else {}
    mount = {"name": volume["name"], "mountPath": POD_MODEL_DIR, "readOnly": True, **below}
    return MountedFiles((volume,), (mount,))


def _copied(rendering: Rendering, uri: ModelUri, resources: dict[str, Any]) -> MountedFiles:
    source = f"/{uri.path}/." if uri.path else f"/{uri.file}"  # the image's root holds more than a model
    copy = container(
        rendering, MODEL_CONTAINER, uri.source, resources=resources,
        command=["cp", "-a", source, POD_MODEL_DIR],
        mounts=[{"name": MODEL_VOLUME, "mountPath": POD_MODEL_DIR}],
    )  # fmt: skip
    return MountedFiles(({"name": MODEL_VOLUME, "emptyDir": {}},), (_model_mount(),), (copy,))


def _fetched(rendering: Rendering, *, image: str, resources: dict[str, Any], tokenizer_only: bool) -> MountedFiles:
    model = rendering.spec.model
    cache = _cache_volume(model)
    token = secret_file(_HUB_TOKEN, model.token_secret_ref, POD_HUB_TOKEN_FILE)
    fetch = container(
        rendering, MODEL_CONTAINER, image, resources=resources,
        command=["python", "-m", "hetero_client.model_delivery"],
        args=_fetch_arguments(model, tokenizer_only=tokenizer_only),
        env={ENV_HUB_TOKEN_FILE: POD_HUB_TOKEN_FILE} if token.volumes else {},
        mounts=[
            {"name": MODEL_VOLUME, "mountPath": POD_MODEL_DIR},
            {"name": cache["name"], "mountPath": POD_CACHE_DIR},
            tmp_mount(),
            *token.mounts,
        ],
    )  # fmt: skip
    volumes = ({"name": MODEL_VOLUME, "emptyDir": {}}, cache, *token.volumes)
    cache_mount = {"name": cache["name"], "mountPath": POD_CACHE_DIR, "readOnly": True}
    return MountedFiles(volumes, (_model_mount(), cache_mount), (fetch,))


def _fetch_arguments(model: ModelSpec, *, tokenizer_only: bool) -> list[str]:
    revision = ["--revision", model.revision] if model.revision else []
    scope = ["--tokenizer-only"] if tokenizer_only else []
    return ["--uri", model.uri, *revision, "--cache", POD_CACHE_DIR, "--into", POD_MODEL_DIR, *scope]


def _cache_volume(model: ModelSpec) -> dict[str, Any]:
    """Return the cache's volume. A folder on the node must exist: the kubelet would create one for root only."""
    if model.cache.claim_name:
        return {"name": CACHE_CLAIM_VOLUME, "persistentVolumeClaim": {"claimName": model.cache.claim_name}}
    if model.cache.host_path:
        return {"name": CACHE_FOLDER_VOLUME, "hostPath": {"path": model.cache.host_path, "type": "Directory"}}
    return {"name": CACHE_VOLUME, "emptyDir": {}}


def _model_mount() -> dict[str, Any]:
    return {"name": MODEL_VOLUME, "mountPath": POD_MODEL_DIR, "readOnly": True}
