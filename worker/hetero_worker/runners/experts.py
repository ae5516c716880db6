"""Experts that the ranks of a group hand one another: some move from rank to rank, others are shared with the GPU rank.

Those that move, a rank reads beside steps, and then holds them. It reads one expert at a time, by a thread of its own,
for which memory is kept (`ModelMemory.arriving_expert`), and goes over between two steps. Who computes an expert
changes then and nothing else: logits stay the same up to the order of summation, and the KV cache stays valid. A rank
holds as many experts of a layer as before, and as many bytes.

Those that are shared lie in arenas (`memory.panels`). `link_experts` hands the GPU rank each arena's file, over a
socket in the folder of the ranks' shared segment. It is collective: all ranks can, or none does.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from hetero_api.errors import ModelError, PlanError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.exchange import Exchange, all_can
from hetero_worker.distributed.hierarchical import shared_path
from hetero_worker.errors import CommandRefused, MemoryBudgetError
from hetero_worker.layers.moe import Expert
from hetero_worker.memory.panels import PanelLayer, mapped
from hetero_worker.models.decoder import Decoder
from hetero_worker.models.streaming import SharedExperts
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.shard import DTYPES, LoadedShard

_NICENESS: Final = 10
"""Of the thread that reads beside steps: it takes little from the threads that compute."""
_HAND_OVER_S: Final = 10.0
"""Seconds that one rank waits for the other, both of which are there."""
_LENGTH_BYTES: Final = 8
_ANOTHER_CANNOT: Final = "another rank cannot; its log says why"


class ReadingAhead:
    """Experts of a plan that are read while steps go on."""

    def __init__(self, shard: LoadedShard, request: LoadRequest, plan: ShardPlan) -> None:
        """Begin to read, by a thread that ends with it, the expert that `plan` gives this rank beside those it has.

        Raises CommandRefused if the plan differs in more than expert_orders, or has more than one new expert.
        """
        _check(plan, request)
        mlps = shard.decoder.expert_mlps
        numbers = {layer: frozenset(plan.experts_of(request.rank, layer)) for layer in mlps}
        changed = {layer: own for layer, own in numbers.items() if own != frozenset(mlps[layer].numbers)}
        new = [layer for layer, own in changed.items() for _ in own.difference(mlps[layer].numbers)]
        if len(new) > 1:
            raise CommandRefused(f"{len(new)} experts cannot be read beside steps, for which one has room; move fewer")
        self.plan = plan
        self._plan_before = request.shard_plan
        self.read_bytes = sum(mlps[layer].expert_bytes(DTYPES[request.dtype], shard.kernel) for layer in new)
        self._decoder = shard.decoder
        # Not in memory apart: to begin such a piece, a device gives memory back, for which its steps would wait.
        beside = replace(shard, kernel=shard.kernel.beside_steps())
        thread = ThreadPoolExecutor(1, "reading-experts", initializer=_step_back)
        self._read = thread.submit(_read, beside, request, changed)
        thread.shutdown(wait=False)

    @property
    def is_reading(self) -> bool:
        """True until all is read, or could not be."""
        return not self._read.done()

    def serves(self, plan: ShardPlan, decoder: Decoder) -> bool:
        """Return whether these are the plan's experts, for these weights."""
        return self._decoder is decoder and self.plan == plan

    def require(self) -> None:
        """Raise CommandRefused while it is being read, and what reading raised."""
        if self.is_reading:
            raise CommandRefused("experts are still being read")
        self._read.result()

    def hold(self) -> None:
        """Compute with them from now on. Cannot fail once `require` has returned."""
        for layer, experts in self._read.result().items():
            self._decoder.expert_mlps[layer].hold(experts)
        if (stream := self._decoder.expert_stream) is not None:
            for rank in _sharing_ranks(self.plan):
                for layer in stream.layers:
                    before, after = (set(plan.experts_of(rank, layer)) for plan in (self._plan_before, self.plan))
                    for leaving, arriving in zip(sorted(before - after), sorted(after - before), strict=True):
                        stream.rename(rank, layer, leaving, arriving)


def link_experts(shard: LoadedShard, exchange: Exchange) -> str:
    """Share helpers' experts with the leader of a group that was loaded for it. Collective over all ranks.

    Return why this rank cannot, or that another cannot; empty if all could. Raises ExchangeError.
    """
    decoder = shard.decoder
    with ExitStack() as stack:
        problem = _hand_all_over(shard, exchange, stack)
    # A vote a layer: all of a large model's experts take longer to pin than ranks wait for one another.
    pins = (_together(partial(_pin, decoder, layer), exchange) for layer in decoder.config.expert_layers)
    problem = problem or next(filter(None, pins), "")
    if problem and decoder.expert_stream is not None:
        decoder.expert_stream.unlink()
    return problem


