"""The operator as a real process: `python -m hetero_operator` against any kubeconfig, forked from a process that has
imported it, since tests start hundreds and each import takes a second.

    with OperatorProcess(kubeconfig, folder) as operator:
        operator.wait_leading()
        ...
        operator.kill()          # SIGKILL
        operator.start()         # again: same identity, so it need not wait for its own Lease to run out

`changes` are variables HETERO_OPERATOR_* without the prefix, in lower case: OperatorProcess(..., namespaces="a,b").
What a failing test needs to know is in `log_tail()`, and every AssertionError raised here has it.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import runpy
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.kube.polling import poll
from tests.support.kube.ports import free_port

READY_TIMEOUT_S = 40.0
STOP_TIMEOUT_S = 20.0
LOG_TAIL_BYTES = 8000
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["hetero_operator.main", __name__])


def _operate(environment: Mapping[str, str], log: Path) -> None:
    """Be the operator, in a process of its own."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = []
    with log.open("ab") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    runpy.run_module("hetero_operator", run_name="__main__", alter_sys=True)


class OperatorProcess:
    """One operator; its log is appended to `folder`/operator.log. Starts when entered, is stopped when left."""

    def __init__(self, kubeconfig: Path, folder: Path, **changes: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "operator.log"
        self.health_port = free_port()
        self.metrics_port = free_port()
        settings = {
            "kubeconfig": str(kubeconfig),
            "identity": f"test-{os.getpid()}-{self.health_port}",
            "health_port": str(self.health_port),
            "metrics_port": str(self.metrics_port),
            "allowed_host_paths": "/",
            **changes,
        }
        self._environment = {f"HETERO_OPERATOR_{name.upper()}": value for name, value in settings.items()}
        self._process: BaseProcess | None = None

    def start(self) -> None:
        """Start it, or start it again after it ended."""
        assert not self.running, "it runs already"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("HETERO_OPERATOR_")}
        environment = {**inherited, **self._environment}
        self._process = _WARM.Process(target=_operate, args=(environment, self.log), daemon=True)
        self._process.start()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    @property
    def pid(self) -> int:
        assert self._process is not None, "it was never started"
        assert self._process.pid is not None
        return self._process.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for a signal."""
        return None if self._process is None else self._process.exitcode

    def stop(self) -> int:
        """SIGTERM; its exit status. Fails when it does not end in time."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL, as a node that dies would."""
        self._end(signal.SIGKILL)

    def restart(self) -> None:
        """Stop orderly, start again."""
        self.stop()
        self.start()

    def ready(self) -> bool:
        """Whether /readyz says so."""
        return self._fetch(self.health_port, "/readyz") is not None

    def healthy(self) -> bool:
        """Whether /healthz says so."""
        return self._fetch(self.health_port, "/healthz") is not None

    def leading(self) -> bool:
        return self.metric("hetero_operator_leader") == 1

    def wait_ready(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until its caches are filled, whether it leads or not."""
        self._wait(self.ready, "not ready", timeout_s)

    def wait_leading(self, *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Until it holds the Lease and has its caches filled."""
        self._wait(lambda: self.ready() and self.leading(), "not leading", timeout_s)

    def wait_metric(
        self, name: str, until: Callable[[float], bool], *, timeout_s: float = READY_TIMEOUT_S, **labels: str
    ) -> float:
        """The metric's value, once `until` holds of it."""
        self._wait(lambda: until(self.metric(name, **labels)), f"{name} {labels}", timeout_s)
        return self.metric(name, **labels)

    def metric(self, name: str, **labels: str) -> float:
        """Sum over the samples of this name that have these labels; 0 when there is none, or nobody answers."""
        return sum(
            value
            for found, its, value in self.samples()
            if found == name and all(its.get(key) == wanted for key, wanted in labels.items())
        )

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Name, labels and value of every metric now."""
        text = self._fetch(self.metrics_port, "/metrics") or ""
        found = (_SAMPLE.match(line) for line in text.splitlines())
        return [(m["name"], dict(_LABEL.findall(m["labels"] or "")), float(m["value"])) for m in found if m]

    def reconciled(self) -> int:
        """How many resources it has looked at since it started, each counted once."""
        return int(self.metric("hetero_operator_resources_reconciled"))

    def log_tail(self, size: int = LOG_TAIL_BYTES) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return self.log.read_bytes()[-size:].decode(errors="replace")

    def check(self) -> None:
        """Fails when it has ended."""
        assert self.running, f"the operator ended with {self.exit_status}\n{self.log_tail()}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.kill() if kind is not None else self.stop()
        if error is not None:
            error.add_note(f"--- {self.log} ---\n{self.log_tail()}")

    def _wait(self, holds: Callable[[], bool], what: str, timeout_s: float) -> None:
        def probe() -> bool:
            self.check()
            return holds()

        poll(probe, timeout_s=timeout_s, describe=lambda: f"operator: {what}\n{self.log_tail()}")

    def _end(self, with_signal: signal.Signals) -> int:
        process = self._process
        assert process is not None, "it was never started"
        if self.running:
            os.kill(self.pid, with_signal)
        process.join(STOP_TIMEOUT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError(f"did not end after {with_signal.name}\n{self.log_tail()}")
        return process.exitcode

    def _fetch(self, port: int, path: str) -> str | None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
                text: str = answer.read().decode()
                return text
        except (urllib.error.URLError, OSError):
            return None
