"""What a life is told of the cores and memory that its rank is bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from hetero_worker.host.pinning import PinningReport


class PlayedBinding:
    """Reports `reports`, one a look, the last from then on; `percent` gives the share of local memory or raises."""

    def __init__(
        self,
        *reports: PinningReport,
        percent: Callable[[], int | None] = lambda: None,
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self.elsewhere = False
        """Whether threads that start now are kept off the cores that compute."""
        self._reports = list(reports)
        self._percent = percent
        self._require = require

    def recheck(self) -> PinningReport | None:
        return self._reports.pop(0) if len(self._reports) > 1 else next(iter(self._reports), None)

    def require(self) -> None:
        self._require()

    def check_memory(self) -> int | None:
        return self._percent()

    def communicating(self) -> AbstractContextManager[None]:
        return self._communicating()

    @contextmanager
    def _communicating(self) -> Iterator[None]:
        self.elsewhere = True
        try:
            yield
        finally:
            self.elsewhere = False


def pinned_report(*cpus: int, reason: str = "") -> PinningReport:
    """Of node 0; not pinned when there is a reason."""
    return PinningReport(not reason, cpus, (0,), len(cpus), "bound", reason)
