"""What a GPU rank's copies wait for, and what not: on a played device, which does everything as late as it may."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.exchange import HostExchange
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.native_exchange import LINK_DEPTH
from hetero_worker.distributed.routes import HelperLinks, Link, Routes
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_segment import ShmSegment
from hetero_worker.distributed.staging import PlainStaging, Staging, StreamStaging, direct_links
from hetero_worker.memory.streams import PAST, Way
from hetero_worker.models.lending import SLICE_ROWS, Lending
from tests.support.played_device import PlayedDevice
from tests.support.shm_threads import PAGE
from tests.support.shm_threads import exchanges as of_a_segment
from tests.support.thread_exchange import run_ranks, thread_exchanges

pytestmark = pytest.mark.unit

LEND = Link(0, 0, (1, 2))
RETURNS = (Link(1, 1, (0,)), Link(2, 2, (0,)))
ROUTES = Routes(links=(LEND, *RETURNS))
FLOATS = PAGE // 4
"""Of one message."""


def staging_of(device: PlayedDevice) -> StreamStaging:
    return StreamStaging(device)


def on_gpu(host: HostExchange, staging: Staging) -> HierarchicalExchange:
    """The end of rank 0, the only GPU rank."""
    return HierarchicalExchange(
        host, num_gpu_ranks=1, groups={}, links={}, staging=staging, host_links=direct_links(host, staging)
    )


@contextmanager
def group(folder: Path, device: PlayedDevice) -> Iterator[tuple[HierarchicalExchange, ShmExchange, ShmExchange]]:
    """A GPU rank and two CPU ranks that share memory."""
    with of_a_segment(folder, 3, routes=ROUTES) as ranks:
        yield on_gpu(ranks[0], staging_of(device)), ranks[1], ranks[2]


def test_a_copy_off_the_device_comes_after_what_was_asked_before_and_waits_for_nothing_else() -> None:
    device = PlayedDevice(computes_at_once=False)
    staging, tensor = staging_of(device), torch.zeros(5)
    computed = device.compute(lambda: tensor.fill_(1.0))
    pending = staging.start_to_host(tensor)
    later = device.compute(lambda: None)
    assert not computed.is_done
    assert not pending.is_here

    assert pending.wait().tolist() == [1.0] * 5
    assert pending.is_here
    assert not later.is_done
    assert pending.wait() is device.buffers[0]


def test_a_copy_onto_the_device_waits_for_its_targets_last_use_and_not_for_what_came_since() -> None:
    device = PlayedDevice(computes_at_once=False)
    staging, out, seen = staging_of(device), torch.zeros(4), list[float]()
    last_use = device.compute(lambda: seen.append(out.sum().item()))
    posted = staging.now()
    own_part = device.compute(lambda: None)
    host = staging.host_buffer(out).fill_(2.0)
    moment = staging.read_parts([host.view(torch.uint8)], out, after=posted)
    use = device.compute(lambda: seen.append(out.sum().item()))

    moment.wait()
    assert (last_use.is_done, own_part.is_done, out.tolist()) == (True, False, [2.0] * 4)
    use.wait()
    assert seen == [0.0, 8.0]


def test_by_default_a_copy_onto_the_device_waits_for_all_that_was_asked() -> None:
    device = PlayedDevice(computes_at_once=False)
    staging, out = staging_of(device), torch.zeros(4)
    before = device.compute(lambda: out.fill_(7.0))
    staging.to_device(staging.host_buffer(out).fill_(3.0), out)
    device.compute(lambda: None).wait()
    assert before.is_done
    assert out.tolist() == [3.0] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plain", [True, False], ids=["host", "device"])
def test_tensors_are_cut_to_parts_and_put_together_again(dtype: torch.dtype, plain: bool) -> None:
    staging: Staging = PlainStaging() if plain else staging_of(device := PlayedDevice())
    tensor = torch.arange(30).to(dtype).view(5, 6)
    buffer = torch.empty(tensor.nbytes, dtype=torch.uint8)
    if not plain:
        device.buffers.append(buffer)
    parts = [buffer[:7], buffer[7:]]
    staging.write_parts(tensor, parts).wait()
    assert torch.equal(buffer.view(dtype).view(5, 6), tensor)
    back = torch.empty_like(tensor)
    staging.read_parts(parts, back, after=staging.now()).wait()
    assert torch.equal(back, tensor)
    with pytest.raises(ValueError, match="do not hold a tensor"):
        staging.write_parts(tensor, parts[:1])


def test_a_device_cannot_wait_for_another_ones_moments() -> None:
    from hetero_worker.backends.cuda.streams import _event

    with pytest.raises(TypeError, match="cannot wait for a Past"):
        _event(PAST)


def test_all_slices_leave_and_may_come_back_before_the_leaders_own_part() -> None:
    """Whatever the host's exchange: the own part is what the device was asked for last but the adds."""
    device, exchanges = PlayedDevice(), thread_exchanges(3, link_bytes=2 * SLICE_ROWS * 4 * 4)
    rows = torch.randn(5 * SLICE_ROWS, 4)
    asked_before_own: list[int] = []

    def own(lent: torch.Tensor) -> torch.Tensor:
        asked_before_own.append(len(device.asked))
        return 2 * lent

    def body(rank: int) -> torch.Tensor:
        if rank:
            Lending(HelperLinks(LEND, RETURNS), exchanges[rank]).help(torch.empty_like(rows), lambda lent: rank * lent)
            return rows
        return Lending(HelperLinks(LEND, RETURNS), on_gpu(exchanges[0], staging_of(device)), at_once=True).sum(
            rows, own
        )

    total = run_ranks(exchanges, body)[0]

    assert torch.allclose(total, 5 * rows)
    (own_at,) = asked_before_own
    assert len(device.on(Way.OUT)) == 5
    assert all(copy.number < own_at for copy in device.on(Way.OUT))
    assert len(device.on(Way.IN)) == 10
    assert all(moment.number < own_at for copy in device.on(Way.IN) for moment in copy.after[-1:])


