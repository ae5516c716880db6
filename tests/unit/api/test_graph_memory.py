"""What is kept for graphs: of the order that users of other engines report, and nothing where there are none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_api.graph_memory import KERNEL_BYTES, MAX_MIXED_ROWS, MAX_ROWS, GraphMemory, graph_sizes
from hetero_api.rank_memory import ModelMemory, StepLimits
from hetero_api.sharding import LayerShard, RankShard, UnitRange
from tests.unit.placement.placement_setup import LLAMA_8B, config_of

pytestmark = pytest.mark.unit

MIB = 1024**2
LIMITS = StepLimits(max_num_batched_tokens=512, max_num_seqs=256, max_model_len=4096)
WHOLE = RankShard(
    (LayerShard(UnitRange(0, 8), UnitRange(0, 14_336)),) * 32, UnitRange(0, 128_256), UnitRange(0, 128_256)
)
LLAMA = ModelMemory(config_of(**LLAMA_8B), LIMITS, element_bytes=2)


@pytest.mark.parametrize(
    ("seqs", "most", "sizes"),
    [
        (1, MAX_ROWS, (1,)),
        (20, MAX_ROWS, (1, 2, 4, 8, 16, 20)),
        (1000, MAX_ROWS, (1, 2, 4, *range(8, 257, 8))),
        (1000, MAX_MIXED_ROWS, (1, 2, 4, *range(8, 65, 8))),
    ],
)
def test_sizes_end_with_the_largest_step(seqs: int, most: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(seqs, most=most) == sizes


def test_an_8b_models_graphs_take_about_a_gibibyte() -> None:
    graphs = GraphMemory.of(LLAMA, WHOLE, graph_sizes(256), num_host_ranks=0)
    assert 900 * MIB < graphs.driver < 1100 * MIB
    assert 1000 * MIB < graphs.total < 1300 * MIB
    assert graphs.exchanged == 0


def test_the_driver_keeps_more_of_more_sizes_and_of_more_layers() -> None:
    def driver(shard: RankShard, sizes: tuple[int, ...]) -> int:
        return GraphMemory.of(LLAMA, shard, sizes, num_host_ranks=0).driver

    nothing = LayerShard(UnitRange(0, 0), UnitRange(0, 0))
    half = replace(WHOLE, layers=(*WHOLE.layers[:16], *[nothing] * 16))
    assert driver(WHOLE, (1, 2)) == 2 * driver(WHOLE, (1,))
    assert driver(WHOLE, (1,)) - driver(half, (1,)) == 16 * 14 * KERNEL_BYTES


def test_activations_have_one_place_and_what_crosses_the_host_one_in_every_graph() -> None:
    few, many = ((64,), (1, 2, 4, *range(8, 65, 8)))
    one, all_sizes = (GraphMemory.of(LLAMA, WHOLE, sizes, num_host_ranks=2) for sizes in (few, many))
    assert all_sizes.activations == one.activations
    assert one.exchanged == 64 * 32 * (2 + 2) * 4096 * 2
    assert all_sizes.exchanged == sum(many) * 32 * (2 + 2) * 4096 * 2
    more_hosts = GraphMemory.of(LLAMA, WHOLE, few, num_host_ranks=4)
    assert more_hosts.exchanged == 1.5 * one.exchanged


def test_where_adapters_may_be_loaded_each_size_has_a_second_and_larger_graph() -> None:
    usual, adapted = (GraphMemory.of(LLAMA, WHOLE, (1, 2), num_host_ranks=2, has_adapters=may) for may in (False, True))
    assert (adapted.activations, adapted.preparation) == (usual.activations, usual.preparation)
    assert (adapted.results, adapted.exchanged) == (2 * usual.results, 2 * usual.exchanged)
    assert adapted.driver == 2 * usual.driver + 2 * 32 * 8 * KERNEL_BYTES


def test_without_graphs_nothing_is_kept() -> None:
    assert GraphMemory.of(LLAMA, WHOLE, (), num_host_ranks=3).total == 0
