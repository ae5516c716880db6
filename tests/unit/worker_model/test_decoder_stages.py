"""A decoder spread over stages computes what transformers does, however steps are cut and states travel."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_worker.attention.base import AttentionBatch, DecodeRows, PrefillSpan
from hetero_worker.distributed.routes import Link, routes_of
from hetero_worker.models import micro_batches
from tests.support.rank_shares import Shares, layers_on
from tests.support.stages import Stages
from tests.support.thread_exchange import ThreadExchange, thread_exchanges
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

TOLERANCE = 1e-4
NUM_LAYERS = 4
PROMPT = [7, 150, 3, 88, 199, 0, 42, 42, 64, 63, 127, 5, 9]


LAYOUTS = {
    "2 stages": layers_on(0, 0, 1, 1, world_size=2),
    "uneven layers": layers_on(0, 1, 1, 1, world_size=2),
    "3 stages": layers_on(0, 0, 1, 2, world_size=3),
    "4 stages": layers_on(0, 1, 2, 3, world_size=4),
    "2+1 ranks": Shares(
        kv_heads=((5, 3, 0), (5, 3, 0), (0, 0, 8)),
        mlp_columns=((17, 33, 0), (17, 33, 0), (0, 0, 50)),
        vocab_rows=(0, 0, VOCAB_SIZE),
        embedding_rows=(64, 136, 0),
    ),
    "1+2 ranks": Shares(
        kv_heads=((8, 0, 0), (0, 4, 4)),
        mlp_columns=((50, 0, 0), (0, 1, 49)),
        vocab_rows=(0, 72, 128),
        embedding_rows=(200, 0, 0),
    ),
    "ranks in two stages": Shares(
        kv_heads=((8, 0), (3, 5), (0, 8)), mlp_columns=((50, 0), (0, 50)), vocab_rows=(192, 8)
    ),
    "there and back": layers_on(0, 1, 0, 1, world_size=2),
    "embedding and head elsewhere": layers_on(1, 1, 2, 2, world_size=4, embedding=0, head=3),
    "head on the first stage": layers_on(0, 0, 1, 1, world_size=2, head=0),
    "head rows on all": Shares(
        kv_heads=((8, 0, 0), (0, 8, 0)), mlp_columns=((50, 0, 0), (0, 50, 0)), vocab_rows=(64, 64, 72)
    ),
}


HELPED = {
    "one helps": Shares(kv_heads=((8, 0),), mlp_columns=((20, 30),), vocab_rows=(64, 136)),
    "two help two": Shares(kv_heads=((5, 3, 0, 0),), mlp_columns=((20, 10, 15, 5),), vocab_rows=(64, 64, 64, 8)),
    "helpers have all of it": Shares(
        kv_heads=((5, 3, 0, 0),), mlp_columns=((0, 0, 30, 20),), vocab_rows=(200, 0, 0, 0)
    ),
    "the leader has none of it": Shares(kv_heads=((5, 3, 0),), mlp_columns=((0, 20, 30),), vocab_rows=(0, 200, 0)),
    "helpers before and after their leader": Shares(
        kv_heads=((0, 8, 0),), mlp_columns=((20, 10, 20),), vocab_rows=(200, 0, 0)
    ),
    "one helps two stages": Shares(
        kv_heads=((8, 0, 0), (8, 0, 0), (0, 8, 0)),
        mlp_columns=((20, 0, 30), (20, 0, 30), (0, 20, 30)),
        vocab_rows=(64, 64, 72),
    ),
    "leaders help each other": Shares(
        kv_heads=((8, 0), (0, 8), (8, 0), (0, 8)), mlp_columns=((30, 20), (20, 30)), vocab_rows=(64, 136)
    ),
    "idle ranks": Shares(
        kv_heads=((0, 8, 0, 0),), mlp_columns=((0, 20, 0, 30),), vocab_rows=(0, 200, 0, 0), experts=((0, 2, 0, 4),)
    ),
}
"""Ranks without heads."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TinyCheckpoint]:
    return {
        variant: save_tiny(variant, tmp_path_factory.mktemp(variant), num_hidden_layers=NUM_LAYERS)
        for variant in ("llama-biased", "llama-tied", "qwen3")
    }


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return got.shape == expected.shape and bool((got - expected).abs().max() <= TOLERANCE)


