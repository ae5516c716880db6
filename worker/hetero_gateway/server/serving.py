"""A gateway's process from listening to its end.

It listens, writes where into the state file, and serves. The first signal drains it: health and probes say so at once,
new requests are refused once clients had time to hear of it, and those in flight have the drain timeout to finish,
their last message written; then the rest end with UNAVAILABLE. The second signal ends it at once, and so does a timeout
of 0.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import tempfile
from collections.abc import Awaitable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from hetero_api.contract import EXIT_FAILURE, EXIT_OK
from hetero_api.tracing import start_tracing
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.access.tls import TlsFiles
from hetero_gateway.server.config import GatewayConfig, ServedModel
from hetero_gateway.server.gateway import Addresses, Gateway, Ports

logger = logging.getLogger(__name__)


def live(config: GatewayConfig, model: ServedModel) -> int:
    """Serve until asked to stop; return the exit status.

    Raises ManifestError (the keys file), TlsError, BindError, PlanError, or the error that broke it.
    """
    return asyncio.run(_live(config, model))


async def _live(config: GatewayConfig, model: ServedModel) -> int:
    stop = StopSignals(asyncio.get_running_loop())
    files = AccessFiles.load(
        keys_file=config.keys_file, tls_files=_tls_files(config, model), inside_folder=config.inside_tls_dir
    )
    provider = start_tracing("heteroinference-gateway", os.environ)
    tracer = None if provider is None else provider.get_tracer("hetero_gateway")
    gateway = Gateway(
        model, token=config.token, admin_token=config.admin_token, files=files, tracer=tracer, with_page=config.page
    )
    try:
        addresses = await gateway.listen(_ports(config, model))
        _announce(config, model, addresses)
        # Objects that live as long as the process stay out of garbage collections, which would fall into steps.
        gc.collect()
        gc.freeze()
        gc.enable()  # `__main__` turned it off for the imports
        drain_timeout_s = config.drain_timeout_s
        if drain_timeout_s is None:
            drain_timeout_s = model.resource.spec.gateway.drain_timeout_seconds
        return await serve_until(stop, gateway, drain_timeout_s=drain_timeout_s)
    finally:
        await gateway.close(SHUTTING_DOWN)
        if provider is not None:
            await asyncio.to_thread(provider.shutdown)
        if config.state_file is not None:
            config.state_file.unlink(missing_ok=True)


def _tls_files(config: GatewayConfig, model: ServedModel) -> TlsFiles | None:
    """Return the files of TLS, with the names that the resource wants the certificate to be for."""
    tls = model.resource.spec.gateway.tls
    names = () if tls is None else tuple(tls.dns_names)
    return None if config.tls_dir is None else TlsFiles(config.tls_dir, config.client_ca_dir, names)


def _ports(config: GatewayConfig, model: ServedModel) -> Ports:
    inference, service = config.inference_port, model.resource.spec.gateway.service
    return Ports(
        host=config.host,
        inference=service.port if inference is None else inference,
        admin=config.admin_port,
        ranks=config.ranks_port,
        http=service.http_port if config.http_port is None else config.http_port,
        metrics=config.metrics_port,
        router=config.router_port,
    )


def _announce(config: GatewayConfig, model: ServedModel, addresses: Addresses) -> None:
    logger.info(
        "listening inference=%s http=%s admin=%s ranks=%s",
        addresses.inference, addresses.http, addresses.admin, addresses.ranks,
    )  # fmt: skip
    if config.state_file is not None:
        state = {"pid": os.getpid(), "name": model.group_settings.name, **asdict(addresses)}
        write_state(config.state_file, state)


NOTICE_S: Final = 5.0
"""Longest that a gateway which was asked to stop accepts requests: a Service still sends some to a pod that leaves."""
SHUTTING_DOWN: Final = "the gateway is shutting down"


class StopSignals:
    """Events of the signals to stop: `asked` is set by the first, `urged` by the second."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.asked = asyncio.Event()
        self.urged = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.urged if self.asked.is_set() else self.asked).set()


async def serve_until(
    stop: StopSignals, gateway: Gateway, *, drain_timeout_s: float, notice_s: float = NOTICE_S
) -> int:
    """Serve until asked to stop, then drain; return the exit status. The caller closes the gateway."""
    serving = asyncio.create_task(gateway.serve())
    await _first_of(serving, stop.asked.wait())
    if not serving.done():
        gateway.drain(notice_s=min(notice_s, drain_timeout_s))
        logger.info("asked to stop; requests in flight have %g s", drain_timeout_s)
        await _first_of(serving, stop.urged.wait(), gateway.wait_drained(), timeout_s=drain_timeout_s)
    if serving.done():
        logger.critical("the gateway broke", exc_info=serving.exception())
        return EXIT_FAILURE
    # Before the loops end, so that open streams end with this reason.
    gateway.core.fail(SHUTTING_DOWN)
    serving.cancel()
    await asyncio.wait((serving,))
    return EXIT_OK


async def _first_of(serving: asyncio.Task[None], *events: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Return when serving has ended, one of the events came, or the time is over."""
    waiting = [asyncio.ensure_future(event) for event in events]
    await asyncio.wait((serving, *waiting), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waiting:
        task.cancel()


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write the file in one piece: a reader sees all of it or nothing. Addresses are "host:port". Raises OSError."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(state, file)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
