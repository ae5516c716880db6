"""Records what steps do, with torch's profiler, between two commands of the gateway.

The record is bounded: after so many steps it ends by itself, for every operator of every step takes memory until the
report is made. A trace is told as gzip of Chrome's format, or not at all when it is larger than a message may be.
"""

from __future__ import annotations

import gzip
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from hetero_worker.backends.base import HOST

MAX_STEPS: Final = 256
MAX_TRACE_BYTES: Final = 32 * 1024 * 1024
_ROWS: Final = 40


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Profile of some steps."""

    table: str
    trace: bytes
    """Gzip of Chrome's format; empty if it was not asked for, or was too large, as the table then says."""


class StepRecorder:
    """One record, from its making to `finish`; all on one thread."""

    def __init__(
        self, *, max_steps: int = MAX_STEPS, max_trace_bytes: int = MAX_TRACE_BYTES, device: torch.device = HOST
    ) -> None:
        """Start the profile. On a GPU rank it includes the device's kernels."""
        self._max_steps = max_steps
        self._max_trace_bytes = max_trace_bytes
        self._num_steps = 0
        self._is_running = True
        on_device = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
        self._profile.start()

    def count_step(self) -> None:
        """Count a step, and stop at the last one."""
        if self._is_running:
            self._num_steps += 1
            if self._num_steps >= self._max_steps:
                self.stop()

    def stop(self) -> None:
        """Stop recording. Idempotent."""
        if self._is_running:
            self._is_running = False
            self._profile.stop()

    def finish(self, *, with_trace: bool) -> StepRecord:
        """Stop and return the profile."""
        self.stop()
        table = str(self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=_ROWS))
        lines = [f"{self._num_steps} steps were recorded (at most {self._max_steps} are)."]
        trace = self._packed_trace() if with_trace else b""
        if len(trace) > self._max_trace_bytes:
            lines.append(
                f"The trace is left out: {len(trace)} bytes, a report holds at most {self._max_trace_bytes}. "
                "Record fewer steps."
            )
            trace = b""
        return StepRecord("\n".join([*lines, table]), trace)

    def _packed_trace(self) -> bytes:
        with tempfile.TemporaryDirectory(prefix="hetero-profile-") as folder:
            path = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(path))
            return gzip.compress(path.read_bytes(), compresslevel=6)
