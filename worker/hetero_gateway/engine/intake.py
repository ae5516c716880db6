"""Whether requests are accepted, and what they are told if not."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Intake:
    """Accepts once a group has been there, unless somebody has closed it. What lasts longest is told first."""

    has_opened: bool = False
    is_draining: bool = False
    failed: str | None = None
    closed: str | None = None

    @property
    def refusal(self) -> str | None:
        """Why a request is refused; None: it is accepted."""
        if self.failed is not None:
            return self.failed
        if self.is_draining:
            return "the gateway is draining: it finishes what it has and accepts nothing new"
        if not self.has_opened:
            return "no group of ranks has formed yet"
        return self.closed
