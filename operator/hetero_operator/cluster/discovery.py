"""What the API server offers. Only the groups that matter are asked, so that a dead aggregated API of someone else,
which breaks a walk over all groups, is no concern of ours."""

from __future__ import annotations

import logging
import re
from typing import Any, Final

from hetero_operator.cluster.kinds import OPTIONAL, RESOURCE, ResourceKind
from hetero_operator.cluster.transport import Transport
from hetero_operator.errors import ApiError, NotFound
from hetero_operator.reconcile.model import Capabilities

logger = logging.getLogger(__name__)

_DIGITS: Final = re.compile(r"\d+")


async def discover(api: Transport, known: Capabilities | None) -> Capabilities:
    """The server's capabilities. A group that does not answer counts as it was `known` before.

    Raises ApiError when the server does not tell its version.
    """
    version = _version(await api.get("/version"))
    kinds = [(kind.api_version, kind.kind) for kind in OPTIONAL if await _offered(api, kind, known)]
    return Capabilities(version=version, kinds=frozenset(kinds))


async def resource_served(api: Transport, namespace: str | None) -> bool:
    """Whether HeteroInference can be listed and stands in the discovery documents that kopf reads.

    Those lag behind the listing for a moment after the definition was made. Raises ApiError.
    """
    group, _, version = RESOURCE.api_version.partition("/")
    try:
        groups = (await api.get("/apis"))["groups"]
        versions = [one["version"] for found in groups if found["name"] == group for one in found["versions"]]
        if version not in versions or not _has(await api.get(RESOURCE.root), RESOURCE):
            return False
        await api.list(RESOURCE.path(namespace), limit=1)
    except NotFound:
        return False
    return True


async def _offered(api: Transport, kind: ResourceKind, known: Capabilities | None) -> bool:
    try:
        found = await api.get(kind.root)
    except NotFound:
        return False
    except ApiError as error:
        logger.warning("%s does not say what it offers: %s", kind.api_version, error)
        return known is not None and known.has(kind.api_version, kind.kind)
    return _has(found, kind)


def _has(group_version: dict[str, Any], kind: ResourceKind) -> bool:
    return any(item["name"] == kind.plural for item in group_version.get("resources") or ())


def _version(answer: dict[str, Any]) -> tuple[int, int]:
    """Major and minor; distributions write a minor of "20+"."""
    major, minor = (_DIGITS.search(str(answer.get(key, ""))) for key in ("major", "minor"))
    return (int(major[0]) if major else 0, int(minor[0]) if minor else 0)
