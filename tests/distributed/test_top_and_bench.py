"""`hetero top` and `hetero bench` against a real group under load."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_api.contract import EXIT_OK
from hetero_client import Delta, SamplingParams
from tests.support.local_group import REPOSITORY, LocalGroupProcess, write_manifest

ALTERNATE_SCREEN = "\x1b[?1049h"
pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def group(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroupProcess]:
    folder = tmp_path_factory.mktemp("group")
    with LocalGroupProcess(write_manifest(folder, model=smollm2, ranks=2), home=folder / "home") as running:
        yield running


def hetero(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "hetero_client", *arguments],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == EXIT_OK, done.stderr
    return done.stdout


def test_top_shows_a_group_at_work(group: LocalGroupProcess) -> None:
    with group.client() as client:
        endless = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        with client.generate("Once upon a time", sampling=endless) as stream:
            tokens = 0
            for event in stream:
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                if tokens >= 100:  # seconds of heartbeats, which have the times of steps
                    break
            lines = hetero("top", "--once", "--admin-address", group.record.admin).splitlines()
    assert lines[0].startswith("test: ready, epoch 1, exchange shm, placement Tensor")
    rate, _, rest = lines[1].partition(" tokens/s · ")
    assert float(rate.replace(",", "")) > 0
    assert rest.startswith("1 running, 0 waiting")
    cache = next(line for line in lines if line.startswith("KV cache"))
    assert "█" in cache
    assert " 0 of " not in cache
    ranks = [line.split() for line in lines if line.split()[:1] in (["0"], ["1"])]
    assert len(ranks) == 2
    for cells in ranks:
        assert cells.count("ms") == 2  # of decode and prefill
        assert [cell for cell in cells if cell.endswith("%")]
    held = [line for line in lines if "█" in line and not line.startswith("KV cache")]
    assert len(held) == 2
    assert held[0] != held[1]


def test_top_redraws_a_terminal_until_ctrl_c(group: LocalGroupProcess) -> None:
    screen, terminal = pty.openpty()
    # Where tests run in the background, SIGINT is ignored, and a process hands that on.
    command = ["env", "--default-signal=INT", sys.executable, "-m", "hetero_client", "top", "--interval", "0.2"]
    command += ["--admin-address", group.record.admin]
    top = subprocess.Popen(
        command, cwd=REPOSITORY, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm"}
    )
    os.close(terminal)
    seen = ""
    try:
        deadline_s = time.monotonic() + 60
        while seen.count("ready, epoch 1") < 3:
            assert time.monotonic() < deadline_s, seen
            if select.select([screen], [], [], 1)[0]:
                seen += os.read(screen, 65536).decode(errors="replace")
        top.send_signal(signal.SIGINT)
        assert top.wait(20) == EXIT_OK
    finally:
        top.kill()
        top.wait()
        os.close(screen)
    assert ALTERNATE_SCREEN in seen
    assert "Traceback" not in seen


@pytest.mark.parametrize("door", ["grpc", "http"])
def test_bench_measures_a_group_through_both_doors(group: LocalGroupProcess, door: str) -> None:
    address = group.record.inference if door == "grpc" else group.record.http
    options = ("--requests", "6", "--concurrency", "3", "--prompt-tokens", "40", "--output-tokens", "12")
    data = json.loads(hetero("bench", "--door", door, "--address", address, "--json", *options))
    assert (data["requests"], data["failed"], data["prompt_tokens"], data["output_tokens"]) == (6, 0, 240, 72)
    first, gaps, whole = (
        data[name] for name in ("time_to_first_token_s", "inter_token_latency_s", "request_latency_s")
    )
    assert 0 < first["p50"] <= first["p90"] <= first["p99"] < whole["p99"] <= data["duration_s"]
    assert 0 < gaps["mean"] < whole["mean"]
    assert data["output_tokens_per_s"] == pytest.approx(72 / data["duration_s"])
