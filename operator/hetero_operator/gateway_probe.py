"""Asks a gateway for its group's state, at its pod's address: neither DNS nor a Service has to work.

Channels are kept: a question over a new one costs 2.5 ms of CPU, over a kept one 0.3 ms and 27 kB of memory. A channel
over which a question failed is closed: gRPC's pause between attempts to connect would hide a gateway that is back.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hetero_api.contract import ADMIN_PORT, AUTHORIZATION_KEY, GATEWAY_SERVICES, INFERENCE_PORT
from hetero_api.v1 import admin_pb2, admin_pb2_grpc
from hetero_operator.reconcile.model import GatewayReport

TIMEOUT_S: Final = 5.0
CONCURRENCY: Final = 16
MAX_GATEWAYS: Final = 1000
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0))


@dataclass(frozen=True, slots=True)
class InsideTls:
    """Certificate that the operator shows a gateway, and what it wants the gateway's to be. All in PEM."""

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    server_name: str
    """Name that the gateway's certificate must be for."""

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what a channel is made with."""
        return grpc.ssl_channel_credentials(self.authority, self.key, self.certificate)


_Peer = tuple[str, str]
"""A gateway's address and the name that its certificate must be for, "" where it shows none."""
_Channels = tuple[grpc.aio.Channel, grpc.aio.Channel]
"""Ways to a gateway's admin and inference ports."""


class GatewayProbe:
    """Questions to gateways, CONCURRENCY at a time. Close it."""

    def __init__(
        self, *, admin_port: int = ADMIN_PORT, inference_port: int = INFERENCE_PORT, timeout_s: float = TIMEOUT_S
    ) -> None:
        self._admin_port = admin_port
        self._inference_port = inference_port
        self._timeout_s = timeout_s
        self._at_once = asyncio.Semaphore(CONCURRENCY)
        self._channels: OrderedDict[_Peer, _Channels] = OrderedDict()

    async def ask(
        self, pod: str, address: str, token: str, *, uses_tls: bool = False, inside: InsideTls | None = None
    ) -> GatewayReport:
        """Ask the gateway in a pod. The report's `error` is the reason when it does not answer; nothing is raised.

        Where the front door uses TLS, which asks for names and maybe for certificates, the admin port tells of its
        health. With `inside`, the token goes only to a gateway that shows a certificate of the group's own authority.
        """
        peer = (address, inside.server_name if inside else "")
        async with self._at_once:
            admin, inference = channels = await self._channels_to(peer, inside)
            topology, serving = await asyncio.gather(
                self._topology(admin, token), self._serving(admin if uses_tls else inference)
            )
            if isinstance(topology, str) or serving is None:
                await self._hang_up(peer, channels)
        if isinstance(topology, str):
            return GatewayReport(pod, error=topology, serving=bool(serving))
        return GatewayReport(pod, group=topology, serving=bool(serving))

    async def close(self) -> None:
        """Close all channels."""
        for peer, channels in list(self._channels.items()):
            await self._hang_up(peer, channels)

    async def _channels_to(self, peer: _Peer, inside: InsideTls | None) -> _Channels:
        channels = self._channels.get(peer)
        if channels is None:
            inference = grpc.aio.insecure_channel(_target(peer[0], self._inference_port), options=_OPTIONS)
            channels = self._channels[peer] = _admin_channel(_target(peer[0], self._admin_port), inside), inference
        self._channels.move_to_end(peer)
        if len(self._channels) > MAX_GATEWAYS:
            await self._hang_up(*next(iter(self._channels.items())))
        return channels

    async def _hang_up(self, peer: _Peer, channels: _Channels) -> None:
        if self._channels.get(peer) is channels:
            del self._channels[peer]
        await asyncio.gather(*(channel.close() for channel in channels))

    async def _topology(self, channel: grpc.aio.Channel, token: str) -> admin_pb2.GetTopologyResponse | str:
        """Return the answer, or the reason why there is none."""
        metadata = ((AUTHORIZATION_KEY, f"Bearer {token}"),) if token else ()
        try:
            return await admin_pb2_grpc.AdminStub(channel).GetTopology(
                admin_pb2.GetTopologyRequest(), timeout=self._timeout_s, metadata=metadata
            )
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"

    async def _serving(self, channel: grpc.aio.Channel) -> bool | None:
        """Return whether requests are served, None when that is not known."""
        request = health_pb2.HealthCheckRequest(service=GATEWAY_SERVICES[0])
        try:
            answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=self._timeout_s)
        except grpc.aio.AioRpcError:
            return None
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _admin_channel(target: str, inside: InsideTls | None) -> grpc.aio.Channel:
    if inside is None:
        return grpc.aio.insecure_channel(target, options=_OPTIONS)
    # The operator dials the pod's address, which no certificate knows.
    options = (*_OPTIONS, ("grpc.ssl_target_name_override", inside.server_name))
    return grpc.aio.secure_channel(target, inside.credentials(), options=options)


def _target(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
