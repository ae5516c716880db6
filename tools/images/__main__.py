"""`python -m tools.images build | sizes | base | locks | audit`; see docs/images.md."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from hetero_api.contract import VERSION
from tools.images.archive import read_archive, rewrite
from tools.images.audit import ask_for_advisories, image_problems, place
from tools.images.base import REFERENCE, make_base
from tools.images.builders import Builder, BuildTask, ImageError, find_builder
from tools.images.catalogue import ROOT, NamedImage, source_revision
from tools.images.contents import contents_of
from tools.images.locks import LOCKS, LockError, check_locks, lock_names, make_lock, read_lock
from tools.images.sbom import make_sbom, read_sbom
from tools.images.settings import Settings
from tools.images.sizes import BASE_LABEL, ImageSize, describe, growth_problems, measure, read_record, write_record

SBOM_SUFFIX: Final = ".cdx.json"
ARCHIVE_SUFFIXES: Final = (".tar", SBOM_SUFFIX, ".id")
"""Files of an image that is saved."""
SUMS: Final = "SHA256SUMS"
_SUMMED: Final = ("*.tar", f"*{SBOM_SUFFIX}", "*.whl", "*.tar.gz", "*.tgz", "CHANGELOG-*.md")


def build(settings: Settings, builder: Builder) -> None:
    """Build the images, print their sizes, and save what changed. Raises ImageError."""
    arguments = {"VERSION": VERSION, "REVISION": source_revision()}
    for named in settings.images:
        print(f"building {named.reference} with {builder.program}", flush=True)
        dockerfile = ROOT / named.image.dockerfile
        builder.build(BuildTask(dockerfile, named.image.target, named.reference, ROOT, arguments), settings.build)
    sizes, recorded = measure_all(settings, builder), read_record()
    for named in settings.images:
        print(f"{describe(named.name, sizes[named.name], recorded)}   {named.reference}")
        if settings.save is not None:
            save(builder, named, settings.save, created=settings.created)
    if settings.save is not None:
        write_sums(settings.save)


def measure_all(settings: Settings, builder: Builder) -> dict[str, ImageSize]:
    """Sizes of images that are built. Raises ImageError."""
    return {named.name: measure(builder, named.reference) for named in settings.images}


def save(builder: Builder, named: NamedImage, folder: Path, *, created: int) -> Path:
    """As an archive in `folder`, beside its bill of materials; the archive. Raises ImageError.

    They are written only when the image is another than last time.
    """
    archive, materials, mark = (folder / f"{named.name}{suffix}" for suffix in ARCHIVE_SUFFIXES)
    identity = f"{builder.image_id(named.reference)} {named.reference} {created}\n"
    if all(file.exists() for file in (archive, materials, mark)) and mark.read_text(encoding="utf-8") == identity:
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    base_layers = builder.layers(builder.configuration(named.reference)["Labels"][BASE_LABEL])
    saved, unfinished = archive.with_suffix(".saved"), archive.with_suffix(".part")
    saved.unlink(missing_ok=True)
    try:
        builder.save(named.reference, saved)
        rewrite(saved, unfinished, reference=named.reference, base_layers=base_layers, created=created)
    finally:
        saved.unlink(missing_ok=True)
    image, repository = read_archive(unfinished), named.reference.rpartition(":")[0]
    text = make_sbom(image, name=named.name, repository=repository, base_layers=base_layers, created=created)
    materials.write_text(text, encoding="utf-8")
    unfinished.replace(archive)
    mark.write_text(identity, encoding="utf-8")
    print(f"wrote {archive}, {image.digest}, and {materials.name}")
    return archive


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of what is in a folder to be released, which `sha256sum -c` reads: what is signed."""
    paths = sorted(path for pattern in _SUMMED for path in folder.glob(pattern))
    (folder / SUMS).write_text("".join(f"{_sha256(path)}  {path.name}\n" for path in paths), encoding="utf-8")


