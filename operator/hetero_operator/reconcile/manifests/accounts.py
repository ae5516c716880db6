"""ServiceAccounts without any right: no pod of a group ever talks to the API server."""

from __future__ import annotations

from typing import Any

from hetero_api.contract import ROLE_GATEWAY, ROLE_RANK
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest


def accounts(rendering: Rendering) -> list[dict[str, Any]]:
    """One ServiceAccount for the ranks, one for the gateway."""
    names = rendering.names
    return [
        _account(rendering, names.rank_account, component=ROLE_RANK),
        _account(rendering, names.gateway, component=ROLE_GATEWAY),
    ]


def _account(rendering: Rendering, name: str, *, component: str) -> dict[str, Any]:
    kind = ("v1", "ServiceAccount")
    return manifest(rendering, kind, name, component=component, automountServiceAccountToken=False)
