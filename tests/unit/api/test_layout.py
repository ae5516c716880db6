"""Guards on the repository's shape."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("folder", ["operator", "worker", "protos"])
def test_top_level_folders_are_no_packages(folder: str) -> None:
    # operator/__init__.py would shadow the standard library's operator module and break Python itself.
    assert not (ROOT / folder / "__init__.py").exists()


def test_operator_is_the_standard_librarys() -> None:
    program = "import operator, sys; sys.exit(operator.__file__ is None or 'lib' not in operator.__file__)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("package", ["hetero_api.spec", "hetero_api.v1.ranks_pb2", "hetero_gateway", "hetero_client"])
def test_contract_gateway_and_client_import_without_torch(package: str) -> None:
    program = f"import sys, {package}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_a_cpu_install_asks_for_nothing_of_cuda() -> None:
    """Kernels are Triton's, which comes with torch's CUDA builds; only those who test them install it by itself."""
    asked = metadata.requires("heteroinference") or []
    assert any(requirement.startswith("torch") for requirement in asked)
    of_cuda = [requirement for requirement in asked if requirement.startswith(("triton", "nvidia", "cuda"))]
    assert all('extra == "dev"' in requirement.replace("'", '"') for requirement in of_cuda), of_cuda


@pytest.mark.parametrize(
    "module", ["hetero_worker.backends.cpu", "hetero_worker.backends.cuda.backend", "hetero_worker.process.rank"]
)
def test_ranks_import_without_triton_and_what_takes_seconds(module: str) -> None:
    program = f"import sys; sys.modules['triton'] = None; import {module}; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0
