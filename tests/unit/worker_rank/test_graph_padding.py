"""To which sizes steps are padded: the same on all GPU ranks, and never so that a padded step is cut otherwise."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_api.graph_memory import MAX_MIXED_ROWS, MAX_ROWS, graph_sizes
from hetero_api.model_config import ModelConfig
from hetero_worker.models.lending import row_slices
from hetero_worker.models.micro_batches import best_number
from hetero_worker.runners.base import LoadRequest
from hetero_worker.runners.graphs.padding import LINK_BYTES, Padding
from tests.support.rank_shares import Shares, layers_on
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.unit

HELPED = Shares(kv_heads=((8, 0, 0),), mlp_columns=((20, 20, 10),), vocab_rows=(200, 0, 0), experts=((0, 4, 2),))


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: save_tiny(name, tmp_path_factory.mktemp(name), num_hidden_layers=2).directory
        for name in ("llama-biased", "qwen3-moe-some-dense")
    }


def request_of(directory: Path, shares: Shares, *, rank: int = 0, seqs: int = 256, eager: bool = False) -> LoadRequest:
    config = ModelConfig.from_directory(directory)
    return LoadRequest(
        directory=directory, config=config, dtype="float32",
        shard_plan=shares.plan_for(config), rank=rank, max_model_len=64,
        max_num_batched_tokens=512, max_num_seqs=seqs, memory_bytes=1 << 30, enforce_eager=eager,
    )  # fmt: skip


def padding_of(request: LoadRequest, *, joins_experts: bool = True) -> Padding:
    return Padding.of(request, joins_experts=joins_experts)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (20, (1, 2, 4, 8, 16, 20)),
        (1000, (1, 2, 4, *range(8, MAX_ROWS + 1, 8))),
    ],
)
def test_sizes(most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(most) == sizes


@given(most=st.integers(1, 400), rows=st.integers(1, 400))
def test_a_step_is_padded_by_few_rows_or_not_at_all(most: int, rows: int) -> None:
    padded = Padding(graph_sizes(most)).padded(rows)
    assert rows <= padded < max(rows + 8, 2 * rows)
    assert padded == rows or padded <= min(most, MAX_ROWS)


def test_all_ranks_of_a_plan_with_stages_or_helpers_pad_alike_and_cut_nothing(directories: dict[str, Path]) -> None:
    for shares in (HELPED, layers_on(0, 1, world_size=3)):
        requests = [request_of(directories["llama-biased"], shares, rank=rank) for rank in range(3)]
        sizes, *others = [padding_of(request).sizes for request in requests]
        assert all(other == sizes for other in others)
        row_bytes = requests[0].config.hidden_size * 4
        for rows in sizes:
            assert best_number(rows, len(requests[0].shard_plan.stages())) == 1
            assert len(row_slices(rows, row_bytes=row_bytes, link_bytes=LINK_BYTES).bounds) == 1
        assert 64 <= sizes[-1] <= 128


def test_where_host_cores_take_part_large_steps_have_no_graphs_and_idle_ones_do_not_matter(
    directories: dict[str, Path],
) -> None:
    llama = directories["llama-biased"]
    beside = Shares(kv_heads=((5, 3),), mlp_columns=((25, 25),), vocab_rows=(200, 0))
    idle = Shares(kv_heads=((8, 0),), mlp_columns=((50, 0),), vocab_rows=(200, 0))
    request = request_of(llama, beside)
    assert padding_of(request).sizes[-1] == MAX_ROWS, "by itself a request is of a group of one kind"
    assert padding_of(replace(request, num_gpu_ranks=2)).sizes[-1] == MAX_ROWS
    assert padding_of(replace(request, num_gpu_ranks=1)).sizes[-1] == MAX_MIXED_ROWS
    assert padding_of(replace(request_of(llama, idle), num_gpu_ranks=1)).sizes[-1] == MAX_ROWS


def test_one_stage_without_helpers_has_all_sizes(directories: dict[str, Path]) -> None:
    alone = Shares(kv_heads=((8,),), mlp_columns=((50,),), vocab_rows=(200,))
    padding = padding_of(request_of(directories["llama-biased"], alone))
    assert str(padding) == "35 sizes up to 256"


def test_there_are_none_where_they_are_turned_off(directories: dict[str, Path]) -> None:
    assert str(padding_of(request_of(directories["llama-biased"], HELPED, eager=True))) == "off (enforceEager)"


def test_steps_with_experts_are_padded_if_kernels_of_all_gpu_ranks_compute_them_together(
    directories: dict[str, Path],
) -> None:
    """Ranks that sum with a rank that pads nothing must pad nothing either, whether or not they have experts."""
    moe = directories["qwen3-moe-some-dense"]
    both = Shares(kv_heads=((5, 3),), mlp_columns=((25, 25),), vocab_rows=(200, 0), experts=((0, 6),))
    for rank, num_gpu_ranks in ((0, 2), (1, 2), (0, None), (1, None)):
        request = replace(request_of(moe, both, rank=rank), num_gpu_ranks=num_gpu_ranks)
        assert padding_of(request).sizes[-1] == MAX_ROWS
        assert str(padding_of(request, joins_experts=False)).startswith("off (the host of a GPU chooses")
    on_host_cores = replace(request_of(moe, both), num_gpu_ranks=1)
    assert padding_of(on_host_cores, joins_experts=False).sizes[-1] == MAX_MIXED_ROWS
    assert padding_of(request_of(directories["llama-biased"], both), joins_experts=False).sizes[-1] == MAX_ROWS
