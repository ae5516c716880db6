"""What FormGroup says, as far as groups go."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.shm_exchange import AREA_BYTES
from hetero_worker.distributed.shm_segment import SHM_FOLDER
from hetero_worker.native.build import EXCHANGE_LIBRARY
from hetero_worker.platforms.base import HOST

_GLOO_GRACE_S: Final = 2.0
"""Gloo waits this much longer than the exchange, so that the exchange is the one to name the late rank."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One rank's place in an epoch, and how its group is to be made."""

    epoch: int
    rank: int
    world_size: int
    store_address: str
    kind_asked: ranks_pb2.ExchangeKind.ValueType
    """SHM: shared memory if all ranks can, else Gloo. GLOO: Gloo."""
    segment_name: str
    timeout_s: float
    host: str
    """Address of this machine on the network that ranks meet on: nothing listens on another."""
    num_gpu_ranks: int = 0
    """Ranks [0, num_gpu_ranks) compute on GPUs."""
    device: torch.device = HOST
    """What this rank computes on."""
    device_backend: str | None = None
    """torch's backend among GPU ranks: "nccl", or "gloo" for pseudo-GPU ranks; None on host cores."""
    shm_folder: Path = SHM_FOLDER
    area_bytes: int = AREA_BYTES
    native_library: Path = EXCHANGE_LIBRARY
    """Library for the shared-memory exchange."""

    @property
    def is_gpu_rank(self) -> bool:
        return self.rank < self.num_gpu_ranks

    @property
    def gloo_timeout(self) -> timedelta:
        return timedelta(seconds=self.timeout_s + _GLOO_GRACE_S)
