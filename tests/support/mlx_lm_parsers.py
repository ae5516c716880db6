"""Parsers of tool calls of mlx-lm, fetched as a wheel of Python alone (its dependencies are not needed for them)."""

from __future__ import annotations

import importlib.util
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.pinned_archives import unpacked

VERSION = "0.32.2"
SHA256 = "5c0991248cfff5872503d74f466d2532dd8cb7fb3670cb9be7a06d7305dadc04"
_WITHIN = "mlx_lm/tool_parsers/"


def parsed(parser: str, text: str, tools: Sequence[Mapping[str, Any]]) -> Any:
    """Return what the module `parser` makes of a call's text, its outer marks left out."""
    module = _module(parser)
    inner = text.strip().removeprefix(module.tool_call_start)
    return module.parse_tool_call(inner.removesuffix(module.tool_call_end).strip(), tools)


def _module(name: str) -> Any:
    path = unpacked("mlx-lm", VERSION, SHA256, _unpack) / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"mlx_lm_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        for name in file.namelist():
            if name.startswith(_WITHIN) and name.endswith(".py"):
                (folder / Path(name).name).write_bytes(file.read(name))
