"""Keys that a gateway knows, by their hashes."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from hetero_api.api_keys import KeyEntry, digest_of


class KeyRing:
    """Keys and whose they are. A lookup takes as long for a key that is known as for one that is not."""

    def __init__(self, entries: Sequence[KeyEntry]) -> None:
        self.replace(entries)

    def replace(self, entries: Sequence[KeyEntry]) -> None:
        """Know these keys in place of all others."""
        self._known = tuple((digest, entry) for entry in entries for digest in entry.digests)

    def find(self, key: bytes) -> KeyEntry | None:
        """Return whose key it is; None for a key that is not known. Callable from any thread."""
        shown, found = digest_of(key), None
        for digest, entry in self._known:
            if hmac.compare_digest(digest, shown):
                found = entry
        return found
