"""Cuts of published models: their files are served, their sizes are known before, shares are of what steps read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import gguf
import pytest
import torch

from bench.contenders import Measured
from bench.cut_files import CUTS, Work, cut, layers_within, published, size_of, tensors, write
from bench.cuts import Figure, figures_of, limits_of, rate, run_in_turns, table, workloads
from bench.turns import Quiet
from hetero_api.model_config import ModelConfig
from hetero_api.v1 import ranks_pb2
from tests.support.rank_group import PlanBuilder, RankGroup, Shares
from tests.unit.bench.bench_setup import BATCH, DECODE, LIMITS, PREFILL, Scripted

pytestmark = pytest.mark.unit

SMALL: Final[dict[str, Any]] = {
    "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 96, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 2,
    "num_local_experts": 8, "num_experts": 8, "n_routed_experts": 8, "max_position_embeddings": 128,
}  # fmt: skip
LAYERS: Final = 3


def small(name: str) -> dict[str, Any]:
    """A model whose sizes are small, those that it has."""
    config = published(name)
    return cut({**config, **{field: value for field, value in SMALL.items() if field in config}}, LAYERS)


@pytest.mark.parametrize(("name", "architecture"), CUTS.items())
def test_a_cut_is_the_model_that_its_config_says_and_can_be_served(
    tmp_path: Path, name: str, architecture: str
) -> None:
    config, file = small(name), tmp_path / "model.gguf"
    write(architecture, config, file)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]
    read, meant = ModelConfig.from_directory(tmp_path), ModelConfig.from_hf(config)
    assert read.num_parameters == meant.num_parameters
    assert (read.rope, read.experts, read.latent, read.sliding) == (
        meant.rope, meant.experts, meant.latent, meant.sliding,
    )  # fmt: skip
    assert {tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors} == {"F32", "Q4_0", "Q8_0"}
    assert file.stat().st_size > size_of(architecture, config)
    builder = PlanBuilder(
        RankGroup(tmp_path, Shares(kv_heads=((4,),), mlp_columns=((64,),), vocab_rows=(96,), experts=((8,),)))
    )
    builder.start(3, [5, 7, 11])
    builder.schedule(3)
    logits = builder.run().logits[0]
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.01


def test_tokens_spread_over_experts_in_all_layers(tmp_path: Path) -> None:
    """Or a step would read fewer experts than a trained model's."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 32, "num_experts": 32, "moe_intermediate_size": 256}
    write("qwen3moe", {**small("qwen3-30b-a3b"), **sizes, "num_hidden_layers": 8}, tmp_path / "model.gguf")
    group = RankGroup(tmp_path, Shares(kv_heads=((4,),), mlp_columns=((64,),), vocab_rows=(96,), experts=((32,),)))
    builder = PlanBuilder(group)
    count = ranks_pb2.GroupCommand(count_experts=ranks_pb2.CountExperts())
    builder.command(count)
    builder.start(0, [token for token in range(96) if token % 4])
    builder.schedule(0)
    builder.run()
    report = builder.command(count).outputs[0].report
    assert report is not None
    assert len(report.expert_counts) == 8
    for layer in report.expert_counts:
        assert max(layer.tokens) <= 4 * sum(layer.tokens) / len(layer.tokens)


def test_a_cut_has_as_many_layers_as_fit() -> None:
    config = published("qwen3-30b-a3b")
    layers = layers_within("qwen3moe", config, 6e9)
    assert size_of("qwen3moe", cut(config, layers)) <= 6e9 < size_of("qwen3moe", cut(config, layers + 1))
    assert layers_within("gpt-oss", published("gpt-oss-20b"), 1e12) == 24
    assert layers_within("deepseek2", published("deepseek-v3"), 0) == 3
    of_experts = [
        tensor.name for tensor in tensors("deepseek2", cut(published("deepseek-v3"), 3)) if "_exps" in tensor.name
    ]
    assert {name.split(".")[1] for name in of_experts} == {"2"}


def test_a_step_reads_the_experts_that_its_tokens_choose(tmp_path: Path) -> None:
    config, file = small("qwen3-30b-a3b"), tmp_path / "model.gguf"
    write("qwen3moe", config, file)
    work = Work.of(file)
    experts = LAYERS * 8 * 3 * 64 * 32
    assert work.experts == experts // 32 * 18
    assert work.bytes_a_step(1) == pytest.approx(work.others + work.experts / 4)
    assert work.bytes_a_step(2) == pytest.approx(work.others + work.experts * (1 - 0.75**2))
    embedding = 96 * 64 // 32 * 34
    assert work.others + work.experts == size_of("qwen3moe", config) - embedding
    body = ModelConfig.from_hf(config).num_parameters - 2 * 96 * 64 - 64
    assert work.weights == body - experts * 3 / 4


def test_decoding_is_bound_by_reads_and_a_prompt_by_products_too() -> None:
    work = Work(others=10**6, experts=8 * 10**6, share=0.25, weights=4e6)
    for workload, most in ((DECODE, 1e9 / 3e6), (BATCH, 2 * 1e9 / 4.5e6)):
        by_bandwidth, by_products = limits_of(workload, work, LIMITS)
        assert by_bandwidth == pytest.approx(most)
        assert by_products is None
    assert limits_of(PREFILL, work, LIMITS)[1] == pytest.approx(8e9 / 8e6)


def test_rates_leave_prompts_out_but_for_a_prefill() -> None:
    assert rate(DECODE, Measured(5.0, 1.0, 9)) == 2.0
    assert rate(BATCH, Measured(4.0, 1.0, 20)) == 6.0
    assert rate(PREFILL, Measured(4.0, 2.0, 1)) == 8.0
    made = workloads(500)
    assert [(len(each.prompts), each.max_new) for each in made.values()] == [(1, 64), (8, 64), (1, 1)]
    assert max(max(prompt) for each in made.values() for prompt in each.prompts) < 500


@pytest.mark.parametrize("together", [True, False])
def test_both_are_run_by_turns_whether_they_fit_side_by_side_or_not(together: bool) -> None:
    diary: list[str] = []
    both = [Scripted("A", diary), Scripted("B", diary)]
    named = {"decode1": DECODE, "prefill512": PREFILL}
    runs, broken = run_in_turns(both, named, rounds=2, quiet=Quiet(attempts=0), together=together)
    assert broken == {}
    assert all(len(runs[name][workload]) == 2 for name in "AB" for workload in named)
    first = [line[0] for line in diary if "prefill512" in line]
    assert first == ["A", "B", "A", "B"]
    work = Work(others=10**6, experts=8 * 10**6, share=0.25, weights=4e6)
    figures = figures_of("m", 3, runs, work, named, LIMITS)
    assert [(each.contender, each.workload) for each in figures] == [
        ("A", "decode1"), ("A", "prefill512"), ("B", "decode1"), ("B", "prefill512"),
    ]  # fmt: skip


def test_the_table_marks_what_others_disturbed() -> None:
    figure = Figure("m", 3, "A", "decode1", 12.34, 11.0, 13.0, 0.5, None, 1)
    assert table([figure]).splitlines()[1].split() == ["m", "3", "A", "decode1", "12.3~", "11.0", "to", "13.0", "50%"]
