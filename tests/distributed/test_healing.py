"""A group heals in place: whatever of it dies, hangs or throws, streams go on, and nobody sees more than a pause.

HETERO_HEALING_KILLS says how often processes are killed in a row: 5, or 50 with `make test-healing`.
"""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from hetero_api.contract import EXIT_FAILURE, EXIT_OK
from hetero_client import Delta, SamplingParams
from hetero_client.errors import ClientError, UnavailableError
from tests.support.crowd import Crowd, Killer, Question, ask_undisturbed
from tests.support.local_group import REPOSITORY, LocalGroupProcess, alive, shared_segments, wait_for, write_manifest

KILLS: Final = int(os.environ.get("HETERO_HEALING_KILLS", "5"))
STREAMS: Final = 16
MEDIAN_RECOVERY_S: Final = 5.0 if KILLS >= 50 else 15.0
"""From the signal to the first new token. On a machine that runs other tests meanwhile, everything takes longer."""
RANKS: Final = ("cpu-0", "cpu-1")
ENGINE: Final = {"maxNumSeqs": STREAMS, "maxNumBatchedTokens": 64}
"""Small steps: every start computes one as large."""

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(300 + 60 * KILLS)]


@pytest.fixture(scope="module")
def group(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalGroupProcess]:
    """Struck by one test after another; those that have groups of their own come before them."""
    folder = tmp_path_factory.mktemp("group")
    manifest = write_manifest(folder, model=smollm2, ranks=2, engine=ENGINE, recovery={"maxRestarts": 1000})
    with LocalGroupProcess(manifest, home=folder / "home") as running:
        yield running
        end(running)


@pytest.fixture(scope="module")
def questions(group: LocalGroupProcess) -> Callable[[bool], list[Question]]:
    """Questions whose answers are greedy, or seeded, asked once while nothing happens."""

    @cache
    def ask(seeded: bool) -> list[Question]:
        with group.client() as client:
            return ask_undisturbed(client, count=STREAMS, max_tokens=40, seeded=seeded)

    return ask


def end(group: LocalGroupProcess) -> None:
    """Ctrl-C; nothing stays behind."""
    with group.admin() as admin:
        admin.topology()
    children = group.descendants()
    assert group.stop() == EXIT_OK, group.describe()
    wait_for(lambda: not any(map(alive, children)), 10, lambda: str(children))
    assert shared_segments() == set()


def test_more_deaths_than_the_budget_end_the_group_and_its_streams(smollm2: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, model=smollm2, ranks=2, engine=ENGINE, recovery={"maxRestarts": 1})
    with LocalGroupProcess(manifest, home=tmp_path / "home") as group:
        children = group.descendants()
        with group.client() as client:
            stream = client.generate(
                "Once upon a time", resume_timeout_s=0, sampling=SamplingParams(max_tokens=2000, ignore_eos=True)
            )
            ended: list[BaseException] = []

            def read() -> None:
                try:
                    for _ in stream:
                        pass
                except ClientError as error:
                    ended.append(error)

            reader = threading.Thread(target=read)
            reader.start()
            first = group.record.processes["cpu-1"]
            os.kill(first, signal.SIGKILL)
            group.wait_ready_again(after_epoch=1)
            wait_for(lambda: group.record.processes["cpu-1"] != first, 10, group.describe)
            children |= group.descendants()
            os.kill(group.record.processes["cpu-1"], signal.SIGKILL)
            status = group.wait_end(30)
            reader.join(10)
    assert status == EXIT_FAILURE, group.output
    assert "which is all that spec.recovery.maxRestarts allows" in group.output
    assert [isinstance(error, UnavailableError) for error in ended] == [True], ended
    assert not any(map(alive, children))
    assert shared_segments() == set()


def test_a_rank_that_throws_in_a_step_keeps_its_process_and_the_streams_go_on(smollm2: Path, tmp_path: Path) -> None:
    manifest = write_manifest(tmp_path, model=smollm2, ranks=2, engine=ENGINE, recovery={"maxRestarts": 1000})
    fault = tmp_path / "fault"
    with LocalGroupProcess(
        manifest,
        home=tmp_path / "home",
        module="tests.support.faulty_up",
        environment={"HETERO_TEST_FAULT": str(fault), "PYTHONPATH": str(REPOSITORY)},
    ) as group:
        before = group.record.processes
        with group.client() as client:
            questions = ask_undisturbed(client, count=4, max_tokens=40)
        with Crowd(group.record.inference, questions, resume_timeout_s=0) as crowd:
            for rank, epoch in (("cpu-0", 1), ("cpu-1", 2)):
                crowd.wait_for_tokens(since_s=time.monotonic())
                fault.write_text(rank, encoding="utf-8")
                group.wait_ready_again(after_epoch=epoch)
        crowd.check()
        assert group.record.processes == before
        end(group)


def test_streams_survive_ranks_that_are_killed_and_frozen_again_and_again(
    group: LocalGroupProcess, questions: Callable[[bool], list[Question]]
) -> None:
    # The client's own resuming is off: for the loss of a rank, streams pause in the gateway.
    with Crowd(group.record.inference, questions(False), resume_timeout_s=0) as crowd:
        killer = Killer(group, crowd, seed=1)
        blows = [killer.strike(RANKS, (signal.SIGKILL, signal.SIGSTOP)) for _ in range(KILLS)]
    crowd.check()
    recovery_s = statistics.median(blow.recovery_s for blow in blows)
    print(f"\nmedian of {KILLS} recoveries: {recovery_s:.2f} s; {blows}")
    assert recovery_s <= MEDIAN_RECOVERY_S, blows


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_clients_resume_by_themselves_when_the_gateway_is_killed(
    group: LocalGroupProcess, questions: Callable[[bool], list[Question]], seeded: bool
) -> None:
    with Crowd(group.record.inference, questions(seeded)) as crowd:
        killer = Killer(group, crowd, seed=2)
        blows = [killer.strike(["gateway"], [signal.SIGKILL]) for _ in range(2)]
    crowd.check()
    print(f"\n{blows}")


def test_the_gateways_loss_costs_no_rank_its_weights(group: LocalGroupProcess) -> None:
    before = group.record.processes
    os.kill(before["gateway"], signal.SIGKILL)
    wait_for(lambda: not alive(before["gateway"]), 10, group.describe)
    group.wait_ready_again(after_epoch=0)
    with group.admin() as admin:
        assert [rank.load_s for rank in admin.topology().ranks] == [0.0, 0.0]
    assert {name: group.record.processes[name] for name in RANKS} == {name: before[name] for name in RANKS}


def test_a_frozen_gateway_is_replaced_and_clients_go_on(group: LocalGroupProcess) -> None:
    with group.client() as client:
        (question,) = ask_undisturbed(client, count=1, max_tokens=60)
        stream = client.generate(question.prompt, sampling=question.sampling)
        text = ""
        frozen = group.record.processes["gateway"]
        for event in stream:
            if isinstance(event, Delta):
                if not text:
                    os.kill(frozen, signal.SIGSTOP)
                text += event.text
    assert text == question.text
    assert not alive(frozen)
