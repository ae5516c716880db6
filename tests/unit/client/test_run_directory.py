"""What a local group keeps on disk, and how others find it."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest

from hetero_api.host.file_lock import FileLock, is_held
from hetero_api.manifest import load_manifest
from hetero_client.errors import NoGroupError
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory, find_group, running_groups

pytestmark = pytest.mark.unit

RESOURCE = load_manifest(Path(__file__).parents[3] / "examples" / "smollm2-cpu.yaml")


def start(home: HeteroHome, name: str) -> RunDirectory:
    run = RunDirectory.for_group(home, name)
    assert run.lock.try_acquire()
    run.prepare(RESOURCE)
    run.write_record(
        GroupRecord(
            name,
            os.getpid(),
            "m.yaml",
            "/m",
            "ready",
            f"{name}:1",
            f"{name}:2",
            f"{name}:3",
            time.time(),
            {"gateway": 1},
        )
    )
    return run


def test_a_record_that_cannot_be_written_leaves_the_old_one_and_no_file_beside_it(tmp_path: Path) -> None:
    run = start(HeteroHome(tmp_path), "a")
    before = sorted(path.name for path in run.path.iterdir())
    record = run.read_record()
    assert record is not None
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # as on a full disk, a write fails
    try:
        with pytest.raises(OSError, match="File too large"):
            run.write_record(record)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.read_record() == record
    assert sorted(path.name for path in run.path.iterdir()) == before
    run.lock.release()


def test_the_only_group_is_found_without_a_name(tmp_path: Path) -> None:
    home = HeteroHome(tmp_path)
    run = start(home, "one")
    assert find_group(home).inference == "one:1"
    run.lock.release()


def test_several_groups_have_to_be_told_apart(tmp_path: Path) -> None:
    home = HeteroHome(tmp_path)
    runs = [start(home, "one"), start(home, "two")]
    with pytest.raises(NoGroupError, match=r"several local groups run \(one, two\)"):
        find_group(home)
    assert find_group(home, "two").admin == "two:2"
    with pytest.raises(NoGroupError, match="'three'"):
        find_group(home, "three")
    for run in runs:
        run.lock.release()


def test_a_group_whose_launcher_is_gone_does_not_run(tmp_path: Path) -> None:
    home = HeteroHome(tmp_path)
    start(home, "one").lock.release()  # As its end would; the record is still there.
    assert running_groups(home) == []
    with pytest.raises(NoGroupError, match="hetero up FILE"):
        find_group(home)


def test_preparing_clears_the_last_run_and_makes_a_new_token(tmp_path: Path) -> None:
    run = start(HeteroHome(tmp_path), "one")
    old = run.token_path.read_text()
    run.log_path("cpu-0").write_text("old")
    run.prepare(RESOURCE)
    assert run.token_path.read_text() != old
    assert run.token_path.stat().st_mode & 0o777 == 0o600
    assert run.path.stat().st_mode & 0o777 == 0o700
    assert not run.log_path("cpu-0").exists()
    assert run.read_record() is None
    run.lock.release()


def test_the_run_has_a_manifest_of_its_own(tmp_path: Path) -> None:
    run = start(HeteroHome(tmp_path), "one")
    assert load_manifest(run.manifest_path) == RESOURCE
    run.clear()
    assert not run.manifest_path.exists()
    run.lock.release()


def test_callers_of_admin_show_a_token_where_others_show_keys(tmp_path: Path) -> None:
    run = start(HeteroHome(tmp_path), "one")
    assert run.read_admin_token() is None
    run.prepare(RESOURCE, with_admin_token=True)
    assert run.read_admin_token() not in (None, run.token_path.read_text())
    assert run.admin_token_path.stat().st_mode & 0o777 == 0o600
    run.clear()
    assert run.read_admin_token() is None
    run.lock.release()


def test_record_of_another_version_is_no_record(tmp_path: Path) -> None:
    run = RunDirectory.for_group(HeteroHome(tmp_path), "one")
    run.path.mkdir(parents=True)
    run.record_path.write_text('{"name": "one", "color": "red"}')
    assert run.read_record() is None
    run.record_path.write_text("{")
    assert run.read_record() is None


def test_lock_has_one_holder_and_tells_its_pid(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert not is_held(first.path)
    assert first.try_acquire()
    assert is_held(first.path)
    assert not second.try_acquire()
    assert second.holder_pid() == os.getpid()
    first.release()
    assert second.try_acquire()
    second.release()


def test_home_follows_the_environment() -> None:
    assert HeteroHome.from_environment({"HETERO_HOME": "/srv/h"}).root == Path("/srv/h")
    assert HeteroHome.from_environment({"XDG_CACHE_HOME": "/c"}).root == Path("/c/hetero")
    assert HeteroHome.from_environment({}).root == Path.home() / ".cache" / "hetero"
