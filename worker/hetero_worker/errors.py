"""Errors of a rank.

HeteroError (hetero_api)
└── WorkerError
    ├── ExchangeError
    │   ├── ExchangeAborted    the epoch ended while, or before, the call
    │   ├── ExchangeTimeout    a peer did not come in time
    │   ├── PeerLost           a peer's process is gone
    │   └── SegmentNotShared   ranks do not see the same shared memory
    ├── PinningError           cores or memory cannot be bound as required
    ├── DeviceError            the device that the rank is to compute on is not there
    ├── ProtocolError          the gateway sent something that does not fit the rank's state
    ├── MemoryBudgetError      weights or cache do not fit the rank's memory
    ├── CommandRefused         a command does not fit what the rank holds
    ├── WeightsChangedError    files are not those that the rank joined with, or went to sleep with
    └── WeightsDamagedError    weights in memory are not those that went to sleep
"""

from __future__ import annotations

from hetero_api.errors import HeteroError


class WorkerError(HeteroError):
    """Root of a rank's own errors."""


class ExchangeError(WorkerError):
    """An exchange between ranks failed."""


class ExchangeAborted(ExchangeError):
    """The epoch was aborted."""


class ExchangeTimeout(ExchangeError):
    """A peer did not come within the group's timeout."""


class PeerLost(ExchangeError):
    """A rank that others wait for has ended, or left the group: its hold on the segment or its connections are gone."""


class SegmentNotShared(ExchangeError):
    """A rank finds another segment than rank 0 made under its name: they do not share that memory."""


class PinningError(WorkerError):
    """Cores or memory cannot be bound as the policy requires."""


class DeviceError(WorkerError):
    """The rank's device is not there, or not usable."""


class ProtocolError(WorkerError):
    """A message of the gateway does not fit: wrong epoch, wrong order, unknown slot."""


class MemoryBudgetError(WorkerError):
    """Weights or KV cache do not fit the memory that the rank was given."""


class CacheLostError(WorkerError):
    """The KV cache was dropped for another, and neither can be allocated."""


class CommandRefused(WorkerError):
    """A command does not fit what the rank holds; nothing was changed."""


class WeightsChangedError(WorkerError):
    """The model's files are not what they were when the rank joined its group, or went to sleep."""


class WeightsDamagedError(WorkerError):
    """Weights that were kept in memory during sleep compute something else than before it."""
