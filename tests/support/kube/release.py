"""Kubernetes' and etcd's own release binaries: the first choice wherever there is an internet."""

from __future__ import annotations

import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.support.kube.archives import check_digest, parse_sums
from tests.support.kube.cache import Cache
from tests.support.kube.downloads import Say, fetch_file, fetch_text
from tests.support.kube.errors import ProvisionFailed
from tests.support.kube.platforms import architecture
from tests.support.kube.versions import Version

KUBERNETES = "https://dl.k8s.io/release"
ETCD = "https://github.com/etcd-io/etcd/releases/download"
ETCD_VERSION = Version(3, 6, 4)


def current_version() -> Version:
    """The newest stable release. Raises SourceUnreachable."""
    return Version.parse(fetch_text(f"{KUBERNETES}/stable.txt"))


def fetch_servers(names: Sequence[str], version: Version, cache: Cache, say: Say) -> None:
    """Kubernetes programs of a version, each checked against its published sha256."""
    with cache.workplace() as folder:
        programs = []
        for name in names:
            url = f"{KUBERNETES}/v{version}/bin/linux/{architecture()}/{name}"
            digest = fetch_text(f"{url}.sha256")
            say(f"fetching {url} (about 100 MB)")
            programs.append(fetch_file(url, folder / name))
            check_digest(programs[-1], digest)
        cache.adopt(programs, cache.folder(version))


def fetch_etcd(cache: Cache, target: Path, say: Say) -> None:
    """etcd into the cache's folder `target`, checked against the release's SHA256SUMS."""
    name = f"etcd-v{ETCD_VERSION}-linux-{architecture()}"
    base = f"{ETCD}/v{ETCD_VERSION}"
    sums = parse_sums(fetch_text(f"{base}/SHA256SUMS"))
    with cache.workplace() as folder:
        say(f"fetching {base}/{name}.tar.gz (about 20 MB)")
        archive = fetch_file(f"{base}/{name}.tar.gz", folder / f"{name}.tar.gz")
        if archive.name not in sums:
            raise ProvisionFailed(f"{base}/SHA256SUMS has no line for {archive.name}")
        check_digest(archive, sums[archive.name])
        with tarfile.open(archive) as packed:
            packed.extract(f"{name}/etcd", folder, filter="data")
        cache.adopt([folder / name / "etcd"], target)
