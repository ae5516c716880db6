"""What rank processes do in the tests of exchanges; each body runs in a process of its own."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import HostExchange, PendingTensor
from hetero_worker.distributed.routes import NO_ROUTES, Link, Routes
from hetero_worker.distributed.shm_segment import SegmentLayout, ShmSegment
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout, PeerLost
from tests.support.rank_processes import HOST, RankContext

AREA_BYTES = 4096
SIZES = (0, 1, 3, 576, 1023, 1024, 1025, 2048, 5000)
"""Elements; in fp32 an area holds 1024."""
ROUTES = {
    3: Routes(subgroups=((0, 1), (1, 2)), links=(Link(0, 0, (1, 2)), Link(1, 2, (0,)), Link(2, 2, (0,)))),
    4: Routes(subgroups=((0, 1), (2, 3), (0, 2, 3)), links=(Link(0, 0, (2, 3)), Link(1, 3, (1,)), Link(2, 1, (0, 2)))),
}
"""By the size of the group."""


def shm_left_over(prefix: str) -> list[str]:
    """Names of segments that begin like this."""
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(prefix)]


def same_rounds_every_way(ranks: RankContext, rounds: int, seed: int) -> tuple[dict[int, str], list[str]]:
    """Digests of all results by the kind of exchange, and what /dev/shm held meanwhile."""
    routes = ROUTES.get(ranks.world_size, NO_ROUTES)
    shm = ranks.form(ranks_pb2.EXCHANGE_KIND_SHM, epoch=1, area_bytes=AREA_BYTES, routes=routes)
    assert shm.kind == ranks_pb2.EXCHANGE_KIND_SHM
    ranks.meet()
    left_over = shm_left_over(ranks.segment_prefix)
    ranks.meet()
    digests: dict[int, str] = {ranks_pb2.EXCHANGE_KIND_SHM: _play(shm.exchange, rounds, seed, delays=True)}
    moved = shm.exchange.traffic
    shm.close()
    for epoch, kind in enumerate((ranks_pb2.EXCHANGE_KIND_TCP, ranks_pb2.EXCHANGE_KIND_GLOO), start=2):
        group = ranks.form(kind, epoch=epoch, routes=routes)
        assert group.kind == kind
        digests[kind] = _play(group.exchange, rounds, seed, delays=kind == ranks_pb2.EXCHANGE_KIND_TCP)
        assert group.exchange.traffic == moved
        group.close()
    return digests, left_over


def _play(exchange: HostExchange, rounds: int, seed: int, *, delays: bool) -> str:
    """Random collectives, the same on every rank but for the numbers in them; a digest of all results."""
    script = random.Random(seed)
    pauses = random.Random(1000 * seed + exchange.rank)
    values = torch.Generator().manual_seed(100 * seed + exchange.rank)
    digest = hashlib.sha256()
    for _ in range(rounds):
        if delays and pauses.random() < 0.02:
            time.sleep(pauses.random() * 0.003)
        for tensor in _play_one(exchange, script, values):
            digest.update(tensor.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _play_one(exchange: HostExchange, script: random.Random, values: torch.Generator) -> list[torch.Tensor]:
    routes = ROUTES.get(exchange.world_size, NO_ROUTES)
    kind = script.choice(["all_reduce", "all_gather", "broadcast", *(["among", "link"] if routes.links else [])])
    dtype = script.choice([torch.float32, torch.bfloat16, torch.float16])
    if kind == "all_gather":
        counts = [script.choice(SIZES) for _ in range(exchange.world_size)]
        mine = torch.randn(counts[exchange.rank], generator=values).to(dtype)
        return exchange.all_gather(mine, counts)
    if kind == "link":
        sizes = [script.choice(SIZES) for _ in range(script.randint(1, 4))]
        return _play_link(
            exchange, script.choice(routes.links), [torch.randn(n, generator=values).to(dtype) for n in sizes]
        )
    tensor = torch.randn(script.choice(SIZES), generator=values).to(dtype)
    if kind == "broadcast":
        exchange.broadcast(tensor, script.randrange(exchange.world_size))
    else:
        ranks = script.choice(routes.subgroups) if kind == "among" else tuple(range(exchange.world_size))
        contributors = script.sample(ranks, script.randint(1, len(ranks)))
        if exchange.rank in ranks:
            exchange.among(ranks).all_reduce(tensor, contributors)
    return [tensor]


def _play_link(exchange: HostExchange, link: Link, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The source's tensors, one after another; receivers post all before they wait for the first."""
    if exchange.rank == link.source:
        for tensor in tensors:
            exchange.send(tensor, link)
            tensor.fill_(1.0)
    elif exchange.rank in link.receivers:
        pending = [exchange.receive(tensor, link) for tensor in tensors]
        return [tensor.wait() for tensor in pending]
    return tensors


