"""Attention's indices and scores lie in memory that lasts, and that no two steps at a time share."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from hetero_worker.attention.base import AttentionBackend, AttentionBatch, AttentionRule, DecodeRows
from hetero_worker.attention.kv_cache import LayerCache
from hetero_worker.attention.paged import paged_attention
from hetero_worker.attention.workspace import Workspace

pytestmark = pytest.mark.unit

ROWS, HEADS, KV_HEADS, HEAD_DIM, LENGTH, BLOCK = 16, 8, 4, 8, 300, 16
BLOCKS = -(-LENGTH // BLOCK) + 1
RULE = AttentionRule(scale=HEAD_DIM**-0.5)


def test_memory_is_taken_once_and_again_only_for_more() -> None:
    workspace = Workspace()
    first = workspace.take("scores", (100, 50), torch.float32)
    first.fill_(3.0)
    fewer = workspace.take("scores", (10, 50), torch.float32)
    assert fewer.data_ptr() == first.data_ptr()
    assert fewer.shape == (10, 50)
    assert workspace.take("scores", (101, 50), torch.float32).data_ptr() == first.data_ptr(), "there is some to spare"
    assert workspace.take("scores", (200, 50), torch.float32).data_ptr() != first.data_ptr()


def test_names_types_and_sections_have_memory_of_their_own() -> None:
    workspace = Workspace()
    taken = [
        workspace.take("a", (4,), torch.float32),
        workspace.take("b", (4,), torch.float32),
        workspace.take("a", (4,), torch.int32),
        workspace.section(1).take("a", (4,), torch.float32),
        workspace.section(2).take("a", (4,), torch.float32),
    ]
    assert len({tensor.data_ptr() for tensor in taken}) == len(taken)
    assert workspace.section(1).take("a", (4,), torch.float32).data_ptr() == taken[3].data_ptr()


def test_new_memory_is_finite_and_counts_are_counts() -> None:
    workspace = Workspace()
    assert not workspace.take("scores", (10_000,), torch.float32).any()
    assert workspace.counting(5).tolist() == [0, 1, 2, 3, 4]
    assert workspace.counting(9000)[-1] == 8999


def scene(dtype: torch.dtype, *, shorter: int = 0) -> tuple[AttentionBatch, LayerCache, tuple[torch.Tensor, ...]]:
    """Sequences of LENGTH tokens, less `shorter` of the last one, with a random cache."""
    torch.manual_seed(shorter)
    cache = LayerCache.allocate(
        num_blocks=ROWS * BLOCKS + 1, block_size=BLOCK, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype
    )
    for rows in (cache.keys, cache.values):
        rows[BLOCK:] = torch.randn(rows[BLOCK:].shape).to(dtype)
    tables = np.arange(1, ROWS * BLOCKS + 1, dtype=np.int32).reshape(ROWS, BLOCKS)
    lengths = np.full(ROWS, LENGTH, dtype=np.int32)
    lengths[-1] -= shorter
    places = tables[np.arange(ROWS), (lengths - 1) // BLOCK].astype(np.int64) * BLOCK + (lengths - 1) % BLOCK
    batch = AttentionBatch(torch.from_numpy(places), DecodeRows(lengths, tables), ())
    query = torch.randn(ROWS, HEADS, HEAD_DIM).to(dtype)
    key, value = torch.randn(2, ROWS, KV_HEADS, HEAD_DIM).to(dtype)
    return batch, cache, (query, key, value)


def attend(
    backend: AttentionBackend, scene: tuple[AttentionBatch, LayerCache, tuple[torch.Tensor, ...]]
) -> torch.Tensor:
    batch, cache, (query, key, value) = scene
    return backend.begin(batch).attend(query, key, value, cache, RULE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_steady_steps_indices_take_no_memory(dtype: torch.dtype) -> None:
    backend, given = paged_attention(dtype), scene(dtype, shorter=3)
    with torch.inference_mode():
        attend(backend, given)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            for _ in range(4):
                attend(backend, given)
    events = recorded.events()
    assert events is not None
    taken = sum(max(0, event.self_cpu_memory_usage) for event in events) / 4
    smallest_buffer = ROWS * LENGTH * KV_HEADS * HEAD_DIM * 2 if dtype == torch.bfloat16 else ROWS * LENGTH * HEADS * 4
    assert 0 < taken < smallest_buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_steps_at_a_time_do_not_disturb_each_other(dtype: torch.dtype) -> None:
    """As micro-batches might: each has its own workspace for as long as it lives."""
    scenes = [scene(dtype), scene(dtype, shorter=120)]
    expected = [attend(paged_attention(dtype), given) for given in scenes]
    backend = paged_attention(dtype)
    steps = [backend.begin(batch) for batch, _, _ in scenes]
    for _ in range(2):
        for step, (_, cache, (query, key, value)), right in zip(steps, scenes, expected, strict=True):
            assert torch.equal(step.attend(query, key, value, cache, RULE), right)


def test_released_memory_is_gone_and_the_next_step_takes_new() -> None:
    backend, given = paged_attention(torch.float32), scene(torch.float32)
    before = attend(backend, given)
    backend.release()
    assert torch.equal(attend(backend, given), before)
