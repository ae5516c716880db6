"""Groups with graphs give what groups without give, at every size, whatever happens between steps.

GPU ranks are played by the host and graphs by a tape, which replays into the memory that it recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.graphs import graph_forward
from hetero_worker.runners.graphs.graph_forward import SPARE_BYTES
from hetero_worker.runners.shard import graph_memory
from tests.support.joined_experts import JoinedGpu
from tests.support.pseudo_gpu import PseudoGpu
from tests.support.rank_group import PlanBuilder, RankGroup, Shares, StepOutcome
from tests.support.rank_shares import layers_on
from tests.support.static_attention import StaticAttention
from tests.support.tape import TapeBackend
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

BLOCKS, BLOCK_SIZE, MAX_SEQS = 64, 4, 6
SIZES = (1, 2, 4, 6)
TOLERANCE = 5e-5
"""Graphs pad rows, and torch's sums on the host depend on their number; a stale buffer differs by far more."""
ONE_GPU = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
LAYOUTS: dict[str, tuple[Shares, int]] = {
    "1 GPU": (ONE_GPU, 1),
    "2 GPU + 2 CPU, CPU ranks on MLP only": (
        Shares(kv_heads=((5, 3, 0, 0),), mlp_columns=((11, 16, 3, 20),), vocab_rows=(64, 136, 0, 0)),
        2,
    ),
    "2 GPU + 2 CPU, all have heads": (
        Shares(kv_heads=((3, 2, 2, 1),), mlp_columns=((20, 0, 29, 1),), vocab_rows=(64, 0, 64, 72)),
        2,
    ),
    "layers on 2 GPUs and a CPU, the head on the first": (layers_on(0, 1, 2, world_size=3, head=0), 2),
}

EXPERT_LAYOUTS: dict[str, tuple[Shares, int]] = {
    "1 GPU": (ONE_GPU, 1),
    "2 GPU": (Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136), experts=((2, 4),)), 2),
    "2 GPU, experts on one": (
        Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136), experts=((0, 6),)),
        2,
    ),
    "2 GPU + 2 CPU, all have heads and experts": (
        Shares(
            kv_heads=((3, 2, 2, 1),), mlp_columns=((20, 0, 29, 1),), vocab_rows=(64, 0, 64, 72), experts=((1, 2, 2, 1),)
        ),
        2,
    ),
    "1 GPU + 2 CPU, which help with experts": (
        Shares(kv_heads=((8, 0, 0),), mlp_columns=((50, 0, 0),), vocab_rows=(200, 0, 0), experts=((2, 3, 1),)),
        1,
    ),
    "layers on 2 GPUs": (layers_on(0, 1, world_size=2), 2),
}


@dataclass(slots=True)
class Tapes:
    """Makes a backend for each cache, and remembers them."""

    free: tuple[int, ...] = ()
    made: list[TapeBackend] = field(default_factory=list)

    def __call__(self, device: torch.device) -> TapeBackend:
        backend = TapeBackend(device)
        if self.free:
            backend.free = list(self.free)
        self.made.append(backend)
        return backend

    @property
    def replayed(self) -> int:
        return sum(backend.replayed for backend in self.made)

    @property
    def recorded(self) -> int:
        return sum(backend.recorded for backend in self.made)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> TinyCheckpoint:
    return save_tiny("llama-biased", tmp_path_factory.mktemp("llama"), num_hidden_layers=3)


def group_of(
    checkpoint: TinyCheckpoint,
    layout: tuple[Shares, int],
    tapes: Tapes | None,
    *,
    enforce_eager: bool = False,
    make_gpu: type[PseudoGpu] = PseudoGpu,
) -> RankGroup:
    shares, num_gpu_ranks = layout
    return RankGroup(
        checkpoint.directory, shares, num_gpu_ranks=num_gpu_ranks, num_blocks=BLOCKS, block_size=BLOCK_SIZE,
        max_num_seqs=MAX_SEQS, make_graphs=tapes, enforce_eager=enforce_eager, make_gpu=make_gpu,
    )  # fmt: skip


class Script:
    """Steps, and all that they give."""

    def __init__(self, group: RankGroup) -> None:
        self.builder = PlanBuilder(group)
        self.outcomes: list[StepOutcome] = []

    def start(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.builder.start(slot, [(slot * 37 + i * i * 11 + i) % VOCAB_SIZE for i in range(2 + 3 * slot % 7)])
            self.builder.schedule(slot)
        self._run()

    def decode(self, slots: Sequence[int], *, steps: int = 4) -> None:
        """The first step of a size prepares it, the second records it, further ones are replays."""
        for _ in range(steps):
            for slot in slots:
                self.builder.schedule(slot)
            self._run()

    def order(self, command: ranks_pb2.GroupCommand) -> None:
        outputs = self.builder.command(command).outputs
        assert all(output.report is not None and output.report.done for output in outputs)
        self.builder.use_blocks(BLOCKS, BLOCK_SIZE)

    def release(self) -> None:
        for slot in list(self.builder.sequences):
            self.builder.release(slot)

    def _run(self) -> None:
        self.outcomes.append(self.builder.run())


def cache() -> ranks_pb2.AllocateCache:
    return ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)


