"""Locks say what pyproject.toml asks for, and pip refuses what is not in them."""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.version import Version

from tools.images.catalogue import ROOT
from tools.images.locks import (
    LOCKS,
    TORCH_CPU,
    TORCH_CPU_INDEX,
    LockError,
    check_locks,
    lock_names,
    problems,
    read_constraints,
    read_lock,
    read_project,
    requirements,
    resolve,
    torch_cpu_blocks,
    wanted,
)
from tools.images.packages import STRICT, with_local_wheels

PROJECT = {
    "name": "thing",
    "dependencies": ["grpcio>=1"],
    "optional-dependencies": {
        "hub": ["hub-client>=1"],
        "gateway": ["thing[hub]", "tokenizers>=0.22", "grpcio>=1"],
        "both": ["thing[gateway,hub]"],
    },
}
HASH = f"    --hash=sha256:{'a' * 64}"
LOCK = f"""\
# A header.
grpcio==1.76.0 \\
{HASH} \\
{HASH}
    # via pyproject.toml
typing-extensions==4.16.0 ; python_version < '3.13' \\
{HASH}
    # via grpcio
"""
ASKED = ["grpcio>=1.70"]


def lock_problems(text: str, asked: list[str] | None = None, **constraints: str) -> list[str]:
    agreed = {name: Version(version) for name, version in constraints.items()}
    return problems(read_lock(text), ASKED if asked is None else asked, agreed)


def test_an_extra_brings_the_base_install_and_extras_that_it_names() -> None:
    assert requirements(PROJECT, ["gateway"]) == ["grpcio>=1", "hub-client>=1", "tokenizers>=0.22"]
    assert requirements(PROJECT, ["both"]) == ["grpcio>=1", "hub-client>=1", "tokenizers>=0.22"]


def test_an_extra_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"'gatway' is no extra of pyproject\.toml: hub, gateway, both"):
        requirements(PROJECT, ["gatway"])


def test_the_committed_locks_are_what_pyproject_asks_for() -> None:
    assert check_locks(lock_names()) == [], "say make locks"
    assert {path.stem for path in LOCKS.glob("*.txt")} == set(lock_names())


@pytest.mark.parametrize("name", lock_names())
def test_no_lock_has_a_second_index(name: str) -> None:
    text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    assert not [line for line in text.splitlines() if line.startswith("-")]


def test_only_the_workers_locks_have_torch_and_only_the_gpus_has_cuda() -> None:
    names = {name: {entry.name for entry in read_lock((LOCKS / f"{name}.txt").read_text())} for name in lock_names()}
    assert {name for name, has in names.items() if "torch" in has} == {"worker-cpu", "worker-gpu"}
    assert {name for name, has in names.items() if any(it.startswith("nvidia-") for it in has)} == {"worker-gpu"}
    assert not any("heteroinference" in has for has in names.values())


def test_torch_for_cpus_comes_by_urls_with_the_hashes_that_its_index_lists() -> None:
    entries = [entry for entry in read_lock((LOCKS / "worker-cpu.txt").read_text()) if entry.name == "torch"]
    assert len(entries) == 6
    for entry in entries:
        assert entry.requirement.url is not None
        assert entry.requirement.url.startswith(f"{TORCH_CPU_INDEX}/torch-")
        assert entry.version == Version(f"{read_constraints()['torch']}+cpu")
        assert [line for line in TORCH_CPU.read_text().splitlines() if entry.hashes[0].removeprefix("sha256:") in line]


def test_torchs_build_for_cpus_is_refused_in_the_gpus_lock_and_the_other_way_round(tmp_path: Path) -> None:
    """A folder of wheels may have it."""
    for name, wrong in (("worker-gpu", "torch==2.13.0+cpu"), ("worker-cpu", "torch==2.13.0")):
        text = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
        (tmp_path / f"{name}.txt").write_text(re.sub(r"^torch[ =][^\\;]*", f"{wrong} ", text, flags=re.M))
    gpu, *cpu = check_locks(["worker-gpu", "worker-cpu"], tmp_path)
    assert gpu == "worker-gpu.txt: torch is 2.13.0+cpu, which is no build for cuda"
    assert set(cpu) == {"worker-cpu.txt: torch is 2.13.0, which is no build for cpu"}


def test_a_version_of_torch_whose_hashes_are_not_listed_is_named() -> None:
    with pytest.raises(LockError, match=r"torch-cpu\.sha256 lists no torch-9\.0\+cpu-cp311-cp311-manylinux_2_28_x86"):
        list(torch_cpu_blocks(Version("9.0"), TORCH_CPU.read_text()))


def test_a_lock_that_fits_has_no_problem() -> None:
    assert lock_problems(LOCK, grpcio="1.76.0") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda text: text.replace("1.76.0", "1.6.0"), "grpcio is 1.6.0, and pyproject.toml asks for >=1.70"),
        (lambda text: text.replace("grpcio==", "grpcia=="), "grpcio is missing"),
        (lambda text: text.replace("==1.76.0", ">=1.76.0"), "grpcio is not held at one version"),
        (lambda text: text.replace("==1.76.0", "==1.76.*"), "grpcio is not held at one version"),
        (lambda text: text.replace(f" \\\n{HASH}", ""), "grpcio has no hash, or one that is no SHA-256"),
        (lambda text: text.replace("sha256:aa", "md5:aa"), "grpcio has no hash, or one that is no SHA-256"),
        (lambda text: text.replace("via grpcio", "via pyproject.toml"), "nothing asks for typing-extensions"),
        (lambda text: text + text, "grpcio stands there 2 times"),
    ],
)
def test_a_lock_that_does_not_fit_is_told_why(change: Callable[[str], str], problem: str) -> None:
    assert problem in lock_problems(change(LOCK))


