"""Identity of a rank: its Hello, and what stays the same over its epochs."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hetero_api.contract import VERSION
from hetero_api.model_config import ModelConfig, model_fingerprint
from hetero_api.v1 import ranks_pb2
from hetero_worker.backends.base import DeviceBackend
from hetero_worker.checkpoints.checkpoint import Checkpoint
from hetero_worker.host.pinning import PinningReport
from hetero_worker.process.config import RankConfig

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Facts about a rank that stay the same over its epochs."""

    hello: ranks_pb2.Hello
    """Hello without store_address and held, which differ for every epoch."""
    model_dir: Path
    model_config: ModelConfig
    memory_bytes: int
    store_host: str
    backend: DeviceBackend
    """Device of this process; by its number in an epoch's group the rank must be of that kind."""
    open_weights: Callable[[Path], Checkpoint] = Checkpoint
    """Open the checkpoint in `model_dir`."""


def host_id(*, boot_id: Path = _BOOT_ID, shm: Path = _SHM) -> str:
    """Return an id that two processes share exactly if they run under one kernel and see the same /dev/shm.

    Containers of one machine that do not share /dev/shm have different ids: each tmpfs is a device of its own. A
    machine that lacks either file shares memory with nobody, and its id is random.
    """
    try:
        status = shm.stat()
        return f"{boot_id.read_text().strip()}:{status.st_dev:x}:{status.st_ino:x}"
    except OSError:
        return f"unshared:{uuid.uuid4().hex}"


def describe_device(
    backend: DeviceBackend, pinning: PinningReport, speeds: ranks_pb2.DeviceSpeeds
) -> ranks_pb2.DeviceReport:
    """Describe the rank's device and its measured speeds."""
    device = ranks_pb2.DeviceReport(
        kind=backend.kind, name=backend.name, memory_bytes=backend.memory_bytes, speeds=speeds
    )
    report_pinning(device, pinning)
    return device


def report_pinning(device: ranks_pb2.DeviceReport, pinning: PinningReport) -> None:
    """Write to `device` which cores and memory are bound."""
    device.cpus[:] = pinning.cpus
    device.numa_nodes[:] = pinning.numa_nodes
    device.pinned = pinning.pinned
    device.allowed_cpus = pinning.allowed
    device.pin_message = pinning.reason or f"memory: {pinning.memory}"


def make_hello(config: RankConfig, device: ranks_pb2.DeviceReport) -> ranks_pb2.Hello:
    """Return this process's Hello without store_address. Raises ModelError when there is no config.json."""
    return ranks_pb2.Hello(
        pool=config.pool,
        ordinal=config.ordinal,
        local_rank=config.local_rank,
        pod_name=config.pod_name,
        host_id=host_id(),
        instance_id=uuid.uuid4().hex,
        device=device,
        version=VERSION,
        model_fingerprint=model_fingerprint(config.model_dir),
    )
