"""`python -m hetero_worker` as processes, each with a scripted gateway of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_api.contract import ENV_GROUP_TOKEN_FILE, EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.cpu_list import parse_cpu_list
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, ranges_of_counts
from hetero_api.v1 import ranks_pb2
from tests.support.exchange_bodies import shm_left_over
from tests.support.rank_processes import segment_prefix
from tests.support.scripted_gateway import TOKEN, ScriptedGateway
from tests.support.tiny_models import save_tiny_model

pytestmark = pytest.mark.distributed

START_S = 60.0
"""A rank has to import torch and measure before it says Hello."""
SHARES = ((5, 3), (200, 120), (192, 128))
"""KV heads, MLP columns and vocabulary rows of two ranks."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama")


@dataclass(frozen=True, slots=True)
class RankProcess:
    gateway: ScriptedGateway
    process: subprocess.Popen[bytes]

    def exit_code(self) -> int:
        return self.process.wait(timeout=30)

    def pid(self) -> int:
        return self.process.pid


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


def run_to_end(arguments: Sequence[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, env=env, capture_output=True, text=True, timeout=60, check=False)


def shard_plan(model: Path) -> ShardPlan:
    layers = ModelConfig.from_directory(model).num_layers
    heads, columns, rows = (ranges_of_counts(counts) for counts in SHARES)
    return ShardPlan(tuple(RankShard((LayerShard(heads[r], columns[r]),) * layers, rows[r]) for r in range(len(heads))))


def serve(model: Path, ranks: Sequence[RankProcess], epoch: int) -> list[ranks_pb2.Loaded]:
    """From every rank's Hello to a cache on each."""
    hellos = [rank.gateway.expect("hello", patience_s=START_S).hello for rank in ranks]
    places = [
        ranks_pb2.RankPlace(rank=r, pool=h.pool, pod_name=h.pod_name, host_id=h.host_id, device=h.device)
        for r, h in enumerate(hellos)
    ]
    assert len({place.host_id for place in places}) == 1
    for number, rank in enumerate(ranks):
        form = ranks_pb2.FormGroup(
            rank=number,
            places=places,
            shard_plan=shard_plan(model).to_proto(),
            store_address=hellos[0].store_address,
            exchange=ranks_pb2.EXCHANGE_KIND_SHM,
            segment_name=f"{segment_prefix()}{ranks[0].pid()}-{epoch}",
            timeout_s=30,
            max_num_batched_tokens=32,
            max_num_seqs=2,
        )
        rank.gateway.tell(epoch, form_group=form)
    assert {r.gateway.expect("formed").formed.exchange for r in ranks} == {ranks_pb2.EXCHANGE_KIND_SHM}
    for rank in ranks:
        rank.gateway.tell(epoch, load_model=ranks_pb2.LoadModel(dtype="float32", max_model_len=64))
    loaded = [rank.gateway.expect("loaded").loaded for rank in ranks]
    for rank in ranks:
        rank.gateway.tell(epoch, allocate_cache=ranks_pb2.AllocateCache(num_blocks=8, block_size=16))
        rank.gateway.expect("allocated")
    return loaded


def generate(ranks: Sequence[RankProcess], epoch: int, num_tokens: int) -> list[int]:
    """Greedy tokens of one short prompt; every step is sent ahead of the answer to the one before."""
    new = ranks_pb2.NewSequence(slot=0, token_ids=[72, 101, 108, 108, 111], sampling=ranks_pb2.Sampling(top_p=1))
    for step_id in range(1, num_tokens + 1):
        first = step_id == 1
        plan = ranks_pb2.StepPlan(
            step_id=step_id,
            new_sequences=[new] if first else [],
            scheduled=[
                ranks_pb2.ScheduledSequence(
                    slot=0, num_tokens=5 if first else 1, new_block_ids=[1] if first else [], sample=True
                )
            ],
        )
        for rank in ranks:
            rank.gateway.tell(epoch, step_plan=plan)
    results = [ranks[0].gateway.expect("step_result").step_result for _ in range(num_tokens)]
    return [token for result in results for token in result.token_ids]


def shut_down(ranks: Sequence[RankProcess], epoch: int) -> None:
    for rank in ranks:
        rank.gateway.tell(epoch, shutdown=ranks_pb2.Shutdown(reason="the test is over"))
    assert [rank.exit_code() for rank in ranks] == [EXIT_OK] * len(ranks)


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


def next_step(step_id: int) -> ranks_pb2.StepPlan:
    return ranks_pb2.StepPlan(
        step_id=step_id, scheduled=[ranks_pb2.ScheduledSequence(slot=0, num_tokens=1, sample=True)]
    )


def test_hello_tells_who_and_what_the_rank_is(model: Path, tmp_path: Path) -> None:
    core = min(os.sched_getaffinity(0))
    with rank_process(model, tmp_path, cores=str(core), policy="BestEffort") as rank:
        hello = rank.gateway.expect("hello", patience_s=START_S).hello
        masks = thread_masks(rank.pid())
        rank.gateway.tell(0, shutdown=ranks_pb2.Shutdown())
        assert rank.exit_code() == EXIT_OK

    assert (hello.pool, hello.pod_name, hello.device.memory_bytes) == ("cpu", "rank-0", 1 << 30)
    assert hello.model_fingerprint == model_fingerprint(model)
    assert hello.device.memory_bandwidth > 1e8
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
    script = "import sys, hetero_worker.rank; sys.exit(bool({'torch', 'grpc', 'numpy'} & sys.modules.keys()))"

    assert run_to_end([sys.executable, "-c", script], environment(tmp_path)).returncode == 0
