"""What platforms say of their devices, and that asking for one that is not there is a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.speeds import best_s, copy_bandwidths, matmul_flops, round_trip_s
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.errors import DeviceError
from hetero_worker.memory.streams import HOST, to_device
from tests.support.native_compute import compute_library, computing_with

pytestmark = pytest.mark.unit


def test_a_torch_without_cuda_is_told_with_the_pool_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceError, match=r"pool gpus: .* on cuda:3, but torch .* built without CUDA; install a CUDA"):
        CudaBackend(3, pool="gpus").open()


def test_a_machine_without_devices_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        DeviceError, match=r"pool gpus: .* on cuda:0, but no CUDA device can be used here: /dev holds \w+ NVIDIA .*smi"
    ):
        CudaBackend(0, pool="gpus").open()


def test_a_device_that_is_not_there_is_told_beside_those_that_are(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"H200 no. {index}")
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    with pytest.raises(DeviceError, match=r"only these: 0 \(H200 no. 0\), 1 \(H200 no. 1\); .*gpu\.devices"):
        CudaBackend(2, pool="gpus").open()
    assert taken == []
    CudaBackend(1, pool="gpus").open()
    assert taken == [1]


def test_what_a_gpu_is_can_be_told_without_touching_it() -> None:
    platform = CudaBackend(6, pool="gpus")
    assert platform.device == torch.device("cuda", 6)
    assert (platform.kind, platform.default_dtype) == (ranks_pb2.DEVICE_KIND_CUDA, "bfloat16")
    assert (platform.collectives, platform.op_queue) == ("nccl", None)
    assert not torch.cuda._initialized


@pytest.mark.parametrize(("capability", "dtypes"), [((7, 5), {"float32"}), ((9, 0), {"float32", "bfloat16"})])
def test_old_gpus_have_no_bfloat16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtypes: set[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    assert CudaBackend(0, pool="gpus").dtypes == dtypes


def test_host_cores_are_the_host(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU\n")
    platform = TorchReference(memory_bytes=1 << 30, read_bytes=1 << 20, cpuinfo=cpuinfo)
    platform.open()
    assert (platform.name, platform.memory_bytes) == ("Some CPU", 1 << 30)
    assert (platform.kind, platform.collectives) == (ranks_pb2.DEVICE_KIND_CPU, None)
    measured = platform.measure()
    assert measured.memory_bandwidth > 0
    assert set(measured.matmul_flops) == {"float32", "bfloat16"}
    assert min(measured.matmul_flops.values()) > 0
    assert (measured.to_device_bandwidth, measured.from_device_bandwidth, measured.device_latency_s) == (0, 0, 0)


def test_the_first_time_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the least of the others, each until the device is done."""
    done: list[str] = []
    now = iter([0.0, 0.1, 10.0, 13.0, 20.0, 22.0, 30.0, 35.0])
    monkeypatch.setattr("hetero_worker.backends.speeds.time.perf_counter", lambda: next(now))
    assert best_s(lambda: done.append("work"), lambda: done.append("wait")) == 2.0
    assert done == ["wait", "work", "wait"] * 4


def test_copies_and_products_are_timed_on_any_device() -> None:
    waited: list[str] = []

    def wait() -> None:
        waited.append("")

    assert min(copy_bandwidths(HOST, wait, pins_memory=False)) > 0
    assert round_trip_s(HOST, wait, pins_memory=False) > 0
    assert set(matmul_flops(HOST, ["float32"], size=32, synchronize=wait)) == {"float32"}
    assert len(waited) == 4 * 2 * 4


def test_what_was_copied_to_a_device_does_not_change_with_the_host() -> None:
    host = torch.arange(5)
    there = to_device(host, HOST)
    host.fill_(-1)
    assert there.tolist() == [0, 1, 2, 3, 4]


def test_the_environment_forces_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    library = compute_library()
    with computing_with(library.isas[0]):
        monkeypatch.setenv("HETERO_CPU_ISA", "generic")
        backend = cpu_backend(memory_bytes=1 << 28)
        assert library.isa == "generic"
        assert backend.linear(torch.float32, batch_invariant=False).name == "native (generic)"


def test_an_instruction_set_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETERO_CPU_ISA", "sse9")
    with pytest.raises(DeviceError, match=r"HETERO_CPU_ISA=sse9: .*this processor has kernels for .*generic"):
        cpu_backend(memory_bytes=1 << 28)
    monkeypatch.setenv("HETERO_CPU_ISA", "generic")
    with pytest.raises(DeviceError, match=r"HETERO_CPU_ISA=generic: .*not built"):
        cpu_backend(memory_bytes=1 << 28, library=tmp_path / "none.so")
