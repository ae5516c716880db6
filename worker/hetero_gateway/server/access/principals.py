"""Principals: who calls, as both doors know it.

A guard stands at each door. It turns what a caller shows, the values of `authorization`, into a principal, or refuses
the call before anything of it is read. The principal is then that of the task that answers the call.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final

from hetero_api.api_keys import MAX_KEY_CHARS, Limits, Role
from hetero_api.contract import AUTHORIZATION_KEY
from hetero_gateway.server.access.keys import KeyRing
from hetero_gateway.server.errors import Forbidden, Unauthenticated

_SCHEME: Final = b"bearer "


@dataclass(frozen=True, slots=True)
class Principal:
    """Who calls. Its name is "" where callers are not told apart."""

    name: str
    roles: frozenset[Role]
    limits: Limits


NAMELESS: Final = Principal("", frozenset(Role), Limits())
"""Caller at a door that asks for nothing, or who shows the door's one token."""

_current: ContextVar[Principal] = ContextVar("principal")


def current_principal() -> Principal:
    """Return who the call is from that this task answers. Raises LookupError where no guard has let it in."""
    return _current.get()


@dataclass(frozen=True, slots=True)
class Guard:
    """Guard of one door. Callers show a key of `keys` whose principal has `role`, or `token`.

    Without both, the door is open. `whose` names the token in refusals, e.g. "this group's".
    """

    role: Role = Role.USER
    keys: KeyRing | None = None
    token: str | None = field(default=None, repr=False)
    whose: str = ""

    def admit(self, shown: Sequence[str | bytes]) -> Principal:
        """Return the caller's principal and make it this task's. Raises Unauthenticated or Forbidden."""
        principal = NAMELESS if self.keys is None and self.token is None else self._known(shown)
        if self.role not in principal.roles:
            raise Forbidden(f"the key of {principal.name!r} lacks the role {self.role}")
        _current.set(principal)
        return principal

    def _known(self, shown: Sequence[str | bytes]) -> Principal:
        key = _bearer(shown)
        if self.token is not None and hmac.compare_digest(key, self.token.encode()):
            return NAMELESS
        entry = self.keys.find(key) if self.keys is not None and key else None
        if entry is None:
            raise Unauthenticated(f"{AUTHORIZATION_KEY} must be 'Bearer KEY' with {self._wanted}")
        return Principal(entry.name, frozenset(entry.roles), entry.limits)

    @property
    def _wanted(self) -> str:
        keys = f"a key of role {self.role}" if self.keys is not None else ""
        token = f"{self.whose} token" if self.token is not None else ""
        return " or ".join(each for each in (keys, token) if each)


def _bearer(shown: Sequence[str | bytes]) -> bytes:
    """Return the key that a caller shows exactly once; b"" for anything else."""
    if len(shown) != 1:
        return b""
    raw = shown[0].encode() if isinstance(shown[0], str) else shown[0]
    scheme, key = raw[: len(_SCHEME)], raw[len(_SCHEME) :]
    return key if scheme.lower() == _SCHEME and len(key) <= MAX_KEY_CHARS else b""
