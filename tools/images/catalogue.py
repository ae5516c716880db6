"""Which images there are. Their names are those that the chart pulls by default: values.yaml is where they stand."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from hetero_api.contract import VERSION

ROOT: Final = Path(__file__).resolve().parents[2]
VALUES: Final = ROOT / "charts/heteroinference/values.yaml"
_DEFAULT_REGISTRY: Final = "docker.io"
FILE_TIME: Final = 315532800
"""Time of each file that an image has above its base: 1980, before which zip files know none."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image of the project."""

    key: str
    """In the chart's `images`."""
    dockerfile: str
    target: str
    extras: tuple[str, ...]
    """Extras of pyproject.toml that its lock is made for."""
    torch: Literal["cpu", "cuda"] | None = None
    """Which build of torch it has."""


IMAGES: Final = (
    Image("operator", "Dockerfile.cpu", "operator", extras=("operator",)),
    Image("gateway", "Dockerfile.cpu", "gateway", extras=("router-door",)),
    Image("router", "Dockerfile.cpu", "router", extras=("router",)),
    Image("cpuWorker", "Dockerfile.cpu", "worker", extras=("worker",), torch="cpu"),
    Image("gpuWorker", "Dockerfile.gpu", "worker", extras=("worker",), torch="cuda"),
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
    return _git(root, "rev-parse", "HEAD") or "unknown"


def _git(root: Path, *arguments: str) -> str:
    try:
        found = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return found.stdout.strip() if found.returncode == 0 else ""


def source_time(environment: Mapping[str, str], root: Path = ROOT) -> int:
    """When the sources were made, in seconds: SOURCE_DATE_EPOCH, else the commit's time, else 1980."""
    if given := environment.get("SOURCE_DATE_EPOCH"):
        return int(given)
    told = _git(root, "log", "-1", "--format=%ct")
    return int(told) if told else FILE_TIME
