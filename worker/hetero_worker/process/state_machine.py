"""State machine of a rank: everything between its first Hello and the end of its stream.

    JOINING ──FormGroup──► FORMED ──LoadModel──► LOADED ──AllocateCache──► SERVING ──StepPlan──╮
       ▲                     │                     │                          │ ▲──────────────╯
       ╰──────Abort──────────┴──────────┬──────────┴──────────────────────────╯
                                        ╰──(failed, or a peer did)──► BROKEN ──Abort──► JOINING

One thread, the main one, runs all of it, in the order of the gateway's messages. The link's threads only report aborts
to the EpochFence, and to the gateway that this process is alive. The rank decides nothing: it executes a message or
reports why it could not, and refuses a message that does not fit its state or epoch. Weights outlive epochs, and Hello
says which they are. Groups, cache and slots end with their epoch, and groups have gone before Hello is sent again.
Groups exist before the plan is known: FormGroup makes those of all ranks, LoadModel brings the plan and connects what
it needs.

`step_loop.py` executes plans, in order. A step under way is finished and answered before any message but the next
plans is looked at.

A rank that is asked to end while it serves says so and serves on until the gateway's Shutdown.

A state machine serves one gateway; `reconnect.py` decides what follows.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT
from hetero_api.errors import HeteroError, ModelError, ModelReadError, PlanError
from hetero_api.host.heartbeat import Heartbeat, RankState
from hetero_api.v1 import ranks_pb2
from hetero_worker.checkpoints.sampled_digests import sampled_digests
from hetero_worker.distributed.coordinator import GroupCoordinator
from hetero_worker.distributed.rendezvous import GroupRequest, StoreListener
from hetero_worker.errors import (
    ExchangeAborted,
    ExchangeError,
    MemoryBudgetError,
    PinningError,
    ProtocolError,
    WeightsChangedError,
)
from hetero_worker.host.binding import Binding, Unbound
from hetero_worker.probe.speeds import RankProbe
from hetero_worker.process.epoch_fence import EpochFence
from hetero_worker.process.gateway_link import Arrival, Event, GatewayLink, LeaveRequested, StreamEnded
from hetero_worker.process.messages import (
    RankIdentity,
    file_digests,
    group_request,
    load_request,
    quantized_config,
    report_pinning,
)
from hetero_worker.process.step_loop import StepLoop
from hetero_worker.runners.base import Runner, WorkProgress

_log = logging.getLogger(__name__)

LOAD_LIMIT_S: Final = 3600.0
"""A load that reads nothing for so long hangs. The gateway has a shorter limit; this is the supervisor's."""
_ECHOES: Final = 8
"""Echoes after the first, which only warms up."""
_LIMIT_FACTOR: Final = 2.0
"""Limit of all other work, as a multiple of a collective's timeout."""

_PERMANENT: Final = (ModelError, PlanError, MemoryBudgetError, PinningError, WeightsChangedError)


class FormGroupFunction(Protocol):
    """Signature of `coordinator.form_group`; tests pass their own."""

    def __call__(
        self, request: GroupRequest, *, listener: StoreListener, aborted: Callable[[], bool]
    ) -> GroupCoordinator:
        """Form the epoch's groups. Raises ExchangeAborted once `aborted` returns True."""
        ...


