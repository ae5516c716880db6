"""Builds Kubernetes 1.20.2 from Debian's source package: for machines that reach Debian's archive and nothing else.

Bookworm's `kubernetes` (1.20.5+really1.20.2) is the newest source package that carries the whole tree and vendors every
dependency; trixie's is stripped to kubectl. It builds in GOPATH mode with Go 1.19; the vendored reflect2 is broken from
Go 1.18 on, so Debian's newer one takes its place. One generated file is missing in the tarball, and made first.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.kube.cache import Cache
from tests.support.kube.debian import DebianArchive, run
from tests.support.kube.downloads import Say
from tests.support.kube.errors import ProvisionFailed
from tests.support.kube.versions import Version

VERSION = Version(1, 20, 2)
SOURCE_VERSION = "1.20.5+really1.20.2-1.1+deb12u1"
GO_PACKAGES = ("golang-1.19-go", "golang-1.19-src", "golang-github-modern-go-reflect2-dev")
DISK_NEEDED_BYTES = 4 << 30
COMMIT = "faecb196815e248d3ecfb03c680a4507229c2a56"
PACKAGE = "k8s.io/kubernetes"
VERSION_PACKAGES = ("client-go/pkg/version", "component-base/version")
OPENAPI = "pkg/generated/openapi"
OPENAPI_MARK = b"+k8s:openapi-gen="
OPENAPI_SKIPPED = ("code-generator", "sample-apiserver", "sample-controller")


def build_servers(names: Sequence[str], cache: Cache, say: Say) -> None:
    """Build programs into the cache. About 15 minutes on two cores, 4 GB of disk while it lasts."""
    cache.root.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache.root).free
    if free < DISK_NEEDED_BYTES:
        raise ProvisionFailed(f"building needs 4 GB of disk below {cache.root}, and {free >> 20} MB are free")
    with cache.workplace() as work:
        archive = DebianArchive(work, say)
        archive.open()
        say("fetching the source of Kubernetes 1.20.2 (35 MB) and Go 1.19 (80 MB) from Debian")
        build = _Build(work, tools=archive.unpack(GO_PACKAGES), source=archive.source("kubernetes", SOURCE_VERSION))
        build.prepare()
        programs = []
        for name in names:
            say(f"compiling {name} (about 5 minutes on two cores; the first one 10)")
            programs.append(build.compile(name))
        cache.adopt(programs, cache.folder(VERSION))


class _Build:
    def __init__(self, work: Path, *, tools: Path, source: Path) -> None:
        self._work = work
        self._tools = tools
        self._source = source
        self._tree = work / "gopath/src" / PACKAGE
        go = tools / "usr/lib/go-1.19"
        self._environment = {
            **os.environ,
            "GOROOT": str(go),
            "GOPATH": str(work / "gopath"),
            "GOCACHE": str(work / "gocache"),
            "GO111MODULE": "off",
            "GOFLAGS": "",
            "GOPROXY": "off",
            "CGO_ENABLED": "0",
            "PATH": f"{go / 'bin'}{os.pathsep}{os.environ['PATH']}",
        }

    def prepare(self) -> None:
        """The source tree as Debian has it, ready to compile."""
        self._unpack()
        self._patch()
        vendored = self._tree / "vendor/github.com/modern-go/reflect2"
        shutil.rmtree(vendored)
        shutil.copytree(self._tools / "usr/share/gocode/src/github.com/modern-go/reflect2", vendored)
        self._generate_openapi()

    def compile(self, name: str) -> Path:
        """One program."""
        settings = {"gitVersion": f"v{VERSION}", "gitMajor": "1", "gitMinor": "20", "gitCommit": COMMIT}
        settings |= {"gitTreeState": "archive", "buildDate": "2021-01-13T13:20:00Z"}
        stamps = [
            f"-X {PACKAGE}/vendor/k8s.io/{package}.{key}={value}"
            for package in VERSION_PACKAGES
            for key, value in settings.items()
        ]
        target = self._work / "bin" / name
        self._go("build", "-trimpath", "-ldflags", " ".join(["-s -w", *stamps]), "-o", str(target), f"./cmd/{name}")
        return target

    def _unpack(self) -> None:
        self._tree.mkdir(parents=True)
        (original,) = self._source.glob("kubernetes_*.orig.tar.gz")
        run(["tar", "xzf", original, "-C", self._tree, "--strip-components=1"])
        (packaging,) = self._source.glob("kubernetes_*.debian.tar.xz")
        with tarfile.open(packaging) as packed:
            packed.extractall(self._work / "packaging", filter="data")

    def _patch(self) -> None:
        patches = self._work / "packaging/debian/patches"
        for line in (patches / "series").read_text().splitlines():
            if line and not line.startswith("#"):
                run(["patch", "-d", self._tree, "-p1", "-s"], stdin=(patches / line).read_bytes())

    def _generate_openapi(self) -> None:
        """As the source tree's own Makefile would."""
        generator = self._work / "openapi-gen"
        self._go("build", "-o", str(generator), "./vendor/k8s.io/kube-openapi/cmd/openapi-gen")
        inputs = ",".join(f"{PACKAGE}/{folder}" for folder in self._openapi_folders())
        # fmt: off
        run(
            [
                generator, "--logtostderr", "-i", inputs, "-p", f"{PACKAGE}/{OPENAPI}", "-O", "zz_generated.openapi",
                "-h", "vendor/k8s.io/code-generator/hack/boilerplate.go.txt", "-r", self._work / "violations",
            ],
            folder=self._tree,
            environment=self._environment,
        )
        # fmt: on

    def _openapi_folders(self) -> list[str]:
        """Go packages that ask for it, under their vendored names."""
        found = set()
        for root in ("pkg", "staging/src/k8s.io"):
            for file in (self._tree / root).rglob("*.go"):
                skipped = file.name.endswith("_test.go") or any(part in OPENAPI_SKIPPED for part in file.parts)
                if not skipped and OPENAPI_MARK in file.read_bytes():
                    found.add(str(file.parent.relative_to(self._tree)))
        return sorted(folder.replace("staging/src/", "vendor/", 1) for folder in found)

    def _go(self, *arguments: str) -> None:
        run(["go", *arguments], folder=self._tree, environment=self._environment)
