"""In batch-invariant mode a request has the same bits alone, in company, in chunks and after a prefix hit.

On ranks of host cores, on a pseudo GPU and on groups of both; logits, tokens and log-probabilities. Without the mode
some of it differs on the very same groups, so that what is shown here is the mode's doing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from hetero_api.v1 import ranks_pb2
from hetero_worker.runners.shard import LoadedShard
from tests.support.asked_again import (
    BLOCK_SIZE,
    BLOCKS,
    DRAWS,
    HIT_BLOCKS,
    LENGTH,
    MOST_TOKENS,
    Requests,
    differing,
    prompt,
)
from tests.support.rank_group import RankGroup, Shares
from tests.support.rank_shares import layers_on
from tests.support.tiny_checkpoints import TinyCheckpoint, save_tiny

pytestmark = pytest.mark.unit

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


@cache
def checkpoint_of(variant: str, folder: Path) -> TinyCheckpoint:
    return save_tiny(variant, folder / variant)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def group_of(
    folder: Path, variant: str, layout: str, dtype: str, *, batch_invariant: bool = True, native: bool = True
) -> RankGroup:
    shares, num_gpu_ranks = LAYOUTS[layout]
    return RankGroup(
        checkpoint_of(variant, folder).directory, shares, dtype=dtype, num_gpu_ranks=num_gpu_ranks,
        num_blocks=BLOCKS, block_size=BLOCK_SIZE, max_num_batched_tokens=MOST_TOKENS, batch_invariant=batch_invariant,
        native=native,
    )  # fmt: skip


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize(("variant", "layout", "dtype"), CASES)
def test_every_way_has_the_same_bits(folder: Path, variant: str, layout: str, dtype: str, native: bool) -> None:
    answers = Requests(group_of(folder, variant, layout, dtype, native=native)).answers()
    assert differing(answers) == []
    told = [(len(answer.logprobs), len(answer.prompt_logprobs)) for answer in answers.values()]
    assert told == [(DRAWS, LENGTH - 1)] * 6 + [(DRAWS, LENGTH - 1 - HIT_BLOCKS * BLOCK_SIZE)]


@pytest.mark.parametrize(
    ("variant", "layout", "dtype"), [("llama-biased", "1 CPU rank", "float32"), ("qwen3", "2 CPU ranks", "bfloat16")]
)
def test_without_the_mode_some_way_has_others(folder: Path, variant: str, layout: str, dtype: str) -> None:
    answers = Requests(group_of(folder, variant, layout, dtype, batch_invariant=False, native=False)).answers()
    assert differing(answers)


def test_native_kernels_have_the_same_bits_in_any_mode(folder: Path) -> None:
    answers = Requests(group_of(folder, "qwen3", "2 CPU ranks", "float32", batch_invariant=False)).answers()
    assert differing(answers) == []


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
    def names(layout: str, *, native: bool) -> dict[str, str]:
        report = group_of(folder, "llama-biased", layout, "float32", native=native).reports[0]
        return dict(kernel.split("=", 1) for kernel in report.kernels)

    for told in (names("1 CPU rank", native=False), names("1 GPU", native=True)):
        assert "-invariant" in told["linear"]
        assert told["attention"].startswith("paged-torch-invariant")
        assert told["fused"] == "torch-invariant"
    told = names("1 CPU rank", native=True)
    assert all("native" in told[part] for part in ("linear", "attention", "fused"))


def test_weights_of_the_other_mode_do_not_serve(folder: Path) -> None:
    group = group_of(folder, "llama-biased", "1 CPU rank", "float32")
    shard = group.runners[0]._model_state.shard
    assert isinstance(shard, LoadedShard)
    other = group_of(folder, "llama-biased", "1 CPU rank", "float32", batch_invariant=False)
    assert shard.serves(group.requests[0])
    assert not shard.serves(other.requests[0])
