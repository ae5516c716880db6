"""How a container ended, in words."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from hetero_api.contract import EXIT_FAILURE, EXIT_OK, EXIT_PERMANENT, EXIT_STUCK, EXIT_USAGE
from hetero_operator.reconcile.status.text import last_line

_SIGNALLED: Final = 128
"""A container that signal n killed exits with 128 + n."""
KILLED: Final = frozenset({_SIGNALLED + signal.SIGKILL, _SIGNALLED + signal.SIGTERM})
"""Exit codes of a container that the kubelet stopped."""

_MEANINGS: Final[Mapping[int, str]] = {
    EXIT_OK: "it ended in peace, which nobody asked for",
    EXIT_FAILURE: "it broke while running",
    EXIT_USAGE: "its command line or its manifest is wrong",
    EXIT_PERMANENT: "trying again cannot help",
    EXIT_STUCK: "it could not leave an ended epoch in time",
    126: "its program cannot be executed",
    127: "its program was not found",
}
"""What our programs, and shells, mean by their exit codes."""

_START_ERRORS: Final = frozenset({"StartError", "ContainerCannotRun"})


@dataclass(frozen=True, slots=True)
class Ending:
    """A container's end as its kubelet told it."""

    exit_code: int
    reason: str
    last_line: str
    finished_at: str = ""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Ending | None:
        """From a container's `state` or `lastState`; None when that is no end."""
        ended = state.get("terminated")
        if not ended:
            return None
        return cls(
            exit_code=int(ended.get("exitCode", 0)),
            reason=str(ended.get("reason") or ""),
            last_line=last_line(str(ended.get("message") or "")),
            finished_at=str(ended.get("finishedAt") or ""),
        )

    @property
    def is_out_of_memory(self) -> bool:
        return self.reason == "OOMKilled"

    @property
    def is_start_error(self) -> bool:
        """Whether its program never ran."""
        return self.reason in _START_ERRORS

    def __str__(self) -> str:
        said = f": {self.last_line}" if self.last_line else ""
        return f"exited with code {self.exit_code} ({self._meaning()}){said}"

    def _meaning(self) -> str:
        if self.is_out_of_memory:
            return "the kernel killed it for want of memory"
        if self.exit_code in _MEANINGS:
            return _MEANINGS[self.exit_code]
        try:
            return f"killed by {signal.Signals(self.exit_code - _SIGNALLED).name}"
        except ValueError:
            return self.reason or "unknown"
