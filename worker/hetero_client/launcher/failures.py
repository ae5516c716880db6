"""What a person is told of a process that ended, or of a group that did not become ready."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

from hetero_api.contract import EXIT_PERMANENT, EXIT_USAGE
from hetero_client.admin import GroupTopology
from hetero_client.errors import ProcessDiedError, RestartsExhaustedError
from hetero_client.launcher.supervisor import Child

LOG_TAIL_LINES: Final = 15
LOG_TAIL_BYTES: Final = 16 * 1024


def is_permanent(child: Child) -> bool:
    """Whether it ended for a reason that a new start cannot cure."""
    return child.exit_status in (EXIT_PERMANENT, EXIT_USAGE)


def how_it_ended(child: Child) -> str:
    """ "was killed by SIGKILL", "ended with exit code 1"."""
    status = child.exit_status or 0
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit code {status}"


def died(child: Child) -> ProcessDiedError:
    """The error for a process whose end ends the group."""
    status = child.exit_status or 0
    tail = log_tail(child.log_path)
    if is_permanent(child) and tail:
        return ProcessDiedError(tail[-1], exit_status=status, permanent=True)
    return ProcessDiedError(
        f"{child.name} {how_it_ended(child)}; its log is {child.log_path}", exit_status=status, log_tail=tail
    )


def exhausted(child: Child, *, max_restarts: int, window_s: float) -> RestartsExhaustedError:
    """The error for a process whose end is one too many."""
    return RestartsExhaustedError(
        f"{child.name} {how_it_ended(child)}, and processes of the group were started anew {max_restarts} times within "
        f"{window_s:g} s, which is all that spec.recovery.maxRestarts allows; its log is {child.log_path}",
        exit_status=child.exit_status or 0,
        log_tail=log_tail(child.log_path),
    )


def log_tail(path: Path) -> list[str]:
    """The last lines that were written to a log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-LOG_TAIL_LINES:]


def timeout_message(seen: GroupTopology | None, limit_s: float, logs: Path) -> str:
    """Why a group is not ready in time, as far as the gateway knows."""
    state = f"it is {seen.state.value}" if seen is not None else "the gateway does not answer"
    missing = [rank.pod_name or f"rank {rank.rank}" for rank in seen.ranks if not rank.joined] if seen else []
    waiting = f", waiting for {', '.join(missing)}" if missing else ""
    return (
        f"the group was not ready within {limit_s:g} s (spec.recovery.rendezvousTimeoutSeconds): "
        f"{state}{waiting}; logs are in {logs}"
    )
