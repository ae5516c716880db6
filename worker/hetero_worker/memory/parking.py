"""ParkedWeights: weights whose bytes wait in host memory while their device's memory is given up.

The tensors stay the objects that they are, views and ties among them too: what is taken from them and given back is
their storages' memory. So whoever holds a weight need not know; he must only not use it meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class ParkedWeights:
    """Copies of some tensors' storages on the host. Made while the tensors are in use; `release` takes their memory."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Raises RuntimeError or MemoryError when the host has no room for the copies."""
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._copies = [(storage, _copy(storage)) for storage in storages.values() if storage.nbytes()]

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes() for _, copy in self._copies)

    def release(self) -> None:
        """Give up the tensors' own memory: until `restore` they must not be used."""
        for storage, _ in self._copies:
            storage.resize_(0)

    def restore(self) -> None:
        """Give the tensors memory again, with what was in it.

        Raises RuntimeError when there is not enough: then none of them has any.
        """
        try:
            for storage, copy in self._copies:
                storage.resize_(copy.nbytes())
                storage.copy_(copy)
        except BaseException:
            self.release()
            raise


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    # Not pinned: torch's allocator of pinned memory rounds sizes up to powers of two, and keeps what it once had.
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy
