"""The NVIDIA devices that processes of this user see here, as CUDA numbers them, without CUDA.

What places ranks must not load a driver's library: that takes seconds, memory on every device, and makes a context. The
kernel module tells the same in files:

    /proc/driver/nvidia/gpus/<PCI address>/information     model, UUID, the N of /dev/nvidiaN
    /dev/nvidiaN                                           there, if this container was given the device
    /sys/bus/pci/devices/<PCI address>/numa_node           its NUMA node, -1 where the firmware tells none

CUDA numbers devices from 0 in PCI order if `IN_PCI_ORDER` is set, which the starter of ranks has to do,
after CUDA_VISIBLE_DEVICES chose and ordered them. Where a container hides /proc/driver, only the device files are left:
then devices have no PCI address, and their order is that of the files' numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from hetero_api.host.topology import list_names, pci_numa_node, read_text

ENV_VISIBLE_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
IN_PCI_ORDER: Final[Mapping[str, str]] = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment in which CUDA numbers devices as here."""

_DEVICE_FILE: Final = re.compile(r"^nvidia(\d+)$")
_DRIVER_VERSION: Final = re.compile(r"^NVRM version:.*?\s(\d+(?:\.\d+)+)\s", re.MULTILINE)
_PCI_ADDRESS: Final = re.compile(r"^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device. What the kernel does not tell is "" or None."""

    number: int
    """CUDA's: N of "cuda:N"."""
    name: str = ""
    uuid: str = ""
    numa_node: int | None = None


def visible_gpus(environment: Mapping[str, str], *, root: Path = Path("/")) -> tuple[Gpu, ...]:
    """All of them, by number; none where there is no driver. `root` is where /proc, /dev and /sys are. Never raises."""
    present = _present(root)
    chosen = environment.get(ENV_VISIBLE_DEVICES)
    seen = present if chosen is None else _chosen(present, chosen)
    return tuple(replace(gpu, number=number) for number, gpu in enumerate(seen))


def installed_driver(root: Path = Path("/")) -> str:
    """Return the version of NVIDIA's kernel module, "580.65.06"; "" if there is none or the files do not tell."""
    found = _DRIVER_VERSION.search(read_text(root / "proc/driver/nvidia/version"))
    return found[1] if found else ""


def _present(root: Path) -> list[Gpu]:
    """Return the devices that this container was given, in PCI order."""
    files = _device_files(root / "dev")
    known = root / "proc/driver/nvidia/gpus"
    addresses = [name for name in list_names(known) if _PCI_ADDRESS.match(name)]
    if not addresses:
        return [Gpu(number) for number in files]
    found: list[Gpu] = []
    for address in sorted(addresses, key=lambda name: [int(part, 16) for part in re.split("[:.]", name)]):
        information = _information(known / address / "information")
        minor = information.get("Device Minor", "")
        if minor.isdecimal() and int(minor) in files and information.get("GPU Excluded", "No") == "No":
            node = pci_numa_node(address, root=root / "sys/bus/pci/devices")
            found.append(Gpu(len(found), information.get("Model", ""), information.get("GPU UUID", ""), node))
    return found


def _chosen(present: Sequence[Gpu], text: str) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES names, in its order: up to the first that is none; [] if one is named twice."""
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in text.split(",")):
        gpu = _named(present, entry)
        if gpu is None:
            break
        chosen.append(gpu)
    names = [(gpu.number, gpu.name) for gpu in chosen]
    return chosen if len(set(names)) == len(names) else []


def _named(present: Sequence[Gpu], entry: str) -> Gpu | None:
    """By number, or by the begin of a UUID that only one has. The place of a MIG slice is unknown."""
    if entry.isdecimal():
        return present[int(entry)] if int(entry) < len(present) else None
    if entry.startswith("MIG-") and present:
        return Gpu(-1, name=entry)
    matching = [gpu for gpu in present if entry.startswith("GPU-") and gpu.uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _device_files(folder: Path) -> list[int]:
    return sorted(int(match[1]) for name in list_names(folder) if (match := _DEVICE_FILE.match(name)))


def _information(path: Path) -> dict[str, str]:
    pairs = (line.partition(":") for line in read_text(path).splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}
