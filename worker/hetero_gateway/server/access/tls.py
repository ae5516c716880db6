"""TLS of both doors: one certificate, read again when its Secret changes, and optionally clients' certificates.

Files lie as cert-manager lays them out: `tls.crt` (the certificate, then its chain) and `tls.key`; `ca.crt` of another
folder says whose certificates clients must show. A certificate is tried before it is used, by a handshake in memory
that a client of each wanted name would make: one that has expired, or is for other names, is refused with OpenSSL's
reason. Connections keep the certificate that they began with, so a new one breaks no stream. Sessions are not resumed:
that would let in a client whose authority is no longer trusted.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc

from hetero_api.contract import TLS_AUTHORITY, TLS_CERTIFICATE, TLS_KEY
from hetero_gateway.server.errors import TlsError

MAX_BYTES: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Folders with the files, and the names that clients dial."""

    folder: Path
    client_ca_folder: Path | None = None
    """Folder with the authority of clients' certificates; None: clients need none."""
    dns_names: tuple[str, ...] = ()
    """Names that the certificate must be for."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """Private key, certificate, and the authority of clients, if there is one."""
        authority = () if self.client_ca_folder is None else (self.client_ca_folder / TLS_AUTHORITY,)
        return (self.folder / TLS_KEY, self.folder / TLS_CERTIFICATE, *authority)


class ServerTls:
    """Certificate of the doors, as the files had it when they were last read."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises TlsError."""
        self._files = files
        self.load()
        self.context = self._newest
        """Context for listeners: each handshake goes on with the newest certificate."""
        self.context.sni_callback = self._use_newest

    def load(self) -> None:
        """Read the files. Raises TlsError, and then changes nothing."""
        files = self._files
        _, chain, *authority = pems = tuple(map(_read, files.paths))
        try:
            context = _server_context(files, authority[0] if authority else None)
            self._try(chain)
            if pems != tuple(map(_read, files.paths)):  # else a key might be used beside another certificate
                raise ValueError("they changed while they were read")
        except (ssl.SSLError, ValueError) as error:
            names = ", ".join(map(str, files.paths))
            raise TlsError(f"{names}: cannot be used for TLS: {_reason(error)}") from error
        self._newest, self._pems = context, pems

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return credentials for one gRPC server: each handshake is made with the newest certificate."""
        used = self._pems

        def newer() -> grpc.ServerCertificateConfiguration | None:
            # Called from threads of gRPC's.
            nonlocal used
            if self._pems is used:
                return None
            used = self._pems
            return _configuration(*used)

        has_authority = self._files.client_ca_folder is not None
        fetcher: Any = newer  # grpc's stubs do not know that None means no change
        return grpc.dynamic_ssl_server_credentials(_configuration(*used), fetcher, has_authority)

    def _use_newest(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:  # noqa: ARG002
        connection.context = self._newest

    def _try(self, chain: bytes) -> None:
        """Shake hands as a client of each name would, who trusts this certificate alone. Raises SSLError."""
        server = _server_context(self._files, None)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(cadata=chain.decode("ascii"))
        client.check_hostname = bool(self._files.dns_names)
        for name in self._files.dns_names or (None,):
            _shake_hands(client, server, name)


def _server_context(files: TlsFiles, client_ca: bytes | None) -> ssl.SSLContext:
    """Return a context with the files' certificate. Raises SSLError or ValueError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    context.set_alpn_protocols(["http/1.1"])
    # With a password, even an empty one, OpenSSL asks nobody at the terminal.
    context.load_cert_chain(files.folder / TLS_CERTIFICATE, files.folder / TLS_KEY, password="")
    if client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=client_ca.decode("ascii"))
    return context


def _shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> None:
    """Let both ends shake hands in memory. Raises SSLError when the client does not trust the server."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    caller = client.wrap_bio(to_client, to_server, server_hostname=name)
    answerer = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        with suppress(ssl.SSLWantReadError):
            caller.do_handshake()
            return
        with suppress(ssl.SSLWantReadError):
            answerer.do_handshake()
    raise ssl.SSLError("the handshake does not end")


def _configuration(key: bytes, chain: bytes, client_ca: bytes | None = None) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=client_ca)


def _read(path: Path) -> bytes:
    """Return a file's bytes. Raises TlsError for one that cannot be read or is too large."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise TlsError(f"{path}: is larger than {MAX_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise TlsError(f"{path}: cannot be read: {error.strerror}") from error


def _reason(error: Exception) -> str:
    """Return OpenSSL's reason in words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return str(error)
