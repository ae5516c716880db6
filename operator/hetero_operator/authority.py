"""Certificates for the inside of a group, where gateway, ranks and operator know one another by them.

Each revision of a group has an authority of its own, which nobody else trusts, in a Secret that the operator makes.
Pods mount the authority's certificate and their own certificate and key, never the authority's key. The gateway's
certificate is for its DNS names and for servers only, the others are for clients only: a rank cannot pass for the
gateway. Keys are ECDSA on P-256.

A certificate lasts for 30 days and is renewed after 10, so that an operator may be away for 20 days. An authority lasts
for 120 days. Past its half a new one is trusted beside it, and signs from the next renewal on: by then every pod has
read of it. A certificate that was renewed counts at the next connection; connections are never broken for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hetero_api.contract import (
    SECRET_GATEWAY_CERTIFICATE,
    SECRET_GATEWAY_KEY,
    SECRET_INSIDE_AUTHORITY,
    SECRET_OPERATOR_CERTIFICATE,
    SECRET_OPERATOR_KEY,
    SECRET_RANK_CERTIFICATE,
    SECRET_RANK_KEY,
)

CERTIFICATE_LIFE: Final = timedelta(days=30)
AUTHORITY_LIFE: Final = timedelta(days=120)
_CLOCK_SKEW: Final = timedelta(minutes=5)
"""Clocks of nodes that are so late still take a new certificate."""
_AUTHORITY_KEY: Final = "ca.key"
_NEXT_CERTIFICATE: Final = "next-ca.crt"
_NEXT_KEY: Final = "next-ca.key"


@dataclass(frozen=True, slots=True)
class Authority:
    """A certificate and its key, which sign others."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def new(cls, now: datetime) -> Self:
        """Return an authority with a key of its own."""
        # A name of its own, since two authorities are trusted side by side for a while.
        key, name = ec.generate_private_key(ec.SECP256R1()), _named(f"heteroinference {now:%Y%m%d%H%M%S}")
        made = (
            _builder(name, key.public_key(), now, AUTHORITY_LIFE)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        return cls(made.sign(key, hashes.SHA256()), key)

    @classmethod
    def from_pem(cls, certificate: bytes, key: bytes) -> Self:
        """Return a stored authority. Raises ValueError or TypeError."""
        loaded = serialization.load_pem_private_key(key, password=None)
        if not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise TypeError("the authority's key is not one of an elliptic curve")
        return cls(x509.load_pem_x509_certificate(certificate), loaded)

    @property
    def pem(self) -> bytes:
        """The certificate, in PEM."""
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, role: str, dns_names: Sequence[str], now: datetime) -> tuple[bytes, bytes]:
        """Return a certificate and its key, in PEM: of a server where there are names, else of a client."""
        key = ec.generate_private_key(ec.SECP256R1())
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if dns_names else ExtendedKeyUsageOID.CLIENT_AUTH
        names = [x509.DNSName(name) for name in dns_names] or [x509.DNSName(role)]
        made = (
            _builder(_named(role), key.public_key(), now, CERTIFICATE_LIFE)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), critical=False)
        )
        return made.sign(self.key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), _pem_of(key)


def inside_certificates(
    dns_names: Sequence[str], now: datetime, stored: Mapping[str, bytes] | None = None
) -> dict[str, bytes]:
    """Return the data of a group's Secret: certificates for a gateway of these names, for ranks and the operator.

    With `stored`, the data of the Secret whose place it takes, whoever trusts those trusts these. Data that cannot be
    read, or whose authority has expired, count as none.
    """
    signer, following, retired = _authorities(stored, now)
    gateway, gateway_key = signer.issue("gateway", dns_names, now)
    rank, rank_key = signer.issue("rank", (), now)
    operator, operator_key = signer.issue("operator", (), now)
    pending = {} if following is None else {_NEXT_CERTIFICATE: following.pem, _NEXT_KEY: _pem_of(following.key)}
    trusted = [signer.pem, *((following.pem,) if following else ()), *retired]
    return {
        SECRET_INSIDE_AUTHORITY: b"".join(trusted),
        _AUTHORITY_KEY: _pem_of(signer.key),
        SECRET_GATEWAY_CERTIFICATE: gateway,
        SECRET_GATEWAY_KEY: gateway_key,
        SECRET_RANK_CERTIFICATE: rank,
        SECRET_RANK_KEY: rank_key,
        SECRET_OPERATOR_CERTIFICATE: operator,
        SECRET_OPERATOR_KEY: operator_key,
        **pending,
    }


def _authorities(
    stored: Mapping[str, bytes] | None, now: datetime
) -> tuple[Authority, Authority | None, tuple[bytes, ...]]:
    """Return the authority that signs, the one that will sign next, if any, and others that are still trusted."""
    try:
        known = _stored_authorities(stored or {})
    except (ValueError, TypeError):
        known = []
    # What is signed must not outlive its authority.
    able = [each for each in known if each.certificate.not_valid_after_utc > now + CERTIFICATE_LIFE]
    signer = able[-1] if able else Authority.new(now)
    retired = tuple(each.pem for each in known if each is not signer and each.certificate.not_valid_after_utc > now)
    is_old = signer.certificate.not_valid_after_utc - now < AUTHORITY_LIFE / 2
    return signer, Authority.new(now) if is_old else None, retired


def _stored_authorities(stored: Mapping[str, bytes]) -> list[Authority]:
    """Return the authority that signed last, and the one that was to be next. Raises ValueError or TypeError."""
    if SECRET_INSIDE_AUTHORITY not in stored or _AUTHORITY_KEY not in stored:
        return []
    found = [Authority.from_pem(stored[SECRET_INSIDE_AUTHORITY], stored[_AUTHORITY_KEY])]
    if _NEXT_CERTIFICATE in stored and _NEXT_KEY in stored:
        found.append(Authority.from_pem(stored[_NEXT_CERTIFICATE], stored[_NEXT_KEY]))
    return found


def _builder(
    name: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, life: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + life)
    )


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    """Return what a key is for: to sign certificates, or handshakes."""
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _pem_of(key: ec.EllipticCurvePrivateKey) -> bytes:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption())
