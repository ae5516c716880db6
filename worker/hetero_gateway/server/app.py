"""The gateway process: read, listen, serve, end.

The first SIGTERM or SIGINT drains: new requests are refused, those in flight have the drain timeout to finish; the
second ends at once. Either way the exit status is 0. It is EXIT_USAGE when command line, resource or a port is wrong,
EXIT_PERMANENT when the model's files are, EXIT_FAILURE when the gateway itself breaks. Whatever a person can mend is
told in one line a problem, as the last lines on stderr.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
from collections.abc import Mapping, Sequence

from hetero_api.contract import EXIT_FAILURE, EXIT_PERMANENT, EXIT_USAGE
from hetero_api.errors import HeteroError, ManifestError, ModelError, PlanError
from hetero_gateway.group.errors import UnsupportedSpecError
from hetero_gateway.server.config import PROGRAM, GatewayConfig
from hetero_gateway.server.errors import BindError
from hetero_gateway.server.gateway import Addresses, Gateway, Ports
from hetero_gateway.server.model_files import ServedModel, read_model
from hetero_gateway.server.state_file import ListeningState, write_state
from hetero_gateway.server.stopping import SHUTTING_DOWN, StopSignals, serve_until

logger = logging.getLogger(__name__)


def main(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The whole process; its exit status."""
    config = GatewayConfig.from_command_line(arguments, environment)
    _configure_logging(config)
    try:
        model = read_model(config.manifest, config.model_dir)
        return asyncio.run(_live(config, model))
    except (ManifestError, UnsupportedSpecError) as error:
        return _tell([f"{config.manifest}: {problem}" for problem in error.problems], EXIT_USAGE)
    except PlanError as error:
        return _tell([f"{config.manifest}: {error}"], EXIT_USAGE)
    except BindError as error:
        return _tell([str(error)], EXIT_USAGE)
    except ModelError as error:
        return _tell([str(error)], EXIT_PERMANENT)
    except (HeteroError, OSError) as error:
        return _tell([str(error)], EXIT_FAILURE)


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


def _tell(problems: Sequence[str], exit_status: int) -> int:
    for problem in problems:
        sys.stderr.write(f"{PROGRAM}: {problem}\n")
    return exit_status


def _configure_logging(config: GatewayConfig) -> None:
    logging.basicConfig(
        level=config.log_level, stream=sys.stderr, format="%(asctime)s %(levelname)s gateway %(name)s: %(message)s"
    )


def run() -> None:
    """The process's `main`, with this process's arguments and environment."""
    sys.exit(main(sys.argv[1:], os.environ))
