"""In batch-invariant mode a request has the same bits alone, in company, in chunks and after a prefix hit.

On ranks of host cores, on a pseudo GPU and on groups of both; logits, tokens and log-probabilities. Without the mode
some of it differs on the very same groups, so that what is shown here is the mode's doing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.shard import LoadedShard
from tests.support.rank_group import PlanBuilder, RankGroup, Shares, StepOutcome
from tests.support.rank_shares import layers_on
from tests.support.tiny_checkpoints import VOCAB_SIZE, TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

BLOCK_SIZE, BLOCKS, MOST_TOKENS = 4, 300, 220
LENGTH, DRAWS = 23, 3
SLOT = 0
WHOLE = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,), experts=((6,),))
HALVES = Shares(kv_heads=((5, 3),), mlp_columns=((20, 30),), vocab_rows=(64, 136), experts=((2, 4),))
HELPED = Shares(kv_heads=((8, 0),), mlp_columns=((20, 30),), vocab_rows=(200, 0), experts=((2, 4),))
LAYOUTS: dict[str, tuple[Shares, int]] = {
    "1 CPU rank": (WHOLE, 0),
    "2 CPU ranks": (HALVES, 0),
    "1 GPU": (WHOLE, 1),
    "1 GPU and 1 CPU rank": (HALVES, 1),
    "1 GPU, helped by 1 CPU rank": (HELPED, 1),
    "layers on 2 CPU ranks": (layers_on(0, 1, 1, world_size=2), 0),
}
"""With the number of GPU ranks."""
VARIANTS = ("llama-biased", "qwen3", "gemma2", "qwen3-moe-some-dense")
CASES = [
    *((variant, layout, "float32") for variant in VARIANTS for layout in ("1 CPU rank", "1 GPU and 1 CPU rank")),
    *((variant, "2 CPU ranks", "bfloat16") for variant in VARIANTS),
    *(("qwen3-moe-some-dense", layout, "bfloat16") for layout in ("1 CPU rank", "1 GPU and 1 CPU rank")),
    *(("llama-biased", layout, "float32") for layout in ("1 GPU", "layers on 2 CPU ranks")),
    *((variant, "1 GPU, helped by 1 CPU rank", "float32") for variant in ("gemma2", "qwen3-moe-some-dense")),
]
SAMPLING = ranks_pb2.Sampling(temperature=0.8, top_p=0.95, seed=11, num_logprobs=2, num_prompt_logprobs=1)


@dataclass(frozen=True, slots=True)
class Answer:
    """All that a group computed of the request, to the last bit."""

    logits: tuple[bytes, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[bytes, ...]
    prompt_logprobs: tuple[tuple[int, bytes], ...]
    """By position; those of a prefix that is in the cache are not computed."""


def prompt(length: int, *, seed: int = 1) -> list[int]:
    return [(seed * 37 + i * i * 11 + i) % VOCAB_SIZE for i in range(length)]


@cache
def checkpoint_of(variant: str, folder: Path) -> TinyCheckpoint:
    return save_tiny(variant, folder / variant)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def group_of(folder: Path, variant: str, layout: str, dtype: str, *, batch_invariant: bool = True) -> RankGroup:
    shares, num_gpu_ranks = LAYOUTS[layout]
    return RankGroup(
        checkpoint_of(variant, folder).directory, shares, dtype=dtype, num_gpu_ranks=num_gpu_ranks,
        num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=MOST_TOKENS, batch_invariant=batch_invariant,
    )  # fmt: skip


class Requests:
    """The request in SLOT, again and again, with others in other slots."""

    def __init__(self, group: RankGroup) -> None:
        self.builder = PlanBuilder(group)
        self._logits: list[bytes] = []
        self._logprobs: list[bytes] = []
        self._prompt: dict[int, bytes] = {}

    def answer(self, *, chunk: int | None = None, shared: list[int] | None = None, most: int | None = None) -> Answer:
        """With all sequences that there are decoding meanwhile, or `most` rows of their prompts a step."""
        builder = self.builder
        self._logits, self._logprobs, self._prompt = [], [], {}
        builder.start(SLOT, prompt(LENGTH), sampling=SAMPLING, shared_blocks=shared or [])
        while len(self._logits) < DRAWS:
            for slot in sorted(builder.sequences, key=lambda slot: -builder.sequences[slot].computed):
                builder.schedule(slot, chunk if slot == SLOT else most)
            self._take(builder.run())
        tokens = builder.sequences[SLOT].tokens[LENGTH : LENGTH + DRAWS]
        builder.release(SLOT)
        return Answer(tuple(self._logits), tuple(tokens), tuple(self._logprobs), tuple(sorted(self._prompt.items())))

    def _take(self, outcome: StepOutcome) -> None:
        asking = [slot for slot, _ in outcome.sampled if slot == SLOT]
        for row, (slot, _) in enumerate(outcome.sampled):
            if slot == SLOT:
                self._logits.append(outcome.logits[row].contiguous().view(torch.uint8).numpy().tobytes())
        assert len(outcome.outputs[0].logprobs) == len(asking)
        self._logprobs += [logprobs.SerializeToString(deterministic=True) for logprobs in outcome.outputs[0].logprobs]
        for span in outcome.outputs[0].prompt_logprobs:
            told = (position.SerializeToString(deterministic=True) for position in span.positions)
            self._prompt.update(enumerate(told, start=span.begin))

    def answers(self) -> dict[str, Answer]:
        """On every way of the request to its tokens."""
        answers = {"alone": self.answer(), "in chunks": self.answer(chunk=5)}
        for slot, length in {1: 9, 2: 61, 3: 2}.items():
            self.builder.start(slot, prompt(length, seed=slot + 4))
            self.builder.schedule(slot)
        self.builder.run()
        answers["among others that decode"] = self.answer()
        answers["among others, in chunks"] = self.answer(chunk=7)
        self.builder.start(4, [*prompt(4 * BLOCK_SIZE), 5, 6])
        self.builder.start(5, prompt(100, seed=3))
        answers["among others' prompts"] = self.answer(most=13)
        self.builder.start(6, prompt(110, seed=9))
        answers["in a step of so many rows that it goes in micro-batches"] = self.answer()
        answers["after a prefix hit"] = self.answer(shared=self.builder.sequences[4].blocks[:4])
        return answers


def differing(answers: dict[str, Answer]) -> list[str]:
    """Ways that have other bits than the first."""
    reference = next(iter(answers.values()))
    return [way for way, answer in answers.items() if not _is_same(answer, reference)]


def _is_same(answer: Answer, reference: Answer) -> bool:
    known = set(reference.prompt_logprobs)
    parts = (answer.logits, answer.tokens, answer.logprobs)
    return parts == (reference.logits, reference.tokens, reference.logprobs) and known.issuperset(
        answer.prompt_logprobs
    )


@pytest.mark.parametrize(("variant", "layout", "dtype"), CASES)
def test_every_way_has_the_same_bits(folder: Path, variant: str, layout: str, dtype: str) -> None:
    answers = Requests(group_of(folder, variant, layout, dtype)).answers()
    assert differing(answers) == []
    assert [len(answer.prompt_logprobs) for answer in answers.values()] == [LENGTH - 1] * 6 + [LENGTH - 17]


@pytest.mark.parametrize(
    ("variant", "layout", "dtype"), [("llama-biased", "1 CPU rank", "float32"), ("qwen3", "2 CPU ranks", "bfloat16")]
)
def test_without_the_mode_some_way_has_others(folder: Path, variant: str, layout: str, dtype: str) -> None:
    answers = Requests(group_of(folder, variant, layout, dtype, batch_invariant=False)).answers()
    assert differing(answers)


def test_numbers_are_the_models(folder: Path) -> None:
    requests = Requests(group_of(folder, "gemma2", "1 GPU and 1 CPU rank", "float32"))
    answer = requests.answer()
    expected = checkpoint_of("gemma2", folder).logits([*prompt(LENGTH), *answer.tokens[:-1]])[-DRAWS:]
    got = torch.stack([torch.frombuffer(bytearray(row), dtype=torch.float32) for row in answer.logits])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_changes_nothing(folder: Path, level: int) -> None:
    group = group_of(folder, "llama-biased", "1 GPU and 1 CPU rank", "float32")
    before = Requests(group)
    answer = before.answer()
    builder = before.builder
    cache = ranks_pb2.AllocateCache(num_blocks=BLOCKS, block_size=BLOCK_SIZE)
    for command in (
        ranks_pb2.GroupCommand(sleep=ranks_pb2.SleepCommand(level=level)),
        ranks_pb2.GroupCommand(wake=ranks_pb2.WakeCommand(weights=True, cache=cache)),
    ):
        assert all(output.report is not None and output.report.done for output in builder.command(command).outputs)
    builder.use_blocks(BLOCKS, BLOCK_SIZE)
    assert before.answer(chunk=3) == answer


def test_blocks_of_another_size_change_nothing(folder: Path) -> None:
    requests = Requests(group_of(folder, "gemma2", "2 CPU ranks", "bfloat16"))
    answer = requests.answer()
    order = ranks_pb2.AllocateCache(num_blocks=4, block_size=128)
    requests.builder.command(ranks_pb2.GroupCommand(reset_cache=order))
    requests.builder.use_blocks(4, 128)
    assert requests.answer(chunk=6) == answer


def test_ranks_report_what_they_compute_with(folder: Path) -> None:
    layouts = ("1 CPU rank", "1 GPU")
    host, pseudo = (group_of(folder, "llama-biased", layout, "float32").reports[0] for layout in layouts)
    for report in (host, pseudo):
        names = dict(kernel.split("=", 1) for kernel in report.kernels)
        assert "-invariant" in names["linear"]
        assert (names["attention"], names["fused"]) == ("paged-rows", "torch-invariant")


def test_weights_of_the_other_mode_do_not_serve(folder: Path) -> None:
    group = group_of(folder, "llama-biased", "1 CPU rank", "float32")
    shard = group.runners[0]._holdings.shard
    assert isinstance(shard, LoadedShard)
    other = group_of(folder, "llama-biased", "1 CPU rank", "float32", batch_invariant=False)
    assert shard.serves(group.requests[0])
    assert not shard.serves(other.requests[0])
