"""What a build installs of pyproject.toml, and what it takes away again."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.images import packages
from tools.images.catalogue import ROOT
from tools.images.packages import requirements, trim

PROJECT = {
    "name": "thing",
    "dependencies": ["grpcio>=1"],
    "optional-dependencies": {
        "hub": ["hub-client>=1"],
        "gateway": ["thing[hub]", "tokenizers>=0.22", "grpcio>=1"],
        "both": ["thing[gateway,hub]"],
    },
}


def test_an_extra_brings_the_base_install_and_extras_that_it_names() -> None:
    assert requirements(PROJECT, ["gateway"]) == ["grpcio>=1", "hub-client>=1", "tokenizers>=0.22"]
    assert requirements(PROJECT, ["both"]) == ["grpcio>=1", "hub-client>=1", "tokenizers>=0.22"]


def test_an_extra_that_is_none_is_named() -> None:
    with pytest.raises(ValueError, match=r"'gatway' is no extra of pyproject\.toml: hub, gateway, both"):
        requirements(PROJECT, ["gatway"])


def test_this_projects_gateway_and_operator_ask_for_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    light = requirements(project, ["gateway", "operator"])
    assert not [requirement for requirement in light if requirement.startswith(("torch", "numpy", "heteroinference"))]
    assert any(requirement.startswith("torch") for requirement in requirements(project, ["worker"]))


def test_tests_headers_and_stubs_go_and_programs_that_torch_starts_stay(tmp_path: Path) -> None:
    gone = ["numpy/linalg/tests/test_it.py", "torch/include/a.h", "torch/test/it", "torch/bin/protoc", "grpc/x.pyi"]
    kept = ["numpy/testing/it.py", "torch/bin/torch_shm_manager", "torch/testing/_it.py", "torch/lib/libtorch.so"]
    for name in [*gone, *kept]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"12345")
    assert trim(tmp_path) == 5 * len(gone)
    assert [name for name in gone if (tmp_path / name).exists()] == []
    assert [name for name in kept if not (tmp_path / name).exists()] == []


def test_it_runs_where_nothing_is_installed() -> None:
    """It runs before anything is: by the base's Python, isolated from all packages."""
    command = [sys.executable, "-I", "-S", packages.__file__, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
