"""The guard of the HTTP door: it decides about a call by its head, before the body is read."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_api.errors import HeteroError
from hetero_gateway.server.access.limits import Meters
from hetero_gateway.server.access.principals import Guard
from hetero_gateway.server.access.tracing import note_arrival
from hetero_gateway.server.openai.answers import Failure, failure_of

logger = logging.getLogger(__name__)

OPEN_PATHS: Final = frozenset({"/health"})


class GuardedApplication:
    """ASGI application behind a guard, or one of `guards` by path; every call that is let in counts in `meters`.

    The paths of OPEN_PATHS and `open_paths` have no guard.
    """

    def __init__(
        self,
        application: ASGIApp,
        guard: Guard,
        meters: Meters,
        *,
        guards: Mapping[str, Guard] | None = None,
        open_paths: Collection[str] = (),
    ) -> None:
        self._application = application
        self._guard = guard
        self._meters = meters
        self._guards = guards or {}
        self._open_paths = OPEN_PATHS.union(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one call."""
        failure = None if scope["path"] in self._open_paths else self._failure(scope)
        if failure is None:
            await self._application(scope, receive, send)
        else:
            await failure.response()(scope, receive, send)

    def _failure(self, scope: Scope) -> Failure | None:
        """Return the answer to a call that is refused; None for one that is let in."""
        if not scope["path"].isprintable():
            # A route's expression matches before a newline at the end, too, but guards are looked up by the whole path.
            return Failure(400, "invalid_request_error", "the path has a character that cannot be printed")
        try:
            guard = self._guards.get(scope["path"], self._guard)
            note_arrival(Headers(scope=scope).items())
            principal = guard.admit(Headers(scope=scope).getlist(AUTHORIZATION_KEY))
            self._meters.of(principal).count_call()
        except HeteroError as error:
            logger.warning("path=%s peer=%s refused: %s", scope["path"], scope.get("client"), error)
            return failure_of(error)
        return None
