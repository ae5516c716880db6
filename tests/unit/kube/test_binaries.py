"""Where the cluster tests' programs are looked for, and in which order."""

from __future__ import annotations

import hashlib
import tarfile
from pathlib import Path

import pytest

from tests.support.kube.archives import unpack_once
from tests.support.kube.binaries import (
    API_SERVER,
    CONTROLLER_MANAGER,
    ETCD,
    KUBELET,
    PROXY,
    SCHEDULER,
    Finder,
    Surroundings,
)
from tests.support.kube.cache import Cache
from tests.support.kube.errors import BinariesMissing, ProvisionFailed
from tests.support.kube.versions import Version

ALL = (API_SERVER, CONTROLLER_MANAGER, SCHEDULER, ETCD)


def fill(folder: Path, version: str, *names: str) -> Path:
    """A folder of programs that say a version."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or ALL:
        (folder / name).write_text(f"Kubernetes v{version}")
        (folder / name).chmod(0o755)
    return folder


def ask(program: Path) -> Version:
    """Reads what a real program would print."""
    return Version.parse(program.read_text())


def no_archive(archive: Path, cache: Cache) -> Path:
    raise AssertionError("unpacked although nothing was missing")


def test_assets_come_before_path_and_path_before_the_cache(tmp_path: Path) -> None:
    assets = fill(tmp_path / "assets", "1.34.1")
    path = fill(tmp_path / "bin", "1.33.0")
    cache = tmp_path / "cache"
    fill(cache / "1.20.2", "1.20.2")
    every = Surroundings(cache, assets, str(path), tmp_path / "archive")
    assert Finder(every, ask=ask, unpack=no_archive).find().api_server.parent == assets
    without_assets = Surroundings(cache, None, str(path), None)
    assert Finder(without_assets, ask=ask).find().version == Version(1, 33, 0)
    cache_only = Surroundings(cache, None, str(tmp_path / "empty"), None)
    assert Finder(cache_only, ask=ask).find().scheduler == cache / "1.20.2" / SCHEDULER


def test_the_cache_gives_its_newest_or_the_wanted_version(tmp_path: Path) -> None:
    for version in ("1.9.11", "1.20.2", "1.34.1"):
        fill(tmp_path / version, version)
    assert Finder(Surroundings(tmp_path), ask=ask).find().version == Version(1, 34, 1)
    wanted = Surroundings(tmp_path, wanted=Version(1, 20, 2))
    assert Finder(wanted, ask=ask).find().version == Version(1, 20, 2)


def test_what_assets_lack_comes_from_the_same_version(tmp_path: Path) -> None:
    assets = fill(tmp_path / "assets", "1.34.1", API_SERVER, ETCD)
    path = fill(tmp_path / "bin", "1.33.0")
    fill(tmp_path / "cache" / "1.34.1", "1.34.1", CONTROLLER_MANAGER)
    found = Finder(Surroundings(tmp_path / "cache", assets, str(path)), ask=ask).find()
    assert found.controller_manager == tmp_path / "cache" / "1.34.1" / CONTROLLER_MANAGER
    assert found.missing() == [SCHEDULER]
    with pytest.raises(BinariesMissing, match=r"is 1\.34\.1, and no kube-scheduler of that version"):
        found.require_scheduler()


def test_etcd_may_come_from_elsewhere(tmp_path: Path) -> None:
    path = fill(tmp_path / "bin", "1.33.0", API_SERVER)
    fill(tmp_path / "cache" / "etcd", "3.4.23", ETCD)
    found = Finder(Surroundings(tmp_path / "cache", None, str(path)), ask=ask).find()
    assert found.etcd == tmp_path / "cache" / "etcd" / ETCD


def test_nothing_found_says_where_and_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(BinariesMissing, match=r"no kube-apiserver in .*make kubernetes"):
        Finder(Surroundings(tmp_path), ask=ask).find()


def test_a_file_that_cannot_run_is_no_program(tmp_path: Path) -> None:
    assets = fill(tmp_path / "assets", "1.34.1")
    (assets / API_SERVER).chmod(0o644)
    with pytest.raises(BinariesMissing):
        Finder(Surroundings(tmp_path / "cache", assets), ask=ask).find()


def test_surroundings_come_from_the_environment(tmp_path: Path) -> None:
    environment = {
        "XDG_CACHE_HOME": "/cache",
        "KUBEBUILDER_ASSETS": "/assets",
        "PATH": "/bin",
        "HETERO_KUBERNETES_ARCHIVE": "/archive.tar.xz",
        "HETERO_KUBERNETES_VERSION": "v1.34.1",
    }
    surroundings = Surroundings.of(environment)
    assert surroundings.cache == Path("/cache/hetero/kubernetes")
    assert (surroundings.assets, surroundings.archive) == (Path("/assets"), Path("/archive.tar.xz"))
    assert surroundings.wanted == Version(1, 34, 1)


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Packed programs, with their digest beside them."""
    folder = fill(tmp_path / "packed", "1.20.2", API_SERVER, SCHEDULER)
    path = tmp_path / "kubernetes.tar.xz"
    with tarfile.open(path, "w:xz") as packed:
        for program in sorted(folder.iterdir()):
            packed.add(program, program.name)
    write_sums(path, hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def write_sums(archive: Path, digest: str) -> None:
    (archive.parent / "SHA256SUMS").write_text(f"{digest}  {archive.name}\n")


def test_an_archive_is_unpacked_once(archive: Path, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    folder = unpack_once(archive, cache, ask=ask)
    assert folder == tmp_path / "cache" / "1.20.2"
    assert ask(folder / API_SERVER) == Version(1, 20, 2)
    (folder / "witness").touch()
    write_sums(archive, "0" * 64)  # is not looked at again
    assert unpack_once(archive, cache, ask=ask) == folder


def test_a_damaged_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    write_sums(archive, "0" * 64)
    with pytest.raises(ProvisionFailed, match=r"kubernetes\.tar\.xz is damaged or wrong"):
        unpack_once(archive, Cache(tmp_path / "cache"), ask=ask)
    assert Cache(tmp_path / "cache").folders() == [tmp_path / "cache" / "etcd"]


def test_programs_of_nodes_are_looked_for_when_they_are_wanted(tmp_path: Path) -> None:
    fill(tmp_path / "1.20.2", "1.20.2", *ALL, KUBELET)
    finder = Finder(Surroundings(tmp_path), ask=ask)
    assert finder.find().kubelet is None
    assert finder.find().missing() == []
    found = finder.find(nodes=True)
    assert found.require_kubelet() == tmp_path / "1.20.2" / KUBELET
    assert found.missing(nodes=True) == [PROXY]
    with pytest.raises(BinariesMissing, match=r"is 1\.20\.2, and no kube-proxy of that version"):
        found.require_proxy()
