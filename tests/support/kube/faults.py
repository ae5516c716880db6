"""What the proxy in front of an API server does to calls: rules, asked one after another.

A rule decides before a call is forwarded, after the API server has answered it, and for each event of a watch. The
first rule that does not simply pass a call on has its way. `before` and `after` run one at a time in a thread of their
own, so an action may block; `keeps` runs in the proxy's event loop, and must not.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tests.support.kube.calls import CallFilter, ProxiedCall, writes

REASONS = {
    409: ("Conflict", "the object has been modified; please apply your changes to the latest version"),
    410: ("Expired", "too old resource version"),
    422: ("Invalid", "injected: the object is invalid"),
    429: ("TooManyRequests", "injected: try again later"),
    500: ("InternalError", "injected: an error on the server"),
    503: ("ServiceUnavailable", "injected: the server is currently unable to handle the request"),
}


@dataclass(frozen=True, slots=True)
class Forward:
    """Pass it on, after a while."""

    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer the caller with a Status of this code instead; as a watch's ERROR event where `in_stream`."""

    code: int
    in_stream: bool = False
    retry_after_s: int | None = None
    """Seconds to wait, which a header tells the caller."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Close the caller's connection without an answer."""


Decision = Forward | Answer | Cut
PASS = Forward()


class Rule:
    """Passes everything on; rules override what they care for."""

    def before(self, call: ProxiedCall) -> Decision:
        """Before the API server sees the call."""
        return PASS

    def after(self, call: ProxiedCall) -> Decision:
        """When the API server has answered (`call.upstream_code`), before the caller knows."""
        return PASS

    def keeps(self, call: ProxiedCall, event: dict[str, Any]) -> bool:
        """Whether the caller gets this event of its watch."""
        return True


class AnswerShare(Rule):
    """Answers a share of calls with errors, without asking the API server. The same seed, the same sequence."""

    def __init__(self, share: float, codes: Sequence[int], *, seed: int, of: CallFilter = writes) -> None:
        self._share = share
        self._codes = tuple(codes)
        self._random = random.Random(seed)
        self._of = of
        self.answered = 0

    def before(self, call: ProxiedCall) -> Decision:
        if not self._of(call) or self._random.random() >= self._share:
            return PASS
        self.answered += 1
        return Answer(self._random.choice(self._codes))


class AnswerNext(Rule):
    """Answers the next `times` calls with one error."""

    def __init__(
        self,
        code: int,
        *,
        times: int = 1,
        of: CallFilter = writes,
        in_stream: bool = False,
        retry_after_s: int | None = None,
    ) -> None:
        self._answer = Answer(code, in_stream, retry_after_s)
        self._of = of
        self.left = times

    def before(self, call: ProxiedCall) -> Decision:
        if self.left == 0 or not self._of(call):
            return PASS
        self.left -= 1
        return self._answer


class AtCall(Rule):
    """At the n-th call (from 1): run an action, and cut the connection.

    "before": the API server never sees the call. "after": it has done it, and the caller never hears of it.
    The two are what can happen when the caller is killed, which is the action to give.
    """

    def __init__(
        self, number: int, action: Callable[[], object], *, when: Literal["before", "after"], of: CallFilter = writes
    ) -> None:
        self._number = number
        self._action = action
        self._when = when
        self._of = of
        self._seen: set[int] = set()
        self.call: ProxiedCall | None = None
        """The call it happened at, once it has."""

    def before(self, call: ProxiedCall) -> Decision:
        if not self._of(call):
            return PASS
        self._seen.add(call.number)
        if len(self._seen) != self._number or self.call is not None:
            return PASS
        self.call = call
        return self._strike() if self._when == "before" else PASS

    def after(self, call: ProxiedCall) -> Decision:
        return self._strike() if call is self.call else PASS

    def _strike(self) -> Decision:
        self._action()
        return Cut()


class Delay(Rule):
    """Forwards calls late."""

    def __init__(self, delay_s: float, *, of: CallFilter) -> None:
        self._delay_s = delay_s
        self._of = of

    def before(self, call: ProxiedCall) -> Decision:
        return Forward(self._delay_s) if self._of(call) else PASS


class DropEvents(Rule):
    """Keeps events of watches from the caller, as if they had never been sent."""

    def __init__(self, drop: Callable[[ProxiedCall, dict[str, Any]], bool]) -> None:
        self._drop = drop
        self.dropped: list[dict[str, Any]] = []

    def keeps(self, call: ProxiedCall, event: dict[str, Any]) -> bool:
        if not self._drop(call, event):
            return True
        self.dropped.append(event)
        return False


def failure(code: int) -> dict[str, Any]:
    """A Status as API servers send it."""
    reason, message = REASONS.get(code, ("Unknown", f"injected: {code}"))
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
