"""Which platform a rank of a mixed group computes on.

Ranks [0, num_gpu_ranks) of a group are GPU ranks, all others compute on host cores: the gateway numbers them so. A
process computes on one device, which it was started for, and is told its number later, in each epoch anew. Here the two
meet: by its number the rank gets the platform of that kind, and a process that has no device of that kind is refused.
Nobody assumes anything of numbers of devices, and no process makes a platform of another kind than its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from hetero_api.v1 import ranks_pb2
from hetero_worker.errors import ProtocolError
from hetero_worker.platforms.base import Platform

_NAMES = {ranks_pb2.DEVICE_KIND_CUDA: "a GPU", ranks_pb2.DEVICE_KIND_CPU: "host cores"}


def kind_of_rank(rank: int, *, num_gpu_ranks: int) -> ranks_pb2.DeviceKind.ValueType:
    """The kind of device that a rank computes on."""
    return ranks_pb2.DEVICE_KIND_CUDA if rank < num_gpu_ranks else ranks_pb2.DEVICE_KIND_CPU


@dataclass(frozen=True, slots=True)
class HeterogeneousPlatform:
    """A group's platforms, as one of its processes sees them: it can be the ranks of its own kind."""

    own: Platform
    pool: str
    """The process's; errors name it."""

    def of_rank(self, rank: int, *, num_gpu_ranks: int) -> Platform:
        """The platform of the rank. Raises ProtocolError when this process has no device of its kind."""
        kind = kind_of_rank(rank, num_gpu_ranks=num_gpu_ranks)
        if self.own.kind != kind:
            raise ProtocolError(
                f"pool {self.pool}: of a group with {num_gpu_ranks} GPU ranks, rank {rank} computes on {_NAMES[kind]}, "
                f"but this process was started for {_NAMES[self.own.kind]}; the pool's type and its ranks' devices "
                "must agree"
            )
        return self.own
