"""`python -m tests.support.kube.provision`: find the programs that the cluster tests need, and fetch what is missing.

Kubernetes' own releases come first; where they cannot be reached, Debian's archive: etcd as a package, the servers
built from source. Everything goes to the cache (see binaries.py); a second run finds it there and ends at once.
With --nodes also kubelet and kube-proxy, which tests/e2e runs real nodes with. Progress goes to stderr, what was found
to stdout. The exit status is 1, with one reason, when something cannot be had.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.support.kube import binaries, debian_build, release, tools
from tests.support.kube.binaries import Binaries, Finder, Surroundings
from tests.support.kube.cache import ETCD_FOLDER, Cache
from tests.support.kube.debian import DebianArchive
from tests.support.kube.downloads import Say
from tests.support.kube.errors import BinariesMissing, KubeHarnessError, SourceUnreachable
from tests.support.kube.platforms import architecture
from tests.support.kube.versions import Version


class Provisioner:
    """Fills the cache until the finder is content; `nodes`: with what a node runs, too."""

    def __init__(self, surroundings: Surroundings, say: Say, *, nodes: bool = False) -> None:
        self._nodes = nodes
        self._surroundings = surroundings
        self._cache = Cache(surroundings.cache)
        self._finder = Finder(surroundings)
        self._say = say

    def provide(self) -> Binaries:
        """Raises KubeHarnessError when something cannot be had; the message says why and what would help."""
        if not self._finder.has(binaries.API_SERVER):
            wanted = binaries.KUBERNETES + (binaries.NODE if self._nodes else ())
            self._provide_servers(wanted, self._surroundings.wanted)
        if not self._finder.has(binaries.ETCD):
            self._provide_etcd()
        found = self._finder.find(nodes=self._nodes)
        if missing := found.missing(nodes=self._nodes):
            self._provide_servers(missing, found.version)
            found = self._finder.find(nodes=self._nodes)
        tools.fetch_tools(self._cache, self._say)
        tools.fetch_prometheus(self._cache, self._say)
        return found

    def _provide_servers(self, names: list[str] | tuple[str, ...], version: Version | None) -> None:
        architecture()  # says so where nothing can be fetched
        with self._cache.locked():
            try:
                release.fetch_servers(names, version or release.current_version(), self._cache, self._say)
            except SourceUnreachable as unreachable:
                self._say(f"Kubernetes' releases cannot be reached from here ({unreachable})")
                self._build_servers(names, version, unreachable)

    def _build_servers(
        self, names: list[str] | tuple[str, ...], version: Version | None, unreachable: SourceUnreachable
    ) -> None:
        if version not in (None, debian_build.VERSION):
            raise BinariesMissing(
                f"{', '.join(names)} {version} cannot be had: Debian has the source of {debian_build.VERSION} only, "
                f"and {unreachable}"
            ) from unreachable
        self._say(
            f"building Kubernetes {debian_build.VERSION} from Debian's source package instead: about 15 minutes, once"
        )
        try:
            debian_build.build_servers(names, self._cache, self._say)
        except SourceUnreachable as also:
            raise BinariesMissing(f"{', '.join(names)} cannot be had: {unreachable}; {also}") from also

    def _provide_etcd(self) -> None:
        target = self._cache.root / ETCD_FOLDER
        with self._cache.locked():
            try:
                release.fetch_etcd(self._cache, target, self._say)
            except SourceUnreachable as unreachable:
                self._say(f"etcd's releases cannot be reached from here ({unreachable})")
                with self._cache.workplace() as work:
                    archive = DebianArchive(work, self._say)
                    archive.open()
                    self._say("fetching etcd (8 MB) from Debian")
                    tree = archive.unpack(["etcd-server"])
                    self._cache.adopt([tree / "usr/bin/etcd"], target)


def main() -> int:
    parser = argparse.ArgumentParser(description="Find or fetch what the tests run Kubernetes with.")
    parser.add_argument("--nodes", action="store_true", help="kubelet and kube-proxy, too")
    nodes = parser.parse_args().nodes
    started = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:5.0f} s] {text}", file=sys.stderr, flush=True)

    try:
        found = Provisioner(Surroundings.of(os.environ), say, nodes=nodes).provide()
    except KubeHarnessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"Kubernetes {found.version}")
    servers = (found.api_server, found.controller_manager, found.scheduler, found.etcd)
    for program in (*servers, *((found.kubelet, found.proxy) if nodes else ())):
        print(f"  {program}")
    helms = (tools.find_helm(major) for major in tools.TOOL_SETS)
    for program in (tools.find_kubectl(), *helms, *map(tools.find_prometheus, tools.PROMETHEUS)):
        print(f"  {program}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