def sums(
    ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, dtype: torch.dtype, host: str = HOST
) -> list[list[float]]:
    """All-reduce of rows that every rank can make by itself; see `expected_sum`."""
    group = ranks.form(kind, host=host)
    assert group.kind == kind
    tensor = rank_row(ranks.rank, dtype)
    group.exchange.all_reduce(tensor, range(ranks.world_size))
    group.close()
    rows: list[list[float]] = tensor.tolist()
    return rows


def rank_row(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, 577, generator=torch.Generator().manual_seed(rank)).to(dtype)


def abort_while_waiting(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType) -> float:
    """Rank 0 waits for a rank 1 that does not come and is aborted by a thread; how long that took it, seconds."""
    group = ranks.form(kind)
    waited_s = 0.0
    if ranks.rank == 0:
        aborted_at: list[float] = []

        def abort() -> None:
            aborted_at.append(time.monotonic())
            group.exchange.abort()

        threading.Timer(0.3, abort).start()
        _expect_abort(group.exchange)
        waited_s = time.monotonic() - aborted_at[0]
        _expect_abort(group.exchange)
    ranks.meet()
    group.close()
    return waited_s


def _expect_abort(exchange: HostExchange) -> None:
    try:
        exchange.all_reduce(torch.ones(8), (0, 1))
    except ExchangeAborted:
        return
    raise AssertionError("the exchange went on after an abort")


def late_rank(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType) -> str:
    """Ranks 0 and 1 wait for a rank 2 that does not come; what they say."""
    group = ranks.form(kind, timeout_s=0.5)
    message = ""
    if ranks.rank != 2:
        try:
            group.exchange.all_reduce(torch.ones(8), (0, 1, 2))
        except ExchangeTimeout as error:
            message = str(error)
    ranks.meet()
    group.close()
    return message


def killed_peer(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType) -> tuple[float, str]:
    """Rank 2 is killed in the middle of an exchange; how long the others wait, seconds, and what ends that."""
    group = ranks.form(kind)
    tensor = torch.ones(64)
    for _ in range(50):
        group.exchange.all_reduce(tensor, (0, 1, 2))
        tensor.fill_(1.0)
    if ranks.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        group.exchange.all_reduce(tensor, (0, 1, 2))
    except PeerLost as error:
        group.close()
        return time.monotonic() - began, str(error)
    raise AssertionError("a dead rank took part in a round")


def killed_creator(ranks: RankContext) -> str:
    """Rank 0 is killed between creating a segment and removing its name; what the others are told."""
    group = ranks.form(ranks_pb2.EXCHANGE_KIND_SHM)
    create = ShmSegment.create

    def create_and_die(name: str, layout: SegmentLayout, *, folder: Path) -> ShmSegment:
        create(name, layout, folder=folder)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL came back")

    try:
        with patch.object(ShmSegment, "create", create_and_die):
            group.coordinator.connect_routes(Routes(links=(Link(0, 0, (1,)),)), NO_ROUTES)
    except ExchangeError as error:
        group.close()
        return str(error)
    raise AssertionError("a dead rank took part in making an exchange")


def killed_end_of_a_link(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, waiting: int) -> tuple[float, str]:
    """The end of a link that rank `waiting` is not is killed; as killed_peer."""
    link = Link(0, 0, (1,))
    group = ranks.form(kind, area_bytes=AREA_BYTES, routes=Routes(links=(link,)))
    ranks.meet()
    if ranks.rank != waiting:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    try:
        _use_link(group.exchange, link)
    except PeerLost as error:
        group.close()
        return time.monotonic() - began, str(error)
    raise AssertionError("a link went on without its other end")


def frozen_peer(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType) -> str:
    """Rank 2 is stopped in the middle of an exchange; what the others say."""
    group = ranks.form(kind, timeout_s=0.5)
    frozen = int(ranks.meet(str(os.getpid()))[2])
    if ranks.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    message = ""
    try:
        if ranks.rank != 2:
            group.exchange.all_reduce(torch.ones(64), (0, 1, 2))
    except ExchangeTimeout as error:
        message = str(error)
    if ranks.rank == 0:
        os.kill(frozen, signal.SIGCONT)
    ranks.meet()
    group.close()
    return message


