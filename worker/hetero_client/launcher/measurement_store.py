"""`$HETERO_HOME/measured/GROUP-KEY`: measurements of a group's ranks at start, kept for its next start.

A group that is started again with the same manifest, model and cores need not measure the machine again. Its ranks find
the files in the run's directory, like a lost rank's successor, and check themselves that they were made under the same
circumstances (`hetero_worker.process.tuning_cache`). This module makes sure that they are of the same group and all its
ranks, not older than a day, and taken while nobody else used the ranks' cores, because a machine is not busy for ever.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final, Self

from hetero_api.spec import HeteroInference
from hetero_client.home import HeteroHome
from hetero_client.launcher.local_plan import LocalPlan
from hetero_client.launcher.run_directory import RunDirectory, read_json_object, write_atomically

VALID_S: Final = 24 * 3600.0
_MEASURED_AT: Final = "measured_at"
_DISTURBED: Final = "disturbed"
_KEY_DIGITS: Final = 16


class MeasurementStore:
    """Measurements of one group, whose ranks are `ranks`."""

    def __init__(self, folder: Path, ranks: Sequence[str], *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._ranks = tuple(ranks)
        self._clock = clock

    @classmethod
    def for_group(
        cls, home: HeteroHome, name: str, resource: HeteroInference, *, model_dir: Path, plan: LocalPlan
    ) -> Self:
        """Return the group's measurements; another manifest, model or plan has others."""
        inputs = [resource.model_dump(mode="json"), str(model_dir), [asdict(rank) for rank in plan.ranks]]
        key = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        return cls(home.measured / f"{name}-{key}", [rank.name for rank in plan.ranks])

    def copy_to(self, run: RunDirectory) -> None:
        """Copy kept measurements to the run's directory, if all ranks have some and none is too old."""
        times = [_measured_at(self._path(rank)) for rank in self._ranks]
        if all(time_s is not None and 0 <= self._clock() - time_s < VALID_S for time_s in times):
            for rank in self._ranks:
                shutil.copyfile(self._path(rank), run.measurements_path(rank))

    def save_from(self, run: RunDirectory) -> float | None:
        """Keep the measurements of the run's ranks; return when the oldest was taken, in seconds since 1970.

        Keeps nothing and returns None if a rank has none, or was disturbed. Raises OSError if they cannot be written.
        """
        times = [_measured_at(run.measurements_path(rank)) for rank in self._ranks]
        known = [time_s for time_s in times if time_s is not None]
        if not known or len(known) < len(times):
            return None
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in self._ranks:
            write_atomically(self._path(rank), run.measurements_path(rank).read_text(encoding="utf-8"))
        self._remove_old()
        return min(known)

    def discard(self) -> None:
        """Remove the measurements, so that the next start repeats them."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, rank: str) -> Path:
        return self.folder / f"{rank}.measured"

    def _remove_old(self) -> None:
        """Remove measurements that are too old, other groups' too."""
        for folder in self.folder.parent.iterdir():
            with suppress(OSError):  # its own group may do the same
                newest_s = max((_measured_at(path) or 0.0 for path in folder.iterdir()), default=0.0)
                if self._clock() - newest_s >= VALID_S:
                    shutil.rmtree(folder)


def _measured_at(path: Path) -> float | None:
    """Return the time of a file's measurements; None if there is none, or others disturbed them."""
    try:
        data = read_json_object(path) or {}
    except (OSError, ValueError):
        return None
    time_s = data.get(_MEASURED_AT)
    return float(time_s) if isinstance(time_s, int | float) and not data.get(_DISTURBED) else None
