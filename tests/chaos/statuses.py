"""All statuses that a group claims of itself, and whether any claimed more than was true.

A watcher asks without a pause: the gateway for its topology, and the launcher's record. A wound is what a fault did to
a process. The judge is a pure function of both. A claim counts from the moment at which it was asked for, so none is
blamed for what happened while its answer was on its way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from hetero_api.group_state import GroupState
from hetero_client import AdminClient
from hetero_client.errors import RequestError
from hetero_client.launcher.run_directory import GroupRecord
from tests.support.entered_thread import EnteredThread

LOOK_S: Final = 0.03
ANSWER_S: Final = 0.5
DEATH_S: Final = 3.0
"""From a process's end until nobody may claim that it serves: milliseconds, and what a busy machine adds."""
RANK_FROZEN_S: Final = 6.0
"""The gateway tolerates two seconds of a rank's silence."""
GATEWAY_FROZEN_S: Final = 20.0
"""The launcher tolerates fifteen seconds of the gateway's."""


@dataclass(frozen=True, slots=True)
class Wound:
    """Something that happened to a process. Times are monotonic seconds."""

    name: str
    pid: int
    since_s: float
    frozen: bool = False
    until_s: float = float("inf")

    @property
    def noticed_s(self) -> float:
        """From then on nobody may claim that the process serves."""
        if not self.frozen:
            return self.since_s + DEATH_S
        return self.since_s + (GATEWAY_FROZEN_S if self.name == "gateway" else RANK_FROZEN_S)


@dataclass(frozen=True, slots=True)
class TopologyClaim:
    """The gateway's word on the group; `gateway` is the pid that the record named before."""

    asked_s: float
    gateway: int
    state: GroupState
    epoch: int
    joined: tuple[bool, ...]
    processes: dict[str, int]
    """The launcher's record of the same moment, by name."""
    rests: bool = False
    held_bytes: int = 0
    """KV cache while it rests: at level 1 weights stay in host memory."""


@dataclass(frozen=True, slots=True)
class RecordClaim:
    """The launcher's word."""

    asked_s: float
    phase: str
    processes: dict[str, int]


@dataclass(frozen=True, slots=True)
class Claims:
    """Everything that was claimed, in order."""

    topologies: list[TopologyClaim] = field(default_factory=list)
    records: list[RecordClaim] = field(default_factory=list)

    def overclaims(self, wounds: Iterable[Wound]) -> list[str]:
        """Return claims that said more than was true."""
        of_wounds = (text for wound in wounds for text in _of_wound(wound, self.topologies, self.records))
        return list(dict.fromkeys([*_of_counts(self.topologies), *of_wounds]))


def _of_counts(topologies: Sequence[TopologyClaim]) -> list[str]:
    problems, epochs = [], dict[int, int]()
    for claim in topologies:
        if claim.state.is_serving and not all(claim.joined):
            problems.append(f"{claim.state} in epoch {claim.epoch} with ranks {claim.joined}")
        if claim.epoch < epochs.get(claim.gateway, 0):
            problems.append(f"epoch {claim.epoch} after {epochs[claim.gateway]} of the same gateway")
        if claim.rests and claim.held_bytes:
            problems.append(f"rests with {claim.held_bytes} bytes held")
        epochs[claim.gateway] = max(claim.epoch, epochs.get(claim.gateway, 0))
    return problems


def _of_wound(wound: Wound, topologies: Sequence[TopologyClaim], records: Sequence[RecordClaim]) -> list[str]:
    """Claims that a process serves, by those who should have noticed its wound."""
    if wound.until_s <= wound.noticed_s:
        return []  # it was over before anybody had to notice
    problems = []
    late = [claim for claim in records if wound.noticed_s < claim.asked_s < wound.until_s]
    if any(claim.phase == "ready" and claim.processes.get(wound.name) == wound.pid for claim in late):
        problems.append(f"group.json is ready with {wound.name} {_state(wound)}")
    before = [claim for claim in topologies if claim.asked_s < wound.since_s]
    if wound.name == "gateway" or not before or wound.name not in before[-1].processes:
        return problems  # helpers of the launcher serve nobody
    held = before[-1]
    for claim in topologies:
        is_same = (claim.gateway, claim.epoch) == (held.gateway, held.epoch)
        if is_same and claim.state.is_serving and wound.noticed_s < claim.asked_s < wound.until_s:
            after_s = claim.asked_s - wound.since_s
            problems.append(f"{claim.state} in epoch {claim.epoch}, {after_s:.1f} s after {wound.name} {_state(wound)}")
            break
    return problems


def _state(wound: Wound) -> str:
    return "froze" if wound.frozen else "ended"


class Watcher(EnteredThread):
    """Records claims on a thread of its own while it is entered."""

    def __init__(self, admin: Callable[[], AdminClient], record: Callable[[], GroupRecord | None]) -> None:
        super().__init__()
        self._admin, self._record = admin, record
        self.claims = Claims()

    def _work(self) -> None:
        with self._admin() as admin:
            while not self._leaving.wait(LOOK_S):
                asked_s = time.monotonic()
                record = self._record()
                if record is None:
                    continue
                self.claims.records.append(RecordClaim(asked_s, record.phase, record.processes))
                try:
                    seen = admin.topology(timeout_s=ANSWER_S, wait_for_ready=True)
                except RequestError:
                    continue
                rests = seen.idle is not None and seen.idle.rests
                self.claims.topologies.append(
                    TopologyClaim(
                        asked_s,
                        record.processes.get("gateway", 0),
                        seen.state,
                        seen.epoch,
                        tuple(rank.joined for rank in seen.ranks),
                        record.processes,
                        rests=rests,
                        held_bytes=sum(rank.kv_bytes for rank in seen.ranks) if rests else 0,
                    )
                )
