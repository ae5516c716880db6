"""One request, one answer: 100 seeded requests through the whole model, alone and in batches, on one to four ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from hetero_api.v1 import ranks_pb2
from tests.support.rank_group import PlanBuilder, RankGroup
from tests.support.rank_shares import Shares, layers_on
from tests.support.tiny_checkpoints import VOCAB_SIZE, save_tiny

NUM_REQUESTS = 100
OUTPUT = 6
BATCH = 8
WHOLE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(VOCAB_SIZE,))
LAYOUTS = {
    "one rank": WHOLE,
    "two uneven ranks": Shares(kv_heads=((5, 3),), mlp_columns=((10, 40),), vocab_rows=(VOCAB_SIZE - 100, 100)),
    "four ranks, some without heads, columns or rows": Shares(
        kv_heads=((3, 0, 4, 1),), mlp_columns=((20, 20, 0, 10),), vocab_rows=(0, VOCAB_SIZE - 70, 64, 6)
    ),
    "a pipeline of two": layers_on(0, 1, world_size=2),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    prompt: tuple[int, ...]
    sampling: ranks_pb2.Sampling


def requests() -> list[Asked]:
    chooser = random.Random(7)
    return [
        Asked(
            tuple(chooser.randrange(VOCAB_SIZE) for _ in range(chooser.randint(1, 12))),
            ranks_pb2.Sampling(
                temperature=chooser.choice((0.0, 0.7, 1.0, 1.5)),
                top_k=chooser.choice((0, 0, 5, 40)),
                top_p=chooser.choice((1.0, 1.0, 0.9)),
                min_p=chooser.choice((0.0, 0.0, 0.05)),
                presence_penalty=chooser.choice((0.0, 0.5)),
                repetition_penalty=chooser.choice((1.0, 1.2)),
                seed=chooser.getrandbits(64),
            ),
        )
        for _ in range(NUM_REQUESTS)
    ]


def answers(group: RankGroup, batches: Sequence[Sequence[int]], asked: Sequence[Asked]) -> dict[int, list[int]]:
    """Tokens of each request when the batches run one after another; within one, requests begin a step apart."""
    plan = PlanBuilder(group)
    output: dict[int, list[int]] = {}
    for batch in batches:
        for step in range(len(batch) + OUTPUT - 1):
            for slot, number in enumerate(batch):
                if slot == step:
                    plan.start(slot, asked[number].prompt, sampling=asked[number].sampling)
                if slot <= step < slot + OUTPUT:
                    plan.schedule(slot)
            plan.run()
        for slot, number in enumerate(batch):
            output[number] = plan.sequences[slot].tokens[len(asked[number].prompt) :]
            plan.release(slot)
    return output


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama")).directory


@pytest.fixture(scope="module")
def alone(llama: Path) -> dict[int, list[int]]:
    group = RankGroup(llama, WHOLE, num_blocks=800)
    return answers(group, [[number] for number in range(NUM_REQUESTS)], requests())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_100_seeded_requests_get_the_same_tokens_in_any_batch_on_any_layout(
    llama: Path, alone: dict[int, list[int]], layout: str
) -> None:
    order = random.Random(layout).sample(range(NUM_REQUESTS), NUM_REQUESTS)
    batches = [order[begin : begin + BATCH] for begin in range(0, NUM_REQUESTS, BATCH)]
    group = RankGroup(llama, LAYOUTS[layout], num_blocks=800)
    assert answers(group, batches, requests()) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) > NUM_REQUESTS // 2
