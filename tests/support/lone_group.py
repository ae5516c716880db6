"""The groups of a rank that is alone, for tests to play others in."""

from __future__ import annotations

from hetero_api.v1 import ranks_pb2
from hetero_worker.distributed.coordinator import GroupCoordinator
from hetero_worker.distributed.rendezvous import GroupRequest


class LoneGroup(GroupCoordinator):
    """It meets at once, and needs no socket."""

    def __init__(self) -> None:
        request = GroupRequest(
            epoch=1, rank=0, world_size=1, store_address="", kind_asked=ranks_pb2.EXCHANGE_KIND_SHM, segment_name="",
            timeout_s=1.0, host="127.0.0.1",
        )  # fmt: skip
        super().__init__(request, None)
