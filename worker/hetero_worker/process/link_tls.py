"""TLS of a rank's link: the certificates by which it and its gateway know one another.

The files are read at every connection, so a certificate that was renewed counts from the next one on. gRPC tells little
of a handshake that fails, so one is made before by OpenSSL, which names the reason: an authority that is not the
group's, another name, a certificate that has expired, or the gateway's own refusal.
"""

from __future__ import annotations

import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from socket import socket

import grpc

from hetero_api.contract import TLS_AUTHORITY, TLS_CERTIFICATE, TLS_KEY


@dataclass(frozen=True, slots=True)
class LinkTls:
    """Folder with the rank's certificate, its key, and the authority of the group."""

    folder: Path

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what a channel is made with. Raises OSError for a file that cannot be read."""
        authority, key, certificate = (
            (self.folder / name).read_bytes() for name in (TLS_AUTHORITY, TLS_KEY, TLS_CERTIFICATE)
        )
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def shake_hands(self, connection: socket, host: str) -> None:
        """Find out whether this rank and the gateway at `host` trust one another. Raises OSError with the reason."""
        self._try_own()
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.load_verify_locations(self.folder / TLS_AUTHORITY)
        context.set_alpn_protocols(["h2"])
        with context.wrap_socket(connection, server_hostname=host) as encrypted:
            # In TLS 1.3 a gateway judges our certificate after we have judged its own: its first byte is its consent.
            if not encrypted.recv(1):
                raise ConnectionAbortedError("the gateway hung up: it does not take this rank's certificate")

    def _try_own(self) -> None:
        """Shake hands in memory as a gateway of the group would, which hangs up without a word. Raises OSError."""
        gateway, rank = self._context(ssl.PROTOCOL_TLS_SERVER), self._context(ssl.PROTOCOL_TLS_CLIENT)
        gateway.verify_mode = ssl.CERT_REQUIRED
        gateway.load_verify_locations(self.folder / TLS_AUTHORITY)
        rank.check_hostname, rank.verify_mode = False, ssl.CERT_NONE
        to_gateway, to_rank = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (rank.wrap_bio(to_rank, to_gateway), gateway.wrap_bio(to_gateway, to_rank, server_side=True))
        for end in (*ends, *ends):
            try:
                with suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            except ssl.SSLCertVerificationError as error:
                raise ConnectionError(f"this rank's own certificate: {error.verify_message}") from error

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        """Return a context with the rank's certificate. Raises OSError."""
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # With a password, even an empty one, OpenSSL asks nobody at the terminal.
        context.load_cert_chain(self.folder / TLS_CERTIFICATE, self.folder / TLS_KEY, password="")
        return context
