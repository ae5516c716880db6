"""`python -m tools.images build | sizes | base`; see docs/images.md."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hetero_api.contract import VERSION
from tools.images.base import REFERENCE, make_base
from tools.images.builders import Builder, BuildTask, ImageError, find_builder
from tools.images.catalogue import ROOT, NamedImage, source_revision
from tools.images.settings import Settings
from tools.images.sizes import ImageSize, describe, growth_problems, measure, read_record, write_record


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
            save(builder, named, settings.save)


def measure_all(settings: Settings, builder: Builder) -> dict[str, ImageSize]:
    """Sizes of images that are built. Raises ImageError."""
    return {named.name: measure(builder, named.reference) for named in settings.images}


def save(builder: Builder, named: NamedImage, folder: Path) -> Path:
    """As an archive in `folder`, written only when the image is another than last time. Raises ImageError."""
    archive, mark = folder / f"{named.name}.tar", folder / f"{named.name}.id"
    identity = f"{builder.image_id(named.reference)} {named.reference}\n"
    if archive.exists() and mark.exists() and mark.read_text(encoding="utf-8") == identity:
        return archive
    folder.mkdir(parents=True, exist_ok=True)
    mark.unlink(missing_ok=True)
    unfinished = archive.with_suffix(".part")
    unfinished.unlink(missing_ok=True)
    builder.save(named.reference, unfinished)
    unfinished.replace(archive)
    mark.write_text(identity, encoding="utf-8")
    print(f"wrote {archive}")
    return archive


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
    chosen = parser.parse_args(arguments)
    try:
        settings = Settings.from_environment(environment)
        builder = find_builder(settings.builder)
        if chosen.command == "build":
            build(settings, builder)
        elif chosen.command == "sizes":
            return check_sizes(settings, builder, record=chosen.record)
        else:
            make_base(builder, reference=chosen.reference, mirror_url=chosen.mirror)
            print(f"made {chosen.reference}: say make images BASE_IMAGE={chosen.reference}")
    except ImageError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
