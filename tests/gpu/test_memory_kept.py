"""What a GPU rank keeps its memory for is enough: for graphs, for the largest step, for what its runtime becomes.

The solver and the rank's budget count with bounds and estimates (`hetero_api.rank_memory`, `graph_memory`); here they
are held against what a device says, for a model of 28 layers whose weights are made on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.gpu.shapes import QWEN3_06B
from bench.gpu.weights import MadeWeights
from hetero_api.graph_memory import MAX_ROWS, graph_sizes
from hetero_api.rank_memory import LOGITS_AT_ONCE, RUNTIME_GROWTH_BYTES, with_margin
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.profile_run import measure_workspace
from hetero_worker.runners.shard import memory_of
from tests.support.gpu_needed import skip_without_gpu
from tests.support.rank_group import PlanBuilder, Shares, StepOutcome

skip_without_gpu()

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 16
SHARE = 0.5
"""Of the device's memory, that the rank may take."""
WHOLE_06B = Shares(kv_heads=((8,),), mlp_columns=((3072,),), vocab_rows=(151_936,))


class QuietTaker:
    """PlanTaker of one rank that draws on its device, with as large a cache as there is room for."""

    def __init__(self, gpu: CudaBackend, request: LoadRequest) -> None:
        self.runner = PlanRunner(gpu)
        self.runner.attach(LocalExchange())
        self.report = self.runner.load(request)
        self.block_size = BLOCK_SIZE
        self.num_blocks = self.report.kv_budget_bytes // (self.report.kv_bytes_per_token * BLOCK_SIZE)
        self.runner.allocate(self.num_blocks, BLOCK_SIZE)

    def run(self, plan: ranks_pb2.StepPlan, masks: Sequence[bytes] = ()) -> StepOutcome:
        output = self.runner.execute(plan, lambda: masks)
        return StepOutcome(list(output.sampled), torch.empty(0), [output])


@pytest.fixture(scope="module")
def gpu() -> CudaBackend:
    platform = CudaBackend(0, pool="test")
    platform.open()
    return platform


@pytest.fixture
def request_06b(gpu: CudaBackend) -> LoadRequest:
    gpu.memory_pool.release_unused()  # what an earlier test's rank had
    return LoadRequest(
        directory=Path("made weights"),
        config=QWEN3_06B,
        dtype="bfloat16",
        shard_plan=WHOLE_06B.plan(QWEN3_06B.num_layers),
        rank=0,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=MAX_ROWS,
        memory_bytes=gpu.memory_bytes,
        memory_utilization=SHARE,
        open_weights=MadeWeights,
        num_gpu_ranks=1,
    )


def decode_sizes(builder: PlanBuilder, sizes: Sequence[int]) -> None:
    """Each as often as it takes to be prepared, recorded, and replayed once."""
    for slot in range(max(sizes)):
        builder.start(slot, [slot])
    for size in sizes:
        for _ in range(3):
            for slot in range(size):
                builder.schedule(slot)
            builder.run()


def prefill(builder: PlanBuilder, num_tokens: int) -> None:
    builder.start(0, [token % 1000 for token in range(num_tokens)])
    builder.schedule(0)
    builder.run()
    builder.release(0)
    builder.run()


@pytest.mark.parametrize("falling", [True, False], ids=["largest first", "smallest first"])
def test_graphs_take_no_more_than_is_kept_for_them_in_whatever_order_they_are_recorded(
    gpu: CudaBackend, request_06b: LoadRequest, falling: bool
) -> None:
    taker = QuietTaker(gpu, request_06b)
    builder = PlanBuilder(taker)
    prefill(builder, request_06b.max_num_batched_tokens - 1)
    sizes = graph_sizes(MAX_ROWS)
    assert tuple(taker.report.graph_sizes) == sizes
    decode_sizes(builder, sorted(sizes, reverse=falling))
    taken, kept = taker.runner.graph_bytes, taker.report.graph_reserve_bytes
    print(f"{len(sizes)} graphs of {QWEN3_06B.num_layers} layers took {taken >> 20} MiB of the {kept >> 20} MiB kept")
    assert 0 < taken <= kept
    gpu.memory_pool.release_unused()  # logits of each size leave some: the allocator gives it back at need
    free, total = torch.cuda.mem_get_info(gpu.device)
    assert free >= (1 - SHARE) * total - RUNTIME_GROWTH_BYTES, "with its cache, a rank leaves what it is not to take"


def test_the_largest_step_takes_no_more_than_its_bound_from_shapes(gpu: CudaBackend, request_06b: LoadRequest) -> None:
    taker = QuietTaker(gpu, replace(request_06b, enforce_eager=True))
    shard = taker.runner._model_state.shard
    assert shard is not None
    memory, part = memory_of(request_06b), request_06b.shard_plan.ranks[0]
    sampler = (LOGITS_AT_ONCE - 1) * memory.logits_bytes(part)
    bound = with_margin(memory.workspace_bytes(part) - sampler) + sampler
    measured = measure_workspace(shard.decoder, request_06b, gpu.memory_pool)
    assert measured is not None
    print(f"the largest step: {measured >> 20} MiB kept, {bound >> 20} MiB by its shapes")
    assert measured <= bound


def test_the_runtime_grows_by_less_than_is_allowed_for(gpu: CudaBackend, request_06b: LoadRequest) -> None:
    pool = gpu.memory_pool
    pool.release_unused()
    before = pool.runtime_bytes()
    taker = QuietTaker(gpu, replace(request_06b, enforce_eager=True))
    builder = PlanBuilder(taker)
    prefill(builder, request_06b.max_num_batched_tokens - 1)
    decode_sizes(builder, [MAX_ROWS, 1])
    grown = pool.runtime_bytes() - before
    print(f"the runtime grew by {grown >> 20} MiB to {pool.runtime_bytes() >> 20} MiB")
    assert grown <= RUNTIME_GROWTH_BYTES
