"""How tensors of a device cross the host: copies (`Staging`), and links to ranks on the host (`DirectLinks`).

Copies of a GPU run on streams of their own (memory/streams.py) and use pinned memory only: buffers of torch's
pinned allocator, or *parts* of the memory that ranks share, registered with the driver. A copy off the device sees all
work that the thread gave to the device before. A copy onto it waits until its target is free, not for later work of the
thread; work that follows the copy sees what it brought. No copy waits for the whole device, and no thread waits before
it asks for the result. On host cores copies are plain, and done when the call returns.

Over a link, the device writes to and reads from the memory that ranks share:

    GPU rank, source      device ──copy──► its area of the link, which receivers read        no copy on the host
    GPU rank, receiver    device ◄──copy── the source's area, which is given back later      no copy on the host

The segment is pinned for the device (ShmSegment.pin). A sent tensor goes straight to the areas. If receivers are so far
behind that there is no room, it goes through a buffer of the staging, and into the areas in its turn. A received tensor
is read where it lies. Its areas are given back when the device's copy is done. That is checked when the next tensor of
the link is taken, and when this rank has waited for long for anything (`ShmExchange.while_waiting`). So the last tensor
of a link may keep its source waiting, but not for ever: the copy itself waits for nobody.

A copy onto the device may begin when its receipt has been posted. The device computes later work, such as the rank's
own part of an MLP, meanwhile. If memory cannot be pinned, and on other exchanges, everything goes through the staging's
buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch

from hetero_worker.distributed.exchange import SENT, Arrived, HostExchange, PendingSend, PendingTensor
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.memory.streams import PAST, DeviceStreams, HostPins, Moment, Way

_log = logging.getLogger(__name__)

Parts = Iterable[torch.Tensor]
"""Pieces of host memory, uint8, that hold a tensor's bytes one after another."""


class HostCopy(PendingTensor, Protocol):
    """Copy off the device that is under way."""

    @property
    def is_here(self) -> bool:
        """True if `wait` would return at once."""
        ...


class Staging(HostPins, Protocol):
    """Copies of one device to and from the host; memory for `write_parts` and `read_parts` is pinned first."""

    def now(self) -> Moment:
        """Return the moment at which all work that the thread has given to the device is done."""
        ...

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start a copy to the host and return it; the caller leaves `tensor` alone until it has waited for the copy."""
        ...

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised contiguous host memory for a tensor of this shape and type."""
        ...

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:
        """Copy `host`, which the caller gives up, into `out`; returns before the copy is done.

        The copy starts at `after`, when nobody else uses `out` any more: by default when all work is done that the
        thread has given to the device.
        """
        ...

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Copy a contiguous tensor into pinned memory, and return the moment when it is done; keep it until then."""
        ...

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:
        """Copy pinned memory into contiguous `out`, not before `after`. Return the moment when the copy is done."""
        ...


class PlainStaging:
    """Staging of a rank whose tensors are the host's."""

    def pin(self, address: int, num_bytes: int) -> str:  # noqa: ARG002
        """Return "": the host copies from and to any memory."""
        return ""

    def unpin(self, address: int) -> None:
        """Do nothing, like `pin`."""

    def now(self) -> Moment:
        """Return the past: all work is done."""
        return PAST

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Return a copy."""
        return Arrived(tensor.clone())

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return uninitialised memory of this shape and type."""
        return torch.empty_like(like)

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:  # noqa: ARG002
        """Copy `host` into `out`."""
        out.copy_(host)

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Copy the tensor into the parts."""
        for source, part in _beside(tensor, parts):
            part.copy_(source)
        return PAST

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:  # noqa: ARG002
        """Copy the parts into `out`."""
        for target, part in _beside(out, parts):
            target.copy_(part)
        return PAST


class StreamStaging:
    """Staging of a GPU, on streams; see the module."""

    def __init__(self, streams: DeviceStreams) -> None:
        self._streams = streams

    def pin(self, address: int, num_bytes: int) -> str:
        """Pin memory; return why it cannot be pinned, empty if it can."""
        return self._streams.pin(address, num_bytes)

    def unpin(self, address: int) -> None:
        """Wait for all copies, and unpin memory."""
        self._streams.settle()
        self._streams.unpin(address)

    def now(self) -> Moment:
        """Return the moment at which all work given to the device is done."""
        return self._streams.now()

    def start_to_host(self, tensor: torch.Tensor) -> HostCopy:
        """Start a copy into a pinned buffer."""
        host = self.host_buffer(tensor)
        done = self._streams.copy(Way.OUT, [(tensor, host)], after=self.now())
        return _ComingOff(tensor, host, done)

    def host_buffer(self, like: torch.Tensor) -> torch.Tensor:
        """Return an uninitialised pinned buffer."""
        return self._streams.pinned(like.shape, like.dtype)

    def to_device(self, host: torch.Tensor, out: torch.Tensor, *, after: Moment | None = None) -> None:
        """Start a copy onto the device; later work of the thread waits for it."""
        self._streams.compute_after(self._streams.copy(Way.IN, [(host, out)], after=after or self.now()))

    def write_parts(self, tensor: torch.Tensor, parts: Parts) -> Moment:
        """Start copies into the parts."""
        return self._streams.copy(Way.OUT, list(_beside(tensor, parts)), after=self.now())

    def read_parts(self, parts: Parts, out: torch.Tensor, *, after: Moment) -> Moment:
        """Start copies from the parts; later work of the thread waits for them."""
        done = self._streams.copy(Way.IN, [(part, target) for target, part in _beside(out, parts)], after=after)
        self._streams.compute_after(done)
        return done


class _ComingOff:
    """HostCopy off a device. It keeps the source alive until the copy is done."""

    def __init__(self, tensor: torch.Tensor, host: torch.Tensor, done: Moment) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._host = host
        self._done = done

    @property
    def is_here(self) -> bool:
        return self._tensor is None or self._done.is_done

    def wait(self) -> torch.Tensor:
        if self._tensor is not None:
            self._done.wait()
            self._tensor = None
        return self._host


def _beside(tensor: torch.Tensor, parts: Parts) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of the tensor's bytes with the parts that they fit. Raises ValueError if the sizes differ."""
    flat, begin = tensor.view(-1).view(torch.uint8), 0
    for part in parts:
        end = begin + len(part)
        yield flat[begin:end], part
        begin = end
    if begin != len(flat):
        raise ValueError(f"parts of {begin} bytes do not hold a tensor of {len(flat)}")


