"""`python -m hetero_worker` as processes, each with a scripted gateway of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.cpu_list import parse_cpu_list
from hetero_api.host.death_signal import adopt_orphans
from hetero_api.model_config import model_fingerprint
from hetero_api.supervision.forkserver import ForkOrder
from hetero_api.v1 import ranks_pb2
from tests.support.exchange_bodies import shm_left_over
from tests.support.rank_processes import segment_prefix
from tests.support.scripted_gateway import TOKEN, ScriptedGateway
from tests.support.scripted_rank import ONE_RANK, START_S, RankProcess, generate, next_step, serve, shut_down
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed

REPOSITORY = Path(__file__).parents[2]
"""Where a process finds tests.support."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


def command(model: Path, target: str, *, ordinal: int = 0, cores: str = "", policy: str = "None") -> list[str]:
    return [
        sys.executable, "-m", "hetero_worker", "--gateway", target, "--model", str(model), "--pool", "cpu",
        "--ordinal", str(ordinal), "--local-rank", "0", "--pod-name", f"rank-{ordinal}", "--cores", cores,
        "--num-threads", "1", "--numa-policy", policy, "--memory-bytes", str(1 << 30),
    ]  # fmt: skip


def environment(folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text(TOKEN)
    return {**os.environ, ENV_GROUP_TOKEN_FILE: str(token)}


@contextmanager
def rank_process(
    model: Path, folder: Path, *, ordinal: int = 0, cores: str = "", policy: str = "None"
) -> Iterator[RankProcess]:
    with ScriptedGateway() as gateway:
        arguments = command(model, gateway.target, ordinal=ordinal, cores=cores, policy=policy)
        with subprocess.Popen(arguments, env=environment(folder)) as process:
            try:
                yield RankProcess(gateway, process)
            finally:
                process.kill()


@contextmanager
def pseudo_gpu_process(model: Path, folder: Path, log: Path) -> Iterator[RankProcess]:
    """`log` gets what it says."""
    with ScriptedGateway() as gateway, log.open("w") as errors:
        arguments = [
            sys.executable, "-m", "tests.support.pseudo_gpu_rank", "--gateway", gateway.target, "--model", str(model),
            "--pool", "gpu", "--ordinal", "0", "--local-rank", "0", "--pod-name", "rank-0", "--device", "cuda:0",
            "--num-threads", "1", "--numa-policy", "None",
        ]  # fmt: skip
        env = {**environment(folder), "PYTHONPATH": str(REPOSITORY)}
        with subprocess.Popen(arguments, env=env, stderr=errors) as process:
            try:
                yield RankProcess(gateway, process)
            finally:
                process.kill()


def run_to_end(arguments: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_survivor_of_a_killed_rank_keeps_its_weights_and_serves_the_next_epoch(model: Path, tmp_path: Path) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(rank_process(model, tmp_path, ordinal=ordinal)) for ordinal in range(2))
        serve(model, [first, second], 1)
        before = generate([first, second], 1, 10)
        first.gateway.tell(1, step_plan=next_step(11))  # blocks: its peer gets no such plan
        os.kill(second.pid(), signal.SIGKILL)
        first.gateway.tell(1, abort=ranks_pb2.Abort(reason="rank 1 is gone"))
        third = stack.enter_context(rank_process(model, tmp_path, ordinal=1))
        kept, read = serve(model, [first, third], 2)
        after = generate([first, third], 2, 10)
        shut_down([first, third], 2)

    assert (kept.load_s, read.load_s > 0) == (0.0, True)
    assert len(before) == 10
    assert after == before
    assert shm_left_over(segment_prefix()) == []


def test_a_gpu_rank_alone_begins_plans_that_are_there_behind_one_another_and_draws_what_a_cpu_rank_draws(
    model: Path, tmp_path: Path
) -> None:
    with rank_process(model, tmp_path) as cpu_rank:
        serve(model, [cpu_rank], 1, shares=ONE_RANK)
        expected = generate([cpu_rank], 1, 11)
        shut_down([cpu_rank], 1)
    log = tmp_path / "log"
    with pseudo_gpu_process(model, tmp_path, log) as rank:
        (loaded,) = serve(model, [rank], 1, shares=ONE_RANK)
        drawn = generate([rank], 1, 11)
        shut_down([rank], 1)

    assert "steps=async" in loaded.kernels
    assert drawn == expected
    assert "began before the last was finished" in log.read_text()


def test_hello_tells_who_and_what_the_rank_is(model: Path, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with rank_process(model, tmp_path, cores=str(core), policy="BestEffort") as rank:
        hello = rank.gateway.expect("hello", patience_s=START_S).hello
        masks = thread_masks(rank.pid())
        rank.gateway.tell(0, shutdown=ranks_pb2.Shutdown())
        assert rank.exit_code() == EXIT_OK

    assert (hello.pool, hello.pod_name, hello.device.memory_bytes) == ("cpu", "rank-0", 1 << 30)
    assert hello.model_fingerprint == model_fingerprint(model)
    assert hello.device.speeds.memory_bandwidth > 1e8
    assert list(hello.device.cpus) == [core]
    assert masks[rank.pid()] == {core}
    # The link's threads are where they were before the compute thread was bound.
    assert os.sched_getaffinity(0) in masks.values()


def thread_masks(pid: int) -> dict[int, set[int]]:
    masks = {}
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        line = next(x for x in status.read_text().splitlines() if x.startswith("Cpus_allowed_list:"))
        masks[int(status.parent.name)] = set(parse_cpu_list(line.partition(":")[2]))
    return masks


@contextmanager
def forkserver(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """hetero_worker.process.forkserver, once it is ready. Its ranks become children of this process."""
    adopt_orphans()
    with subprocess.Popen(
        [sys.executable, "-m", "hetero_worker.process.forkserver"],
        env=environment(folder), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def fork_order(arguments: list[str], log: Path) -> ForkOrder:
    """A rank of this process."""
    return ForkOrder(arguments, {}, str(log), os.getpid(), signal.SIGTERM)


def fork_rank(process: subprocess.Popen[str], order: ForkOrder) -> int:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(order.to_json() + "\n")
    process.stdin.flush()
    return int(process.stdout.readline())


def test_a_forked_rank_is_bound_to_its_cores_and_joins_at_once(model: Path, tmp_path: Path) -> None:
    core, log = min(os.sched_getaffinity(0)), tmp_path / "rank.log"
    with forkserver(tmp_path) as process, ScriptedGateway() as gateway:
        assert len(list(Path(f"/proc/{process.pid}/task").iterdir())) == 1
        arguments = command(model, gateway.target, cores=str(core), policy="BestEffort")[3:]
        for _ in range(2):  # the second has nothing to measure any more
            began_s = time.monotonic()
            order = fork_order([*arguments, "--measurements-file", str(tmp_path / "kept")], log)
            pid = fork_rank(process, order)
            hello = gateway.expect("hello", patience_s=START_S).hello
            took_s = time.monotonic() - began_s
            masks = thread_masks(pid)
            gateway.tell(0, shutdown=ranks_pb2.Shutdown())
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == EXIT_OK, log.read_text()
            assert (list(hello.device.cpus), masks[pid]) == ([core], {core})
            # Threads that compute are bound; the pulse's and gRPC's are where they were before.
            assert set(map(frozenset, masks.values())) <= {frozenset({core}), frozenset(os.sched_getaffinity(0))}
            gateway.expect_end()
    assert took_s < 2  # a rank that has to import torch takes longer on any machine


def test_a_forked_rank_ends_as_one_that_was_started(model: Path, tmp_path: Path) -> None:
    log = tmp_path / "rank.log"
    with forkserver(tmp_path) as process:
        statuses = []
        for arguments in (["--pool", "cpu"], command(tmp_path, "127.0.0.1:9")[3:]):
            pid = fork_rank(process, fork_order(arguments, log))
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 0
    assert statuses == [EXIT_USAGE, EXIT_PERMANENT]
    assert "--gateway" in log.read_text()
    assert f"{tmp_path / 'config.json'}" in log.read_text()


def test_no_rank_begins_that_its_forkserver_could_not_tell_of(model: Path, tmp_path: Path) -> None:
    """A second rank would be started in its place, beside it."""
    log = tmp_path / "rank.log"
    with forkserver(tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        process.stdin.write(fork_order(command(model, "127.0.0.1:9")[3:], log).to_json() + "\n")
        process.stdin.flush()
        assert process.wait(timeout=30) != 0
        _, status = os.waitpid(-1, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_FAILURE
    assert not log.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_a_rank_in_good_order(number: signal.Signals, model: Path, tmp_path: Path) -> None:
    with rank_process(model, tmp_path) as rank:
        rank.gateway.expect("hello", patience_s=START_S)
        os.kill(rank.pid(), number)

        rank.gateway.expect_end()
        assert rank.exit_code() == EXIT_OK


def test_rank_ends_when_its_gateway_does(model: Path, tmp_path: Path) -> None:
    with rank_process(model, tmp_path) as rank:
        rank.gateway.expect("hello", patience_s=START_S)
        rank.gateway.hang_up()

        assert rank.exit_code() == EXIT_FAILURE


def test_usage_error_is_one_line_and_an_exit_code_of_its_own(tmp_path: Path) -> None:
    ended = run_to_end([sys.executable, "-m", "hetero_worker", "--pool", "cpu"], environment(tmp_path))

    assert ended.returncode == EXIT_USAGE
    assert ended.stderr.count("\n") == 1
    assert "--gateway" in ended.stderr


def test_required_binding_that_cannot_be_had_ends_the_rank_for_good(model: Path, tmp_path: Path) -> None:
    arguments = command(model, "127.0.0.1:9", cores="4095", policy="Required")

    ended = run_to_end(arguments, environment(tmp_path))

    assert ended.returncode == EXIT_PERMANENT
    assert "numa policy is Required, but CPUs 4095 are not online" in ended.stderr


def test_directory_without_a_model_ends_the_rank_for_good(tmp_path: Path) -> None:
    ended = run_to_end(command(tmp_path, "127.0.0.1:9"), environment(tmp_path))

    assert ended.returncode == EXIT_PERMANENT
    assert f"{tmp_path / 'config.json'}" in ended.stderr


def test_entry_loads_neither_torch_nor_grpc_before_it_binds(tmp_path: Path) -> None:
    script = "import sys, hetero_worker.process.rank; sys.exit(bool({'torch', 'grpc', 'numpy'} & sys.modules.keys()))"

    assert run_to_end([sys.executable, "-c", script], environment(tmp_path)).returncode == 0
