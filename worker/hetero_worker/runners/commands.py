"""Commands that the whole group carries out between two steps, or leaves undone on every rank.

Every rank prepares the command without changing anything: it reads weights that were dropped or that it is to receive,
and checks that it can carry the command out at all. Then the ranks vote, through the exchange; if one cannot, all let
go of what they prepared. After the vote the change is made, by steps that cannot fail.

Replacing the KV cache is the exception. A cache usually fills the memory, so the old one must go before the new one
comes, and only trying shows whether the allocator finds room. The ranks check the arithmetic, vote, replace their
caches, and vote again. If one of them failed, all go back to a cache of the old shape, which is empty.

Weights that are read again have no room beside the old ones either. There is no way back, for the old files may be
gone: a rank that cannot load the new ones raises, which ends the epoch.

A rank reports what it cannot do: too little memory, or a command that does not fit its state. Weights that come back
from sleep different from how they went raise an error instead, which ends the epoch.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from hetero_api.errors import HeteroError, ModelError
from hetero_api.sharding import ShardPlan
from hetero_api.v1 import ranks_pb2
from hetero_worker.adapters.peft_files import LoraAdapter, adapter_directory
from hetero_worker.checkpoints.sampled_digests import sampled_digests
from hetero_worker.distributed.exchange import Exchange, all_can, all_votes
from hetero_worker.errors import (
    CacheLostError,
    CommandRefused,
    MemoryBudgetError,
    ProtocolError,
    WeightsChangedError,
    WeightsDamagedError,
)
from hetero_worker.layers.linear_kernels import LinearKernel
from hetero_worker.memory.budget import mib
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.memory.weight_offload import OffloadedWeights
from hetero_worker.models.decoder import Decoder
from hetero_worker.models.decoder_layer import adapter_targets
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.experts import ReadingAhead, take_counts
from hetero_worker.runners.model_state import ModelState, ServingCache, SleepingWeights, check_order, make_cache
from hetero_worker.runners.profile_run import checksum
from hetero_worker.runners.shard import LoadedShard, empty_decoder, load_shard
from hetero_worker.runners.step_times import StepRecorder, StepTimes

logger = logging.getLogger(__name__)

_LEVELS: Final = (1, 2)
_CANNOT: Final = (CommandRefused, MemoryBudgetError, ModelError, ProtocolError, MemoryError, OSError, RuntimeError)
"""Errors of a rank that cannot do its part and is none the worse for it; torch out of memory raises RuntimeError."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Results of a command that was carried out."""

    freed_bytes: int = 0
    table: str = ""
    trace: bytes = b""
    expert_counts: Sequence[ranks_pb2.ExpertCounts] = field(default=())
    is_reading: bool = False
    read_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A command that can be carried out.

    `attempt` is for changes that may fail after the vote; a second vote follows, and `undo` where one rank failed.
    """

    commit: Callable[[], _Outcome]
    discard: Callable[[], None] = lambda: None
    attempt: Callable[[], None] | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Digests of the files that weights are to be read from, which must be the same on all ranks."""
    undo: Callable[[], None] = lambda: None


