"""NativeTeam: the threads that a rank's native kernels run on. The calling thread is one of them."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from ctypes import byref, c_int, c_int32, c_void_p
from typing import Final

from hetero_worker.native.compute_library import ComputeLibrary

SPIN_NS: Final = 200_000
"""How long threads look for work before they sleep: longer than a rank takes from one step to the next."""


class NativeTeam:
    """A team of hc_team_new, freed with this object. One thread calls at a time: it is a member of the team."""

    def __init__(
        self, library: ComputeLibrary, size: int, *, cpus: Sequence[int] | None = None, spin_ns: int = SPIN_NS
    ) -> None:
        """`cpus`: cores of the other threads, one each, or None to leave them to the system. Raises OSError."""
        if cpus is not None and len(cpus) != size - 1:
            raise ValueError(f"{size - 1} threads need as many cores, not {len(cpus)}")
        self.library = library
        array = None if cpus is None else (c_int32 * max(1, len(cpus)))(*cpus)
        handle = library.team_new(size, array, spin_ns)
        if not handle:
            error = ctypes.get_errno()
            raise OSError(error, f"a team of {size} threads cannot be started: {os.strerror(error)}")
        self._handle: Final = handle
        self.size: Final = size
        self._status = c_int()
        self._status_at = byref(self._status)
        self._one = (c_void_p * 1)()
        weakref.finalize(self, library.team_free, handle)

    def run_one(self, op: ctypes.Structure) -> None:
        """One operation, which is no CALL."""
        self._one[0] = ctypes.addressof(op)
        self.library.run(self._handle, self._one, 0, 1, None)

    def run_call(self, op: ctypes.Structure) -> int:
        """A CALL: what its function returned."""
        self._one[0] = ctypes.addressof(op)
        self.library.run(self._handle, self._one, 0, 1, self._status_at)
        return self._status.value

    def run(self, ops: ctypes.Array[c_void_p], begin: int) -> tuple[int, int]:
        """Operations from `begin` to the end: (their number, 0), or where a CALL did not give 0, and what it gave."""
        stopped = self.library.run(self._handle, ops, begin, len(ops), self._status_at)
        return stopped, self._status.value

    def scratch_bytes(self, op: ctypes.Structure) -> int:
        """What the operation needs for scratch in this team."""
        return int(self.library.scratch_bytes(ctypes.addressof(op), self.size))
