"""The process that forks ranks, with a CUDA build of torch: importing it must start no thread and touch no driver.

A fork copies one thread, and a CUDA context is of no use in the copy. `make test-cuda-wheel` fetches such a build, of
gigabytes. A driver is not needed: a stand-in for its library tells who called it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_api.supervision.forkserver import READY
from tests.support.quiet_rank import MARK
from tests.support.stand_in_libcuda import build_stand_in

PYTHON = os.environ.get("HETERO_CUDA_PYTHON") or sys.executable
REPOSITORY = Path(__file__).parents[2]
_ASK = "import torch; print(torch.version.cuda or '')"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a machine that seems to have a driver."""
    folder = tmp_path / "driver"
    folder.mkdir()
    rooms = (REPOSITORY / room for room in (".", "operator", "worker", "protos"))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, rooms)),
        "LD_LIBRARY_PATH": str(build_stand_in(folder)),
        MARK: str(tmp_path / "mark"),
    }


@pytest.fixture
def warm(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """The forkserver, which has imported all that ranks need."""
    built_for = subprocess.run([PYTHON, "-c", _ASK], env=environment, check=True, capture_output=True, text=True)
    if not built_for.stdout.strip():
        pytest.skip(f"torch of {PYTHON} was built without CUDA: `make test-cuda-wheel` fetches one that was not")
    Path(environment[MARK]).unlink(missing_ok=True)
    command = [PYTHON, "-m", "hetero_worker.process.forkserver"]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == READY
        yield process
        process.kill()


def test_it_has_one_thread_and_no_context(warm: subprocess.Popen[str], tmp_path: Path) -> None:
    process = Path("/proc") / str(warm.pid)
    threads = [(task / "comm").read_text().strip() for task in (process / "task").iterdir()]
    assert len(threads) == 1, threads
    opened = [os.readlink(file) for file in (process / "fd").iterdir()]
    assert not [name for name in opened if "/dev/nvidia" in name]
    assert "libtorch_cuda.so" in (process / "maps").read_text()
    assert not (tmp_path / "mark").exists(), (tmp_path / "mark").read_text()


def test_the_stand_in_tells_of_calls(environment: dict[str, str], tmp_path: Path) -> None:
    """The test above can fail: torch, asked for a device, calls the driver."""
    program = "import ctypes; ctypes.CDLL('libcuda.so.1').cuInit(0)"
    subprocess.run([PYTHON, "-c", program], env=environment, check=True)
    assert (tmp_path / "mark").read_text() == "called cuInit\n"
