"""The parts of one gateway, wired.

`listen` binds every port before anything is served; `serve` runs the engine and the group until it is cancelled or
one of them breaks; `drain` refuses new requests and lets those in flight finish; `close` ends requests, shuts the
ranks down and stops the servers, in this order. Everything runs on one asyncio loop, except the
HTTP server of probes and metrics.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.trace import Tracer

from hetero_api.api_keys import Role
from hetero_api.contract import GATEWAY_SERVICES, MAX_INFERENCE_MESSAGE_BYTES, MAX_RANKS_MESSAGE_BYTES, VERSION
from hetero_api.group_state import GroupState
from hetero_api.probe_server import ProbeServer
from hetero_api.v1 import admin_pb2, inference_pb2
from hetero_gateway.engine.core import EngineCore
from hetero_gateway.group.admin_rpcs import AdminRpcs
from hetero_gateway.group.experts import ExpertRebalancer, wants_rebalancing
from hetero_gateway.group.idle import IdleSleeper
from hetero_gateway.group.rendezvous import Group
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.access.intake import Intake
from hetero_gateway.server.access.limits import Meters
from hetero_gateway.server.access.principals import Guard
from hetero_gateway.server.access.tracing import CallTracer
from hetero_gateway.server.admin import serve_admin
from hetero_gateway.server.calls import InFlight
from hetero_gateway.server.config import ServedModel
from hetero_gateway.server.errors import BindError, Forbidden, Unauthenticated
from hetero_gateway.server.grpc_server import UNBOUNDED, GuardInterceptor, bind, new_server
from hetero_gateway.server.health import WHOLE_SERVER, GatewayProbes, HealthServicer, LoopReader
from hetero_gateway.server.inference import UNCOUNTED, InferenceServicer, serve_inference
from hetero_gateway.server.metrics import EngineCollector, EngineReading, GatewayMetrics
from hetero_gateway.server.openai.access import GuardedApplication
from hetero_gateway.server.openai.endpoint import ADAPTER_PATHS, METRICS_PATH, OpenAiEndpoint, with_cors
from hetero_gateway.server.openai.http_server import HttpListener
from hetero_gateway.server.openai.page import STATUS_PATH, Page
from hetero_gateway.server.ranks import serve_ranks
from hetero_gateway.server.reading import RequestReader
from hetero_gateway.server.router.parts import RouterParts

logger = logging.getLogger(__name__)

STOP_GRACE_S: Final = 1.0
"""Calls that have not ended by then are cut off, so that a stop takes a few seconds at most."""

_ADMIN_SERVICE: Final = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_INFERENCE_SERVICE: Final = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports to listen on; 0 lets the system choose, None leaves a router's door, or probes and metrics, out."""

    host: str
    inference: int
    admin: int
    ranks: int
    http: int
    metrics: int | None = None
    router: int | None = None


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses that a gateway listens on, "host:port"; "" where it does not."""

    inference: str
    admin: str
    ranks: str
    http: str
    router: str = ""


class Gateway:
    """One gateway, made on the loop that runs it."""

    def __init__(
        self,
        model: ServedModel,
        *,
        token: str,
        admin_token: str | None = None,
        files: AccessFiles | None = None,
        tracer: Tracer | None = None,
        with_page: bool = True,
    ) -> None:
        """`with_page` False: no page is served, whatever the resource says."""
        self._files = files or AccessFiles()
        keys = self._files.keys
        self._door, self._scrapes, self._meters = Guard(Role.USER, keys), Guard(Role.METRICS, keys), Meters()
        self.metrics = GatewayMetrics()
        self._probe_server: ProbeServer | None = None
        self._step_timeout_s = model.group_settings.spec.recovery.step_timeout_seconds
        self.core = EngineCore(model.engine_config, new_detokenizer=model.tokenizer.detokenizer)
        self._name = model.group_settings.name
        self._cache_dtype = model.group_settings.spec.kv_cache_dtype_in_force
        self._started_s = time.monotonic()
        self._in_flight = InFlight()
        self.group = Group(
            model.group_settings, core=self.core, on_state=self._on_state, observe_step=self.metrics.step.observe
        )
        self._rpcs = AdminRpcs(
            self.group, core=self.core, settings=model.group_settings, observe_swap=self.metrics.observe_swap
        )
        self._rebalancer: ExpertRebalancer | None = None
        if wants_rebalancing(model.group_settings):
            self._rebalancer = ExpertRebalancer(self._rpcs.place_experts, core=self.core)
        self._sleeper: IdleSleeper | None = None
        idle = model.group_settings.spec.idle
        if idle.sleep_after_seconds is not None:
            self._sleeper = IdleSleeper(self._rpcs, core=self.core, after_s=idle.sleep_after_seconds, level=idle.level)
        # The admin port's health is the process's; the inference port's is the replica's.
        self._health = HealthServicer([WHOLE_SERVER, *GATEWAY_SERVICES])
        self._admin_health = HealthServicer([WHOLE_SERVER, _ADMIN_SERVICE, *GATEWAY_SERVICES])
        reader = RequestReader(model, self.group.adapters, self._rpcs.loaded_adapter)
        call_tracer = None if tracer is None else CallTracer(tracer, model=self._name)
        intake = Intake(self.core, self._meters, tracer=call_tracer, adapters=self.group.adapters)
        self._router: grpc.aio.Server | None = None
        self._router_parts = RouterParts(
            core=self.core, intake=intake, reader=reader, model=model, metrics=self.metrics, in_flight=self._in_flight
        )
        servicer = InferenceServicer(
            intake, reader=reader, model_info=model.info, server_info=self._server_info, metrics=self.metrics,
            in_flight=self._in_flight,
        )  # fmt: skip
        self._inference = new_server(
            max_message_bytes=MAX_INFERENCE_MESSAGE_BYTES,
            interceptors=[GuardInterceptor(self._door, meters=self._meters, uncounted=UNCOUNTED)],
        )
        serve_inference(self._inference, servicer)
        _add_health_and_reflection(self._inference, self._health, _INFERENCE_SERVICE)
        http_settings = model.resource.spec.gateway.http
        self._page = Page(self.group.topology, self.core.stats) if with_page and http_settings.page else None
        self._endpoint = OpenAiEndpoint(
            self.core, intake=intake, model=model, reader=reader, metrics=self.metrics, in_flight=self._in_flight,
            adapters=self.group.adapters, rpcs=self._rpcs, page=self._page,
        )  # fmt: skip
        self._cors_origins = http_settings.cors_origins
        self._http: HttpListener | None = None
        self._admin_calls = Guard(Role.ADMIN, keys, admin_token, whose="the administrator's")
        self._admin = self._admin_server(self._admin_calls)
        ranks_guard = GuardInterceptor(Guard(token=token, whose="this group's"))
        self._ranks = new_server(max_message_bytes=MAX_RANKS_MESSAGE_BYTES, interceptors=[ranks_guard])
        serve_ranks(self._ranks, self.group)

    async def listen(self, ports: Ports) -> Addresses:
        """Bind every port, then answer on all. Raises BindError; `close` is to be called then too."""
        reader = LoopReader(asyncio.get_running_loop())
        self.metrics.registry.register(
            EngineCollector(self._read_engine, reader, model=self._name, cache_dtype=self._cache_dtype)
        )
        # A browser's own questions show no key, so they come before the guard.
        guards = {METRICS_PATH: self._scrapes} | dict.fromkeys(ADAPTER_PATHS, self._admin_calls)
        if self._files.keys is not None:
            # Without keys the door is open, and /metrics says as much.
            guards[STATUS_PATH] = self._admin_calls
        open_paths = () if self._page is None else self._page.open_paths
        guarded = GuardedApplication(
            self._endpoint.application(), self._door, self._meters, guards=guards, open_paths=open_paths
        )
        application = with_cors(guarded, self._cors_origins)
        host, tls = ports.host, self._files.tls
        self._http = HttpListener(
            application, host=host, port=ports.http, option="--http-port", tls=tls.context if tls else None
        )
        credentials = tls.grpc_credentials() if tls else None
        inside = self._files.inside
        # One for each server, which remembers what certificate it was given last.
        to_admin, to_ranks = (inside.grpc_credentials() if inside else None for _ in range(2))
        addresses = Addresses(
            http=self._http.address,
            inference=bind(
                self._inference, host=host, port=ports.inference, option="--inference-port", credentials=credentials
            ),
            admin=bind(self._admin, host=host, port=ports.admin, option="--admin-port", credentials=to_admin),
            ranks=bind(self._ranks, host=host, port=ports.ranks, option="--ranks-port", credentials=to_ranks),
            router="" if ports.router is None else self._bind_router(host, ports.router),
        )
        if ports.metrics is not None:
            self._probe_server = self._start_probes(ports.host, ports.metrics)
            logger.info("probes and metrics on %s port %d", ports.host, self._probe_server.port)
        for server in self._servers:
            await server.start()
        self._http.start()
        self._admin_health.set_serving([WHOLE_SERVER, _ADMIN_SERVICE], True)
        return addresses

    def _bind_router(self, host: str, port: int) -> str:
        """Bind the router's door and return its address. Raises BindError."""
        # Late: few gateways have the package of its messages.
        from hetero_gateway.server.router.vllm_engine import VllmEngineServicer, serve_vllm_engine

        self._router = new_server(
            max_message_bytes=MAX_INFERENCE_MESSAGE_BYTES, interceptors=[GuardInterceptor(Guard(Role.USER))]
        )
        serve_vllm_engine(self._router, VllmEngineServicer(self._router_parts))
        return bind(self._router, host=host, port=port, option="--router-port")

    async def serve(self) -> None:
        """Run engine and group until cancelled. Raises what broke one of them: a bug."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.core.run(), name="engine")
            tasks.create_task(self.group.run(), name="group")
            for watch in self._files.watches:
                tasks.create_task(watch.run(), name="files")
            if self._rebalancer is not None:
                tasks.create_task(self._rebalancer.run(), name="experts")
            if self._sleeper is not None:
                tasks.create_task(self._sleeper.run(), name="idle")

    def drain(self, *, notice_s: float = 0.0) -> None:
        """Tell health and probes, and refuse new requests after `notice_s`; those in flight go on."""
        self.group.drain(notice_s=notice_s)

    async def wait_idle(self) -> None:
        """Return once no call for completions is in flight, however its last one ended."""
        await self._in_flight.wait_idle()

    async def wait_drained(self) -> None:
        """As `wait_idle`, once none is accepted any more."""
        await self.core.wait_drained()
        await self.wait_idle()

    async def close(self, reason: str) -> None:
        """End everything; `serve` must have ended. A second call does nothing."""
        self.group.close(reason)
        self._health.close()
        self._admin_health.close()
        stopping = [server.stop(STOP_GRACE_S) for server in self._servers]
        if self._http is not None:
            stopping.append(self._http.stop(STOP_GRACE_S))
            self._http = None
        await asyncio.gather(*stopping)
        if self._probe_server is not None:
            # In a thread: it waits for an answer under way, which may be waiting for this loop.
            await asyncio.to_thread(self._probe_server.stop)
            self._probe_server = None

    @property
    def _servers(self) -> tuple[grpc.aio.Server, ...]:
        router = () if self._router is None else (self._router,)
        return (self._inference, self._admin, self._ranks, *router)

    def _on_state(self, state: GroupState) -> None:
        logger.info("group state=%s epoch=%d", state.name, self.group.epoch)
        ready = self.group.is_ready
        self._health.set_serving([WHOLE_SERVER, *GATEWAY_SERVICES], ready)
        self._admin_health.set_serving(GATEWAY_SERVICES, ready)
        if state is GroupState.DRAINING and self._http is not None:
            self._http.close_connections()

    def _server_info(self) -> inference_pb2.GetServerInfoResponse:
        stats = self.core.stats()
        return inference_pb2.GetServerInfoResponse(
            version=VERSION,
            name=self._name,
            ready=self.group.is_ready,
            world_size=self.group.world_size,
            epoch=self.group.epoch,
            uptime_s=time.monotonic() - self._started_s,
            running_requests=stats.running_requests,
            waiting_requests=stats.waiting_requests,
        )

    def _read_engine(self) -> EngineReading:
        return EngineReading(
            self.core.stats(), self.group.topology(), self.core.latencies(), self.group.is_ready, self.core.recoveries
        )

    def _start_probes(self, host: str, port: int) -> ProbeServer:
        reader = LoopReader(asyncio.get_running_loop())
        probes = GatewayProbes(self.group, reader, step_timeout_s=self._step_timeout_s)
        try:
            return ProbeServer.start(
                host=host,
                port=port,
                probes={"/livez": probes.live, "/readyz": probes.ready},
                registry=self.metrics.registry,
                scrape_refusal=self._scrape_refusal,
            )
        except OSError as error:
            raise BindError(f"--metrics-port: cannot listen on {host} port {port}: {error.strerror}") from error

    def _scrape_refusal(self, authorization: str) -> tuple[str, str] | None:
        """Return status and reason for a scrape that the guard refuses. Called from the probe server's threads."""
        try:
            self._scrapes.admit([authorization])
        except Unauthenticated as error:
            return "401 Unauthorized", str(error)
        except Forbidden as error:
            return "403 Forbidden", str(error)
        return None

    def _admin_server(self, guard: Guard) -> grpc.aio.Server:
        server = new_server(
            max_message_bytes=MAX_INFERENCE_MESSAGE_BYTES,
            max_answer_bytes=UNBOUNDED,
            interceptors=[GuardInterceptor(guard)],
        )
        serve_admin(server, topology=self.group.topology, stats=self.core.stats, rpcs=self._rpcs)
        _add_health_and_reflection(server, self._admin_health, _ADMIN_SERVICE)
        return server


def _add_health_and_reflection(server: grpc.aio.Server, servicer: HealthServicer, service: str) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((service, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