def _together(work: Callable[[], None], exchange: Exchange) -> str:
    """Do this rank's part of something; return why it cannot, or that another cannot. Raises ExchangeError."""
    problem = ""
    try:
        work()
    except (CommandRefused, MemoryBudgetError, ModelError, OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    return "" if all_can(exchange, not problem) else problem or _ANOTHER_CANNOT


def _pin(decoder: Decoder, layer: int) -> None:
    if decoder.expert_stream is not None:
        decoder.expert_stream.pin(layer)


def _hand_all_over(shard: LoadedShard, exchange: Exchange, stack: ExitStack) -> str:
    """Let the leader map the experts; return as `_together`. Doors are open for as long as the stack."""
    decoder, rank, path = shard.decoder, shard.request.rank, shared_path(exchange)
    owners, doors = _sharing_ranks(shard.request.shard_plan), list[tuple[socket.socket, bytes]]()

    def prepare() -> None:
        if path is None:
            raise CommandRefused("the ranks share no memory")
        if rank in owners:
            told = _told_of_experts(decoder)
            doors.append((stack.enter_context(_door(path, rank)), told))

    def hand_over() -> None:
        assert path is not None, "this rank can"
        for door, told in doors:
            assert decoder.expert_arena is not None, "its experts were told of"
            _hand_over(door, decoder.expert_arena.fd, told)
        if decoder.expert_stream is not None:
            experts = decoder.config.experts
            assert experts is not None, "plans stream experts of models that have some"
            make = partial(shard.kernel.panel_experts, experts, decoder.config.activation)
            decoder.expert_stream.link([_take_over(path, owner) for owner in owners], make)

    return _together(prepare, exchange) or _together(hand_over, exchange)


def _sharing_ranks(plan: ShardPlan) -> list[int]:
    """Return the ranks with experts and without KV heads."""
    helpers = (rank for rank, shard in enumerate(plan.ranks) if not shard.kv_heads_total)
    return [rank for rank in helpers if any(layer.experts.size for layer in plan.ranks[rank].layers)]


def _told_of_experts(decoder: Decoder) -> bytes:
    """Return what another rank has to know of the arena. Raises CommandRefused, ModelError."""
    if decoder.expert_arena is None:
        raise CommandRefused("this rank computes by torch, which packs no experts that a GPU rank could copy")
    layers = {layer: mlp.panels().to_json() for layer, mlp in decoder.expert_mlps.items()}
    return json.dumps([decoder.expert_arena.num_bytes, layers]).encode()


def _door_path(path: Path, rank: int) -> Path:
    """Return the path of a rank's socket: short, as addresses of sockets have to be."""
    return path.parent / f"hetero-{hashlib.sha256(path.name.encode()).hexdigest()[:16]}-{rank}"


@contextmanager
def _door(path: Path, rank: int) -> Iterator[socket.socket]:
    """Listen at a socket that only this user may use, and that is gone in the end. Raises OSError."""
    at = _door_path(path, rank)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
        door.settimeout(_HAND_OVER_S)
        door.bind(str(at))
        try:
            at.chmod(0o600)
            door.listen(1)
            yield door
        finally:
            at.unlink(missing_ok=True)


def _hand_over(door: socket.socket, fd: int, told: bytes) -> None:
    connection, _ = door.accept()
    with connection:
        connection.settimeout(_HAND_OVER_S)
        socket.send_fds(connection, [len(told).to_bytes(_LENGTH_BYTES, "little")], [fd])
        connection.sendall(told)


def _take_over(path: Path, rank: int) -> SharedExperts:
    """Return what a rank hands over. Raises OSError, ValueError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_HAND_OVER_S)
        connection.connect(str(_door_path(path, rank)))
        length, fds, _, _ = socket.recv_fds(connection, _LENGTH_BYTES, 1)
        try:
            with connection.makefile("rb") as stream:
                num_bytes, layers = json.loads(stream.read(int.from_bytes(length, "little")))
            memory = mapped(fds[0], num_bytes)
        finally:
            for fd in fds:
                os.close(fd)
    return SharedExperts(rank, memory, {int(layer): PanelLayer.from_json(part) for layer, part in layers.items()})


def take_counts(decoder: Decoder) -> list[ranks_pb2.ExpertCounts]:
    """How many tokens chose each of this rank's experts since the last time, by layer.

    All tokens that were computed count, also those of the few steps that a rank makes for itself to prove its weights.
    """
    return [ranks_pb2.ExpertCounts(layer=layer, tokens=mlp.take_counts()) for layer, mlp in decoder.expert_mlps.items()]


def _read(
    shard: LoadedShard, request: LoadRequest, layers: Mapping[int, Collection[int]]
) -> dict[int, Mapping[int, Expert]]:
    """Return each layer's experts, those that the rank holds and those read. Raises ModelError."""
    if not layers:
        return {}
    mlps, dtype = shard.decoder.expert_mlps, DTYPES[request.dtype]
    with request.open_weights(request.directory) as checkpoint:
        return {
            layer: mlps[layer].read(numbers, checkpoint, dtype=dtype, kernel=shard.kernel)
            for layer, numbers in layers.items()
        }


def _check(plan: ShardPlan, request: LoadRequest) -> None:
    if replace(plan, expert_orders=()) != replace(request.shard_plan, expert_orders=()):
        raise CommandRefused("place_experts.shard_plan differs from the plan in force in more than expert_orders")
    try:
        plan.validate_for(request.config)
    except PlanError as error:
        raise CommandRefused(f"place_experts.shard_plan: {error}") from error


def _step_back() -> None:
    """Leave the cores to the threads that compute, as far as these want them."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
