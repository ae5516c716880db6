"""What the launcher and `hetero topology` ask of the gateway's Admin service."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Self

import grpc

from hetero_api.contract import AUTHORIZATION_KEY
from hetero_api.sharding import UnitRange
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, ranks_pb2
from hetero_client.channel import channel_options
from hetero_client.status import error_from

CALL_TIMEOUT_S: Final = 5.0


class GroupState(StrEnum):
    """How a group stands; the meaning of each is in admin.proto."""

    NEW = "new"
    FORMING = "forming"
    LOADING = "loading"
    READY = "ready"
    ABORTED = "aborted"
    DRAINING = "draining"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as the gateway sees it.

    `kv_heads` and `mlp_columns` are the ranges that it owns of every layer; None while the group has not
    formed, or when the layers differ.
    """

    rank: int
    pool: str
    pod_name: str
    device: str
    cores: tuple[int, ...]
    pinned: bool
    joined: bool
    kv_heads: UnitRange | None
    mlp_columns: UnitRange | None
    vocab_rows: UnitRange | None
    layered: bool
    weight_bytes: int
    kv_bytes: int
    load_s: float
    kernels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GroupTopology:
    """The group as the gateway sees it."""

    name: str
    state: GroupState
    epoch: int
    ranks: tuple[RankView, ...]
    exchange: str
    reason: str
    failed: bool
    block_size: int
    num_blocks: int


class AdminClient:
    """Talks to `hetero.v1.Admin` at `address` ("host:port"); `token` is the administrator's, where one is asked for."""

    def __init__(self, address: str, *, token: str | None = None, channel: grpc.Channel | None = None) -> None:
        self.address = address
        self._metadata = () if token is None else ((AUTHORIZATION_KEY, f"Bearer {token}"),)
        self._channel = channel or grpc.insecure_channel(address, options=channel_options(address))
        self._stub = admin_pb2_grpc.AdminStub(self._channel)

    def topology(self, *, timeout_s: float = CALL_TIMEOUT_S) -> GroupTopology:
        """Where every rank is and what it owns."""
        try:
            response = self._stub.GetTopology(
                admin_pb2.GetTopologyRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise error_from(error, address=self.address) from error
        return topology_from(response)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def topology_from(message: admin_pb2.GetTopologyResponse) -> GroupTopology:
    """The dataclass of a GetTopology answer."""
    exchange = ranks_pb2.ExchangeKind.Name(message.exchange).removeprefix("EXCHANGE_KIND_").lower()
    return GroupTopology(
        name=message.name,
        state=_state(message.state),
        epoch=message.epoch,
        ranks=tuple(_rank(rank) for rank in message.ranks),
        exchange="" if exchange == "unspecified" else exchange,
        reason=message.reason,
        failed=message.failed,
        block_size=message.block_size,
        num_blocks=message.num_blocks,
    )


def _state(value: admin_pb2.GroupState.ValueType) -> GroupState:
    name = admin_pb2.GroupState.Name(value).removeprefix("GROUP_STATE_").lower()
    return GroupState.NEW if name == "unspecified" else GroupState(name)


def _rank(message: admin_pb2.RankStatus) -> RankView:
    place, layers = message.place, message.shard.layers
    kv_heads = _common(layers, lambda layer: layer.kv_heads)
    mlp_columns = _common(layers, lambda layer: layer.mlp_columns)
    return RankView(
        rank=place.rank,
        pool=place.pool,
        pod_name=place.pod_name,
        device=place.device.name,
        cores=tuple(place.device.cpus),
        pinned=place.device.pinned,
        joined=message.joined,
        kv_heads=kv_heads,
        mlp_columns=mlp_columns,
        vocab_rows=_range(message.shard.vocab_rows) if layers else None,
        layered=bool(layers) and (kv_heads is None or mlp_columns is None),
        weight_bytes=message.weight_bytes,
        kv_bytes=message.kv_bytes,
        load_s=message.load_s,
        kernels=tuple(message.kernels),
    )


def _common(
    layers: Iterable[ranks_pb2.LayerShard], pick: Callable[[ranks_pb2.LayerShard], ranks_pb2.UnitRange]
) -> UnitRange | None:
    """The range that all layers share, None if there is none."""
    ranges = {_range(pick(layer)) for layer in layers}
    return ranges.pop() if len(ranges) == 1 else None


def _range(message: ranks_pb2.UnitRange) -> UnitRange:
    return UnitRange(message.begin, message.end)
