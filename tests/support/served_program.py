"""A server of somebody else's as a process: started when entered, asked until it is ready, stopped when left."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import httpx

from tests.support.kube.polling import poll

READY_TIMEOUT_S: Final = 20.0


class ServedProgram:
    """Runs `_command` while entered, with its output in `log`. It is ready when `ready_path` is answered with 200."""

    def __init__(self, *, log: Path, http: httpx.Client, ready_path: str) -> None:
        self._log, self._http, self._ready_path = log, http, ready_path
        self._process: subprocess.Popen[bytes] | None = None

    def _command(self) -> Sequence[str]:
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            return self._http.get(self._ready_path).status_code == 200
        except httpx.TransportError:
            return False

    def __enter__(self) -> Self:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=subprocess.STDOUT)
        poll(self.is_ready, timeout_s=READY_TIMEOUT_S, describe=self._log.read_text)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(READY_TIMEOUT_S)
