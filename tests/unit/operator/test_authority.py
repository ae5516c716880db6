"""Certificates of a group's inside: who trusts whom, for how long, and how an authority gives way to the next."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

from hetero_api.contract import (
    SECRET_GATEWAY_CERTIFICATE,
    SECRET_INSIDE_AUTHORITY,
    SECRET_OPERATOR_CERTIFICATE,
    SECRET_RANK_CERTIFICATE,
)
from hetero_operator.authority import AUTHORITY_LIFE, CERTIFICATE_LIFE, inside_certificates
from hetero_operator.reconcile.manifests.config import RENEWED_AFTER

pytestmark = pytest.mark.unit

NAMES = ("x-gateway.models.svc", "x-gateway.models.svc.cluster.local")
NOW = datetime(2030, 1, 1, tzinfo=UTC)
LEAVES = (SECRET_GATEWAY_CERTIFICATE, SECRET_RANK_CERTIFICATE, SECRET_OPERATOR_CERTIFICATE)
Data = Mapping[str, bytes]


def certificate(pem: bytes) -> x509.Certificate:
    return x509.load_pem_x509_certificate(pem)


def trusted(data: Data) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(data[SECRET_INSIDE_AUTHORITY])


def is_trusted(leaf: bytes, data: Data) -> bool:
    """Whether an authority of a Secret signed a certificate."""
    return any(is_signed_by(certificate(leaf), authority) for authority in trusted(data))


def is_signed_by(leaf: x509.Certificate, authority: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(authority)
    except (InvalidSignature, ValueError):  # ValueError: the issuer has another name
        return False
    return True


def test_each_certificate_is_for_its_holder_alone() -> None:
    data = inside_certificates(NAMES, NOW)
    purposes = {}
    for leaf in LEAVES:
        found = certificate(data[leaf])
        purposes[leaf] = list(found.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
        assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        assert is_trusted(data[leaf], data)
    server, client = [ExtendedKeyUsageOID.SERVER_AUTH], [ExtendedKeyUsageOID.CLIENT_AUTH]
    assert purposes == dict(zip(LEAVES, (server, client, client), strict=True))
    names = certificate(data[LEAVES[0]]).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert tuple(names.get_values_for_type(x509.DNSName)) == NAMES


def test_groups_do_not_trust_one_another() -> None:
    one, other = inside_certificates(NAMES, NOW), inside_certificates(NAMES, NOW)
    assert not any(is_trusted(one[leaf], other) for leaf in LEAVES)


def test_certificates_last_three_times_as_long_as_they_are_used() -> None:
    assert CERTIFICATE_LIFE == 3 * RENEWED_AFTER
    data = inside_certificates(NAMES, NOW)
    assert all(certificate(data[leaf]).not_valid_after_utc == NOW + CERTIFICATE_LIFE for leaf in LEAVES)
    assert trusted(data)[0].not_valid_after_utc == NOW + AUTHORITY_LIFE


def test_whoever_trusts_a_secret_trusts_what_takes_its_place_for_years() -> None:
    """Pods read a renewed Secret at different times: certificates of two neighbours in time trust one another."""
    now, data, authorities = NOW, inside_certificates(NAMES, NOW), set()
    for _ in range(60):
        now += RENEWED_AFTER
        renewed = inside_certificates(NAMES, now, data)
        for leaf in LEAVES:
            assert is_trusted(renewed[leaf], data), "an old pod trusts a new one"
            assert is_trusted(data[leaf], renewed), "a new pod trusts an old one"
            assert certificate(renewed[leaf]).not_valid_after_utc == now + CERTIFICATE_LIFE
        assert all(authority.not_valid_after_utc > now + CERTIFICATE_LIFE for authority in trusted(renewed)[:1])
        authorities |= {authority.serial_number for authority in trusted(renewed)}
        data = renewed
    assert len(trusted(data)) <= 3
    assert len(authorities) == pytest.approx(60 * RENEWED_AFTER / (AUTHORITY_LIFE / 2), abs=3)


def test_keys_are_made_again_with_each_renewal() -> None:
    first = inside_certificates(NAMES, NOW)
    second = inside_certificates(NAMES, NOW + RENEWED_AFTER, first)
    for leaf in LEAVES:
        assert certificate(first[leaf]).public_key() != certificate(second[leaf]).public_key()
    assert trusted(first) == trusted(second)


@pytest.mark.parametrize(
    "stored",
    [{}, {"ca.crt": b"no certificate", "ca.key": b"no key"}, {"ca.crt": b"", "ca.key": b""}],
    ids=["nothing", "nonsense", "empty"],
)
def test_a_secret_that_cannot_be_read_counts_as_none(stored: Data) -> None:
    data = inside_certificates(NAMES, NOW, stored)
    assert all(is_trusted(data[leaf], data) for leaf in LEAVES)


def test_an_authority_that_would_not_outlive_what_it_signs_signs_nothing() -> None:
    old = inside_certificates(NAMES, NOW)
    late = NOW + AUTHORITY_LIFE - CERTIFICATE_LIFE
    data = inside_certificates(NAMES, late, old)
    assert not is_trusted(data[LEAVES[0]], old)
    assert is_trusted(old[LEAVES[0]], data), "what runs is trusted until it has read the new ones"
    gone = inside_certificates(NAMES, NOW + AUTHORITY_LIFE + timedelta(seconds=1), old)
    assert not is_trusted(old[LEAVES[0]], gone)
