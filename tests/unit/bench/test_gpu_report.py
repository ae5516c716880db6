"""The GPU bench's pure parts: seats, the cache's size, verdicts and the table."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bench.gpu.ablations import Ablation
from bench.gpu.hetero import Comparison, Way, hardware_of
from bench.gpu.orders import Device, Loaded
from bench.gpu.program import menu_of
from bench.gpu.ranks import seats_on
from bench.gpu.report import Report, Row, ablation_rows, comparison_rows, lines
from bench.gpu.serving import CapacityError, blocks_for
from hetero_api.spec_pools import PoolType
from hetero_api.v1 import ranks_pb2
from hetero_placement.solver import LAYER, MLP_ONLY

pytestmark = pytest.mark.unit

BEGAN = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)


def test_cores_are_dealt_once_and_the_first_is_left_to_the_program() -> None:
    seats = seats_on(range(16), Device.CUDA, cpu_ranks=2, memory_bytes=7)
    assert [seat.cores for seat in seats] == [(1,), tuple(range(2, 9)), tuple(range(9, 16))]
    assert [seat.device for seat in seats] == [Device.CUDA, Device.CPU, Device.CPU]


def test_of_few_cores_ranks_have_one_each_in_turn() -> None:
    seats = seats_on([4, 9], Device.PSEUDO, cpu_ranks=2, memory_bytes=0)
    assert [seat.cores for seat in seats] == [(4,), (9,), (4,)]


def test_a_gpu_rank_alone_has_all_cores_but_the_programs() -> None:
    assert seats_on(range(4), Device.CUDA, cpu_ranks=0, memory_bytes=0)[0].cores == (1, 2, 3)


def test_the_cache_is_as_large_as_the_smallest_holder_allows_or_as_is_needed() -> None:
    helper = Loaded(10, 0, 0, ())
    holders = [Loaded(10, 16 * 100 * 8, 8, ()), Loaded(10, 16 * 40 * 4, 4, ())]
    assert blocks_for([*holders, helper], 10_000) == 40
    assert blocks_for([*holders, helper], 33) == 1 + 3
    with pytest.raises(CapacityError):
        blocks_for([Loaded(10, 16, 1, ())], 10)


def comparison(*ways: Way) -> Comparison:
    return Comparison("8B", 10**10, ways, "because")


def verdicts(found: Comparison) -> dict[str, bool | None]:
    return {row.what.partition(": ")[2]: row.met for row in comparison_rows(found)}


def test_tensor_must_come_true_and_win_where_the_model_says_so() -> None:
    layer = Way(LAYER, 10.0, 10.0)
    good = verdicts(comparison(Way(MLP_ONLY, 15.0, 14.0, chosen=True), layer))
    assert good == {
        MLP_ONLY: True, LAYER: None, "Tensor over Layer": True, "the solver chose the measured best": True,
    }  # fmt: skip
    slow = verdicts(comparison(Way(MLP_ONLY, 15.0, 12.0, chosen=True), layer))
    assert slow[MLP_ONLY] is False
    assert slow["Tensor over Layer"] is False
    assert slow["the solver chose the measured best"]


def test_a_wrong_choice_is_told() -> None:
    found = comparison(Way(MLP_ONLY, 15.0, 9.0), Way(LAYER, 10.0, 8.0, chosen=True))
    assert found.solver_chose_best is False


def test_variants_are_compared_with_all_on() -> None:
    found = [Ablation("all on", {1: 10.0, 8: 40.0}), Ablation("overlap off", {1: 5.0, 8: 30.0})]
    assert [row.share for row in ablation_rows("0.6B", found)] == [1.0, 1.0, 0.5, 0.75]


def test_a_rank_that_refused_its_part_is_named() -> None:
    with pytest.raises(CapacityError, match="rank 1: no memory"):
        blocks_for([Loaded(10, 16, 1, ()), Loaded(0, 0, 0, (), refusal="no memory")], 10)


def test_the_table_lines_up_and_tells_what_was_missed() -> None:
    table = list(lines([("what", "n", ""), ("a", "1,000.0", "ok"), ("bcdef", "1.0", "BELOW TARGET")]))
    assert table == ["what         n", "a      1,000.0  ok", "bcdef      1.0  BELOW TARGET"]


def test_a_report_passes_unless_something_failed_or_a_gpu_missed_a_target(tmp_path: Path) -> None:
    report = Report("a GPU", True, BEGAN, [Row("x", 5.0, 10.0, met=True)])
    assert report.passed
    report.rows.append(Row("y", 1.0, 10.0, met=False))
    assert not report.passed
    assert Report("the host", False, BEGAN, report.rows).passed
    assert not Report("the host", False, BEGAN, failures=["z"]).passed
    path = report.write(tmp_path)
    assert path.name == "gpu-2026-01-02-0304.json"
    written = json.loads(path.read_text())
    assert [written["device"], written["rows"][0]["share"]] == ["a GPU", 0.5]


def test_the_solver_is_told_what_ranks_measured_and_the_cap() -> None:
    seats = seats_on(range(16), Device.CUDA, cpu_ranks=2, memory_bytes=7)
    devices = [ranks_pb2.DeviceSpeeds(memory_bandwidth=float(9 - seat.rank)) for seat in seats]
    times = [0.1, 0.3, 0.2]
    formed = [
        ranks_pb2.Formed(
            host_times=[ranks_pb2.ExchangeTime(bytes=4, seconds=seconds)], costs=ranks_pb2.DeviceSpeeds(lone_gain=2.0)
        )
        for seconds in times
    ]
    hardware = hardware_of(seats, devices, formed, [100, 7, 7])
    assert [rank.kind for rank in hardware.ranks] == [PoolType.GPU, PoolType.CPU, PoolType.CPU]
    assert [rank.memory_bytes for rank in hardware.ranks] == [100, 7, 7]
    assert [rank.speeds.memory_bandwidth for rank in hardware.ranks] == [9.0, 8.0, 7.0]
    assert hardware.ranks[0].speeds.lone_gain == 2.0
    assert hardware.host_exchange.seconds(4) == 0.2


def test_caps_are_such_that_shapes_do_not_fit_them() -> None:
    for capped in menu_of(tiny=False, quick=False).capped:
        assert 2 * capped.config.num_parameters > capped.cap_bytes
    assert not menu_of(tiny=False, quick=True).capped
