"""Archives of images: written so that the same content is the same bytes, and read.

A builder stamps files with the time of the build and keeps no order, so its images of the same sources differ.
`rewrite` takes what a builder saved and gives all layers above the base fixed times, sorted entries and no names of
users; the base's layers stay as they were, so a registry that has them needs no others. The digest of the result is
the same on every machine whose build put the same files there.

The archive is an OCI layout with the index that docker reads beside it: `docker load`, `podman load`, `ctr images
import` and skopeo's `oci-archive:` take it. Layers are not compressed, for compressors differ.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import posixpath
import re
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

from tools.images.builders import ImageError
from tools.images.catalogue import FILE_TIME

_GZIP: Final = b"\x1f\x8b"
MANIFEST: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG: Final = "application/vnd.oci.image.config.v1+json"
_LAYER: Final = "application/vnd.oci.image.layer.v1.tar"
_XATTR: Final = "SCHILY.xattr."
_WHITEOUT: Final = ".wh."
_OPAQUE: Final = ".wh..wh..opq"
_KEPT: Final = re.compile(
    r".*\.dist-info/(METADATA|RECORD)|var/lib/dpkg/(status|info/[^/]+\.list)|(usr/lib|etc)/os-release"
)
"""Files whose content a reader keeps: what says which packages there are."""


def rewrite(saved: Path, target: Path, *, reference: str, base_layers: int, created: int) -> str:
    """Write what a builder saved as an archive that is the same for the same content; its manifest's digest.

    `created` is the time, in seconds, that the image has. Raises ImageError.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".layers-") as name, tarfile.open(saved, "r:") as read:
        folder, blobs = Path(name), _Blobs()
        (listed,) = json.loads(_member(read, "manifest.json"))
        diff_ids = []
        for number, layer in enumerate(listed["Layers"]):
            path = folder / str(number)
            with _uncompressed(read, layer) as source, path.open("wb") as written:
                (shutil.copyfileobj if number < base_layers else _write_sorted)(source, written)
            diff_ids.append(blobs.add_file(path))
        config = _fixed(json.loads(_member(read, listed["Config"])), diff_ids, created)
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, **blobs.add_json(config)},
            "layers": [{"mediaType": _LAYER, "digest": it, "size": blobs.sizes[it]} for it in diff_ids],
        }
        described = blobs.add_json(manifest)
        _write_archive(target, blobs, {"mediaType": MANIFEST, **described}, manifest, reference)
        return str(described["digest"])


class _Blobs:
    """Files by their digest."""

    def __init__(self) -> None:
        self.places: dict[str, Path | bytes] = {}
        self.sizes: dict[str, int] = {}

    def add_file(self, path: Path) -> str:
        with path.open("rb") as file:
            digest = f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
        self.places[digest], self.sizes[digest] = path, path.stat().st_size
        return digest

    def add_json(self, document: Mapping[str, Any]) -> dict[str, Any]:
        content = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.places[digest], self.sizes[digest] = content, len(content)
        return {"digest": digest, "size": len(content)}


def _fixed(config: Mapping[str, Any], diff_ids: list[str], created: int) -> dict[str, Any]:
    """Return an image's configuration without what differs from one build to the next."""
    stamp = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kept = {name: config[name] for name in ("architecture", "os", "variant", "config") if name in config}
    kept["config"] = {name: value for name, value in kept["config"].items() if name not in ("Hostname", "Image")}
    history = [_noted(entry, stamp) for entry in config.get("history", [])]
    rootfs = {"type": "layers", "diff_ids": diff_ids}
    return {**kept, "created": stamp, "rootfs": rootfs, **({"history": history} if history else {})}


def _noted(entry: Mapping[str, Any], stamp: str) -> dict[str, Any]:
    """Return a step of the build without what a builder notes of this build: digests of files with their times, names
    of the images between."""
    kept = {name: entry[name] for name in ("created_by", "empty_layer") if name in entry}
    if "created_by" in kept:
        kept["created_by"] = re.sub(r"\b(file|dir|multi):[0-9a-f]{64}", r"\1", kept["created_by"])
    return {"created": stamp, **kept}