class DirectLinks:
    """A GPU rank's ends of its links over the host: direct over `shared`, if there is one. One thread calls."""

    def __init__(self, host: HostExchange, staging: Staging, shared: ShmExchange | None = None) -> None:
        self._host = host
        self._staging = staging
        self._sources: Mapping[Link, LinkSource] = {}
        self._receipts: Mapping[Link, _Receipts] = {}
        if shared is not None:
            self._sources = shared.sources
            self._receipts = {link: _Receipts(receiver, staging) for link, receiver in shared.receivers.items()}
            shared.while_waiting(self._give_back)

    def start_send(self, tensor: torch.Tensor, link: Link) -> PendingSend:
        """Begin the copy off the device, as Exchange.start_send."""
        if not tensor.numel():
            return SENT
        source = self._sources.get(link)
        parts = None if source is None else source.reserve(tensor.nbytes)
        if source is None or parts is None:
            return _StagedSend(self._host, self._staging.start_to_host(tensor), link)
        return _DirectSend(source, tensor, self._staging.write_parts(tensor, parts))

    def receive(self, out: torch.Tensor, link: Link) -> PendingTensor:
        """Post a receipt, as Exchange.receive."""
        if not out.numel():
            return Arrived(out)
        posted = self._staging.now()
        if (receipts := self._receipts.get(link)) is None:
            pending = self._host.receive(self._staging.host_buffer(out), link)
            return _StagedReceipt(pending, out, self._staging, posted)
        return _DirectReceipt(receipts, out, posted)

    def _give_back(self) -> None:
        for receipts in self._receipts.values():
            receipts.give_back()


def direct_links(host: HostExchange, staging: Staging) -> DirectLinks:
    """Return a GPU rank's links: direct if the host exchange shares memory that can be pinned for the device."""
    shared = host if isinstance(host, ShmExchange) else None
    problem = "ranks share no memory"
    if shared is not None and (problem := shared.pin(staging)):
        problem = f"the shared segment cannot be pinned: {problem}"
    if problem:
        _log.info("links to ranks on the host go through pinned buffers: %s", problem)
    return DirectLinks(host, staging, None if problem else shared)


class _StagedSend:
    """PendingSend of a tensor that leaves its device through a buffer."""

    def __init__(self, host: HostExchange, leaving: PendingTensor, link: Link) -> None:
        self._host = host
        self._leaving = leaving
        self._link = link

    def finish(self) -> None:
        self._host.send(self._leaving.wait(), self._link)


class _StagedReceipt:
    """Posted receipt of a tensor that goes through a buffer to the device, whose target is free since `posted`."""

    def __init__(self, pending: PendingTensor, out: torch.Tensor, staging: Staging, posted: Moment) -> None:
        self._pending = pending
        self._out = out
        self._staging = staging
        self._posted = posted
        self._done = False

    def wait(self) -> torch.Tensor:
        if not self._done:
            self._staging.to_device(self._pending.wait(), self._out, after=self._posted)
            self._done = True
        return self._out


class _DirectSend:
    """PendingSend of a tensor that its device writes to the link's areas. It keeps the tensor until then."""

    def __init__(self, source: LinkSource, tensor: torch.Tensor, written: Moment) -> None:
        self._source = source
        self._tensor = tensor
        self._written = written

    def finish(self) -> None:
        self._written.wait()
        self._source.publish(self._tensor.nbytes)


class _Receipts:
    """Receipts of one link, and the part that the device may still be reading."""

    def __init__(self, receiver: LinkReceiver, staging: Staging) -> None:
        self.receiver = receiver
        self._staging = staging
        self._held: tuple[Moment, int] | None = None

    def take(self, out: torch.Tensor, first: int, posted: Moment) -> None:
        """Read `out` from the messages from number `first` on, as many at a time as may be held."""
        flat, batch = out.view(-1).view(torch.uint8), self.receiver.batch_bytes
        for begin in range(0, len(flat), batch):
            piece = flat[begin : begin + batch]
            self.give_back()
            parts = self.receiver.await_areas(first, begin, len(piece))
            self._held = self._staging.read_parts(parts, piece, after=posted), len(piece)

    def give_back(self) -> None:
        """Wait until the device has read what was taken, and give it back."""
        if self._held is not None:
            (moment, num_bytes), self._held = self._held, None
            moment.wait()
            self.receiver.give_back(num_bytes)


class _DirectReceipt:
    """Posted receipt of a tensor that the device reads from the source's areas."""

    def __init__(self, receipts: _Receipts, out: torch.Tensor, posted: Moment) -> None:
        self._receipts = receipts
        self._out = out
        self._posted = posted
        self._first = receipts.receiver.post_bytes(out.nbytes)
        self._done = False

    def wait(self) -> torch.Tensor:
        if not self._done:
            self._receipts.take(self._out, self._first, self._posted)
            self._done = True
        return self._out
