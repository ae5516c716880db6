"""Base classes of exchanges by the native library: one rank's waits, and its ends of rounds and links.

A round or message is one call of the native library, made without Python's lock. A call that blocks returns after a
tenth of a second at the latest. Python then checks that the awaited ranks are alive, lets signal handlers run, and
repeats the call.

An *end word* ends the exchange for all ranks. Whoever ends it sets the word once: `abort`, or the first rank that finds
another one gone. It says which rank that was. So a rank that dies in an exchange costs the others one check, not a
timeout, and all of them learn its number.

One thread makes all calls; only `abort` and `close` may come from another.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final

import torch

from hetero_worker.distributed.exchange import (
    Arrived,
    GroupedExchange,
    PendingTensor,
    Rounds,
    Traffic,
    check_contributors,
    check_counts,
    check_summable,
)
from hetero_worker.distributed.native_exchange import FIRST_LOST, WAITING, ffi
from hetero_worker.distributed.routes import Link, Ranks
from hetero_worker.errors import ExchangeAborted, ExchangeError, ExchangeTimeout, PeerLost
from hetero_worker.native.loading import address_of

SPIN_S: Final = 5e-6
"""Short, because yielding costs nothing on a core of one's own, and spinning costs much on a shared one."""
YIELD_S: Final = 0.002
"""A longer wait sleeps: waking then takes some 50 µs, and others may have the core."""
LOOK_EVERY_S: Final = 0.1
"""Interval at which a waiting rank checks that those that it waits for are alive."""
_MAX_ROUTES: Final = 1024
_DTYPES: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_OUT_OF_TURN: Final = "tensors of one link must be waited for in the order in which they were posted"


@dataclass(frozen=True, slots=True)
class Late:
    """Ranks that are waited for, and what they did not do; for an error's text."""

    ranks: tuple[int, ...]
    did_not: str


@dataclass(frozen=True, slots=True)
class NativeCall:
    """A round or message as a call that native code can make: function(*arguments) returns 0 when it is done."""

    function: int
    """Address."""
    arguments: tuple[int, int, int]
    finish: Callable[[int], None]
    """Completes a call that returned another code; raises as the exchange does."""
    kept: tuple[object, ...]
    """Owners of the memory that the arguments point at, except the tensor's."""


class NativeRank(ABC):
    """State of one rank that all of its rounds and links use; see the module."""

    def __init__(self, state: Any, *, rank: int, library: Any, timeout_s: float) -> None:
        """`state`: its struct in C, whose waits are set here."""
        self.state = state
        self.rank = rank
        self.library = library
        self.timeout_s = timeout_s
        self._nap_s = min(LOOK_EVERY_S, timeout_s)
        state.spin_ns, state.yield_ns, state.nap_ns = (int(s * 1e9) for s in (SPIN_S, YIELD_S, self._nap_s))
        self._closed_because = ""
        self.while_waiting: Callable[[], None] = _nothing
        """Called each time that this rank has waited for LOOK_EVERY_S; until `close`."""

    @property
    def traffic(self) -> Traffic:
        """Amount that this rank has moved so far."""
        state = self.state
        return Traffic(state.published_bytes, state.rounds, state.messages, seconds=state.busy_ns * 1e-9)

    def check_open(self) -> None:
        """Raise ExchangeAborted or PeerLost if the exchange has ended."""
        if self.state.closed or self._end_word():
            raise self.ended()

    def finish(self, code: int, again: Callable[[], int], *, late: Callable[[], Late], at: Callable[[], int]) -> None:
        """Complete a call that returned `code`, which is not 0.

        `again` repeats the call. `at` returns how far it has come: the timeout restarts with every progress. Raises
        ExchangeAborted, ExchangeTimeout, PeerLost.
        """
        since_s, reached = time.monotonic() - self._nap_s, at()
        while code == WAITING:
            self.while_waiting()
            self._check_peers(late, since_s=since_s)
            code = again()
            if at() != reached:
                since_s, reached = time.monotonic() - self._nap_s, at()
        if code:
            raise self.ended()

    @abstractmethod
    def abort(self) -> None:
        """End the exchange for all ranks. From any thread; never blocks."""

    def close(self) -> None:
        """End the exchange for this rank. From any thread; others may go on."""
        self.while_waiting = _nothing
        self._close("the exchange is closed")

    def ended(self) -> ExchangeError:
        """Return why the exchange has ended."""
        if self._closed_because:
            return ExchangeAborted(self._closed_because)
        if (word := self._end_word()) >= FIRST_LOST:
            return PeerLost(f"rank {word - FIRST_LOST} ended, or left the group, while others waited for it")
        return ExchangeAborted("the epoch was aborted")

    @abstractmethod
    def _end_word(self) -> int:
        """Return the end word; 0 while the exchange lives."""

    def _close(self, reason: str) -> None:
        self._closed_because = self._closed_because or reason
        self.state.closed = 1

    def _check_alive(self, late: Callable[[], Late]) -> Late:
        """Return the ranks that are late, all of which live as far as is known. Raises PeerLost."""
        return late()

    def _check_peers(self, late: Callable[[], Late], *, since_s: float) -> None:
        """Check once, during a wait that began at `since_s` (monotonic), on the late ranks.

        Raises PeerLost, after ending the exchange for all, when one of them is gone; ExchangeTimeout when the time is
        over.
        """
        waited_for = self._check_alive(late)
        if waited_for.ranks and time.monotonic() - since_s >= self.timeout_s:
            self._close("a round or message was given up in its middle: the exchange cannot go on")
            ranks = ", ".join(map(str, waited_for.ranks))
            raise ExchangeTimeout(f"rank(s) {ranks} did not {waited_for.did_not} within {self.timeout_s:g} s")