class WorkerStateMachine:
    """One rank's session with one gateway.

    `binding` is checked again whenever an epoch begins and when weights were read. Heartbeats carry the `progress` that
    runner and probe count. `reconnects` says that another
    session follows the loss of the gateway, so that a load under way is worth finishing.
    """

    def __init__(
        self,
        identity: RankIdentity,
        *,
        link: GatewayLink,
        runner: Runner,
        form: FormGroupFunction,
        abort_timeout_s: float,
        give_up: Callable[[], None],
        probe: RankProbe,
        heartbeat: Heartbeat | None = None,
        binding: Binding | None = None,
        progress: WorkProgress | None = None,
        reconnects: bool = False,
    ) -> None:
        self.gateway_lost = False
        """Whether it ended only because its gateway did."""
        self.was_in_group = False
        """Whether the rank had a place in an epoch."""
        self._identity = identity
        self._link = link
        self._runner = runner
        self._form = form
        self._give_up = give_up
        self._heartbeat = heartbeat or Heartbeat.open(None)
        self._binding = binding or Unbound()
        self._probe = probe
        self._progress = progress or WorkProgress()
        self._reconnects = reconnects
        self._fence = EpochFence(patience_s=abort_timeout_s, give_up=give_up)
        self._listener = StoreListener(identity.store_host)
        self._state = RankState.JOINING
        self._epoch = 0
        self._ended_epoch = 0
        self._rank = -1
        self._is_leaving = False
        """Whether the gateway was asked for a Shutdown."""
        self._plans = StepLoop(runner, link, self._heartbeat)
        self._group: GroupCoordinator | None = None
        self._form_message: ranks_pb2.FormGroup | None = None
        self._files: Mapping[str, bytes] = {}
        """Digests that the last Hello had."""
        self._unreadable: ModelError | None = None
        """Problem of the files that the last Hello could not name, for the load to report."""
        self._orders: dict[str | None, tuple[RankState, Callable[[Arrival], None]]] = {
            "step_plan": (RankState.SERVING, self._plans.take),
            "form_group": (RankState.JOINING, self._join_group),
            "load_model": (RankState.FORMED, self._load),
            "allocate_cache": (RankState.LOADED, self._allocate),
        }

    def run(self) -> int:
        """Run until the stream ends; return the process's exit code."""
        self._link.start(self._observe)
        try:
            while (exit_code := self._run_epoch()) is None:
                pass
            return exit_code
        finally:
            self._leave_group()
            self._listener.close()

    def request_leave(self, reason: str) -> None:
        """End soon, in good order. Callable from any thread but the main one, which may be blocked.

        A rank that serves goes when its gateway says so, which may have streams to end, or when it is asked again.
        """
        if self._state is RankState.SERVING and not self._is_leaving:
            self._is_leaving = True
            self._send(ranks_pb2.RankMessage(leaving=ranks_pb2.Leaving(reason=reason)))
            return
        event = LeaveRequested(reason)
        self._observe(event)
        self._link.inject(event)

    def hang_up(self, timeout_s: float) -> None:
        """Send what is queued and close the stream, within `timeout_s`."""
        self._link.finish(timeout_s)

    def _observe(self, event: Event) -> None:
        """Handle what cannot wait for the main thread; on the link's thread."""
        if not isinstance(event, Arrival):
            self._fence.close(patiently=self._reconnects and isinstance(event, StreamEnded))
        elif event.message.HasField("abort"):
            self._fence.abort(event.message.epoch)
        elif event.message.HasField("shutdown"):
            self._fence.close(patiently=self._reconnects)

    def _run_epoch(self) -> int | None:
        """Run from Hello to the epoch's end; return an exit code when the session ends with it."""
        self._say_hello()
        while True:
            event = self._next_event()
            if event is None:
                return EXIT_PERMANENT
            if not isinstance(event, Arrival):
                return self._end_session(event)
            message = event.message
            body = message.WhichOneof("body")
            if body == "shutdown":
                _log.info("epoch=%d rank=%d shutdown: %s", self._epoch, self._rank, message.shutdown.reason)
                self.gateway_lost = True
                return EXIT_OK
            if message.epoch <= self._ended_epoch:
                _log.info("epoch=%d: dropped %s of ended epoch %d", self._epoch, body, message.epoch)
            elif body == "abort":
                self._end_epoch(message)
                return None
            elif self._state is not RankState.BROKEN and not self._attempt(partial(self._execute, body, event)):
                return EXIT_PERMANENT

    def _next_event(self) -> Event | None:
        """Return the next event, after finishing a step under way; None if the step failed permanently."""
        if not self._finish_by(self._plans.rest):
            return None
        event = self._link.receive()
        if not self._plans.is_next(event) and not self._finish_by(self._plans.finish):
            return None
        return event

    def _finish_by(self, finish: Callable[[], None]) -> bool:
        """Finish a step that is under way. Returns False if it failed permanently."""
        if not self._plans.is_open:
            return True
        with self._heartbeat.working(self._usual_limit_s):
            return self._attempt(finish)

    def _end_session(self, event: StreamEnded | LeaveRequested) -> int:
        if isinstance(event, LeaveRequested):
            _log.info("epoch=%d rank=%d leaving: %s", self._epoch, self._rank, event.reason)
            return EXIT_OK
        _log.error("epoch=%d rank=%d: %s", self._epoch, self._rank, event.reason)
        self.gateway_lost = not event.permanent
        return EXIT_PERMANENT if event.permanent else EXIT_FAILURE

    def _say_hello(self) -> None:
        self._enter(RankState.JOINING)
        hello = ranks_pb2.Hello()
        hello.CopyFrom(self._identity.hello)
        if (pinning := self._binding.recheck()) is not None:
            report_pinning(hello.device, pinning)
        hello.store_address = self._listener.open()
        held = self._runner.held
        self._files, self._unreadable = (held.files, None) if held else _read_files(self._identity.model_dir)
        hello.files.extend(file_digests(self._files))
        if held is not None:
            shard = ranks_pb2.HeldShard(shard_plan=held.shard_plan.to_proto(), plan_key=held.plan_key, rank=held.rank)
            hello.held.CopyFrom(shard)
        self._link.send(ranks_pb2.RankMessage(hello=hello))

    def _end_epoch(self, message: ranks_pb2.GatewayMessage) -> None:
        _log.warning("epoch=%d rank=%d aborted: %s", message.epoch, self._rank, message.abort.reason)
        self._leave_group()
        self._listener.close()
        self._ended_epoch = message.epoch

    def _leave_group(self) -> None:
        """Free everything that belongs to the epoch. Ends the process if its groups cannot be left."""
        self._link.stop_heartbeats()
        self._plans.drop()
        self._runner.detach()
        try:
            if self._group is not None:
                self._group.close()
        except ExchangeError:
            _log.exception("epoch=%d rank=%d: cannot leave the group", self._epoch, self._rank)
            self._give_up()
        self._group = None
        self._fence.leave()

    def _attempt(self, work: Callable[[], None]) -> bool:
        """Do the work; report an error to the gateway. Returns False if it failed permanently."""
        try:
            work()
        except ExchangeAborted as error:
            self._break_epoch(str(error))
        except Exception as error:  # noqa: BLE001 — the loop's top: the gateway must know of every error
            if not self._fence.aborted:
                return self._report(error)
            self._break_epoch(f"{type(error).__name__}: {error}")
        return True

    def _execute(self, body: str | None, arrival: Arrival) -> None:
        state, order = self._orders.get(body, (None, None))
        if order is None:
            raise ProtocolError(f"the gateway sent {body}, which this rank does not know")
        if self._state is not state:
            raise ProtocolError(f"the gateway sent {body} to a rank that is {self._state.name}")
        if body != "form_group" and arrival.message.epoch != self._epoch:
            raise ProtocolError(f"the gateway sent {body} of epoch {arrival.message.epoch} in epoch {self._epoch}")
        with self._heartbeat.working(self._limit_s(arrival.message)):
            order(arrival)

    def _limit_s(self, message: ranks_pb2.GatewayMessage) -> float:
        # Commands read and move weights; with the cache the driver pins experts that are streamed.
        if (
            message.step_plan.HasField("command")
            or message.HasField("load_model")
            or message.HasField("allocate_cache")
        ):
            return LOAD_LIMIT_S
        return _limit_within(message.form_group) if message.HasField("form_group") else self._usual_limit_s

    @property
    def _usual_limit_s(self) -> float:
        return LOAD_LIMIT_S if self._form_message is None else _limit_within(self._form_message)

    def _enter(self, state: RankState) -> None:
        self._state = state
        self._heartbeat.enter(state, epoch=self._epoch)

    def _break_epoch(self, reason: str) -> None:
        """End the epoch for this rank; its Abort is on the way."""
        _log.warning("epoch=%d rank=%d unwound: %s", self._epoch, self._rank, reason)
        self._enter(RankState.BROKEN)
        self._leave_group()

    def _report(self, error: Exception) -> bool:
        _log.error("epoch=%d rank=%d failed", self._epoch, self._rank, exc_info=error)
        permanent = isinstance(error, _PERMANENT) and not isinstance(error, ModelReadError)
        text = str(error) if isinstance(error, HeteroError) else f"{type(error).__name__}: {error}"
        self._send(ranks_pb2.RankMessage(failure=ranks_pb2.Failure(message=text, permanent=permanent)))
        if self._group is not None:
            self._group.abort()  # so that peers need not wait for the gateway's Abort
        self._break_epoch("this rank failed")
        return not permanent

    def _send(self, message: ranks_pb2.RankMessage) -> None:
        message.epoch = self._epoch
        self._link.send(message)

    def _join_group(self, arrival: Arrival) -> None:
        message = arrival.message.form_group
        self._epoch, self._rank = arrival.message.epoch, message.rank
        if message.rank >= len(message.places):
            raise ProtocolError(f"form_group.rank is {message.rank}, and form_group.places holds {len(message.places)}")
        self.was_in_group = True
        self._plans.begin_epoch(self._epoch, rank=self._rank)
        self._start_heartbeats(message.heartbeat_interval_s)
        self._fence.enter(self._epoch)
        self._binding.require()
        with self._binding.communicating():
            request = group_request(self._identity, message, epoch=self._epoch)
            self._group = self._form(request, listener=self._listener, aborted=lambda: self._fence.aborted)
        self._fence.adopt(self._group.abort)
        formed = self._group.formed(measure=message.measure_exchange)
        self._form_message = message
        config = quantized_config(self._identity.model_config, message)
        if message.measure_parts:
            formed.costs.CopyFrom(self._probe.costs(message.dtype, config, self._group))
        if message.dtype:
            formed.costs.turnaround_s = self._turnaround_s()
        self._enter(RankState.FORMED)
        formed.MergeFrom(self._probe.fixed_needs(message.dtype, config))
        self._send(ranks_pb2.RankMessage(formed=formed))

    def _turnaround_s(self) -> float:
        """Measure seconds to the gateway and back. Raises ExchangeAborted when the epoch or the session is over."""
        times = []
        for number in range(1 + _ECHOES):
            self._probe.compute()
            began_s = time.monotonic()
            self._send(ranks_pb2.RankMessage(echo=ranks_pb2.Echo(number=number)))
            event = self._link.receive()
            if not (isinstance(event, Arrival) and event.message.HasField("echo")):
                self._link.put_back(event)
                raise ExchangeAborted("the epoch ended while this rank measured the way to the gateway")
            times.append(time.monotonic() - began_s)
        return statistics.median(times[1:])

    def _start_heartbeats(self, interval_s: float) -> None:
        """Send heartbeats until the epoch's end, unless the interval is 0."""
        epoch = self._epoch

        def beat() -> ranks_pb2.RankMessage:
            heartbeat = self._plans.heartbeat()
            heartbeat.graph_bytes = self._runner.graph_bytes
            if (progress := self._progress.message()) is not None:
                heartbeat.progress.CopyFrom(progress)
            return ranks_pb2.RankMessage(epoch=epoch, heartbeat=heartbeat)

        if interval_s > 0:
            self._link.start_heartbeats(interval_s, beat)

    def _load(self, arrival: Arrival) -> None:
        form, group = self._form_message, self._group
        if form is None or group is None:
            raise ProtocolError("the gateway sent load_model before form_group")
        if self._unreadable is not None:
            raise self._unreadable
        order = arrival.message.load_model
        request = load_request(self._identity, form, order, rank=self._rank, files=self._files)
        with self._binding.communicating():
            exchange = group.connect(
                request.shard_plan,
                draft_plan=request.draft_plan,
                inputs_everywhere=bool(request.config.layer_input_size),
                batch_invariant=request.batch_invariant,
            )
        self._runner.attach(exchange)
        self._plans.meet_over(exchange)
        with self._fence.patient():
            loaded = self._runner.load(request)
        self._fence.check()
        if (percent := self._binding.check_memory()) is not None:
            loaded.local_memory_percent = percent
        self._enter(RankState.LOADED)
        self._send(ranks_pb2.RankMessage(loaded=loaded))

    def _allocate(self, arrival: Arrival) -> None:
        order = arrival.message.allocate_cache
        kv_bytes = self._runner.allocate(order.num_blocks, order.block_size, order.num_snapshots)
        allocated = ranks_pb2.Allocated(kv_bytes=kv_bytes, streaming_problem=self._runner.share_experts())
        self._enter(RankState.SERVING)
        self._send(ranks_pb2.RankMessage(allocated=allocated))


def _read_files(directory: Path) -> tuple[Mapping[str, bytes], ModelError | None]:
    """Return the digests of the model's files, or none and the reason why they cannot be read."""
    try:
        return sampled_digests(directory), None
    except ModelError as error:
        return {}, error


def _limit_within(form: ranks_pb2.FormGroup) -> float:
    """Return the longest time for any work but loads, from the timeout of the group's collectives."""
    return _LIMIT_FACTOR * form.timeout_s
