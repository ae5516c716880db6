"""The wheel of a release: what is in it, and that it serves where there is no compiler, from an empty environment."""

from __future__ import annotations

import os
import re
import subprocess
import venv
import zipfile
from collections.abc import Iterator
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hetero_api.contract import VERSION
from tools.images.catalogue import ROOT
from tools.release.sources import export
from tools.release.wheels import LIBRARIES, build_wheels

TIMEOUT_S = 600
TIME = 1_700_000_000
HEAVY = {"torch", "numpy", "transformers", "kopf"}

pytestmark = [
    pytest.mark.timeout(2 * TIMEOUT_S),
    pytest.mark.skipif(
        "HETERO_TEST_RELEASE" not in os.environ,
        reason="`make test-release` runs it: it compiles a wheel, and installs that with torch",
    ),
]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of the commit that is checked out, with the source distribution beside it."""
    folder = tmp_path_factory.mktemp("dist")
    tree = export(ROOT, tmp_path_factory.mktemp("tree"))
    build_wheels(tree, folder, ["x86_64"], created=TIME)
    (found,) = folder.glob("*.whl")
    assert [path.name for path in folder.glob("*.tar.gz")] == [f"heteroinference-{VERSION}.tar.gz"]
    return found


def metadata(wheel: Path, name: str) -> Iterator[str]:
    with zipfile.ZipFile(wheel) as read:
        text = read.read(f"heteroinference-{VERSION}.dist-info/METADATA").decode()
    yield from Parser().parsestr(text).get_all(name) or ()


def test_it_is_for_any_python_and_all_but_old_c_libraries(wheel: Path) -> None:
    found = re.fullmatch(rf"heteroinference-{re.escape(VERSION)}-py3-none-manylinux_2_(\d+)_x86_64\.whl", wheel.name)
    assert found, wheel.name
    assert int(found[1]) <= 34, "Debian 12's compiler asks for no more"
    with zipfile.ZipFile(wheel) as read:
        assert set(LIBRARIES) <= set(read.namelist())


def test_the_base_install_needs_neither_torch_nor_kopf(wheel: Path) -> None:
    assert list(metadata(wheel, "Version")) == [VERSION]
    required = [Requirement(text) for text in metadata(wheel, "Requires-Dist")]
    base = {one.name for one in required if one.marker is None}
    assert "grpcio" in base
    assert not base & HEAVY
    assert "local" in metadata(wheel, "Provides-Extra")


def test_it_serves_from_an_empty_environment_without_a_compiler(wheel: Path, smollm2: Path, tmp_path: Path) -> None:
    home = tmp_path / "environment"
    venv.create(home, with_pip=True)
    python = str(home / "bin/python")
    installed = [python, "-m", "pip", "install", "--quiet", "--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*installed, f"heteroinference[local] @ {wheel.as_uri()}"], check=True, timeout=TIMEOUT_S)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "HETERO_", "CC"))}
    environment = {**kept, "PATH": str(home / "bin"), "HETERO_HOME": str(tmp_path / "hetero")}
    command = ["hetero", "run", str(smollm2), "What is the capital of France?", "--temperature", "0", "-n", "16"]
    done = subprocess.run(
        [str(home / "bin" / command[0]), *command[1:]],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "native" in done.stdout + done.stderr, "ranks compute with torch's kernels"
