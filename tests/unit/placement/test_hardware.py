"""Speeds from protos, levelled ranks, exchange times between measured sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_api.spec_pools import PoolType
from hetero_api.v1 import ranks_pb2
from hetero_placement.hardware import CostPoint, ExchangeSpeeds, Part, RankHardware, Speeds
from tests.unit.placement.placement_setup import cpu, gpu, group

pytestmark = pytest.mark.unit


def test_a_rank_is_read_as_it_told_itself_at_hello() -> None:
    report = ranks_pb2.DeviceReport(
        kind=ranks_pb2.DEVICE_KIND_CUDA,
        memory_bytes=10**10,
        speeds=ranks_pb2.DeviceSpeeds(
            memory_bandwidth=1e12,
            matmul=[ranks_pb2.MatmulRate(dtype="bfloat16", flops=1e14)],
            costs=[
                ranks_pb2.PartCost(part=ranks_pb2.MODEL_PART_MLP, rows=4, fixed_s=1e-6, unit_s=2e-6),
                ranks_pb2.PartCost(part=ranks_pb2.MODEL_PART_UNSPECIFIED, rows=4),
            ],
            costs_dtype="bfloat16",
            to_device_bandwidth=2e10,
            from_device_bandwidth=3e10,
            device_latency_s=1e-5,
        ),
    )
    expected = Speeds(
        memory_bandwidth=1e12,
        flops={"bfloat16": 1e14},
        costs=(CostPoint(Part.MLP, 4, 0, 1e-6, 2e-6),),
        costs_dtype="bfloat16",
        to_device_bandwidth=2e10,
        from_device_bandwidth=3e10,
        device_latency_s=1e-5,
    )
    rank = RankHardware.from_report(report, host="a", pool="fast", cores=2)
    assert rank == RankHardware(PoolType.GPU, "a", 10**10, expected, "fast", 2)
    formed = ranks_pb2.Formed(runtime_bytes=700, gather_bytes=30, weight_bits=[8, 4])
    needy = RankHardware.from_report(report, host="a", pool="fast", cores=2, formed=formed, gpu_share=0.5)
    told = replace(rank, memory_bytes=5 * 10**9, runtime_bytes=700, gather_bytes=30, weight_bits=frozenset({8, 4}))
    assert needy == told


def test_ranks_of_one_pool_become_equal_so_that_noise_makes_no_uneven_plans() -> None:
    alike = (cpu(9e9, memory=3), cpu(10e9, memory=2), replace(cpu(14e9, memory=4), runtime_bytes=7, gather_bytes=5))
    noisy = group(*alike, cpu(5e9, pool="other"))
    even = noisy.levelled()
    assert [rank.speeds.memory_bandwidth for rank in even.ranks] == [10e9, 10e9, 10e9, 5e9]
    assert [rank.memory_bytes for rank in even.ranks][:3] == [2, 2, 2]
    assert [(rank.runtime_bytes, rank.gather_bytes) for rank in even.ranks] == [(7, 5)] * 3 + [(0, 0)]
    assert noisy.classes() == ((0, 1, 2), (3,))


def test_ranks_with_other_cores_are_not_alike() -> None:
    assert group(cpu(1e9), replace(cpu(2e9), cores=4)).classes() == ((0,), (1,))


def test_measured_costs_are_levelled_point_by_point_where_all_have_them() -> None:
    def rank(seconds: float, *more: CostPoint) -> RankHardware:
        return cpu(1e9, costs=(CostPoint(Part.MLP, 1, 0, 0.0, seconds), *more))

    level = group(rank(1.0), rank(3.0), rank(2.0, CostPoint(Part.MLP, 8, 0, 0.0, 9.0))).levelled()
    assert level.ranks[0].speeds.costs == (CostPoint(Part.MLP, 1, 0, 0.0, 2.0),)


def test_gpu_ranks_are_counted() -> None:
    assert group(gpu(1e12), gpu(1e12), cpu(1e9)).num_gpu_ranks == 2


@pytest.mark.parametrize(
    ("num_bytes", "seconds"), [(0, 1.0), (100, 1.0), (150, 1.5), (200, 2.0), (300, 5.0), (400, 8.0), (100.5, 1.005)]
)
def test_exchange_times_lie_on_lines_between_measured_sizes_and_go_on_beyond(num_bytes: float, seconds: float) -> None:
    exchange = ExchangeSpeeds(((100, 1.0), (200, 2.0), (300, 5.0)))
    assert exchange.seconds(num_bytes) == pytest.approx(seconds)


def test_noise_does_not_let_larger_exchanges_become_free() -> None:
    assert ExchangeSpeeds(((100, 2.0), (200, 1.0))).seconds(10**9) == 1.0


def test_one_number_holds_for_all_sizes_and_none_at_all_is_free() -> None:
    assert ExchangeSpeeds.of_rates(60e-6).seconds(10**9) == 60e-6
    assert ExchangeSpeeds().seconds(10**9) == 0.0
    assert ExchangeSpeeds.of_rates(1e-6, 1e9).seconds(10**9) == pytest.approx(1.000001)


def test_times_of_a_group_are_sorted_by_size() -> None:
    times = [ranks_pb2.ExchangeTime(bytes=200, seconds=2.0), ranks_pb2.ExchangeTime(bytes=100, seconds=1.0)]
    assert ExchangeSpeeds.from_protos(times).points == ((100, 1.0), (200, 2.0))
