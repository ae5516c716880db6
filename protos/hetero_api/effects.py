"""Effects of a change of each field of the spec, from a path to what it restarts.

The longest prefix of a path counts, so one line can cover a section and another a field of it. A test holds that every
field of the spec has an effect. The operator hashes fields by it (`reconcile/revision.py`), and the reference page
prints it. Moving a field to a lower effect is safe; a higher one restarts what runs at upgrade.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Any, Final

from pydantic import BaseModel

from hetero_api.spec import HeteroInferenceSpec
from hetero_api.spec_types import section_of


class Effect(StrEnum):
    """Programs that have to restart for a change to take hold."""

    RANKS = "Ranks"
    """All rank pods and the gateway's pod are replaced."""
    GATEWAY = "Gateway"
    """The gateway's pod is replaced; ranks stay, keep their weights and join a new epoch."""
    NONE = "None"
    """Nothing: objects are updated while everything runs, or pods come and go as asked."""


EFFECTS: Final[Mapping[str, Effect]] = {
    "model.uri": Effect.RANKS,
    "model.revision": Effect.RANKS,
    "model.tokenSecretRef": Effect.RANKS,
    "model.cache": Effect.RANKS,
    "model.dtype": Effect.GATEWAY,
    "model.quantization": Effect.GATEWAY,
    "model.quantizationGroupSize": Effect.GATEWAY,
    "model.maxModelLen": Effect.GATEWAY,
    "pools": Effect.RANKS,
    "topology": Effect.RANKS,
    "placement": Effect.GATEWAY,
    "exchange.kind": Effect.GATEWAY,
    "exchange.hostPath": Effect.RANKS,
    "engine": Effect.GATEWAY,
    "engine.adapters.load.uri": Effect.RANKS,
    "engine.speculative.draft": Effect.RANKS,
    "engine.speculative.draft.ranks": Effect.GATEWAY,
    "gateway": Effect.GATEWAY,
    "gateway.service": Effect.NONE,
    "gateway.auth.mode": Effect.NONE,
    "recovery.rendezvousTimeoutSeconds": Effect.GATEWAY,
    "recovery.stepTimeoutSeconds": Effect.GATEWAY,
    "recovery.startupTimeoutSeconds": Effect.RANKS,
    "recovery.maxRestarts": Effect.NONE,
    "recovery.windowSeconds": Effect.NONE,
    "recovery.nodeLostTimeoutSeconds": Effect.NONE,
    "scheduling": Effect.RANKS,
    "images": Effect.RANKS,
    "images.gateway": Effect.GATEWAY,
    "images.router": Effect.NONE,
    "podMetadata": Effect.RANKS,
    "networkPolicy": Effect.NONE,
    "disruptionBudget": Effect.NONE,
    "monitoring": Effect.NONE,
    "suspend": Effect.NONE,
    "replicas": Effect.NONE,
    "rollout": Effect.NONE,
    "idle": Effect.GATEWAY,
    "idle.responder": Effect.NONE,
    "router": Effect.NONE,
    "router.type": Effect.GATEWAY,
    "router.cacheIsolation": Effect.GATEWAY,
}


def effect_of(path: str) -> Effect:
    """Effect of a field below `spec`, as "pools.cpu.coresPerRank". Raises KeyError when the table has none for it."""
    prefix = path
    while prefix not in EFFECTS:
        prefix, dot, _ = prefix.rpartition(".")
        if not dot:
            raise KeyError(path)
    return EFFECTS[prefix]


def spec_leaves(model: type[BaseModel] = HeteroInferenceSpec, prefix: str = "") -> Iterator[str]:
    """Paths of all fields that hold no further fields; lists of sections are walked like sections."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        section = section_of(field.annotation)
        if section is None:
            yield path
        else:
            yield from spec_leaves(section, f"{path}.")


def fields_with(spec: Mapping[str, Any], effects: frozenset[Effect], *, prefix: str = "") -> dict[str, Any]:
    """Return the part of a decoded spec that has one of `effects`; sections that become empty are left out."""
    kept: dict[str, Any] = {}
    for key, value in spec.items():
        path = f"{prefix}{key}"
        if _is_uniform(path):
            part: Any = value if effect_of(path) in effects else None
        elif isinstance(value, list):
            part = [found for item in value if (found := fields_with(item, effects, prefix=f"{path}."))] or None
        else:
            part = fields_with(value, effects, prefix=f"{path}.") or None
        if part is not None:
            kept[key] = part
    return kept


@lru_cache(maxsize=1024)
def _is_uniform(path: str) -> bool:
    """Whether everything at and below a path has one effect."""
    return not any(known.startswith(f"{path}.") for known in EFFECTS)
