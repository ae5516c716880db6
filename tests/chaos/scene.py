"""A local group that lives over many faults, what a test may do to it, and what it must not leave behind."""

from __future__ import annotations

import os
import signal
import socket
import ssl
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil
import trustme
import yaml
from typer.testing import CliRunner

from hetero_api.contract import EXIT_OK
from hetero_api.group_state import GroupState
from hetero_client import Access, AdminClient
from hetero_client.admin import GroupTopology
from hetero_client.cli.main import app
from hetero_client.errors import RequestError
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory
from tests.chaos.crowd import Doors, Question, ask_undisturbed
from tests.chaos.host_faults import Shim, is_inside, mount_small, run_out_of_memory, unmount
from tests.chaos.statuses import Wound
from tests.support.local_group import REPOSITORY, GroupFile, LocalGroupProcess, alive, shared_segments, write_manifest
from tests.support.pseudo_gpu_up import MODULE, write_mixed_manifest
from tests.support.tiny_models import save_tiny_model

SETTLE_S: Final = 90.0
END_S: Final = 30.0
CENSUS_S: Final = 20.0
LOOK_S: Final = 0.05
OUTPUT_CHARS: Final = 1200
HOME_BYTES: Final = 64 * 1024 * 1024
MAX_MODEL_LEN: Final = 4096
ROLLED_OUT_LEN: Final = 4000
ENGINE: Final = {"maxNumSeqs": 6, "maxNumBatchedTokens": 64}
"""So small that requests queue, and that a long prompt takes many steps."""
SLEEP_AFTER_S: Final = 2
HELPERS: Final = {"forkserver": "forkserver", "warden": "warden.py"}
"""Processes that the launcher's record does not name, by a word of their command lines."""
LAUNCHER: Final = "launcher"
GATEWAY: Final = "gateway"


@dataclass(frozen=True, slots=True)
class Setting:
    """A kind of group, and what its ranks are called by what they do."""

    name: str
    ranks: dict[str, str]
    has_keys: bool = False
    """With TLS as well."""
    has_gpu: bool = False
    """A rank on a GPU that the host plays."""


PLAIN: Final = Setting("plain", {"leader": "cpu-0", "holder": "cpu-1", "helper": "cpu-2"})
KEYS: Final = Setting("keys", {"leader": "cpu-0", "holder": "cpu-1"}, has_keys=True)
MIXED: Final = Setting("mixed", {"leader": "gpu-0", "helper": "cpu-0"}, has_gpu=True)
SETTINGS: Final = {setting.name: setting for setting in (PLAIN, KEYS, MIXED)}


@dataclass
class Certificates:
    """Keys and TLS files of a group with a locked door, which can be exchanged."""

    folder: Path
    authority: Any = field(default_factory=trustme.CA)

    def __post_init__(self) -> None:
        self.tls = self.folder / "tls"
        self.tls.mkdir()
        self.keys = self.folder / "keys.yaml"
        self.key_file = self.folder / "chaos.key"
        made = CliRunner().invoke(app, ["key", "chaos", "--out", str(self.key_file)])
        self.keys.write_text(made.stdout, encoding="utf-8")
        self.rotate()

    def rotate(self) -> None:
        """Write another certificate of the same authority, as the kubelet does: by a rename."""
        made = self.authority.issue_cert("127.0.0.1")
        self._write("tls.key", made.private_key_pem.bytes())
        self._write("tls.crt", b"".join(pem.bytes() for pem in made.cert_chain_pems))

    def spoil(self) -> None:
        """Write a certificate that is none."""
        self._write("tls.crt", b"no certificate\n")

    def served(self, address: str) -> bytes:
        """The certificate that a new connection is shown."""
        host, _, port = address.rpartition(":")
        context = ssl.create_default_context(cadata=self.authority.cert_pem.bytes().decode())
        with (
            socket.create_connection((host, int(port)), timeout=10) as raw,
            context.wrap_socket(raw, server_hostname=host) as tls,
        ):
            shown = tls.getpeercert(binary_form=True)
        assert shown is not None
        return shown

    def _write(self, name: str, content: bytes) -> None:
        new = self.tls / f".{name}.new"
        new.write_bytes(content)
        new.rename(self.tls / name)


