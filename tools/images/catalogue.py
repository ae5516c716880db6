"""Which images there are. Their names are those that the chart pulls by default: values.yaml is where they stand."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from hetero_api.contract import VERSION

ROOT: Final = Path(__file__).resolve().parents[2]
VALUES: Final = ROOT / "charts/heteroinference/values.yaml"
_DEFAULT_REGISTRY: Final = "docker.io"


@dataclass(frozen=True, slots=True)
class Image:
    """One image of the project."""

    key: str
    """In the chart's `images`."""
    dockerfile: str
    target: str


IMAGES: Final = (
    Image("operator", "Dockerfile.cpu", "operator"),
    Image("gateway", "Dockerfile.cpu", "gateway"),
    Image("router", "Dockerfile.cpu", "router"),
    Image("cpuWorker", "Dockerfile.cpu", "worker"),
    Image("gpuWorker", "Dockerfile.gpu", "worker"),
)


@dataclass(frozen=True, slots=True)
class NamedImage:
    """An image, and what it is called. `name` is short (worker-cpu), `reference` is whole."""

    image: Image
    name: str
    reference: str


def named_images(*, registry: str | None = None, tag: str = VERSION, values: Path = VALUES) -> dict[str, NamedImage]:
    """All images by their short name."""
    images: Mapping[str, Any] = yaml.safe_load(values.read_text(encoding="utf-8"))["images"]
    folder = images["registry"] if registry is None else registry
    names = {image: str(images[image.key]["repository"]) for image in IMAGES}
    return {name: NamedImage(image, name, f"{whole_name(f'{folder}/{name}')}:{tag}") for image, name in names.items()}


def whole_name(name: str) -> str:
    """With the registry that Kubernetes means where a name has none: a node looks for images by their whole names."""
    first, slash, _ = name.partition("/")
    has_registry = bool(slash) and (first == "localhost" or "." in first or ":" in first)
    if has_registry:
        return name
    return f"{_DEFAULT_REGISTRY}/{name}" if slash else f"{_DEFAULT_REGISTRY}/library/{name}"


def source_revision(root: Path = ROOT) -> str:
    """The commit that is checked out; "unknown" where the sources are no checkout."""
    try:
        found = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() if found.returncode == 0 else "unknown"
