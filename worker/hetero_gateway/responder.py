"""The responder: `python -m hetero_gateway respond` tells callers that no replica runs, and when to try again.

It stands behind the Service of a resource that is scaled to zero (spec.idle.responder), on the ports of a gateway. Any
HTTP call is answered 503 with Retry-After, any gRPC call UNAVAILABLE with google.rpc.RetryInfo, and health as not
serving. It reads no body, knows no model and no keys, and shows the certificate of the front door where there is one.
Every call is answered at once, so a stop signal ends the process at once.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.types import ASGIApp

from hetero_api.contract import EXIT_USAGE, HTTP_PORT, INFERENCE_PORT
from hetero_api.program import ProgramParser
from hetero_gateway.server.access.files import AccessFiles
from hetero_gateway.server.access.tls import TlsFiles
from hetero_gateway.server.calls import Context, abort, status_of
from hetero_gateway.server.errors import BindError, NoReplica, TlsError
from hetero_gateway.server.grpc_server import bind, new_server
from hetero_gateway.server.openai.answers import failure_of
from hetero_gateway.server.openai.http_server import HttpListener

logger = logging.getLogger(__name__)

PROGRAM: Final = "hetero_gateway respond"
MAX_MESSAGE_BYTES: Final = 64 * 1024
_NOT_SERVING: Final = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.NOT_SERVING)


@dataclass(frozen=True, slots=True)
class ResponderConfig:
    """Settings of the process. A port of 0 lets the system choose."""

    host: str
    inference_port: int
    http_port: int
    retry_after_s: int
    """Seconds after which callers are asked to try again."""
    tls_dir: Path | None
    """Folder with tls.crt and tls.key; None: no TLS."""
    client_ca_dir: Path | None
    """Folder with ca.crt, the authority of certificates that clients must show; None: they need none."""

    @classmethod
    def from_command_line(cls, arguments: Sequence[str]) -> ResponderConfig:
        """Read the settings; exit with EXIT_USAGE and a line on stderr when one is wrong."""
        description = "Answer callers of a resource of which no replica runs."
        parser = ProgramParser(prog=PROGRAM, description=description, allow_abbrev=False)
        add = parser.add_argument
        add("--host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine to listen on")
        add("--inference-port", default=INFERENCE_PORT, type=_up_to(65535), metavar="N", help="default: %(default)s")
        add("--http-port", default=HTTP_PORT, type=_up_to(65535), metavar="N", help="default: %(default)s")
        add("--retry-after-s", default=30, type=_up_to(86_400), metavar="S", help="default: %(default)s")
        add("--tls-dir", type=Path, metavar="DIR", help="folder with tls.crt and tls.key; default: no TLS")
        add("--client-ca-dir", type=Path, metavar="DIR", help="folder with ca.crt, for clients' certificates")
        return cls(**vars(parser.parse_args(arguments)))


def _up_to(most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) > most:
            raise argparse.ArgumentTypeError(f"{text!r} is no number between 0 and {most}")
        return int(text)

    return number


class Responder:
    """Both doors, made on the loop that runs them. Raises BindError and TlsError."""

    def __init__(self, config: ResponderConfig) -> None:
        files = None if config.tls_dir is None else TlsFiles(config.tls_dir, config.client_ca_dir)
        access = AccessFiles.load(tls_files=files)
        self._watches = access.watches
        self._grpc = new_server(max_message_bytes=MAX_MESSAGE_BYTES)
        health_pb2_grpc.add_HealthServicer_to_server(_Health(), self._grpc)
        self._grpc.add_generic_rpc_handlers((_Refusals(config.retry_after_s),))  # second: it takes all that is left
        tls = access.tls
        self._http = HttpListener(
            _refusals_over_http(config.retry_after_s), host=config.host, port=config.http_port, option="--http-port",
            tls=tls.context if tls else None,
        )  # fmt: skip
        self.http_address = self._http.address
        self.inference_address = bind(
            self._grpc, host=config.host, port=config.inference_port, option="--inference-port",
            credentials=tls.grpc_credentials() if tls else None,
        )  # fmt: skip

    async def serve(self) -> None:
        """Answer until cancelled."""
        await self._grpc.start()
        self._http.start()
        await asyncio.gather(asyncio.Event().wait(), *(watch.run() for watch in self._watches))

    async def close(self) -> None:
        """Stop listening."""
        await asyncio.gather(self._grpc.stop(0), self._http.stop(0))


class _Refusals(grpc.GenericRpcHandler):
    """Handler of every method: a handler of streams fits any call, which is refused before anything of it is read."""

    def __init__(self, retry_after_s: int) -> None:
        self._status = status_of(NoReplica(retry_after_s=retry_after_s))

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[Any, Any]:  # noqa: ARG002
        """Return the handler that refuses."""
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, _: object, context: Context) -> None:
        await abort(context, self._status)


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package is untyped
    """grpc.health.v1 of any service: it does not serve. Watch ends after it has said so."""

    async def Check(self, request: Any, context: Context) -> Any:  # noqa: ARG002, N802
        """Return the status."""
        return _NOT_SERVING

    async def Watch(self, request: Any, context: Context) -> AsyncIterator[Any]:  # noqa: ARG002, N802
        """Stream the status."""
        yield _NOT_SERVING


def _refusals_over_http(retry_after_s: int) -> ASGIApp:
    """Return an application that refuses every call."""
    failure = failure_of(NoReplica(retry_after_s=retry_after_s))
    assert failure is not None, "the error has an answer"
    return failure.response()


def run(arguments: Sequence[str]) -> None:
    """Respond until a stop signal ends the process; exit with EXIT_USAGE when a port or a certificate is wrong."""
    config = ResponderConfig.from_command_line(arguments)
    logging.basicConfig(
        level="INFO", stream=sys.stderr, format="%(asctime)s %(levelname)s responder %(name)s: %(message)s"
    )
    try:
        asyncio.run(_respond(config))
    except (BindError, TlsError) as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        sys.exit(EXIT_USAGE)


async def _respond(config: ResponderConfig) -> None:
    responder = Responder(config)
    logger.info("listening inference=%s http=%s", responder.inference_address, responder.http_address)
    await responder.serve()
