"""What a pass that is recorded consists of, and what is made anew in each replay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from hetero_worker.distributed.device_group import DeviceGroup
from hetero_worker.distributed.exchange import LocalExchange
from hetero_worker.distributed.hierarchical import HierarchicalExchange
from hetero_worker.distributed.routes import Link, Ranks
from hetero_worker.distributed.staging import PlainStaging
from hetero_worker.runners.graphs.breaking_exchange import BreakingExchange
from hetero_worker.runners.graphs.breaks import Breaks, CurrentStep
from tests.support.tape import TapeBackend, WaitedForDeviceError
from tests.support.thread_exchange import ThreadExchange, run_ranks, thread_exchanges

pytestmark = pytest.mark.unit

SIZE, WIDTH = 4, 3


def test_a_replay_works_on_the_same_memory_and_makes_calls_anew() -> None:
    backend = TapeBackend()
    breaks = Breaks(backend)
    given, factors = torch.ones(SIZE), iter((10.0, 100.0, 1000.0))

    def make_pass() -> torch.Tensor:
        doubled = given * 2
        breaks.call(lambda: doubled.mul_(next(factors)))
        return doubled + 1

    recorded = breaks.record(make_pass)
    assert recorded.outcome.tolist() == [21.0] * SIZE
    given.fill_(2)
    outcome = recorded.replay()
    assert outcome is recorded.outcome
    assert outcome.tolist() == [401.0] * SIZE
    assert (recorded.num_segments, len(recorded.parts)) == (2, 3)


def test_outside_a_recording_a_call_is_made_and_forgotten() -> None:
    backend = TapeBackend()
    assert Breaks(backend).call(lambda: 5) == 5
    assert backend.recorded == 0


def test_segments_without_work_are_left_out() -> None:
    breaks = Breaks(TapeBackend())
    recorded = breaks.record(lambda: (breaks.call(lambda: 6), breaks.call(lambda: 7)))
    assert (recorded.outcome, recorded.num_segments, len(recorded.parts)) == ((6, 7), 0, 2)


def test_a_pass_that_fails_leaves_nothing_open() -> None:
    breaks = Breaks(TapeBackend())

    def fail() -> None:
        torch.ones(1)
        raise KeyError("no")

    with pytest.raises(KeyError):
        breaks.record(fail)
    with pytest.raises(KeyError):
        breaks.record(lambda: breaks.call(fail))
    assert breaks.record(lambda: torch.ones(1)).outcome.item() == 1.0


def test_the_tape_refuses_to_wait_and_spoils_new_memory() -> None:
    breaks = Breaks(TapeBackend())
    with pytest.raises(WaitedForDeviceError):
        breaks.record(lambda: torch.ones(1).item())
    recorded = breaks.record(lambda: torch.empty(2))
    recorded.outcome.fill_(1)
    assert all(math.isnan(value) for value in recorded.replay().tolist())


def exchange_of(inner: ThreadExchange, breaks: Breaks, step: CurrentStep) -> BreakingExchange:
    return BreakingExchange(inner, breaks, step, records_device_sums=True)


def test_only_the_steps_own_rows_cross_the_host_and_padding_is_zero() -> None:
    exchanges = thread_exchanges(2)
    link = Link(0, 0, (1,))

    def padded(rank: int) -> list[list[float]]:
        breaks, step = Breaks(TapeBackend()), CurrentStep()
        exchange = exchange_of(exchanges[0], breaks, step)
        source = torch.empty(SIZE, WIDTH)

        def make_pass() -> torch.Tensor:
            partial = source + 0
            exchange.among((0, 1)).all_reduce(partial, (0, 1))
            sending = exchange.start_send(partial, link)
            doubled = partial * 2
            sending.finish()
            return doubled

        told = []
        recorded = None
        for num_rows, value in ((2, 1.0), (3, 2.0)):
            step.begin(num_rows, size=SIZE)
            source.fill_(value)
            recorded = breaks.record(make_pass) if recorded is None else recorded
            outcome = recorded.outcome if value == 1.0 else recorded.replay()
            told.append(outcome[:, 0].tolist())
        return told

    def plain(rank: int) -> list[list[float]]:
        told = []
        for num_rows, value in ((2, 10.0), (3, 20.0)):
            tensor = torch.full((num_rows, WIDTH), value)
            exchanges[1].among((0, 1)).all_reduce(tensor, (0, 1))
            told.append(exchanges[1].receive(torch.empty(num_rows, WIDTH), link).wait()[:, 0].tolist())
        return told

    graphed, other = run_ranks(exchanges, lambda rank: (padded, plain)[rank](rank))
    assert other == [[11.0, 11.0], [22.0, 22.0, 22.0]]
    assert graphed == [[22.0, 22.0, 0.0, 0.0], [44.0, 44.0, 44.0, 0.0]]


def test_a_receipt_is_posted_and_awaited_in_every_replay() -> None:
    exchanges = thread_exchanges(2)
    link = Link(0, 0, (1,))

    def receiver(rank: int) -> list[list[float]]:
        breaks, step = Breaks(TapeBackend()), CurrentStep()
        exchange = exchange_of(exchanges[1], breaks, step)
        step.begin(2, size=SIZE)

        def make_pass() -> torch.Tensor:
            pending = exchange.receive(torch.empty(SIZE, WIDTH), link)
            return pending.wait() + 1

        recorded = breaks.record(make_pass)
        first = recorded.outcome[:, 0].tolist()
        step.begin(3, size=SIZE)
        return [first, recorded.replay()[:, 0].tolist()]

    def sender(rank: int) -> list[list[float]]:
        for num_rows, value in ((2, 1.0), (3, 5.0)):
            exchanges[0].send(torch.full((num_rows, WIDTH), value), link)
        return []

    _, received = run_ranks(exchanges, lambda rank: (sender, receiver)[rank](rank))
    assert received == [[2.0, 2.0, 1.0, 1.0], [6.0, 6.0, 6.0, 1.0]]


class DoublingGroup:
    """A DeviceGroup of two whose other rank has the same tensors; its work is operators, which a tape records."""

    ranks: Ranks = (0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        tensor.mul_(2)

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        tensor.mul_(2)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """The other has this one's."""

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor, tensor]

    def abort(self) -> None:
        """Nothing is under way."""

    def close(self) -> None:
        """Nothing is held."""