def all_sizes(group: RankGroup) -> list[StepOutcome]:
    """Every number of sequences, in an order that is not theirs, with a prefill in between, twice."""
    script = Script(group)
    script.start([0, 1, 2])
    script.decode([2, 0, 1])
    script.decode([1], steps=3)
    script.start([3, 4])
    script.decode([4, 3, 2, 1, 0])
    script.decode([0, 3], steps=3)
    script.start([5])
    script.decode([5, 0, 1, 2, 3, 4], steps=2)
    script.decode([0, 2, 4], steps=2)
    script.release()
    script.start([0])
    return script.outcomes


def between_commands(group: RankGroup) -> list[StepOutcome]:
    """The same steps before and after each thing that takes the cache away."""
    script = Script(group)
    reset = ranks_pb2.GroupCommand(reset_cache=cache())
    wake = ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache()))
    sleeps = [ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)) for level in (1, 2)]
    for commands in ([], [reset], *([sleep, wake] for sleep in sleeps)):
        for command in commands:
            script.order(command)
        script.start([0, 1, 2])
        script.decode([0, 1, 2])
        script.release()
    return script.outcomes


def assert_same(graphed: Sequence[StepOutcome], plain: Sequence[StepOutcome]) -> None:
    assert [outcome.sampled for outcome in graphed] == [outcome.sampled for outcome in plain]
    for one, other in zip(graphed, plain, strict=True):
        assert (one.logits - other.logits).abs().max() <= TOLERANCE


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
def test_every_size_gives_what_it_gives_without_graphs(llama: TinyCheckpoint, layout: tuple[Shares, int]) -> None:
    tapes = Tapes()
    group = group_of(llama, layout, tapes)
    graphed = all_sizes(group)
    assert_same(graphed, all_sizes(group_of(llama, layout, None)))
    assert len(tapes.made) == layout[1]
    assert all(tape.recorded and tape.replayed > tape.recorded for tape in tapes.made)
    gpus, cpus = group.reports[: layout[1]], group.reports[layout[1] :]
    assert {tuple(report.graph_sizes) for report in gpus} == {SIZES}
    assert all("graphs=4 sizes up to 6" in report.kernels for report in gpus)
    assert not any(report.graph_sizes for report in cpus)


def test_windows_soft_caps_and_norms_of_sums_are_replayed(tmp_path: Path) -> None:
    gemma = save_tiny("gemma2", tmp_path, num_hidden_layers=2)
    layout = LAYOUTS["2 GPU + 2 CPU, CPU ranks on MLP only"]
    assert_same(all_sizes(group_of(gemma, layout, Tapes())), all_sizes(group_of(gemma, layout, None)))


@pytest.mark.parametrize("name", ["1 GPU", "2 GPU + 2 CPU, CPU ranks on MLP only"])
def test_graphs_go_with_the_cache_and_are_made_anew(llama: TinyCheckpoint, name: str) -> None:
    tapes = Tapes()
    graphed = between_commands(group_of(llama, LAYOUTS[name], tapes))
    assert_same(graphed, between_commands(group_of(llama, LAYOUTS[name], None)))
    assert len(tapes.made) == 4 * LAYOUTS[name][1]
    assert all(tape.recorded and tape.replayed == 2 * tape.recorded for tape in tapes.made)


def test_a_new_epoch_makes_new_graphs(llama: TinyCheckpoint) -> None:
    tapes = Tapes()
    group, plain = (group_of(llama, LAYOUTS["1 GPU"], made) for made in (tapes, None))
    for _ in range(2):
        outcomes = []
        for one in (group, plain):
            script = Script(one)
            script.start([0, 1])
            script.decode([0, 1])
            outcomes.append(script.outcomes)
            one.start()
        assert_same(*outcomes)
    assert len(tapes.made) == 3


