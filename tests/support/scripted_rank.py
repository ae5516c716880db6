"""The life of rank processes as a script tells it: Hello to a cache, some steps, the end. Each has its own gateway."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hetero_api.contract import EXIT_OK
from hetero_api.model_config import ModelConfig
from hetero_api.sharding import LayerShard, RankShard, ShardPlan, ranges_of_counts
from hetero_api.v1 import ranks_pb2
from tests.support.rank_processes import segment_prefix
from tests.support.scripted_gateway import ScriptedGateway

START_S = 60.0
"""A rank has to import torch and measure before it says Hello."""
TWO_RANKS = ((5, 3), (200, 120), (192, 128))
"""KV heads, MLP columns and vocabulary rows of two ranks."""
ONE_RANK = ((8,), (320,), (320,))


@dataclass(frozen=True, slots=True)
class RankProcess:
    gateway: ScriptedGateway
    process: subprocess.Popen[bytes]

    def exit_code(self) -> int:
        return self.process.wait(timeout=30)

    def pid(self) -> int:
        return self.process.pid


def shard_plan(model: Path, shares: Sequence[Sequence[int]]) -> ShardPlan:
    layers = ModelConfig.from_directory(model).num_layers
    heads, columns, rows = (ranges_of_counts(counts) for counts in shares)
    return ShardPlan(
        tuple(RankShard((LayerShard(heads[r], columns[r]),) * layers, rows[r], rows[r]) for r in range(len(heads)))
    )


def serve(
    model: Path, ranks: Sequence[RankProcess], epoch: int, *, shares: Sequence[Sequence[int]] = TWO_RANKS
) -> list[ranks_pb2.Loaded]:
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
            store_address=hellos[0].store_address,
            exchange=ranks_pb2.EXCHANGE_KIND_SHM,
            segment_name=f"{segment_prefix()}{ranks[0].pid()}-{epoch}",
            timeout_s=30,
            max_num_batched_tokens=32,
            max_num_seqs=2,
        )
        rank.gateway.tell(epoch, form_group=form)
    assert len({r.gateway.expect("formed").formed.exchange for r in ranks}) == 1
    plan = shard_plan(model, shares).to_proto()
    order = ranks_pb2.LoadModel(dtype="float32", max_model_len=64, shard_plan=plan, plan_key="the test's")
    for rank in ranks:
        rank.gateway.tell(epoch, load_model=order)
    loaded = [rank.gateway.expect("loaded").loaded for rank in ranks]
    for rank in ranks:
        rank.gateway.tell(epoch, allocate_cache=ranks_pb2.AllocateCache(num_blocks=8, block_size=16))
        rank.gateway.expect("allocated")
    return loaded


def generate(ranks: Sequence[RankProcess], epoch: int, num_tokens: int) -> list[int]:
    """Greedy tokens of one short prompt; every step is sent ahead of the answer to the one before."""
    new = ranks_pb2.NewSequence(
        slot=0, token_ids=[72, 101, 108, 108, 111], num_prompt_tokens=5, sampling=ranks_pb2.Sampling(top_p=1)
    )
    first = ranks_pb2.StepPlan(
        step_id=1,
        new_sequences=[new],
        spans=[ranks_pb2.ScheduledSpan(slot=0, num_tokens=5, sample=True)],
        block_slots=[0],
        block_ids=[1],
    )
    for plan in [first, *map(next_step, range(2, num_tokens + 1))]:
        for rank in ranks:
            rank.gateway.tell(epoch, step_plan=plan)
    results = [ranks[0].gateway.expect("step_result").step_result for _ in range(num_tokens)]
    return [token for result in results for token in result.token_ids]


def shut_down(ranks: Sequence[RankProcess], epoch: int) -> None:
    for rank in ranks:
        rank.gateway.tell(epoch, shutdown=ranks_pb2.Shutdown(reason="the test is over"))
    assert [rank.exit_code() for rank in ranks] == [EXIT_OK] * len(ranks)


def next_step(step_id: int) -> ranks_pb2.StepPlan:
    return ranks_pb2.StepPlan(step_id=step_id, decode_slots=[0])
