"""What is deleted while it still starts ends at once.

The first process of a container gets no signal that it has no handler for, so programs of containers set one before
they import what takes time. Here the signal comes in the middle of these imports.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hetero_api.contract import ENV_POD_NAME, EXIT_OK

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60)]

DELETED_WHILE_IT_IMPORTS = """
import os, runpy, signal, sys

program, last_import = sys.argv.pop(1), sys.argv.pop(1)

class Deleter:
    def find_spec(self, name, path, target=None):
        if name == last_import:
            sys.stderr.write("deleted\\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Deleter())
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""
POD = (
    "--gateway", "127.0.0.1:1", "--model", "/no/model", "--pool", "cpu", "--ranks-per-pod", "1",
    "--threads-per-rank", "1", "--numa-policy", "None", "--health-port", "0",
)  # fmt: skip


@pytest.mark.parametrize(
    ("program", "last_import", "arguments", "last_line"),
    [
        ("hetero_worker.pod", "hetero_worker.pod.supervisor", POD, "SIGTERM: asking the ranks to leave"),
        ("hetero_gateway", "hetero_gateway.server.app", (), "deleted"),
        ("hetero_operator", "hetero_operator.main", (), "deleted"),
    ],
)
def test_a_program_that_is_told_to_stop_while_it_imports_ends_well(
    program: str, last_import: str, arguments: tuple[str, ...], last_line: str
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DELETED_WHILE_IT_IMPORTS, program, last_import, *arguments],
        env={**os.environ, ENV_POD_NAME: "x-cpu-0"}, capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip
    assert ended.returncode == EXIT_OK, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith(last_line)
    assert "started, pid" not in ended.stderr