class GroupCommands:
    """Commands of one rank; see the module."""

    def __init__(self, state: ModelState) -> None:
        self._model_state = state
        self._backend = state.backend
        self._recorder: StepRecorder | None = None
        self._ahead: ReadingAhead | None = None

    def count_step(self) -> None:
        """Note that a step was computed, for the profile that is being recorded."""
        if self._recorder is not None:
            self._recorder.count_step()

    def begin_epoch(self) -> None:
        """Stop recording, and forget experts that were read ahead: they belong to an epoch that is over."""
        self._ahead = None
        if self._recorder is not None:
            self._recorder.stop()
            self._recorder = None

    def run(self, command: ranks_pb2.GroupCommand, exchange: Exchange, times: StepTimes) -> ranks_pb2.CommandReport:
        """Carry the command out if all ranks can, and report on it.

        Raises ExchangeError, WeightsChangedError, WeightsDamagedError and CacheLostError.
        """
        prepared, problem = None, ""
        try:
            prepared = self._prepare(command, times)
        except _CANNOT as error:
            problem = _problem_of(command, error)
        done = False
        try:
            votes = all_votes(exchange, 0 if prepared is None else _vote_of(prepared.files))
            done = 0 not in votes and len(set(votes)) == 1
        finally:
            if prepared is not None and not done:
                prepared.discard()
        if prepared is not None and not done and 0 not in votes:
            problem = _disagreement(votes, prepared.files)
        if prepared is not None and done and prepared.attempt is not None:
            problem = self._attempt(command, prepared.attempt)
            done = all_can(exchange, not problem)
            if not done:
                prepared.undo()
        outcome = prepared.commit() if prepared is not None and done else _Outcome()
        return ranks_pb2.CommandReport(
            done=done,
            problem=problem,
            weight_bytes=self._model_state.weight_bytes,
            kv_bytes=self._model_state.kv_bytes,
            freed_bytes=outcome.freed_bytes,
            profile_table=outcome.table,
            profile_trace=outcome.trace,
            expert_counts=outcome.expert_counts,
            is_reading=outcome.is_reading,
            read_bytes=outcome.read_bytes,
        )

    def _attempt(self, command: ranks_pb2.GroupCommand, attempt: Callable[[], None]) -> str:
        """Make a change that may fail; return why it did, or an empty string."""
        try:
            attempt()
        except _CANNOT as error:
            return _problem_of(command, error)
        return ""

    def _prepare(self, command: ranks_pb2.GroupCommand, times: StepTimes) -> _Prepared:
        match command.WhichOneof("action"):
            case "reset_cache":
                return self._prepare_reset(command.reset_cache)
            case "sleep":
                return self._prepare_sleep(command.sleep.level)
            case "wake":
                return self._prepare_wake(command.wake)
            case "start_profile":
                return self._prepare_recording()
            case "stop_profile":
                return self._prepare_record(times, with_trace=command.stop_profile.with_trace)
            case "count_experts":
                return self._prepare_count()
            case "place_experts":
                plan = ShardPlan.from_proto(command.place_experts.shard_plan)
                return self._prepare_experts(plan, ahead=command.place_experts.ahead)
            case "update_weights":
                return self._prepare_update()
            case "load_adapter":
                return self._prepare_adapter(command.load_adapter)
            case "unload_adapter":
                return self._prepare_unloading(command.unload_adapter.number)
            case action:
                raise CommandRefused(f"this rank does not know the command {action}")

    def _prepare_reset(self, order: ranks_pb2.AllocateCache) -> _Prepared:
        if parts := self._model_state.asleep_parts:
            raise CommandRefused(f"the cache cannot be reset while the rank is asleep ({', '.join(parts)})")
        _, _, report = self._model_state.loaded("reset_cache")
        check_order(order, report)
        old = self._model_state.cache.order if self._model_state.cache is not None else order
        held_before = self._backend.memory_pool.held_bytes()

        def commit() -> _Outcome:
            return _Outcome(freed_bytes=max(0, held_before - self._backend.memory_pool.held_bytes()))

        return _Prepared(commit, attempt=lambda: self._replace_cache(order), undo=lambda: self._restore_cache(old))

    def _replace_cache(self, order: ranks_pb2.AllocateCache) -> None:
        """Drop the cache, then allocate another. Raises what `make_cache` does; then there is none."""
        shard, request, report = self._model_state.loaded("reset_cache")
        self._model_state.drop_cache()
        gc.collect()
        self._backend.memory_pool.release_unused()
        self._model_state.cache = self._make_cache(order, shard.decoder, request, report)

    def _restore_cache(self, old: ranks_pb2.AllocateCache) -> None:
        """Go back to an empty cache of the old shape. Raises CacheLostError if there is no room for it any more."""
        try:
            self._replace_cache(old)
        except (MemoryError, RuntimeError) as error:
            raise CacheLostError(
                f"the KV cache was dropped for another, which failed, and {old.num_blocks} blocks of {old.block_size} "
                f"tokens cannot be allocated again: {_told(error)}"
            ) from error

    def _make_cache(
        self, order: ranks_pb2.AllocateCache, decoder: Decoder, request: LoadRequest, report: ranks_pb2.Loaded
    ) -> ServingCache:
        return make_cache(order, self._backend, decoder=decoder, request=request, report=report)

    def _swap(self, cache: ServingCache) -> None:
        self._model_state.drop_cache()
        self._model_state.cache = cache
        self._model_state.cache_sleeps = False

    def _prepare_adapter(self, order: ranks_pb2.LoadAdapter) -> _Prepared:
        if parts := self._model_state.asleep_parts:
            raise CommandRefused(f"adapters cannot be loaded while the rank is asleep ({', '.join(parts)})")
        shard, request, _ = self._model_state.loaded("load_adapter")
        if not 0 < order.number <= request.max_adapters:
            raise CommandRefused(f"adapter {order.number}: {request.max_adapters} may be loaded")
        self._check_unused(order.number)
        directory = adapter_directory(order.directory, order.root)
        targets = adapter_targets(request.config, experts=request.adapts_experts)
        with LoraAdapter(directory, targets, max_rank=request.max_adapter_rank) as adapter:
            factors, files = shard.decoder.read_adapter(adapter), adapter.digests()

        def commit() -> _Outcome:
            shard.decoder.hold_adapter(order.number, factors, shard.kernel)
            return _Outcome()

        return _Prepared(commit, files=files)

    def _prepare_unloading(self, number: int) -> _Prepared:
        shard, _, _ = self._model_state.loaded("unload_adapter")
        self._check_unused(number)

        def commit() -> _Outcome:
            shard.decoder.drop_adapter(number)
            return _Outcome()

        return _Prepared(commit)

    def _check_unused(self, adapter: int) -> None:
        """Raise CommandRefused if a slot uses the adapter of this number."""
        cache = self._model_state.cache
        if cache is not None and adapter in cache.slots.adapters:
            raise CommandRefused(f"adapter {adapter} cannot be replaced or unloaded: a slot uses it")

    def _prepare_update(self) -> _Prepared:
        if parts := self._model_state.asleep_parts:
            raise CommandRefused(f"weights cannot be updated while the rank is asleep ({', '.join(parts)})")
        shard, _, _ = self._model_state.loaded("update_weights")
        if self._model_state.cache is None:
            raise CommandRefused("weights cannot be updated before there is a KV cache")
        with shard.request.open_weights(shard.request.directory):
            pass  # raises ModelError unless the files are there and can be read
        read_for, kernel = replace(shard.request, files=sampled_digests(shard.request.directory)), shard.kernel

        def commit() -> _Outcome:
            self._update_weights(read_for, kernel)
            return _Outcome()

        return _Prepared(commit, files=read_for.files)

    def _update_weights(self, read_for: LoadRequest, kernel: LinearKernel) -> None:
        """Drop the weights and all that was made for them, then read the files again. The KV cache's tensors stay."""
        request, report = self._model_state.ordered("update_weights")
        assert self._model_state.cache is not None, "checked before the vote"
        order, layers = self._model_state.cache.order, self._model_state.cache.layers
        self._model_state.drop_cache()
        self._model_state.drop_shard()
        gc.collect()
        self._backend.memory_pool.release_unused()
        shard = self._model_state.shard = self._load_shard(read_for, kernel)
        self._model_state.cache = make_cache(
            order, self._backend, decoder=shard.decoder, request=request, report=report, layers=layers
        )

    def _load_shard(self, request: LoadRequest, kernel: LinearKernel) -> LoadedShard:
        return load_shard(request, self._backend, kernel=kernel, progress=self._model_state.progress)

    def _prepare_sleep(self, level: int) -> _Prepared:
        if level not in _LEVELS:
            raise CommandRefused(f"sleep level {level}: there are 1 and 2")
        if parts := self._model_state.asleep_parts:
            raise CommandRefused(f"the rank is asleep already ({', '.join(parts)})")
        shard, _, _ = self._model_state.loaded("sleep")
        sleeping = SleepingWeights(shard.request, shard.kernel, checksum(shard), are_dropped=level == max(_LEVELS))
        offloaded = None if sleeping.are_dropped else self._backend.offload(shard.decoder.tensors)
        pool = self._backend.memory_pool
        return _Prepared(lambda: _Outcome(freed_bytes=_freed_by(lambda: self._fall_asleep(sleeping, offloaded), pool)))

    def _fall_asleep(self, sleeping: SleepingWeights, offloaded: OffloadedWeights | None) -> None:
        self._model_state.drop_cache()
        self._model_state.cache_sleeps = True
        self._model_state.sleeping = sleeping
        if sleeping.are_dropped:
            self._model_state.drop_shard()
        elif offloaded is not None:
            self._model_state.offload(offloaded)

    def _prepare_wake(self, command: ranks_pb2.WakeCommand) -> _Prepared:
        wakes_cache = command.HasField("cache")
        if not (command.weights or wakes_cache):
            raise CommandRefused("wake names neither weights nor cache")
        if wakes_cache and not self._model_state.cache_sleeps:
            raise CommandRefused("the KV cache is awake")
        offloaded = self._model_state.offloaded if command.weights else None

        def discard() -> None:
            if offloaded is not None:
                offloaded.release()

        try:
            shard = self._wake_weights() if command.weights else self._model_state.shard
            cache = self._wake_cache(command.cache, shard) if wakes_cache else None
        except BaseException:
            discard()
            raise

        def commit() -> _Outcome:
            if command.weights:
                self._model_state.shard, self._model_state.sleeping, self._model_state.offloaded = shard, None, None
            if cache is not None:
                self._swap(cache)
            return _Outcome()

        return _Prepared(commit, discard)

    def _wake_weights(self) -> LoadedShard:
        """Return the weights as they went to sleep. Raises WeightsChangedError, WeightsDamagedError."""
        sleeping, kept = self._model_state.sleeping, self._model_state.shard
        if sleeping is None:
            raise CommandRefused("the weights are awake")
        if not sleeping.are_dropped and kept is not None:
            if self._model_state.offloaded is not None:
                self._model_state.offloaded.restore()
                for mlp in kept.decoder.expert_mlps.values():
                    mlp.rejoin()
            if checksum(kept) != sleeping.checksum:
                self._model_state.drop_shard()  # the next epoch reads them again
                raise WeightsDamagedError("weights changed in memory while they were asleep; they are read again")
            return kept
        shard = self._load_shard(sleeping.request, sleeping.kernel)
        if checksum(shard) != sleeping.checksum:
            raise WeightsChangedError(
                f"{sleeping.request.directory}: the weights read on waking are not those that went to sleep; put the "
                "files back that the group was started with, or restart the whole group with the new ones"
            )
        return shard

    def _wake_cache(self, order: ranks_pb2.AllocateCache, shard: LoadedShard | None) -> ServingCache:
        request, report = self._model_state.ordered("wake")
        decoder = empty_decoder(request, self._backend) if shard is None else shard.decoder
        return self._make_cache(order, decoder, request, report)

    def _prepare_recording(self) -> _Prepared:
        if self._recorder is not None:
            raise CommandRefused("a profile is being recorded already; stop it first")
        recorder = StepRecorder(self._backend.profiler_activities)

        def commit() -> _Outcome:
            self._recorder = recorder
            return _Outcome()

        return _Prepared(commit, recorder.stop)

    def _prepare_record(self, times: StepTimes, *, with_trace: bool) -> _Prepared:
        if self._recorder is None:
            raise CommandRefused("no profile is being recorded; start one first")
        record = self._recorder.finish(with_trace=with_trace)
        told = (str(summary) if (summary := times.summary()) else "", self._told_of_graphs(), record.table)
        table = "\n".join(filter(None, told))

        def commit() -> _Outcome:
            self._recorder = None
            return _Outcome(table=table, trace=record.trace)

        return _Prepared(commit)

    def _told_of_graphs(self) -> str:
        """Describe the memory that graphs of steps take; empty where there are none."""
        _, report = self._model_state.ordered("stop_profile")
        if not report.graph_reserve_bytes:
            return ""
        taken, reserved = mib(self._model_state.graph_bytes), mib(report.graph_reserve_bytes)
        return f"graphs of steps: {taken} taken of the {reserved} that are kept for them"

    def _prepare_count(self) -> _Prepared:
        shard, _, _ = self._model_state.loaded("count_experts")
        return _Prepared(lambda: _Outcome(expert_counts=take_counts(shard.decoder)))

    def _prepare_experts(self, plan: ShardPlan, *, ahead: bool) -> _Prepared:
        """Read a plan's experts ahead, or go over to those that were read. A rank that cannot has all forget them."""
        if parts := self._model_state.asleep_parts:
            raise CommandRefused(f"experts cannot be placed while the rank is asleep ({', '.join(parts)})")
        shard, request, _ = self._model_state.loaded("place_experts")
        reading, self._ahead = self._ahead, None
        if reading is None or not reading.serves(plan, shard.decoder):
            if not ahead:
                raise CommandRefused("place_experts.shard_plan: its experts were not read; order it with ahead first")
            reading = ReadingAhead(shard, request, plan)
        if not (ahead and reading.is_reading):
            reading.require()
        return _Prepared(lambda: self._keep_reading(reading) if ahead else self._go_over(reading))

    def _keep_reading(self, reading: ReadingAhead) -> _Outcome:
        self._ahead = reading
        return _Outcome(is_reading=reading.is_reading)

    def _go_over(self, read: ReadingAhead) -> _Outcome:
        read.hold()
        self._model_state.adopt(read.plan)
        return _Outcome(read_bytes=read.read_bytes)


