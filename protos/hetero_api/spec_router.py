"""The router before several replicas, as the resource declares it."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from pydantic import ConfigDict, Field

from hetero_api.contract import HTTP_PORT
from hetero_api.spec_cluster import ResourcesSpec
from hetero_api.spec_model import SecretKeyRef
from hetero_api.spec_types import DataKey, ObjectName, Reason, Rule, SpecEnum, SpecModel, left_out, spelled

PICKER_PORT: Final = 9002
"""Port at which endpoint pickers of the Gateway API inference extension listen unless they are told another."""


class RouterType(SpecEnum):
    """Program that routes calls to replicas."""

    NONE = "None"
    SMG = "SMG"
    INFERENCE_POOL = "InferencePool"


class RoutingPolicy(SpecEnum):
    """Choice of the replica for a call."""

    CACHE_AWARE = "CacheAware"
    LEAST_LOAD = "LeastLoad"
    POWER_OF_TWO = "PowerOfTwo"
    ROUND_ROBIN = "RoundRobin"


class CacheIsolation(SpecEnum):
    """Sharing of cached prefixes among tenants behind a router."""

    TENANT = "Tenant"
    SHARED = "Shared"


class RouterKeysRef(SecretKeyRef):
    """A file with the router's keys in a Secret of the resource's namespace."""

    name: ObjectName
    """Name of the Secret, in the resource's namespace."""
    key: DataKey = "keys.txt"
    """Key within the Secret."""


class PickerFailureMode(SpecEnum):
    """Treatment of calls while an endpoint picker does not answer."""

    FAIL_CLOSE = "FailClose"
    FAIL_OPEN = "FailOpen"


class EndpointPickerRef(SpecModel):
    """Service of an endpoint picker, which chooses the gateway for each call that a Gateway routes to the pool."""

    # Else its defaults stay, without a name, where server-side apply takes it away.
    model_config = ConfigDict(json_schema_extra={"x-kubernetes-map-type": "atomic"})

    name: ObjectName
    """Name of the Service, in the resource's namespace."""
    port: Annotated[int, Field(ge=1, le=65535)] = PICKER_PORT
    """Port of the Service."""
    failure_mode: Annotated[PickerFailureMode, spelled(PickerFailureMode)] = PickerFailureMode.FAIL_CLOSE
    """FailClose: calls fail while it does not answer. FailOpen: they go to any gateway then."""


class RouterSpec(SpecModel):
    """A router in front of all replicas."""

    rules: ClassVar[tuple[Rule, ...]] = (
        left_out("keys_secret_ref", "is for type SMG; leave it out", unless=("type", "SMG")),
        left_out("tls_secret_name", "is for type SMG; leave it out", unless=("type", "SMG")),
        left_out("endpoint_picker_ref", "is for type InferencePool; leave it out", unless=("type", "InferencePool")),
        Rule(
            "endpointPickerRef",
            "self.type != 'InferencePool' || has(self.endpointPickerRef)",
            "is required where type is InferencePool",
            lambda router: router.type != RouterType.INFERENCE_POOL or router.endpoint_picker_ref is not None,
            Reason.REQUIRED,
        ),
    )

    type: Annotated[RouterType, spelled(RouterType)] = RouterType.NONE
    """None: clients dial gateways, by the Service of the resource's name. SMG: Shepherd Model Gateway besides, by the
    Service NAME-router, with the Chat Completions, Responses and Messages APIs. InferencePool: an InferencePool NAME of
    the Gateway API inference extension, to which an HTTPRoute of yours sends calls, and whose endpoint picker, yours as
    well, chooses a gateway; needs the extension's CRDs. One machine has no use for it: see `hetero up --router`.
    """
    policy: Annotated[RoutingPolicy, spelled(RoutingPolicy)] = RoutingPolicy.CACHE_AWARE
    """CacheAware: the replica whose cache has the longest prefix of the prompt, unless it has much more to do than
    others. LeastLoad: the one with the least to do. PowerOfTwo: the better of two that are drawn. RoundRobin: each in
    its turn. Of SMG.
    """
    cache_isolation: Annotated[CacheIsolation, spelled(CacheIsolation)] = CacheIsolation.TENANT
    """Tenant: as gateways do, no tenant's prompt hits a cached prefix of another. Shared: all callers of the router
    share the prefix cache, so the time to a first token tells what others asked. SMG can do no other, so it needs
    Shared where keys tell tenants apart. Behind an InferencePool gateways know their callers by their keys as ever.
    """
    port: Annotated[int, Field(ge=1, le=65535)] = HTTP_PORT
    """Port of the Service NAME-router. Of SMG."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 2
    """Pods of the router, on different nodes where there are such. With two or more callers go on through another when
    one is lost or its node is drained. Each caller's address stays with one pod, which alone remembers the Responses
    that it gave; 1 where callers come through a proxy and go on from a Response by its id. Of SMG.
    """
    resources: ResourcesSpec = ResourcesSpec()
    """Resources of the router's container. Of SMG."""
    keys_secret_ref: RouterKeysRef | None = None
    """Secret with a line TENANT:KEY for each key that callers may show. SMG compares plain keys, so these are not the
    hashed ones of gateway.auth. A change takes hold when the router's pod is made again. Default: callers need none.
    """
    tls_secret_name: ObjectName | None = None
    """Secret with tls.crt and tls.key of the router. A change takes hold when its pod is made again. Default: no TLS.
    """
    endpoint_picker_ref: EndpointPickerRef | None = None
    """Service of the endpoint picker, for type InferencePool. Whoever runs the picker starts it for the pool NAME."""
