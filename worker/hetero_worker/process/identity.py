"""Who a rank is: what it says in Hello, apart from where its store would listen."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

from hetero_api.contract import VERSION
from hetero_api.model_config import model_fingerprint
from hetero_api.v1 import ranks_pb2
from hetero_worker.platforms.base import Platform
from hetero_worker.platforms.pinning import PinningReport
from hetero_worker.process.config import RankConfig

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_SHM: Final = Path("/dev/shm")


def host_id(*, boot_id: Path = _BOOT_ID, shm: Path = _SHM) -> str:
    """Equal for two processes exactly if they run under one kernel and see the same /dev/shm.

    Containers of one machine that do not share /dev/shm have different ones: each tmpfs is a device of its
    own. A machine that lacks either shares memory with nobody, and its id is random.
    """
    try:
        status = shm.stat()
        return f"{boot_id.read_text().strip()}:{status.st_dev:x}:{status.st_ino:x}"
    except OSError:
        return f"unshared:{uuid.uuid4().hex}"


def describe_device(
    platform: Platform, pinning: PinningReport, speeds: ranks_pb2.DeviceSpeeds
) -> ranks_pb2.DeviceReport:
    """What the rank computes on, and how fast that was measured to be."""
    device = ranks_pb2.DeviceReport(
        kind=platform.kind, name=platform.name, memory_bytes=platform.memory_bytes, speeds=speeds
    )
    tell_pinning(device, pinning)
    return device


def tell_pinning(device: ranks_pb2.DeviceReport, pinning: PinningReport) -> None:
    """Say in `device` what is bound, whatever it said before."""
    device.cpus[:] = pinning.cpus
    device.numa_nodes[:] = pinning.numa_nodes
    device.pinned = pinning.pinned
    device.allowed_cpus = pinning.allowed
    device.pin_message = pinning.reason or f"memory: {pinning.memory}"


def introduce(config: RankConfig, device: ranks_pb2.DeviceReport) -> ranks_pb2.Hello:
    """The Hello of this process, store_address left open. Raises ModelError when there is no config.json."""
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
