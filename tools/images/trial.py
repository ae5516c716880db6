"""Runs a command in an image as a restricted pod would: not as root, root read-only, no capability, no network.

docker and podman can by themselves. For buildah a bundle is made of what the image says, and runc runs it.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tools.images.builders import Buildah, Builder, ImageError

USER: Final = 65534
"""Not the image's own: a cluster may choose any (`runAsUser`)."""
_TIMEOUT_S: Final = 120.0

Finished = subprocess.CompletedProcess[str]


def run_in_image(builder: Builder, reference: str, command: Sequence[str]) -> Finished:
    """Run to the end; nothing of it is left. Raises ImageError when no container could be made."""
    if isinstance(builder, Buildah):
        return _run_bundle(builder, reference, command)
    return _finish(
        [
            builder.program, "run", "--rm", "--pull=never", "--network=none", "--read-only", "--tmpfs=/tmp",
            f"--user={USER}:{USER}", "--cap-drop=ALL", "--security-opt=no-new-privileges",
            f"--entrypoint={command[0]}", reference, *command[1:],
        ]
    )  # fmt: skip


def _run_bundle(builder: Builder, reference: str, command: Sequence[str]) -> Finished:
    settings = builder.configuration(reference)
    with _mounted(builder, reference) as root, tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder)
        _call(["runc", "spec", "--bundle", folder])
        spec = json.loads((bundle / "config.json").read_text(encoding="utf-8"))
        restricted = restrict(spec, root=root, settings=settings, command=command)
        (bundle / "config.json").write_text(json.dumps(restricted), encoding="utf-8")
        name = f"hetero-trial-{uuid.uuid4().hex[:12]}"
        try:
            return _finish(["runc", "run", "--bundle", folder, name])
        finally:
            subprocess.run(["runc", "delete", "--force", name], capture_output=True, check=False)


def restrict(spec: dict[str, Any], *, root: str, settings: dict[str, Any], command: Sequence[str]) -> dict[str, Any]:
    """runc's default specification, made that of a restricted pod; `settings` is the image's own configuration."""
    process = {name: value for name, value in spec["process"].items() if name != "rlimits"}
    tmp = {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "nodev", "mode=1777"]}
    return {
        **spec,
        "process": {
            **process,
            "terminal": False,
            "user": {"uid": USER, "gid": USER},
            "args": list(command),
            "env": list(settings.get("Env", [])),
            "cwd": settings.get("WorkingDir") or "/",
            "capabilities": {},
            "noNewPrivileges": True,
        },
        "root": {"path": root, "readonly": True},
        "mounts": [*spec["mounts"], tmp],
    }


@contextmanager
def _mounted(builder: Builder, reference: str) -> Iterator[str]:
    """The image's root, while it is needed."""
    container = builder.read("from", "--pull-never", reference).strip()
    try:
        yield builder.read("mount", container).strip()
    finally:
        builder.read("rm", container)


def _call(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise ImageError(f"there is no {command[0]}: images of buildah are tried out with it") from error
    except subprocess.CalledProcessError as error:
        raise ImageError(f"{command[0]}: {error.stderr.strip()}") from error


def _finish(command: Sequence[str]) -> Finished:
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