def test_a_version_other_than_that_of_constraints_is_named() -> None:
    assert lock_problems(LOCK, grpcio="1.77.0") == ["grpcio is 1.76.0, and 1.77.0 in constraints.txt"]


def test_what_is_missing_for_some_pythons_only_is_named_with_them() -> None:
    asked = [*ASKED, "typing-extensions>=4"]
    places = "Python 3.13 on x86_64, Python 3.13 on aarch64"
    assert lock_problems(LOCK, asked) == [f"typing-extensions is missing for {places}"]
    assert lock_problems(LOCK, [*ASKED, "typing-extensions>=4; python_version < '3.13'"]) == []


def test_a_lock_that_is_not_there_and_one_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "operator.txt").write_text("what is this? \\\n    --hash=sha256:1\n", encoding="utf-8")
    missing, unreadable = check_locks(["gateway", "operator"], tmp_path)
    assert missing.startswith("gateway.txt: ")
    assert unreadable.startswith("operator.txt: no requirement: what is this? \\")


def test_a_new_requirement_of_an_image_is_found_missing_without_a_network() -> None:
    project = read_project()
    project["project"]["optional-dependencies"]["operator"].append("newcomer>=1")
    entries = read_lock((LOCKS / "operator.txt").read_text())
    assert problems(entries, wanted("operator", project), read_constraints()) == ["newcomer is missing"]


def test_a_wheel_of_this_machine_is_taken_for_its_url_and_keeps_its_hash(tmp_path: Path) -> None:
    lock = (LOCKS / "worker-cpu.txt").read_text(encoding="utf-8")
    file = tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl"
    assert with_local_wheels(lock, tmp_path) == lock
    file.touch()
    before, after = (
        next(entry for entry in read_lock(text) if entry.name == "torch")
        for text in (lock, with_local_wheels(lock, tmp_path))
    )
    assert after.requirement.url == file.as_uri()
    assert after.hashes == before.hashes
    assert str(after.requirement.marker) == str(before.requirement.marker)


def make_wheel(folder: Path, name: str = "thing") -> Path:
    """A wheel with one module, as small as pip takes it."""
    record = f"{name}-1.0.dist-info/RECORD"
    files = {
        f"{name}.py": "VALUE = 1\n",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: a\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}\n")
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)
        packed.writestr(record, "".join(lines) + f"{record},,\n")
    return wheel


def make_index(folder: Path, wheel: Path) -> str:
    """An index with one package, by its URL."""
    page = folder / wheel.name.partition("-")[0] / "index.html"
    page.parent.mkdir(parents=True)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    page.write_text(f'<a href="{wheel.as_uri()}#sha256={digest}">{wheel.name}</a>', encoding="utf-8")
    return folder.as_uri()


def test_a_lock_is_resolved_from_the_index_and_a_second_one_within_the_versions_that_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thing, other = make_wheel(tmp_path), make_wheel(tmp_path, "other")
    for name in ("UV_FIND_LINKS", "UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("UV_DEFAULT_INDEX", make_index(tmp_path / "first", thing))
    second = make_index(tmp_path / "second", other)
    text = resolve(["thing>=0.5", "other"], {"thing": "1.0"}, "", places=[], index=second)
    hashes = [hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in (other, thing)]
    assert text == (
        f"other==1.0 \\\n    --hash=sha256:{hashes[0]}\n    # via pyproject.toml\n"
        f"thing==1.0 \\\n    --hash=sha256:{hashes[1]}\n    # via pyproject.toml\n"
    )
    with pytest.raises(LockError, match=r"there is no version of thing==2\.0"):
        resolve(["thing>=0.5"], {"thing": "2.0"}, "", places=[], index="")


def install(lock: str, wheels: Path, target: Path) -> subprocess.CompletedProcess[str]:
    """As a build does, but into a folder, and from a folder."""
    path = wheels / "lock.txt"
    path.write_text(lock, encoding="utf-8")
    options = ["--isolated", "--no-index", "--find-links", str(wheels), "--target", str(target), "--no-cache-dir"]
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options, *STRICT, "--requirement", str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_pip_installs_what_has_the_hash_and_refuses_what_was_tampered_with(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path)
    lock = f"thing==1.0 \\\n    --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    assert install(lock, tmp_path, tmp_path / "right").returncode == 0
    assert (tmp_path / "right/thing.py").exists()
    with zipfile.ZipFile(wheel, "a") as packed:
        packed.writestr("thing_backdoor.py", "")
    done = install(lock, tmp_path, tmp_path / "wrong")
    assert done.returncode != 0
    assert "DO NOT MATCH THE HASHES" in done.stderr
    assert not (tmp_path / "wrong").exists()


def test_pip_refuses_a_package_that_the_lock_does_not_have(tmp_path: Path) -> None:
    make_wheel(tmp_path)
    done = install("thing==1.0\n", tmp_path, tmp_path / "target")
    assert done.returncode != 0
    assert "Hashes are required in --require-hashes mode" in done.stderr
