"""Devices as the driver's files tell of them: order, what a container sees, and what CUDA_VISIBLE_DEVICES leaves.

The trees are written after the format of the NVIDIA driver's /proc files; they are no recordings.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_api.host.gpus import Gpu, installed_driver, visible_gpus

pytestmark = pytest.mark.unit

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 287
GPU UUID: \t {uuid}
Video BIOS: \t 96.00.ab.00.01
Bus Type: \t PCIe
Bus Location: \t {address}
Device Minor: \t {minor}
GPU Excluded:\t {excluded}
"""


def uuid(letter: str) -> str:
    return f"GPU-{letter * 8}-0000-0000-0000-000000000000"


def add_gpu(root: Path, address: str, minor: int, letter: str, *, node: str = "0", excluded: str = "No") -> None:
    proc = root / "proc/driver/nvidia/gpus" / address
    proc.mkdir(parents=True)
    text = INFORMATION.format(uuid=uuid(letter), address=address, minor=minor, excluded=excluded)
    (proc / "information").write_text(text)
    sysfs = root / "sys/bus/pci/devices" / address
    sysfs.mkdir(parents=True)
    (sysfs / "numa_node").write_text(f"{node}\n")
    add_device_file(root, minor)


def add_device_file(root: Path, minor: int) -> None:
    (root / "dev").mkdir(exist_ok=True)
    (root / "dev" / f"nvidia{minor}").touch()
    (root / "dev" / "nvidiactl").touch()
    (root / "dev" / "nvidia-uvm").touch()


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """Four devices; the files' numbers are not in PCI order."""
    add_gpu(tmp_path, "0000:9a:00.0", 2, "c", node="1")
    add_gpu(tmp_path, "0000:18:00.0", 1, "a")
    add_gpu(tmp_path, "0000:9b:00.0", 3, "d", node="-1")
    add_gpu(tmp_path, "0000:2a:00.0", 0, "b")
    return tmp_path


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 03:12:20 UTC 2025", "570.124.06"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs)", "580.65.06"),
        ("something else", ""),
    ],
)
def test_the_kernel_module_has_a_version(tmp_path: Path, line: str, version: str) -> None:
    folder = tmp_path / "proc/driver/nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(f"{line}\nGCC version:  gcc version 13.2.0 (Ubuntu 13.2.0-23ubuntu4)\n")
    assert installed_driver(tmp_path) == version


def test_without_a_driver_there_is_no_version(tmp_path: Path) -> None:
    assert installed_driver(tmp_path) == ""


def letters(gpus: tuple[Gpu, ...]) -> str:
    return "".join(gpu.uuid[4] for gpu in gpus)


def test_devices_are_numbered_in_pci_order_and_tell_where_they_are(machine: Path) -> None:
    gpus = visible_gpus({}, root=machine)
    assert letters(gpus) == "abcd"
    assert [gpu.number for gpu in gpus] == [0, 1, 2, 3]
    assert [gpu.numa_node for gpu in gpus] == [0, 0, 1, None]
    assert {gpu.name for gpu in gpus} == {"NVIDIA H200"}


def test_a_machine_without_a_driver_has_none(tmp_path: Path) -> None:
    assert visible_gpus({}, root=tmp_path) == ()


def test_devices_that_a_container_was_not_given_do_not_count(machine: Path) -> None:
    (machine / "dev" / "nvidia1").unlink()
    gpus = visible_gpus({}, root=machine)
    assert (letters(gpus), [gpu.number for gpu in gpus]) == ("bcd", [0, 1, 2])


def test_a_device_that_the_driver_leaves_alone_does_not_count(machine: Path) -> None:
    add_gpu(machine, "0000:01:00.0", 4, "e", excluded="Yes")
    assert letters(visible_gpus({}, root=machine)) == "abcd"


def test_where_proc_is_hidden_the_device_files_count(tmp_path: Path) -> None:
    for minor in (10, 2):
        add_device_file(tmp_path, minor)
    assert visible_gpus({}, root=tmp_path) == (Gpu(0), Gpu(1))


@pytest.mark.parametrize(
    ("chosen", "left"),
    [
        ("2,0", "ca"),
        (" 1 , 3 ", "bd"),
        ("", ""),
        ("-1", ""),
        ("0,-1,1", "a"),
        ("0,7,1", "a"),
        ("0,0", ""),
        ("NoDevFiles", ""),
        ("GPU-dddd,GPU-aaaaaaaa-0000", "da"),
        ("GPU-", ""),
    ],
)
def test_what_cuda_may_see_is_numbered_anew(machine: Path, chosen: str, left: str) -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": chosen}, root=machine)
    assert letters(gpus) == left
    assert [gpu.number for gpu in gpus] == list(range(len(left)))


def test_slices_of_a_device_are_devices(machine: Path) -> None:
    gpus = visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1111,MIG-2222"}, root=machine)
    assert gpus == (Gpu(0, name="MIG-1111"), Gpu(1, name="MIG-2222"))


def test_files_that_say_nothing_of_use_are_no_devices(machine: Path) -> None:
    (machine / "proc/driver/nvidia/gpus/0000:9a:00.0/information").write_text("")
    (machine / "proc/driver/nvidia/gpus/README").touch()
    assert letters(visible_gpus({}, root=machine)) == "abd"
