from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.cpu import cpu_backend
from hetero_worker.backends.torch_reference import TorchReference
from hetero_worker.distributed.rendezvous import StoreListener, parse_address
from hetero_worker.errors import ExchangeError
from hetero_worker.host.pinning import PinningReport
from hetero_worker.process.messages import describe_device, host_id

pytestmark = pytest.mark.unit


def test_host_id_is_equal_for_those_who_share_memory_only(tmp_path: Path) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("one\n")
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()

    assert host_id(boot_id=boot, shm=here) == host_id(boot_id=boot, shm=here)
    assert host_id(boot_id=boot, shm=here) != host_id(boot_id=boot, shm=there)
    first = host_id(boot_id=boot, shm=here)
    boot.write_text("two\n")
    assert host_id(boot_id=boot, shm=here) != first


def test_host_without_shared_memory_shares_with_nobody(tmp_path: Path) -> None:
    missing = tmp_path / "missing"

    assert host_id(shm=missing) != host_id(shm=missing)


def test_device_report_tells_what_was_pinned_and_measured(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Test CPU 9000\n")
    platform = TorchReference(memory_bytes=1 << 30, cpuinfo=cpuinfo)
    speeds = ranks_pb2.DeviceSpeeds(memory_bandwidth=2e9, costs_dtype="float32")
    pinning = PinningReport(pinned=True, cpus=(2, 3), numa_nodes=(1,), num_threads=2, memory="bound", reason="")

    report = describe_device(platform, pinning, speeds)

    assert (report.kind, report.name, report.memory_bytes) == (ranks_pb2.DEVICE_KIND_CPU, "Test CPU 9000", 1 << 30)
    assert (list(report.cpus), list(report.numa_nodes), report.pinned) == ([2, 3], [1], True)
    assert report.speeds == speeds
    assert not report.has_kernels
    assert describe_device(cpu_backend(), pinning, speeds).has_kernels


def test_memory_of_the_machine_is_used_when_none_is_given() -> None:
    assert cpu_backend().memory_bytes > 1 << 28


@pytest.mark.parametrize(
    ("address", "parts"), [("10.0.0.1:80", ("10.0.0.1", 80)), ("[fd00::1]:81", ("fd00::1", 81)), ("h:82", ("h", 82))]
)
def test_store_address_is_read(address: str, parts: tuple[str, int]) -> None:
    assert parse_address(address) == parts


@pytest.mark.parametrize("address", ["", "host", ":80", "host:http"])
def test_bad_store_address_is_refused(address: str) -> None:
    with pytest.raises(ExchangeError, match="no host:port"):
        parse_address(address)


def test_store_host_of_another_machine_is_refused() -> None:
    with pytest.raises(ExchangeError, match=r"--store-host 192\.0\.2\.1: cannot listen"):
        StoreListener("192.0.2.1").open()
