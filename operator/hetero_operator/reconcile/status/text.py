"""The texts and times of a status: short, on one line, and the same as long as nothing changed."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

from pydantic import ValidationError

from hetero_api.status import MAX_MESSAGE_LENGTH, Condition, HeteroInferenceStatus
from hetero_operator.reconcile.model import Object

MAX_QUOTE_LENGTH: Final = 600
"""Longest piece of somebody else's text in a message."""

_UNSTEADY: Final = (
    (re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d([.,]\d+)?(Z|[+-]\d\d:?\d\d)?"), ""),
    (re.compile(r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"), "<id>"),
    (re.compile(r"(?<!sha256:)\b[0-9a-f]{32,}\b"), "<id>"),
    (re.compile(r"\b0x[0-9a-f]{6,}\b"), "<address>"),
    (re.compile(r"\b(ipv[46]:)?\d{1,3}(\.\d{1,3}){3}(:\d+)?\b"), "<address>"),
    (re.compile(r"(\bipv6:)?(\[|%5B)[0-9a-f]*:[0-9a-f:]+(\]|%5D)(:\d+)?"), "<address>"),
    (re.compile(r"\b(\d+h)?\d+m\d+(\.\d+)?s\b|\b\d+\.\d+(ms|µs|s)\b"), "<time>"),
    (re.compile(r",? (list of )?unattached volumes=\[[^\]]*\]"), ""),
    (re.compile(r",? failed to process volumes=\[\]"), ""),
)
"""Parts that differ between two reports of one thing: times, ids, addresses, lists in no order."""


def steady(text: str) -> str:
    """Return somebody else's text on one line, without parts that change by themselves, of bounded length."""
    for pattern, replacement in _UNSTEADY:
        text = pattern.sub(replacement, text)
    return bounded(" ".join(text.split()), MAX_QUOTE_LENGTH)


def last_line(text: str) -> str:
    """Return the last line with content, steady, "" when there is none."""
    lines = [line for line in text.splitlines() if line.strip()]
    return steady(lines[-1]) if lines else ""


def bounded(text: str, limit: int = MAX_MESSAGE_LENGTH) -> str:
    """Cut a text to `limit` characters, with an ellipsis where something is missing."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def timestamp(time: datetime) -> str:
    """Format a time as the API writes it: RFC 3339, UTC, whole seconds."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parsed_time(text: object) -> datetime | None:
    """Parse a time that the API wrote; return None when it is no such text."""
    try:
        time = datetime.fromisoformat(str(text).replace("Z", "+00:00"))
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def stored_status(resource: Object) -> HeteroInferenceStatus:
    """Return the last reported status; empty when there is none that is valid, e.g. that of another version."""
    try:
        return HeteroInferenceStatus.model_validate(resource.get("status") or {})
    except ValidationError:
        return HeteroInferenceStatus()


def stored_conditions(status: HeteroInferenceStatus) -> dict[str, Condition]:
    """Return the conditions by type."""
    return {item.type: item for item in status.conditions}
