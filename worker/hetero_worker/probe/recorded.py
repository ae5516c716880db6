"""Work of native kernels as steps that only decode do it: recorded once, then one call (`runners.native_forward`).

What is measured operator by operator has Python between kernels, which such a step has not: at one row that is more
than the kernels take, and a plan made from it would keep attention on few ranks to save what it does not cost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from hetero_worker.native.issuing import Arena, Issuer
from hetero_worker.runners.recording_guard import RecordingGuard

T = TypeVar("T")


class Record(Protocol):
    """What makes work as it is in a step that only decodes."""

    def __call__(self, work: Callable[[], T], /) -> Callable[[], T]: ...


_FUSED_IN_STEPS: Final = frozenset({"aten.add_.Tensor"})
"""The residual sum: in a step the norm behind it takes it."""


class WorkRecorder:
    """Records pieces of work that share the memory they compute in: one runs at a time."""

    def __init__(self, issuer: Issuer) -> None:
        self._issuer = issuer
        self._arena = Arena()

    def __call__(self, work: Callable[[], T], /) -> Callable[[], T]:
        """Do the work, and give what does it again without Python, or the work itself where torch has a part in it."""
        guard = RecordingGuard()
        with self._issuer.computing_in(self._arena), self._issuer.recording() as recorded, guard:
            outcome = work()
        if not recorded.ops or set(guard.seen) - _FUSED_IN_STEPS:
            return work

        def replay() -> T:
            self._issuer.replay(recorded)
            return outcome

        return replay


def as_it_is(work: Callable[[], T], /) -> Callable[[], T]:
    """For ranks whose steps are not recorded."""
    return work
