"""The time of day, for what people read. What is measured is measured on a monotonic clock."""

from __future__ import annotations

from datetime import UTC, datetime


def now_utc() -> datetime:
    """With its time zone."""
    return datetime.now(UTC)
