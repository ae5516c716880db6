"""Configuration of a container for ranks: its command line and environment, read once."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.contract import ENV_POD_IP, ENV_POD_NAME, POD_HEALTH_PORT
from hetero_api.host.topology import NumaPolicy
from hetero_api.program import ProgramParser, read_log_level
from hetero_worker.process.config import count, host_port, numa_policy, positive, seconds

PROGRAM: Final = "hetero_worker.pod"
RECONNECT_TIMEOUT_S: Final = 24 * 3600.0
"""A gateway that is gone for a day does not come back; until then weights are worth keeping."""
STOP_GRACE_S: Final = 30.0
_ORDINAL: Final = re.compile(r"-(\d+)$")


@dataclass(frozen=True, slots=True)
class PodConfig:
    """Command line and environment of the process."""

    gateway: str
    model_dir: Path
    pool: str
    ranks_per_pod: int
    threads_per_rank: int
    numa_policy: NumaPolicy
    memory_bytes_per_rank: int
    """0: an equal part of the container's memory."""
    cuda_devices: tuple[int, ...]
    """Device of each rank, by local rank; empty: ranks compute on host cores."""
    health_port: int
    inside_tls_dir: Path | None
    """Folder with tls.crt, tls.key and ca.crt for the ranks' links to the gateway; None: no TLS."""
    reconnect_timeout_s: float
    stop_grace_s: float
    """Longest time that ranks may take to leave."""
    pod_name: str
    ordinal: int
    """Number of the container among those of its pool."""
    pod_ip: str
    """Address for the ranks' rendezvous and for probes."""
    draft_dir: Path | None = None
    """Draft model; None: there is none."""
    log_level: str = "INFO"

    @classmethod
    def from_command_line(cls, arguments: Sequence[str], environment: Mapping[str, str]) -> PodConfig:
        """Read the configuration; exit with EXIT_USAGE and one line on stderr if it is wrong."""
        parser = _parser()
        options = vars(parser.parse_args(arguments))
        ordinal = options.pop("ordinal")
        try:
            pod_name = environment.get(ENV_POD_NAME, "")
            _check_devices(options["cuda_devices"], options["ranks_per_pod"])
            return cls(
                **options,
                pod_name=pod_name,
                ordinal=_ordinal_of(pod_name) if ordinal is None else ordinal,
                pod_ip=environment.get(ENV_POD_IP) or "127.0.0.1",
                log_level=read_log_level(environment),
            )
        except ValueError as error:
            parser.error(str(error))


def _check_devices(devices: Sequence[int], ranks: int) -> None:
    if devices and (len(devices) != ranks or len(set(devices)) != ranks):
        raise ValueError(f"--cuda-devices: {list(devices)} is not a device of its own for each of {ranks} ranks")


def _ordinal_of(pod_name: str) -> int:
    """Return the number at the end of the name of a StatefulSet's pod. Raises ValueError."""
    found = _ORDINAL.search(pod_name)
    if found is None:
        raise ValueError(f"{ENV_POD_NAME}: {pod_name!r} does not end with -N, as the names of a StatefulSet's pods do")
    return int(found.group(1))


def _parser() -> argparse.ArgumentParser:
    parser = ProgramParser(prog=PROGRAM, description="The ranks of one pod.", allow_abbrev=False)
    add = parser.add_argument
    add("--gateway", required=True, type=host_port, metavar="HOST:PORT", help="the gateway's Ranks service")
    add("--model", required=True, type=Path, dest="model_dir", metavar="DIR", help="model in Hugging Face format")
    add("--draft", type=Path, dest="draft_dir", metavar="DIR", help="draft model, of which ranks may load parts")
    add("--pool", required=True, metavar="NAME", help="pool of the resource that these ranks belong to")
    add(
        "--ordinal",
        type=count,
        metavar="N",
        help="number of this container in its pool; default: the number that ends the pod's name",
    )
    add("--ranks-per-pod", required=True, type=positive, metavar="N", help="ranks to run")
    add("--threads-per-rank", required=True, type=positive, metavar="N", help="CPUs that the pod has for each rank")
    add("--numa-policy", required=True, type=numa_policy, metavar="POLICY", help="Required, BestEffort or None")
    add(
        "--memory-bytes-per-rank",
        default=0,
        type=count,
        metavar="N",
        help="memory of each rank; 0: an equal part of what this container may use",
    )
    add(
        "--cuda-devices",
        default=(),
        type=_numbers,
        metavar="LIST",
        help='CUDA device of each rank, in PCI order, e.g. "0,2"; none: ranks compute on host cores',
    )
    add("--health-port", default=POD_HEALTH_PORT, type=_port, metavar="N", help="probes and metrics; 0: any port")
    add(
        "--inside-tls-dir",
        type=Path,
        metavar="DIR",
        help="tls.crt, tls.key and ca.crt for the gateway; default: no TLS",
    )
    add(
        "--reconnect-timeout-s",
        default=RECONNECT_TIMEOUT_S,
        type=seconds,
        metavar="S",
        help="longest that ranks wait for a gateway, weights kept",
    )
    add("--stop-grace-s", default=STOP_GRACE_S, type=seconds, metavar="S", help="longest that ranks may take to leave")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def _port(text: str) -> int:
    port = count(text)
    if port > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port number between 0 and 65535")
    return port
