"""What the kubelet is told of a gateway.

Alive: the event loop answers, and no step has been out for much longer than a step may take. (A step that is merely
late ends its epoch by `recovery.stepTimeoutSeconds`; one that outlives even that means that the gateway is stuck.)
Ready: the group serves. Neither depends on the ranks' being there: a gateway that waits for them is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from hetero_gateway.group.rendezvous import Group
from hetero_gateway.server.loop_reader import LoopReader

LOOP_TIMEOUT_S: Final = 3.0
"""Less than the kubelet's patience with a probe."""
STALL_FACTOR: Final = 2.0


class GatewayProbes:
    """The probes of one group's gateway; called from the probe server's threads."""

    def __init__(self, group: Group, reader: LoopReader, *, step_timeout_s: float) -> None:
        self._group = group
        self._reader = reader
        self._stall_limit_s = STALL_FACTOR * step_timeout_s

    def live(self) -> str:
        """What keeps the gateway from working; "" if nothing does."""
        return self._ask(self._stall)

    def ready(self) -> str:
        """Why requests are not served; "" if they are."""
        return self._ask(self._obstacle)

    def _ask(self, question: Callable[[], str]) -> str:
        try:
            return self._reader.read(question, timeout_s=LOOP_TIMEOUT_S)
        except TimeoutError:
            return f"the event loop has not answered within {LOOP_TIMEOUT_S:g} s"

    def _stall(self) -> str:
        stalled_s = self._group.stalled_s
        if stalled_s <= self._stall_limit_s:
            return ""
        return f"a step has been out for {stalled_s:.0f} s, the limit is {self._stall_limit_s:g} s"

    def _obstacle(self) -> str:
        return "" if self._group.is_ready else f"the group is {self._group.state.name}"
