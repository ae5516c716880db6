"""What rank processes do in the tests of groups with (pseudo-)GPU ranks; each body runs in a process of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.coordinator import GroupCoordinator
from hetero_worker.distributed.device_group import TorchDeviceGroup
from hetero_worker.distributed.exchange import NO_TRAFFIC, Exchange, Traffic
from hetero_worker.distributed.groups import HostGroups
from hetero_worker.distributed.hierarchical import STAGED_BYTES, HierarchicalExchange
from hetero_worker.distributed.routes import Link, Ranks, Routes, device_part, helper_links, host_part, is_device_link
from hetero_worker.errors import ExchangeAborted, ExchangeError
from hetero_worker.models.lending import Lending
from tests.support.rank_processes import FormedGroup, RankContext
from tests.support.rank_shares import Shares
from tests.support.stages import BLOCK_SIZE, NUM_BLOCKS, KnownSequence, load_decoder, step_of

GLOO = ranks_pb2.EXCHANGE_KIND_GLOO
SHM = ranks_pb2.EXCHANGE_KIND_SHM
TCP = ranks_pb2.EXCHANGE_KIND_TCP
SIZES = (0, 1, 577, STAGED_BYTES // 4 + 3)
"""Elements; the last crosses the host in two slices."""


def coordinate(ranks: RankContext, num_gpu_ranks: int, kind: int = GLOO, **changes: Any) -> GroupCoordinator:
    """The first so many ranks are pseudo-GPU ranks."""
    backend = "gloo" if ranks.rank < num_gpu_ranks else None
    return ranks.coordinate(
        ranks_pb2.ExchangeKind.Name(kind) and kind,  # type: ignore[arg-type]
        num_gpu_ranks=num_gpu_ranks,
        device_backend=backend,
        **changes,
    )


def connect(
    ranks: RankContext, num_gpu_ranks: int, *, groups: list[Ranks], links: tuple[Link, ...] = (), **changes: Any
) -> FormedGroup:
    """A group whose exchange can sum among `groups`, and send over `links`."""
    group = coordinate(ranks, num_gpu_ranks, **changes)
    everyone = tuple(range(ranks.world_size))
    on_host = dict.fromkeys(host_part(group, num_gpu_ranks) for group in groups)
    on_devices = dict.fromkeys(device_part(group, num_gpu_ranks) for group in groups)
    host = Routes(
        tuple(group for group in on_host if len(group) > 1 and group != everyone),
        tuple(link for link in links if not is_device_link(link, num_gpu_ranks)),
    )
    devices = Routes(
        tuple(group for group in on_devices if len(group) > 1),
        tuple(link for link in links if is_device_link(link, num_gpu_ranks)),
    )
    return FormedGroup(group, group.connect_routes(host, devices))


def all_groups(world_size: int) -> list[Ranks]:
    """Every subset of two ranks or more."""
    everyone = range(world_size)
    return [group for size in range(2, world_size + 1) for group in combinations(everyone, size)]


def values(rank: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """What a rank contributes."""
    return torch.randn(size, generator=torch.Generator().manual_seed(1000 * size + rank)).to(dtype)


def contributions(group: Ranks) -> list[Ranks]:
    """Each rank alone, all, and all but one."""
    return [*((rank,) for rank in group), group, group[1:], group[:-1]]


def sums_of_groups(
    ranks: RankContext, num_gpu_ranks: int, kind: int, dtype: torch.dtype, groups: list[Ranks]
) -> dict[tuple[Ranks, Ranks, int], bytes]:
    """By group, contributors and size: the bits of the sum on this rank, where it is in the group."""
    group = connect(ranks, num_gpu_ranks, groups=groups, kind=kind)
    results = {}
    for members in groups:
        for contributors in contributions(members):
            for size in SIZES if len(members) == ranks.world_size else SIZES[1:3]:
                if ranks.rank in members:
                    tensor = values(ranks.rank, size, dtype)
                    group.connected.among(members).all_reduce(tensor, contributors)
                    results[members, contributors, size] = tensor.view(torch.uint8).numpy().tobytes()
    ranks.meet()
    group.close()
    return results


def sums_of_rows(
    ranks: RankContext, num_gpu_ranks: int, width: int, counts: tuple[int, ...], batch_invariant: bool
) -> list[bytes]:
    """The bits of one row's sum over all ranks in bfloat16, among so many rows each time, at the last place."""
    everyone = tuple(range(ranks.world_size))
    group = coordinate(ranks, num_gpu_ranks)
    devices = Routes((device_part(everyone, num_gpu_ranks),))
    on_host = host_part(everyone, num_gpu_ranks)
    host = Routes((on_host,) if 1 < len(on_host) < len(everyone) else ())
    exchange = group.connect_routes(host, devices, batch_invariant=batch_invariant).among(everyone)
    sums = []
    for count in counts:
        rows = torch.zeros(count, width, dtype=torch.bfloat16)
        rows[-1] = values(ranks.rank, width, torch.bfloat16)
        exchange.all_reduce(rows, everyone)
        sums.append(rows[-1].view(torch.uint8).numpy().tobytes())
    ranks.meet()
    group.close()
    return sums