def kind_and_reason(
    ranks: RankContext, unlike: dict[str, Any], kind: ranks_pb2.ExchangeKind.ValueType = ranks_pb2.EXCHANGE_KIND_SHM
) -> tuple[ranks_pb2.ExchangeKind.ValueType, str, list[float]]:
    """A kind is asked for, and rank 1's request differs; what stands, why, and what a round brings."""
    group = ranks.form(kind, **(unlike if ranks.rank == 1 else {}))
    tensor = torch.full((4,), float(ranks.rank + 1))
    group.exchange.all_reduce(tensor, (0, 1))
    group.close()
    return group.kind, group.coordinator.formed(measure=False).exchange_reason, tensor.tolist()


def no_room(ranks: RankContext) -> tuple[str, list[str]]:
    """A segment larger than any /dev/shm; the error, and that the next epoch forms in the same process."""
    message = ""
    try:
        ranks.form(ranks_pb2.EXCHANGE_KIND_SHM, epoch=1, area_bytes=1 << 50)
    except ExchangeError as error:
        message = str(error)
    left_over = shm_left_over(ranks.segment_prefix)
    group = ranks.form(ranks_pb2.EXCHANGE_KIND_SHM, epoch=2)
    group.exchange.broadcast(torch.ones(1), 0)
    group.close()
    return message, left_over


def absent_rank(ranks: RankContext) -> str:
    """Rank 1 says where it is and never comes to the rendezvous; what rank 0 says."""
    if ranks.rank == 1:
        ranks.meet("nowhere:1")
        ranks.meet()
        return ""
    message = ""
    try:
        ranks.form(ranks_pb2.EXCHANGE_KIND_SHM, timeout_s=0.5)
    except ExchangeTimeout as error:
        message = str(error)
    ranks.meet()
    return message


def listening_addresses(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType) -> list[str]:
    """Hex addresses that this process's sockets listen on while a group stands."""
    group = ranks.form(kind)
    group.exchange.broadcast(torch.ones(1), 0)
    inodes = {os.readlink(path)[8:-1] for path in Path("/proc/self/fd").iterdir() if _is_socket(path)}
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]
    ]
    ranks.meet()
    group.close()
    return [fields[1].partition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in inodes]


def _is_socket(path: Path) -> bool:
    try:
        return os.readlink(path).startswith("socket:[")
    except FileNotFoundError:  # the descriptor of the listing itself
        return False


def abort_on_a_link(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, waiting: int) -> float:
    """Rank `waiting` of a link's two ends waits for the other and is aborted; how long it took to notice, seconds.

    Rank 0 is the source: it sends until the link has no room. Rank 1 receives.
    """
    link = Link(0, 0, (1,))
    group = ranks.form(kind, area_bytes=AREA_BYTES, routes=Routes(links=(link,)))
    waited_s = 0.0
    if ranks.rank == waiting:
        aborted_at: list[float] = []

        def abort() -> None:
            aborted_at.append(time.monotonic())
            group.exchange.abort()

        threading.Timer(0.3, abort).start()
        try:
            _use_link(group.exchange, link)
        except ExchangeAborted:
            waited_s = time.monotonic() - aborted_at[0]
    ranks.meet()
    group.close()
    return waited_s


def _use_link(exchange: HostExchange, link: Link) -> None:
    tensor = torch.ones(1000)
    if exchange.rank == link.source:
        while True:
            exchange.send(tensor, link)
    else:
        exchange.receive(tensor, link).wait()
        raise AssertionError("a link went on without its other end")


def late_end_of_a_link(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType, waiting: int) -> str:
    """The same without an abort, and a group that is not patient; what the waiting end says."""
    link = Link(0, 0, (1,))
    group = ranks.form(kind, timeout_s=0.5, area_bytes=AREA_BYTES, routes=Routes(links=(link,)))
    message = ""
    if ranks.rank == waiting:
        try:
            _use_link(group.exchange, link)
        except ExchangeTimeout as error:
            message = str(error)
    ranks.meet()
    group.close()
    return message


def runs_ahead(ranks: RankContext, kind: ranks_pb2.ExchangeKind.ValueType) -> tuple[bool, list[float]]:
    """Rank 0 sends twice before rank 1 asks for anything; whether it was free by then, and what came."""
    link = Link(0, 0, (1,))
    group = ranks.form(kind, area_bytes=AREA_BYTES, routes=Routes(links=(link,)))
    tensor, seen = torch.ones(8), []
    if ranks.rank == 0:
        for number in (3.0, 4.0):
            group.exchange.send(tensor.fill_(number), link)
        tensor.fill_(-1.0)
    ranks.meet()
    if ranks.rank == 1:
        pending: list[PendingTensor] = [group.exchange.receive(torch.zeros(8), link) for _ in range(2)]
        seen = [float(tensor.wait().sum()) for tensor in pending]
        assert pending[0].wait().sum() == seen[0]
    ranks.meet()
    group.close()
    return True, seen
