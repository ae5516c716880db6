"""Certificates of a group's inside, made by the operator, in folders as pods find them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from hetero_api.contract import (
    SECRET_GATEWAY_CERTIFICATE,
    SECRET_GATEWAY_KEY,
    SECRET_INSIDE_AUTHORITY,
    SECRET_OPERATOR_CERTIFICATE,
    SECRET_OPERATOR_KEY,
    SECRET_RANK_CERTIFICATE,
    SECRET_RANK_KEY,
    TLS_AUTHORITY,
    TLS_CERTIFICATE,
    TLS_KEY,
)
from hetero_operator.authority import CERTIFICATE_LIFE, inside_certificates
from hetero_operator.gateway_probe import InsideTls

NAME: Final = "localhost"
EXPIRED: Final = CERTIFICATE_LIFE + timedelta(hours=1)
"""Age of certificates that have expired."""


@dataclass(frozen=True, slots=True)
class Inside:
    """The data of a group's Secret."""

    data: Mapping[str, bytes]

    @classmethod
    def new(cls, *names: str, age: timedelta = timedelta(0), stored: Inside | None = None) -> Inside:
        """Certificates that are so old, for a gateway of these names."""
        made = inside_certificates(names or (NAME,), datetime.now(UTC) - age, stored.data if stored else None)
        return cls(made)

    def gateway(self, folder: Path) -> Path:
        return _write(folder, self.gateway_files())

    def rank(self, folder: Path) -> Path:
        return _write(folder, self.rank_files())

    def gateway_files(self) -> dict[str, bytes]:
        """What is mounted in the gateway's pod."""
        return self._files(SECRET_GATEWAY_CERTIFICATE, SECRET_GATEWAY_KEY)

    def rank_files(self) -> dict[str, bytes]:
        """What is mounted in the ranks' pods."""
        return self._files(SECRET_RANK_CERTIFICATE, SECRET_RANK_KEY)

    def operator(self, server_name: str = NAME) -> InsideTls:
        authority, certificate, key = self.values(
            SECRET_INSIDE_AUTHORITY, SECRET_OPERATOR_CERTIFICATE, SECRET_OPERATOR_KEY
        )
        return InsideTls(authority, certificate, key, server_name)

    def trusting(self, other: Inside) -> Inside:
        """These certificates beside the authority of others."""
        return Inside({**self.data, SECRET_INSIDE_AUTHORITY: other.data[SECRET_INSIDE_AUTHORITY]})

    def values(self, *keys: str) -> Sequence[bytes]:
        return [self.data[key] for key in keys]

    def _files(self, certificate: str, key: str) -> dict[str, bytes]:
        names = (TLS_AUTHORITY, TLS_CERTIFICATE, TLS_KEY)
        return dict(zip(names, self.values(SECRET_INSIDE_AUTHORITY, certificate, key), strict=True))


def _write(folder: Path, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder
