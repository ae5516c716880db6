"""Whatever the solver calls feasible, every rank's own budget accepts, with at least the KV blocks that were predicted.

The ranks here are real as far as memory goes: a Decoder of the plan says what its weights take, and the runner's own
code makes the budget and the report, once with the workspace computed and once with the most that may be measured.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.errors import PlanError
from hetero_api.model_config import ModelConfig
from hetero_api.model_parts import ExpertsConfig, LatentShape, NormNames, RopeConfig, Routing, SlidingAttention
from hetero_api.rank_memory import (
    ASSUMED_GPU_RUNTIME_BYTES,
    LOGITS_AT_ONCE,
    RUNTIME_BYTES,
    RUNTIME_GROWTH_BYTES,
    with_margin,
)
from hetero_api.sharding import ShardPlan
from hetero_api.spec import PlacementMode, PlacementSpec, WorkloadSpec
from hetero_api.spec_pools import PoolType
from hetero_api.v1 import ranks_pb2
from hetero_placement.decision import Bounds
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware, Speeds
from hetero_placement.memory_model import MemoryModel
from hetero_placement.solver import solve
from hetero_worker.attention.torch_paged import TorchPagedAttention
from hetero_worker.layers.linear_kernels import LinearKernel, PlainKernel
from hetero_worker.memory.memory_pool import HostMemoryPool
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.graphs.padding import Padding
from hetero_worker.runners.shard import DTYPES, LoadedShard, memory_of
from tests.unit.placement.placement_setup import GB, LLAMA_8B, bounds_of, config_of, cpu, gpu, group
from tests.unit.placement.test_example_models import example

pytestmark = pytest.mark.unit

LOAD = PlacementSpec(workload=WorkloadSpec(prompt_tokens=100, output_tokens=64, concurrency=3))

CASES, PARTS = 84, 12
MIB = 1 << 20
HOST = torch.device("cpu")


class PackingKernel(PlainKernel):
    """As kernels of host cores may be: a tied head is packed beside the embedding."""

    copies_weight = True


@dataclass
class PlayedMemoryPool(HostMemoryPool):
    """Memory of which so much is taken whatever is loaded, and nobody knows what is left."""

    runtime: int = 0

    def runtime_bytes(self) -> int:
        return self.runtime

    def available_bytes(self) -> None:
        return None


class Case:
    """A random model, and a group whose memory is such that it fits in some ways only, or hardly."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.dtype = self.random.choice(["float32", "bfloat16"])
        self.config = self._config()
        self.bounds = Bounds(
            max_model_len=self.random.choice([64, 200, 1024]),
            max_num_batched_tokens=self.random.choice([16, 256, 700]),
            max_num_seqs=self.random.choice([1, 8, 100]),
            block_size=self.random.choice([4, 16, 256]),
            kv_cache_bytes=self.random.choice([None, None, 3 * MIB]),
            enforce_eager=self.random.random() < 0.3,
        )
        self.hardware = self._hardware()
        self.memory = MemoryModel(self.config, self.hardware.levelled(), self.bounds, dtype=self.dtype)

    def plans(self) -> list[ShardPlan]:
        """Of all ways that there are."""
        try:
            decision = solve(
                self.config, self.hardware, dtype=self.dtype, placement=LOAD,
                bounds=self.bounds, exhaustive=2000,
            )  # fmt: skip
        except PlanError:
            return []
        return [option.plan for option in decision.options if option.plan is not None]

    def reports(self, plan: ShardPlan) -> Iterator[tuple[list[ranks_pb2.Loaded], str]]:
        """What the ranks report: once with workspaces computed, once with the most that they may measure."""
        yield [self._report(plan, rank, measured=False) for rank in range(plan.world_size)], "computed"
        yield [self._report(plan, rank, measured=True) for rank in range(plan.world_size)], "measured"

    def _report(self, plan: ShardPlan, rank: int, *, measured: bool) -> ranks_pb2.Loaded:
        """Raises MemoryBudgetError."""
        hardware, bounds = self.hardware.ranks[rank], self.bounds
        is_gpu = hardware.kind == PoolType.GPU
        request = LoadRequest(
            directory=Path("nowhere"), config=self.config, dtype=self.dtype, shard_plan=plan, rank=rank,
            max_model_len=bounds.max_model_len, max_num_batched_tokens=bounds.max_num_batched_tokens,
            max_num_seqs=bounds.max_num_seqs, memory_bytes=hardware.memory_bytes,
            enforce_eager=bounds.enforce_eager, num_gpu_ranks=self.hardware.num_gpu_ranks,
        )  # fmt: skip
        kernel: LinearKernel = PlainKernel() if is_gpu else PackingKernel()
        decoder = Decoder(
            self.config,
            plan,
            rank=rank,
            dtype=DTYPES[self.dtype],
            max_length=bounds.max_model_len,
            attention=TorchPagedAttention(),
        )
        holds = bool(plan.ranks[rank].kv_heads_total)
        pool = PlayedMemoryPool(runtime=self._runtime_of(hardware))
        weight_bytes, gather_bytes = decoder.weight_bytes(kernel), hardware.gather_bytes if holds else 0
        shard = LoadedShard(request, decoder, kernel, weight_bytes, (), 0.0, gather_bytes, pool)
        sizes = Padding.of(request, joins_experts=False).sizes if is_gpu else ()
        workspace = most_measured(request) if measured else None
        return shard.report(request, load_s=0.0, workspace=workspace, graph_sizes=sizes)

    def _runtime_of(self, hardware: RankHardware) -> int:
        """The most that it may be when the budget is made."""
        if hardware.kind == PoolType.CPU:
            return RUNTIME_BYTES
        return hardware.runtime_bytes + RUNTIME_GROWTH_BYTES if hardware.runtime_bytes else ASSUMED_GPU_RUNTIME_BYTES

    def _config(self) -> ModelConfig:
        choose, layers, heads = self.random.choice, self.random.choice([1, 2, 5]), self.random.choice([1, 2, 3, 8])
        config = config_of(
            num_hidden_layers=layers, num_key_value_heads=heads, num_attention_heads=heads * choose([1, 4]),
            head_dim=choose([16, 64]), hidden_size=choose([64, 512]), intermediate_size=choose([96, 640, 4096]),
            vocab_size=choose([130, 5000, 40_000]), tie_word_embeddings=choose([True, False]),
        )  # fmt: skip
        switches: dict[str, Any] = {
            name: choose([True, False]) for name in ("qkv_bias", "o_bias", "mlp_bias", "has_sinks")
        }
        switches["qk_norm"] = choose([None, "head"])
        switches["norms"] = choose([NormNames(), NormNames(sums=("attention_sum", "mlp_sum"))])
        switches["norm_offset"] = choose([0.0, 1.0])
        switches["attention_soft_cap"] = choose([None, None, 30.0])
        if choose([True, False, False]):
            windowed = tuple(range(0, layers, 2))
            switches["sliding"] = SlidingAttention(window=32, layers=windowed, rope=RopeConfig(123.0))
        if choose([True, False, False]):
            sparse = tuple(range(self.random.choice([0, layers - 1]), layers))
            switches["experts"] = ExpertsConfig(
                choose([2, 6]), 2, choose([32, 320]), sparse, shared_columns=choose([0, 0, 150, 640]),
                biased=choose([True, False]), routing=Routing(corrected=choose([True, False])),
            )  # fmt: skip
        config = replace(config, **switches)
        return _latent(config, self.random) if choose([True, False, False, False]) else config

    def _hardware(self) -> Hardware:
        num_gpus, num_cpus = self.random.choice([(0, 1), (0, 3), (1, 0), (1, 2), (2, 0), (2, 1)])
        kinds = [PoolType.GPU] * num_gpus + [PoolType.CPU] * num_cpus
        ranks = tuple(self._rank(kind, number) for number, kind in enumerate(kinds))
        return Hardware(ranks, ExchangeSpeeds.of_rates(1e-5), ExchangeSpeeds.of_rates(1e-5))

    def _rank(self, kind: PoolType, number: int) -> RankHardware:
        is_gpu = kind == PoolType.GPU
        runtime = self.random.choice([0, 700 * MIB]) if is_gpu else RUNTIME_BYTES
        bus = 2e10 if is_gpu else 0.0
        bandwidth = 10 ** self.random.uniform(9, 11)
        speeds = Speeds(bandwidth, to_device_bandwidth=bus, from_device_bandwidth=bus, device_latency_s=1e-5)
        hardware = RankHardware(
            kind, "host", 1 << 50, speeds, f"{kind.value}{number}", runtime_bytes=runtime,
            cores=torch.get_num_threads(), gather_bytes=self.random.choice([0, 8 * MIB]) if is_gpu else 0,
        )  # fmt: skip
        alone = MemoryModel(self.config, Hardware((hardware,)), self.bounds, dtype=self.dtype)
        weights = self.config.num_parameters * DTYPES[self.dtype].itemsize
        room = alone.fixed_bytes(0, holds_heads=True) + weights * self.random.uniform(0.1, 2.0)
        return replace(hardware, memory_bytes=int(room))


