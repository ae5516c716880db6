"""What platforms say of their devices, and that asking for one that is not there is a clear error."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import Work
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.backends.cuda.backend import CudaBackend
from hetero_worker.backends.cuda.driver import driver_problem
from hetero_worker.backends.speeds import best_s, copy_bandwidths, matmul_flops, read_bandwidth, round_trip_s
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.errors import DeviceError
from hetero_worker.memory.streams import HOST, to_device
from tests.support.native_compute import compute_library, computing_with
from tests.support.pseudo_gpu import PlayedDriver

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


def test_a_driver_that_is_too_old_is_told_with_what_it_must_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("hetero_worker.backends.cuda.driver.installed_driver", lambda: "570.124.06")
    with pytest.raises(
        DeviceError, match=r"driver is 570\.124\.06, .* CUDA 13\.0, which needs driver 580 .*spec\.images\.gpuWorker"
    ):
        CudaBackend(0, pool="gpus").open()


@pytest.mark.parametrize(
    ("driver", "cuda", "is_old"),
    [("580.65.06", "13.0", False), ("579.9", "13.1", True), ("530.30.02", "12.8", False), ("470.1", "12.8", True),
     ("", "13.0", False), ("600.1", "14.0", False)],
)  # fmt: skip
def test_drivers_run_the_programs_of_their_cuda_and_older_ones(driver: str, cuda: str, is_old: bool) -> None:
    assert (driver_problem(driver, cuda=cuda) is not None) == is_old


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


@pytest.mark.parametrize(
    ("capability", "dtypes"), [((7, 5), {"float32", "float16"}), ((9, 0), {"float32", "bfloat16", "float16"})]
)
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


class Clock:
    """Laps of a device: each work takes what is given, whatever the host needed for it."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds
        self.results: list[Any] = []

    def __call__(self, works: Sequence[Work]) -> list[float]:
        self.results += [work() for work in works]
        return list(self.seconds)


def test_the_least_time_but_the_first_counts_by_the_devices_clock() -> None:
    clock = Clock(0.1, 3.0, 2.0, 5.0)
    assert best_s(lambda: "done", clock) == 2.0
    assert clock.results == ["done"] * 4


def test_copies_and_products_are_timed_on_any_device() -> None:
    clock = Clock(9.0, 1.0, 1.0, 1.0)
    assert min(copy_bandwidths(HOST, clock, pins_memory=False)) > 0
    assert round_trip_s(HOST, clock, pins_memory=False) > 0
    assert matmul_flops(HOST, ["float32"], size=32, laps=clock) == {"float32": 2 * 32**3}


def test_yardsticks_are_measured_with_numbers_that_vary() -> None:
    """A device computes with constants on less power, and so faster, than with a model's numbers."""
    clock = Clock(9.0, 2.0, 2.0, 2.0)
    count = (1 << 18) * 3 + 5
    assert read_bandwidth(HOST, 4 * count, clock) == 4 * count / 2.0
    matmul_flops(HOST, ["float32"], size=700, laps=clock)
    total, product = clock.results[0], clock.results[-1]
    assert abs(float(total)) < 30 * count**0.5
    assert product.std() == pytest.approx(700**0.5, rel=0.1)


def test_a_gpu_is_timed_by_its_own_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_worker.backends.cuda.backend._MATRIX_SIZE", 64)

    class Device(PlayedDriver):
        works = 0

        def laps(self, works: Sequence[Work]) -> list[float]:
            self.works += len(works)
            return [1.0] * len(works)

        def synchronize(self) -> None:
            raise AssertionError("the host's clock would count")

    driver = Device(0, 1 << 20, None)
    measured = CudaBackend(0, pool="gpus", driver=driver).measure()
    assert measured.memory_bandwidth == (1 << 20) // 4
    assert driver.works == 4 * (1 + 3 + 2 + 1)
    assert measured.matmul_flops == dict.fromkeys(("float32", "bfloat16", "float16"), 2 * 64**3)


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


@pytest.mark.parametrize(
    ("isa", "measured"),
    [("generic", {"float32"}), ("avx512_bf16", {"float32", "bfloat16"}), ("amx", {"float32", "bfloat16"})],
)
def test_products_of_bfloat16_are_measured_where_kernels_have_instructions_for_them(
    monkeypatch: pytest.MonkeyPatch, isa: str, measured: set[str]
) -> None:
    backend = cpu_backend(memory_bytes=1 << 28, read_bytes=1 << 20)
    monkeypatch.setattr(type(compute_library()), "isa", isa)
    assert set(backend.measure().matmul_flops) == measured


def test_an_instruction_set_that_is_not_there_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HETERO_CPU_ISA", "sse9")
    with pytest.raises(DeviceError, match=r"HETERO_CPU_ISA=sse9: .*this processor has kernels for .*generic"):
        cpu_backend(memory_bytes=1 << 28)
    monkeypatch.setenv("HETERO_CPU_ISA", "generic")
    with pytest.raises(DeviceError, match=r"HETERO_CPU_ISA=generic: .*not built"):
        cpu_backend(memory_bytes=1 << 28, library=tmp_path / "none.so")
