"""Links of a GPU rank to ranks on the host: its device writes to and reads from the memory that they share.

    GPU rank, source      device ──copy──► its area of the link, which receivers read        no copy on the host
    GPU rank, receiver    device ◄──copy── the source's area, which is given back later      no copy on the host

The segment is pinned for the device (ShmSegment.pin). A sent tensor goes straight to the areas. If receivers are so far
behind that there is no room, it goes through a buffer of the staging, and into the areas in its turn. A received tensor
is read where it lies. Its areas are given back when the device's copy is done. That is checked when the next tensor of
the link is taken, and when this rank has waited for long for anything (`ShmExchange.while_waiting`). So the last tensor
of a link may keep its source waiting, but not for ever: the copy itself waits for nobody.

A copy onto the device may begin when its receipt has been posted. The device computes later work, such as the rank's
own part of an MLP, meanwhile.

If memory cannot be pinned, and on other exchanges, everything goes through the staging's buffers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import torch

from hetero_worker.backends.cuda.streams import Moment
from hetero_worker.distributed.exchange import SENT, Arrived, HostExchange, PendingSend, PendingTensor
from hetero_worker.distributed.routes import Link
from hetero_worker.distributed.shm_exchange import ShmExchange
from hetero_worker.distributed.shm_links import LinkReceiver, LinkSource
from hetero_worker.distributed.staging import Staging

_log = logging.getLogger(__name__)


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
        parts = None if source is None else source.begin(tensor.nbytes)
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
    if shared is not None and (problem := shared.pin(staging.pins)):
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
            parts = self.receiver.arrived(first, begin, len(piece))
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