def test_sums_of_gpu_and_cpu_ranks_overlap_their_slices_and_use_pinned_memory_only(tmp_path: Path) -> None:
    device = PlayedDevice()
    tensors = [torch.randn(300_000) for _ in range(3)]  # three slices
    with of_a_segment(tmp_path, 3) as ranks, ThreadPoolExecutor(3) as pool:
        ends = [on_gpu(ranks[0], staging_of(device)), *(HierarchicalExchange(
            rank, num_gpu_ranks=1, groups={}, links={}, staging=PlainStaging()) for rank in ranks[1:])]  # fmt: skip
        expected = tensors[0] + tensors[1] + tensors[2]
        list(pool.map(lambda r: ends[r].among((0, 1, 2)).all_reduce(tensors[r], (0, 1, 2)), range(3)))
    assert all(torch.equal(tensor, expected) for tensor in tensors)
    out, back = device.on(Way.OUT), device.on(Way.IN)
    assert (len(out), len(back)) == (3, 3)
    assert max(copy.number for copy in out) < min(copy.number for copy in back)


def echo(folder: Path, device: PlayedDevice, sizes: list[int]) -> list[torch.Tensor]:
    """The GPU rank lends tensors, rank 1 returns them doubled and rank 2 tripled; what came back, of both, in order."""
    with group(folder, device) as (leader, *helpers):
        return echo_among(leader, helpers, sizes)


def echo_among(leader: HierarchicalExchange, helpers: Sequence[HostExchange], sizes: list[int]) -> list[torch.Tensor]:
    """`echo` over a group that stands."""

    def lead(exchange: HierarchicalExchange) -> list[torch.Tensor]:
        came: list[torch.Tensor] = []
        for number, size in enumerate(sizes):
            send = exchange.start_send(torch.full((size,), float(number + 1)), LEND)
            pending = [exchange.receive(torch.full((size,), -1.0), link) for link in RETURNS]
            send.finish()
            came += [receipt.wait().clone() for receipt in pending]
        return came

    def help_with(exchange: HostExchange) -> None:
        for size in sizes:
            lent = exchange.receive(torch.empty(size), LEND).wait()
            exchange.send((exchange.rank + 1) * lent, RETURNS[exchange.rank - 1])

    with ThreadPoolExecutor(3) as pool:
        leading = pool.submit(lead, leader)
        for helping in [pool.submit(help_with, helper) for helper in helpers]:
            helping.result()
        return leading.result()


SIZES = [0, 1, FLOATS, FLOATS + 1, 3 * FLOATS, 7, LINK_DEPTH * FLOATS, 2 * LINK_DEPTH * FLOATS + 5, 11] * 2