def _vote_of(files: Mapping[str, bytes]) -> int:
    """Return the vote of a rank that can do its part: 1, or a number of 62 bits by which files are compared."""
    named = b"".join(name.encode() + digest for name, digest in sorted(files.items()))
    return 1 + (int.from_bytes(hashlib.sha256(named).digest()[:8], "little") >> 2) if files else 1


def _disagreement(votes: Sequence[int], files: Mapping[str, bytes]) -> str:
    """Describe which ranks would read other weights than rank 0, and what this rank has, for a comparison."""
    others = ", ".join(str(rank) for rank, vote in enumerate(votes) if vote != votes[0])
    own = ", ".join(f"{name} {digest.hex()[:8]}" for name, digest in files.items())
    return f"weights of ranks {others} are not those of rank 0; give all ranks the same files. This rank has: {own}"


def _freed_by(change: Callable[[], None], pool: MemoryPool) -> int:
    """Make a change; return by how many bytes of its device the process then holds less, spare memory given back."""
    before = pool.held_bytes()
    change()
    gc.collect()
    pool.release_unused()
    return max(0, before - pool.held_bytes())


def _problem_of(command: ranks_pb2.GroupCommand, error: BaseException) -> str:
    """Log and return why this rank cannot carry the command out."""
    problem = _told(error)
    logger.warning("cannot do %s: %s", command.WhichOneof("action"), problem)
    return problem


def _told(error: BaseException) -> str:
    text = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]
