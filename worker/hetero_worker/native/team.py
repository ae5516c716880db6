"""NativeTeam: the threads that a rank's native kernels run on. The calling thread is one of them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any, Final

from hetero_worker.native.compute_library import ComputeLibrary, ffi
from hetero_worker.native.loading import address_of

SPIN_NS: Final = 200_000
"""How long threads look for work before they sleep: longer than a rank takes from one step to the next."""


class NativeTeam:
    """A team of threads, which ends with this object. One thread at a time makes calls: it is a member of the team."""

    def __init__(
        self, library: ComputeLibrary, size: int, *, cpus: Sequence[int] | None = None, spin_ns: int = SPIN_NS
    ) -> None:
        """Start the threads.

        `cpus`: a core for each thread but the calling one; None leaves them to the system. Raises ValueError for
        another number of cores, OSError if a thread cannot be started.
        """
        if cpus is not None and len(cpus) != size - 1:
            raise ValueError(f"{size - 1} threads need as many cores, not {len(cpus)}")
        self.library = library
        functions = library.functions
        array = ffi.new("int32_t[]", [*(cpus or ()), 0])  # of no length it would have no address
        handle = functions.hc_team_new(size, 0 if cpus is None else address_of(array), spin_ns)
        if not handle:
            raise OSError(ffi.errno, f"a team of {size} threads cannot be started: {os.strerror(ffi.errno)}")
        self._handle: Final = handle
        self.size: Final = size
        self._run = functions.hc_run
        self._status = ffi.new("int *")
        self._one = ffi.new("uintptr_t[1]")
        self._one_at = address_of(self._one)
        # Not at the interpreter's exit: a daemon thread may still be inside a run, and the process's end frees all.
        weakref.finalize(self, functions.hc_team_free, handle).atexit = False

    def run_one(self, op: Any) -> None:
        """Run one operation, which is no CALL."""
        self._one[0] = address_of(op)
        self._run(self._handle, self._one_at, 0, 1, ffi.NULL)

    def run_call(self, op: Any) -> int:
        """Run a CALL and return what its function returned."""
        self._one[0] = address_of(op)
        self._run(self._handle, self._one_at, 0, 1, self._status)
        return int(self._status[0])

    def run(self, ops: Any, begin: int) -> tuple[int, int]:
        """Run the operations from `begin` on of an array of their addresses.

        Return (their number, 0), or the index of the first CALL that did not return 0, and what it returned.
        """
        stopped = self._run(self._handle, address_of(ops), begin, len(ops), self._status)
        return int(stopped), int(self._status[0])

    def scratch_bytes(self, op: Any) -> int:
        """Return the bytes of scratch that the operation needs in this team."""
        return int(self.library.functions.hc_scratch_bytes(address_of(op), self.size))