def test_attention_whose_launches_are_alike_lies_within_one_graph(
    llama: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = all_sizes(group_of(llama, LAYOUTS["1 GPU"], None))
    monkeypatch.setattr(PseudoGpu, "attention", lambda *_, **__: StaticAttention())
    tapes = Tapes()
    assert_same(all_sizes(group_of(llama, LAYOUTS["1 GPU"], tapes)), plain)
    assert tapes.recorded == len(SIZES)


def told_of_memory(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if record.name == graph_forward.__name__ and "graphs" in record.getMessage()
    ]


def test_without_room_no_more_graphs_are_made_and_steps_go_on(
    llama: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    # Asked around the pass that prepares the first graph, before this is recorded, around that; and so for the second.
    room = [4 * SPARE_BYTES] * 4 + [2 * SPARE_BYTES] * 3 + [SPARE_BYTES]
    tapes = Tapes(free=tuple(room))
    with caplog.at_level("INFO", logger="hetero_worker.runners.graphs"):
        group = group_of(llama, LAYOUTS["1 GPU"], tapes)
        graphed = all_sizes(group)
    assert_same(graphed, all_sizes(group_of(llama, LAYOUTS["1 GPU"], None)))
    (made,) = [record.getMessage() for record in caplog.records if record.getMessage().startswith("graph of")]
    assert made.startswith("graph of 4 rows: 4 segments, 3 calls between them, 512 MiB of memory, recorded in")
    reserved = f"{group.reports[0].graph_reserve_bytes / (1 << 20):,.0f}"
    assert told_of_memory(caplog) == [
        (
            "WARNING",
            f"1 graphs took 512 MiB, and {reserved} MiB are kept for them: what is more is of what "
            "gpuMemoryUtilization leaves over",
        ),
        ("WARNING", "no more graphs are recorded: the device has 256 MiB free; lower gpuMemoryUtilization"),
    ]


def test_what_graphs_took_is_counted_told_beside_what_is_kept_for_them_and_gone_with_them(
    llama: TinyCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    mib, free = 1 << 20, 1 << 40
    # Four graphs: 5 MiB for each one's preparation, 1 for its recording.
    asked, left = list[int](), free
    for _ in SIZES:
        asked += [left, left - 5 * mib, left - 5 * mib, left - 5 * mib, left - 6 * mib]
        left -= 6 * mib
    tapes = Tapes(free=tuple(asked))
    group = group_of(llama, LAYOUTS["1 GPU"], tapes)
    reserved = group.reports[0].graph_reserve_bytes
    assert reserved == graph_memory(group.requests[0], SIZES).total
    assert 0 < tapes.made[0].reserved < reserved
    runner = group.runners[0]
    assert runner.graph_bytes == 0
    with caplog.at_level("INFO", logger="hetero_worker.runners.graphs"):
        script = Script(group)
        for size in SIZES:
            script.start([slot for slot in range(size) if slot not in script.builder.sequences])
            script.decode(range(size), steps=3)
    assert runner.graph_bytes == 24 * mib
    assert told_of_memory(caplog) == [
        ("INFO", f"all 4 graphs took 24 MiB of the {reserved / mib:,.0f} MiB that are kept for them")
    ]
    script.release()
    script.order(ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=1)))
    assert runner.graph_bytes == 0


def test_enforce_eager_makes_none_and_pads_nothing(llama: TinyCheckpoint) -> None:
    tapes = Tapes()
    layout = LAYOUTS["2 GPU + 2 CPU, all have heads"]
    group = group_of(llama, layout, tapes, enforce_eager=True)
    assert_same(all_sizes(group), all_sizes(group_of(llama, layout, None)))
    assert tapes.made == []
    assert all("graphs=off (enforceEager)" in report.kernels for report in group.reports[:2])
    assert not any(report.graph_sizes for report in group.reports)


def test_ranks_whose_experts_are_chosen_on_the_host_make_none(tmp_path: Path) -> None:
    moe = save_tiny("qwen3-moe-some-dense", tmp_path, num_hidden_layers=2)
    group = group_of(moe, (ONE_GPU, 1), Tapes())
    script = Script(group)
    script.start([0, 1])
    script.decode([0, 1])
    assert "graphs=off (the host of a GPU chooses which rows an expert computes)" in group.reports[0].kernels


def test_experts_on_cpu_ranks_leave_the_gpu_its_graphs(tmp_path: Path) -> None:
    moe = save_tiny("qwen3-moe-some-dense", tmp_path, num_hidden_layers=2)
    layout = (Shares(kv_heads=((8, 0, 0),), mlp_columns=((50, 0, 0),), vocab_rows=(200, 0, 0), experts=((0, 4, 2),)), 1)
    tapes = Tapes()
    assert_same(all_sizes(group_of(moe, layout, tapes)), all_sizes(group_of(moe, layout, None)))
    assert tapes.replayed


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS.values(), ids=EXPERT_LAYOUTS)
def test_ranks_with_experts_that_kernels_compute_together_pad_alike(tmp_path: Path, layout: tuple[Shares, int]) -> None:
    moe = save_tiny("qwen3-moe-some-dense", tmp_path, num_hidden_layers=2, initializer_range=0.2)
    tapes, num_gpu_ranks = Tapes(), layout[1]
    group = group_of(moe, layout, tapes, make_gpu=JoinedGpu)
    assert all(tuple(report.graph_sizes) == SIZES for report in group.reports[:num_gpu_ranks])
    assert_same(all_sizes(group), all_sizes(group_of(moe, layout, None)))
    assert all(backend.replayed for backend in tapes.made)