def sums_in_place(ranks: RankContext, num_gpu_ranks: int) -> list[str]:
    """What was changed that should not have been, or not been, by sums into a slice of a larger tensor."""
    everyone = tuple(range(ranks.world_size))
    group = connect(ranks, num_gpu_ranks, groups=[everyone])
    wrong = []
    for contributors in contributions(everyone):
        storage = torch.full((5, 64), float(ranks.rank + 1))
        given, untouched = storage[2], storage.clone()
        before = given.data_ptr()
        group.connected.among(everyone).all_reduce(given, contributors)
        expected = float(sum(rank + 1 for rank in contributors))
        if given.tolist() != [expected] * 64 or given.data_ptr() != before:
            wrong.append(f"{contributors}: the tensor is not the sum: {given[0]}")
        if not torch.equal(storage[[0, 1, 3, 4]], untouched[[0, 1, 3, 4]]):
            wrong.append(f"{contributors}: what lies beside the tensor was changed")
    ranks.meet()
    group.close()
    return wrong


def stale_data(ranks: RankContext, num_gpu_ranks: int) -> list[float]:
    """Sums by one contributor after another, in one tensor that is never cleaned: what ranks hold is not to leak in."""
    everyone = tuple(range(ranks.world_size))
    group = connect(ranks, num_gpu_ranks, groups=[everyone])
    tensor, seen = torch.full((8,), float("nan")), []
    for contributor in everyone:
        if ranks.rank == contributor:
            tensor.fill_(contributor + 1.0)
        group.connected.among(everyone).all_reduce(tensor, (contributor,))
        seen.append(float(tensor.sum()))
        tensor.fill_(float("nan"))
    ranks.meet()
    group.close()
    return seen


def gpu_ranks_alone(ranks: RankContext, num_gpu_ranks: int) -> tuple[list[float], Traffic]:
    """GPU ranks sum and broadcast among themselves; CPU ranks do nothing; what all did on the host meanwhile."""
    gpus = tuple(range(num_gpu_ranks))
    group = connect(ranks, num_gpu_ranks, groups=[gpus])
    before, seen = host_traffic(group.connected), []
    if ranks.rank in gpus:
        for contributors in (gpus, gpus[1:], gpus[:1]):
            tensor = torch.full((8,), float(ranks.rank + 1))
            group.connected.among(gpus).all_reduce(tensor, contributors)
            seen.append(float(tensor[0]))
    moved = host_traffic(group.connected) - before
    ranks.meet()
    group.close()
    return seen, moved


def host_traffic(exchange: Exchange) -> Traffic:
    """What this rank has moved through the host."""
    return exchange.host.traffic if isinstance(exchange, HierarchicalExchange) else NO_TRAFFIC


def links_of_all_kinds(ranks: RankContext, num_gpu_ranks: int, kind: int) -> dict[int, list[float]]:
    """Two tensors over every link from each rank to all others and to its neighbour; what came, by link."""
    world = range(ranks.world_size)
    links = [Link(i, i, tuple(rank for rank in world if rank != i)) for i in world]
    links += [Link(10 + i, i, ((i + 1) % ranks.world_size,)) for i in world]
    group = connect(ranks, num_gpu_ranks, groups=[tuple(world)], links=tuple(links), kind=kind)
    came: dict[int, list[float]] = {}
    for link in links:
        if ranks.rank == link.source:
            sent = torch.full((600,), float(link.number))
            group.connected.send(sent, link)
            pending = group.connected.start_send(sent + 0.5, link)
            sent.fill_(-1.0)
            pending.finish()
        elif ranks.rank in link.receivers:
            coming = [group.connected.receive(torch.zeros(600), link) for _ in range(2)]
            came[link.number] = [float(tensor.wait()[599]) for tensor in coming]
    ranks.meet()
    group.close()
    return came


