"""Measurement of this machine as a group would do it: a probe for each rank, on the rank's cores, all at once."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from hetero_api.contract import EXIT_FAILURE
from hetero_api.cpu_list import format_cpu_list
from hetero_api.spec import HeteroInferenceSpec
from hetero_api.v1 import ranks_pb2
from hetero_client.errors import ProcessDiedError, StartTimeoutError
from hetero_client.launcher.local_plan import HOST_CORES, LocalPlan, RankProcess
from hetero_placement.hardware import ExchangeSpeeds, Hardware, RankHardware

TIMEOUT_S: Final = 180.0
"""Limit for all probes together, imports included."""
PROGRAM: Final = (sys.executable, "-m", "hetero_worker.probe")
_LOG_LINES: Final = 20
_POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """A plan and a model to measure. `program` takes the arguments of `hetero_worker.probe`; tests pass a stand-in."""

    plan: LocalPlan
    model_dir: Path
    dtype: str
    quantization: str = "none"
    quantization_group_size: int | None = None
    program: tuple[str, ...] = PROGRAM

    def argv(self, number: int, *, meet: Path) -> tuple[str, ...]:
        """Return the command line of one rank's probe. Probes meet in folder `meet`."""
        rank = self.plan.ranks[number]
        return (
            *self.program,
            "--model", str(self.model_dir),
            "--device", rank.device,
            "--cores", format_cpu_list(rank.cores),
            "--num-threads", str(rank.num_threads),
            "--numa-policy", str(rank.numa_policy),
            "--memory-bytes", str(rank.memory_bytes),
            "--dtype", self.dtype,
            *self._quantization,
            "--group", str(len(self.plan.ranks)),
            "--rank", str(number),
            "--num-gpu-ranks", str(sum(each.device != HOST_CORES for each in self.plan.ranks)),
            "--meet", str(meet),
        )  # fmt: skip

    @property
    def _quantization(self) -> tuple[str, ...]:
        size = self.quantization_group_size
        return ("--quantization", self.quantization, *(("--quantization-group-size", str(size)) if size else ()))


def measure_here(task: ProbeTask, spec: HeteroInferenceSpec, *, timeout_s: float = TIMEOUT_S) -> Hardware:
    """Measure, in some seconds. Raises ProcessDiedError, with the probe's last lines, and StartTimeoutError."""
    with tempfile.TemporaryDirectory(prefix="hetero-plan-") as folder, ExitStack() as stack:
        meet = Path(folder) / "meet"
        meet.mkdir()
        probes = [
            stack.enter_context(_Probe(task, number, Path(folder), meet)) for number in range(len(task.plan.ranks))
        ]
        _wait_for(probes, timeout_s)
        answers = [probe.answer() for probe in probes]
    cores = {pool.name: pool.cores_per_rank for pool in spec.pools}
    gpu_share = spec.engine.gpu_memory_utilization
    ranks = [
        _hardware_of(rank, answer, cores=cores[rank.pool], gpu_share=gpu_share)
        for rank, answer in zip(task.plan.ranks, answers, strict=True)
    ]
    formed = _formed_of(answers[0])
    return Hardware(
        tuple(ranks), ExchangeSpeeds.from_protos(formed.host_times), ExchangeSpeeds.from_protos(formed.device_times)
    )


def _hardware_of(rank: RankProcess, answer: dict[str, Any], *, cores: int, gpu_share: float) -> RankHardware:
    report = json_format.ParseDict(answer["device"], ranks_pb2.DeviceReport(), ignore_unknown_fields=True)
    return RankHardware.from_report(
        report, host="here", pool=rank.pool, cores=cores, gpu_share=gpu_share, formed=_formed_of(answer)
    )


def _formed_of(answer: dict[str, Any]) -> ranks_pb2.Formed:
    return json_format.ParseDict(answer["formed"], ranks_pb2.Formed(), ignore_unknown_fields=True)


class _Probe:
    """One probe process; it does not outlive the `with` statement."""

    def __init__(self, task: ProbeTask, number: int, folder: Path, meet: Path) -> None:
        self._argv = task.argv(number, meet=meet)
        self.name = task.plan.ranks[number].name
        self._out, self._log = folder / f"{number}.json", folder / f"{number}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> _Probe:
        with self._out.open("wb") as out, self._log.open("wb") as log:
            self._process = subprocess.Popen(self._argv, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    @property
    def exit_status(self) -> int | None:
        """Exit status; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def check(self) -> None:
        """Raise ProcessDiedError if it failed."""
        status = self.exit_status
        if status:
            tail = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
            message = f"the probe of {self.name} ended with exit code {status}"
            raise ProcessDiedError(message, exit_status=status, log_tail=tail)

    def answer(self) -> dict[str, Any]:
        """Return its answer, the last line. Raises ProcessDiedError when that is no answer."""
        lines = self._out.read_text(encoding="utf-8", errors="replace").splitlines()
        try:
            answer = json.loads(lines[-1]) if lines else None
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not {"device", "formed"} <= answer.keys():
            raise ProcessDiedError(
                f"the probe of {self.name} gave no answer", exit_status=EXIT_FAILURE, log_tail=lines[-1:]
            )
        return answer


def _wait_for(probes: Sequence[_Probe], timeout_s: float) -> None:
    """Wait until all have ended well. Raises the first failure."""
    deadline_s = time.monotonic() + timeout_s
    while any(probe.exit_status is None for probe in probes):
        for probe in probes:
            probe.check()
        if time.monotonic() > deadline_s:
            late = ", ".join(probe.name for probe in probes if probe.exit_status is None)
            raise StartTimeoutError(f"the probes of {late} did not end within {timeout_s:g} s")
        time.sleep(_POLL_S)
    for probe in probes:
        probe.check()
