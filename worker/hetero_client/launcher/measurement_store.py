"""`$HETERO_HOME/measured/GROUP-KEY`: what a group's ranks measured at start, kept for its next start.

A group that is started again with the same manifest, model and cores need not measure the same machine again. Its ranks
find the files where a lost rank's successor does, in the run's directory, and look themselves whether they were made
under the same circumstances (`hetero_worker.process.tuning_cache`). This module makes sure that they are of the same
group, of all its ranks, of the last day, and measured while nobody else used the ranks' cores.
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
    """Of one group. `ranks`: names of all of them."""

    def __init__(self, folder: Path, ranks: Sequence[str], *, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._ranks = tuple(ranks)
        self._clock = clock

    @classmethod
    def of(cls, home: HeteroHome, name: str, resource: HeteroInference, *, model_dir: Path, plan: LocalPlan) -> Self:
        """The one of a group that is started so: another manifest, model or plan has another."""
        told = [resource.model_dump(mode="json"), str(model_dir), [asdict(rank) for rank in plan.ranks]]
        key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]
        return cls(home.measured / f"{name}-{key}", [rank.name for rank in plan.ranks])

    def lend(self, run: RunDirectory) -> None:
        """Give the run's ranks what was kept, if it is there for all of them and not too old."""
        times = [_measured_at(self._path(rank)) for rank in self._ranks]
        if all(time_s is not None and 0 <= self._clock() - time_s < VALID_S for time_s in times):
            for rank in self._ranks:
                shutil.copyfile(self._path(rank), run.measurements_path(rank))

    def keep(self, run: RunDirectory) -> float | None:
        """Keep what the run's ranks have now; when the oldest of it was measured, in seconds since 1970.

        None, and nothing is kept, where a rank has none, or was disturbed. Raises OSError when it cannot be written.
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

    def forget(self) -> None:
        """The next start measures anew."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, rank: str) -> Path:
        return self.folder / f"{rank}.measured"

    def _remove_old(self) -> None:
        """Of other groups too: what is not lent any more."""
        for folder in self.folder.parent.iterdir():
            with suppress(OSError):  # its own group may do the same
                newest_s = max((_measured_at(path) or 0.0 for path in folder.iterdir()), default=0.0)
                if self._clock() - newest_s >= VALID_S:
                    shutil.rmtree(folder)


def _measured_at(path: Path) -> float | None:
    """None where there is no such file, it does not say, or others disturbed it."""
    try:
        data = read_json_object(path) or {}
    except (OSError, ValueError):
        return None
    told = data.get(_MEASURED_AT)
    return float(told) if isinstance(told, int | float) and not data.get(_DISTURBED) else None
