"""`hetero`, whose groups measure once for all that have the same ranks.

    python -m tests.support.measured_up up FILE --port 0

Ranks of these tests share cores, so each disturbs what the others measure, and a launcher would keep none of it.
"""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from typing import Self
from unittest import mock

from hetero_api.spec import HeteroInference
from hetero_client.cli.main import run
from hetero_client.home import HeteroHome
from hetero_client.launcher.local_plan import LocalPlan
from hetero_client.launcher.run_directory import MeasurementStore, RunDirectory


class SharedMeasurements(MeasurementStore):
    """Measurements of groups that have the same ranks, whatever they serve and whoever disturbed them.

    A rank's file holds what it measured of each model, by the model's name, and of other circumstances nothing.
    """

    @classmethod
    def for_group(cls, home: HeteroHome, name: str, resource: HeteroInference, *, plan: LocalPlan, **_: object) -> Self:
        key = hashlib.sha256(repr(plan.ranks).encode()).hexdigest()[:16]
        return cls(home.measured / key, [rank.name for rank in plan.ranks])

    def copy_to(self, run: RunDirectory) -> None:
        for rank in self._ranks:
            with suppress(FileNotFoundError):
                shutil.copyfile(self._path(rank), run.measurements_path(rank))

    def save_from(self, run: RunDirectory) -> float | None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for rank in self._ranks:
            with suppress(FileNotFoundError):
                shutil.copyfile(run.measurements_path(rank), self._path(rank))
        return None


if __name__ == "__main__":
    with mock.patch.object(MeasurementStore, "for_group", SharedMeasurements.for_group):
        run()
