"""What a rank's process is bound to, and what it does when that changes under it; the gateway is scripted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, EXIT_OK, EXIT_PERMANENT
from hetero_api.cpu_list import format_cpu_list, parse_cpu_list
from hetero_api.host.topology import NumaPolicy
from hetero_api.v1 import ranks_pb2
from tests.support.scripted_gateway import TOKEN, ScriptedGateway
from tests.support.scripted_rank import START_S, RankProcess
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed

CPUS = sorted(os.sched_getaffinity(0))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@contextmanager
def bound_rank(
    model: Path, folder: Path, *, cores: list[int], communication: list[int], policy: NumaPolicy
) -> Iterator[RankProcess]:
    (folder / "token").write_text(TOKEN)
    with ScriptedGateway() as gateway:
        arguments = [
            sys.executable, "-m", "hetero_worker", "--gateway", gateway.target, "--model", str(model), "--pool", "cpu",
            "--ordinal", "0", "--local-rank", "0", "--pod-name", "rank-0", "--cores", format_cpu_list(cores),
            "--communication-cores", format_cpu_list(communication), "--num-threads", "1",
            "--numa-policy", str(policy), "--memory-bytes", str(1 << 30),
        ]  # fmt: skip
        environment = {**os.environ, ENV_GROUP_TOKEN_FILE: str(folder / "token")}
        with subprocess.Popen(arguments, env=environment) as process:
            try:
                yield RankProcess(gateway, process)
            finally:
                process.kill()


def thread_masks(pid: int) -> dict[int, set[int]]:
    masks = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        line = next(x for x in status.read_text().splitlines() if x.startswith("Cpus_allowed_list:"))
        masks[int(status.parent.name)] = set(parse_cpu_list(line.partition(":")[2]))
    return masks


def form_message() -> ranks_pb2.FormGroup:
    return ranks_pb2.FormGroup(
        rank=0,
        places=[ranks_pb2.RankPlace(rank=0)],
        exchange=ranks_pb2.EXCHANGE_KIND_SHM,
        timeout_s=20,
        max_num_batched_tokens=64,
        max_num_seqs=4,
    )


@pytest.mark.skipif(len(CPUS) < 2, reason="needs a core to compute on and another one")
def test_the_gateways_stream_is_served_off_the_core_that_computes(model: Path, tmp_path: Path) -> None:
    computing, other = CPUS[0], CPUS[-1]
    with bound_rank(model, tmp_path, cores=[computing], communication=[other], policy=NumaPolicy.BEST_EFFORT) as rank:
        rank.gateway.expect("hello", patience_s=START_S)
        masks = thread_masks(rank.pid())
        rank.gateway.tell(0, shutdown=ranks_pb2.Shutdown())
        assert rank.exit_code() == EXIT_OK

    assert masks[rank.pid()] == {computing}
    assert {other} in masks.values()


@pytest.mark.skipif(len(CPUS) < 2, reason="needs a second core to be moved to")
@pytest.mark.parametrize("policy", [NumaPolicy.REQUIRED, NumaPolicy.BEST_EFFORT])
def test_a_cpuset_that_changed_is_told_and_ends_a_rank_that_requires_it(
    policy: NumaPolicy, model: Path, tmp_path: Path
) -> None:
    with bound_rank(model, tmp_path, cores=CPUS[:1], communication=[], policy=policy) as rank:
        first = rank.gateway.expect("hello", patience_s=START_S).hello.device
        rank.gateway.tell(1, form_group=form_message())
        rank.gateway.expect("formed", patience_s=START_S)
        os.sched_setaffinity(rank.pid(), CPUS)  # as kernels before 6.2 do when a cpuset changes
        rank.gateway.tell(1, abort=ranks_pb2.Abort(reason="test"))
        second = rank.gateway.expect("hello").hello.device
        rank.gateway.tell(2, form_group=form_message())
        if policy == NumaPolicy.REQUIRED:
            failure = rank.gateway.expect("failure").failure
            assert "numa policy is Required, but the cpuset changed" in failure.message
            assert failure.permanent
            assert rank.exit_code() == EXIT_PERMANENT
        else:
            rank.gateway.expect("formed", patience_s=START_S)
            rank.gateway.tell(2, shutdown=ranks_pb2.Shutdown())
            assert rank.exit_code() == EXIT_OK

    assert (first.pinned, list(first.cpus)) == (True, CPUS[:1])
    assert (second.pinned, list(second.cpus)) == (False, [])
    assert f"it runs on CPUs {format_cpu_list(CPUS)}, not {CPUS[0]}" in second.pin_message
