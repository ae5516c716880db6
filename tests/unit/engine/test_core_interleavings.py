"""Whatever happens in whatever order: every accepted request ends exactly once, with the tokens that are its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

import pytest

from hetero_api.v1 import inference_pb2
from hetero_gateway.engine.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    EngineUnavailable,
    InvalidRequest,
    QueueFull,
)
from hetero_gateway.engine.request import GenerationRequest
from tests.unit.engine.core_setup import TOKENIZER, VOCAB_SIZE, Answer, Engine, alone, engine, read, turn_loop
from tests.unit.engine.engine_setup import engine_config, generation

pytestmark = pytest.mark.unit

ACTIONS = 200
MAX_TOKENS = 14


@dataclass
class World:
    """A core to which things happen, and everything that was accepted."""

    engine: Engine
    chooser: random.Random
    now_s: float = 0.0
    accepted: list[tuple[GenerationRequest, asyncio.Task[Answer]]] = field(default_factory=list)
    has_group: bool = True
    inside_hold: asyncio.Event | None = None
    holding: list[asyncio.Task[None]] = field(default_factory=list)

    def submit(self) -> None:
        asked = self._request()
        with contextlib.suppress(DuplicateRequest, QueueFull, EngineUnavailable):
            stream = self.engine.core.submit(asked)
            self.accepted.append((asked, asyncio.create_task(read(stream))))

    def _request(self) -> GenerationRequest:
        chooser = self.chooser
        n = chooser.choice([1, 1, 2, 3])
        plain = generation(
            f"r{chooser.randrange(12)}",
            range(chooser.randrange(1, 14)),
            max_tokens=chooser.randrange(1, MAX_TOKENS),
            seed=chooser.randrange(5),
            n=n,
            priority=chooser.randrange(-2, 3),
            deadline_s=chooser.choice([None, None, self.now_s + chooser.random() * 3]),
            logprobs=chooser.choice([None, 0]),
        )
        if chooser.random() < 0.7:
            return plain
        most = plain.max_tokens or 1
        received = tuple(
            tuple(alone(plain, MAX_TOKENS, index=index)[: chooser.randrange(most + 1)]) for index in range(n)
        )
        return replace(plain, priority=0, received=received)

    def abort(self) -> None:
        self.engine.core.abort(f"r{self.chooser.randrange(12)}")

    def compute(self) -> None:
        if self.has_group and self.engine.ranks.can_do:
            self.engine.ranks.do_one()

    def pass_time(self) -> None:
        self.now_s += self.chooser.random()

    def lose(self) -> None:
        self.engine.core.lose("rank 1 died")
        self.has_group = False

    def break_group(self) -> None:
        self.engine.ranks.lose("rank 0 died")
        self.has_group = False

    def open(self) -> None:
        self.engine.new_group()
        self.engine.ranks.hold()
        self.has_group = True

    def hold(self) -> None:
        if self.inside_hold is None:
            self.inside_hold = asyncio.Event()
            self.holding.append(asyncio.create_task(self._hold(self.inside_hold)))
        else:
            self.inside_hold.set()
            self.inside_hold = None

    async def _hold(self, leave: asyncio.Event) -> None:
        with contextlib.suppress(Exception):
            async with self.engine.core.hold():
                await leave.wait()

    async def act(self) -> None:
        usual: list[Callable[[], object]] = [self.submit, self.compute, self.compute, self.compute, self.pass_time]
        rare: list[Callable[[], object]] = [self.abort, self.lose, self.break_group, self.open, self.open, self.hold]
        self.chooser.choice(usual if self.chooser.random() < 0.85 else rare)()
        await turn_loop(self.chooser.randrange(4))

    async def to_the_end(self) -> None:
        if self.inside_hold is not None:
            self.inside_hold.set()
        self.open()
        self.engine.ranks.let_go()
        await asyncio.gather(*(task for _, task in self.accepted), *self.holding)


def check(asked: GenerationRequest, answer: Answer) -> None:
    """What came is the beginning of what had to come, and all of it where nobody ended it before."""
    length = asked.max_tokens or 0
    for index in range(asked.n):
        received = asked.received[index] if asked.received else ()
        expected = alone(asked, length, index=index)
        came = [*received, *answer.tokens.get(index, [])]
        assert came == expected[: len(came)]
        text = TOKENIZER.detokenizer().push(received) + answer.texts.get(index, "")
        assert TOKENIZER.decode(came).startswith(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        if asked.sampling.HasField("num_logprobs"):
            assert [each.token_id for each in answer.logprobs.get(index, [])] == answer.tokens.get(index, [])
        end = answer.ends.get(index)
        if end is not None and end.reason != inference_pb2.FINISH_REASON_ABORT:
            assert came == expected
            assert end.usage.completion_tokens == length
    if answer.error is not None:
        assert isinstance(answer.error, DeadlineExceeded | EngineUnavailable | InvalidRequest)


async def _run(world: World, last: Callable[[], Awaitable[None]]) -> None:
    world.engine.ranks.hold()
    for _ in range(ACTIONS):
        await world.act()
    await last()
    for asked, task in world.accepted:
        check(asked, await task)


@pytest.mark.parametrize("seed", range(60))
async def test_every_accepted_request_ends_once_with_its_own_tokens(seed: int) -> None:
    chooser = random.Random(seed)
    config = engine_config(
        vocab_size=VOCAB_SIZE,
        max_num_seqs=chooser.choice([2, 4, 8]),
        max_num_batched_tokens=chooser.choice([8, 16, 64]),
        max_queued_requests=chooser.choice([2, 100]),
        max_steps_in_flight=chooser.choice([1, 2, 2]),
        pause_limit_s=2.0,
    )
    worlds: list[World] = []
    async with engine(config, clock=lambda: worlds[0].now_s if worlds else 0.0) as it:
        worlds.append(World(it, chooser))
        await _run(worlds[0], worlds[0].to_the_end)
        assert it.core.is_idle
        assert len(worlds[0].accepted) > 5


@pytest.mark.parametrize("seed", range(10))
async def test_a_core_that_ends_at_any_moment_ends_every_stream(seed: int) -> None:
    worlds: list[World] = []
    async with engine(clock=lambda: worlds[0].now_s if worlds else 0.0) as it:
        world = World(it, random.Random(seed))
        worlds.append(world)

        async def end() -> None:
            it.core.fail("the gateway is shutting down")
            if world.inside_hold is not None:
                world.inside_hold.set()
            await asyncio.gather(*world.holding)

        await _run(world, end)
