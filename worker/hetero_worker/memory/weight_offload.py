"""Weight offload: weights wait in host memory while their device's memory is freed.

The tensors stay the same objects, including views and ties; only their storages' memory is freed and allocated again.
Holders of a weight need not know, but must not use it meanwhile. Restored weights lie at other addresses, so a graph of
steps over the old ones must be dropped.

The copies lie in one piece of host memory that is pinned for the device. Torch's allocator of pinned memory would round
sizes up to powers of two, and never give them back. If so much cannot be pinned, copies go through a pinned buffer,
piece by piece. The host's free memory is checked first: the kernel hands out more than there is, and kills a process
that writes to it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.budget import mib
from hetero_worker.memory.memory_pool import MemoryPool, MemorySnapshot
from hetero_worker.memory.streams import DeviceStreams

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 256
_BUFFER_BYTES: Final = 64 * 1024**2


class OffloadedWeights:
    """Copies of some tensors' storages on the host; `release` frees the tensors' own memory, `restore` refills it.

    All tensors are on one device, and may be in use while the copies are made.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, pool: MemoryPool, streams: DeviceStreams) -> None:
        """Copy the tensors; pool and streams are their device's. Raises MemoryBudgetError if the host has no room."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._places = list(_places([storage for storage in storages.values() if storage.nbytes()]))
        _check_room(self.num_bytes)
        self._pool = pool
        self._host = _HostCopy(sum(_aligned(size) for _, _, size in self._places), streams)
        for storage, begin, size in self._places:
            self._host.copy(self._host.bytes[begin : begin + size], _bytes_of(storage))
        self._host.finish()

    @property
    def num_bytes(self) -> int:
        """Size of the tensors' storages."""
        return sum(size for _, _, size in self._places)

    def release(self) -> None:
        """Free the tensors' own memory; they must not be used until `restore`."""
        for storage, _, _ in self._places:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the tensors' memory again, with its old content.

        Raises RuntimeError if there is not enough; then none of the tensors has memory.
        """
        try:
            with self._pool.apart():
                for storage, begin, size in self._places:
                    storage.resize_(size)
                    self._host.copy(_bytes_of(storage), self._host.bytes[begin : begin + size])
            self._host.finish()
        except BaseException:
            self.release()
            raise


class _HostCopy:
    """Host memory, and copies between it and a device; all copies use pinned memory."""

    def __init__(self, num_bytes: int, streams: DeviceStreams) -> None:
        self._streams = streams
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8)
        self._buffer: torch.Tensor | None = None
        problem = streams.pin(self.bytes.data_ptr(), num_bytes) if num_bytes else ""
        if problem:
            logger.warning(
                "%s of host memory cannot be pinned, weights go through a buffer: %s", mib(num_bytes), problem
            )
            self._buffer = streams.pinned(torch.Size([min(num_bytes, _BUFFER_BYTES)]), torch.uint8)
        elif num_bytes:
            weakref.finalize(self, _unpin, streams, self.bytes).atexit = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start the copy of uint8 tensors of equal length; `finish` waits for it."""
        if self._buffer is None:
            target.copy_(source, non_blocking=True)
            return
        for begin in range(0, len(target), len(self._buffer)):
            piece = target[begin : begin + len(self._buffer)]
            buffer = self._buffer[: len(piece)]
            buffer.copy_(source[begin : begin + len(piece)])
            piece.copy_(buffer)

    def finish(self) -> None:
        """Wait for all copies."""
        self._streams.now().wait()


def _check_room(num_bytes: int) -> None:
    available = MemorySnapshot.take().available_bytes
    if available is not None and num_bytes > available:
        raise MemoryBudgetError(
            f"{mib(num_bytes)} of weights have no room in host memory, of which {mib(available)} are available; give "
            "the rank more (spec.pools[].gpu.memoryPerRank), or sleep at level 2, which drops them"
        )


def _places(storages: Iterable[torch.UntypedStorage]) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    """Yield each storage, the offset of its copy in host memory, and its size."""
    begin = 0
    for storage in storages:
        yield storage, begin, storage.nbytes()
        begin += _aligned(storage.nbytes())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return a uint8 [nbytes] view, valid while the storage keeps its size."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _unpin(streams: DeviceStreams, host: torch.Tensor) -> None:
    """Unpin `host`, which is alive until then."""
    streams.unpin(host.data_ptr())