class Scene:
    """A running group of a setting. Enter it to start the group; leaving ends it, and checks that nothing is left."""

    def __init__(self, setting: Setting, folder: Path, *, model: Path, kept: Path) -> None:
        self.setting = setting
        self.folder = folder
        self.model = model
        self.shim = Shim(folder)
        self.home = folder / "home"
        self.certificates = Certificates(folder) if setting.has_keys else None
        self.wounds: list[Wound] = []
        self.questions: dict[str, Question] = {}
        self.is_spent = False
        """Whether a fault used up what a group has only a few of."""
        self.num_pairs = 0
        self._manifest = self._write_manifest(MAX_MODEL_LEN)
        self._run = RunDirectory.for_group(HeteroHome(self.home), self._manifest.name)
        self._files: set[str] = set()
        self._group: LocalGroupProcess | None = None
        self._seen: set[int] = set()
        self._ports: tuple[str, ...] = ()
        if is_inside():
            mount_small(self.home, HOME_BYTES)
        LocalGroupProcess.kept = kept

    # --- life ---------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.group.process.poll() is None:
            self.group.process.kill()
            self.group.process.wait()
        for pid in self._seen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.home.is_mount():
            unmount(self.home)

    def start(self) -> None:
        """Start the group; its answers must be those of an earlier start."""
        self._group = LocalGroupProcess(
            self._manifest,
            home=self.home,
            module=MODULE if self.setting.has_gpu else "hetero_client",
            options=[*self._ports, *self._door_options()],
            environment=self.shim.environment | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), *sys.path])},
        )
        self._group.start()
        self._group.wait_ready()
        self.is_spent, self.num_pairs = False, 0
        self.settle()
        record = self.record
        if not self.setting.has_gpu:
            self._ports = (
                "--port", record.inference.rpartition(":")[2], "--http-port", record.http.rpartition(":")[2]
            )  # fmt: skip
        questions = ask_undisturbed(self.doors())
        assert self.questions in ({}, questions), "another start gives other answers"
        self.questions = questions
        self._files = self._files_now()

    def stop(self) -> list[str]:
        """End the group as Ctrl-C does; what was wrong with that."""
        self._seen |= self.group.descendants()
        status = self.group.stop()
        problems = [] if status == EXIT_OK else [f"hetero up ended with {status}"]
        return problems + self.leftovers()

    def roll_out(self) -> None:
        """End the group and start it with a changed manifest at the same doors, as clients go on asking."""
        problems = self.stop()
        assert not problems, problems
        spec = yaml.safe_load(self._manifest.path.read_text(encoding="utf-8"))
        is_changed = spec["spec"]["model"]["maxModelLen"] == ROLLED_OUT_LEN
        self._manifest = self._write_manifest(MAX_MODEL_LEN if is_changed else ROLLED_OUT_LEN)
        self.start()

    def _write_manifest(self, max_model_len: int) -> GroupFile:
        recovery = {"maxRestarts": 1000}
        if self.setting.has_gpu:
            shares = {"attention": [1, 0], "mlp": [1, 1], "vocabulary": [1, 0]}
            return write_mixed_manifest(
                self.folder, model=self.model, gpus=1, cpus=1, shares=shares, engine=ENGINE, recovery=recovery,
                max_model_len=max_model_len,
            )  # fmt: skip
        shares = {"attention": [5, 3, 0], "mlp": [1, 1, 2]} if len(self.setting.ranks) == 3 else {}
        return write_manifest(
            self.folder, model=self.model, ranks=len(self.setting.ranks), shares=shares, engine=ENGINE, memory="512Mi",
            max_model_len=max_model_len, recovery=recovery, idle={"sleepAfterSeconds": SLEEP_AFTER_S},
        )  # fmt: skip

    def _door_options(self) -> list[str]:
        if self.certificates is None:
            return []
        return ["--keys", str(self.certificates.keys), "--tls-dir", str(self.certificates.tls)]

    # --- who is there -------------------------------------------------------------------------------------

    @property
    def group(self) -> LocalGroupProcess:
        assert self._group is not None
        return self._group

    @property
    def record(self) -> GroupRecord:
        return self.group.record

    def read_record(self) -> GroupRecord | None:
        """The launcher's record as it is; None while there is none."""
        return self._run.read_record()

    def doors(self, *, resume_s: float = 60.0) -> Doors:
        record = self.record
        doors = Doors(record.inference, record.http, self._manifest.name, Access(), resume_s=resume_s)
        if self.certificates is None:
            return doors
        pem = self.certificates.authority.cert_pem.bytes()
        key = self.certificates.key_file.read_text(encoding="utf-8").strip()
        tls = ssl.create_default_context(cadata=pem.decode())
        return replace(doors, access=Access(api_key=key, ca=pem), tls=tls)

    def admin(self) -> AdminClient:
        return AdminClient(self.record.admin, token=self._run.read_admin_token())

    def topology(self) -> GroupTopology | None:
        """None while the gateway does not answer."""
        try:
            with self.admin() as admin:
                return admin.topology(timeout_s=1.0, wait_for_ready=True)
        except RequestError:
            return None

    def pid(self, role: str) -> int:
        """Of a rank by what it does, the gateway, the launcher or the forkserver."""
        if role == LAUNCHER:
            return self.group.process.pid
        if role in HELPERS:
            return self._helpers()[role]
        return self.record.processes[self.name(role)]

    def name(self, role: str) -> str:
        """Of a process, as the launcher calls it."""
        return self.setting.ranks.get(role, role)

    def identity(self) -> tuple[dict[str, int], int]:
        """Processes and epoch: what a fault that does no harm leaves as it was."""
        topology = self.topology()
        assert topology is not None
        return self.record.processes, topology.epoch

    # --- what is done to it -------------------------------------------------------------------------------

    def strike(self, role: str, number: signal.Signals) -> None:
        """Send a signal that ends a process, or freezes it for good."""
        pid = self.pid(role)
        self._seen |= self.group.descendants()
        self.wounds.append(Wound(self.name(role), pid, time.monotonic(), frozen=number == signal.SIGSTOP))
        with suppress(ProcessLookupError):  # killed for the moment, and not replaced yet
            os.kill(pid, number)

    def starve(self, role: str) -> None:
        """Let the kernel kill a process for want of memory."""
        pid = self.pid(role)
        self._seen |= self.group.descendants()
        with suppress(ProcessLookupError, psutil.NoSuchProcess):  # killed for the moment, and not replaced yet
            run_out_of_memory(pid)
        self.wounds.append(Wound(self.name(role), pid, time.monotonic()))

    def pause(self, roles: Iterable[str], seconds: float) -> None:
        """Freeze processes for a time that is tolerated."""
        pids = [self.pid(role) for role in roles]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                with suppress(ProcessLookupError):  # killed for the moment, and not replaced yet
                    os.kill(pid, number)
            time.sleep(seconds if number == signal.SIGSTOP else 0.0)

    # --- what must be -------------------------------------------------------------------------------------

    def settle(self, timeout_s: float = SETTLE_S) -> None:
        """Wait until every process runs that has to, none that was wounded, and the group serves."""
        last = ""

        def is_settled() -> bool:
            nonlocal last
            last = self._unsettled()
            return not last

        wait_until(is_settled, timeout_s, lambda: f"{last}\n{self.group.describe()}")

    def _unsettled(self) -> str:
        """Why it is not settled; empty if it is."""
        if self.group.process.poll() is not None:
            self.group.describe()
            raise AssertionError(f"the group ended: {self.group.output[-OUTPUT_CHARS:]}")
        record = self.read_record()
        if record is None or record.phase != "ready":
            return f"the record is {record}"
        gone = {wound.pid for wound in self.wounds if wound.until_s == float("inf")}
        if bad := [name for name, pid in record.processes.items() if pid in gone or not is_running(pid)]:
            return f"{bad} do not run"
        topology = self.topology()
        if topology is None or not topology.state.is_serving or not all(rank.joined for rank in topology.ranks):
            return f"the gateway says {topology and (topology.state, topology.reason)}"
        if topology.state is GroupState.ASLEEP and not (topology.idle and topology.idle.rests):
            return "it sleeps, and is not at rest"
        helpers = self._helpers()
        is_whole = set(helpers) == set(HELPERS) and not gone & set(helpers.values())
        return "" if is_whole else f"{helpers} beside {record.processes}"

    def _helpers(self) -> dict[str, int]:
        """The launcher's other children, by name; any that nobody knows by its command line."""
        others = self.group.descendants() - set(self.record.processes.values())
        self._seen |= others | set(self.record.processes.values())
        found = {}
        for pid in others:
            words = " ".join(_command(pid))
            found[next((name for name, word in HELPERS.items() if word in words), words)] = pid
        return found

    def census(self) -> list[str]:
        """What a group that has no request still holds, after some patience."""
        found: list[str] = []

        def is_clean() -> bool:
            found[:] = self._held()
            return not found

        with suppress(AssertionError):
            wait_until(is_clean, CENSUS_S, str)
        return found

    def _held(self) -> list[str]:
        try:
            with self.admin() as admin:
                stats = admin.stats(timeout_s=2.0, wait_for_ready=True)
        except RequestError as error:
            return [f"no counts: {error}"]
        doors = {int(address.rpartition(":")[2]) for address in (self.record.inference, self.record.http)}
        open_ = [
            connection
            for connection in psutil.Process(self.pid(GATEWAY)).net_connections("tcp")
            if connection.laddr.port in doors and connection.status in (psutil.CONN_ESTABLISHED, psutil.CONN_CLOSE_WAIT)
        ]
        checks = {
            f"{stats.running_requests} requests run, {stats.waiting_requests} wait": (
                stats.running_requests + stats.waiting_requests
            ),
            f"{stats.used_blocks} blocks are used, {stats.free_blocks} of {stats.num_blocks} free": (
                stats.used_blocks or stats.free_blocks != stats.num_blocks
            ),
            f"connections {open_}": open_,
            f"segments {shared_segments()}": shared_segments(),
            f"files {self._files ^ self._files_now()}": self._files ^ self._files_now(),
        }
        return [what for what, is_left in checks.items() if is_left]

    def _files_now(self) -> set[str]:
        """Files of the run; logs grow, and ranks write their measurements when they may."""
        return {path.name for path in self._run.path.iterdir() if path.suffix not in (".log", ".measured")}

    def leftovers(self) -> list[str]:
        """What a group that ended left behind, after some patience."""
        found: list[str] = []

        def is_clean() -> bool:
            found[:] = [f"process {pid} {_command(pid)}" for pid in self._seen if alive(pid)]
            found.extend(f"segment {name}" for name in shared_segments())
            return not found

        with suppress(AssertionError):
            wait_until(is_clean, END_S, str)
        return found

    def unclean_files(self) -> list[str]:
        """Files that an orderly end should have removed."""
        return [f"file {name}" for name in sorted(self._files_now() - {"lock"})]


def save_model(folder: Path) -> Path:
    """The model of all groups: tiny, with sequences that are long enough for a long prompt."""
    return save_tiny_model(folder, "llama", max_position_embeddings=MAX_MODEL_LEN)


def is_running(pid: int) -> bool:
    """Whether a process is there, and not frozen."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


def _command(pid: int) -> Sequence[str]:
    try:
        return psutil.Process(pid).cmdline()[:6]
    except psutil.NoSuchProcess:
        return ()


def wait_until(condition: Callable[[], bool], timeout_s: float, describe: Callable[[], str]) -> None:
    """Poll; fail with the description when the time is over."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s: {describe()}"
        time.sleep(LOOK_S)


def new_folder(parent: Path, name: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
