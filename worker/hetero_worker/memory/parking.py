"""ParkedWeights: weights whose bytes wait in host memory while their device's memory is given up.

The tensors stay the objects that they are, views and ties among them too: what is taken from them and given back is
their storages' memory. So whoever holds a weight need not know; he must only not use it meanwhile. What they get back
lies at other addresses: who remembers addresses (a CUDA graph) has to forget them.

The copies lie in one piece of host memory, pinned for the device where it lies: torch's allocator of pinned memory
would round sizes up to powers of two, and keep what it once had. Where so much cannot be pinned, they go through a
pinned buffer, piece by piece. Whether the host has so much is looked at before: it would be given out all the same, and
who writes to it then may be ended by the kernel.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from hetero_worker.backends.cuda.pins import HostPins, pins_for
from hetero_worker.errors import MemoryBudgetError
from hetero_worker.memory.accounts import account_of
from hetero_worker.memory.budget import mib
from hetero_worker.memory.snapshot import MemorySnapshot

logger = logging.getLogger(__name__)

_ALIGNMENT: Final = 256
_BUFFER_BYTES: Final = 64 * 1024**2


class ParkedWeights:
    """Copies of some tensors' storages on the host. Made while the tensors are in use; `release` takes their memory.

    All tensors are on one device.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], *, pins: HostPins | None = None) -> None:
        """`pins`: by default the device's. Raises MemoryBudgetError when the host has no room for copies."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._places = list(_places([storage for storage in storages.values() if storage.nbytes()]))
        _check_room(self.num_bytes)
        device = self._places[0][0].device if self._places else torch.device("cpu")
        self._way = _WayThere(device, sum(_aligned(size) for _, _, size in self._places), pins or pins_for(device))
        for storage, begin, size in self._places:
            self._way.copy(self._way.host[begin : begin + size], _bytes_of(storage))
        self._way.finish()

    @property
    def num_bytes(self) -> int:
        return sum(size for _, _, size in self._places)

    def release(self) -> None:
        """Give up the tensors' own memory: until `restore` they must not be used."""
        for storage, _, _ in self._places:
            storage.resize_(0)

    def restore(self) -> None:
        """Give the tensors memory again, with what was in it.

        Raises RuntimeError when there is not enough: then none of them has any.
        """
        try:
            with account_of(self._way.device).apart():
                for storage, begin, size in self._places:
                    storage.resize_(size)
                    self._way.copy(_bytes_of(storage), self._way.host[begin : begin + size])
            self._way.finish()
        except BaseException:
            self.release()
            raise


class _WayThere:
    """Host memory beside a device, and copies between the two: only from and to pinned memory where it is CUDA's."""

    def __init__(self, device: torch.device, num_bytes: int, pins: HostPins) -> None:
        self.device = device
        self.host = torch.empty(num_bytes, dtype=torch.uint8)
        self._buffer: torch.Tensor | None = None
        problem = pins.pin(self.host.data_ptr(), num_bytes) if num_bytes else ""
        if problem:
            logger.warning(
                "%s of host memory cannot be pinned, weights go through a buffer: %s", mib(num_bytes), problem
            )
            self._buffer = torch.empty(min(num_bytes, _BUFFER_BYTES), dtype=torch.uint8, pin_memory=_is_cuda(device))
        elif num_bytes:
            weakref.finalize(self, _unpin, pins, self.host).atexit = False

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """uint8, as long as each other; there once `finish` has been called."""
        if self._buffer is None:
            target.copy_(source, non_blocking=True)
            return
        for begin in range(0, len(target), len(self._buffer)):
            piece = target[begin : begin + len(self._buffer)]
            buffer = self._buffer[: len(piece)]
            buffer.copy_(source[begin : begin + len(piece)])
            piece.copy_(buffer)

    def finish(self) -> None:
        """Wait until all that was asked for is there."""
        if _is_cuda(self.device):
            torch.cuda.current_stream(self.device).synchronize()


def _check_room(num_bytes: int) -> None:
    available = MemorySnapshot.take().available_bytes
    if available is not None and num_bytes > available:
        raise MemoryBudgetError(
            f"{mib(num_bytes)} of weights have no room in host memory, of which {mib(available)} are available; give "
            "the rank more (spec.pools[].gpu.memoryPerRank), or sleep at level 2, which drops them"
        )


def _places(storages: Iterable[torch.UntypedStorage]) -> Iterator[tuple[torch.UntypedStorage, int, int]]:
    """Where in the host's memory each storage's copy begins, and its size."""
    begin = 0
    for storage in storages:
        yield storage, begin, storage.nbytes()
        begin += _aligned(storage.nbytes())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """uint8 [nbytes]: a view, for as long as the storage keeps its size."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def _unpin(pins: HostPins, host: torch.Tensor) -> None:
    """Before `host`, which is held until then, goes."""
    pins.unpin(host.data_ptr())
