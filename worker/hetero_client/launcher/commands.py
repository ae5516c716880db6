"""Command lines of a local group's gateway, ranks and forkserver."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hetero_api.api_keys import read_keys
from hetero_api.cpu_list import format_cpu_list
from hetero_api.spec import GatewaySpec
from hetero_api.supervision.child import Command
from hetero_client.errors import LocalSpecError
from hetero_client.launcher.local_plan import RankProcess
from hetero_client.launcher.run_directory import RunDirectory

HOST: Final = "127.0.0.1"
GATEWAY: Final = "gateway"
FORKSERVER: Final = "forkserver"
RECONNECT_TIMEOUT_S: Final = 24 * 3600.0
"""Longest that ranks wait for a gateway. The launcher restarts the gateway or ends the ranks long before."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Programs for gateway and rank; tests put small stand-ins here."""

    gateway: tuple[str, ...] = (sys.executable, "-m", "hetero_gateway")
    rank: tuple[str, ...] = (sys.executable, "-m", "hetero_worker")
    forkserver: tuple[str, ...] = (sys.executable, "-m", "hetero_worker.process.forkserver")
    """Forks ranks with the arguments that `rank` takes."""


@dataclass(frozen=True, slots=True)
class GatewayPorts:
    """Ports of the gateway; 0 lets the system choose."""

    inference: int
    http: int
    admin: int = 0
    ranks: int = 0
    router: int | None = None
    """None: no door for a router."""

    @classmethod
    def from_addresses(cls, addresses: Mapping[str, str]) -> GatewayPorts:
        """Return the ports in "host:port" addresses by service, so that the next gateway listens there too."""
        ports = {name: int(address.rpartition(":")[2]) for name, address in addresses.items() if address}
        return cls(ports["inference"], ports["http"], ports["admin"], ports["ranks"], ports.get("router"))


DOOR_OPTIONS: Final = {
    "auth.keysSecretRef": "--keys FILE",
    "tls.secretName": "--tls-dir DIR",
    "tls.clientCASecretName": "--client-ca-dir DIR",
}
"""Options that stand for Secrets, by their fields below spec.gateway."""


@dataclass(frozen=True, slots=True)
class DoorFiles:
    """Files of the front door, in place of the Secrets that spec.gateway names in a cluster, and its page."""

    keys: Path | None = None
    """Keys file; None: callers need no key."""
    tls: Path | None = None
    """Folder with tls.crt and tls.key; None: no TLS."""
    client_ca: Path | None = None
    """Folder with ca.crt, whose certificates clients must show; None: they need none."""
    page: bool = True
    """False: no page at the HTTP door, whatever spec.gateway.http.page says."""

    def check(self, gateway: GatewaySpec) -> None:
        """Raise LocalSpecError for a Secret that no file stands for, and ManifestError for a wrong keys file."""
        if self.keys is not None:
            read_keys(self.keys)
        missing = gateway.without_files(keys=self.keys, tls=self.tls, client_ca=self.client_ca)
        problems = [
            f"spec.gateway.{field}: Secrets exist only in a cluster; give its files with {DOOR_OPTIONS[field]}"
            for field in missing
        ]
        if problems:
            raise LocalSpecError(problems)

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the gateway."""
        options = {"--keys": self.keys, "--tls-dir": self.tls, "--client-ca-dir": self.client_ca}
        given = {option: path for option, path in options.items() if path is not None}
        named = (text for option, path in given.items() for text in (option, str(path.absolute())))
        return (*named, *(() if self.page else ("--no-page",)))


@dataclass(frozen=True, slots=True)
class GroupCommands:
    """Command lines of one group."""

    programs: Programs
    model_dir: Path
    run: RunDirectory
    packed_weights: Path | None = None
    """Folder in which ranks keep packed weights from start to start; None: nowhere."""
    door: DoorFiles = field(default_factory=DoorFiles)
    """Files in place of the Secrets that spec.gateway names."""
    draft_dir: Path | None = None
    """Draft model; None: there is none."""
    adapter_dirs: tuple[Path, ...] = ()
    """Adapters that the resource names by URI, in order."""

    def gateway(self, ports: GatewayPorts, *, is_first: bool = True) -> Command:
        """Return the gateway's command. Only the first one has to report where it listens."""
        argv = (
            *self.programs.gateway,
            "--manifest", str(self.run.manifest_path),
            "--model", str(self.model_dir),
            "--host", HOST,
            "--inference-port", str(ports.inference),
            "--http-port", str(ports.http),
            "--admin-port", str(ports.admin),
            "--ranks-port", str(ports.ranks),
            *(("--state-file", str(self.run.gateway_state_path)) if is_first else ()),
            "--drain-timeout-s", "0",  # Ctrl-C means now
            *(() if ports.router is None else ("--router-port", str(ports.router))),
            *self.door.arguments,
            *self._draft_arguments,
            *(text for each in self.adapter_dirs for text in ("--adapter", str(each))),
        )  # fmt: skip
        return Command(GATEWAY, argv, self.run.log_path(GATEWAY))

    def rank(self, rank: RankProcess, gateway: str) -> Command:
        """Return a rank's command; `gateway` is the address of the gateway's Ranks service."""
        arguments = (
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
            *self._draft_arguments,
        )  # fmt: skip
        return Command(
            rank.name,
            (*self.programs.rank, *arguments),
            self.run.log_path(rank.name),
            has_heartbeat=True,
            forked_argv=arguments,
        )

    @property
    def _draft_arguments(self) -> tuple[str, ...]:
        return () if self.draft_dir is None else ("--draft", str(self.draft_dir))

    def forkserver(self) -> Command:
        """Return the forkserver's command."""
        return Command(FORKSERVER, self.programs.forkserver, self.run.log_path(FORKSERVER), takes_orders=True)
