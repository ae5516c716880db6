"""How gateway and ranks of a local group are started."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.cpu_list import format_cpu_list
from hetero_client.launcher.local_plan import RankProcess
from hetero_client.launcher.run_directory import RunDirectory
from hetero_client.launcher.supervisor import Command

HOST: Final = "127.0.0.1"
GATEWAY: Final = "gateway"
FORKSERVER: Final = "forkserver"
RECONNECT_TIMEOUT_S: Final = 24 * 3600.0
"""The launcher starts a gateway that died anew, and ends the ranks if it does not: they need not give up first."""


@dataclass(frozen=True, slots=True)
class Programs:
    """How gateway and rank are started; tests put small stand-ins here."""

    gateway: tuple[str, ...] = (sys.executable, "-m", "hetero_gateway")
    rank: tuple[str, ...] = (sys.executable, "-m", "hetero_worker")
    forkserver: tuple[str, ...] = (sys.executable, "-m", "hetero_worker.process.forkserver")
    """Forks ranks that take the arguments that `rank` takes."""


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Where the gateway listens; 0 lets the system choose."""

    inference: int
    http: int
    admin: int = 0
    ranks: int = 0

    @classmethod
    def of_addresses(cls, addresses: Mapping[str, str]) -> GatewayPorts:
        """Those that it chose, so that the next one is found where it was."""
        ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items()}
        return cls(ports["inference"], ports["http"], ports["admin"], ports["ranks"])


@dataclass(frozen=True, slots=True)
class GroupCommands:
    """The command lines of one group."""

    programs: Programs
    manifest: Path
    model_dir: Path
    run: RunDirectory
    packed_weights: Path | None = None
    """Where ranks keep packed weights from start to start; None: nowhere."""

    def gateway(self, ports: GatewayPorts) -> Command:
        argv = (
            *self.programs.gateway,
            "--manifest", str(self.manifest),
            "--model", str(self.model_dir),
            "--host", HOST,
            "--inference-port", str(ports.inference),
            "--http-port", str(ports.http),
            "--admin-port", str(ports.admin),
            "--ranks-port", str(ports.ranks),
            "--state-file", str(self.run.gateway_state_path),
            "--drain-timeout-s", "0",  # Ctrl-C means now
        )  # fmt: skip
        return Command(GATEWAY, argv, self.run.log_path(GATEWAY))

    def rank(self, rank: RankProcess, gateway: str) -> Command:
        argv = (
            *self.programs.rank,
            "--gateway", gateway,
            "--model", str(self.model_dir),
            "--pool", rank.pool,
            "--ordinal", str(rank.ordinal),
            "--local-rank", str(rank.local_rank),
            "--pod-name", rank.name,
            "--device", rank.device,
            "--cores", format_cpu_list(rank.cores),
            "--communication-cores", format_cpu_list(rank.communication_cores),
            "--num-threads", str(rank.num_threads),
            "--numa-policy", str(rank.numa_policy),
            "--memory-bytes", str(rank.memory_bytes),
            "--store-host", HOST,
            "--reconnect-timeout-s", str(RECONNECT_TIMEOUT_S),
            "--measurements-file", str(self.run.measurements_path(rank.name)),
            *(("--packed-weights-dir", str(self.packed_weights)) if self.packed_weights else ()),
        )  # fmt: skip
        return Command(rank.name, argv, self.run.log_path(rank.name), has_heartbeat=True)

    def forkserver(self) -> Command:
        return Command(FORKSERVER, self.programs.forkserver, self.run.log_path(FORKSERVER), takes_orders=True)

    def arguments(self, rank: Command) -> tuple[str, ...]:
        """A rank's command line without its program."""
        return rank.argv[len(self.programs.rank) :]
