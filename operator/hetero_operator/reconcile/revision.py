"""Revisions: short hashes of what the user asked for, which decide what has to restart.

    revision          hash of the fields with Effect.RANKS      and of the annotation restartedAt
    gateway revision  hash of those and the fields with Effect.GATEWAY

Only the user's words are hashed. A field that equals its default hashes like one that is not there: a version of the
operator that adds a field changes no hash, and neither do images and other things that the installation decides. So
an upgrade of the operator restarts nothing. (A default of a released API version is therefore never changed.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from typing import Any, Final, NamedTuple

from hetero_api.contract import ANNOTATION_RESTARTED_AT
from hetero_api.effects import Effect, fields_with
from hetero_api.spec import HeteroInferenceSpec
from hetero_operator.reconcile.model import Object, Observed

RANK_EFFECTS: Final = frozenset({Effect.RANKS})
GATEWAY_EFFECTS: Final = frozenset({Effect.RANKS, Effect.GATEWAY})
_HASH_LENGTH: Final = 10


class Revisions(NamedTuple):
    """The two revisions of a resource, 10 hexadecimal digits each."""

    ranks: str
    gateway: str


def revisions_of(resource: Object, spec: HeteroInferenceSpec) -> Revisions:
    """Return the revisions that a resource with this spec asks for."""
    annotations = resource["metadata"].get("annotations") or {}
    restarted_at = str(annotations.get(ANNOTATION_RESTARTED_AT, ""))
    canonical = canonical_spec(spec)
    return Revisions(
        ranks=_hash(fields_with(canonical, RANK_EFFECTS), restarted_at),
        gateway=_hash(fields_with(canonical, GATEWAY_EFFECTS), restarted_at),
    )


def revisions_in(observed: Observed, spec: HeteroInferenceSpec) -> Revisions:
    """Return the revisions of the spec in an observation, which a view may have of an earlier one."""
    return revisions_of(observed.resource, spec) if observed.revisions is None else Revisions(*observed.revisions)


def canonical_spec(spec: HeteroInferenceSpec) -> dict[str, Any]:
    """Return the spec as decoded JSON with camelCase keys, without fields that are empty or equal their default."""
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude_none=True)
    return without_empty(dumped, empty=([], {}))


def digest(value: Any, length: int) -> str:
    """Return the first hexadecimal digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def _hash(fields: Mapping[str, Any], restarted_at: str) -> str:
    return digest({"spec": fields, "restartedAt": restarted_at}, _HASH_LENGTH)


def without_empty(fields: Mapping[str, Any], *, empty: Collection[Any]) -> dict[str, Any]:
    """Return decoded JSON without the fields that equal one of `empty`, at any depth; items of lists stay."""

    def kept(value: Any) -> Any:
        if isinstance(value, Mapping):
            return without_empty(value, empty=empty)
        return [kept(item) for item in value] if isinstance(value, list) else value

    return {key: value for key, item in fields.items() if (value := kept(item)) not in empty}
