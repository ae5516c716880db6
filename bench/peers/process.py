"""A peer as a contender: its program runs on the interpreter of its own environment and is asked over pipes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, cast

from bench.contenders import SHORT_PROMPT, Measured
from bench.home import ROOT
from bench.processes import hold, peak_rss_bytes, release, tree
from bench.workloads import Workload

END_TIMEOUT_S: Final = 30.0
LAST_LINES: Final = 6


@dataclass(frozen=True, slots=True)
class PeerProgram:
    """A program of bench.peers, and what it is told (bench/peers/driver.py)."""

    python: Path
    module: str
    model: Path
    dtype: str
    threads: int
    log: Path
    """Gets what it writes to standard error."""
    max_seqs: int = 32
    max_context: int = 16_384
    cache_bytes: int = 1 << 30
    lookup_tokens: int = 0
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> list[str]:
        return [
            str(self.python), "-m", self.module, "--model", str(self.model), "--dtype", self.dtype,
            "--threads", str(self.threads), "--max-seqs", str(self.max_seqs),
            "--max-context", str(self.max_context), "--cache-bytes", str(self.cache_bytes),
            "--lookup-tokens", str(self.lookup_tokens),
        ]  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        ours = {"OMP_NUM_THREADS": str(self.threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        return {**os.environ, **ours, **self.variables}


class ProcessPeer:
    """A peer that reads a JSON request a line (bench/peers)."""

    def __init__(self, name: str, program: PeerProgram) -> None:
        self.name = name
        self._program = program
        self._process: subprocess.Popen[str] | None = None
        self._ready: dict[str, Any] = {}

    def start(self) -> float:
        began_s = time.perf_counter()
        self._program.log.parent.mkdir(parents=True, exist_ok=True)
        with self._program.log.open("wb") as log:
            self._process = subprocess.Popen(
                self._program.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=self._program.environment,
                cwd=ROOT,
            )
        self._ready = self._read()
        self._ask({"prompts": [SHORT_PROMPT], "max_new": 1})
        return time.perf_counter() - began_s

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def facts(self) -> Mapping[str, str]:
        return {**self._ready["facts"], "load_s": f"{self._ready['load_s']:.2f}"}

    def run(self, workload: Workload) -> Measured:
        answer = self._ask({"prompts": workload.prompts, "max_new": workload.max_new})
        heads = tuple(tuple(tokens) for tokens in answer.pop("heads"))
        return Measured(**answer, heads=heads)

    def negative_log_likelihoods(self, windows: Sequence[Sequence[int]]) -> list[float]:
        """Sum of -ln p of each window. Raises RuntimeError where the peer does not tell."""
        answer = self._ask({"windows": windows})
        if "error" in answer:
            raise RuntimeError(f"{self.name} {answer['error']}")
        return list(answer["nll"])

    def hold(self) -> None:
        hold(self.pid)

    def release(self) -> None:
        release(self.pid)

    def peak_bytes(self) -> int:
        return peak_rss_bytes(self.pid)

    def allowed_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        """End it, by force if it does not end by itself."""
        if self._process is None:
            return
        self.release()
        processes = tree(self._process.pid)
        cast(IO[str], self._process.stdin).close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            for process in processes:
                if process.is_running():
                    process.kill()
            self._process.wait()
        cast(IO[str], self._process.stdout).close()
        self._process = None

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process is not None
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            last = self._program.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
            raise RuntimeError(f"{self.name} ended ({self._program.log}):\n" + "\n".join(last))
        answer: dict[str, Any] = json.loads(line)
        return answer
