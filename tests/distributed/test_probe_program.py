"""`python -m hetero_worker.probe`: alone, as a group on one host, and when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from hetero_api.contract import EXIT_PERMANENT, EXIT_USAGE
from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.coordinator import SIZES
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.distributed

TIMEOUT_S = 180.0


def start(model: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "hetero_worker.probe", "--model", str(model), "--num-threads", "1", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def answer_of(process: subprocess.Popen[str]) -> tuple[ranks_pb2.DeviceReport, ranks_pb2.Formed]:
    out, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, errors
    [line] = out.splitlines()
    answer: dict[str, Any] = json.loads(line)
    device = json_format.ParseDict(answer["device"], ranks_pb2.DeviceReport())
    return device, json_format.ParseDict(answer["formed"], ranks_pb2.Formed())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return save_tiny("llama", tmp_path / "model").directory


def test_a_probe_tells_device_and_costs_without_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    device, formed = answer_of(start(model, "--memory-bytes", str(1 << 30)))
    assert (device.kind, device.memory_bytes) == (ranks_pb2.DEVICE_KIND_CPU, 1 << 30)
    assert device.speeds.memory_bandwidth > 0
    assert device.speeds.costs_dtype == "float32"
    assert {cost.part for cost in device.speeds.costs} >= {
        ranks_pb2.MODEL_PART_ATTENTION_DECODE, ranks_pb2.MODEL_PART_HEAD, ranks_pb2.MODEL_PART_STEP,
    }  # fmt: skip
    assert not formed.host_times


def test_probes_of_one_host_measure_their_exchange(model: Path, tmp_path: Path) -> None:
    meet = tmp_path / "meet"
    meet.mkdir()
    probes = [start(model, "--group", "2", "--rank", str(rank), "--meet", str(meet)) for rank in range(2)]
    for device, formed in map(answer_of, probes):
        assert device.speeds.costs
        assert [time.bytes for time in formed.host_times] == sorted(SIZES)
        assert all(time.seconds > 0 for time in formed.host_times)
        assert not formed.device_times


def test_a_probe_whose_peers_do_not_come_says_so(model: Path, tmp_path: Path) -> None:
    process = start(model, "--group", "2", "--rank", "1", "--meet", str(tmp_path), "--timeout-s", "0.1")
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_PERMANENT
    assert "probe 0 did not come" in errors


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--group", "2", "--rank", "2"), "--rank 2: must be less than --group 2"),
        (("--group", "2"), "--meet: a group of more than one needs a folder"),
        (("--device", "gpu"), "neither cpu nor cuda:N"),
    ],
)
def test_a_wrong_option_is_named(options: tuple[str, ...], words: str, model: Path) -> None:
    process = start(model, *options)
    _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == EXIT_USAGE
    assert words in errors
