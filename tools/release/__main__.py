"""`python -m tools.release cut | build | push`; see docs/releases.md."""

from __future__ import annotations

import argparse
import os
import sys
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from hetero_api.contract import VERSION
from tools.images.__main__ import ARCHIVE_SUFFIXES, check_sums, write_sums
from tools.images.__main__ import build as build_images
from tools.images.archive import read_archive
from tools.images.builders import ImageError, find_builder
from tools.images.catalogue import ROOT, named_images, source_time
from tools.images.settings import Settings
from tools.release import chart, notes
from tools.release.registry import Registry
from tools.release.signing import Signer
from tools.release.sources import ReleaseError, export, require_committed
from tools.release.wheels import ARCHITECTURES, build_wheels

_CHANGELOG: Final = ROOT / "CHANGELOG.md"
_IMAGES: Final = "operator gateway router worker-cpu"
"""Built where IMAGES does not say others: all that need no CUDA."""
_MADE: Final = ("*.whl", "*.tar.gz", "*.tgz", "CHANGELOG-*.md")


def cut() -> None:
    """Write today into the heading of this version's notes. Raises ReleaseError."""
    text = _CHANGELOG.read_text(encoding="utf-8")
    _CHANGELOG.write_text(notes.cut(text, VERSION, datetime.now(UTC).date()), encoding="utf-8")
    print(f"CHANGELOG.md: {VERSION} is cut; commit it")


def build(folder: Path, architectures: Sequence[str], environment: Mapping[str, str]) -> None:
    """Build everything of the commit that is checked out into `folder`. Raises ReleaseError and ImageError."""
    require_committed(ROOT)
    chosen = {**environment, "IMAGES": environment.get("IMAGES") or _IMAGES, "SAVE": str(folder)}
    settings, builder = Settings.from_environment(chosen), find_builder(environment.get("BUILDER") or None)
    folder.mkdir(parents=True, exist_ok=True)
    clear(folder, [named.name for named in settings.images])
    with tempfile.TemporaryDirectory(prefix="hetero-release-") as name:
        pack_sources(export(ROOT, Path(name)), folder, architectures, created=source_time(environment))
    build_images(settings, builder)
    write_sums(folder)
    print(f"{folder}/SHA256SUMS names all that {VERSION} is")


def clear(folder: Path, images: Collection[str]) -> None:
    """Take away what an earlier release left in a folder, but the archives of `images`, which are built anew."""
    others = [f"{name}{suffix}" for name in named_images() if name not in images for suffix in ARCHIVE_SUFFIXES]
    for old in (path for pattern in (*_MADE, *others) for path in folder.glob(pattern)):
        old.unlink()


def pack_sources(tree: Path, folder: Path, architectures: Sequence[str], *, created: int) -> None:
    """Write all of a release but its images from a copy of the sources. Raises ReleaseError."""
    text = notes.section((tree / "CHANGELOG.md").read_text(encoding="utf-8"), VERSION)
    (folder / f"CHANGELOG-{VERSION}.md").write_text(text, encoding="utf-8")
    values = (tree / chart.CHART / "values.yaml").read_text(encoding="utf-8")
    print(f"wrote {chart.pack_chart(tree / chart.CHART, folder, values=values, created=created)}", flush=True)
    for file in build_wheels(tree, folder, architectures, created=created):
        print(f"wrote {file}", flush=True)


def push(folder: Path, registry: Registry) -> list[str]:
    """Push the images in a folder, and the chart, which names them by their digests; all names with digests.

    Raises ReleaseError and ImageError.
    """
    check_sums(folder)
    packed = next(folder.glob("*.tgz"), None)
    if packed is None:
        raise ReleaseError(f"{folder} holds no chart: say make release DIST={folder}")
    version = packed.stem.removeprefix(f"{chart.NAME}-")
    notes.require_cut((folder / f"CHANGELOG-{version}.md").read_text(encoding="utf-8"), version)
    found = {named: folder / f"{name}.tar" for name, named in named_images().items()}
    archives = {named: path for named, path in found.items() if path.exists()}
    digests = {named: read_archive(path).digest for named, path in archives.items()}
    created = rename_images(packed, registry.where, {named.image.key: digest for named, digest in digests.items()})
    write_sums(folder)
    pushed = [
        registry.push(f"oci-archive:{path}", named.name, version, digest=digests[named])
        for named, path in archives.items()
    ]
    with tempfile.TemporaryDirectory(prefix="hetero-chart-") as layout:
        digest = chart.write_layout(packed, Path(layout), created=created)
        pushed.append(registry.push(f"oci:{layout}", chart.NAME, version, digest=digest))
    return pushed


def rename_images(packed: Path, registry: str, digests: Mapping[str, str]) -> int:
    """Write a packed chart again, with images of a registry; the time of its files. Raises ReleaseError."""
    with tempfile.TemporaryDirectory(prefix="hetero-chart-") as name, tarfile.open(packed) as read:
        created = int(read.getmembers()[0].mtime)
        read.extractall(name, filter="data")
        source = Path(name) / chart.NAME
        values = chart.values_for((source / "values.yaml").read_text(encoding="utf-8"), registry, digests)
        chart.pack_chart(source, packed.parent, values=values, created=created)
    return created


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.release", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("cut", help="date this version's section of CHANGELOG.md")
    built = commands.add_parser("build", help="build everything; variables are those of `make images`")
    built.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    pushed = commands.add_parser("push", help="push images and chart to a registry, with skopeo")
    for one in (built, pushed):
        one.add_argument("folder", type=Path)
    pushed.add_argument("registry", metavar="HOST/PATH")
    pushed.add_argument("--key", type=Path, help="sign with a private key, ECDSA over P-256 in PEM")
    pushed.add_argument("--passphrase-file", type=Path, help="file with the key's passphrase, if it has one")
    pushed.add_argument("--plain-http", action="store_true", help="for a registry on this machine")
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "cut":
            cut()
        elif chosen.command == "build":
            build(chosen.folder.resolve(), chosen.architectures, environment)
        else:
            key = Signer.load(chosen.key, chosen.passphrase_file) if chosen.key else None
            for name in push(chosen.folder, Registry(chosen.registry, key, chosen.plain_http)):
                print(f"pushed {name}{', signed' if key else ''}")
    except (ReleaseError, ImageError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