class NativeEnd(ABC):
    """Base of one rank's end of rounds or of a link, whose struct in C is `state`."""

    def __init__(self, rank: NativeRank, state: Any) -> None:
        self._rank = rank
        self._state = state

    def _call(self, function: Any, *arguments: Any) -> None:
        """Call one of the library's functions with the state and then the arguments. Raises as the exchange does."""
        if code := function(self._state, *arguments):
            self._finish(function, arguments, code)

    def _native_call(self, function: Any, *arguments: Any) -> NativeCall:
        """Return `_call` with two arguments as a call for native code."""
        first, second = (argument if isinstance(argument, int) else address_of(argument) for argument in arguments)
        words = address_of(self._state), first, second
        return NativeCall(address_of(function), words, partial(self._finish, function, arguments), (self, arguments))

    def _finish(self, function: Any, arguments: tuple[Any, ...], code: int) -> None:
        """Complete a call that returned `code`, which is not 0."""
        self._rank.finish(code, partial(function, self._state, *arguments), late=self._late, at=self._at)

    @abstractmethod
    def _late(self) -> Late:
        """Return the ranks that a call waits for."""

    @abstractmethod
    def _at(self) -> int:
        """Return how far calls have come."""


class NativeRounds(NativeEnd):
    """One rank's end of a group's or subgroup's rounds. Ranks are named by their number in the whole group."""

    def __init__(self, rank: NativeRank, state: Any, ranks: Ranks, *, share: Any, gather: Any) -> None:
        """`share`, `gather`: functions of the library."""
        super().__init__(rank, state)
        self._ranks = ranks
        self._share_function = share
        self._gather_function = gather
        self._routes: dict[tuple[object, ...], Any] = {}
        self._gatherings: dict[tuple[object, ...], Any] = {}
        self.world_size = len(ranks)

    def all_reduce(self, tensor: torch.Tensor, contributors: Sequence[int]) -> None:
        """Sum in place, as SumExchange.all_reduce."""
        if tensor.dtype not in _DTYPES:
            check_summable(tensor)
        self._share(tensor, tuple(contributors))

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace the tensor by the source's, as Exchange.broadcast."""
        self._share(tensor, (source,))

    def all_gather(self, tensor: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's tensor, as Exchange.all_gather. Raises ValueError if `counts` do not fit."""
        check_counts(tensor, counts, rank=self._rank.rank, ranks=self._ranks)
        gathering = self._gathering(tensor.element_size(), tuple(counts))
        out = torch.empty(sum(counts), dtype=tensor.dtype)
        self._call(self._gather_function, gathering, data_address(tensor), data_address(out))
        bounds = pairwise(accumulate(counts, initial=0))
        return [out[begin:end] for begin, end in bounds]

    def all_reduce_call(self, tensor: torch.Tensor, contributors: Sequence[int]) -> NativeCall:
        """Return `all_reduce` of this tensor as a call for native code. The caller keeps the tensor's memory."""
        check_summable(tensor)
        route = self._route(tensor, tuple(contributors))
        return self._native_call(self._share_function, route, data_address(tensor))

    def _share(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> None:
        self._call(self._share_function, self._route(tensor, contributors), data_address(tensor))

    def _route(self, tensor: torch.Tensor, contributors: tuple[int, ...]) -> Any:
        key = (tensor.shape, tensor.dtype, contributors)
        return self._routes.get(key) or self._make_route(key, tensor, contributors)

    def _make_route(self, key: tuple[object, ...], tensor: torch.Tensor, contributors: tuple[int, ...]) -> Any:
        """Return the hx_route of tensors of this shape and type, and remember it by its key."""
        check_contributors(contributors, self._ranks)
        mask = sum(1 << self._ranks.index(rank) for rank in set(contributors))
        if len(self._routes) >= _MAX_ROUTES:
            self._routes.clear()
        fields = {"bytes": tensor.nbytes, "dtype": _DTYPES.get(tensor.dtype, 0), "contributors": mask}
        route = self._routes[key] = ffi.new("hx_route *", fields)
        return route

    def _gathering(self, element_bytes: int, counts: tuple[int, ...]) -> Any:
        key = (element_bytes, counts)
        if key not in self._gatherings:
            if len(self._gatherings) >= _MAX_ROUTES:
                self._gatherings.clear()
            sizes = [count * element_bytes for count in counts]
            self._gatherings[key] = ffi.new("hx_gathering *", {"bytes": sizes, "longest": max(sizes)})
        return self._gatherings[key]

    def _late_ranks(self) -> tuple[int, ...]:
        """Return the ranks of the seats that did not come in time."""
        return tuple(rank for seat, rank in enumerate(self._ranks) if self._state.late >> seat & 1)


class NativeSource(NativeEnd):
    """The sending end of a link."""

    def __init__(self, rank: NativeRank, state: Any, *, send: Any) -> None:
        """`send`: function of the library."""
        super().__init__(rank, state)
        self._send_function = send

    def send(self, tensor: torch.Tensor) -> None:
        """Send, as Exchange.send."""
        self._rank.check_open()
        if tensor.numel():
            self._call(self._send_function, data_address(tensor), tensor.nbytes)

    def send_call(self, tensor: torch.Tensor) -> NativeCall:
        """Return `send` of a tensor that is not empty as a call for native code. The caller keeps its memory."""
        return self._native_call(self._send_function, data_address(tensor), tensor.nbytes)


class NativeReceiver(NativeEnd):
    """A receiving end of a link. Messages are counted from 1 over the link's life."""

    def __init__(self, rank: NativeRank, state: Any, *, receive: Any) -> None:
        """`receive`: function of the library."""
        super().__init__(rank, state)
        self._receive_function = receive
        self._posted = 0

    def post(self, out: torch.Tensor) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        first = self.post_bytes(out.nbytes)
        return _Receipt(self, out, first) if out.nbytes else Arrived(out)

    def receive_call(self, out: torch.Tensor) -> NativeCall:
        """Return a receipt and its wait as a call for native code; `out` is not empty.

        Nothing else is posted meanwhile. The caller keeps the memory of `out`.
        """
        return self._native_call(self._receive_function, data_address(out), out.nbytes)

    def take(self, out: torch.Tensor, first: int) -> None:
        """Copy the messages from number `first` on into `out`. Raises ValueError when it is not their turn."""
        self._check_turn(first)
        self._call(self._receive_function, data_address(out), out.nbytes)

    def post_bytes(self, num_bytes: int) -> int:
        """Post the receipt of the link's next tensor and return the number of its first message.

        Calls of native code may have taken messages that were not posted.
        """
        self._rank.check_open()
        first = max(self._posted, int(self._state.number)) + 1
        self._posted = first + self._num_messages(num_bytes) - 1
        return first

    def _check_turn(self, number: int) -> None:
        self._rank.check_open()
        if self._state.number != number - 1:
            raise ValueError(_OUT_OF_TURN)

    @abstractmethod
    def _num_messages(self, num_bytes: int) -> int:
        """Return how many messages a tensor of this many bytes takes; 0 if it is empty."""


class _Receipt:
    """PendingTensor of a posted tensor whose first message is `first`."""

    def __init__(self, receiver: NativeReceiver, out: torch.Tensor, first: int) -> None:
        self._receiver = receiver
        self._out = out
        self._first = first
        self._done = False

    def wait(self) -> torch.Tensor:
        if not self._done:
            self._receiver.take(self._out, self._first)
            self._done = True
        return self._out


class NativeExchange(GroupedExchange):
    """Base of HostExchanges by the native library, whose rounds and messages native code can call."""

    def __init__(
        self,
        rank: NativeRank,
        groups: Mapping[Ranks, Rounds],
        *,
        sources: Mapping[Link, NativeSource],
        receivers: Mapping[Link, NativeReceiver],
    ) -> None:
        super().__init__(rank.rank, groups)
        self._native_rank = rank
        self._sources = sources
        self._receivers = receivers
        self._lock = threading.Lock()
        """Held by who ends the exchange: what `abort` says to all is said before `close` leaves."""
        self._closed = False

    def abort(self) -> None:
        """End the exchange for all ranks: blocked and later calls raise ExchangeAborted. No effect once closed."""
        with self._lock:
            if not self._closed:
                self._native_rank.abort()

    def close(self) -> None:
        """Leave: later calls raise, and a rank that still waits for this one learns that it left. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._native_rank.close()

    @property
    def traffic(self) -> Traffic:
        """Amount that this rank has moved."""
        return self._native_rank.traffic

    def send(self, tensor: torch.Tensor, link: Link) -> None:
        """Send over a link, as Exchange.send."""
        self._sources[link].send(tensor)

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        return self._receivers[link].post(out)

    def send_call(self, tensor: torch.Tensor, link: Link) -> NativeCall:
        """Return `send` of a tensor that is not empty as a call for native code. The caller keeps its memory."""
        return self._sources[link].send_call(tensor)

    def receive_call(self, out: torch.Tensor, link: Link) -> NativeCall:
        """Return a receipt and its wait as a call for native code, as NativeReceiver.receive_call."""
        return self._receivers[link].receive_call(out)


def data_address(tensor: torch.Tensor) -> int:
    """Return where a contiguous host tensor's elements lie. Raises ValueError for any other tensor."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise ValueError("tensors are exchanged where they lie: they must be contiguous and in host memory")
    return tensor.data_ptr()


def _nothing() -> None:
    pass
