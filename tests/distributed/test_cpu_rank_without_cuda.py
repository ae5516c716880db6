"""A rank on host cores touches no CUDA, from its start to a served step: not torch's, and not a driver's library.

Without a driver a stand-in for its library is first on the loader's path and tells who called it; tests/gpu has the
same on a machine with a real one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE
from tests.support.local_group import REPOSITORY
from tests.support.quiet_rank import MARK
from tests.support.scripted_gateway import TOKEN, ScriptedGateway
from tests.support.scripted_rank import ONE_RANK, RankProcess, generate, serve, shut_down
from tests.support.stand_in_libcuda import build_stand_in
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Of a machine that seems to have a driver."""
    if shutil.which("cc") is None:
        pytest.skip("the stand-in for the driver's library needs a C compiler (cc)")
    folder = tmp_path / "driver"
    folder.mkdir()
    token = tmp_path / "token"
    token.write_text(TOKEN)
    return {
        **os.environ,
        ENV_GROUP_TOKEN_FILE: str(token),
        MARK: str(tmp_path / "mark"),
        "PYTHONPATH": str(REPOSITORY),
        "LD_LIBRARY_PATH": str(build_stand_in(folder)),
    }


@pytest.fixture
def rank(tmp_path: Path, environment: dict[str, str]) -> Iterator[RankProcess]:
    model = save_tiny_model(tmp_path / "model", "llama")
    with ScriptedGateway() as gateway:
        arguments = [
            sys.executable, "-m", "tests.support.quiet_rank", "--gateway", gateway.target, "--model", str(model),
            "--pool", "cpu", "--ordinal", "0", "--local-rank", "0", "--pod-name", "rank-0", "--num-threads", "1",
            "--numa-policy", "None", "--memory-bytes", str(1 << 30),
        ]  # fmt: skip
        with subprocess.Popen(arguments, env=environment) as process:
            try:
                yield RankProcess(gateway, process)
            finally:
                process.kill()


def test_a_served_step_calls_nothing_of_cuda(rank: RankProcess, tmp_path: Path) -> None:
    serve(tmp_path / "model", [rank], 1, shares=ONE_RANK)
    assert len(generate([rank], 1, 3)) == 3
    shut_down([rank], 1)
    assert (tmp_path / "mark").read_text().splitlines() == ["started"]


def test_the_stand_in_would_tell(environment: dict[str, str], tmp_path: Path) -> None:
    """The test above can fail: whoever loads and calls the library is seen."""
    program = (
        "import ctypes; from tests.support.quiet_rank import driver_files, note;"
        "ctypes.CDLL('libcuda.so.1').cuInit(0); [note(f'has {name}') for name in driver_files()]"
    )
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, cwd=REPOSITORY)
    told = (tmp_path / "mark").read_text().splitlines()
    assert told == ["called cuInit", f"has {tmp_path / 'driver' / 'libcuda.so.1'}"]
