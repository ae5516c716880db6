"""Builds the native libraries into the package, for wheels and for `pip install -e .`.

Without a C compiler the package is built without them, pure Python. Ranks then exchange over Gloo and compute with
torch's kernels. That is slower, so the topology says so and names the fix. If one library cannot be built, the package
has the other.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_BUILD_MODULE = "worker/hetero_worker/native/build.py"


class NativeBuildHook(BuildHookInterface):
    """hatchling's custom hook; see the module."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        if self.target_name != "wheel":
            return
        native = _load(Path(self.root) / _BUILD_MODULE)
        libraries = []
        for build, otherwise in (
            (native.build_exchange, "ranks will exchange over Gloo"),
            (native.build_compute, "host cores will compute with torch's kernels"),
        ):
            try:
                libraries.append(build())
            except native.BuildError as error:
                self.app.display_warning(
                    f"A native library was not built ({error}): {otherwise}, slower. To fix it, install a C compiler "
                    f"and run `make native`, or python -m hetero_worker.native.build"
                )
        if not libraries:
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{_platform_tag()}"
        build_data["artifacts"].extend(str(library.relative_to(self.root)) for library in libraries)


def _load(path: Path) -> ModuleType:
    """The module, though its package is not installed yet."""
    spec = importlib.util.spec_from_file_location("hetero_native_build", path)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _platform_tag() -> str:
    """The libraries ask nothing of Python, only of the platform."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")
