"""Ours as a contender: `hetero up` in a process of its own and a client over gRPC, as a user runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from bench.contenders import HEAD_TOKENS, HEADS, SHORT_PROMPT, Measured
from bench.processes import peak_rss_bytes
from bench.workloads import SEED, Workload
from hetero_client import AdminClient, HeteroClient, SamplingParams
from hetero_client.admin import GroupTopology
from hetero_client.home import HeteroHome
from hetero_client.launcher.run_directory import GroupRecord, RunDirectory

READY_TIMEOUT_S: Final = 180.0
END_TIMEOUT_S: Final = 30.0
RANK_BYTES: Final = 300_000_000


class HeteroContender:
    """Ours: `ranks` CPU ranks of `cores` cores each. `engine`, `placement` and `exchange` are fields of the spec's.

    `options` and `environment` are further ones of `hetero up`. `home` is kept from run to run; without one each start
    has a new one. `checkout`: the one whose code is started, by
    the interpreter of its own environment; None: this one.
    """

    def __init__(
        self,
        *,
        model: Path,
        ranks: int,
        cores: int,
        name: str = "",
        dtype: str = "float32",
        quantization: str = "none",
        max_model_len: int = 2048,
        memory_bytes: int = 4 << 30,
        home: Path | None = None,
        mode: str = "Tensor",
        engine: Mapping[str, Any] | None = None,
        placement: Mapping[str, Any] | None = None,
        exchange: Mapping[str, Any] | None = None,
        checkout: Path | None = None,
        options: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        ready_timeout_s: float = READY_TIMEOUT_S,
    ) -> None:
        self.name = name or f"hetero {ranks}x{cores}"
        self._model, self._ranks, self._cores = model, ranks, cores
        self._dtype, self._quantization = dtype, quantization
        self._max_model_len, self._memory_bytes = max_model_len, memory_bytes
        self._engine, self._exchange = dict(engine or {}), dict(exchange or {})
        self._placement = {"mode": mode, **(placement or {})}
        self._kept_home = home
        self._checkout = checkout
        self._options, self._environment = list(options), dict(environment or {})
        self._ready_timeout_s = ready_timeout_s
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._client: HeteroClient | None = None

    def start(self) -> float:
        began_s = time.perf_counter()
        self._make_home()
        path = self._home.root / "bench.yaml"
        path.write_text(yaml.safe_dump(self.manifest()), encoding="utf-8")
        with (self._home.root / "up.log").open("wb") as log:
            python = sys.executable if self._checkout is None else str(self._checkout / ".venv/bin/python")
            self._process = subprocess.Popen(
                [python, "-m", "hetero_client", "up", str(path), "--port", "0", *self._options],
                cwd=self._checkout,
                env={**os.environ, "HETERO_HOME": str(self._home.root), **self._environment},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        record = self._wait_ready()
        self._client = HeteroClient(record.inference)
        self._client.generate_text(SHORT_PROMPT, sampling=_exactly(1))
        return time.perf_counter() - began_s

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def facts(self) -> Mapping[str, str]:
        """`arithmetic` is that of the width: floating point, or whole numbers for quantised weights."""
        kernels = sorted({kernel for rank in self.topology().ranks for kernel in rank.kernels})
        arithmetic = self._dtype if self._quantization == "none" else "int8"
        return {"arithmetic": arithmetic, "kernels": "; ".join(kernels)}

    def negative_log_likelihoods(self, windows: Sequence[Sequence[int]]) -> list[float]:
        """Sum of -ln p of each window, from the log-probabilities that the API tells of prompts."""
        sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=0)
        return [self._negative_log_likelihood(window, sampling) for window in windows]

    def hold(self) -> None:
        """Left alone: ranks watch one another, and one that is stopped counts as lost. Idle, a group waits."""

    def release(self) -> None:
        pass

    def run(self, workload: Workload) -> Measured:
        # Every run is cold: a salt of its own keeps the prefix cache of earlier runs out of it.
        salt = f"run-{time.monotonic_ns()}"
        began_s = time.perf_counter()
        with ThreadPoolExecutor(len(workload.prompts)) as pool:
            runs = list(pool.map(lambda prompt: self._one(prompt, workload, salt), workload.prompts))
        elapsed_s = time.perf_counter() - began_s
        completions = [completion for _, completion in runs]
        return Measured(
            elapsed_s,
            max(first for first, _ in runs),
            sum(map(len, completions)),
            tuple(tokens[:HEAD_TOKENS] for tokens in completions[:HEADS]),
        )

    def peak_bytes(self) -> int:
        return peak_rss_bytes(self.pid)

    @property
    def client(self) -> HeteroClient:
        """Of the group that was started."""
        assert self._client is not None
        return self._client

    @property
    def http(self) -> str:
        """Address of the HTTP door of the group that was started."""
        return self._record.http

    @property
    def _record(self) -> GroupRecord:
        record = RunDirectory.for_group(self._home, "bench").read_record()
        assert record is not None
        return record

    def topology(self) -> GroupTopology:
        """How the group that was started stands."""
        with AdminClient(self._record.admin) as admin:
            return admin.topology()

    def allowed_bytes(self) -> int:
        """The peak that is aimed at: 1.3 x weights + KV cache + 300 MB a rank."""
        return sum(int(1.3 * rank.weight_bytes) + rank.kv_bytes + RANK_BYTES for rank in self.topology().ranks)

    def stop(self) -> None:
        if self._process is not None:
            self.end()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def end(self) -> str:
        """End the group; what its first rank logged."""
        if self._client is not None:
            self._client.close()
        if self._process is not None:
            self._process.terminate()
            self._process.wait(END_TIMEOUT_S)
            self._process = None
        logs = sorted(RunDirectory.for_group(self._home, "bench").path.glob("cpu-0*.log"))
        return logs[0].read_text(encoding="utf-8") if logs else ""

    def _one(self, prompt: Sequence[int], workload: Workload, salt: str) -> tuple[float, tuple[int, ...]]:
        assert self._client is not None
        sampling = replace(_exactly(workload.max_new), temperature=workload.temperature, seed=SEED)
        completion = self._client.generate_text(prompt, sampling=sampling, cache_salt=salt)
        return completion.timings.first_token_s, tuple(completion.token_ids)

    def _negative_log_likelihood(self, window: Sequence[int], sampling: SamplingParams) -> float:
        positions = self.client.generate_text(window, sampling=sampling).prompt_logprobs
        if [position.token_id for position in positions] != list(window[1:]):
            raise RuntimeError(f"{self.name} told {len(positions)} positions of a window of {len(window)} tokens")
        return -sum(position.logprob for position in positions)

    def _wait_ready(self) -> GroupRecord:
        run = RunDirectory.for_group(self._home, "bench")
        deadline_s = time.monotonic() + self._ready_timeout_s
        while time.monotonic() < deadline_s:
            record = run.read_record()
            if record is not None and record.phase == "ready":
                return record
            assert self._process is not None
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"{self.name} did not start:\n" + (self._home.root / "up.log").read_text())

    def _make_home(self) -> None:
        """One for this start, unless it was given one: that keeps what starts faster the next time."""
        if self._kept_home is None:
            self._folder = tempfile.TemporaryDirectory(prefix="hetero-bench-")
        self._home.root.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._home.runs, ignore_errors=True)  # a run that was killed may still be said to be ready

    @property
    def _home(self) -> HeteroHome:
        if self._kept_home is not None:
            return HeteroHome(self._kept_home)
        assert self._folder is not None
        return HeteroHome(Path(self._folder.name))

    def manifest(self) -> dict[str, Any]:
        """What `hetero up` is given: what a user would write who wants this model on so many ranks."""
        cpu = {"coresPerRank": self._cores, "memoryPerRank": str(self._memory_bytes), "numa": {"policy": "BestEffort"}}
        model = {"uri": f"file://{self._model}", "dtype": self._dtype, "maxModelLen": self._max_model_len}
        if self._quantization != "none":
            model["quantization"] = self._quantization
        return {
            "apiVersion": "heteroinference.io/v1alpha1",
            "kind": "HeteroInference",
            "metadata": {"name": "bench"},
            "spec": {
                "model": model,
                "pools": [{"name": "cpu", "type": "CPU", "ranks": self._ranks, "cpu": cpu}],
                "placement": self._placement,
                "exchange": self._exchange,
                "engine": self._engine,
            },
        }


def _exactly(tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
