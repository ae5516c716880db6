"""The file that tells whoever started the gateway where it listens."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ListeningState:
    """Addresses are "host:port"."""

    pid: int
    name: str
    inference: str
    admin: str
    ranks: str
    http: str


def write_state(path: Path, state: ListeningState) -> None:
    """Write it in one piece: a reader sees all of it or nothing. Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(state), file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