def _latent(config: ModelConfig, chance: random.Random) -> ModelConfig:
    """The same with latent attention."""
    query_rank, value_dim = chance.choice([None, 48]), chance.choice([16, 64])
    shape = LatentShape(chance.choice([32, 160]), query_rank, nope_dim=32, rope_dim=16, value_dim=value_dim)
    return replace(
        config, latent=shape, head_dim=shape.cached_dim, num_heads=config.num_kv_heads, qk_norm=None, sliding=None,
        attention_soft_cap=None, has_sinks=False,
    )  # fmt: skip


def most_measured(request: LoadRequest) -> int:
    """The workspace of a largest step that took no more than its bound from shapes."""
    memory, shard = memory_of(request), request.shard_plan.ranks[request.rank]
    sampler = (LOGITS_AT_ONCE - 1) * memory.logits_bytes(shard)
    return with_margin(memory.workspace_bytes(shard) - sampler) + sampler


def blocks_of(reports: list[ranks_pb2.Loaded], bounds: Bounds) -> int:
    """As the gateway makes them of the reports. Asserts that what the spec asks for is there."""
    holders = [report for report in reports if report.kv_bytes_per_token]
    if bounds.kv_cache_bytes is not None:
        assert all(report.kv_budget_bytes >= bounds.kv_cache_bytes for report in holders)
    most = bounds.max_num_seqs * -(-bounds.max_model_len // bounds.block_size) + 1
    given = [bounds.kv_cache_bytes or report.kv_budget_bytes for report in holders]
    rooms = [
        room // (report.kv_bytes_per_token * bounds.block_size) for room, report in zip(given, holders, strict=True)
    ]
    return min([most, *rooms])


@pytest.mark.parametrize("part", range(PARTS))
def test_no_rank_refuses_what_the_solver_calls_feasible_and_caches_are_no_smaller_than_predicted(part: int) -> None:
    for seed in range(part * CASES // PARTS, (part + 1) * CASES // PARTS):
        case = Case(seed)
        for plan in case.plans():
            predicted = case.memory.kv_blocks(plan)
            for reports, how in case.reports(plan):
                blocks = blocks_of(reports, case.bounds)
                assert blocks >= predicted, (seed, how)
            if case.bounds.kv_cache_bytes is None:
                assert predicted * case.bounds.block_size >= case.bounds.max_model_len + case.bounds.block_size, seed


def test_these_cases_fit_in_some_ways_and_not_in_others() -> None:
    """Or the property would say little."""
    plans = [len(Case(seed).plans()) for seed in range(32)]
    assert sum(number > 0 for number in plans) > 8
    assert sum(number == 0 for number in plans) > 1


@pytest.mark.parametrize("kind", list(PoolType))
def test_what_the_model_counts_beyond_a_rank_is_bounded(kind: PoolType) -> None:
    """8B on one device with plenty of memory: at most the narrower half of a layer, margins and growth."""
    config = config_of(**LLAMA_8B)
    make = gpu if kind == PoolType.GPU else cpu
    threads, is_gpu = torch.get_num_threads(), kind == PoolType.GPU
    hardware = group(replace(make(1e12, memory=80 * GB), cores=threads, runtime_bytes=600 * MIB))
    bounds = bounds_of(config, max_num_batched_tokens=2048)
    model = MemoryModel(config, hardware, bounds, dtype="bfloat16")
    plan = solve(config, hardware, dtype="bfloat16", placement=LOAD, bounds=bounds).plan
    request = LoadRequest(
        directory=Path("nowhere"), config=config, dtype="bfloat16", shard_plan=plan, rank=0,
        max_model_len=bounds.max_model_len, max_num_batched_tokens=2048, max_num_seqs=bounds.max_num_seqs,
        memory_bytes=80 * GB, num_gpu_ranks=int(is_gpu),
    )  # fmt: skip
    counted = model.need(0, plan.ranks[0])
    narrower = 3 * 2048 * (4 + 2) * 128 * 8 * 2
    narrower += 0 if is_gpu else (2048 + 16 * threads) * (4 + 2) * 128 * 8 * 4  # scratch
    assert counted.workspace - most_measured(request) < narrower * 1.125 + 3 * MIB + memory_of(request).logits_bytes(
        plan.ranks[0]
    )
    growth = RUNTIME_GROWTH_BYTES if is_gpu else 0
    assert counted.runtime == 600 * MIB + growth


def test_graphs_count_on_gpus_only_and_not_where_they_are_turned_off() -> None:
    config = config_of(**LLAMA_8B)
    hardware = group(gpu(1e12), cpu(1e11))
    plan = solve(
        config, hardware, dtype="bfloat16", placement=LOAD,
        bounds=bounds_of(config),
    ).plan  # fmt: skip
    for enforce_eager in (False, True):
        bounds = bounds_of(config, enforce_eager=enforce_eager, max_num_seqs=256)
        model = MemoryModel(config, hardware, bounds, dtype="bfloat16")
        on_gpu, on_host = (model.need(rank, plan.ranks[0]).graphs for rank in (0, 1))
        assert on_host == 0
        assert (on_gpu == 0) == enforce_eager


def test_a_rank_that_owns_nothing_needs_nothing() -> None:
    config = config_of(**LLAMA_8B)
    hardware = group(gpu(1e12), cpu(1e9, memory=MIB))
    plan = solve(
        config, hardware, dtype="bfloat16", placement=LOAD,
        bounds=bounds_of(config),
    ).plan  # fmt: skip
    assert plan.ranks[1].is_empty
    assert MemoryModel(config, hardware, bounds_of(config), dtype="bfloat16").need(1, plan.ranks[1]).total == 0


def test_the_problem_of_a_plan_is_told_with_all_that_counts() -> None:
    config = config_of(**LLAMA_8B)
    plenty, small = group(gpu(1e12)), group(gpu(1e12, memory=12 * GB))
    plan = solve(
        config, plenty, dtype="bfloat16", placement=LOAD,
        bounds=bounds_of(config),
    ).plan  # fmt: skip
    problem = MemoryModel(config, small, bounds_of(config), dtype="bfloat16").problem(plan)
    for word in ("rank 0 (gpu) would need", "weights + ", "KV cache", "workspace + ", "graphs + ", "1.07 GB runtime"):
        assert word in problem
    assert "has 12.00 GB (spec.engine.gpuMemoryUtilization)" in problem


def test_a_draft_model_takes_memory_of_rank_0_and_its_cache_a_part_of_each_block() -> None:
    config = config_of(**LLAMA_8B)
    draft = config_of(**{**LLAMA_8B, "num_hidden_layers": 4})
    hardware = group(cpu(1e11), cpu(1e11))
    plan = solve(config, hardware, dtype="bfloat16", placement=LOAD, bounds=bounds_of(config)).plan
    alone, beside = (
        MemoryModel(config, hardware, bounds_of(config, draft=each), dtype="bfloat16") for each in (None, draft)
    )
    assert beside.need(1, plan.ranks[1]) == alone.need(1, plan.ranks[1])
    more = beside.need(0, plan.ranks[0])
    less = alone.need(0, plan.ranks[0])
    whole = MemoryModel(draft, hardware, bounds_of(draft), dtype="bfloat16").need(0, ShardPlan.whole(draft).ranks[0])
    assert more.weights - less.weights == whole.weights
    assert more.cache - less.cache >= 0.9 * whole.cache > 0
    assert more.workspace > less.workspace
    tight = group(cpu(1e11, memory=more.total + GB), cpu(1e11))
    blocks = [
        MemoryModel(config, tight, bounds_of(config, draft=each), dtype="bfloat16").kv_blocks(plan)
        for each in (None, draft)
    ]
    assert blocks[1] < blocks[0]


def test_a_prediction_head_borrows_a_vocabulary_that_rank_0_has_whole() -> None:
    config = example("glm-4.5-air")
    head = config.prediction_head
    assert head is not None
    hardware = group(cpu(1e11, memory=300 * GB), cpu(1e11, memory=300 * GB))
    layered, dealt = (
        solve(config, hardware, dtype="bfloat16", placement=PlacementSpec(mode=mode), bounds=bounds_of(config)).plan
        for mode in (PlacementMode.LAYER, PlacementMode.TENSOR)
    )
    whole = ShardPlan.whole(config).ranks[0]
    alone, beside = (
        MemoryModel(config, hardware, bounds_of(config, draft=each), dtype="bfloat16") for each in (None, head)
    )
    taken = {
        name: beside.need(0, shard).weights - alone.need(0, shard).weights
        for name, shard in (("layered", layered.ranks[0]), ("dealt", dealt.ranks[0]), ("whole", whole))
    }
    vocabulary = 2 * 2 * config.vocab_size * config.hidden_size
    assert taken["layered"] == taken["dealt"]
    assert taken["whole"] == taken["dealt"] - vocabulary
    own = 2 * (head.num_parameters - 2 * config.vocab_size * config.hidden_size)
    assert taken["whole"] == pytest.approx(own, rel=0.01)
