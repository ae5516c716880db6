"""Finds kube-apiserver, kube-controller-manager, kube-scheduler and etcd on this machine; for real nodes also kubelet
and kube-proxy.

Looked for in this order; the first place that has kube-apiserver decides the version, and the other Kubernetes programs
must be of the same:
1. the folder $KUBEBUILDER_ASSETS (as made by setup-envtest, which brings only the API server and etcd);
2. PATH;
3. the cache, $XDG_CACHE_HOME/hetero/kubernetes/<version> ($HETERO_KUBERNETES_VERSION chooses, else the newest);
4. the archive $HETERO_KUBERNETES_ARCHIVE, which is unpacked into the cache.
What is missing then is fetched by `python -m tests.support.kube.provision` (`make kubernetes`), which may take long;
a test never does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.kube.archives import unpack_once
from tests.support.kube.cache import Cache
from tests.support.kube.errors import BinariesMissing
from tests.support.kube.versions import Version, version_of

API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
ETCD = "etcd"
KUBERNETES = (API_SERVER, CONTROLLER_MANAGER, SCHEDULER)
KUBELET = "kubelet"
PROXY = "kube-proxy"
NODE = (KUBELET, PROXY)
PROVISION = "python -m tests.support.kube.provision"


@dataclass(frozen=True, slots=True)
class Binaries:
    """The programs of one version. The last four are None where only an API server could be found."""

    version: Version
    api_server: Path
    etcd: Path
    controller_manager: Path | None = None
    scheduler: Path | None = None
    kubelet: Path | None = None
    proxy: Path | None = None

    def require_controller_manager(self) -> Path:
        """Raises BinariesMissing."""
        return self._require(self.controller_manager, CONTROLLER_MANAGER)

    def require_scheduler(self) -> Path:
        """Raises BinariesMissing."""
        return self._require(self.scheduler, SCHEDULER)

    def require_kubelet(self) -> Path:
        """Raises BinariesMissing."""
        return self._require(self.kubelet, KUBELET)

    def require_proxy(self) -> Path:
        """Raises BinariesMissing."""
        return self._require(self.proxy, PROXY)

    def _require(self, program: Path | None, name: str) -> Path:
        if program is None:
            raise BinariesMissing(
                f"{self.api_server} is {self.version}, and no {name} of that version was found: "
                f"put one beside it, or run `{PROVISION}`"
            )
        return program

    def missing(self, *, nodes: bool = False) -> list[str]:
        """Names of the Kubernetes programs that were not found; those of nodes, where they are wanted, too."""
        found = {CONTROLLER_MANAGER: self.controller_manager, SCHEDULER: self.scheduler}
        if nodes:
            found |= {KUBELET: self.kubelet, PROXY: self.proxy}
        return [name for name, program in found.items() if program is None]


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the search depends on; read from the environment once."""

    cache: Path
    assets: Path | None = None
    search_path: str = ""
    archive: Path | None = None
    wanted: Version | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Surroundings:
        def path(name: str) -> Path | None:
            return Path(environment[name]).expanduser() if environment.get(name) else None

        wanted = environment.get("HETERO_KUBERNETES_VERSION")
        return cls(
            cache=(path("XDG_CACHE_HOME") or Path.home() / ".cache") / "hetero" / "kubernetes",
            assets=path("KUBEBUILDER_ASSETS"),
            search_path=environment.get("PATH", ""),
            archive=path("HETERO_KUBERNETES_ARCHIVE"),
            wanted=Version.parse(wanted) if wanted else None,
        )


class Finder:
    """One search. `ask` tells a program's version, `unpack` turns an archive into a folder of the cache."""

    def __init__(
        self,
        surroundings: Surroundings,
        *,
        ask: Callable[[Path], Version] = version_of,
        unpack: Callable[[Path, Cache], Path] = unpack_once,
    ) -> None:
        self._surroundings = surroundings
        self._ask = ask
        self._unpack = unpack

    def find(self, *, nodes: bool = False) -> Binaries:
        """Raises BinariesMissing, saying where was looked. `nodes`: look for what a node runs, too."""
        api_server = self._first(API_SERVER)
        version = self._ask(api_server)
        beside = api_server.with_name(ETCD)
        return Binaries(
            version=version,
            api_server=api_server,
            etcd=beside if _is_program(beside) else self._first(ETCD),
            controller_manager=self._same(CONTROLLER_MANAGER, version),
            scheduler=self._same(SCHEDULER, version),
            kubelet=self._same(KUBELET, version) if nodes else None,
            proxy=self._same(PROXY, version) if nodes else None,
        )

    def has(self, name: str) -> bool:
        """Whether some version of a program is there."""
        return any(_is_program(place / name) for place in self._places())

    def _first(self, name: str) -> Path:
        for place in self._places():
            if _is_program(place / name):
                return place / name
        raise BinariesMissing(
            f"no {name} in $KUBEBUILDER_ASSETS ({self._surroundings.assets or 'not set'}), PATH, "
            f"{self._surroundings.cache} and $HETERO_KUBERNETES_ARCHIVE ({self._surroundings.archive or 'not set'}): "
            f"run `make kubernetes` (`{PROVISION}`), which fetches it"
        )

    def _same(self, name: str, version: Version) -> Path | None:
        for place in self._places():
            if _is_program(place / name) and self._ask(place / name) == version:
                return place / name
        return None

    def _places(self) -> Iterator[Path]:
        surroundings = self._surroundings
        if surroundings.assets is not None:
            yield surroundings.assets
        yield from (Path(part) for part in surroundings.search_path.split(os.pathsep) if part)
        cache = Cache(surroundings.cache)
        yield from cache.folders(surroundings.wanted)
        if surroundings.archive is not None:  # reached only when something is still missing
            yield self._unpack(surroundings.archive, cache)


def find_binaries(*, nodes: bool = False) -> Binaries:
    """What this machine has. Raises BinariesMissing, saying where was looked and what to run."""
    return Finder(Surroundings.of(os.environ)).find(nodes=nodes)


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)
