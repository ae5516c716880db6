"""Folders that are OCI layouts of one image or artifact, which skopeo copies from and to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.images.archive import MANIFEST


def add_blob(folder: Path, content: bytes) -> dict[str, Any]:
    """Write a blob; its digest and size, as a descriptor has them."""
    blobs = folder / "blobs/sha256"
    blobs.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(content).hexdigest()
    (blobs / name).write_bytes(content)
    return {"digest": f"sha256:{name}", "size": len(content)}


def write_index(folder: Path, manifest: Mapping[str, Any]) -> str:
    """Write a manifest, and the index that names it alone; the manifest's digest."""
    described = add_blob(folder, json.dumps(manifest, sort_keys=True).encode())
    index = {"schemaVersion": 2, "manifests": [{"mediaType": MANIFEST, **described}]}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}', encoding="utf-8")
    return str(described["digest"])


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of a layout; None where there is no layout."""
    if not (folder / "index.json").exists():
        return None
    (described,) = json.loads((folder / "index.json").read_text(encoding="utf-8"))["manifests"]
    found: dict[str, Any] = json.loads((folder / "blobs" / described["digest"].replace(":", "/")).read_bytes())
    return found