@pytest.mark.parametrize("layout", [*LAYOUTS, *HELPED])
@pytest.mark.parametrize(("variant", "num_parts"), [("qwen3", 1), ("llama-biased", 3), ("llama-tied", 3)])
def test_every_path_equals_the_reference(
    checkpoints: dict[str, TinyCheckpoint], variant: str, layout: str, num_parts: int
) -> None:
    """Whole prefill, chunks on top of cached tokens, single tokens, and all of these in one step."""
    checkpoint = checkpoints[variant]
    stages = Stages.load(checkpoint.directory, (LAYOUTS | HELPED)[layout], num_parts=num_parts)
    expected = checkpoint.logits(PROMPT)
    assert close(stages.logits((stages.start(PROMPT), len(PROMPT))), expected)
    long, short, fresh = stages.start(PROMPT), stages.start(PROMPT[::-1]), stages.start(PROMPT[3:])
    backwards, tail = checkpoint.logits(PROMPT[::-1]), checkpoint.logits(PROMPT[3:])
    assert close(stages.logits((long, 7), (short, 5)), torch.cat([expected[:7], backwards[:5]]))
    mixed = stages.logits((long, 1), (short, 1), (fresh, 6))
    assert close(mixed, torch.cat([expected[7:8], backwards[5:6], tail[:6]]))
    later = stages.logits((long, 1), (fresh, 4), (short, 7))
    assert close(later, torch.cat([expected[8:9], tail[6:10], backwards[6:]]))


def test_one_stage_of_one_rank_a_piece_makes_no_rounds_before_the_sampler(
    checkpoints: dict[str, TinyCheckpoint],
) -> None:
    stages = Stages.load(checkpoints["qwen3"].directory, LAYOUTS["4 stages"])
    stages.logits((stages.start(PROMPT), len(PROMPT)))
    assert [exchange.rounds for exchange in stages.exchanges] == [0, 0, 0, 0]
    assert stages.exchanges[0].sent == [Link(0, 0, (1,)), Link(1, 1, (2,)), Link(2, 2, (3,))]


def test_one_stage_of_all_ranks_sends_nothing_and_needs_no_routes(checkpoints: dict[str, TinyCheckpoint]) -> None:
    shares = Shares(kv_heads=((5, 3),), mlp_columns=((17, 33),), vocab_rows=(64, 136))
    stages = Stages.load(checkpoints["qwen3"].directory, shares)
    stages.logits((stages.start(PROMPT), len(PROMPT)))
    assert (routes_of(stages.plan).subgroups, routes_of(stages.plan).links) == ((), ())
    assert [exchange.rounds for exchange in stages.exchanges] == [1 + 2 * NUM_LAYERS] * 2
    assert stages.exchanges[0].sent == []


@pytest.mark.parametrize("link_rows", [0.5, 1, 2, 3, 5])
@pytest.mark.parametrize("layout", HELPED)
def test_helpers_and_leaders_never_wait_for_each_other_however_little_a_link_holds(
    checkpoints: dict[str, TinyCheckpoint], layout: str, link_rows: float
) -> None:
    checkpoint = checkpoints["qwen3"]
    link_bytes = int(link_rows * checkpoint.reference.config.hidden_size * torch.float32.itemsize)
    stages = Stages.load(checkpoint.directory, HELPED[layout], num_parts=2, link_bytes=link_bytes)

    got = stages.logits((stages.start(PROMPT * 3), len(PROMPT) * 3))

    assert close(got, checkpoint.logits(PROMPT * 3))


def test_a_helper_costs_a_layer_one_message_each_way_and_no_round(checkpoints: dict[str, TinyCheckpoint]) -> None:
    """1 GPU-like leader, 2 helpers: rows · hidden out once, and back once from each; nothing is summed in rounds."""
    checkpoint = checkpoints["qwen3"]
    shares = Shares(kv_heads=((8, 0, 0),), mlp_columns=((20, 20, 10),), vocab_rows=(200, 0, 0))
    stages = Stages.load(checkpoint.directory, shares)
    stages.logits((stages.start(PROMPT), len(PROMPT)))

    row_bytes = len(PROMPT) * checkpoint.reference.config.hidden_size * torch.float32.itemsize
    for exchange in stages.exchanges:
        traffic = exchange.traffic
        assert (traffic.rounds, traffic.messages) == (0, NUM_LAYERS)
        assert traffic.published_bytes == NUM_LAYERS * row_bytes


