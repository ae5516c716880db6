"""What is set from outside: variables, which `make NAME=VALUE` sets as well as a shell does. Read once, here."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.contract import VERSION
from tools.images.builders import BuildSettings, ImageError
from tools.images.catalogue import NamedImage, named_images, source_time

CPU_IMAGES: Final = ("operator", "gateway", "worker-cpu")


@dataclass(frozen=True, slots=True)
class Settings:
    """Of one call."""

    images: tuple[NamedImage, ...]
    builder: str | None
    build: BuildSettings
    save: Path | None
    created: int
    """Time that the images have, in seconds."""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises ImageError. A variable that is empty is one that is not set."""
        known = named_images(registry=environment.get("REGISTRY") or None, tag=environment.get("TAG") or VERSION)
        names = environment.get("IMAGES", "").split() or list(CPU_IMAGES)
        if unknown := [name for name in names if name not in known]:
            raise ImageError(f"IMAGES: {unknown[0]!r} is none of {', '.join(known)}")
        return cls(
            images=tuple(known[name] for name in names),
            builder=environment.get("BUILDER") or None,
            build=BuildSettings(
                base_image=environment.get("BASE_IMAGE") or None,
                wheels=_path(environment, "WHEELS"),
                ca_bundle=_path(environment, "CA_BUNDLE"),
                options=tuple(shlex.split(environment.get("IMAGE_BUILD_OPTIONS", ""))),
            ),
            save=_path(environment, "SAVE"),
            created=source_time(environment),
        )


def _path(environment: Mapping[str, str], name: str) -> Path | None:
    return Path(environment[name]).expanduser().resolve() if environment.get(name) else None
