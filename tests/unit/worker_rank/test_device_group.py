"""A device group takes its memory when it is made, not when a plan first sums by it."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from hetero_worker.backends.base import HOST
from hetero_worker.distributed.device_group import CONNECTING_SIZES, DeviceGroup, connect

pytestmark = pytest.mark.unit


class PlayedGroup:
    def __init__(self) -> None:
        self.summed: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.device == HOST
        self.summed.append(tensor.numel())


def test_a_group_connects_by_sums_of_small_and_large_tensors() -> None:
    group = PlayedGroup()
    connect(cast(DeviceGroup, group), HOST)
    assert tuple(group.summed) == CONNECTING_SIZES