WAITS: dict[str, Callable[[Exchange, GroupCoordinator], object]] = {
    "a sum of all": lambda exchange, _: exchange.among((0, 1, 2)).all_reduce(torch.ones(8), (0, 1, 2)),
    "a sum of GPU ranks": lambda exchange, _: exchange.among((0, 1)).all_reduce(torch.ones(8), (0, 1)),
    "a broadcast of GPU ranks": lambda exchange, _: exchange.among((0, 1)).all_reduce(torch.ones(8), (1,)),
    "a gathering": lambda exchange, _: exchange.all_gather(torch.ones(1), [1, 1, 1]),
    "a broadcast": lambda exchange, _: exchange.broadcast(torch.ones(1), 1),
    "a device link": lambda exchange, _: exchange.receive(torch.ones(8), Link(0, 1, (0,))).wait(),
    "a staged link": lambda exchange, _: exchange.receive(torch.ones(8), Link(1, 2, (0, 1))).wait(),
    "the connection of a plan": lambda _, group: group.connect_routes(Routes(links=(Link(9, 0, (2,)),)), Routes()),
}
"""What rank 0, a GPU rank among 2 and one CPU rank, may wait for while no other rank comes."""


def abort_of_a_wait(ranks: RankContext, wait: str, kind: int) -> float:
    """Rank 0 waits and is aborted by a thread; seconds until it noticed. Then all leave, and the next epoch forms."""
    links = (Link(0, 1, (0,)), Link(1, 2, (0, 1)))
    group = connect(ranks, 2, groups=[(0, 1, 2), (0, 1)], links=links, kind=kind, timeout_s=60.0)
    waited_s = 0.0
    if ranks.rank == 0:
        aborted_at: list[float] = []

        def abort() -> None:
            aborted_at.append(time.monotonic())
            group.coordinator.abort()
            aborted_at.append(time.monotonic())

        aborting = threading.Timer(0.3, abort)
        aborting.start()
        try:
            WAITS[wait](group.connected, group.coordinator)
        except ExchangeAborted:
            waited_s = time.monotonic() - aborted_at[0]
        aborting.join(1.0)  # an abort wakes this thread before it returns there
        if len(aborted_at) != 2 or aborted_at[1] - aborted_at[0] > 0.5:
            raise AssertionError(f"abort itself took too long: {aborted_at}")
    ranks.meet()
    left_s = _close(group)
    if left_s > 4.0:
        raise AssertionError(f"leaving took {left_s:.1f} s")
    return waited_s


def _close(group: FormedGroup) -> float:
    """Seconds that it took; what cannot be interrupted may make it fail, in time."""
    began = time.monotonic()
    with suppress(ExchangeError):  # a rank would end itself now
        group.close()
    return time.monotonic() - began


def epochs_of_other_sizes(ranks: RankContext) -> list[float]:
    """One epoch after another in the same processes, with 3, 1, 0 and 2 GPU ranks; a sum of each."""
    everyone = tuple(range(ranks.world_size))
    seen = []
    for epoch, num_gpu_ranks in enumerate((3, 1, 0, 2), start=1):
        group = connect(ranks, num_gpu_ranks, groups=[everyone], epoch=epoch, kind=SHM)
        tensor = torch.full((4,), float(ranks.rank + 1))
        group.connected.among(everyone).all_reduce(tensor, everyone)
        seen.append(float(tensor[0]))
        ranks.meet()
        group.close()
        group.close()
    return seen


def measured(ranks: RankContext, num_gpu_ranks: int, kind: int) -> tuple[list[int], list[int], bool]:
    """Sizes of which host and device times were measured, and whether all are above 0; the group is of use then."""
    group = coordinate(ranks, num_gpu_ranks, kind)
    formed = group.formed(measure=True)
    connected = group.connect_routes(Routes())
    connected.broadcast(torch.ones(1), 0)
    ranks.meet()
    group.close()
    host, device = formed.host_times, formed.device_times
    are_positive = all(time.seconds > 0 for time in (*host, *device))
    return [time.bytes for time in host], [time.bytes for time in device], are_positive


