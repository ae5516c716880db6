"""Device groups: when they take their memory, and sums in rank order."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from hetero_worker.distributed.device_group import (
    CONNECTING_SIZES,
    DeviceGroup,
    RankOrderGroup,
    in_rank_order,
    take_memory,
)
from hetero_worker.distributed.routes import Ranks
from hetero_worker.memory.streams import HOST

pytestmark = pytest.mark.unit


class PlayedGroup:
    """Rank 1's end of a group in which the others hold what they were given."""

    def __init__(self, others: dict[int, torch.Tensor]) -> None:
        self.ranks: Ranks = tuple(sorted({1, *others}))
        self.calls: list[object] = []
        self._others = others

    def all_reduce(self, tensor: torch.Tensor) -> None:
        raise AssertionError("the backend's order is not asked for")

    def reduce(self, tensor: torch.Tensor, root: int) -> None:
        raise AssertionError("the backend's order is not asked for")

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        self.calls.append(("broadcast", source))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor.clone() if rank == 1 else self._others[rank] for rank in self.ranks]


@pytest.mark.parametrize("root", [None, 0, 2])
def test_terms_are_added_in_rank_order_in_float32_and_rounded_once(root: int | None) -> None:
    """In bfloat16 256 + 1 is 256; in float32 the large ones go first, and 1 and 2 are left."""
    terms = {0: [256.0, 1e8], 2: [1.0, -1e8], 3: [1.0, 1.0]}
    own = torch.tensor([1.0, 2.0]).bfloat16()
    group = RankOrderGroup(PlayedGroup({rank: torch.tensor(term).bfloat16() for rank, term in terms.items()}))
    if root is None:
        group.all_reduce(own)
    else:
        group.reduce(own, root)
    # 259 is no bfloat16; 2 vanishes beside 1e8, which goes away after it.
    assert own.tolist() == [260.0, 1.0]


def test_everything_else_is_the_groups_own() -> None:
    played = PlayedGroup({0: torch.zeros(1), 2: torch.zeros(1)})
    group = RankOrderGroup(played)
    group.broadcast(torch.zeros(1), 2)
    assert played.calls == [("broadcast", 2)]
    assert len(group.all_gather(torch.ones(1))) == 3


def test_two_ranks_add_in_one_order_anyhow() -> None:
    two, three = PlayedGroup({0: torch.zeros(1)}), PlayedGroup({0: torch.zeros(1), 2: torch.zeros(1)})
    groups: dict[Ranks, DeviceGroup] = {two.ranks: two, three.ranks: three}
    ordered = in_rank_order(groups)
    assert ordered[two.ranks] is two
    assert isinstance(ordered[three.ranks], RankOrderGroup)


class ConnectingGroup:
    def __init__(self) -> None:
        self.summed: list[int] = []

    def all_reduce(self, tensor: torch.Tensor) -> None:
        assert tensor.device == HOST
        self.summed.append(tensor.numel())


def test_a_group_connects_by_sums_of_small_and_large_tensors() -> None:
    """So it takes its memory when it is made, not when a plan first sums by it."""
    group = ConnectingGroup()
    take_memory(cast(DeviceGroup, group), HOST)
    assert tuple(group.summed) == CONNECTING_SIZES
