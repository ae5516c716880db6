"""Measurements that a rank makes when it starts, kept for the process that takes its place.

A rank that starts again while its neighbours wait for it, spinning, would measure them and not the machine. So the
first measurement holds, for as long as whoever starts the ranks keeps the file. A file that was made under other
circumstances (package, torch, boot of the machine, CPU, cores) is ignored. The file records when it was begun, and
whether other processes used the cores meanwhile, so that whoever starts ranks can judge it later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from google.protobuf import json_format

from hetero_api.v1 import ranks_pb2
from hetero_worker.host.disturbance import CoreWatch
from hetero_worker.memory.memory_pool import MemoryPool
from hetero_worker.models.decoder import Decoder
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.profile_run import measure_workspace
from hetero_worker.runners.shard import limits_of

_log = logging.getLogger(__name__)

_CIRCUMSTANCES: Final = "circumstances"
_MEASURED_AT: Final = "measured_at"
_DISTURBED: Final = "disturbed"
_SPEEDS: Final = "speeds"
_WORKSPACES: Final = "workspaces"
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_PACKAGE: Final = Path(__file__).parents[1]


def boot_identity(path: Path = _BOOT) -> str:
    """Return a name of this machine's boot: another one after each start; "" where the kernel gives none."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def code_identity(package: Path = _PACKAGE) -> str:
    """Return a hash that changes when a file of the package, its native libraries included, is written again."""
    files = sorted(path for ending in ("py", "so") for path in package.rglob(f"*.{ending}"))
    files_seen = [(str(path.relative_to(package)), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return hashlib.sha256(repr(files_seen).encode()).hexdigest()


class TuningCache:
    """One rank's file of measurements. No path: nothing is kept, and everything is measured."""

    def __init__(self, path: Path | None, *, circumstances: Mapping[str, str]) -> None:
        self._path = path
        self._circumstances = dict(circumstances)
        self._data = self._read()

    def speeds(
        self, name: str, measure: Callable[[], ranks_pb2.DeviceSpeeds], *, all_have: Callable[[bool], bool] = bool
    ) -> ranks_pb2.DeviceSpeeds:
        """Return the speeds that are kept under `name`; measure them if they are not. The caller may change them.

        `all_have` is given whether this rank has kept them, and returns whether all that measure together have: one
        rank cannot measure without the others.
        """
        kept = self._data.get(_SPEEDS, {}).get(name)
        if all_have(kept is not None) and kept is not None:
            return json_format.ParseDict(kept, ranks_pb2.DeviceSpeeds())
        watch = CoreWatch()  # others may have the cores meanwhile
        measured = measure()
        if watch.was_disturbed():
            self._data[_DISTURBED] = True
        self._data.setdefault(_SPEEDS, {})[name] = json_format.MessageToDict(measured)
        self._write()
        return measured

    def measure_workspace(self, decoder: Decoder, request: LoadRequest, pool: MemoryPool) -> int | None:
        """As `profile_run.measure_workspace`, which is asked if it was not before."""
        limits, mode = limits_of(request), (request.batch_invariant, request.expert_deferral)
        asked = (request.config, request.dtype, request.cache_dtype, request.shard_plan, request.rank, limits, mode)
        question = hashlib.sha256(repr(asked).encode()).hexdigest()
        workspaces = self._data.setdefault(_WORKSPACES, {})
        if question in workspaces:
            return int(workspaces[question])
        measured = measure_workspace(decoder, request, pool)
        if measured is not None:
            workspaces[question] = measured
            self._write()
        return measured

    def _read(self) -> dict[str, Any]:
        fresh: dict[str, Any] = {_CIRCUMSTANCES: self._circumstances, _MEASURED_AT: time.time()}
        if self._path is None:
            return fresh
        try:
            data = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return fresh
        is_ours = isinstance(data, dict) and data.get(_CIRCUMSTANCES) == self._circumstances
        return data if is_ours else fresh

    def _write(self) -> None:
        """Write the file so that a reader sees all of it or nothing. A file that cannot be kept costs time only."""
        if self._path is None:
            return
        try:
            fd, partial = tempfile.mkstemp(dir=self._path.parent, prefix=f".{self._path.name}.")
            try:
                with os.fdopen(fd, "w", encoding="utf-8") as file:
                    json.dump(self._data, file)
                os.replace(partial, self._path)
            except BaseException:
                with suppress(OSError):
                    os.unlink(partial)
                raise
        except OSError as error:
            _log.warning("measurements cannot be kept in %s: %s", self._path, error)
