"""The group's Secret: the tokens that ranks and the operator prove themselves with, new ones for each revision.

Because a revision has tokens of its own, a rank of an old revision can never join a new group.
"""

from __future__ import annotations

from hetero_api.contract import LABEL_REVISION, ROLE_GATEWAY, SECRET_ADMIN_TOKEN_KEY, SECRET_GROUP_TOKEN_KEY
from hetero_operator.reconcile.manifests.rendering import Rendering, manifest
from hetero_operator.reconcile.model import NewSecret


def group_secret(rendering: Rendering) -> NewSecret:
    """The Secret of the wanted revision; its values are made up when it is made, and never again."""
    revision = rendering.revisions.ranks
    secret = manifest(
        rendering, ("v1", "Secret"), rendering.names.group_secret(revision), component=ROLE_GATEWAY,
        labels={LABEL_REVISION: revision}, type="Opaque", immutable=True,
    )  # fmt: skip
    return NewSecret(secret, generated_keys=(SECRET_GROUP_TOKEN_KEY, SECRET_ADMIN_TOKEN_KEY))
