"""What the kernel says of memory, and what is made of it."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.rank_memory import LOGITS_AT_ONCE, KvCost, with_margin
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import MemoryBudget
from hetero_worker.memory.memory_pool import CgroupFiles, HostMemoryPool, MemoryPool, MemorySnapshot, PeakMeter
from hetero_worker.models.decoder import Decoder, DecoderInput
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.plan_runner import PlanRunner
from hetero_worker.runners.profile_run import measure_workspace
from hetero_worker.runners.shard import memory_of
from tests.support.rank_group import RankGroup, Shares
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

MIB = 1024**2
STATUS = "Name:\tpython\nVmHWM:\t 9000 kB\nVmRSS:\t    5000 kB\nRssAnon:\t    3000 kB\n"
MEMINFO = "MemTotal:  100000 kB\nMemFree: 10 kB\nMemAvailable:   40000 kB\n"


def machine(folder: Path, *, status: str = STATUS, meminfo: str = MEMINFO) -> Path:
    (folder / "self").mkdir(exist_ok=True)
    (folder / "self" / "status").write_text(status)
    (folder / "meminfo").write_text(meminfo)
    return folder


def cgroup(folder: Path, *, limit: str, use: str, stat: str | None = None) -> CgroupFiles:
    files = CgroupFiles(folder / "memory.max", folder / "memory.current", folder / "memory.stat")
    files.limit.write_text(limit)
    files.use.write_text(use)
    if stat is not None:
        files.stat.write_text(stat)
    return files


def test_a_snapshot_is_the_kernels_word(tmp_path: Path) -> None:
    snapshot = MemorySnapshot.take(proc_root=machine(tmp_path), cgroups=())
    assert snapshot == MemorySnapshot(5000 * 1024, 3000 * 1024, 40000 * 1024)
    assert str(snapshot) == "resident 5 MiB (anonymous 3 MiB), available 39 MiB"


@pytest.mark.parametrize(
    ("limit", "use", "available_kib"),
    [
        ("20971520\n", "10485760\n", 10240),
        ("max\n", "10485760\n", 40000),
        ("1\n", "2\n", 0),
        ("99999999999", "0", 40000),
    ],
)
def test_what_a_cgroup_leaves_counts_where_it_is_less(tmp_path: Path, limit: str, use: str, available_kib: int) -> None:
    absent = CgroupFiles(tmp_path / "absent", tmp_path / "absent", tmp_path / "absent")
    groups = (cgroup(tmp_path, limit=limit, use=use), absent)
    snapshot = MemorySnapshot.take(proc_root=machine(tmp_path), cgroups=groups)
    assert snapshot.available_bytes == available_kib * 1024


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_files_that_a_cgroup_caches_are_no_want_of_memory(tmp_path: Path, prefix: str) -> None:
    """A model that was just read lies in the cache, and is charged to who read it."""
    stat = f"active_file 1\n{prefix}anon 5\n{prefix}active_file 2000000\n{prefix}inactive_file 3000000\n"
    group = cgroup(tmp_path, limit="10000000", use="9000000", stat=stat)
    assert group.room_bytes() == 6_000_000


def test_what_the_kernel_does_not_tell_is_unknown(tmp_path: Path) -> None:
    snapshot = MemorySnapshot.take(proc_root=tmp_path, cgroups=())
    assert snapshot == MemorySnapshot(0, 0, None)
    assert "available unknown" in str(snapshot)
    assert not PeakMeter(proc_root=tmp_path).begin()


def test_a_peak_is_seen_though_it_is_over() -> None:
    meter = PeakMeter()
    assert meter.begin(), "this machine's kernel lacks /proc/self/clear_refs"
    # Fresh pages from the kernel: an allocator may hand out memory that earlier tests left resident.
    with mmap.mmap(-1, 64 * MIB) as pages:
        for page in range(0, len(pages), mmap.PAGESIZE):
            pages[page] = 1
    assert 60 * MIB <= meter.grown_bytes() <= 100 * MIB


def test_a_machine_that_has_less_than_was_given_bounds_the_cache_and_is_named() -> None:
    cost = KvCost(cache_bytes=64, scratch_bytes=0)
    budget = MemoryBudget(1000 * MIB, 300 * MIB, 100 * MIB, runtime_bytes=200 * MIB)
    assert dataclasses.replace(budget, available_bytes=250 * MIB).kv_budget_bytes(cost) == 150 * MIB
    assert dataclasses.replace(budget, available_bytes=900 * MIB).kv_budget_bytes(cost) == 400 * MIB
    with pytest.raises(MemoryBudgetError, match=r"90 MiB available - 100 MiB workspace = -10 MiB"):
        dataclasses.replace(budget, available_bytes=90 * MIB).kv_budget_bytes(cost)


WIDE = Shares(kv_heads=((8,),), mlp_columns=((8192,),), vocab_rows=(4000,))
HALF = Shares(kv_heads=((4, 4), (8, 0)), mlp_columns=((4096, 4096),), vocab_rows=(0, 4000))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    save_tiny("llama", folder, intermediate_size=8192, vocab_size=4000, max_position_embeddings=1024)
    return folder


def given(directory: Path, shares: Shares, *, tokens: int, rank: int = 0) -> tuple[LoadRequest, RankGroup]:
    group = RankGroup(directory, shares, max_num_batched_tokens=tokens)
    return group.requests[rank], group


def decoder_of(group: RankGroup, rank: int = 0) -> Decoder:
    shard = group.runners[rank]._model_state.shard
    assert shard is not None
    return shard.decoder


def test_the_largest_step_is_measured(directory: Path) -> None:
    request, group = given(directory, WIDE, tokens=1024)
    measured = measure_workspace(decoder_of(group), request, HostMemoryPool())
    assert measured is not None
    gate_and_up = 1024 * 2 * 8192 * 4
    assert gate_and_up < measured < 6 * gate_and_up
    fewer = measure_workspace(
        decoder_of(group), dataclasses.replace(request, max_num_batched_tokens=64), HostMemoryPool()
    )
    assert fewer is not None
    assert fewer < measured - gate_and_up / 2


def test_the_scratch_of_native_kernels_is_measured_each_time(directory: Path) -> None:
    """A process that loads twice has it already. It stays: the MLP of a layer begins with what that of the layer before
    ended with, beside its own gates, ups, and products of both.
    """
    request, group = given(directory, WIDE, tokens=1024)
    runner = PlanRunner(cpu_backend(), measure=Meter(MIB))
    runner.attach(group.exchanges[0])
    runner.load(dataclasses.replace(request, memory_bytes=1 << 31))
    shard = runner._model_state.shard
    assert shard is not None
    first, second = (measure_workspace(shard.decoder, request, HostMemoryPool()) for _ in range(2))
    assert first is not None
    assert second == pytest.approx(first, rel=0.1)
    assert first > with_margin(4 * 1024 * 8192 * 4)
    sampler = (LOGITS_AT_ONCE - 1) * memory_of(request).logits_bytes(request.shard_plan.ranks[0])
    assert first < with_margin(memory_of(request).workspace_bytes(request.shard_plan.ranks[0]) - sampler) + sampler


def test_a_rank_measures_without_its_peers(directory: Path) -> None:
    request, group = given(directory, HALF, tokens=512, rank=1)
    group.exchanges[0].abort()
    measured = measure_workspace(decoder_of(group, 1), request, HostMemoryPool())
    assert measured is not None
    assert measured > 512 * 2 * 4096 * 4


def test_layers_that_are_alike_are_measured_once(directory: Path) -> None:
    _, group = given(directory, WIDE, tokens=64)
    assert decoder_of(group).shallow().computed_layers == [0]
    _, group = given(directory, HALF, tokens=64)
    assert decoder_of(group).shallow().computed_layers == [0, 1]
    assert decoder_of(group).computed_layers == [0, 1, 2], "the decoder itself goes through all"


def test_scratch_caches_are_of_the_layers_that_are_measured(directory: Path) -> None:
    """A device takes what it gives at once: of all layers of a large model they would be gigabytes."""
    _, group = given(directory, WIDE, tokens=64)
    caches = decoder_of(group).shallow().allocate_caches(num_blocks=2, block_size=1024)
    assert [cache is not None for cache in caches] == [True, False, False]
    assert all(cache is not None for cache in decoder_of(group).allocate_caches(num_blocks=2, block_size=4))


def test_scratch_caches_have_blocks_of_the_usual_size(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device compiles its kernels for a size of blocks: for one as long as the longest sequence, for nothing."""
    request, group = given(directory, WIDE, tokens=64)
    allocated: list[tuple[int, int]] = []
    allocate = Decoder.allocate_caches

    def note(self: Decoder, *, num_blocks: int, block_size: int, **more: Any) -> list[LayerCache | None]:
        allocated.append((num_blocks, block_size))
        return allocate(self, num_blocks=num_blocks, block_size=block_size, **more)

    monkeypatch.setattr(Decoder, "allocate_caches", note)
    measure_workspace(decoder_of(group), dataclasses.replace(request, max_model_len=1000), HostMemoryPool())
    assert allocated == [(1 + 63, 16)]


