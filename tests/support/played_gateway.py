"""The two faces of a gateway that the operator asks, hetero.v1.Admin and health, on an address of its own on loopback.

The test says what the group is like; the gateway's pod gets the address as its own. Who does not show the admin token
is refused, as by a real one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from concurrent import futures
from types import TracebackType
from typing import Any, Final, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from hetero_api.contract import ADMIN_PORT, AUTHORIZATION_KEY, GATEWAY_SERVICES, INFERENCE_PORT
from hetero_api.v1 import admin_pb2, admin_pb2_grpc, ranks_pb2

_SERIAL = itertools.count(2)
PLACEMENT: Final = admin_pb2.PlacementReport(
    options=[
        admin_pb2.PlacementOption(
            name="Tensor, CPU ranks on MLP only", mode="Tensor", chosen=True,
            decode_tokens_per_second=118.4, prefill_tokens_per_second=4321.0,
        ),
        admin_pb2.PlacementOption(
            name="GPU only", mode="GpuOnly", decode_tokens_per_second=96.1, prefill_tokens_per_second=4400.0
        ),
        admin_pb2.PlacementOption(name="CPU only", why_not="rank 2 lacks 3.1 GiB: raise cpu.memoryPerRank"),
    ],
    reason="Tensor, CPU ranks on MLP only: 118 tokens/s; GPU only would give 96.",
    predicted_tokens_per_second=118.4,
    step_time_ratio=0.9595,
    measured_tokens_per_second=123.4,
)  # fmt: skip
"""What the gateway tells unless it is told otherwise."""


def own_address() -> str:
    """An address on loopback that no other test of this machine uses."""
    number = os.getpid() & 0xFFFF
    return f"127.{1 + (number >> 8) % 254}.{number & 255}.{next(_SERIAL)}"


class PlayedGateway(admin_pb2_grpc.AdminServicer):
    """Serves while entered."""

    def __init__(self, token: str) -> None:
        self.address = own_address()
        self.topology = admin_pb2.GetTopologyResponse(state=admin_pb2.GROUP_STATE_NEW)
        self.refused = 0
        """Calls without the token."""
        self._token = token
        self._health = health.HealthServicer()
        self._servers: list[grpc.Server] = []

    def say(
        self,
        state: admin_pb2.GroupState.ValueType,
        ranks: Sequence[admin_pb2.RankStatus],
        *,
        epoch: int = 1,
        reason: str = "",
        placement: admin_pb2.PlacementReport | None = None,
        exchange: ranks_pb2.ExchangeKind.ValueType = ranks_pb2.EXCHANGE_KIND_SHM,
        exchange_reason: str = "",
    ) -> None:
        """How the group stands from now on; it serves when it is READY."""
        self.topology = admin_pb2.GetTopologyResponse(
            state=state, epoch=epoch, ranks=ranks, reason=reason, placement_mode="Tensor", tokens_per_second=123.4,
            exchange=exchange, exchange_reason=exchange_reason, placement=placement or PLACEMENT,
        )  # fmt: skip
        serving = state == admin_pb2.GROUP_STATE_READY
        for service in GATEWAY_SERVICES:
            self._health.set(
                service,
                health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING,
            )

    def GetTopology(self, request: Any, context: Any) -> admin_pb2.GetTopologyResponse:  # noqa: N802
        if (AUTHORIZATION_KEY, f"Bearer {self._token}") not in tuple(context.invocation_metadata()):
            self.refused += 1
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "show the admin token")
        return self.topology

    def GetStats(self, request: Any, context: Any) -> admin_pb2.GetStatsResponse:  # noqa: N802
        return admin_pb2.GetStatsResponse()

    def _refuse(self, request: Any, context: Any) -> Any:
        context.abort(grpc.StatusCode.UNIMPLEMENTED, "the operator does not ask for this")

    ResetCache = Sleep = WakeUp = Drain = Profile = PlaceExperts = UpdateWeights = _refuse
    LoadAdapter = UnloadAdapter = ListAdapters = _refuse

    def _serve(self, port: int) -> grpc.Server:
        server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
        server.add_insecure_port(f"{self.address}:{port}")
        self._servers.append(server)
        return server

    def __enter__(self) -> Self:
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._serve(ADMIN_PORT))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._serve(INFERENCE_PORT))
        for server in self._servers:
            server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.stop(grace=None).wait()


def gpu_rank_status(rank: int, pool: str, pod: str, *, kv_heads: range, columns: range) -> admin_pb2.RankStatus:
    """A GPU rank of a model of one layer, which has loaded."""
    shard = ranks_pb2.LayerShard(
        kv_heads=ranks_pb2.UnitRange(begin=kv_heads.start, end=kv_heads.stop),
        mlp_columns=ranks_pb2.UnitRange(begin=columns.start, end=columns.stop),
    )
    place = ranks_pb2.RankPlace(rank=rank, pool=pool, pod_name=pod)
    place.device.CopyFrom(ranks_pb2.DeviceReport(kind=ranks_pb2.DEVICE_KIND_CUDA, name="NVIDIA H200"))
    return admin_pb2.RankStatus(
        place=place, joined=True, weight_bytes=8000, kv_bytes=4000, load_s=1.0,
        shard=ranks_pb2.RankShard(layers=[shard]),
    )  # fmt: skip


def rank_status(rank: int, pool: str, pod: str, *, joined: bool = True) -> admin_pb2.RankStatus:
    """A CPU rank that is bound to NUMA node 0 and has loaded, or one that is not there."""
    place = ranks_pb2.RankPlace(rank=rank, pool=pool, pod_name=pod)
    if not joined:
        return admin_pb2.RankStatus(place=place)
    place.device.CopyFrom(
        ranks_pb2.DeviceReport(kind=ranks_pb2.DEVICE_KIND_CPU, name="a CPU", cpus=[0, 1], numa_nodes=[0], pinned=True)
    )
    return admin_pb2.RankStatus(
        place=place, joined=True, weight_bytes=1000, kv_bytes=100, load_s=1.0, local_memory_percent=98
    )