def plans_one_after_another(ranks: RankContext, num_gpu_ranks: int, kind: int, plans: list[Shares]) -> list[float]:
    """Connect plan after plan in one epoch, and sum among the holders of each one's first stage."""
    group = coordinate(ranks, num_gpu_ranks, kind)
    seen = []
    for shares in plans:
        plan = shares.plan(2)
        exchange = group.connect(plan)
        holders = plan.stages()[0].holders
        tensor = torch.full((4,), float(ranks.rank + 1))
        if ranks.rank in holders:
            exchange.among(holders).all_reduce(tensor, holders)
        seen.append(float(tensor[0]))
    ranks.meet()
    group.close()
    return seen


def lent_rows(ranks: RankContext, num_gpu_ranks: int, kind: int, num_rows: int) -> list[float]:
    """Rank 0 lends rows to all others, four layers of them, over links that hold few; the last sums."""
    torch.set_num_threads(1)
    world_size = ranks.world_size
    shares = Shares(
        kv_heads=((8, *[0] * (world_size - 1)),),
        mlp_columns=((0, *[1] * (world_size - 1)),),
        vocab_rows=(200, *[0] * (world_size - 1)),
    )
    plan = shares.plan(1)
    links = helper_links(plan)[0]
    assert links is not None
    group = coordinate(ranks, num_gpu_ranks, kind, area_bytes=4096)
    lending = Lending(links, group.connect(plan), at_once=ranks.rank < num_gpu_ranks)
    hidden = torch.arange(num_rows, dtype=torch.float32)[:, None].expand(num_rows, 64).contiguous()
    for has_experts in (False, True, True, False):
        if ranks.rank == 0:
            hidden = lending.sum(hidden, lambda rows: rows * 0.5, has_experts=has_experts)
        else:
            lending.help(hidden, lambda rows: rows * ranks.rank, has_experts=has_experts)
    ranks.meet()
    group.close()
    sums: list[float] = hidden[:, 63].tolist() if ranks.rank == 0 else []
    return sums


def teardown(ranks: RankContext) -> list[str]:
    """What is freed, in order, when a group with two GPU ranks is left."""
    everyone = (0, 1, 2)
    group = connect(ranks, 2, groups=[everyone], links=(Link(0, 0, (1,)),))
    order: list[str] = []

    def telling(name: str, freed: Callable[..., object]) -> Callable[..., object]:
        def free(*arguments: object) -> object:
            order.append(name)
            return freed(*arguments)

        return free

    with (
        patch.object(TorchDeviceGroup, "close", telling("device group", TorchDeviceGroup.close)),
        patch.object(HostGroups, "close", telling("host exchange", HostGroups.close)),
        patch.object(dist, "destroy_process_group", telling("Gloo", dist.destroy_process_group)),
    ):
        group.close()
    order.append("store" if dist.is_initialized() else "nothing is left")
    ranks.meet()
    return order


def no_backend(ranks: RankContext) -> str:
    """Rank 1 is a GPU rank whose platform names no backend; what each rank says."""
    try:
        ranks.coordinate(GLOO, num_gpu_ranks=2, device_backend="gloo" if ranks.rank == 0 else None, timeout_s=2.0)
    except ExchangeError as error:
        return str(error)
    return ""


def decoded(
    ranks: RankContext,
    num_gpu_ranks: int,
    kind: int,
    directory: Path,
    shares: Shares,
    tokens: list[int],
    area_bytes: int,
    num_parts: int,
) -> tuple[list[list[float]], list[Traffic]]:
    """This rank's logits of a prefill and of one token after it; what either moved through the host."""
    torch.set_num_threads(1)
    config = ModelConfig.from_directory(directory)
    plan = shares.plan_for(config)
    group = coordinate(ranks, num_gpu_ranks, kind, area_bytes=area_bytes)
    exchange = group.connect(plan)
    decoder = load_decoder(directory, config, plan, ranks.rank, num_parts=num_parts)
    caches = decoder.allocate_caches(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    sequence = KnownSequence(tokens, list(range(1, NUM_BLOCKS)))
    rows: list[list[float]] = []
    moved = []
    with torch.inference_mode():
        for count in (len(tokens) - 1, 1):
            before = host_traffic(exchange)
            rows += decoder.forward(step_of(((sequence, count),)), caches=caches, exchange=exchange).tolist()
            moved.append(host_traffic(exchange) - before)
            sequence.computed += count
    ranks.meet()
    group.close()
    return rows, moved