class MixedHost(LocalExchange):
    """The host's end of a group of two GPU ranks and a CPU rank that adds nothing."""

    world_size = 3

    def among(self, ranks: tuple[int, ...]) -> MixedHost:
        return self


@pytest.mark.parametrize(
    ("ranks", "records_sums", "segments"), [((0, 1), True, 1), ((0, 1), False, 2), ((0, 1, 2), True, 2)]
)
def test_sums_among_gpus_lie_within_a_segment_where_the_backend_records_them(
    ranks: Ranks, records_sums: bool, segments: int
) -> None:
    group: DeviceGroup = DoublingGroup()
    inner = HierarchicalExchange(MixedHost(), num_gpu_ranks=2, groups={(0, 1): group}, links={}, staging=PlainStaging())
    breaks, step = Breaks(TapeBackend()), CurrentStep()
    exchange = BreakingExchange(inner, breaks, step, records_device_sums=records_sums)
    step.begin(SIZE, size=SIZE)
    source = torch.ones(SIZE, WIDTH)

    def make_pass() -> torch.Tensor:
        partial = source + 1
        exchange.among(ranks).all_reduce(partial, contributors_of(ranks))
        return partial * 10

    recorded = breaks.record(make_pass)
    source.fill_(2)
    assert recorded.num_segments == segments
    assert recorded.replay().tolist() == [[60.0] * WIDTH] * SIZE


def contributors_of(ranks: Ranks) -> Sequence[int]:
    return ranks[:2]


def test_a_tensor_of_another_number_of_rows_is_refused() -> None:
    step = CurrentStep()
    step.begin(2, size=SIZE)
    with pytest.raises(ValueError, match="none of a step that is padded to 4"):
        step.own_rows(torch.zeros(2, WIDTH))
