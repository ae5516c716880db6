"""GroupState: how a group of ranks stands, as its gateway, the operator and clients call it."""

from __future__ import annotations

from enum import StrEnum

from hetero_api.v1 import admin_pb2


class GroupState(StrEnum):
    """State of a group. admin.proto explains each one."""

    NEW = "new"
    FORMING = "forming"
    LOADING = "loading"
    READY = "ready"
    ASLEEP = "asleep"
    ABORTED = "aborted"
    DRAINING = "draining"
    CLOSED = "closed"

    @property
    def is_serving(self) -> bool:
        """Whether the group answers requests, though it may have to wake up first."""
        return self in (GroupState.READY, GroupState.ASLEEP)

    def to_proto(self) -> admin_pb2.GroupState.ValueType:
        """Return the value that messages carry."""
        return admin_pb2.GroupState.Value(f"GROUP_STATE_{self.name}")

    @classmethod
    def from_proto(cls, value: admin_pb2.GroupState.ValueType) -> GroupState:
        """Return the state of a message; NEW for a value that this version does not know."""
        known = admin_pb2.GroupState.DESCRIPTOR.values_by_number.get(value)
        name = known.name.removeprefix("GROUP_STATE_") if known is not None else ""
        return cls.__members__.get(name, cls.NEW)
