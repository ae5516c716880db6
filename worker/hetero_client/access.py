"""Key and certificates that a client shows a gateway, and the authorities that it trusts.

Each comes from the first of these that has it: the argument and the environment. A key may be in a file, and is then
read when the client is made. TLS is used where an authority or a certificate is given, or where it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

from hetero_api.api_keys import MAX_KEY_CHARS
from hetero_api.contract import (
    AUTHORIZATION_KEY,
    ENV_API_KEY,
    ENV_API_KEY_FILE,
    ENV_CA_FILE,
    ENV_CLIENT_CERT_FILE,
    ENV_CLIENT_KEY_FILE,
)
from hetero_client.errors import CredentialsError

Metadata = tuple[tuple[str, str], ...]
PathLike = Path | str
MAX_PEM_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Access:
    """Credentials of one client. An empty key is not shown; files of certificates are in PEM."""

    api_key: str = field(default="", repr=False)
    tls: bool | None = None
    """Whether to use TLS; None: where an authority or a certificate is given."""
    ca: bytes | None = None
    """Authority that the gateway's certificate must be of; None: those that gRPC knows."""
    certificate: bytes | None = None
    """Certificate to show, with its chain."""
    private_key: bytes | None = field(default=None, repr=False)

    @classmethod
    def find(
        cls,
        *,
        api_key: str | None = None,
        api_key_file: PathLike | None = None,
        tls: bool | None = None,
        ca_file: PathLike | None = None,
        certificate_file: PathLike | None = None,
        private_key_file: PathLike | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Self:
        """Return the credentials that arguments and environment name. Raises CredentialsError."""
        env = os.environ if environment is None else environment
        certificate = _read_pem(certificate_file, env, ENV_CLIENT_CERT_FILE)
        private_key = _read_pem(private_key_file, env, ENV_CLIENT_KEY_FILE)
        if (certificate is None) != (private_key is None):
            raise CredentialsError(
                f"a client's certificate and its private key belong together; give both, or {ENV_CLIENT_CERT_FILE} and "
                f"{ENV_CLIENT_KEY_FILE}"
            )
        ca = _read_pem(ca_file, env, ENV_CA_FILE)
        return cls(_find_key(api_key, api_key_file, env), tls, ca, certificate, private_key)

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls if self.tls is not None else self.ca is not None or self.certificate is not None

    @property
    def metadata(self) -> Metadata:
        """Metadata of every call that is not about health."""
        return ((AUTHORIZATION_KEY, f"Bearer {self.api_key}"),) if self.api_key else ()


class Calls:
    """Methods of a stub of either API of grpc, each called with `metadata`."""

    def __init__(self, stub: Any, metadata: Metadata) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._stub, method), metadata=self._metadata)


def _find_key(key: str | None, file: PathLike | None, env: Mapping[str, str]) -> str:
    """Return the key, "" if none is given."""
    if key is not None:
        return _checked(key, "api_key")
    if file is not None:
        return _read_key(Path(file), "the key's file")
    if env.get(ENV_API_KEY):
        return _checked(env[ENV_API_KEY], ENV_API_KEY)
    return _read_key(Path(env[ENV_API_KEY_FILE]), ENV_API_KEY_FILE) if env.get(ENV_API_KEY_FILE) else ""


def _read_key(path: Path, name: str) -> str:
    try:
        return _checked(path.expanduser().read_text(encoding="ascii").strip(), f"{name}: {path}")
    except (OSError, UnicodeDecodeError) as error:
        raise CredentialsError(f"{name}: {path} cannot be read: {error}") from error


def _read_pem(file: PathLike | None, env: Mapping[str, str], variable: str) -> bytes | None:
    """Return the bytes of a file that an argument or a variable names; None if neither does."""
    named = file if file is not None else env.get(variable) or None
    if named is None:
        return None
    path = Path(named).expanduser()
    try:
        if path.stat().st_size > MAX_PEM_BYTES:
            raise CredentialsError(f"{path} is larger than {MAX_PEM_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise CredentialsError(f"{path} cannot be read: {error.strerror}") from error
    if b"-----BEGIN" not in data:
        raise CredentialsError(f"{path} is not in PEM: nothing in it begins with -----BEGIN")
    return data


def _checked(key: str, name: str) -> str:
    """Return a key that can travel in a header. Raises CredentialsError."""
    if not key or len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()) or " " in key:
        raise CredentialsError(f"{name} holds no key of at most {MAX_KEY_CHARS} printable ASCII characters")
    return key
