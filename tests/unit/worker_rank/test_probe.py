"""What a rank measures of itself: sizes, lines through times, and the costs of a tiny model's parts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.distributed.coordinator import Round
from hetero_worker.layers.linear_kernels import PlainKernel
from hetero_worker.probe.costs import Series, step_shapes
from hetero_worker.probe.layers import TimedWork
from hetero_worker.probe.sizes import LayerSize, probe_size, whole_layer
from hetero_worker.probe.speeds import RankProbe, measure_speeds
from hetero_worker.probe.timing import Laps, Point, Work, line
from hetero_worker.process.tuning_cache import TuningCache
from hetero_worker.runners.base import WorkProgress
from tests.support.lone_group import LoneGroup
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

MLP = ranks_pb2.MODEL_PART_MLP
ATTENTION = ranks_pb2.MODEL_PART_ATTENTION_DECODE


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A team of threads on a busy machine waits for the slowest of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def config_of(variant: str, folder: Path) -> ModelConfig:
    return ModelConfig.from_directory(save_tiny(variant, folder).directory)


@pytest.mark.parametrize(
    ("times", "fixed_and_unit"),
    [
        ([(2, 5.0), (4, 9.0)], (1.0, 2.0)),
        ([(2, 5.0), (3, 0.0), (4, 9.0)], (1.0, 2.0)),
        ([(2, 9.0), (4, 5.0)], (5.0, 0.0)),
        ([(2, 1.0), (4, 8.0)], (0.0, 2.0)),
        ([(4, 8.0)], (0.0, 2.0)),
        ([(0, 3.0)], (3.0, 0.0)),
    ],
    ids=["a line", "ends only", "falls: noise", "below the origin: noise", "one number of units", "no units"],
)
def test_a_line_through_times_is_never_negative(
    times: list[tuple[int, float]], fixed_and_unit: tuple[float, float]
) -> None:
    assert line(times) == fixed_and_unit


def test_the_mean_counts_and_nothing_for_more_than_twice_the_median() -> None:
    laps = Laps()
    for seconds in (4.0, 90.0, 4.0, 4.0, 4.0):
        laps.add(Point(MLP, 8), 2, seconds)
    for seconds in (8.6, 9.6, 10.6):
        laps.add(Point(MLP, 8), 4, seconds)
    laps.add(Point(MLP, 1), 2, 1.0)
    [at_8, at_1] = laps.costs()
    assert (at_8.part, at_8.rows, at_8.fixed_s) == (MLP, 8, 0.0)
    assert at_8.unit_s == pytest.approx(2.4)
    assert (at_1.rows, at_1.unit_s) == (1, 0.5)
    assert laps.typical(Point(MLP, 8), 2) == pytest.approx(4.8)


class PlayedClock:
    """Laps take as long as their works say."""

    def __init__(self) -> None:
        self.lap_s = 1e-3
        self.done: list[object] = []

    def laps(self, works: Sequence[Work]) -> list[float]:
        self.done += [work() for work in works]
        return [self.lap_s] * len(works)


def halves(copies: int) -> list[TimedWork]:
    return [
        TimedWork(Point(part, 1), units, partial(int, number))
        for number in range(copies)
        for part, units in ((MLP, 2), (ATTENTION, 3))
    ]


def test_a_visit_goes_on_where_the_last_one_ended_and_the_first_only_warms_up() -> None:
    clock, laps = PlayedClock(), Laps()
    series = Series(halves(copies=7), turn=2)
    clock.lap_s = 100.0
    series.visit(clock, laps)
    assert (clock.done, laps.costs()) == ([0, 0], ())
    series = Series(halves(copies=7), turn=2)
    clock.lap_s, clock.done = 1e-3, []
    for _ in range(3):
        series.visit(clock, laps)
    copies = [clock.done[i] for i in range(0, len(clock.done), 2)]
    assert copies == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]  # one, then as many as 10 ms hold: five
    attention, mlp = sorted(laps.costs(), key=lambda cost: cost.part)
    assert (mlp.part, attention.part) == (MLP, ATTENTION)
    assert mlp.unit_s == pytest.approx(5e-4)


def test_what_takes_long_is_visited_twice_after_warming_up_and_no_more() -> None:
    clock, laps = PlayedClock(), Laps()
    clock.lap_s = 5.0
    series = Series(halves(copies=4), turn=2)
    for _ in range(9):
        series.visit(clock, laps)
    assert clock.done == [0, 0, 1, 1, 2, 2]


def test_a_clock_tells_each_lap_apart() -> None:
    order: list[int] = []

    def work(number: int) -> Work:
        return lambda: order.append(sum(range(number * 10_000)) and number)

    laps = TorchReference().laps([work(1), work(40)])
    assert order == [1, 40]
    assert 0 < laps[0] < laps[1]


def test_a_small_model_is_built_whole_and_a_large_one_in_part(tmp_path: Path) -> None:
    config = config_of("llama", tmp_path)
    small = dataclasses.replace(config, intermediate_size=128)
    size = probe_size(small, 4)
    assert size.many == whole_layer(small) == LayerSize(heads=8, mlp=2, experts=0)
    assert (size.few, size.copies_of_many) == (LayerSize(4, 1, 0), config.num_layers)
    large = dataclasses.replace(config, hidden_size=8192, intermediate_size=28672, head_dim=128, num_layers=80)
    size = probe_size(large, 4, weight_bytes := 1 << 28)
    assert 1 < size.many.mlp < whole_layer(large).mlp
    assert size.many.heads > size.few.heads > 0
    total = size.copies_of_many * size.many.bytes(large, element_bytes=4)
    total += size.copies_of_few * size.few.bytes(large, element_bytes=4)
    total += int(1.5 * size.head * 64 * large.hidden_size * 4)
    assert weight_bytes // 4 < total <= weight_bytes
    assert size.copies_of_many >= 1
    wide = dataclasses.replace(large, num_heads=64)
    assert probe_size(wide, 4, weight_bytes).many.heads == 2, "a line needs two numbers of units"


def test_steps_are_no_longer_than_the_model_allows() -> None:
    assert max(rows for rows, context in step_shapes(100) if not context) == 100
    assert {context for _, context in step_shapes(100)} == {0, 64, 100}
    assert {context for _, context in step_shapes(40)} == {0, 40}


VARIANTS = ("llama", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3-moe-some-dense", "llama-biased", "gemma4-moe")


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_part_of_a_model_is_measured_at_every_step(variant: str, tmp_path: Path) -> None:
    config = config_of(variant, tmp_path)
    backend = cpu_backend(memory_bytes=1 << 28, read_bytes=1 << 20)
    speeds = measure_speeds(backend, config, peers=LoneGroup(), kernel=PlainKernel())
    assert (speeds.costs_dtype, speeds.memory_bandwidth > 0) == ("float32", True)
    assert {rate.dtype for rate in speeds.matmul} == backend.measured_dtypes
    seen = {(cost.part, cost.rows, cost.context) for cost in speeds.costs}
    assert len(seen) == len(speeds.costs)
    shapes = list(step_shapes(config.max_position))
    has_dense = len(config.expert_layers) < config.num_layers and config.intermediate_size >= 64
    for rows, context in shapes:
        attention = ranks_pb2.MODEL_PART_ATTENTION_DECODE if context else ranks_pb2.MODEL_PART_ATTENTION_PREFILL
        assert (attention, rows, context) in seen
        assert ((MLP, rows, 0) in seen) == has_dense
        assert ((ranks_pb2.MODEL_PART_EXPERTS, rows, 0) in seen) == bool(config.expert_layers)
        assert ((ranks_pb2.MODEL_PART_HEAD, rows, 0) in seen) == bool(context)
        assert (ranks_pb2.MODEL_PART_STEP, rows, 0) in seen
    for cost in speeds.costs:
        assert 0 < cost.fixed_s + cost.unit_s < math.inf


def test_another_type_is_measured_when_it_is_asked_for(tmp_path: Path) -> None:
    platform = cpu_backend(memory_bytes=1 << 28, read_bytes=1 << 20)
    assert platform.default_dtype == "float32"
    config = config_of("llama", tmp_path)
    assert measure_speeds(platform, config, peers=LoneGroup(), dtype="bfloat16").costs_dtype == "bfloat16"


class PlayedPeers(LoneGroup):
    """Peers that come to every meeting, all of whose rounds take the same."""

    num_ranks = 2
    gain = 100.0
    """How much faster a rank is alone: far more than a busy machine can make of it by chance."""

    def __init__(self, *, others_can: bool = True, round_s: float = 0.0) -> None:
        super().__init__()
        self.others_can = others_can
        self.round_s = round_s
        self.meetings = 0
        self.rounds = 0

    def meet(self) -> None:
        self.meetings += 1

    def in_turn(self, work: Callable[[], float]) -> float:
        return work() / self.gain

    def all_can(self, can: bool) -> bool:
        return can and self.others_can

    def host_round(self) -> Round | None:
        return self._round if self.round_s else None

    def _round(self, row: torch.Tensor) -> None:
        assert row.shape[0] == 1
        self.rounds += 1
        time.sleep(self.round_s)


SMALL = cpu_backend(memory_bytes=1 << 28, read_bytes=1 << 20)


def test_meetings_and_being_alone_are_measured(tmp_path: Path) -> None:
    peers = PlayedPeers(round_s=5e-3)
    speeds = measure_speeds(SMALL, config_of("llama", tmp_path), peers=peers, kernel=PlainKernel())
    assert 4e-3 < speeds.meeting_s < 0.5
    assert peers.gain / 10 < speeds.lone_gain < peers.gain * 10
    alone = measure_speeds(SMALL, config_of("llama", tmp_path), peers=LoneGroup(), kernel=PlainKernel())
    assert (alone.meeting_s, alone.lone_gain) == (0.0, 1.0)


def test_all_ranks_meet_as_often_whatever_they_measure(tmp_path: Path) -> None:
    """Or else they would wait for one another for ever."""
    seen = set()
    for memory in (1 << 24, 1 << 28):
        peers = PlayedPeers(round_s=1e-6)
        platform = cpu_backend(memory_bytes=memory, read_bytes=1 << 20)
        measure_speeds(platform, config_of("llama", tmp_path), peers=peers, kernel=PlainKernel())
        seen.add((peers.meetings, peers.rounds))
    assert len(seen) == 1


def test_measuring_tells_how_far_it_has_come(tmp_path: Path) -> None:
    progress = WorkProgress()
    seen: list[ranks_pb2.Progress | None] = []

    class Watching(PlayedPeers):
        """Peers that look at the progress at each meeting."""

        def meet(self) -> None:
            super().meet()
            seen.append(progress.message())

    probe = RankProbe(SMALL, TuningCache(tmp_path / "measured", circumstances={}), model="m", progress=progress)
    probe.costs("float32", config_of("llama", tmp_path / "model"), Watching())
    visits = [now.done for now in seen if now is not None]
    assert visits == list(range(len(visits)))
    assert {(now.work, now.total) for now in seen if now is not None} == {("measuring", len(visits))}
    assert progress.message() is None


def test_what_is_kept_counts_only_where_all_ranks_have_it(tmp_path: Path) -> None:
    kept = TuningCache(tmp_path / "measured", circumstances={})
    config = config_of("llama", tmp_path / "model")
    probe = RankProbe(SMALL, kept, model="m")
    first = probe.costs("float32", config, PlayedPeers())
    assert first.memory_bandwidth > first.lone_memory_bandwidth > 0, "bandwidths are kept with the parts"
    assert probe.costs("float32", config, PlayedPeers()) == first
    anew = probe.costs("float32", config, PlayedPeers(others_can=False))
    assert anew != first
    assert probe.costs("float32", config, PlayedPeers()) == anew
    assert probe.costs("float32", config.quantized("int4"), PlayedPeers()) != anew, "other weights are measured apart"
