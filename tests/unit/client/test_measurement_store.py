"""Which measurements of an earlier start a group is given."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hetero_api.host.topology import LogicalCore
from hetero_api.manifest import parse_manifest
from hetero_client.home import HeteroHome
from hetero_client.launcher.local_plan import plan_locally
from hetero_client.launcher.run_directory import VALID_S, MeasurementStore, RunDirectory

pytestmark = pytest.mark.unit

RANKS = ("cpu-0", "cpu-1")
BEGIN = 1_000_000.0
MANIFEST = """
apiVersion: heteroinference.io/v1alpha1
kind: HeteroInference
metadata: {name: kept}
spec:
  model: {uri: "file:///nowhere"}
  pools: [{name: cpu, type: CPU, ranks: 2, cpu: {coresPerRank: 1, memoryPerRank: 1Gi}}]
  engine: {maxNumSeqs: SEQS}
"""


class Start:
    """A start of the group: a run's directory, and the store as of then."""

    def __init__(self, folder: Path, *, now: float = BEGIN, group: str = "g") -> None:
        self.run = RunDirectory(folder / "run")
        self.run.path.mkdir(exist_ok=True)
        self.run.prepare(parse_manifest(MANIFEST.replace("SEQS", "4")))
        self.store = MeasurementStore(folder / "measured" / group, RANKS, clock=lambda: now)

    def measure(self, **content: object) -> None:
        for rank in RANKS:
            self.write(rank, **content)

    def write(self, rank: str, **content: object) -> None:
        self.run.measurements_path(rank).write_text(json.dumps(content), encoding="utf-8")

    def lent(self) -> dict[str, dict[str, object]]:
        self.store.copy_to(self.run)
        paths = {rank: self.run.measurements_path(rank) for rank in RANKS}
        return {rank: json.loads(path.read_text()) for rank, path in paths.items() if path.exists()}


def test_what_was_measured_is_lent_to_the_next_start_for_a_day(tmp_path: Path) -> None:
    first = Start(tmp_path)
    assert first.lent() == {}
    first.measure(measured_at=BEGIN - 5, speeds=1)
    assert first.store.save_from(first.run) == BEGIN - 5

    soon = Start(tmp_path, now=BEGIN - 6 + VALID_S)
    assert soon.lent() == {rank: {"measured_at": BEGIN - 5, "speeds": 1} for rank in RANKS}
    assert soon.store.save_from(soon.run) == BEGIN - 5  # not younger for having been copied
    assert Start(tmp_path, now=BEGIN - 5 + VALID_S).lent() == {}
    assert Start(tmp_path, now=BEGIN - 60).lent() == {}  # the clock was set back


@pytest.mark.parametrize("lacking", [{}, {"measured_at": BEGIN, "disturbed": True}, {"measured_at": "today"}])
def test_what_one_rank_lacks_is_kept_of_none(tmp_path: Path, lacking: dict[str, object]) -> None:
    start = Start(tmp_path)
    start.write("cpu-0", measured_at=BEGIN)
    start.write("cpu-1", **lacking)
    assert start.store.save_from(start.run) is None
    assert Start(tmp_path).lent() == {}


def test_a_damaged_or_missing_file_of_one_rank_makes_all_useless(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.measure(measured_at=BEGIN)
    start.store.save_from(start.run)
    kept = tmp_path / "measured" / "g" / "cpu-1.measured"
    kept.write_bytes(b"\xff")
    assert Start(tmp_path).lent() == {}
    kept.unlink()
    assert Start(tmp_path).lent() == {}


def test_what_is_forgotten_is_measured_anew(tmp_path: Path) -> None:
    start = Start(tmp_path)
    start.measure(measured_at=BEGIN)
    start.store.save_from(start.run)
    start.store.discard()
    assert Start(tmp_path).lent() == {}


def test_what_no_group_is_lent_any_more_is_removed(tmp_path: Path) -> None:
    for group, now in (("old", BEGIN), ("young", BEGIN + VALID_S - 1), ("own", BEGIN + VALID_S)):
        start = Start(tmp_path, now=now, group=group)
        start.measure(measured_at=now)
        start.store.save_from(start.run)
    assert sorted(path.name for path in (tmp_path / "measured").iterdir()) == ["own", "young"]


def test_another_manifest_model_or_core_is_another_group(tmp_path: Path) -> None:
    folders = [
        _folder_of(HeteroHome(tmp_path), seqs=seqs, model=model, first_core=core)
        for seqs, model, core in ((4, "m", 0), (4, "m", 0), (5, "m", 0), (4, "n", 0), (4, "m", 1))
    ]
    assert folders[0] == folders[1]
    assert len(set(folders)) == 4


def _folder_of(home: HeteroHome, *, seqs: int, model: str, first_core: int) -> Path:
    resource = parse_manifest(MANIFEST.replace("SEQS", str(seqs)))
    cores = [LogicalCore(number, 0, number) for number in range(first_core, first_core + 2)]
    plan = plan_locally(resource, cores=cores, memory_bytes=8 << 30)
    return MeasurementStore.for_group(home, "kept", resource, model_dir=Path(model), plan=plan).folder
