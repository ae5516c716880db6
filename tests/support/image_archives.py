"""Archives as builders save them, made by hand: a base of Debian with a package, an environment, and the project."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import random
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

SITE = "opt/hetero/lib/python3.11/site-packages"
REFERENCE = "registry.example/ai/gateway:1"
BASE_LAYERS = 1


@dataclass(frozen=True)
class Entry:
    """A file of a layer: content, the name it is linked to, or neither for a folder."""

    content: bytes | None = None
    symlink: str = ""
    hardlink: str = ""
    mode: int = 0o644


Layer = Mapping[str, Entry]


@dataclass(frozen=True)
class Build:
    """What differs between two builds of the same: times, order, users' names, and what a builder notes."""

    time: int = 1_700_000_000
    seed: int = 0
    user: str = "root"
    packed: bool = False
    hostname: str = "builder-1"


def file(text: str, *, mode: int = 0o644) -> Entry:
    return Entry(text.encode(), mode=mode)


def write_saved(path: Path, layers: Sequence[Layer], build: Build | None = None) -> Path:
    """As `docker save` writes an image."""
    build = build or Build()
    blobs = [_layer(layer, build) for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "created": f"2026-01-01T00:00:{build.seed:02}Z",
        "config": {"Entrypoint": ["python"], "Hostname": build.hostname, "Labels": {"a": "b"}},
        "container": build.hostname,
        "history": [
            {
                "created": f"2026-01-01T00:00:{build.seed:02}Z",
                "created_by": f"/bin/sh -c #(nop) COPY dir:{number:064x}",
                "comment": f"FROM {number}",
            }
            for number in range(build.seed, build.seed + len(layers))
        ],
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(blob).hexdigest()}" for blob in blobs]},
    }  # fmt: skip
    names = [f"{number}/layer.tar" for number in range(len(blobs))]
    manifest = [{"Config": "config.json", "RepoTags": [REFERENCE], "Layers": names}]
    parts = {"config.json": json.dumps(config).encode(), "manifest.json": json.dumps(manifest).encode()}
    parts |= {
        name: gzip.compress(blob, mtime=build.time) if build.packed else blob
        for name, blob in zip(names, blobs, strict=True)
    }
    with tarfile.open(path, "w") as archive:
        for name, content in parts.items():
            _add(archive, tarfile.TarInfo(name), content)
    return path


def _layer(layer: Layer, build: Build) -> bytes:
    """Links to a file come after it, as builders write them."""
    names = list(layer)
    random.Random(build.seed).shuffle(names)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in sorted(names, key=lambda name: bool(layer[name].hardlink)):
            entry, info = layer[name], tarfile.TarInfo(name)
            info.mtime, info.uname, info.mode = build.time, build.user, entry.mode
            if entry.symlink or entry.hardlink:
                info.type = tarfile.SYMTYPE if entry.symlink else tarfile.LNKTYPE
                info.linkname = entry.symlink or entry.hardlink
            elif entry.content is None:
                info.type = tarfile.DIRTYPE
            _add(archive, info, entry.content or b"")
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, info: tarfile.TarInfo, content: bytes) -> None:
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def _base() -> Layer:
    status = (
        "Package: libc6\nStatus: install ok installed\nArchitecture: amd64\nVersion: 2.36-9\nDescription: C\n more\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n"
    )
    return {
        "etc/os-release": Entry(symlink="../usr/lib/os-release"),
        "usr/lib/os-release": file('ID=debian\nVERSION_ID="12"\n'),
        "usr/lib/libc.so.6": file("code"),
        "var/lib/dpkg/status": file(status),
        "var/lib/dpkg/info/libc6:amd64.list": file("/.\n/lib\n/lib/libc.so.6\n/lib/late.so\n"),
    }


def _environment() -> Layer:
    return {
        "opt/hetero": Entry(mode=0o755),
        "opt/hetero/pyvenv.cfg": file("home = /usr/bin\n"),
        "opt/hetero/bin/python": Entry(symlink="/usr/bin/python3"),
        "usr/lib/late.so": file("of libc6, in a later layer"),
        **package("thing", "1.0", {"thing/it.py": "1\n", "../../../bin/thing": "#!\n"}, licence="MIT"),
        f"{SITE}/thing/__pycache__/it.cpython-311.pyc": file("byte code"),
        **package("numpy", "2.4.6", {"numpy/it.py": "1\n"}, trimmed={"numpy/tests/test_it.py": "1\n"}),
    }


def package(
    name: str, version: str, files: Mapping[str, str], *, trimmed: Mapping[str, str] | None = None, licence: str = ""
) -> Layer:
    """Files of an installed package; `trimmed` are those that its RECORD names, and that were taken away."""
    folder = f"{name}-{version}.dist-info"
    expression = (
        f"License-Expression: {licence}\n" if licence else "Classifier: License :: OSI Approved :: BSD License\n"
    )
    metadata = f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{expression}\nText: not a header\n"
    texts = {**files, f"{folder}/METADATA": metadata}
    record = "".join(_line(path, text) for path, text in {**texts, **(trimmed or {})}.items())
    texts[f"{folder}/RECORD"] = f"{record}{folder}/RECORD,,\n"
    return {f"{SITE}/{path}".replace(f"{SITE}/../../../", "opt/hetero/"): file(text) for path, text in texts.items()}


def _line(path: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"{path},sha256={digest},{len(text)}\n"


@dataclass(frozen=True)
class Image:
    """An image of this project, small. Change it with `with_files`, `without` and `with_package`."""

    base: Layer = field(default_factory=_base)
    environment: Layer = field(default_factory=_environment)
    program: Layer = field(
        default_factory=lambda: package("heteroinference", "0.1.0", {"hetero_gateway/main.py": "1\n"})
    )

    @property
    def layers(self) -> tuple[Layer, Layer, Layer]:
        return self.base, self.environment, self.program

    def with_files(self, files: Layer) -> Image:
        """With files of the layer of packages that are there, too, or others than they were."""
        return replace(self, environment={**self.environment, **files})

    def without(self, *paths: str) -> Image:
        return replace(self, environment={path: it for path, it in self.environment.items() if path not in paths})


LOCK = f"""\
thing==1.0 \\
    --hash=sha256:{"a" * 64}
    # via pyproject.toml
numpy==2.4.6 ; python_version == '3.11' \\
    --hash=sha256:{"b" * 64}
    # via pyproject.toml
colorama==1.0 ; python_version >= '3.12' \\
    --hash=sha256:{"c" * 64}
    # via thing
"""
"""What `Image` was built of."""
