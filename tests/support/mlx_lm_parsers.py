"""Parsers of tool calls of mlx-lm, fetched as a wheel of Python alone (its dependencies are not needed for them)."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetero_api.host.file_lock import FileLock

VERSION = "0.32.2"
SHA256 = "5c0991248cfff5872503d74f466d2532dd8cb7fb3670cb9be7a06d7305dadc04"
_WITHIN = "mlx_lm/tool_parsers/"


def parsed(parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return what the module `parser` makes of a call's text, its outer marks left out."""
    module = _module(parser)
    inner = text.strip().removeprefix(module.tool_call_start)
    return module.parse_tool_call(inner.removesuffix(module.tool_call_end).strip(), tools)


def _module(name: str) -> Any:
    path = _parsers() / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mlx_lm_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parsers() -> Path:
    """Return the folder of the parsers. Fetch it where needed."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero" / "mlx-lm"
    target = cache / VERSION
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / ".lock").held(waiting=lambda: None):
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as work:
                _unpack(_fetched(Path(work)), Path(work) / "parsers")
                (Path(work) / "parsers").rename(target)
    return target


def _fetched(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, f"mlx-lm=={VERSION}"], check=True, stdin=subprocess.DEVNULL, timeout=300)
    (wheel,) = folder.glob("*.whl")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != SHA256:
        raise RuntimeError(f"{wheel.name} has sha256 {found}, expected {SHA256}")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            if name.startswith(_WITHIN) and name.endswith(".py"):
                (folder / Path(name).name).write_bytes(file.read(name))
