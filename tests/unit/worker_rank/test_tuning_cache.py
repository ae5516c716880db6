"""What one process of a rank measured holds for the next."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_worker.process.tuning_cache import TuningCache, boot_identity, code_identity
from tests.support.rank_group import RankGroup
from tests.support.rank_shares import Shares
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

HERE = {"torch": "1", "cpus": "0-1"}
ONE_RANK = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))


@dataclass
class Device:
    """Never measures the same twice."""

    measured: int = 0

    def measure(self) -> ranks_pb2.DeviceSpeeds:
        self.measured += 1
        cost = ranks_pb2.PartCost(part=ranks_pb2.MODEL_PART_MLP, rows=4, fixed_s=1e-5, unit_s=1e-6)
        rates = [ranks_pb2.MatmulRate(dtype="float32", flops=1e9)]
        return ranks_pb2.DeviceSpeeds(memory_bandwidth=self.measured * 1e9, matmul=rates, costs=[cost])


def test_the_next_process_is_told_what_the_first_measured(tmp_path: Path) -> None:
    device, path = Device(), tmp_path / "rank.measured"
    first, *others = (TuningCache(path, circumstances=HERE).speeds("m", device.measure) for _ in range(3))
    assert (others, device.measured) == ([first] * 2, 1)
    assert first.costs[0].rows == 4
    assert [file.name for file in tmp_path.iterdir()] == ["rank.measured"]


@pytest.mark.parametrize("circumstances", [{}, {**HERE, "torch": "2"}])
def test_what_was_measured_elsewhere_does_not_count(tmp_path: Path, circumstances: dict[str, str]) -> None:
    device, path = Device(), tmp_path / "rank.measured"
    TuningCache(path, circumstances=HERE).speeds("m", device.measure)
    assert TuningCache(path, circumstances=circumstances).speeds("m", device.measure).memory_bandwidth == 2e9


def test_a_file_says_when_it_was_begun(tmp_path: Path) -> None:
    device, path, began_at = Device(), tmp_path / "rank.measured", time.time()
    times = []
    for model in ("m", "n"):
        TuningCache(path, circumstances=HERE).speeds(model, device.measure)
        times.append(json.loads(path.read_text())["measured_at"])
    assert began_at <= times[0] <= time.time()
    assert times[1] == times[0]


@pytest.mark.parametrize("disturbed", [False, True])
def test_a_file_says_whether_others_had_the_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disturbed: bool
) -> None:
    monkeypatch.setattr("hetero_worker.host.disturbance.CoreWatch.was_disturbed", lambda _: disturbed)
    path = tmp_path / "rank.measured"
    TuningCache(path, circumstances=HERE).speeds("m", Device().measure)
    assert json.loads(path.read_text()).get("disturbed", False) == disturbed


def test_a_package_that_was_written_anew_is_another(tmp_path: Path) -> None:
    code, library = tmp_path / "part" / "a.py", tmp_path / "b.so"
    code.parent.mkdir()
    code.write_text("a = 1")
    library.write_bytes(b"1")
    seen = [code_identity(tmp_path), code_identity(tmp_path)]
    for file in (code, library):
        os.utime(file, ns=(1, 1))
        seen.append(code_identity(tmp_path))
    (tmp_path / "c.py").touch()
    seen.append(code_identity(tmp_path))
    assert seen[0] == seen[1]
    assert len(set(seen)) == 4


def test_a_kernel_that_tells_no_boot_has_one_name_for_all(tmp_path: Path) -> None:
    (tmp_path / "boot_id").write_text("abc\n", encoding="ascii")
    assert [boot_identity(tmp_path / "boot_id"), boot_identity(tmp_path / "none")] == ["abc", ""]


def test_another_model_is_measured_anew_and_both_are_kept(tmp_path: Path) -> None:
    device, path = Device(), tmp_path / "rank.measured"
    for model, bandwidth in (("m", 1e9), ("n", 2e9), ("m", 1e9)):
        speeds = TuningCache(path, circumstances=HERE).speeds(model, device.measure)
        assert speeds.memory_bandwidth == bandwidth


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_a_damaged_file_is_measured_over(tmp_path: Path, content: bytes) -> None:
    device, path = Device(), tmp_path / "rank.measured"
    path.write_bytes(content)
    TuningCache(path, circumstances=HERE).speeds("m", device.measure)
    assert TuningCache(path, circumstances=HERE).speeds("m", device.measure).memory_bandwidth == 1e9
    assert device.measured == 1


def test_without_a_file_or_without_room_for_one_everything_is_measured(tmp_path: Path) -> None:
    device = Device()
    for path in (None, tmp_path / "missing" / "rank.measured"):
        TuningCache(path, circumstances=HERE).speeds("m", device.measure)
    assert device.measured == 2


def test_a_workspace_is_measured_once_for_its_shard_and_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = RankGroup(save_tiny("llama", tmp_path / "model").directory, ONE_RANK)
    shard, request, _ = group.runners[0]._model_state.loaded("this test")
    answers = iter([1000, 2000, None, 3000, 4000])
    monkeypatch.setattr("hetero_worker.process.tuning_cache.measure_workspace", lambda *_: next(answers))

    def measured(**changes: Any) -> int | None:
        kept = TuningCache(tmp_path / "rank.measured", circumstances=HERE)
        return kept.measure_workspace(shard.decoder, dataclasses.replace(request, **changes), shard.memory_pool)

    assert [measured(), measured()] == [1000, 1000]
    assert [measured(max_num_seqs=3), measured(max_num_seqs=3), measured()] == [2000, 2000, 1000]
    assert [measured(dtype="bfloat16"), measured(dtype="bfloat16")] == [None, 3000], "not knowing is not kept"
    assert [measured(batch_invariant=True), measured()] == [4000, 1000], "kernels take what they take"


def test_the_code_that_counts_is_the_whole_package() -> None:
    import hetero_worker

    (package,) = hetero_worker.__path__
    assert code_identity() == code_identity(Path(package))
