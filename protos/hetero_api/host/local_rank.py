"""Which device of its host a rank computes on.

Replicas of a model (data parallel, DP) share a host's devices one after another: the first replica's ranks take the
first tp · pp devices, the second's the next ones. A rank knows its place within its replica only, so the device's
index is that place after those of the replicas before it on the host:

    device index = dp_local_rank · (tp_size · pp_size) + local_rank

Ranks on host cores have no such index: their cores are given to them.
"""

from __future__ import annotations


def dp_adjusted_local_rank(*, dp_local_rank: int, tp_size: int, pp_size: int, local_rank: int) -> int:
    """Index of the device, among those of the host.

    `dp_local_rank` numbers the replicas on this host from 0; a replica has `tp_size` · `pp_size` ranks, all on this
    host, which `local_rank` numbers from 0. Raises ValueError when the numbers cannot be of one replica.
    """
    for name, size in {"tp_size": tp_size, "pp_size": pp_size}.items():
        if size < 1:
            raise ValueError(f"{name} is {size}; it is at least 1")
    if dp_local_rank < 0:
        raise ValueError(f"dp_local_rank is {dp_local_rank}; it is at least 0")
    ranks = tp_size * pp_size
    if not 0 <= local_rank < ranks:
        raise ValueError(f"local_rank is {local_rank}; a replica of {tp_size} x {pp_size} ranks has 0 to {ranks - 1}")
    return dp_local_rank * ranks + local_rank
