"""Device indices of data-parallel replicas that share a host."""

from __future__ import annotations

import pytest

from hetero_api.host.local_rank import dp_adjusted_local_rank

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("tp_size", "pp_size", "replicas"), [(1, 1, 4), (2, 1, 2), (1, 2, 3), (2, 2, 2), (3, 1, 2)])
def test_replicas_take_a_hosts_devices_one_after_another(tp_size: int, pp_size: int, replicas: int) -> None:
    indices = [
        dp_adjusted_local_rank(dp_local_rank=replica, tp_size=tp_size, pp_size=pp_size, local_rank=local_rank)
        for replica in range(replicas)
        for local_rank in range(tp_size * pp_size)
    ]
    assert indices == list(range(replicas * tp_size * pp_size))


@pytest.mark.parametrize(
    ("numbers", "complaint"),
    [
        ((0, 2, 2, 4), "local_rank is 4; a replica of 2 x 2 ranks has 0 to 3"),
        ((0, 1, 1, -1), "local_rank is -1"),
        ((-1, 1, 1, 0), "dp_local_rank is -1"),
        ((0, 0, 1, 0), "tp_size is 0"),
        ((0, 1, 0, 0), "pp_size is 0"),
    ],
)
def test_numbers_that_are_of_no_replica_are_refused(numbers: tuple[int, int, int, int], complaint: str) -> None:
    dp_local_rank, tp_size, pp_size, local_rank = numbers
    with pytest.raises(ValueError, match=complaint):
        dp_adjusted_local_rank(dp_local_rank=dp_local_rank, tp_size=tp_size, pp_size=pp_size, local_rank=local_rank)
