"""A real group gives its memory up while nobody asks, and serves what comes then, also when a rank dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hetero_client import AdminClient, HeteroClient, SamplingParams
from tests.support.local_group import LocalGroupProcess, wait_for, write_manifest
from tests.support.tiny_models import save_tiny_model

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPTS = [tuple(range(first, first + 20)) for first in (3, 30, 60, 90)]
SAMPLING = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def ask(client: HeteroClient) -> tuple[list[tuple[int, ...]], float]:
    """The tokens of all prompts, asked at once, and the seconds to the first token of any."""
    began_s, firsts_s = time.perf_counter(), list[float]()

    def read(prompt: tuple[int, ...]) -> tuple[int, ...]:
        tokens: list[int] = []
        for event in client.generate(prompt, sampling=SAMPLING, resume_timeout_s=0):
            received = getattr(event, "token_ids", ())
            if received and not tokens:
                firsts_s.append(time.perf_counter() - began_s)
            tokens += received
        return tuple(tokens)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(read, PROMPTS)), min(firsts_s)


def wait_for_rest(group: LocalGroupProcess, admin: AdminClient, *, sleeps: int) -> None:
    def rests() -> bool:
        idle = admin.topology().idle
        return idle is not None and idle.rests and idle.sleeps == sleeps

    wait_for(rests, 30, group.describe)


def test_a_group_at_rest_gives_memory_back_and_loses_no_request(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", "llama")
    manifest = write_manifest(tmp_path, model=model, max_model_len=None, idle={"sleepAfterSeconds": 1, "level": 2})
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group, group.client() as client, group.admin() as admin:
        expected, awake_s = ask(client)
        wait_for_rest(group, admin, sleeps=1)
        assert [(rank.weight_bytes, rank.kv_bytes) for rank in admin.topology().ranks] == [(0, 0)] * 2
        assert client.server_info().ready
        found, waking_s = ask(client)
        assert found == expected
        wait_for_rest(group, admin, sleeps=2)
        os.kill(group.record.processes["cpu-1"], signal.SIGKILL)
        found, healing_s = ask(client)
        assert found == expected
        topology = admin.topology()
        assert topology.epoch == 2
        wait_for_rest(group, admin, sleeps=3)
    idle = topology.idle
    assert idle is not None
    print(f"fell asleep in {idle.sleep_s:.3f} s, woke in {idle.wake_s:.3f} s; first token awake {awake_s:.3f} s, ")
    print(f"waking {waking_s:.3f} s, waking after a rank was killed {healing_s:.3f} s")
