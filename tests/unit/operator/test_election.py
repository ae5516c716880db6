"""The election: one leader at most, whatever fails, and one again soon after it was lost."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hetero_operator.cluster.fence import Fence
from hetero_operator.cluster.transport import Transport
from hetero_operator.config import LeaseConfig
from hetero_operator.election import Election
from hetero_operator.errors import NotLeading
from tests.support.api_stand_in import ApiStandIn, Fault, refusal

PATH = "/apis/coordination.k8s.io/v1/namespaces/default/leases/op"


class FakeTime:
    """One clock for all candidates of a test."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Candidate:
    """One operator of several."""

    def __init__(self, server: ApiStandIn, identity: str, clock: FakeTime) -> None:
        self.fence = Fence(clock=clock)
        self.api: Transport = server.client(self.fence)
        config = LeaseConfig(name="op", namespace="default", identity=identity)
        self.election = Election(self.api, config, self.fence, clock=clock)

    async def attempt(self) -> bool:
        await self.election.attempt()
        return self.election.leading


@pytest.fixture
def clock() -> FakeTime:
    return FakeTime()


@pytest.fixture
async def server() -> AsyncIterator[ApiStandIn]:
    async with ApiStandIn() as server:
        yield server


@pytest.fixture
async def pair(server: ApiStandIn, clock: FakeTime) -> AsyncIterator[tuple[Candidate, Candidate]]:
    one, two = Candidate(server, "one", clock), Candidate(server, "two", clock)
    yield one, two
    await one.api.aclose()
    await two.api.aclose()


async def test_the_first_leads_and_the_second_waits(pair: tuple[Candidate, Candidate]) -> None:
    one, two = pair
    assert await one.attempt()
    assert not await two.attempt()
    assert (one.fence.is_open, two.fence.is_open) == (True, False)


async def test_a_lease_that_is_renewed_is_never_taken(pair: tuple[Candidate, Candidate], clock: FakeTime) -> None:
    one, two = pair
    for _ in range(30):
        assert await one.attempt()
        assert not await two.attempt()
        clock.now += 2.0


async def test_a_dead_leader_s_lease_is_taken_when_its_time_is_over_and_not_before(
    pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, two = pair
    await one.attempt()
    await two.attempt()
    clock.now += 14.9
    assert not await two.attempt()
    assert not one.fence.is_open
    clock.now += 0.2
    assert await two.attempt()
    assert not await one.attempt()


async def test_a_fresh_candidate_watches_a_lease_for_its_whole_time_before_it_takes_it(
    server: ApiStandIn, pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, two = pair
    await one.attempt()
    clock.now += 3600.0
    assert not await two.attempt()
    clock.now += 15.0
    assert await two.attempt()
    assert server.objects[PATH]["spec"]["leaseTransitions"] == 2


async def test_of_two_that_take_it_at_the_same_moment_one_fails(
    server: ApiStandIn, pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, two = pair
    await server.put(PATH, {"spec": {"holderIdentity": ""}})
    server.faults.append(Fault("PUT", "leases", refusal(409, "Conflict")))
    assert not await one.attempt()
    assert await two.attempt()


async def test_writes_end_before_another_may_begin(pair: tuple[Candidate, Candidate], clock: FakeTime) -> None:
    one, _ = pair
    await one.attempt()
    assert one.fence.allowance_s() == 15.0
    clock.now += 9.9
    assert one.fence.allowance_s() == pytest.approx(5.1)
    clock.now += 0.2
    with pytest.raises(NotLeading):
        await one.api.create("/api/v1/namespaces/default/configmaps", {"metadata": {"name": "x"}})


async def test_a_server_that_is_away_costs_the_lead_but_not_the_process(
    server: ApiStandIn, pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, _ = pair
    await one.attempt()
    await server.stop()
    clock.now += 5.0
    assert await one.attempt()
    clock.now += 6.0
    assert not await one.attempt()
    clock.now += 180.0
    assert not await one.attempt()
    await server.start()
    assert await one.attempt()


async def test_one_failed_renewal_is_no_reason_to_stop(
    server: ApiStandIn, pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, _ = pair
    await one.attempt()
    server.faults.append(Fault("PUT", "leases", refusal(500)))
    clock.now += 2.0
    assert await one.attempt()
    assert one.fence.allowance_s() == 13.0


async def test_a_lease_that_another_took_meanwhile_ends_the_lead_at_once(
    server: ApiStandIn, pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, _ = pair
    await one.attempt()
    await server.put(PATH, {"spec": {"holderIdentity": "stranger", "leaseDurationSeconds": 15}})
    assert not await one.attempt()
    assert not one.fence.is_open


async def test_who_stops_gives_it_back_and_the_next_need_not_wait(
    pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, two = pair
    await one.attempt()
    await two.attempt()
    await one.election.release()
    assert not one.fence.is_open
    assert await two.attempt()


async def test_who_does_not_lead_gives_nothing_back(server: ApiStandIn, pair: tuple[Candidate, Candidate]) -> None:
    one, two = pair
    await one.attempt()
    await two.attempt()
    await two.election.release()
    assert server.objects[PATH]["spec"]["holderIdentity"] == "one"


async def test_the_same_identity_takes_its_own_lease_after_a_crash(
    server: ApiStandIn, pair: tuple[Candidate, Candidate], clock: FakeTime
) -> None:
    one, _ = pair
    await one.attempt()
    again = Candidate(server, "one", clock)
    assert await again.attempt()
    await again.api.aclose()


async def test_change_of_lead_is_told(pair: tuple[Candidate, Candidate], clock: FakeTime) -> None:
    one, _ = pair
    await one.attempt()
    assert one.election.changed.is_set()
