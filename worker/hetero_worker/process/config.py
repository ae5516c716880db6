"""Configuration of a rank: its command line and environment, read once.

Nothing here imports torch or gRPC: this runs before the process is bound to its cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from hetero_api.contract import ENV_HEARTBEAT_FILE
from hetero_api.cpu_list import parse_cpu_list
from hetero_api.host.topology import NumaPolicy
from hetero_api.program import ProgramParser, read_group_token, read_log_level

CONNECT_TIMEOUT_S: Final = 120.0
ABORT_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class RankConfig:
    """Command line and environment of one rank process."""

    gateway: str
    """"host:port" of the gateway's Ranks service."""
    model_dir: Path
    pool: str
    ordinal: int
    local_rank: int
    pod_name: str
    cuda_device: int | None
    """Index of the CUDA device to compute on, among those that this process sees; None for host cores."""
    cores: tuple[int, ...]
    """CPUs to bind to; empty: not bound."""
    communication_cores: tuple[int, ...]
    """CPUs for threads that do not compute; empty: all that this process may use."""
    num_threads: int
    numa_policy: NumaPolicy
    memory_bytes: int
    """Host memory the rank may use; 0: the machine's."""
    store_host: str
    """Address of this machine on which ranks meet."""
    connect_timeout_s: float
    """Longest wait for the gateway to come up."""
    abort_timeout_s: float
    """Longest time to leave an aborted epoch; after it the process ends itself."""
    reconnect_timeout_s: float
    """Longest wait for another gateway after the loss of one, weights kept; 0: exit then."""
    measurements_file: Path | None
    """File that keeps measurements for the process that takes this one's place; None: none is kept."""
    packed_weights_dir: Path | None
    """Folder that keeps quantised weights as kernels packed them, for later loads; None: none are kept."""
    inside_tls_dir: Path | None
    """Folder with tls.crt, tls.key and ca.crt, by which rank and gateway know one another; None: no TLS."""
    heartbeat_file: Path | None
    """Shared memory in which a supervisor reads the rank's heartbeat; None: nobody reads it."""
    token: str = field(repr=False)
    """The group's token."""
    draft_dir: Path | None = None
    """Draft model; None: there is none."""
    log_level: str = "INFO"

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> RankConfig:
        """Read the configuration; exit with EXIT_USAGE and one line on stderr if it is wrong."""
        parser = _parser()
        options = vars(parser.parse_args(arguments))
        try:
            return cls(
                **options,
                heartbeat_file=Path(heartbeat) if (heartbeat := environment.get(ENV_HEARTBEAT_FILE)) else None,
                token=read_group_token(environment),
                log_level=read_log_level(environment),
            )
        except ValueError as error:
            parser.error(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(prog="hetero_worker", description="One rank of a HeteroInference group.", allow_abbrev=False)
    add = parser.add_argument
    add("--gateway", required=True, type=host_port, metavar="HOST:PORT", help="the gateway's Ranks service")
    add("--model", required=True, type=Path, dest="model_dir", metavar="DIR", help="model in Hugging Face format")
    add("--draft", type=Path, dest="draft_dir", metavar="DIR", help="draft model, of which the rank may load a part")
    add("--pool", required=True, metavar="NAME", help="pool of the resource that this rank belongs to")
    add("--ordinal", required=True, type=count, metavar="N", help="which pod of the pool")
    add("--local-rank", required=True, type=count, metavar="N", help="which rank within the pod")
    add("--pod-name", required=True, metavar="NAME", help="name of the pod, or of the process")
    add(
        "--device",
        default=None,
        type=cuda_device,
        dest="cuda_device",
        metavar="DEVICE",
        help="what to compute on: cpu, the default, or cuda:N",
    )
    add("--cores", default=(), type=core_list, metavar="LIST", help='CPUs to bind to, e.g. "0-3,8"; empty: not bound')
    add(
        "--communication-cores",
        default=(),
        type=core_list,
        metavar="LIST",
        help="CPUs for threads that do not compute; empty: all that this process may use",
    )
    add("--num-threads", required=True, type=positive, metavar="N", help="compute threads")
    add(
        "--numa-policy",
        default=NumaPolicy.BEST_EFFORT,
        type=numa_policy,
        metavar="POLICY",
        help="Required, BestEffort or None",
    )
    add("--memory-bytes", default=0, type=count, metavar="N", help="memory of this rank; 0: the machine's")
    add("--store-host", default="127.0.0.1", metavar="ADDRESS", help="address of this machine that ranks meet on")
    add("--connect-timeout-s", default=CONNECT_TIMEOUT_S, type=seconds, help="longest wait for the gateway")
    add("--abort-timeout-s", default=ABORT_TIMEOUT_S, type=seconds, help="longest time to leave an aborted epoch")
    add(
        "--reconnect-timeout-s",
        default=0.0,
        type=seconds_or_none,
        help="longest wait for another gateway, weights kept, when the gateway goes away; 0: exit then",
    )
    add("--measurements-file", type=Path, metavar="FILE", help="keeps what is measured at start, for the next start")
    add(
        "--inside-tls-dir",
        type=Path,
        metavar="DIR",
        help="tls.crt, tls.key and ca.crt for the gateway; default: no TLS",
    )
    add("--packed-weights-dir", type=Path, metavar="DIR", help="keeps quantised weights, packed, for the next loads")
    return parser


# --- types of options: text to value, or a complaint that argparse prints with the option's name ---------------


def host_port(text: str) -> str:
    """Check "host:port" and return it as it is."""
    host, separator, port = text.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no HOST:PORT")
    return text


def count(text: str, *, least: int = 0) -> int:
    """Parse a whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return int(text)


positive: Final = partial(count, least=1)
"""Parses a whole number of at least 1."""


def seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def seconds_or_none(text: str) -> float:
    """Parse a number of seconds, where "0" stands for none."""
    return 0.0 if text == "0" else seconds(text)


def core_list(text: str) -> tuple[int, ...]:
    """Parse a list of CPUs such as "0-3,8"."""
    try:
        return parse_cpu_list(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def cuda_device(text: str) -> int | None:
    """Return the index in "cuda:N", or None for "cpu"."""
    kind, separator, index = text.partition(":")
    if text == "cpu":
        return None
    if kind != "cuda" or not separator or not index.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither cpu nor cuda:N")
    return int(index)


def numa_policy(text: str) -> NumaPolicy:
    """Parse the name of a policy."""
    try:
        return NumaPolicy(text)
    except ValueError:
        names = ", ".join(NumaPolicy)
        raise argparse.ArgumentTypeError(f"{text!r} is none of {names}") from None
