"""Groups with GPU ranks, played by pseudo-GPU ranks in real processes: on host tensors, over a second Gloo group.

Among them are failures that an earlier attempt at such groups had: a subgroup whose first rank computes on host cores,
sums that changed what was not given to them, a broadcast in a group without CPU ranks, numbers of devices in the code.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hetero_worker.distributed.exchange import sum_in_order
from hetero_worker.distributed.routes import Ranks
from tests.support import hierarchical_bodies as bodies
from tests.support.exchange_bodies import shm_left_over
from tests.support.rank_processes import run_ranks, segment_prefix
from tests.support.rank_shares import Shares, layers_on
from tests.support.tiny_checkpoints import save_tiny

pytestmark = pytest.mark.distributed

SHM, TCP, GLOO = bodies.SHM, bodies.TCP, bodies.GLOO
BOTH = pytest.mark.parametrize("kind", [SHM, GLOO], ids=["shm", "gloo"])
TOKENS = [(37 * i + 11) % 200 for i in range(60)]
AREA = 8192


@pytest.mark.parametrize(
    ("num_gpu_ranks", "world_size", "kind", "dtype"),
    [
        (1, 2, SHM, torch.float32),
        (1, 4, GLOO, torch.float32),
        (2, 2, SHM, torch.bfloat16),
        (2, 4, SHM, torch.bfloat16),
        (2, 4, GLOO, torch.float32),
        (3, 4, SHM, torch.float32),
        (3, 3, GLOO, torch.float32),
        (0, 3, SHM, torch.bfloat16),
    ],
)
def test_every_subgroup_of_every_mixture_sums_to_the_same_bits_on_all_of_its_ranks(
    num_gpu_ranks: int, world_size: int, kind: int, dtype: torch.dtype
) -> None:
    groups = bodies.all_groups(world_size)
    results = run_ranks(bodies.sums_of_groups, world_size, num_gpu_ranks, kind, dtype, groups)

    checked = 0
    for (members, contributors, size), bits in _of_first_members(results).items():
        assert all(results[rank][members, contributors, size] == bits for rank in members)
        summed = torch.frombuffer(bytearray(bits), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        expected = sum(bodies.values(rank, size, dtype).float() for rank in contributors)
        tolerance = 1e-6 if dtype == torch.float32 else 0.05
        assert torch.allclose(summed.float(), torch.as_tensor(expected), atol=tolerance, rtol=tolerance)
        checked += 1
    assert checked >= 2 * len(groups)


ROW, ROWS = 600, (1, 2, 5, 64, 300)


@pytest.mark.parametrize(("num_gpu_ranks", "world_size"), [(3, 3), (3, 4), (4, 4), (2, 3)])
def test_batch_invariant_sums_of_a_row_do_not_depend_on_other_rows(num_gpu_ranks: int, world_size: int) -> None:
    results = run_ranks(bodies.sums_of_rows, world_size, num_gpu_ranks, ROW, ROWS, True)
    assert all(bits == results[0][0] for sums in results for bits in sums)
    if num_gpu_ranks == world_size:
        expected = torch.empty(ROW, dtype=torch.bfloat16)
        sum_in_order([bodies.values(rank, ROW, torch.bfloat16) for rank in range(world_size)], expected)
        assert results[0][0] == expected.view(torch.uint8).numpy().tobytes()


def test_sums_in_the_backends_own_order_depend_on_other_rows() -> None:
    """Or else the test above would show nothing."""
    results = run_ranks(bodies.sums_of_rows, 4, 4, ROW, ROWS, False)
    assert len(set(results[0])) > 1


def _of_first_members(results: list[dict[tuple[Ranks, Ranks, int], bytes]]) -> dict[tuple[Ranks, Ranks, int], bytes]:
    return {key: bits for rank, found in enumerate(results) for key, bits in found.items() if key[0][0] == rank}


def test_a_subgroup_whose_first_rank_computes_on_host_cores_sums_on_the_host_alone() -> None:
    results = run_ranks(bodies.sums_of_groups, 4, 2, GLOO, torch.float32, [(2, 3)])

    both = torch.frombuffer(bytearray(results[2][(2, 3), (2, 3), 577]), dtype=torch.float32)
    assert results[3][(2, 3), (2, 3), 577] == results[2][(2, 3), (2, 3), 577]
    assert torch.equal(both, bodies.values(2, 577, torch.float32) + bodies.values(3, 577, torch.float32))


@pytest.mark.parametrize(("num_gpu_ranks", "world_size"), [(1, 2), (2, 3), (2, 4), (3, 3)])
def test_sums_change_the_tensor_that_they_are_given_and_nothing_else(num_gpu_ranks: int, world_size: int) -> None:
    assert run_ranks(bodies.sums_in_place, world_size, num_gpu_ranks) == [[]] * world_size


@pytest.mark.parametrize(("num_gpu_ranks", "world_size"), [(1, 3), (2, 4), (3, 3)])
def test_what_ranks_that_do_not_contribute_hold_stays_out_of_the_sum(num_gpu_ranks: int, world_size: int) -> None:
    expected = [8.0 * (contributor + 1) for contributor in range(world_size)]

    assert run_ranks(bodies.stale_data, world_size, num_gpu_ranks) == [expected] * world_size


def test_gpu_ranks_broadcast_and_sum_among_themselves_without_any_cpu_rank() -> None:
    results = run_ranks(bodies.gpu_ranks_alone, 5, 3)

    assert [seen for seen, _ in results] == [[6.0, 5.0, 1.0]] * 3 + [[]] * 2
    assert all((moved.rounds, moved.messages, moved.published_bytes) == (0, 0, 0) for _, moved in results)


@BOTH
@pytest.mark.parametrize("num_gpu_ranks", [1, 2, 3])
def test_links_between_ranks_of_any_kind_carry_what_was_sent_in_order(num_gpu_ranks: int, kind: int) -> None:
    results = run_ranks(bodies.links_of_all_kinds, 3, num_gpu_ranks, kind)

    for rank, came in enumerate(results):
        to_all = [i for i in range(3) if i != rank]
        assert came == {number: [number, number + 0.5] for number in (*to_all, 10 + (rank - 1) % 3)}


@BOTH
@pytest.mark.parametrize("wait", bodies.WAITS)
def test_abort_ends_every_kind_of_wait_within_a_second_and_leaving_is_bounded(wait: str, kind: int) -> None:
    waited_s = run_ranks(bodies.abort_of_a_wait, 3, wait, kind)[0]

    assert 0 < waited_s < 1.0
    assert shm_left_over(segment_prefix()) == []


def test_epochs_with_other_numbers_of_gpu_ranks_follow_each_other_in_the_same_processes() -> None:
    assert run_ranks(bodies.epochs_of_other_sizes, 3) == [[6.0] * 4] * 3
    assert shm_left_over(segment_prefix()) == []


@BOTH
def test_plans_can_be_connected_one_after_another(kind: int) -> None:
    mixed = Shares(kv_heads=((4, 2, 2),), mlp_columns=((20, 20, 10),), vocab_rows=(200, 0, 0))
    helped = Shares(kv_heads=((4, 4, 0),), mlp_columns=((20, 20, 10),), vocab_rows=(200, 0, 0))
    layers = layers_on(0, 2, world_size=3)

    results = run_ranks(bodies.plans_one_after_another, 3, 2, kind, [mixed, helped, layers, mixed])

    assert results == [[6.0, 3.0, 1.0, 6.0], [6.0, 3.0, 2.0, 6.0], [6.0, 3.0, 3.0, 6.0]]
    assert shm_left_over(segment_prefix()) == []


@pytest.mark.parametrize(("num_gpu_ranks", "on_host", "on_devices"), [(0, (0, 1, 2, 3), ()), (2, (0, 2, 3), (0, 1))])
def test_measuring_tells_what_an_all_reduce_takes_where_ranks_meet(
    num_gpu_ranks: int, on_host: Ranks, on_devices: Ranks
) -> None:
    results = run_ranks(bodies.measured, 4, num_gpu_ranks, SHM)

    sizes = [4096, 65536, 1048576]
    assert [host for host, _, _ in results] == [sizes if rank in on_host else [] for rank in range(4)]
    assert [device for _, device, _ in results] == [sizes if rank in on_devices else [] for rank in range(4)]
    assert all(positive for _, _, positive in results)


@pytest.mark.parametrize(
    ("num_gpu_ranks", "world_size", "kind"),
    [(0, 2, SHM), (0, 3, TCP), (1, 3, SHM), (1, 3, TCP), (1, 3, GLOO), (2, 3, SHM), (3, 3, SHM), (1, 2, GLOO)],
)
def test_far_more_rows_than_a_link_holds_are_lent_and_returned(num_gpu_ranks: int, world_size: int, kind: int) -> None:
    num_rows = 3001
    factor = 0.5 + sum(range(1, world_size))

    sums, *_ = run_ranks(bodies.lent_rows, world_size, num_gpu_ranks, kind, num_rows)

    assert sums == [row * factor**4 for row in range(num_rows)]


def test_groups_are_left_devices_first_and_the_store_last() -> None:
    first, second, cpu_rank = run_ranks(bodies.teardown, 3)

    assert first == second == ["host exchange", *["device group"] * 2, "Gloo", "nothing is left"]
    assert cpu_rank == ["host exchange", "Gloo", "nothing is left"]


def test_gpu_ranks_without_a_backend_fail_on_every_rank_with_the_reason() -> None:
    asking, lacking, other = run_ranks(bodies.no_backend, 3)

    assert "rank 1 is one of 2 GPU ranks, and its platform names no backend" in lacking
    assert asking == other == "rank(s) [1] could not make device groups; the reason is in their logs"


LAYOUTS = {
    "CPU ranks on the MLP only": (
        2,
        Shares(kv_heads=((5, 3, 0, 0),), mlp_columns=((15, 15, 12, 8),), vocab_rows=(64, 64, 72, 0)),
    ),
    "CPU ranks with heads": (
        2,
        Shares(kv_heads=((3, 2, 1, 2),), mlp_columns=((15, 15, 12, 8),), vocab_rows=(64, 64, 72, 0)),
    ),
    "all MLP on CPU ranks": (
        2,
        Shares(kv_heads=((5, 3, 0, 0),), mlp_columns=((0, 0, 30, 20),), vocab_rows=(200, 0, 0, 0)),
    ),
    "one GPU, a CPU rank idle": (
        1,
        Shares(kv_heads=((8, 0, 0),), mlp_columns=((30, 0, 20),), vocab_rows=(100, 0, 100)),
    ),
    "GPU ranks only": (2, Shares(kv_heads=((5, 3, 0),), mlp_columns=((20, 30, 0),), vocab_rows=(100, 100, 0))),
    "layers over both kinds": (1, layers_on(0, 1, 2, world_size=3)),
    "a helped stage of GPU ranks, then one of CPU ranks": (
        2,
        Shares(
            kv_heads=((5, 3, 0, 0), (0, 0, 4, 4)),
            mlp_columns=((20, 20, 10, 0), (0, 0, 30, 20)),
            vocab_rows=(0, 0, 200, 0),
            embedding_rows=(128, 72, 0, 0),
        ),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decoder_over_gpu_and_cpu_ranks_equals_transformers(tmp_path: Path, layout: str) -> None:
    num_gpu_ranks, shares = LAYOUTS[layout]
    checkpoint = save_tiny("qwen3", tmp_path)
    world_size = len(shares.vocab_rows)

    over_shm, over_gloo = (
        run_ranks(bodies.decoded, world_size, num_gpu_ranks, kind, tmp_path, shares, TOKENS, AREA, 2)
        for kind in (SHM, GLOO)
    )

    rows = [torch.tensor(logits).view(len(TOKENS), -1) for logits, _ in over_shm]
    assert (torch.cat(rows, dim=1) - checkpoint.logits(TOKENS)).abs().max() <= 1e-4
    assert [logits for logits, _ in over_shm] == [logits for logits, _ in over_gloo]


@pytest.mark.parametrize("variant", ["mixtral", "gemma3"])
def test_helpers_serve_experts_and_models_that_norm_their_sums(tmp_path: Path, variant: str) -> None:
    checkpoint = save_tiny(variant, tmp_path)
    shares = Shares(
        kv_heads=((5, 3, 0, 0),), mlp_columns=((15, 15, 12, 8),), vocab_rows=(200, 0, 0, 0), experts=((1, 1, 3, 1),)
    )

    results = run_ranks(bodies.decoded, 4, 2, SHM, tmp_path, shares, TOKENS, AREA, 2)

    assert (torch.tensor(results[0][0]) - checkpoint.logits(TOKENS)).abs().max() <= 1e-4


def test_cpu_ranks_on_the_mlp_cost_the_leader_one_message_a_layer_and_other_gpu_ranks_nothing(tmp_path: Path) -> None:
    """The cost table for s = 1: of rows · hidden, one message out, and one back from each CPU rank; no round."""
    checkpoint = save_tiny("qwen3", tmp_path)
    num_gpu_ranks, shares = LAYOUTS["CPU ranks on the MLP only"]
    shares = Shares(kv_heads=shares.kv_heads, mlp_columns=shares.mlp_columns, vocab_rows=(100, 100, 0, 0))

    results = run_ranks(bodies.decoded, 4, num_gpu_ranks, SHM, tmp_path, shares, TOKENS[:31], 1 << 16, 1)

    config = checkpoint.reference.config
    for rank, (_, moved) in enumerate(results):
        for rows, step in zip((30, 1), moved, strict=True):
            messages = 0 if rank == 1 else config.num_hidden_layers
            assert (step.rounds, step.messages) == (0, messages)
            assert step.published_bytes == messages * rows * config.hidden_size * torch.float32.itemsize


def test_cpu_ranks_with_heads_cost_their_leader_two_rounds_a_layer_and_other_gpu_ranks_nothing(tmp_path: Path) -> None:
    """The cost table for s = 2: rows · hidden published twice a layer by the leader and by each CPU rank."""
    checkpoint = save_tiny("qwen3", tmp_path)
    shares = Shares(kv_heads=((3, 2, 1, 2),), mlp_columns=((15, 15, 12, 8),), vocab_rows=(200, 0, 0, 0))

    results = run_ranks(bodies.decoded, 4, 2, GLOO, tmp_path, shares, TOKENS[:31], AREA, 1)

    config = checkpoint.reference.config
    embedding = 1
    for rank, (_, moved) in enumerate(results):
        for rows, step in zip((30, 1), moved, strict=True):
            rounds = 0 if rank == 1 else 2 * config.num_hidden_layers + embedding
            assert (step.rounds, step.messages) == (rounds, 0)
            published = 0 if rank == 1 else 2 * config.num_hidden_layers + (embedding if rank == 0 else 0)
            assert step.published_bytes == published * rows * config.hidden_size * torch.float32.itemsize
