"""What moving activations costs: rounds among ranks, lending to helpers and back, hops between stages.

Between CPU ranks, and between the leader of the GPU ranks and CPU ranks, tensors go through host memory at the times
measured for an all-reduce of all ranks; one way is half of it. To each comes what ranks wait for one another, since
none takes the same time twice. Among GPU ranks the device group's times count. What a GPU rank exchanges through the
host is copied there and back besides.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_placement.hardware import DeviceKind, Hardware


class ExchangeCosts:
    """Seconds by ranks and bytes."""

    def __init__(self, hardware: Hardware) -> None:
        self._ranks = hardware.ranks
        self._host = hardware.host_exchange
        self._device = hardware.device_exchange
        meetings = [rank.speeds.meeting_s for rank in hardware.ranks if rank.kind is DeviceKind.CPU]
        # Who is fastest waits longest, and that is in what the slowest takes.
        self._wait_s = max(0.0, min(meetings, default=0.0) - self._host.seconds(0))
        """Of ranks for one another, before a round."""

    def among(self, ranks: Sequence[int], num_bytes: float) -> float:
        """An all-reduce: GPU ranks sum among themselves, their first one exchanges with CPU ranks."""
        if len(ranks) < 2:
            return 0.0
        gpus = [rank for rank in ranks if self._is_gpu(rank)]
        seconds = self._device.seconds(num_bytes) if len(gpus) > 1 else 0.0
        if len(gpus) == len(ranks):
            return seconds
        staged = self.from_device_s(gpus[0], num_bytes) + self.to_device_s(gpus[0], num_bytes) if gpus else 0.0
        return seconds + staged + self._meeting_s(num_bytes)

    def there_s(self, source: int, receivers: Sequence[int], num_bytes: float) -> float:
        """One rank sends the same to some."""
        if self._is_gpu(source) and all(map(self._is_gpu, receivers)):
            return self._device.seconds(num_bytes) / 2
        slowest = max((self.to_device_s(rank, num_bytes) for rank in receivers), default=0.0)
        return self.from_device_s(source, num_bytes) + self._meeting_s(num_bytes) / 2 + slowest

    def small_s(self, num_bytes: float) -> float:
        """A round of the whole group over little that is in host memory already."""
        return self._meeting_s(num_bytes) if len(self._ranks) > 1 else 0.0

    def from_device_s(self, rank: int, num_bytes: float) -> float:
        """To host memory; 0 where it is there."""
        speeds = self._ranks[rank].speeds
        if not self._is_gpu(rank):
            return 0.0
        return speeds.device_latency_s / 2 + _transfer(num_bytes, speeds.from_device_bandwidth)

    def to_device_s(self, rank: int, num_bytes: float) -> float:
        """From host memory; 0 where it stays there."""
        speeds = self._ranks[rank].speeds
        if not self._is_gpu(rank):
            return 0.0
        return speeds.device_latency_s / 2 + _transfer(num_bytes, speeds.to_device_bandwidth)

    def _meeting_s(self, num_bytes: float) -> float:
        """A round on the host, and what ranks wait for one another before it."""
        return self._host.seconds(num_bytes) + self._wait_s

    def _is_gpu(self, rank: int) -> bool:
        return self._ranks[rank].kind is DeviceKind.GPU


def _transfer(num_bytes: float, bandwidth: float) -> float:
    return num_bytes / bandwidth if bandwidth else 0.0