@pytest.mark.parametrize("fault", ["dropped", "doubled", "swapped"])
def test_a_fault_between_stages_is_seen(checkpoints: dict[str, TinyCheckpoint], fault: str) -> None:
    """The test above would notice a tensor that is lost, sent twice or overtaken by the next."""
    checkpoint = checkpoints["qwen3"]
    stages = Stages.load(checkpoint.directory, LAYOUTS["2 stages"], num_parts=3)
    stages.exchanges = thread_exchanges(2, timeout_s=0.5)
    _break_sending(stages.exchanges[0], fault)
    sequence = stages.start(PROMPT)
    with pytest.raises(Exception, match=r"timed out|brought|differ"):  # noqa: PT012
        for count in (6, 6):
            begin = sequence.computed
            got = stages.logits((sequence, count))
            if not close(got, checkpoint.logits(PROMPT)[begin : begin + count]):
                raise ValueError("logits differ")


def _break_sending(exchange: ThreadExchange, fault: str) -> None:
    send, kept = exchange.send, []

    def broken(tensor: torch.Tensor, link: Link) -> None:
        kept.append(tensor.clone())
        if fault == "dropped" and len(kept) == 2:
            return
        if fault == "swapped" and len(kept) <= 2:
            for earlier in reversed(kept) if len(kept) == 2 else ():
                send(earlier, link)
            return
        send(tensor, link)
        if fault == "doubled" and len(kept) == 1:
            send(tensor, link)

    exchange.send = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("num_rows", "num_stages", "number"),
    [(512, 1, 1), (1, 2, 1), (32, 2, 1), (64, 2, 1), (127, 2, 1), (128, 2, 2), (512, 2, 4), (2048, 2, 8), (512, 4, 6)],
)
def test_micro_batches_grow_with_the_root_of_the_rows(num_rows: int, num_stages: int, number: int) -> None:
    assert micro_batches.BALANCE_ROWS == 32
    assert micro_batches.best_number(num_rows, num_stages) == number


def test_a_step_is_cut_at_the_ends_of_sequences_if_these_are_near_and_else_evenly() -> None:
    table = np.arange(30, dtype=np.int32)
    spans = (PrefillSpan(3, 17, 4, table), PrefillSpan(17, 60, 0, table))
    decode = DecodeRows(np.array([9, 8, 7], dtype=np.int32), np.tile(table, (3, 1)))
    whole = AttentionBatch(torch.arange(60), decode, spans)

    cut = micro_batches.micro_batches(whole, 4)

    assert [(batch.begin, batch.end) for batch in cut] == [(0, 17), (17, 30), (30, 45), (45, 60)]
    assert [batch.attention.slot_mapping.tolist() for batch in cut] == [
        list(range(batch.begin, batch.end)) for batch in cut
    ]
    assert [batch.attention.decode.num_rows for batch in cut] == [3, 0, 0, 0]
    assert [[(s.begin, s.end, s.num_computed) for s in batch.attention.prefills] for batch in cut] == [
        [(3, 17, 4)],
        [(0, 13, 0)],
        [(0, 15, 13)],
        [(0, 15, 28)],
    ]


@pytest.mark.parametrize("number", range(1, 12))
def test_micro_batches_cover_all_rows_once_in_order(number: int) -> None:
    decode = DecodeRows(np.arange(9, 0, -1, dtype=np.int32), np.zeros((9, 4), dtype=np.int32))
    whole = AttentionBatch(torch.arange(9), decode, ())

    cut = micro_batches.micro_batches(whole, number)

    assert [row for batch in cut for row in range(batch.begin, batch.end)] == list(range(9))
    assert len(cut) == min(number, 9)
    assert all(batch.end > batch.begin for batch in cut)
    assert np.concatenate([batch.attention.decode.lengths for batch in cut]).tolist() == list(range(9, 0, -1))
