"""The gateway's configuration: its command line and environment, read once."""

from __future__ import annotations

import argparse
import ipaddress
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_api.contract import ADMIN_PORT, ENV_ADMIN_TOKEN_FILE, RANKS_PORT
from hetero_api.program import ProgramParser, read_admin_token, read_group_token, read_log_level

PROGRAM: Final = "hetero_gateway"


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """What the gateway process is told from outside. A port of 0 lets the system choose."""

    manifest: Path
    model_dir: Path
    host: str
    inference_port: int | None
    """None: the resource's spec.gateway.service.port."""
    admin_port: int
    ranks_port: int
    http_port: int | None
    """None: the resource's spec.gateway.service.httpPort."""
    metrics_port: int | None
    """None: no probes and no metrics over HTTP."""
    state_file: Path | None
    drain_timeout_s: float | None
    """How long requests in flight may take once it is asked to stop; None: as the resource says."""
    token: str = field(repr=False)
    """The group's token."""
    admin_token: str | None = field(repr=False)
    """What callers of Admin must show; None: nothing."""
    log_level: str = "INFO"

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> GatewayConfig:
        """Exits with EXIT_USAGE and a line on stderr when something is wrong."""
        parser = _parser()
        options = vars(parser.parse_args(arguments))
        try:
            config = cls(
                **options,
                token=read_group_token(environment),
                admin_token=read_admin_token(environment),
                log_level=read_log_level(environment),
            )
            config.check_exposure()
            return config
        except ValueError as error:
            parser.error(str(error))

    def check_exposure(self) -> None:
        """Raise ValueError when others than this machine's users could steer the group without a token."""
        if self.admin_token is None and not _is_loopback(self.host):
            raise ValueError(
                f"--host {self.host} can be reached from other machines, and {ENV_ADMIN_TOKEN_FILE} is not set; set it "
                "to a file with the token that callers of hetero.v1.Admin must show, or listen on 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(prog=PROGRAM, description="The gateway of a HeteroInference group.", allow_abbrev=False)
    add = parser.add_argument
    add("--manifest", required=True, type=Path, metavar="FILE", help="the HeteroInference resource, YAML")
    add("--model", required=True, type=Path, dest="model_dir", metavar="DIR", help="model in Hugging Face format")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine to listen on")
    add("--inference-port", type=_port, metavar="N", help="default: the resource's spec.gateway.service.port")
    add("--admin-port", default=ADMIN_PORT, type=_port, metavar="N", help="default: %(default)s")
    add("--ranks-port", default=RANKS_PORT, type=_port, metavar="N", help="default: %(default)s")
    add("--http-port", type=_port, metavar="N", help="default: the resource's spec.gateway.service.httpPort")
    add("--metrics-port", type=_port, metavar="N", help="/livez, /readyz and /metrics over HTTP; default: none")
    add(
        "--drain-timeout-s",
        type=_seconds,
        metavar="S",
        help="how long requests in flight may take once it is asked to stop; "
        "default: the resource's spec.gateway.drainTimeoutSeconds",
    )
    add("--state-file", type=Path, metavar="PATH", help="file to write the addresses to once all ports listen")
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port number between 0 and 65535")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, 0 or more")
    return value
