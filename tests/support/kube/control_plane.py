"""etcd, kube-apiserver and on request the controller manager and the scheduler, on loopback, for one test run.

A control plane belongs to the process that starts it. Others may use it (see shared.py): it runs until the last of them
is gone, and the keeper sees to that whatever becomes of the processes. Nothing survives it but the logs in its folder.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import urllib3

from tests.support.kube import audit, flags, keeper
from tests.support.kube.binaries import Binaries
from tests.support.kube.certificates import Authority
from tests.support.kube.client import Client
from tests.support.kube.cluster import ADMIN, Cluster
from tests.support.kube.components import Component
from tests.support.kube.errors import ApiError, ComponentFailed
from tests.support.kube.kubeconfigs import Credentials, write_kubeconfig
from tests.support.kube.polling import poll
from tests.support.kube.ports import HOST, free_port
from tests.support.kube.spawned import Spawned

START_TIMEOUT_S = 120.0
DRAIN_TIMEOUT_S = 3.0
KEEPER_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Options:
    """What runs, and how.

    `crds` are installed before the controllers start: the garbage collector looks for new kinds only every 30 s.
    """

    controllers: Sequence[str] = flags.CONTROLLERS
    """Empty: no controller manager."""
    scheduler: bool = False
    crds: Sequence[Path] = ()
    api_server_arguments: Sequence[str] = ()
    controller_manager_arguments: Sequence[str] = ()
    """As --node-monitor-grace-period=5s, with the controller nodelifecycle."""
    address: str = HOST
    """That the API server listens at."""


class ControlPlane:
    """Ready when entered; `cluster` is how one uses it. Its files and logs go to `folder`, which must be fresh."""

    def __init__(self, folder: Path, binaries: Binaries, options: Options | None = None) -> None:
        self._folder = folder
        self._binaries = binaries
        self._options = options or Options()
        self._layout = flags.Layout(folder, free_port(), free_port(), free_port(), self._options.address)
        self._users: IO[str] | None = None
        self._keeper: Spawned | None = None
        self.etcd = Component(
            "etcd", flags.etcd_command(binaries, self._layout), folder=folder, environment=flags.ETCD_ENVIRONMENT
        )
        self.api_server = self._component("kube-apiserver", self._api_server_command())
        self._others: list[Component] = []
        self.cluster = Cluster(folder, self._layout.server, binaries.version, bool(self._options.controllers))

    def start(self) -> None:
        """Start everything and wait until it serves. Raises ComponentFailed, and leaves nothing running then."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._users = hold(self._folder)
        command = [sys.executable, "-I", keeper.__file__, str(self._folder)]
        self._keeper = Spawned.start(command, log=self._folder / "keeper.log", environment=os.environ)
        try:
            self._start()
        except BaseException:
            self.stop()
            raise

    def _start(self) -> None:
        self._make_state_folder()
        self.etcd.start()
        self._make_identities()
        self._layout.audit_policy.write_text(audit.POLICY, encoding="utf-8")
        self.start_api_server()
        with self.cluster.client() as client:
            for path in self._options.crds:
                client.install_crd(path)
        if self._options.controllers:
            self._start_controller_manager()
        if self._options.scheduler:
            self._start_scheduler()
        self.cluster.save()

    def stop(self) -> None:
        """Kill the processes; there is no state worth an orderly end."""
        for component in [*self._others, self.api_server, self.etcd]:
            component.stop(signal.SIGKILL)
        self._dismiss_keeper()

    def release(self) -> None:
        """Use it no more, but leave it running as long as others use it."""
        if self._users is None or is_last_user(self._users):
            self.stop()
        else:
            self._users.close()
            self._users = None

    def _dismiss_keeper(self) -> None:
        """Drop our hold; the keeper finds nothing to kill, and clears the state away."""
        if self._users is not None:
            self._users.close()
            self._users = None
        if self._keeper is not None:
            self._keeper.wait(KEEPER_TIMEOUT_S)
            self._keeper = None

    def stop_api_server(
        self, with_signal: signal.Signals = signal.SIGTERM, *, drain_s: float = DRAIN_TIMEOUT_S
    ) -> None:
        """An outage. SIGKILL cuts every connection at once; SIGTERM refuses new ones and lets calls end.

        Watches would keep a drained server of 1.20 for a minute: after `drain_s` they are cut.
        """
        self.api_server.stop(with_signal, patience_s=drain_s)

    def start_api_server(self) -> None:
        """Start, or end an outage: the same port, certificates and objects. Waits until it serves."""
        self.api_server.start()
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """Wait until the API server serves, etcd behind it."""
        with self.cluster.client() as client:
            poll(
                lambda: self._serves(client),
                timeout_s=START_TIMEOUT_S,
                describe=lambda: f"the API server is not ready\n{self.api_server.log_tail()}",
            )

    def _serves(self, client: Client) -> bool:
        self.etcd.check()
        self.api_server.check()
        try:  # it is ready before it has made the namespace that users find in every cluster
            return client.request_text("GET", "/readyz") == "ok" and client.find("Namespace", "default") is not None
        except (ApiError, urllib3.exceptions.HTTPError):
            return False

    def _component(self, name: str, command: Sequence[str]) -> Component:
        return Component(name, command, folder=self._folder)

    def _api_server_command(self) -> list[str]:
        return flags.api_server_command(
            self._binaries,
            self._layout,
            with_controllers=bool(self._options.controllers),
            extra=self._options.api_server_arguments,
        )

    def _make_state_folder(self) -> None:
        state = self._folder / keeper.STATE
        if flags.wants_shared_memory():
            state.symlink_to(tempfile.mkdtemp(prefix="hetero-etcd-", dir=flags.SHARED_MEMORY))
        else:
            state.mkdir(mode=0o700)

    def _make_identities(self) -> None:
        authority = Authority(self._layout.pki)
        authority.create()
        authority.signing_key("service-accounts")
        names = ["DNS:localhost", "DNS:kubernetes", "DNS:kubernetes.default", "DNS:kubernetes.default.svc"]
        names += [f"IP:{address}" for address in dict.fromkeys((HOST, flags.SERVICE_ADDRESS, self._layout.address))]
        authority.issue("api-server", common_name="kube-apiserver", usage="serverAuth", alternative_names=names)
        authority.issue("front-proxy", common_name="front-proxy", usage="clientAuth")
        for name, user in {
            ADMIN: "admin",
            "controller-manager": "system:kube-controller-manager",
            "scheduler": "system:kube-scheduler",
        }.items():
            pair = authority.issue(name, common_name=user, organizations=["system:masters"], usage="clientAuth")
            write_kubeconfig(
                self._layout.kubeconfig(name),
                server=self._layout.server,
                credentials=Credentials(pair),
                ca_file=authority.certificate,
            )

    def _start_controller_manager(self) -> None:
        port = free_port()
        command = flags.controller_manager_command(
            self._binaries,
            self._layout,
            port=port,
            controllers=self._options.controllers,
            extra=self._options.controller_manager_arguments,
        )
        self._start_other("kube-controller-manager", command, port)

    def _start_scheduler(self) -> None:
        port = free_port()
        self._start_other("kube-scheduler", flags.scheduler_command(self._binaries, self._layout, port=port), port)

    def _start_other(self, name: str, command: Sequence[str], port: int) -> None:
        component = self._component(name, command)
        self._others.append(component)
        component.start()
        with urllib3.PoolManager(ca_certs=str(self.cluster.ca_file), retries=False) as pool:
            poll(
                lambda: _healthy(component, pool, port),
                timeout_s=START_TIMEOUT_S,
                describe=lambda: f"{name} is not healthy\n{component.log_tail()}",
            )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def hold(folder: Path) -> IO[str]:
    """Be a user of the control plane in `folder` until the file is closed. Fails when it is being torn down."""
    users = (folder / keeper.USERS).open("a", encoding="utf-8")
    try:
        fcntl.flock(users, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        users.close()
        raise ComponentFailed(f"the control plane in {folder} is being torn down") from error
    return users


def is_last_user(users: IO[str]) -> bool:
    """Whether nobody else holds the control plane; our own hold may be lost by asking."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _healthy(component: Component, pool: urllib3.PoolManager, port: int) -> bool:
    component.check()
    try:
        answer = pool.request("GET", f"https://{HOST}:{port}/healthz")
    except urllib3.exceptions.HTTPError:
        return False
    return answer.status == 200
