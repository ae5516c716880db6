"""The chart as `helm package` would make it, but the same bytes for the same files; and what an OCI registry takes.

A chart that is pushed names the registry that it was pushed to, and each image there by its digest: whoever trusts the
chart's signature needs no other, and `helm install` needs no values.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import yaml

from tools.images.archive import MANIFEST
from tools.release.layout import add_blob, write_index
from tools.release.sources import ReleaseError

NAME: Final = "heteroinference"
CHART: Final = f"charts/{NAME}"
_CONFIG: Final = "application/vnd.cncf.helm.config.v1+json"
_CONTENT: Final = "application/vnd.cncf.helm.chart.content.v1.tar+gzip"


def pack_chart(source: Path, folder: Path, *, values: str, created: int) -> Path:
    """Write a chart's files into `folder` with `values` for its values.yaml; the file."""
    about = yaml.safe_load((source / "Chart.yaml").read_text(encoding="utf-8"))
    target = folder / f"{about['name']}-{about['version']}.tgz"
    with (
        target.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=created) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as out,
    ):
        for path in sorted(it for it in source.rglob("*") if it.is_file()):
            name = path.relative_to(source).as_posix()
            content = values.encode() if name == "values.yaml" else path.read_bytes()
            entry = tarfile.TarInfo(f"{about['name']}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), created, 0o644
            out.addfile(entry, io.BytesIO(content))
    return target


def values_for(text: str, registry: str, digests: Mapping[str, str]) -> str:
    """Return the text of values.yaml with images of a registry, those of `digests` (by their keys) by digest.

    Raises ReleaseError where the text has no place for one.
    """
    before = yaml.safe_load(text)
    wanted = {**before, "images": {**before["images"], "registry": registry}}
    changed = re.sub(r"^(  registry: ).*$", lambda found: found[1] + registry, text, count=1, flags=re.M)
    for key, digest in digests.items():
        wanted["images"][key] = {**before["images"][key], "digest": digest}
        place = re.compile(rf"^(  {key}:\n(?:    .*\n)*?    digest: ).*$", re.M)
        changed = place.sub(rf'\g<1>"{digest}"', changed, count=1)
    if yaml.safe_load(changed) != wanted:
        raise ReleaseError("values.yaml: images.registry and images.*.digest are not where a release looks for them")
    return changed


def write_layout(chart: Path, folder: Path, *, created: int) -> str:
    """Write a packed chart as an OCI layout into `folder`, as `helm push` would push it; its manifest's digest."""
    with tarfile.open(chart) as read:
        file = read.extractfile(f"{NAME}/Chart.yaml")
        assert file is not None
        about: dict[str, Any] = yaml.safe_load(file.read())
    stamp = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    kinds = {"title": about["name"], "version": about["version"], "description": about["description"], "created": stamp}
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"mediaType": _CONFIG, **add_blob(folder, json.dumps(about, sort_keys=True).encode())},
        "layers": [{"mediaType": _CONTENT, **add_blob(folder, chart.read_bytes())}],
        "annotations": {f"org.opencontainers.image.{kind}": value for kind, value in kinds.items()},
    }
    return write_index(folder, manifest)
