"""docker, podman and buildah behind one face: build, measure, save, import.

docker's and podman's command lines are alike; buildah's differs. All three take build contexts and build secrets, so a
folder of wheels and a network's own certificates never become part of an image.
"""

from __future__ import annotations

import json
import os
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_LOCAL: Final = "localhost/"
_PROBE_TIMEOUT_S: Final = 20


class ImageError(Exception):
    """An image could not be built, measured or run; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class BuildSettings:
    """What a build is given from outside; nothing of it by default."""

    base_image: str | None = None
    wheels: Path | None = None
    ca_bundle: Path | None = None
    options: tuple[str, ...] = ()
    """More options of the builder, as it takes them."""

    def arguments(self) -> list[str]:
        """Those that all builders take alike. Raises ImageError."""
        for name, path in (("WHEELS", self.wheels), ("CA_BUNDLE", self.ca_bundle)):
            if path is not None and not path.exists():
                raise ImageError(f"{name}: there is no {path}")
        arguments = [*_build_argument("BASE_IMAGE", self.base_image)] if self.base_image is not None else []
        if self.wheels is not None:
            arguments += ["--build-context", f"wheels={self.wheels}"]
        if self.ca_bundle is not None:
            arguments += ["--secret", f"id=ca-bundle,src={self.ca_bundle}"]
        return [*arguments, *self.options]


@dataclass(frozen=True, slots=True)
class BuildTask:
    """One image to be built."""

    dockerfile: Path
    target: str
    reference: str
    context: Path
    build_arguments: Mapping[str, str]

    def arguments(self) -> list[str]:
        given = [text for name, value in self.build_arguments.items() for text in _build_argument(name, value)]
        where = ["--file", str(self.dockerfile), "--target", self.target, "--tag", self.reference]
        return [*given, *where, str(self.context)]


def _build_argument(name: str, value: str) -> tuple[str, str]:
    return "--build-arg", f"{name}={value}"


class Builder(ABC):
    """A program that makes images. `program` is its name."""

    def __init__(self, program: str) -> None:
        self.program = program

    def problem(self) -> str:
        """Why it is of no use here: not installed, or its daemon is silent. "" if it is."""
        try:
            self.read("info", timeout_s=_PROBE_TIMEOUT_S)
        except ImageError as error:
            return str(error)
        return ""

    @abstractmethod
    def build_command(self, task: BuildTask, settings: BuildSettings) -> list[str]: ...

    @abstractmethod
    def bytes_on_base(self, reference: str, base: str) -> tuple[int, int]:
        """Uncompressed sizes of the base that an image was built on, and of what it adds. Raises ImageError."""

    @abstractmethod
    def layers(self, reference: str) -> int:
        """How many layers an image has, which may have to be pulled for it. Raises ImageError."""

    @abstractmethod
    def configuration(self, reference: str) -> dict[str, Any]:
        """What a container of it gets unless told otherwise: User, Env, Entrypoint, Labels… Raises ImageError."""

    @abstractmethod
    def image_id(self, reference: str) -> str:
        """What changes when anything in the image does. Raises ImageError."""

    @abstractmethod
    def save(self, reference: str, archive: Path) -> None:
        """Write it as an archive that `docker load` and containerd read. Raises ImageError."""

    @abstractmethod
    def import_root(self, archive: Path, reference: str, settings: Mapping[str, str]) -> None:
        """Make an image of one layer from a tar of a root; `settings` is its environment. Raises ImageError."""

    def build(self, task: BuildTask, settings: BuildSettings) -> None:
        """Build, its output on this process's own. Raises ImageError."""
        command = self.build_command(task, settings)
        environment = {**os.environ, "DOCKER_BUILDKIT": "1"}
        if subprocess.run(command, check=False, env=environment).returncode:
            raise ImageError(f"{task.reference} was not built; {self.program} says why above")

    def read(self, *arguments: str, timeout_s: float | None = None) -> str:
        """What the program prints. Raises ImageError."""
        command = [self.program, *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
        except FileNotFoundError:
            raise ImageError(f"{self.program} is not installed") from None
        except subprocess.TimeoutExpired:
            raise ImageError(f"{' '.join(command[:3])}: no answer within {timeout_s:g} s") from None
        if done.returncode:
            raise ImageError(f"{' '.join(command[:3])}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout


class Docker(Builder):
    """docker, and podman, which takes the same command line."""

    def build_command(self, task: BuildTask, settings: BuildSettings) -> list[str]:
        is_local = self.program == "podman" and (settings.base_image or "").startswith(_LOCAL)
        never = ["--pull=never"] if is_local else []
        return [self.program, "build", *never, *settings.arguments(), *task.arguments()]

    def bytes_on_base(self, reference: str, base: str) -> tuple[int, int]:
        self._have(base)
        total, below = (int(self.read("image", "inspect", "--format", "{{.Size}}", it)) for it in (reference, base))
        return below, total - below

    def layers(self, reference: str) -> int:
        self._have(reference)
        return len(json.loads(self.read("image", "inspect", "--format", "{{json .RootFS.Layers}}", reference)))

    def configuration(self, reference: str) -> dict[str, Any]:
        return dict(json.loads(self.read("image", "inspect", "--format", "{{json .Config}}", reference)))

    def image_id(self, reference: str) -> str:
        return self.read("image", "inspect", "--format", "{{.Id}}", reference).strip()

    def save(self, reference: str, archive: Path) -> None:
        self.read("save", "--output", str(archive), reference)

    def import_root(self, archive: Path, reference: str, settings: Mapping[str, str]) -> None:
        changes = [text for name, value in settings.items() for text in ("--change", f"ENV {name}={value}")]
        self.read("import", *changes, str(archive), reference)

    def _have(self, reference: str) -> None:
        """Pull it, if need be: docker builds from a base that it does not keep."""
        try:
            self.read("image", "inspect", reference)
        except ImageError:
            self.read("pull", "--quiet", reference)


class Buildah(Builder):
    """buildah: no daemon, and no containers of other programs."""

    def __init__(self) -> None:
        super().__init__("buildah")

    def build_command(self, task: BuildTask, settings: BuildSettings) -> list[str]:
        never = ["--pull-never"] if (settings.base_image or "").startswith(_LOCAL) else []
        return [self.program, "bud", "--layers", "--force-rm", *never, *settings.arguments(), *task.arguments()]

    def bytes_on_base(self, reference: str, base: str) -> tuple[int, int]:
        # A base that was pulled is listed with its compressed sizes, but as a part of an image it is not.
        below, sizes = len(self._layer_bytes(base)), self._layer_bytes(reference)
        return sum(sizes[:below]), sum(sizes[below:])

    def layers(self, reference: str) -> int:
        return len(self._layer_bytes(reference))

    def configuration(self, reference: str) -> dict[str, Any]:
        return dict(self._inspect(reference)["OCIv1"]["config"])

    def image_id(self, reference: str) -> str:
        return str(self._inspect(reference)["FromImageID"])

    def save(self, reference: str, archive: Path) -> None:
        self.read("push", "--quiet", reference, f"docker-archive:{archive}:{reference}")

    def import_root(self, archive: Path, reference: str, settings: Mapping[str, str]) -> None:
        container = self.read("from", "scratch").strip()
        try:
            self.read("add", "--quiet", container, str(archive), "/")
            self.read("config", *(f"--env={name}={value}" for name, value in settings.items()), container)
            self.read("commit", "--quiet", container, reference)
        finally:
            self.read("rm", container)

    def _layer_bytes(self, reference: str) -> list[int]:
        """From the base upwards."""
        return [int(layer["size"]) for layer in json.loads(self._inspect(reference)["Manifest"])["layers"]]

    def _inspect(self, reference: str) -> dict[str, Any]:
        return dict(json.loads(self.read("inspect", "--type", "image", reference)))


def all_builders() -> list[Builder]:
    """In the order in which they are preferred."""
    return [Docker("docker"), Docker("podman"), Buildah()]


def find_builder(name: str | None = None, builders: Sequence[Builder] | None = None) -> Builder:
    """The one of this name, else the first that is usable. Raises ImageError."""
    known = {builder.program: builder for builder in (all_builders() if builders is None else builders)}
    if name is not None and name not in known:
        raise ImageError(f"BUILDER: {name!r} is none of {', '.join(known)}")
    problems = []
    for builder in [known[name]] if name is not None else known.values():
        problem = builder.problem()
        if not problem:
            return builder
        problems.append(problem)
    raise ImageError(f"no builder of images works here: {'; '.join(problems)}")
