"""Many clients at once, cancellation, and a group that may not heal: what a user of a running group sees."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from hetero_api.contract import EXIT_OK
from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_client import Completion, Delta, SamplingParams
from hetero_client.errors import UnavailableError
from tests.support.local_group import LocalGroupProcess, alive, shared_segments, wait_for, write_manifest
from tests.support.prompts import PROMPTS

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def group(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroupProcess]:
    folder = tmp_path_factory.mktemp("group")
    manifest = write_manifest(folder, model=smollm2, ranks=2)
    with LocalGroupProcess(manifest, home=folder / "home") as running:
        yield running


def stats(group: LocalGroupProcess) -> admin_pb2.GetStatsResponse:
    with grpc.insecure_channel(group.record.admin) as channel:
        found: admin_pb2.GetStatsResponse = admin_pb2_grpc.AdminStub(channel).GetStats(admin_pb2.GetStatsRequest())
    assert found.free_blocks + found.used_blocks == found.num_blocks
    return found


def test_32_clients_of_mixed_lengths_get_the_text_they_get_alone(group: LocalGroupProcess) -> None:
    asked = [
        (PROMPTS[i % len(PROMPTS)], SamplingParams(temperature=0.8, seed=i, max_tokens=8 + 2 * i)) for i in range(32)
    ]
    with group.client() as client:

        def generate(index: int) -> Completion:
            prompt, sampling = asked[index]
            return client.generate_text(prompt, sampling=sampling)

        alone = {index: generate(index) for index in range(0, 32, 5)}
        with ThreadPoolExecutor(32) as pool:
            together = list(pool.map(generate, range(32)))
    assert {index: together[index].text for index in alone} == {index: run.text for index, run in alone.items()}
    assert all(run.text.isprintable() or run.text for run in together)
    assert all(0 < len(run.token_ids) <= 8 + 2 * i for i, run in enumerate(together))
    assert stats(group).used_blocks == 0


def test_a_cancelled_stream_frees_its_blocks_within_one_step(group: LocalGroupProcess) -> None:
    with group.client() as client:
        endless = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
        kept = client.generate(PROMPTS[0], sampling=endless)
        cancelled = client.generate(PROMPTS[-1], sampling=endless)
        for stream in (kept, cancelled):
            while not isinstance(next(stream), Delta):
                pass
        before = stats(group)
        assert before.running_requests == 2
        cancelled.close()
        wait_for(lambda: stats(group).running_requests == 1, 5, group.describe)
        seen = stats(group)
        wait_for(lambda: stats(group).steps > seen.steps, 5, group.describe)
        # At most one step more was done on the cancelled one. What is left is one stream of a few tokens; the long
        # prompt's 56 blocks are free.
        assert stats(group).used_blocks < before.used_blocks - 50
        kept.close()
        wait_for(lambda: stats(group).used_blocks == 0, 5, group.describe)


def test_ctrl_c_ends_everything_and_exits_0(smollm2: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, model=smollm2, name="stopped")
    group = LocalGroupProcess(manifest, home=tmp_path / "home")
    with group:
        pids = list(group.record.processes.values())
        assert len(pids) == 3
        assert group.stop() == EXIT_OK, group.describe()
    wait_for(lambda: not any(map(alive, pids)), 5, group.describe)
    assert shared_segments() == set()


@pytest.mark.parametrize("victim", ["cpu-0", "cpu-1"])
def test_without_a_budget_a_killed_rank_ends_every_stream_unavailable_and_leaves_nothing(
    smollm2: Path, tmp_path: Path, victim: str
) -> None:
    manifest = write_manifest(tmp_path, model=smollm2, name=f"killed-{victim}", recovery={"maxRestarts": 0})
    group = LocalGroupProcess(manifest, home=tmp_path / "home")
    with group:
        pids = group.record.processes
        children = group.descendants()
        flowing = threading.Barrier(9)
        ended: list[tuple[BaseException | None, float]] = []

        def stream(index: int) -> None:
            error: BaseException | None = None
            with group.client() as client:
                events = client.generate(
                    PROMPTS[index],
                    sampling=SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True),
                    resume_timeout_s=0,
                )
                for event in events:
                    if isinstance(event, Delta):
                        break
                flowing.wait(60)
                try:
                    for _ in events:
                        pass
                except Exception as caught:
                    error = caught
            ended.append((error, time.monotonic()))

        threads = [threading.Thread(target=stream, args=(index,)) for index in range(8)]
        for thread in threads:
            thread.start()
        flowing.wait(60)
        killed_s = time.monotonic()
        os.kill(pids[victim], signal.SIGKILL)
        for thread in threads:
            thread.join(30)
        status = group.wait_end(15)
    assert len(ended) == 8
    assert {type(error) for error, _ in ended} <= {UnavailableError} | set(UnavailableError.__subclasses__())
    assert max(at for _, at in ended) - killed_s < 5
    assert status not in (EXIT_OK, None), group.output
    assert f"{victim} was killed by SIGKILL" in group.output
    assert not any(map(alive, children))
    assert shared_segments() == set()
