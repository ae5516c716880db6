"""Requests, admin RPCs and lost ranks in any order: every request ends once, with the tokens it gets alone."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from hetero_api.group_state import GroupState
from hetero_api.v1 import admin_pb2, inference_pb2
from hetero_gateway.engine.errors import EngineUnavailable, GroupLost
from hetero_gateway.group.errors import WrongState
from tests.unit.engine.engine_setup import VOCAB_SIZE, generation
from tests.unit.engine.fake_ranks import tokens_alone
from tests.unit.group.group_setup import GroupBench, ObedientRank, collect, group_settings, wait_until, with_recovery

pytestmark = pytest.mark.unit

NUM_ACTIONS = 25
REFUSALS = (WrongState, GroupLost, EngineUnavailable)


@dataclass
class Storm:
    """One group's random life. `asked` are prompt length, seed and stream's task of each request."""

    bench: GroupBench
    chance: random.Random
    ranks: list[ObedientRank]
    asked: list[tuple[int, int, asyncio.Task[list[Any]]]] = field(default_factory=list)
    rpcs: list[asyncio.Task[None]] = field(default_factory=list)
    losses: int = 0

    async def act(self) -> None:
        action = self.chance.choices([self.submit, self.rpc, self.lose], weights=[6, 4, 1])[0]
        await action()
        for _ in range(self.chance.choice([0, 1, 5, 40])):
            await asyncio.sleep(0)

    async def submit(self) -> None:
        length, seed = self.chance.randrange(1, 20), self.chance.randrange(100)
        with suppress(EngineUnavailable):
            stream = self.bench.core.submit(generation(f"r{len(self.asked)}", range(length), max_tokens=12, seed=seed))
            self.asked.append((length, seed, asyncio.create_task(collect(stream))))

    async def rpc(self) -> None:
        rpcs, level = self.bench.rpcs, self.chance.choice([1, 2])
        layout = self.chance.choice([admin_pb2.CACHE_LAYOUT_PAGED, admin_pb2.CACHE_LAYOUT_CONTIGUOUS])
        choices: list[Callable[[], Awaitable[Any]]] = [
            lambda: rpcs.reset_cache(admin_pb2.ResetCacheRequest(layout=layout)),
            lambda: rpcs.sleep(admin_pb2.SleepRequest(level=level)),
            lambda: rpcs.wake_up(admin_pb2.WakeUpRequest()),
            lambda: rpcs.profile(admin_pb2.ProfileRequest(duration_s=0.001)),
        ]
        self.rpcs.append(asyncio.create_task(_unless_refused(self.chance.choice(choices)())))

    async def lose(self) -> None:
        """A rank dies; a new process takes its place."""
        ordinal = self.chance.randrange(2)
        survivor, epoch = self.ranks[1 - ordinal], self.bench.group.epoch
        self.ranks[ordinal].lose()
        self.losses += 1
        await self.bench.until(GroupState.ABORTED)
        await wait_until(lambda: survivor._ended_epoch >= epoch)
        self.ranks[ordinal] = self.bench.obedient(ordinal, instance=f"instance-{ordinal}-{self.losses}")
        await wait_until(lambda: self.bench.group.epoch > epoch)

    async def calm(self) -> None:
        """Everything ends, and everybody is awake."""
        await asyncio.gather(*self.rpcs)
        await wait_until(lambda: self.bench.group.state in (GroupState.READY, GroupState.ASLEEP))
        if self.bench.group.state is GroupState.ASLEEP:
            await self.bench.rpcs.wake_up(admin_pb2.WakeUpRequest())


async def _unless_refused(call: Awaitable[Any]) -> None:
    with suppress(*REFUSALS):
        await call


@pytest.mark.parametrize("seed", range(25))
async def test_whatever_happens_to_the_group_requests_get_their_tokens(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hetero_gateway.group.recovery.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("hetero_gateway.group.recovery.LONGEST_PAUSE_S", 0.002)
    async with GroupBench(with_recovery(group_settings(), max_restarts=1000)) as bench:
        storm = Storm(bench, random.Random(seed), list(await bench.ready()))
        for _ in range(NUM_ACTIONS):
            await storm.act()
        await storm.calm()
        for length, key, task in storm.asked:
            *events, last = await task
            tokens = [token for event in events for token in event.token_ids]
            assert tokens == tokens_alone(range(length), seed=key, count=12, vocab_size=VOCAB_SIZE)
            assert isinstance(last, inference_pb2.Finished)
        assert storm.asked
        assert bench.core.is_idle
        stats = bench.core.stats()
        assert stats.free_blocks == stats.num_blocks > 0
        assert bench.group.is_ready