def check_sums(folder: Path) -> None:
    """Raises ImageError where a file is not what SHA256SUMS says, or there is no such list."""
    if not (folder / SUMS).exists():
        raise ImageError(f"there is no {folder / SUMS}: nothing was built there")
    for line in (folder / SUMS).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        if _sha256(folder / name) != digest:
            raise ImageError(f"{folder / name} is not what {SUMS} says: build it again")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_sizes(settings: Settings, builder: Builder, *, record: bool) -> int:
    """Print sizes; record them, or say what grew. The exit status. Raises ImageError."""
    sizes, recorded = measure_all(settings, builder), read_record()
    for name, size in sizes.items():
        print(describe(name, size, recorded))
    if record:
        write_record(sizes)
        return 0
    problems = growth_problems(sizes, recorded)
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def locks_command(chosen: argparse.Namespace) -> int:
    """Make locks, or check them. The exit status. Raises LockError."""
    names = chosen.names or lock_names()
    if not chosen.check:
        for name in names:
            print(f"wrote {make_lock(name, wheels=chosen.wheels, index=chosen.index).relative_to(ROOT)}", flush=True)
    found = check_locks(names)
    for problem in found:
        print(f"locks/{problem}", file=sys.stderr)
    if found:
        print("say make locks", file=sys.stderr)
    return 1 if found else 0


def audit(settings: Settings, *, require_advisories: bool) -> int:
    """Compare saved images with locks and bills of materials, and ask for advisories. The exit status.

    Raises ImageError and LockError.
    """
    if settings.save is None:
        raise ImageError("SAVE: say in which folder `make images SAVE=…` put the archives")
    sound, asked = True, True
    for named in settings.images:
        lock = read_lock((LOCKS / f"{named.name}.txt").read_text(encoding="utf-8"))
        image = read_archive(settings.save / f"{named.name}.tar")
        sbom = read_sbom((settings.save / f"{named.name}{SBOM_SUFFIX}").read_text(encoding="utf-8"))
        problems, where = image_problems(image, lock, sbom), place(contents_of(image, base_layers=sbom.base_layers))
        advisories = ask_for_advisories(lock, where)
        verdict = f"{len(problems)} problems" if problems else "as locked, recorded and listed"
        print(f"{named.name}: {len(image.files)} files and {len(sbom.packages)} packages of {image.digest}: {verdict}")
        for line in (*problems, *advisories.found):
            print(f"{named.name}: {line}", file=sys.stderr)
        if advisories.unchecked:
            print(f"{named.name}: advisories were NOT looked at for {len(advisories.unchecked)} entries:")
            print("".join(f"    {line}\n" for line in advisories.unchecked), end="")
        elif not advisories.found:
            print(f"{named.name}: no advisory is known for what is locked")
        sound, asked = sound and not problems and not advisories.found, asked and not advisories.unchecked
    return 0 if sound and (asked or not require_advisories) else 1


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.images", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("build", help="build the images, and print their sizes")
    sizes = commands.add_parser("sizes", help="fail when a built image has grown by more than a tenth")
    sizes.add_argument(
        "--record", action="store_true", help="record the sizes instead, in sizes.json and docs/images.md"
    )
    base = commands.add_parser("base", help="make a base image of Debian's packages, without a registry")
    base.add_argument("--reference", default=REFERENCE)
    base.add_argument("--mirror", default="", help="URL of a mirror of Debian; default: the machine's own")
    locks = commands.add_parser("locks", help="resolve the hashed locks of images, with uv")
    locks.add_argument("names", nargs="*", choices=[*lock_names(), []], help="some of them; default: all")
    locks.add_argument("--check", action="store_true", help="only compare them with pyproject.toml, without a network")
    locks.add_argument("--wheels", type=Path, help="folder with torch's wheel for CPUs")
    locks.add_argument("--index", default="", help="URL of an index with torch's build for another CUDA")
    audited = commands.add_parser("audit", help="compare the images in SAVE with locks and bills of materials")
    audited.add_argument(
        "--require-advisories", action="store_true", help="fail where advisories cannot be looked at, too"
    )
    chosen = parser.parse_args(arguments)
    try:
        if chosen.command == "locks":
            return locks_command(chosen)
        settings = Settings.from_environment(environment)
        if chosen.command == "audit":
            return audit(settings, require_advisories=chosen.require_advisories)
        builder = find_builder(settings.builder)
        if chosen.command == "build":
            build(settings, builder)
        elif chosen.command == "sizes":
            return check_sizes(settings, builder, record=chosen.record)
        else:
            make_base(builder, reference=chosen.reference, mirror_url=chosen.mirror)
            print(f"made {chosen.reference}: say make images BASE_IMAGE={chosen.reference}")
    except (ImageError, LockError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