def _write_sorted(source: IO[bytes], target: IO[bytes]) -> None:
    """Write a layer with its entries in order, and nothing in them that is not the file's own."""
    with (
        tarfile.open(fileobj=source, mode="r:") as read,
        tarfile.open(fileobj=target, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        members = {_clean(member.name): member for member in read.getmembers()}
        written: dict[str, str] = {}
        for name in sorted(members):
            content = members[_linked(name, members)]
            entry = _entry(name, content)
            if content.isreg():
                # The first name of a file with several has its content, whichever had it before.
                first = written.setdefault(_clean(content.name), name)
                if first != name:
                    entry.type, entry.linkname, entry.size = tarfile.LNKTYPE, first, 0
                    out.addfile(entry)
                else:
                    out.addfile(entry, read.extractfile(content))
            else:
                out.addfile(entry)


def _linked(name: str, members: Mapping[str, tarfile.TarInfo]) -> str:
    """Return the name under which a layer has a file's content. Raises ImageError."""
    while members[name].islnk():
        target = _clean(members[name].linkname)
        if target not in members:
            raise ImageError(f"a layer has a second name for {target}, and not the file")
        name = target
    return name


def _entry(name: str, member: tarfile.TarInfo) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.mode, entry.uid, entry.gid, entry.mtime = member.mode, member.uid, member.gid, FILE_TIME
    entry.type = tarfile.REGTYPE if member.isreg() else member.type
    entry.linkname, entry.devmajor, entry.devminor = member.linkname, member.devmajor, member.devminor
    entry.size = member.size if member.isreg() else 0
    headers = {key: value for key, value in sorted(member.pax_headers.items()) if key.startswith(_XATTR)}
    entry.pax_headers = headers
    return entry


def _write_archive(
    target: Path, blobs: _Blobs, described: Mapping[str, Any], manifest: Mapping[str, Any], reference: str
) -> None:
    names = {"io.containerd.image.name": reference, "org.opencontainers.image.ref.name": reference.rpartition(":")[2]}
    index = {"schemaVersion": 2, "manifests": [{**described, "annotations": names}]}
    layers = [_blob_name(layer["digest"]) for layer in manifest["layers"]]
    for_docker = [{"Config": _blob_name(manifest["config"]["digest"]), "RepoTags": [reference], "Layers": layers}]
    parts: dict[str, Path | bytes] = {
        **{_blob_name(digest): place for digest, place in blobs.places.items()},
        "index.json": json.dumps(index, sort_keys=True).encode(),
        "manifest.json": json.dumps(for_docker, sort_keys=True).encode(),
        "oci-layout": b'{"imageLayoutVersion": "1.0.0"}',
    }
    with tarfile.open(target, "w", format=tarfile.PAX_FORMAT) as out:
        for name, part in sorted(parts.items()):
            entry = tarfile.TarInfo(name)
            entry.mtime = FILE_TIME
            if isinstance(part, bytes):
                entry.size = len(part)
                out.addfile(entry, io.BytesIO(part))
            else:
                entry.size = part.stat().st_size
                with part.open("rb") as file:
                    out.addfile(entry, file)


@dataclass(frozen=True, slots=True)
class File:
    """A file of an image. `content` is kept of those that tell of packages."""

    layer: int
    """Number of the layer that it comes from, the base's first."""
    sha256: str
    """Of its content, or of where a link leads."""
    content: bytes | None = None


@dataclass(frozen=True, slots=True)
class ImageContent:
    """What an archive holds. `problems` says which of its parts are not what their digest says."""

    digest: str
    """Of the manifest: what a registry calls the image."""
    config: Mapping[str, Any]
    files: Mapping[str, File]
    """By their path, without a leading slash; directories are none."""
    problems: tuple[str, ...]


def read_archive(path: Path) -> ImageContent:
    """Read what `rewrite` wrote. Raises ImageError."""
    try:
        with tarfile.open(path, "r:") as read:
            return _read(read)
    except (OSError, tarfile.TarError, KeyError, ValueError) as error:
        raise ImageError(f"{path} is no archive of an image as `make images SAVE=…` writes it: {error}") from error


def _read(read: tarfile.TarFile) -> ImageContent:
    (described,) = json.loads(_member(read, "index.json"))["manifests"]
    manifest = json.loads(_member(read, _blob_name(described["digest"])))
    digests = [described["digest"], manifest["config"]["digest"], *(layer["digest"] for layer in manifest["layers"])]
    config = json.loads(_member(read, _blob_name(manifest["config"]["digest"])))
    problems = [f"{digest} has another content" for digest in digests if _digest(read, digest) != digest]
    if config["rootfs"]["diff_ids"] != digests[2:]:
        problems.append("the configuration names other layers than the manifest")
    (for_docker,) = json.loads(_member(read, "manifest.json"))
    if [for_docker["Config"], *for_docker["Layers"]] != [_blob_name(digest) for digest in digests[1:]]:
        problems.append("manifest.json names other parts than index.json")
    files: dict[str, File] = {}
    for number, digest in enumerate(digests[2:]):
        with _uncompressed(read, _blob_name(digest)) as layer:
            _lay_over(files, layer, number)
    return ImageContent(described["digest"], config, files, tuple(problems))


def _lay_over(files: dict[str, File], layer: IO[bytes], number: int) -> None:
    """Add a layer's files; take away what it says is gone."""
    with tarfile.open(fileobj=layer, mode="r:") as read:
        members = {_clean(member.name): member for member in read.getmembers()}
        for name in members:
            folder, base = posixpath.split(name)
            if base == _OPAQUE:
                _remove(files, folder, below_only=True)
            elif base.startswith(_WHITEOUT):
                _remove(files, posixpath.join(folder, base.removeprefix(_WHITEOUT)))
        for name, member in members.items():
            if posixpath.basename(name).startswith(_WHITEOUT) or member.isdir():
                continue
            content = members[_linked(name, members)]
            files[name] = _file(read, name, content, number)


def _file(read: tarfile.TarFile, name: str, member: tarfile.TarInfo, layer: int) -> File:
    if not member.isreg():
        what = f"{member.type!r} {member.linkname} {member.devmajor} {member.devminor}"
        return File(layer, hashlib.sha256(what.encode()).hexdigest())
    source = read.extractfile(member)
    assert source is not None
    if _KEPT.fullmatch(name):
        content = source.read()
        return File(layer, hashlib.sha256(content).hexdigest(), content)
    return File(layer, hashlib.file_digest(source, "sha256").hexdigest())  # type: ignore[arg-type]


def _remove(files: dict[str, File], path: str, *, below_only: bool = False) -> None:
    below = f"{path}/" if path else ""
    for gone in [name for name in files if name.startswith(below) or (name == path and not below_only)]:
        del files[gone]


def _clean(name: str) -> str:
    return posixpath.normpath(name).lstrip("/")


def _blob_name(digest: str) -> str:
    return f"blobs/{digest.replace(':', '/')}"


def _opened(read: tarfile.TarFile, name: str) -> IO[bytes]:
    """Return a member's content. Raises KeyError for what has none."""
    file = read.extractfile(name)
    if file is None:
        raise KeyError(name)
    return file


def _member(read: tarfile.TarFile, name: str) -> bytes:
    return _opened(read, name).read()


def _digest(read: tarfile.TarFile, digest: str) -> str:
    file = _opened(read, _blob_name(digest))
    return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"  # type: ignore[arg-type]


@contextmanager
def _uncompressed(read: tarfile.TarFile, name: str) -> Iterator[IO[bytes]]:
    """Yield a member of an archive, which may be compressed there."""
    with _opened(read, name) as file:
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        if not packed:
            yield file
            return
        with tempfile.TemporaryFile() as plain:
            with gzip.open(file) as unpacked:
                shutil.copyfileobj(unpacked, plain)
            plain.seek(0)
            yield plain
