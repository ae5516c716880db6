"""The judge of statuses, and the list of what `make chaos` plays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from tests.chaos.crowd import Answer, Ending, unexpected
from tests.chaos.play import all_pairs
from tests.chaos.statuses import DEATH_S, GATEWAY_FROZEN_S, RANK_FROZEN_S, Claims, RecordClaim, TopologyClaim, Wound

pytestmark = pytest.mark.unit

PROCESSES = {"gateway": 1, "cpu-0": 2}
KILLED = Wound("cpu-0", 2, since_s=10.0)


def claim(asked_s: float, **changes: Any) -> TopologyClaim:
    fields: dict[str, Any] = {
        "asked_s": asked_s, "gateway": 1, "state": GroupState.READY, "epoch": 1, "joined": (True,),
        "processes": PROCESSES,
    }  # fmt: skip
    return TopologyClaim(**fields | changes)


def judged(*topologies: TopologyClaim, records: tuple[RecordClaim, ...] = (), wound: Wound = KILLED) -> list[str]:
    return Claims(list(topologies), list(records)).overclaims([wound])


def test_a_group_that_says_it_serves_with_a_dead_rank_claims_too_much() -> None:
    assert judged(claim(9.0), claim(10.0 + DEATH_S / 2)) == []
    assert judged(claim(9.0), claim(10.5 + DEATH_S)) == ["ready in epoch 1, 3.5 s after cpu-0 ended"]
    assert judged(claim(9.0), claim(10.5 + DEATH_S, state=GroupState.ASLEEP)) != []
    assert judged(claim(9.0), claim(10.5 + DEATH_S, state=GroupState.ABORTED)) == []
    assert judged(claim(9.0), claim(10.5 + DEATH_S, epoch=2)) == []


def test_a_frozen_rank_may_be_believed_in_for_as_long_as_its_silence_is_tolerated() -> None:
    frozen = Wound("cpu-0", 2, since_s=10.0, frozen=True)
    assert judged(claim(9.0), claim(10.0 + RANK_FROZEN_S - 1), wound=frozen) == []
    assert judged(claim(9.0), claim(10.0 + RANK_FROZEN_S + 1), wound=frozen) != []
    thawed = Wound("cpu-0", 2, since_s=10.0, frozen=True, until_s=11.0)
    assert judged(claim(9.0), claim(10.0 + RANK_FROZEN_S + 1), wound=thawed) == []


def test_the_launchers_record_is_judged_as_well() -> None:
    late = RecordClaim(10.5 + GATEWAY_FROZEN_S, "ready", PROCESSES)
    frozen = Wound("gateway", 1, since_s=10.0, frozen=True)
    assert judged(records=(late,), wound=frozen) == ["group.json is ready with gateway froze"]
    assert judged(records=(RecordClaim(late.asked_s, "recovering", PROCESSES),), wound=frozen) == []
    assert judged(records=(RecordClaim(late.asked_s, "ready", {"gateway": 7}),), wound=frozen) == []


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ([claim(1.0, joined=(True, False))], "with ranks"),
        ([claim(1.0, epoch=4), claim(2.0, epoch=3)], "epoch 3 after 4"),
        ([claim(1.0, rests=True, held_bytes=5)], "5 bytes held"),
    ],
)
def test_claims_that_cannot_be_true(claims: list[TopologyClaim], words: str) -> None:
    (problem,) = Claims(claims).overclaims([])
    assert words in problem


def test_only_clients_that_do_not_resume_may_lose_a_request_with_its_gateway() -> None:
    lost = [Answer(client, Ending.FAILED, "gone", 0.0, 1.0) for client in ("grpc", "resuming")]
    assert unexpected(lost, may_fail=True, may_refuse=True) == ["resuming failed: gone"]
    assert len(unexpected(lost, may_fail=False, may_refuse=True)) == 2
    wrong = Answer("grpc", Ending.WRONG, "another text", 0.0, 1.0)
    assert unexpected([wrong], may_fail=True, may_refuse=True) == ["grpc wrong: another text"]
    refused = Answer("http", Ending.REFUSED, "503", 0.0, 1.0)
    assert unexpected([refused], may_fail=True, may_refuse=False) == ["http refused: 503"]


def test_there_are_two_hundred_pairs_and_each_has_a_name_of_its_own() -> None:
    names = Counter(pair.name for pair in all_pairs())
    assert len(names) >= 200
    assert set(names.values()) == {1}
    assert {pair.moment.name for pair in all_pairs() if pair.fault.name == "kill leader"} >= {"prefill", "asleep"}
