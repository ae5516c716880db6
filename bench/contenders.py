"""Who is measured: ours in a layout, and peers. All get the same token ids and generate greedily past end tokens.

Ours runs as a user runs it: `hetero up`, a client over gRPC. A peer runs in a process of its own. All stay loaded,
idle while another is measured.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import yaml

from bench.processes import peak_rss_bytes
from bench.workloads import Workload
from hetero_client import AdminClient, HeteroClient, SamplingParams
from hetero_client.admin import GroupTopology
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory

READY_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of a workload. `first_token_s` is of the slowest prompt; None when the contender cannot tell."""

    elapsed_s: float
    first_token_s: float | None
    output_tokens: int


class Contender(Protocol):
    """Something that generates."""

    name: str

    def start(self) -> float:
        """Start it and generate one token of a short prompt; seconds from process start to that token."""
        ...

    def run(self, workload: Workload) -> Measured: ...

    def peak_bytes(self) -> int: ...

    def stop(self) -> None: ...


class HeteroContender:
    """Ours: `ranks` CPU ranks of `cores` cores each. `engine`, `placement` and `exchange` are fields of the spec's."""

    def __init__(
        self,
        *,
        model: Path,
        ranks: int,
        cores: int,
        mode: str = "Tensor",
        engine: Mapping[str, Any] | None = None,
        placement: Mapping[str, Any] | None = None,
        exchange: Mapping[str, Any] | None = None,
        note: str = "",
    ) -> None:
        self.name = f"hetero {ranks}x{cores}{note}"
        self._model, self._ranks, self._cores = model, ranks, cores
        self._engine, self._exchange = dict(engine or {}), dict(exchange or {})
        self._placement = {"mode": mode, **(placement or {})}
        self._folder = tempfile.TemporaryDirectory(prefix="hetero-bench-")
        self._home = HeteroHome(Path(self._folder.name))
        self._process: subprocess.Popen[bytes] | None = None
        self._client: HeteroClient | None = None

    def start(self) -> float:
        began_s = time.perf_counter()
        path = Path(self._folder.name) / "bench.yaml"
        path.write_text(yaml.safe_dump(self._manifest()), encoding="utf-8")
        log = (Path(self._folder.name) / "up.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hetero_client", "up", str(path), "--port", "0"],
            env={**os.environ, "HETERO_HOME": str(self._home.root)},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        record = self._wait_ready()
        self._client = HeteroClient(record.inference)
        self._client.generate_text([504, 3575, 282, 4649], sampling=_exactly(1))
        return time.perf_counter() - began_s

    def run(self, workload: Workload) -> Measured:
        # Every run is cold: a salt of its own keeps the prefix cache of earlier runs out of it.
        salt = f"run-{time.monotonic_ns()}"
        began_s = time.perf_counter()
        with ThreadPoolExecutor(len(workload.prompts)) as pool:
            runs = list(pool.map(lambda prompt: self._one(prompt, workload.max_new, salt), workload.prompts))
        elapsed_s = time.perf_counter() - began_s
        return Measured(elapsed_s, max(first for first, _ in runs), sum(tokens for _, tokens in runs))

    def peak_bytes(self) -> int:
        assert self._process is not None
        return peak_rss_bytes(self._process.pid)

    @property
    def client(self) -> HeteroClient:
        """Of the group that was started."""
        assert self._client is not None
        return self._client

    def topology(self) -> GroupTopology:
        """How the group that was started stands."""
        record = RunDirectory.of(self._home, "bench").read_record()
        assert record is not None
        with AdminClient(record.admin) as admin:
            return admin.topology()

    def stop(self) -> None:
        self.end()
        self._folder.cleanup()

    def end(self) -> str:
        """End the group; what its first rank logged."""
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(30)
            self._process = None
        logs = sorted(RunDirectory.of(self._home, "bench").path.glob("cpu-0*.log"))
        return logs[0].read_text(encoding="utf-8") if logs else ""

    def _one(self, prompt: Sequence[int], max_new: int, salt: str) -> tuple[float, int]:
        assert self._client is not None
        completion = self._client.generate_text(prompt, sampling=_exactly(max_new), cache_salt=salt)
        return completion.timings.first_token_s, len(completion.token_ids)

    def _wait_ready(self) -> GroupRecord:
        run = RunDirectory.of(self._home, "bench")
        deadline_s = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline_s:
            record = run.read_record()
            if record is not None and record.phase == "ready":
                return record
            assert self._process is not None
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} did not start:\n" + (Path(self._folder.name) / "up.log").read_text())

    def _manifest(self) -> dict[str, Any]:
        cpu = {"coresPerRank": self._cores, "memoryPerRank": "4Gi", "numa": {"policy": "BestEffort"}}
        return {
            "apiVersion": "heteroinference.io/v1alpha1",
            "kind": "HeteroInference",
            "metadata": {"name": "bench"},
            "spec": {
                "model": {"uri": f"file://{self._model}", "dtype": "float32", "maxModelLen": 2048},
                "pools": [{"name": "cpu", "type": "CPU", "ranks": self._ranks, "cpu": cpu}],
                "placement": self._placement,
                "exchange": self._exchange,
                "engine": self._engine,
            },
        }


class ProcessPeer:
    """A peer that reads a JSON request a line (bench/peers)."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._command = command
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        began_s = time.perf_counter()
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self._read()
        self._ask([[504, 3575, 282, 4649]], 1)
        return time.perf_counter() - began_s

    def run(self, workload: Workload) -> Measured:
        prompts = [list(prompt) for prompt in workload.prompts]
        first_token_s = None
        if len(prompts) == 1 and workload.max_new > 1:
            first_token_s = self._ask(prompts, 1)["elapsed_s"]
        answer = self._ask(prompts, workload.max_new)
        elapsed_s = answer["elapsed_s"]
        return Measured(elapsed_s, elapsed_s if workload.max_new == 1 else first_token_s, answer["output_tokens"])

    def peak_bytes(self) -> int:
        assert self._process is not None
        return peak_rss_bytes(self._process.pid)

    def stop(self) -> None:
        if self._process is not None:
            cast(IO[str], self._process.stdin).close()
            self._process.wait(30)

    def _ask(self, prompts: list[list[int]], max_new: int) -> dict[str, Any]:
        assert self._process is not None
        stdin = cast(IO[str], self._process.stdin)
        stdin.write(json.dumps({"prompts": prompts, "max_new": max_new}) + "\n")
        stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process is not None
        line = cast(IO[str], self._process.stdout).readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {' '.join(self._command)}")
        answer: dict[str, Any] = json.loads(line)
        return answer


def transformers_peer(model: Path, threads: int) -> ProcessPeer:
    """Hugging Face transformers, fp32."""
    script = Path(__file__).parent / "peers" / "transformers_peer.py"
    return ProcessPeer("transformers", [sys.executable, str(script), "--model", str(model), "--threads", str(threads)])


def _exactly(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
