"""Which exchange a group asks its ranks for, and whether what they built will do.

Ranks that see one /dev/shm under one kernel tell the same host id; only these can share memory. Whether they really do
is for them to find out, so the answer may be less than what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hetero_api.spec import ExchangeKind
from hetero_api.v1 import ranks_pb2
from hetero_gateway.group.errors import EpochEnded

_FIELD: Final = "spec.exchange.kind"


def asked_exchange(kind: ExchangeKind, hellos: Sequence[ranks_pb2.Hello]) -> ranks_pb2.ExchangeKind.ValueType:
    """By the resource and where the ranks are. Raises EpochEnded, permanent, where these contradict each other."""
    if kind == ExchangeKind.GLOO:
        return ranks_pb2.EXCHANGE_KIND_GLOO
    if _are_on_one_host(hellos):
        return ranks_pb2.EXCHANGE_KIND_SHM
    if kind == ExchangeKind.SHARED_MEMORY:
        hosts = ", ".join(f"{hello.pod_name} on {hello.host_id or 'none'}" for hello in hellos)
        raise EpochEnded(
            f"{_FIELD}: SharedMemory, but the ranks have no /dev/shm in common ({hosts}); put them on one node and "
            "give them one with spec.exchange.hostPath, or use Auto",
            permanent=True,
        )
    return ranks_pb2.EXCHANGE_KIND_GLOO


def built_exchange(
    kind: ExchangeKind, formed: Sequence[ranks_pb2.Formed]
) -> tuple[ranks_pb2.ExchangeKind.ValueType, str]:
    """What stands, and why it is not what was asked for, if so. Raises EpochEnded if it will not do."""
    kinds = {answer.exchange for answer in formed}
    if len(kinds) != 1:
        names = ", ".join(map(ranks_pb2.ExchangeKind.Name, sorted(kinds)))
        raise EpochEnded(f"the ranks built different exchanges: {names}")
    built, reason = kinds.pop(), next((answer.exchange_reason for answer in formed if answer.exchange_reason), "")
    if kind == ExchangeKind.SHARED_MEMORY and built != ranks_pb2.EXCHANGE_KIND_SHM:
        raise EpochEnded(f"{_FIELD}: SharedMemory, which the ranks could not build: {reason}", permanent=True)
    return built, reason


def _are_on_one_host(hellos: Sequence[ranks_pb2.Hello]) -> bool:
    hosts = {hello.host_id for hello in hellos}
    return len(hosts) == 1 and "" not in hosts