def test_scratch_caches_that_have_no_room_are_told_as_the_step_is(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, group = given(directory, WIDE, tokens=64)

    def fail(self: Decoder, **more: object) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(Decoder, "allocate_caches", fail)
    with pytest.raises(MemoryBudgetError, match=r"64 tokens in sequences of 1024 .* CUDA out of memory; lower"):
        measure_workspace(decoder_of(group), request, HostMemoryPool())


class Meter:
    """Instead of the measurement: says what it is told, and how often it was asked."""

    def __init__(self, answer: int | None) -> None:
        self.answer = answer
        self.asked: list[LoadRequest] = []

    def __call__(self, decoder: Decoder, request: LoadRequest, pool: MemoryPool) -> int | None:
        self.asked.append(request)
        return self.answer


def budget_with(group: RankGroup, meter: Meter, *changes: dict[str, object]) -> list[int]:
    runner = PlanRunner(cpu_backend(), measure=meter)
    budgets = []
    for change in changes:
        runner.attach(group.exchanges[0])
        request = dataclasses.replace(group.requests[0], memory_bytes=1 << 31, **change)  # type: ignore[arg-type]
        budgets.append(runner.load(request).kv_budget_bytes)
    return budgets


def test_the_measured_workspace_is_what_the_budget_counts_with(directory: Path) -> None:
    _, group = given(directory, WIDE, tokens=64)
    small, large = (budget_with(group, Meter(size * MIB), {})[0] for size in (10, 310))
    share = 256 / (256 + 12)  # the scratch of decoding grows with the cache
    assert small - large == pytest.approx(300 * MIB * share, rel=0.2)


def test_a_measurement_serves_until_bounds_change(directory: Path) -> None:
    _, group = given(directory, WIDE, tokens=64)
    meter = Meter(MIB)
    budget_with(group, meter, {}, {}, {"max_num_seqs": 4}, {"max_num_seqs": 4})
    assert [request.max_num_seqs for request in meter.asked] == [8, 4]


def test_a_cache_of_given_size_needs_no_measurement(directory: Path) -> None:
    _, group = given(directory, WIDE, tokens=64)
    meter = Meter(MIB)
    budget_with(group, meter, {"cache_size_is_given": True})
    assert meter.asked == []


def test_a_largest_step_that_cannot_be_made_is_told_with_its_size(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request, group = given(directory, WIDE, tokens=64)

    def fail(self: Decoder, step: DecoderInput, **more: object) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory\nand more")

    monkeypatch.setattr(Decoder, "hidden", fail)
    with pytest.raises(MemoryBudgetError, match=r"64 tokens in sequences of 1024 .* lower maxNumBatchedTokens"):
        measure_workspace(decoder_of(group), request, HostMemoryPool())
