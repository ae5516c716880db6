"""The fields of the resource that say who may come through the front door, and how."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, StringConstraints

from hetero_api.spec_model import SecretKeyRef
from hetero_api.spec_types import (
    DNS_NAME_PATTERN,
    DataKey,
    Form,
    ObjectName,
    Reason,
    Rule,
    SpecEnum,
    SpecModel,
    left_out,
    spelled,
)


class KeysSecretRef(SecretKeyRef):
    """A keys file in a Secret of the resource's namespace."""

    name: ObjectName
    """Name of the Secret, in the resource's namespace."""
    key: DataKey = "keys.yaml"
    """Key within the Secret."""


DnsName = Annotated[
    str,
    Form(rf"^({DNS_NAME_PATTERN})$", "must be a DNS name: lower-case letters, digits, '-' and '.'"),
    StringConstraints(max_length=253),
]


class TlsSpec(SpecModel):
    """TLS of both doors, 1.2 or newer."""

    secret_name: ObjectName
    """Secret with tls.crt and tls.key, as cert-manager makes them. A new certificate in it takes hold without a
    restart, and breaks no stream.
    """
    client_ca_secret_name: Annotated[ObjectName | None, Field(alias="clientCASecretName")] = None
    """Secret with ca.crt: clients must show a certificate of this authority. Default: they need none."""
    dns_names: Annotated[list[DnsName], Field(max_length=32)] = Field(default_factory=list)
    """Names that clients dial. A certificate that is not for all of them is refused. Default: any is used."""


class AuthMode(SpecEnum):
    """Whom the gateway answers."""

    KEYS = "Keys"
    NONE = "None"


class AuthSpec(SpecModel):
    """Who may call."""

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "keysSecretRef",
            "self.mode != 'Keys' || has(self.keysSecretRef)",
            "is required where mode is Keys",
            lambda auth: auth.mode != AuthMode.KEYS or auth.keys_secret_ref is not None,
            Reason.REQUIRED,
        ),
        left_out("keys_secret_ref", "is of no use with mode None; leave it out", where=("mode", "None")),
    )

    mode: Annotated[AuthMode, spelled(AuthMode)] = AuthMode.KEYS
    """Keys: callers show a key. None: whoever reaches the gateway may use it, wherever they are."""
    keys_secret_ref: KeysSecretRef | None = None
    """Secret with the keys file: names, roles and limits of principals, and hashes of their keys (`hetero key` makes
    entries). A change of the Secret takes hold without a restart.
    """
