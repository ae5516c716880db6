"""A rank's configuration: its command line and environment, read once.

Nothing here imports torch or gRPC: this runs before the process is bound to its cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_api.cpu_list import parse_cpu_list
from hetero_api.program import ProgramParser, read_group_token, read_log_level
from hetero_api.spec import NumaPolicy

CONNECT_TIMEOUT_S: Final = 120.0
ABORT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class RankConfig:
    """What one rank process is told from outside."""

    gateway: str
    """"host:port" of the gateway's Ranks service."""
    model_dir: Path
    pool: str
    ordinal: int
    local_rank: int
    pod_name: str
    cores: tuple[int, ...]
    """CPUs to bind to; empty: not bound."""
    num_threads: int
    numa_policy: NumaPolicy
    memory_bytes: int
    """Memory the rank may use; 0: the machine's."""
    store_host: str
    """Address of this machine on which ranks meet."""
    connect_timeout_s: float
    """Longest wait for the gateway to come up."""
    abort_timeout_s: float
    """Longest time to leave an aborted epoch; then the process ends itself."""
    token: str = field(repr=False)
    """The group's token."""
    log_level: str = "INFO"

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> RankConfig:
        """Exits with EXIT_USAGE and one line on stderr when something is wrong."""
        parser = _parser()
        options = vars(parser.parse_args(arguments))
        try:
            return cls(**options, token=read_group_token(environment), log_level=read_log_level(environment))
        except ValueError as error:
            parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(prog="hetero_worker", description="One rank of a HeteroInference group.", allow_abbrev=False)
    add = parser.add_argument
    add("--gateway", required=True, type=_host_port, metavar="HOST:PORT", help="the gateway's Ranks service")
    add("--model", required=True, type=Path, dest="model_dir", metavar="DIR", help="model in Hugging Face format")
    add("--pool", required=True, metavar="NAME", help="pool of the resource that this rank belongs to")
    add("--ordinal", required=True, type=_count, metavar="N", help="which pod of the pool")
    add("--local-rank", required=True, type=_count, metavar="N", help="which rank within the pod")
    add("--pod-name", required=True, metavar="NAME", help="name of the pod, or of the process")
    add("--cores", default=(), type=_cores, metavar="LIST", help='CPUs to bind to, e.g. "0-3,8"; empty: not bound')
    add("--num-threads", required=True, type=_positive, metavar="N", help="compute threads")
    add(
        "--numa-policy",
        default=NumaPolicy.BEST_EFFORT,
        type=_numa_policy,
        metavar="POLICY",
        help="Required, BestEffort or None",
    )
    add("--memory-bytes", default=0, type=_count, metavar="N", help="memory of this rank; 0: the machine's")
    add("--store-host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine that ranks meet on")
    add("--connect-timeout-s", default=CONNECT_TIMEOUT_S, type=_seconds, help="longest wait for the gateway")
    add("--abort-timeout-s", default=ABORT_TIMEOUT_S, type=_seconds, help="longest time to leave an aborted epoch")
    return parser


def _host_port(text: str) -> str:
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return text


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 0")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _cores(text: str) -> tuple[int, ...]:
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _numa_policy(text: str) -> NumaPolicy:
    try:
        return NumaPolicy(text)
    except ValueError:
        names = ", ".join(NumaPolicy)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {names}") from None
