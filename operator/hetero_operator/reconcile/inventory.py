"""What was observed, by what it is: the resource's own objects, and those of others in their place.

Old ConfigMaps and workloads are the operator's memory: which spec is in force, and from which templates the pods of a
revision were made. Nothing else is remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from hetero_api.contract import LABEL_GATEWAY_REVISION, LABEL_REVISION
from hetero_operator.reconcile.model import Object, Observed
from hetero_operator.reconcile.names import Names
from hetero_operator.reconcile.ownership import ObjectKey, is_owned_by, label_of, template_label_of

CONFIG_MAP: Final = "ConfigMap"
SECRET: Final = "Secret"
CLAIM_TEMPLATE: Final = "ResourceClaimTemplate"
STATEFUL_SET: Final = "StatefulSet"
DEPLOYMENT: Final = "Deployment"


@dataclass(frozen=True, slots=True)
class Inventory:
    """Observed objects but pods, by key."""

    own: Mapping[ObjectKey, Object]
    """What the resource controls."""
    foreign: Mapping[ObjectKey, Object]
    """What carries its label and is controlled by nobody, by somebody else, or by an earlier one of its name."""

    @classmethod
    def of(cls, observed: Observed) -> Inventory:
        uid = observed.resource["metadata"]["uid"]
        by_key = {ObjectKey.of(item): item for item in observed.owned}
        return cls(
            own={key: item for key, item in by_key.items() if is_owned_by(item, uid)},
            foreign={key: item for key, item in by_key.items() if not is_owned_by(item, uid)},
        )

    def of_kind(self, kind: str) -> Iterator[Object]:
        """The resource's own objects of a kind, by name."""
        return (item for key, item in sorted(self.own.items()) if key.kind == kind)

    def named(self, kind: str, name: str, *, group: str = "") -> Object | None:
        """One of the resource's own objects."""
        return self.own.get(ObjectKey(group, kind, name))

    def workloads(self) -> Iterator[Object]:
        """The resource's StatefulSets and its Deployment."""
        yield from self.of_kind(STATEFUL_SET)
        yield from self.of_kind(DEPLOYMENT)

    def configs_newest_first(self) -> list[Object]:
        """The resource's ConfigMaps, the youngest first; equal ages by name, so that the order is always the same."""
        configs = list(self.of_kind(CONFIG_MAP))
        return sorted(configs, key=lambda item: str(item["metadata"].get("creationTimestamp", "")), reverse=True)

    def config_in_force(self, names: Names) -> Object | None:
        """The ConfigMap that the gateway was started from; else the youngest; None: nothing ran yet."""
        gateway = self.named(DEPLOYMENT, names.gateway, group="apps")
        if gateway is not None:
            revision = template_label_of(gateway, LABEL_GATEWAY_REVISION)
            config = self.named(CONFIG_MAP, names.config(revision))
            if config is not None:
                return config
        return next(iter(self.configs_newest_first()), None)

    def config_of_ranks(self, revision: str) -> Object | None:
        """The youngest ConfigMap of any gateway revision that keeps the templates of these ranks."""
        return next((item for item in self.configs_newest_first() if label_of(item, LABEL_REVISION) == revision), None)
