"""A gateway's life: listen, say where, serve until asked to stop, close."""

from __future__ import annotations

import asyncio
import gc
import logging
import os

from hetero_gateway.server.config import GatewayConfig
from hetero_gateway.server.gateway import Addresses, Gateway, Ports
from hetero_gateway.server.model_files import ServedModel
from hetero_gateway.server.state_file import ListeningState, write_state
from hetero_gateway.server.stopping import SHUTTING_DOWN, StopSignals, serve_until

logger = logging.getLogger(__name__)


def live(config: GatewayConfig, model: ServedModel) -> int:
    """All of it; the process's exit status. Raises BindError, PlanError, or what broke the gateway."""
    return asyncio.run(_live(config, model))


async def _live(config: GatewayConfig, model: ServedModel) -> int:
    stop = StopSignals(asyncio.get_running_loop())
    gateway = Gateway(model, token=config.token, admin_token=config.admin_token)
    try:
        addresses = await gateway.listen(_ports(config, model))
        _announce(config, model, addresses)
        _spare_the_collector()
        return await serve_until(stop, gateway, drain_timeout_s=_drain_timeout_s(config, model))
    finally:
        await gateway.close(SHUTTING_DOWN)
        if config.state_file is not None:
            config.state_file.unlink(missing_ok=True)


def _spare_the_collector() -> None:
    """What lives as long as the process need not be looked through in the middle of steps."""
    gc.collect()
    gc.freeze()


def _drain_timeout_s(config: GatewayConfig, model: ServedModel) -> float:
    if config.drain_timeout_s is not None:
        return config.drain_timeout_s
    return model.resource.spec.gateway.drain_timeout_seconds


def _ports(config: GatewayConfig, model: ServedModel) -> Ports:
    inference, service = config.inference_port, model.resource.spec.gateway.service
    return Ports(
        host=config.host,
        inference=service.port if inference is None else inference,
        admin=config.admin_port,
        ranks=config.ranks_port,
        http=service.http_port if config.http_port is None else config.http_port,
        metrics=config.metrics_port,
    )


def _announce(config: GatewayConfig, model: ServedModel, addresses: Addresses) -> None:
    logger.info(
        "listening inference=%s http=%s admin=%s ranks=%s",
        addresses.inference, addresses.http, addresses.admin, addresses.ranks,
    )  # fmt: skip
    if config.state_file is not None:
        state = ListeningState(
            pid=os.getpid(),
            name=model.group_settings.name,
            inference=addresses.inference,
            admin=addresses.admin,
            ranks=addresses.ranks,
            http=addresses.http,
        )
        write_state(config.state_file, state)