def check_echo(came: list[torch.Tensor], sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        for factor, tensor in zip((2, 3), came[2 * number : 2 * number + 2], strict=True):
            assert tensor.tolist() == [factor * (number + 1.0)] * size


def test_tensors_of_any_length_go_straight_to_shared_memory_and_back(tmp_path: Path) -> None:
    device = PlayedDevice()
    check_echo(echo(tmp_path, device, SIZES), SIZES)
    too_long = [size for size in SIZES if size > LINK_DEPTH * FLOATS]
    assert len(device.buffers) <= len(too_long) + 2  # a tensor that the link cannot hold, or that found no room
    assert len(device.unpinned) == 1
    assert not device.pins


def test_memory_that_cannot_be_pinned_is_told_once_and_pinned_buffers_serve(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = PlayedDevice(refusal="out of memory")
    with caplog.at_level(logging.INFO):
        check_echo(echo(tmp_path, device, SIZES), SIZES)
    assert len(device.buffers) == 3 * sum(size > 0 for size in SIZES)
    assert not device.unpinned
    assert sum("cannot be pinned: out of memory" in record.getMessage() for record in caplog.records) == 1


def test_where_ranks_share_no_memory_pinned_buffers_serve() -> None:
    device, (leader, *helpers) = PlayedDevice(), thread_exchanges(3)
    check_echo(echo_among(on_gpu(leader, staging_of(device)), helpers, SIZES[:5]), SIZES[:5])
    assert not device.pins
    assert not device.unpinned


def test_tensors_that_find_no_room_go_through_a_buffer_in_their_turn(tmp_path: Path) -> None:
    device, count = PlayedDevice(), LINK_DEPTH + 3

    def received(exchange: ShmExchange) -> list[float]:
        return [exchange.receive(torch.empty(9), LEND).wait().mean().item() for _ in range(count)]

    with group(tmp_path, device) as (leader, *helpers), ThreadPoolExecutor(2) as pool:
        sends = [leader.start_send(torch.full((9,), float(i)), LEND) for i in range(count)]
        assert len(device.buffers) == 3
        receiving = [pool.submit(received, helper) for helper in helpers]
        for send in sends:
            send.finish()
        assert [future.result() for future in receiving] == [[float(i) for i in range(count)]] * 2
        assert (leader.host.traffic.messages, leader.host.traffic.published_bytes) == (count, count * 36)


def test_what_the_device_still_reads_is_not_overwritten(tmp_path: Path) -> None:
    """The played device reads when it is made to, which is when its areas are to be given back."""
    device, outs = PlayedDevice(computes_at_once=False), [torch.zeros(FLOATS) for _ in range(3 * LINK_DEPTH)]

    def send_all(exchange: ShmExchange) -> None:
        for i in range(len(outs)):
            exchange.send(torch.full((FLOATS,), float(i)), RETURNS[0])

    with group(tmp_path, device) as (leader, helper, _), ThreadPoolExecutor(1) as pool:
        pending = [leader.receive(out, RETURNS[0]) for out in outs]
        sending = pool.submit(send_all, helper)
        for receipt in pending:
            receipt.wait()
        sending.result()
        device.now().wait()
    assert [set(out.tolist()) for out in outs] == [{float(i)} for i in range(len(outs))]


def test_a_source_that_needs_what_is_held_gets_it_when_its_receiver_waits_for_something_else(tmp_path: Path) -> None:
    device, held = PlayedDevice(computes_at_once=False), 4 * FLOATS
    with group(tmp_path, device) as (leader, helper, other), ThreadPoolExecutor(1) as pool:
        assert other.rank == 2
        helper.send(torch.ones(held), RETURNS[0])
        leader.receive(torch.zeros(held), RETURNS[0]).wait()

        def fill_up_and_answer() -> None:
            helper.send(torch.ones(LINK_DEPTH * FLOATS), RETURNS[0])  # more than is free
            helper.among((0, 1, 2)).all_reduce(torch.ones(1), (1,))

        answering = pool.submit(fill_up_and_answer)
        told = torch.zeros(1)
        with ThreadPoolExecutor(1) as third:
            third.submit(other.among((0, 1, 2)).all_reduce, torch.zeros(1), (1,))
            leader.host.among((0, 1, 2)).all_reduce(told, (1,))
        answering.result()
        assert told.item() == 1.0


def test_receipts_are_waited_for_in_turn(tmp_path: Path) -> None:
    with group(tmp_path, PlayedDevice()) as (leader, *_):
        leader.receive(torch.zeros(3), RETURNS[0])
        second = leader.receive(torch.zeros(3), RETURNS[0])
        with pytest.raises(ValueError, match="in the order in which they were posted"):
            second.wait()


def test_a_rank_leaves_before_its_memory_is_unpinned_and_only_once_no_copy_is_under_way(tmp_path: Path) -> None:
    device = PlayedDevice(computes_at_once=False)
    with group(tmp_path, device) as (leader, *_):
        leader.start_send(torch.ones(5), LEND)
        assert len(device.pins) == 1
        assert not device.on(Way.OUT)[0].is_done
    assert device.on(Way.OUT)[0].is_done
    assert len(device.unpinned) == 1


def test_a_segment_is_pinned_whole(tmp_path: Path) -> None:
    from hetero_worker.distributed.shm_segment import SegmentLayout

    device, layout = PlayedDevice(), SegmentLayout(1, PAGE)
    segment = ShmSegment.create("segment", layout, folder=tmp_path)
    assert segment.pin(device) == ""
    assert list(device.pins.values()) == [layout.total_bytes]
    segment.leave()
    assert not device.pins
