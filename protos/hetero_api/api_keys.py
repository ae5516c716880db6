"""Keys that clients show at the front door: how they are made, stored and read.

A keys file is a YAML list with one entry for each principal. It holds hashes, so whoever reads it cannot call:

    - name: team-a
      hashes: ["sha256:3b1f…"]          # two while a key is being replaced
      roles: [user]                     # user, metrics, admin
      limits: {requestsPerSecond: 5, concurrentCompletions: 8, tokensPerMinute: 60000, minPriority: 0}

A key is 256 random bits, which nobody finds by trying; so one round of SHA-256 is enough, and
a call costs microseconds. `hetero key` makes keys and their entries.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import yaml
from pydantic import Field, StringConstraints, TypeAdapter, ValidationError

from hetero_api.errors import ManifestError
from hetero_api.manifest import describe_problems, read_document, yaml_documents
from hetero_api.spec_types import Form, SpecEnum, SpecModel, spelled

MAX_PRINCIPALS: Final = 512
MAX_KEY_CHARS: Final = 512
_HASH_PREFIX: Final = "sha256:"
_KEY_PREFIX: Final = "hk-"
_KEY_BYTES: Final = 32

PrincipalName = Annotated[
    str,
    Form(
        "^[A-Za-z0-9]([-A-Za-z0-9_.@]*[A-Za-z0-9])?$",
        "must be of letters, digits, '-', '_', '.' and '@', and begin and end with a letter or a digit",
    ),
    StringConstraints(max_length=64),
]
KeyHash = Annotated[
    str, Form(f"^{_HASH_PREFIX}[0-9a-f]{{64}}$", "must be sha256: and 64 hexadecimal digits, as `hetero key` prints it")
]


class Role(SpecEnum):
    """Right of a principal."""

    USER = "user"
    """Call hetero.v1.Inference and the OpenAI API."""
    METRICS = "metrics"
    """Read /metrics."""
    ADMIN = "admin"
    """Call hetero.v1.Admin."""


class Limits(SpecModel):
    """Bounds on the use that one principal makes of a gateway. What is left out has no bound."""

    requests_per_second: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Calls a second, on average; as many may come at once."""
    concurrent_completions: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """Completions in flight; a request counts as often as it has completions."""
    tokens_per_minute: Annotated[int, Field(ge=1, le=10**12)] | None = None
    """Tokens of prompts and answers a minute, on average; as many may come at once. Answers count when they end."""
    min_priority: Annotated[int, Field(ge=-100, le=100)] = -100
    """Lowest number that a request may have as its priority; lower numbers go first. Requests without a priority have
    0, or this if it is higher.
    """


class KeyEntry(SpecModel):
    """One principal of a keys file."""

    name: PrincipalName
    """Name of the principal, in logs and before its request ids."""
    hashes: Annotated[list[KeyHash], Field(min_length=1, max_length=4)]
    """Hashes of its keys."""
    roles: Annotated[list[Annotated[Role, spelled(Role)]], Field(min_length=1)] = Field(
        default_factory=lambda: [Role.USER]
    )
    """What it may do."""
    limits: Limits = Limits()
    """Bounds on its use."""

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The SHA-256 of each of its keys."""
        return tuple(bytes.fromhex(each.removeprefix(_HASH_PREFIX)) for each in self.hashes)


_ENTRIES: Final = TypeAdapter(Annotated[list[KeyEntry], Field(max_length=MAX_PRINCIPALS)])


def new_key() -> str:
    """Return a new key of 256 random bits."""
    return _KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def digest_of(key: str | bytes) -> bytes:
    """Return the SHA-256 of a key."""
    return hashlib.sha256(key.encode() if isinstance(key, str) else key).digest()


def hash_of(key: str) -> str:
    """Return the hash of a key as a keys file holds it."""
    return _HASH_PREFIX + digest_of(key).hex()


def read_keys(path: Path) -> tuple[KeyEntry, ...]:
    """Read a keys file. Raises ManifestError with every problem."""
    return parse_keys(read_document(path), source=str(path))


def parse_keys(text: str, *, source: str = "") -> tuple[KeyEntry, ...]:
    """Return the entries in the text of a keys file; an empty list lets nobody in. Raises ManifestError."""
    documents = yaml_documents(text, source=source)
    try:
        entries = _ENTRIES.validate_python(documents[0] if len(documents) == 1 else None)
    except ValidationError as error:
        raise ManifestError(describe_problems(error, KeyEntry), source=source) from error
    problems = [*_repeated("name", (entry.name for entry in entries)), *_repeated("hash", _hashes(entries))]
    if problems:
        raise ManifestError(problems, source=source)
    return tuple(entries)


def dump_entry(entry: KeyEntry) -> str:
    """Return an entry as YAML, to append to a keys file."""
    data: Mapping[str, Any] = entry.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_defaults=True)
    return yaml.safe_dump([{**data, "roles": [str(role) for role in entry.roles]}], sort_keys=False)


def _hashes(entries: Iterable[KeyEntry]) -> Iterable[str]:
    return (each for entry in entries for each in entry.hashes)


def _repeated(what: str, values: Iterable[str]) -> list[str]:
    return [f"{what} {value} is in the file {number} times" for value, number in Counter(values).items() if number > 1]
