"""Container images without a registry and without a builder: an image of one layer as a docker archive."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.kube.debian import run
from tests.support.kube.platforms import architecture

EPOCH = "1970-01-01T00:00:00Z"
PAUSE = "localhost/hetero-e2e-pause:1"


def pause_archive(target: Path, *, cc: Path) -> Path:
    """The image of the pods' first process, compiled from pause.c."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "pause"
        run([str(cc), "-static", "-Os", "-s", "-o", str(program), str(Path(__file__).with_name("pause.c"))])
        return write_archive(target, PAUSE, {"pause": program.read_bytes()}, ["/pause"])


def write_archive(target: Path, name: str, programs: Mapping[str, bytes], command: Sequence[str]) -> Path:
    """An image with executable files in its root."""
    layer = _tar({path: (content, 0o755) for path, content in programs.items()})
    digest = hashlib.sha256(layer).hexdigest()
    config = {
        "architecture": architecture(),
        "os": "linux",
        "created": EPOCH,
        "config": {"Entrypoint": list(command), "User": "65535:65535"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    content = json.dumps(config).encode()
    config_name = f"{hashlib.sha256(content).hexdigest()}.json"
    layer_name = f"{digest}/layer.tar"
    manifest = [{"Config": config_name, "RepoTags": [name], "Layers": [layer_name]}]
    parts = {layer_name: layer, config_name: content, "manifest.json": json.dumps(manifest).encode()}
    target.write_bytes(_tar({path: (part, 0o644) for path, part in parts.items()}))
    return target


def _tar(files: Mapping[str, tuple[bytes, int]]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for path, (content, mode) in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(content), mode
            packed.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()
