"""The StatefulSet of a pool.

Parallel: ranks wait for one another, so one at a time would never end. OnDelete: a new revision is rolled out by the
operator, which takes all old rank pods away together; the StatefulSet controller would do it one by one, and mix
revisions in one group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hetero_api.contract import LABEL_POOL, LABEL_REVISION, ROLE_RANK
from hetero_api.spec import PoolSpec
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest, rank_selector

_KIND: Final = ("apps/v1", "StatefulSet")
_HISTORY: Final = 2


def statefulset(rendering: Rendering, pool: PoolSpec, template: Mapping[str, Any], *, held: bool) -> dict[str, Any]:
    """The pool's StatefulSet with a pod template; `held` keeps it without pods."""
    spec = {
        "serviceName": rendering.names.ranks,
        "replicas": pool.pods if rendering.runs and not held else 0,
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": _HISTORY,
        "selector": {"matchLabels": rank_selector(rendering, pool.name)},
        "template": dict(template),
    }
    return manifest(
        rendering, _KIND, rendering.names.pool(pool.name), component=ROLE_RANK,
        labels={LABEL_POOL: pool.name, LABEL_REVISION: rendering.revisions.ranks}, spec=spec,
    )  # fmt: skip
