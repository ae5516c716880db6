"""Identities of a group: ServiceAccounts without any right, and the Secret with the group's tokens.

No pod of a group ever talks to the API server. Each revision has tokens of its own, so a rank of an old revision can
never join a new group.
"""

from __future__ import annotations

from typing import Any

from hetero_api.contract import LABEL_REVISION, ROLE_GATEWAY, ROLE_RANK, SECRET_ADMIN_TOKEN_KEY, SECRET_GROUP_TOKEN_KEY
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest
from hetero_operator.reconcile.model import NewSecret


def accounts(rendering: Rendering) -> list[dict[str, Any]]:
    """Return one ServiceAccount for the ranks, one for the gateway."""
    names = rendering.names
    return [
        _account(rendering, names.rank_account, component=ROLE_RANK),
        _account(rendering, names.gateway, component=ROLE_GATEWAY),
    ]


def _account(rendering: Rendering, name: str, *, component: str) -> dict[str, Any]:
    kind = ("v1", "ServiceAccount")
    return manifest(rendering, kind, name, component=component, automountServiceAccountToken=False)


def group_secret(rendering: Rendering) -> NewSecret:
    """Return the Secret of the wanted revision; its values are generated when it is created, and never again."""
    revision = rendering.revisions.ranks
    secret = manifest(
        rendering, ("v1", "Secret"), rendering.names.group_secret(revision), component=ROLE_GATEWAY,
        labels={LABEL_REVISION: revision}, type="Opaque", immutable=True,
    )  # fmt: skip
    return NewSecret(secret, generated_keys=(SECRET_GROUP_TOKEN_KEY, SECRET_ADMIN_TOKEN_KEY))
